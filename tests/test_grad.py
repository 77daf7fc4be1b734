"""Reductions where gradients are born, through the public functions."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fdp
from tests.models import (
    assert_replicas_bit_equal,
    batches,
    mlp_loss,
    mlp_params,
    one_device_run,
    relative_difference,
)

DATA = batches(6)
LAYERS, WIDTH = 4, 12


def scanned_params(seed=1):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "embed": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4,
        "blocks": {
            "kernel": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / 4,
            "bias": jnp.zeros((LAYERS, WIDTH)),
        },
        "shared": jnp.ones(WIDTH),
        "head": jax.random.normal(keys[2], (WIDTH, WIDTH)) / 4,
    }


def scanned_loss(params, batch):
    def block(x, layer):
        return jnp.tanh(x @ layer["kernel"] + layer["bias"]) * params["shared"], None

    x, _ = jax.lax.scan(block, batch["x"] @ params["embed"], params["blocks"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


@pytest.fixture
def small_loops(monkeypatch):
    """Loops of any size are worth it, so that small models are enough for the tests."""
    monkeypatch.setattr("fdp.birth.MIN_SLICE_BYTES", 0)


def test_scanned_model_reduces_inside_its_loop(mesh, small_loops):
    grad_fn = fdp.value_and_grad(scanned_loss, "data", in_loops=True)

    def local(params, batch):
        loss, grads = grad_fn(params, batch)
        return jax.lax.pmean(loss, "data"), grads

    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    )
    params = scanned_params()
    loss, grads = mapped(params, DATA[0])
    expected_loss, expected = jax.value_and_grad(scanned_loss)(params, DATA[0])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert relative_difference(grads, expected) <= 1e-5
    found = fdp.inspect.collectives(mapped.lower(params, DATA[0]).compile())
    in_loop = [one for one in found if one.in_loop]
    assert len(in_loop) == 1
    assert sum(one.nbytes for one in in_loop) == 4 * (WIDTH * WIDTH + WIDTH)


def grid():
    """Every via x microbatches x packing; every pair of them in the fast suite, the rest in the slow one."""
    packings = (fdp.pack.flat(), fdp.pack.leaves())
    for via, microbatches, pack in itertools.product(("shard_map", "pmap"), (1, 3), packings):
        fast = (via == "pmap") ^ (microbatches == 3) ^ (pack.name == "leaves")
        name = f"{via}-{microbatches}-{pack.name}"
        marks = [] if fast else [pytest.mark.slow]
        yield pytest.param(via, microbatches, pack, id=name, marks=marks)


@pytest.mark.parametrize(("via", "microbatches", "pack"), list(grid()))
def test_training_a_scanned_model(via, microbatches, pack, small_loops):
    optimizer = optax.sgd(0.1, momentum=0.9)
    data = batches(4, size=96)
    trainer = fdp.data_parallel(
        scanned_loss, optimizer, via=via, num_microbatches=microbatches, pack=pack, in_loops=True
    )
    state = trainer.init(scanned_params())
    assert "loop 0: 4 iterations, 2 gradients, 624 bytes an iteration" in trainer.explain(
        state, data[0]
    )
    state, _ = trainer.no_sync_step(state, data[0])
    for batch in data[1:]:
        state, _ = trainer.train_step(state, batch)

    def window(params, group):
        return sum(scanned_loss(params, batch) for batch in group)

    groups = [data[:2], data[2:3], data[3:]]
    expected, _, _ = one_device_run(window, optimizer, scanned_params(), groups)
    assert relative_difference(state.params, expected) <= 2e-6
    assert_replicas_bit_equal(state.params)


@pytest.mark.parametrize("schedule", [fdp.schedules.serialized(), fdp.schedules.fused()])
def test_schedules_that_wait_for_the_backward_stay_out_of_loops(schedule, small_loops):
    trainer = fdp.data_parallel(scanned_loss, optax.sgd(0.1), schedule=schedule, in_loops=True)
    state = trainer.init(scanned_params())
    found = fdp.inspect.collectives(trainer.lower(state, DATA[0]).compile())
    assert not any(one.in_loop for one in found)


def test_small_loops_are_left_alone():
    trainer = fdp.data_parallel(scanned_loss, optax.sgd(0.1), in_loops=True)
    state = trainer.init(scanned_params())
    text = trainer.explain(state, DATA[0])
    assert "an iteration makes 624 bytes of gradients, less than 262,144" in text


def test_plan_follows_readiness_not_names():
    trainer = fdp.data_parallel(mlp_loss, optax.sgd(0.1), bucket_bytes=700)
    plan = trainer.plan(trainer.init(mlp_params()), DATA[0])
    kernels = [path for b in plan.buckets for path in b.paths if path.endswith("kernel")]
    assert kernels == [f"layer_{i}/kernel" for i in (9, 7, 5, 3, 1)]


def test_j12_accumulated_value_and_grad_reduces_once(mesh):
    grad_fn = fdp.accumulate(fdp.value_and_grad(mlp_loss, "data", bucket_bytes=1300), 4)

    def local(params, batch):
        loss, grads = grad_fn(params, batch)
        return jax.lax.pmean(loss, "data"), grads

    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    )
    params = mlp_params()
    _, grads = mapped(params, DATA[0])
    assert relative_difference(grads, jax.grad(mlp_loss)(params, DATA[0])) <= 1e-6
    buckets = len(fdp.plan_buckets(params, bucket_bytes=1300).buckets)
    text = mapped.lower(params, DATA[0]).as_text()
    assert text.count("stablehlo.all_reduce") == buckets + 1  # and the loss


@pytest.mark.parametrize("check", [True, False])
def test_value_and_grad_with_aux_and_frozen_leaves(mesh, check):
    params = mlp_params()
    plan = fdp.plan_buckets(params, trainable=lambda path, leaf: "bias" not in path)

    def loss(params, batch):
        value = mlp_loss(params, batch)
        return value, {"twice": 2 * value}

    grad_fn = fdp.value_and_grad(loss, "data", plan=plan, has_aux=True)

    def local(params, batch):
        (value, aux), grads = grad_fn(params, batch)
        kernels = {name: layer["kernel"] for name, layer in grads.items()}
        biases = {name: layer["bias"] for name, layer in grads.items()}
        return jax.lax.pmean((value, aux), "data"), kernels, jax.tree.map(lambda x: x[None], biases)

    mapped = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P(), P("data")),
            check_vma=check,
        )
    )
    (value, aux), kernels, biases = mapped(params, DATA[0])
    assert float(aux["twice"]) == pytest.approx(2 * float(value))
    expected = jax.grad(mlp_loss)(params, DATA[0])
    assert relative_difference(kernels, {n: x["kernel"] for n, x in expected.items()}) <= 1e-6
    spread = np.ptp(np.asarray(biases["layer_9"]), axis=0).max()
    assert spread > 1e-4  # left out of the plan: each replica's own


def test_reduce_in_backward_uses_the_library_by_default(mesh):
    def local(params, batch):
        def loss(params):
            return mlp_loss(fdp.reduce_in_backward(params, "data", pack=fdp.pack.flat()), batch)

        return jax.grad(loss)(params)

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    params = mlp_params()
    assert relative_difference(mapped(params, DATA[0]), jax.grad(mlp_loss)(params, DATA[0])) <= 1e-6
    text = mapped.lower(params, DATA[0]).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
