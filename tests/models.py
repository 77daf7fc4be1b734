"""Small models, data and one-device oracles that the tests share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH = 5, 12


def mlp_params(seed=0):
    """Layers of one width with dict keys whose string order is not their depth order."""
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    return {
        f"layer_{2 * i + 1}": {
            "kernel": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5,
            "bias": jnp.zeros(WIDTH),
        }
        for i, key in enumerate(keys)
    }


def mlp_apply(params, x):
    for i in range(LAYERS):
        layer = params[f"layer_{2 * i + 1}"]
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def mlp_loss(params, batch):
    return jnp.mean((mlp_apply(params, batch["x"]) - batch["y"]) ** 2)


def batches(count, size=64, seed=0):
    rng = np.random.RandomState(seed)
    return [
        {
            "x": rng.randn(size, WIDTH).astype(np.float32),
            "y": np.tanh(rng.randn(size, WIDTH)).astype(np.float32),
        }
        for _ in range(count)
    ]


def one_device_run(loss_fn, optimizer, params, data):
    """The oracle: plain optax on one device, on the joined batch. Returns (params, opt_state, losses)."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for batch in data:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return params, opt_state, losses


def run(trainer, data, params=None, **init):
    """State and losses after a step on each batch."""
    state = trainer.init(mlp_params() if params is None else params, **init)
    losses = []
    for batch in data:
        state, info = trainer.train_step(state, batch)
        losses.append(float(info.loss))
    return state, losses


def relative_difference(got, expected):
    """Largest over leaves of |got - expected| / |expected|, in the 2-norm and float64."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)))
    return worst


def assert_replicas_bit_equal(tree):
    for leaf in jax.tree.leaves(tree):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == len(leaf.sharding.device_set)
        for shard in shards[1:]:
            assert shard.dtype == shards[0].dtype
            assert shard.tobytes() == shards[0].tobytes()
