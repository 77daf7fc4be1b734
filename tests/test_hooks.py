"""``compress``: what crosses the axis in another type, against sums in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from replicas import bits, gradients, on_replicas

import fdp
from fdp import hooks, pack
from fdp.hooks import CommHook
from fdp.plan import plan_buckets
from tests.models import batches, mlp_loss, mlp_params, one_device_run, relative_difference

REPLICAS = 8
# Half a unit in the last place, relative.
UNIT = {jnp.bfloat16: 2.0**-9, jnp.float16: 2.0**-11, jnp.float32: 2.0**-24}


def reduced(grads, hook, *, op="mean", where="vmap", mesh=None, **options):
    def fn(g):
        return fdp.reduce_gradients(g, "data", hook=hook, op=op, **options)

    return on_replicas(fn, where, mesh)(grads)


def exact(x, op):
    wide = np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)
    return wide.mean(0) if op == "mean" else wide.sum(0)


def recorder(seen):
    """An all-reduce that keeps what it was given."""
    inner = hooks.all_reduce()

    def reduce(buffers, state, view):
        seen.append((view, [(x.shape, x.dtype) for x in buffers]))
        return inner.reduce(buffers, state, view)

    return CommHook("recorder", inner.init, reduce)


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("wire", UNIT, ids=lambda d: d.__name__)
def test_error_is_within_the_wires_rounding(wire, op):
    """Every term is rounded once, every partial sum at most once, the result once more to its own type."""
    grads = gradients()
    got = reduced(grads, hooks.compress(wire), op=op)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(got), strict=True):
        size = exact(jnp.abs(x), op)
        own = jnp.finfo(x.dtype).eps
        bound = size * (REPLICAS * UNIT[wire] * 1.01 + own)
        assert np.all(np.abs(np.asarray(y, np.complex128) - exact(x, op)) <= bound)
        assert y.dtype == x.dtype


@pytest.mark.parametrize(
    ("wire", "value", "rounded"),
    [
        # One more digit than the wire has: it must be gone, on every backend.
        (jnp.bfloat16, 1 + 2.0**-9, 1.0),
        (jnp.bfloat16, 1 + 2.0**-7, 1 + 2.0**-7),
        (jnp.float16, 1 + 2.0**-12, 1.0),
        (jnp.float16, 1 + 2.0**-10, 1 + 2.0**-10),
        (jnp.float32, 1 + 2.0**-23, 1 + 2.0**-23),
    ],
)
@pytest.mark.parametrize("where", ["vmap", "shard_map checked"])
def test_values_have_the_wires_digits(mesh, wire, value, rounded, where):
    grads = jnp.full((REPLICAS, 3), value, jnp.float32)
    got = reduced(grads, hooks.compress(wire), where=where, mesh=mesh)
    np.testing.assert_array_equal(got, np.full(3, rounded, np.float32))


@pytest.mark.parametrize("where", ["vmap", "pmap", "shard_map checked", "shard_map unchecked"])
def test_a_wider_wire_sums_more_exactly(mesh, where):
    """256 + 7 x 1: bfloat16 has no odd number above 256, so that ones added one by one would all be lost."""
    grads = jnp.ones((REPLICAS, 2), jnp.bfloat16).at[0].set(256)
    got = reduced(grads, hooks.compress(jnp.float32), op="sum", where=where, mesh=mesh)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), [264, 264])  # 263, to even


def test_p26_a_mean_is_divided_before_the_cast():
    """What float16 can hold is the mean, not the gradient: torch's hook casts first and gets inf."""
    grads = jnp.zeros((REPLICAS, 2), jnp.float32).at[3].set(jnp.array([2e5, -2e5]))
    got = reduced(grads, hooks.compress(jnp.float16))
    np.testing.assert_allclose(got, [2.5e4, -2.5e4], rtol=2**-11)
    # A sum has nobody to divide it; and what the mean cannot hold is inf, not a wrong number.
    assert np.all(np.isinf(reduced(grads, hooks.compress(jnp.float16), op="sum")))
    assert np.all(np.isinf(reduced(grads * REPLICAS, hooks.compress(jnp.float16))))


def test_predivide_splits_the_division():
    """Gradients that a division by all replicas would push below what float16 holds."""
    tiny = float(jnp.finfo(jnp.float16).smallest_subnormal)
    grads = jnp.full((REPLICAS, 1), tiny, jnp.float32)
    assert reduced(grads, hooks.compress(jnp.float16))[0] == 0
    assert reduced(grads, hooks.compress(jnp.float16, predivide=1.0))[0] == tiny


@pytest.mark.parametrize("packing", [pack.flat(), pack.leaves()], ids=lambda p: p.name)
def test_the_hook_inside_sees_the_wire(packing):
    grads = [jnp.ones((REPLICAS, 3)), jnp.ones((REPLICAS, 2, 2))]
    seen = []
    reduced(grads, hooks.compress(jnp.bfloat16, hook=recorder(seen)), pack=packing)
    ((view, buffers),) = seen
    assert (view.op, view.axis_size) == ("sum", REPLICAS)
    assert (view.bucket.dtype, view.bucket.nbytes) == (jnp.bfloat16, 14)
    assert view.bucket.shapes == ((2, 2), (3,))
    shapes = [(7,)] if packing.name == "flat" else [(2, 2), (3,)]
    assert buffers == [(shape, jnp.bfloat16) for shape in shapes]


