"""NaN and Inf: all replicas skip together, counts say whose they were, float16 trains with somebody's loss scaling."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec as P

import fdp
from tests.models import assert_replicas_bit_equal, one_device_run, relative_difference

PARAMS = {"a": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": {"c": jnp.ones(2), "d": jnp.zeros(2)}}
VIAS = ["shard_map", "pmap"]


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["a"]) ** 2) + jnp.mean(
        (batch["z"] * params["b"]["c"] + params["b"]["d"] - 1) ** 2
    )


def make_batch(seed, poison=None):
    """16 examples, two a replica; ``poison``: (example, value) of what only ``b`` is trained on."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(2, 16, 3)).astype(np.float32)
    z = z[:, :2].copy()
    if poison is not None:
        z[poison[0], 0] = poison[1]
    return {"x": x, "z": z}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@functools.cache
def trainer_of(via):
    # One leaf a bucket.
    inner = optax.sgd(0.1, momentum=0.9)
    optimizer = optax.apply_if_finite(inner, max_consecutive_errors=5)
    return fdp.data_parallel(loss_fn, optimizer, via=via, bucket_bytes=1, count_nonfinite=True)


@pytest.mark.parametrize("via", VIAS)
def test_one_replicas_nan_makes_all_of_them_skip(via):
    trainer = trainer_of(via)
    state = trainer.init(PARAMS)
    good = [make_batch(seed) for seed in range(3)]
    state, _ = trainer.train_step(state, good[0])
    before = bits((state.params, state.opt_state.inner_state))
    state, info = trainer.train_step(state, make_batch(9, poison=(7, np.nan)))
    assert np.isnan(info.loss)
    assert bits((state.params, state.opt_state.inner_state)) == before
    assert int(state.opt_state.total_notfinite) == 1
    for batch in good[1:]:
        state, _ = trainer.train_step(state, batch)
    assert_replicas_bit_equal((state.params, state.opt_state))
    # As if the bad batch had never been.
    expected, _, _ = one_device_run(loss_fn, optax.sgd(0.1, momentum=0.9), PARAMS, good)
    assert relative_difference(state.params, expected) <= 1e-6


@pytest.mark.parametrize("via", VIAS)
def test_j32_counts_tell_replica_and_bucket(via):
    trainer = trainer_of(via)
    state = trainer.init(PARAMS)
    plan = trainer.plan(state, make_batch(0))
    assert sorted(bucket.paths for bucket in plan.buckets) == [("a",), ("b/c",), ("b/d",)]
    at = {bucket.paths[0]: k for k, bucket in enumerate(plan.buckets)}
    state, info = trainer.train_step(state, make_batch(0))
    assert (info.nonfinite.shape, info.nonfinite.dtype) == ((8, 3), jnp.int32)
    assert not info.nonfinite.any()
    assert fdp.describe_nonfinite(info.nonfinite, plan) == ""
    # Replica 3 has examples 6 and 7. One of its inputs is inf: so is one of two gradients of c, and one of d.
    state, info = trainer.train_step(state, make_batch(1, poison=(7, np.inf)))
    expected = np.zeros((8, 3), np.int32)
    expected[3, [at["b/c"], at["b/d"]]] = 1
    np.testing.assert_array_equal(info.nonfinite, expected)
    lines = fdp.describe_nonfinite(info.nonfinite, plan).splitlines()
    assert sorted(lines) == sorted(
        f"replica 3: 1 of 2 gradient values in bucket {at[path]} are NaN or Inf; its leaves: {path}"
        for path in ("b/c", "b/d")
    )
    # What was held back counts with the step that reduces it.
    state, info = trainer.no_sync_step(state, make_batch(2, poison=(0, np.nan)))
    assert info.nonfinite is None
    state, info = trainer.train_step(state, make_batch(3))
    expected = np.zeros((8, 3), np.int32)
    expected[0, [at["b/c"], at["b/d"]]] = 1
    np.testing.assert_array_equal(info.nonfinite, expected)


def test_counting_communicates_nothing():
    trainer = trainer_of("shard_map")
    text = trainer.lower(trainer.init(PARAMS), make_batch(0)).as_text()
    assert text.count("stablehlo.all_reduce") == 3 + 1


def test_counting_keeps_reductions_out_of_loops():
    """A loop that reduces what it makes leaves nothing to count."""
    shapes = {"w": jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)}
    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0])

    def explained(**options):
        trainer = fdp.data_parallel(loss, optax.sgd(0.1), in_loops=True, **options)
        return trainer.explain(trainer.init(shapes), batch)

    assert "w: in loop 0" in explained()
    assert "w: outside of loops" in explained(count_nonfinite=True)


# Half precision. Parameters are float32, the forward and the backward pass are float16.


def half_loss(params, batch):
    half = jax.tree.map(lambda x: x.astype(jnp.float16), (params, batch))
    return loss_fn(*half).astype(jnp.float32)


def test_p26_float16_with_flax_dynamic_scale(mesh):
    """The scale must see reduced gradients: ``reduce_in_backward`` is the place inside its ``value_and_grad``."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params, opt_state, scale, batch):
        def loss(params):
            return half_loss(fdp.reduce_in_backward(params, "data"), batch)

        scale, finite, value, grads = scale.value_and_grad(loss)(params)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, (params, opt_state))
        return *kept, scale, finite, jax.lax.pmean(value, "data")

    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P())
    )
    scale = DynamicScale(scale=jnp.float32(2.0**16), fin_steps=jnp.int32(0), growth_interval=3)
    params, opt_state, used, scales = PARAMS, optimizer.init(PARAMS), [], []
    # Only replica 5's share is so large that its gradients overflow: all must skip.
    data = [make_batch(seed) for seed in range(8)]
    for batch in data:
        batch["x"][10] *= 3
    for batch in data:
        scales.append(float(scale.scale))
        params, opt_state, scale, finite, _ = step(params, opt_state, scale, batch)
        if finite:
            used.append(batch)
    assert scales[1] == scales[0] / 2  # it did overflow
    assert 4 <= len(used) < len(data)
    assert_replicas_bit_equal((params, opt_state, scale))
    expected, _, _ = one_device_run(loss_fn, optimizer, PARAMS, used)
    assert relative_difference(params, expected) <= 5e-3


def test_p26_float16_with_a_fixed_scale_in_the_optimizer():
    """In a trainer: the loss is scaled, the optimizer sees the scaled gradient and takes the scale out again."""
    scale = 2.0**10
    sgd = optax.sgd(0.1, momentum=0.9)
    optimizer = optax.apply_if_finite(optax.chain(optax.scale(1 / scale), sgd), 100)
    trainer = fdp.data_parallel(lambda p, b: scale * half_loss(p, b), optimizer)
    state = trainer.init(PARAMS)
    data = [make_batch(seed) for seed in range(4)]
    huge = make_batch(5, poison=(3, 6e4))
    for batch in [*data[:2], huge, *data[2:]]:
        state, info = trainer.train_step(state, batch)
    assert int(state.opt_state.total_notfinite) == 1
    expected, _, losses = one_device_run(loss_fn, sgd, PARAMS, data)
    assert relative_difference(state.params, expected) <= 5e-3
    np.testing.assert_allclose(info.loss / scale, losses[-1], rtol=5e-3)
