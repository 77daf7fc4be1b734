"""What torch's DistributedDataParallel did (``oracle_torch/recorded.json``), and its two models again in JAX."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import fdp

RECORDED = json.loads((Path(__file__).parent / "oracle_torch" / "recorded.json").read_text())
RATE = 2**-7
WORLDS = [2, 4]


def departs(name):
    """Marks a test that asserts a difference between torch and fdp, with its name in ``docs/torch_departures.md``."""
    assert name

    def unchanged(test):
        return test

    return unchanged


def recorded(scenario, world=2):
    """What each rank returned."""
    return RECORDED[scenario][str(world)]


def trainer(world, loss, optimizer, **options):
    mesh = Mesh(np.array(jax.devices()[:world]), ("data",))
    return fdp.data_parallel(loss, optimizer, mesh=mesh, **options)


def close(got, want, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=tolerance, atol=tolerance)


def arrays(tree, dtype=np.float32):
    """Recorded nested lists, by name, as arrays."""
    return {name: np.array(x, dtype) for name, x in tree.items()}


def listed(leaves):
    """Recorded leaves, by place, as arrays."""
    return [np.array(x) for x in leaves]


# The model "Plane" of the scenarios, and its data.


def plane():
    return {
        "w": jnp.arange(12.0).reshape(3, 4) % 5 - 2,
        "b": jnp.array([1.0, -1.0, 2.0, 0.0]),
        "v": jnp.arange(8.0).reshape(4, 2) % 3 - 1,
    }


def examples(world, step=0):
    """``[world * 2, 3]``: two examples of each rank."""
    start = 6 * (np.arange(world) + 10 * step)
    return ((np.arange(6.0) + start[:, None]) * 5 % 7 - 3).reshape(-1, 3).astype(np.float32)


def errors(params, x):
    y = jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]
    return (y**2).sum(1)


def plane_loss(params, x):
    return errors(params, x).mean()


def moved(before, state, rate=1.0):
    """The gradient that one step of plain SGD has applied."""
    return jax.tree.map(lambda p, q: np.asarray((p - q) / rate), before, state.params)


# The model "Leaves" of the scenarios: a sum of parameters times a coefficient of the rank's own.


def leaves_loss(params, batch):
    nothing = fdp.varying(jnp.zeros(()), "data")
    used = lax.cond(batch["use"][0], jnp.sum, lambda _: nothing, params[1])
    return batch["by"][0] * (params[0].sum() + used + params[2].sum())


def three():
    return [jnp.ones(2) for _ in range(3)]


def coefficients(world, use):
    return {"by": 4.0 * (np.arange(world, dtype=np.float32) + 1), "use": np.array(use)}