def test_a_bucket_of_the_wires_type_is_not_cast():
    hook = hooks.compress(jnp.bfloat16)

    def casts(dtype):
        bucket = plan_buckets(jnp.ones(3, dtype)).buckets[0]
        view = hooks.BucketView(bucket, 0, True, "data", REPLICAS, "mean")
        jaxpr = jax.make_jaxpr(lambda x: hook.reduce((x,), (), view), axis_env=[("data", 8)])
        return str(jaxpr(jnp.ones(3, dtype))).count("convert_element_type")

    assert casts(jnp.bfloat16) == 0
    assert casts(jnp.float32) == 2


@pytest.mark.parametrize("packing", [pack.flat(), pack.leaves()], ids=lambda p: p.name)
def test_p33_complex_gradients_are_pairs_on_the_wire(packing):
    rng = np.random.default_rng(1)
    grads = [
        jnp.asarray(rng.normal(size=(REPLICAS, *s)) + 1j * rng.normal(size=(REPLICAS, *s)), c)
        for s, c in [((3,), jnp.complex64), ((), jnp.complex64), ((2, 2), jnp.complex64)]
    ]
    seen = []
    hook = hooks.compress(jnp.float32, hook=recorder(seen))
    got = reduced(grads, hook, pack=packing)
    ((view, buffers),) = seen
    assert view.bucket.shapes == ((2, 2, 2), (2,), (3, 2))
    assert {dtype for _, dtype in buffers} == {np.dtype(np.float32)}
    for x, y in zip(grads, got, strict=True):
        np.testing.assert_allclose(y, exact(x, "mean"), rtol=1e-6)


def test_a_scale_per_leaf_sees_the_right_leaves():
    """A hook that cuts a flat buffer by ``bucket.sizes`` finds its leaves where the bucket says, complex or not."""
    grads = [jnp.full((REPLICAS, n), n * (1 + 1j), jnp.complex64) for n in (1, 2, 3)]

    def reduce(buffers, state, view):
        (flat,) = buffers
        start, out = 0, []
        for size in view.bucket.sizes:
            out.append(jnp.broadcast_to(jnp.max(flat[start : start + size]), (size,)))
            start += size
        assert start == flat.size
        return (lax.pmax(jnp.concatenate(out), view.axis_name),), state

    hook = hooks.compress(jnp.float32, hook=CommHook("per leaf", lambda bucket: (), reduce))
    got = reduced(grads, hook, op="sum", pack=pack.flat())
    assert bits(got) == bits([x[0] for x in grads])


def test_compress_around_compress_is_the_narrower():
    grads = jnp.full((REPLICAS, 2), 1 + 2.0**-9, jnp.float32)
    inner = hooks.compress(jnp.bfloat16)
    np.testing.assert_array_equal(reduced(grads, hooks.compress(jnp.float32, hook=inner)), [1, 1])


def test_nan_and_inf_stay_where_they_are():
    grads = jnp.ones((REPLICAS, 4)).at[2, 1].set(jnp.nan).at[5, 2].set(jnp.inf)
    got = np.asarray(reduced(grads, hooks.compress(jnp.bfloat16)))
    assert (got[0], got[3]) == (1, 1)
    assert np.isnan(got[1])
    assert np.isinf(got[2])


def test_all_replicas_get_the_same_bits(mesh):
    grads = gradients(3)
    mapped = jax.vmap(
        lambda g: fdp.reduce_gradients(g, "data", hook=hooks.compress(jnp.float16)),
        axis_name="data",
    )
    for leaf in jax.tree.leaves(jax.jit(mapped)(grads)):
        assert all(bits(leaf[0]) == bits(leaf[r]) for r in range(1, REPLICAS))


def test_inside_a_loop_as_after_it(monkeypatch, mesh):
    """A scanned model is reduced slice by slice, in the loop: every slice goes through the hook."""
    monkeypatch.setattr("fdp.birth.MIN_SLICE_BYTES", 0)
    seen = []

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean(lax.scan(layer, x, params)[0])

    def grad(hook):
        def local(params, x):
            value_and_grad = fdp.value_and_grad(loss, "data", in_loops=True, hook=hook)
            return value_and_grad(params, x)[1]

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(local, mesh=mesh, **specs))(params, x)

    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
    got = grad(hooks.compress(jnp.bfloat16, hook=recorder(seen)))
    assert {dtype for _, buffers in seen for _, dtype in buffers} == {np.dtype(jnp.bfloat16)}
    assert {math.prod(shape) for _, buffers in seen for shape, _ in buffers} == {16}
    exactly = jax.grad(loss)(params, x)
    share = np.abs([jax.grad(loss)(params, x[2 * r : 2 * r + 2]) for r in range(8)]).mean(0)
    bound = share * REPLICAS * UNIT[jnp.bfloat16] * 1.01 + 1e-6
    assert np.all(np.abs(got - exactly) <= bound)
    assert not np.allclose(got, exactly, rtol=1e-6)


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_training_with_a_narrow_wire_stays_near_one_device(via):
    """Ten steps; the difference is that of eight bits, far above float32's and far below the parameters' change."""
    optimizer, data = optax.sgd(0.1, momentum=0.9), batches(10)
    want, _, losses = one_device_run(mlp_loss, optimizer, mlp_params(), data)
    plan = plan_buckets(mlp_params(), bucket_bytes=1300)
    trainer = fdp.data_parallel(
        mlp_loss,
        optimizer,
        via=via,
        plan=plan,
        num_microbatches=2,
        hook=hooks.compress(jnp.bfloat16),
    )
    state, got = trainer.init(mlp_params()), []
    for batch in data:
        state, info = trainer.train_step(state, batch)
        got.append(float(info.loss))
    assert 1e-6 < relative_difference(state.params, want) < 2e-2
    np.testing.assert_allclose(got, losses, rtol=1e-3)
