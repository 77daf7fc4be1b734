"""Microbatches without sync: k of them equal one batch k times as large, and nothing communicates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from replicas import on_replicas

import fdp
from fdp.accumulate import accumulate_with_carry, split_batch

RNG = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32),
    "b": jnp.zeros(2),
    "unused": jnp.ones(4),
}
BATCH = {
    "x": jnp.asarray(RNG.normal(size=(16, 3)), jnp.float32),
    "y": [jnp.asarray(RNG.normal(size=(16, 2)), jnp.float32)],
}


def loss_fn(params, batch):
    """Mean over examples."""
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"][0]) ** 2)


def close(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), got, want)


@pytest.mark.parametrize("k", [1, 2, 4, 16])
def test_j12_k_microbatches_are_one_batch_k_times_as_large(k):
    value_and_grad = jax.value_and_grad(loss_fn)
    want = value_and_grad(PARAMS, BATCH)
    got = jax.jit(fdp.accumulate(value_and_grad, k))(PARAMS, BATCH)
    close(got, want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_p24_sum_adds_values_and_gradients():
    def total(params, batch):
        return 32 * loss_fn(params, batch)  # 16 examples of 2 outputs: the sum over the whole batch

    def partial(params, batch):
        return 8 * loss_fn(params, batch)

    got = fdp.accumulate(jax.value_and_grad(partial), 4, op="sum")(PARAMS, BATCH)
    close(got, jax.value_and_grad(total)(PARAMS, BATCH))


@pytest.mark.parametrize("k", [1, 4])
def test_aux_comes_back_stacked_in_order(k):
    def loss(w, batch):
        aux = {
            "first": batch[0],
            "flag": batch > 3,
            "number": 7,
            "nothing": None,
            "key": jax.random.key(3),
        }
        return jnp.mean(w * batch), aux

    batch = jnp.arange(8.0)
    (value, aux), grad = fdp.accumulate(jax.value_and_grad(loss, has_aux=True), k, has_aux=True)(
        2.0, batch
    )
    assert (float(value), float(grad)) == (7.0, 3.5)
    np.testing.assert_array_equal(aux["first"], np.arange(0, 8, 8 // k))
    np.testing.assert_array_equal(aux["flag"], np.arange(8).reshape(k, -1) > 3)
    np.testing.assert_array_equal(aux["number"], np.full(k, 7))
    assert aux["key"].shape == (k,)
    assert aux["nothing"] is None


@pytest.mark.parametrize("k", [1, 4])
def test_p71_every_microbatch_has_its_own_key(k):
    def loss(w, batch, rng, scale):
        return jnp.mean(w * batch) * scale, jax.random.key_data(rng)

    key = jax.random.key(5)
    accumulated = fdp.accumulate(jax.value_and_grad(loss, has_aux=True), k, has_aux=True)
    (value, keys), _ = accumulated(2.0, jnp.arange(8.0), rng=key, scale=10.0)
    assert float(value) == 70.0
    want = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(k)]
    np.testing.assert_array_equal(keys, want)


def test_no_key_is_invented():
    def loss(w, batch, rng=None):
        assert rng is None
        return jnp.mean(w * batch)

    fdp.accumulate(jax.value_and_grad(loss), 2)(2.0, jnp.arange(8.0))
    fdp.accumulate(jax.value_and_grad(loss), 2)(2.0, jnp.arange(8.0), rng=None)


@pytest.mark.parametrize(("dtype", "want"), [(None, 256.0), (jnp.float32, 264.0)])
def test_sums_are_made_in_the_dtype_asked_for(dtype, want):
    # In bfloat16 256 + 1 is 256: eight terms of 1 are lost, unless the sum is wider.
    batch = jnp.asarray([256.0] + [1.0] * 8, jnp.bfloat16)

    def grad_fn(w, x):
        return jnp.float32(0), x[0]

    value, grad = fdp.accumulate(grad_fn, 9, op="sum", dtype=dtype)(None, batch)
    assert (float(grad), grad.dtype, value.dtype) == (want, jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_values_are_added_up_in_32_bits(dtype, op):
    # In bfloat16 a sum of ones stands still at 256; in float16 a sum of 600s overflows before it is divided.
    one = 600.0 if dtype == jnp.float16 and op == "mean" else 1.0
    batch = jnp.full((600,), one, dtype)
    value, _ = fdp.accumulate(lambda w, x: (x[0], jnp.float32(0)), 600, op=op)(None, batch)
    assert (float(value), value.dtype) == (one if op == "mean" else 600.0, dtype)


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_p33_complex_gradients_keep_both_parts(dtype):
    batch = jnp.asarray([1 + 2j, 3 - 4j], jnp.complex64)
    _, grad = fdp.accumulate(lambda w, x: (jnp.float32(0), x[0]), 2, dtype=dtype)(None, batch)
    assert (complex(grad), grad.dtype) == (2 - 1j, jnp.complex64)


@pytest.mark.parametrize("k", [1, 2])
def test_p40_integer_leaves_keep_their_float0(k):
    params = {"w": jnp.float32(2.0), "steps": jnp.arange(3)}
    value_and_grad = jax.value_and_grad(lambda p, x: jnp.mean((p["w"] * x) ** 2), allow_int=True)
    value, grads = fdp.accumulate(value_and_grad, k)(params, jnp.arange(8.0))
    assert (float(value), float(grads["w"])) == (70.0, 70.0)
    assert grads["steps"].dtype == jax.dtypes.float0


def test_gradients_may_have_gaps():
    grads = fdp.accumulate(lambda w, x: (jnp.mean(x), {"frozen": None, "w": x[0]}), 2)(
        None, jnp.arange(4.0)
    )[1]
    assert grads == {"frozen": None, "w": 1.0}


def test_keys_and_integers_may_be_in_the_batch():
    batch = {"rng": jax.random.split(jax.random.key(0), 4), "ids": jnp.arange(8)}

    def loss(w, batch):
        return w * (jnp.sum(batch["ids"]) + 0 * jax.random.normal(batch["rng"][0]))

    value, _ = fdp.accumulate(jax.value_and_grad(loss), 4, op="sum")(1.0, batch)
    assert float(value) == 28.0
    assert split_batch(batch, 4)["rng"].shape == (4, 1)


def test_the_function_is_traced_once_and_the_last_microbatch_is_outside_the_loop():
    traces = []

    def loss(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    jaxpr = jax.make_jaxpr(fdp.accumulate(jax.value_and_grad(loss), 4))(PARAMS, BATCH)
    assert len(traces) == 1
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert loop.params["length"] == 3
    # The last microbatch's matmuls come after the loop, where their gradients can be reduced one by one.
    assert "dot_general" in str(jaxpr.eqns[names.index("scan") + 1 :])


def test_state_goes_from_one_microbatch_to_the_next():
    def grad_fn(params, batch, carry, rng):
        return (
            jnp.mean(batch),
            carry["seen"],
            {"seen": carry["seen"] + batch.size, "flag": carry["flag"]},
        ), params

    run = accumulate_with_carry(grad_fn, 4, op="mean", dtype=None)
    (_, aux, carry), _ = run(jnp.ones(2), jnp.arange(8.0), {"seen": 10, "flag": True}, None)
    np.testing.assert_array_equal(aux, [10, 12, 14, 16])
    assert (int(carry["seen"]), bool(carry["flag"])) == (18, True)


@pytest.mark.parametrize("where", ["vmap", "pmap", "shard_map checked", "shard_map unchecked"])
@pytest.mark.parametrize("k", [1, 4])
def test_replicas_times_microbatches_are_the_joined_batch(where, k, mesh):
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x + 1]), BATCH)  # 32 = 8 replicas of 4

    def replica(batch):
        accumulated = fdp.accumulate(jax.value_and_grad(loss_fn), k)
        return fdp.reduce_gradients(accumulated(fdp.varying(PARAMS, "data"), batch)[1], "data")

    split = jax.tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), batch)
    close(on_replicas(replica, where, mesh)(split), jax.grad(loss_fn)(PARAMS, batch))


def test_p16_p17_the_number_of_all_reduces_does_not_depend_on_k(mesh):
    plan = fdp.plan_buckets(PARAMS, bucket_bytes=16)
    assert len(plan.buckets) == 3

    def replica(k):
        def fn(batch):
            accumulated = fdp.accumulate(jax.value_and_grad(loss_fn), k)
            grads = accumulated(fdp.varying(PARAMS, "data"), batch)[1]
            return fdp.reduce_gradients(grads, "data", plan=plan, pack=fdp.pack.flat())

        return fn

    batch = jax.tree.map(lambda x: jnp.concatenate([x] * 4).reshape(8, 8, *x.shape[1:]), BATCH)
    for k in (1, 2, 8):
        text = on_replicas(replica(k), "shard_map checked", mesh).lower(batch).as_text()
        assert len(re.findall(r"stablehlo\.all_reduce", text)) == 3
        assert text.count("stablehlo.while") == (k > 1)


def test_replicated_state_and_aux_under_the_check(mesh):
    """What starts equal on all replicas and differs after a microbatch gets one type throughout the loop."""

    def replica(batch):
        def grad_fn(params, batch, carry, rng):
            new = {"mean": jnp.mean(batch), "steps": carry["steps"] + 1}
            return (jnp.mean(batch * params), jnp.max(batch), new), jnp.mean(batch)

        run = accumulate_with_carry(grad_fn, 2, op="mean", dtype=jnp.float32)
        carry = {"mean": jnp.zeros(()), "steps": jnp.zeros((), jnp.int32)}
        (_, aux, carry), _ = run(jnp.ones(()), batch[0], carry, None)
        return aux[None], carry["mean"][None], carry["steps"]

    mapped = jax.shard_map(
        replica, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P("data"), P())
    )
    aux, mean, steps = jax.jit(mapped)(jnp.arange(32.0).reshape(8, 4))
    np.testing.assert_array_equal(aux, np.arange(32).reshape(8, 2, 2).max(-1))
    np.testing.assert_array_equal(mean, np.arange(32).reshape(8, 4)[:, 2:].mean(-1))
    assert steps == 2
