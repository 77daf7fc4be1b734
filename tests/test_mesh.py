"""Meshes with more axes than the one that gradients are reduced over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fdp
from tests.models import batches, one_device_run, relative_difference

DATA = batches(4)


@pytest.fixture(scope="module")
def grid():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": jax.random.normal(keys[0], (12, 64)) / 4,
        "out": jax.random.normal(keys[1], (64, 12)) / 8,
        "scale": jnp.ones(12),
    }


SPECS = {"in": P(None, "model"), "out": P("model", None), "scale": P()}


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] * params["scale"] - batch["y"]) ** 2)


def sharded(mesh):
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, SPECS[name]))
        for name, leaf in params().items()
    }


@pytest.mark.parametrize("cap", [1, 2**30])
def test_a_sharded_model_stays_sharded_and_trains_alike(grid, cap):
    optimizer = optax.adam(1e-2)
    trainer = fdp.data_parallel(loss, optimizer, mesh=grid, bucket_bytes=cap)
    state = trainer.init(sharded(grid))
    text = trainer.lower(state, DATA[0]).compile().as_text()
    assert "all-gather" not in text
    for batch in DATA:
        state, _ = trainer.train_step(state, batch)
    for name, leaf in state.params.items():
        assert leaf.sharding.is_equivalent_to(NamedSharding(grid, SPECS[name]), leaf.ndim), name
        assert state.opt_state[0].mu[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
    expected, _, _ = one_device_run(loss, optimizer, params(), DATA)
    assert relative_difference(state.params, expected) <= 1e-5


def test_a_sharded_model_is_traced_once(grid):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss(params, batch)

    trainer = fdp.data_parallel(counted, optax.adam(1e-2), mesh=grid)
    state = trainer.init(sharded(grid))
    state, _ = trainer.train_step(state, DATA[0])
    first = len(traces)
    for batch in DATA[1:]:
        state, _ = trainer.train_step(state, batch)
    assert len(traces) == first


def test_no_sync_on_a_sharded_model(grid):
    trainer = fdp.data_parallel(loss, optax.sgd(0.1), mesh=grid)
    state = trainer.init(sharded(grid))
    state, _ = trainer.no_sync_step(state, DATA[0])
    state, _ = trainer.train_step(state, DATA[1])

    def both(params, pair):
        return loss(params, pair[0]) + loss(params, pair[1])

    expected, _, _ = one_device_run(both, optax.sgd(0.1), params(), [DATA[:2]])
    assert relative_difference(state.params, expected) <= 1e-6


def test_flat_packing_would_gather_and_says_so(grid):
    trainer = fdp.data_parallel(loss, optax.sgd(0.1), mesh=grid, pack=fdp.pack.flat())
    with pytest.raises(ValueError, match=r"flat packing.*axis 'model'.*fdp\.pack\.leaves\(\)"):
        trainer.train_step(trainer.init(sharded(grid)), DATA[0])


def test_pmap_needs_a_mesh_of_one_axis(grid):
    with pytest.raises(ValueError, match=r'expected a mesh of one axis for via="pmap"'):
        fdp.data_parallel(loss, optax.sgd(0.1), mesh=grid, via="pmap")
