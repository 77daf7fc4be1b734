"""``reduce_gradients`` where people call it: the numbers. Its refusals and its program: ``test_reduce_edges``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from replicas import WHERE, assert_close, bits, gradients, on_replicas

import fdp
from fdp import hooks, pack, schedules
from fdp.plan import plan_buckets

SCHEDULES = [
    schedules.ordered(),
    schedules.ordered(2),
    schedules.serialized(),
    schedules.fused(),
    schedules.unordered(),
]


@pytest.mark.parametrize("where", WHERE)
class TestDropIn:
    @pytest.mark.parametrize("packing", [None, pack.leaves()], ids=["auto", "leaves"])
    def test_mean_is_pmean(self, where, packing, mesh):
        grads = gradients()
        ours = on_replicas(lambda g: fdp.reduce_gradients(g, "data", pack=packing), where, mesh)
        theirs = on_replicas(lambda g: lax.pmean(g, "data"), where, mesh)
        assert_close(ours(grads), theirs(grads))

    def test_j10_sum_is_psum(self, where, mesh):
        grads = gradients()
        ours = on_replicas(lambda g: fdp.reduce_gradients(g, "data", op="sum"), where, mesh)
        theirs = on_replicas(lambda g: lax.psum(g, "data"), where, mesh)
        assert_close(ours(grads), theirs(grads), rtol=5e-6)

    def test_p26_float16_mean_of_large_gradients_is_finite(self, where, mesh):
        mesh = Mesh(mesh.devices[:4], ("data",))
        large = jnp.full((4, 3), 3e4, jnp.float16)
        ours = on_replicas(lambda g: fdp.reduce_gradients(g, "data"), where, mesh)(large)
        np.testing.assert_array_equal(ours, np.full(3, 3e4, np.float16))
        summed = on_replicas(lambda g: fdp.reduce_gradients(g, "data", op="sum"), where, mesh)
        assert np.isinf(summed(large)).all()

    def test_j1_local_loss_then_reduce_is_the_big_batch(self, where, mesh):
        # The gradient of a psum'd loss differs between pmap and shard_map; a local loss, reduced, does not.
        w, x = (
            jnp.arange(3.0),
            jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 3)), jnp.float32),
        )

        def loss(w, x):
            return jnp.mean((x @ w) ** 2)

        def replica(x):
            return fdp.reduce_gradients(jax.grad(loss)(fdp.varying(w, "data"), x), "data")

        got = on_replicas(replica, where, mesh)(x)
        np.testing.assert_allclose(got, jax.grad(loss)(w, x.reshape(32, 3)), rtol=1e-5)

    def test_numpy_gradients_and_trees_of_one_leaf(self, where, mesh):
        # lax.pmean takes both; NumPy's float64 is float32 to JAX. (The check refuses what does not vary.)
        if where == "shard_map checked":
            return
        ours = on_replicas(
            lambda g: fdp.reduce_gradients({"c": np.ones(3), "g": g}, "data"), where, mesh
        )
        result = ours(jnp.arange(8.0))
        np.testing.assert_array_equal(result["c"], np.ones(3, np.float32))
        assert result["g"] == 3.5

    def test_p9_a_tied_weight_is_one_leaf_and_counts_every_use(self, where, mesh):
        # Two leaves that hold one array are two parameters: each gets the gradient of its own uses.
        x = jnp.arange(8.0)

        def grads_of(params, loss):
            grads = jax.grad(loss)(fdp.varying(params, "data"))
            return fdp.reduce_gradients(grads, "data")

        shared = jnp.float32(3.0)
        tied = on_replicas(
            lambda x: grads_of({"e": shared}, lambda p: p["e"] * x + p["e"] ** 2), where, mesh
        )
        two = on_replicas(
            lambda x: grads_of({"a": shared, "b": shared}, lambda p: p["a"] * x + p["b"] ** 2),
            where,
            mesh,
        )
        assert tied(x) == {"e": 3.5 + 6}
        assert two(x) == {"a": 3.5, "b": 6}


@pytest.mark.parametrize("checked", [True, False])
def test_a_tuple_of_axes(mesh, checked):
    grid = Mesh(mesh.devices.reshape(2, 4), ("host", "chip"))
    grads = gradients()
    reduced = jax.jit(
        jax.shard_map(
            lambda g: fdp.reduce_gradients(jax.tree.map(lambda x: x[0], g), ("host", "chip")),
            mesh=grid,
            in_specs=P(("host", "chip")),
            out_specs=P(),
            check_vma=checked,
        )
    )(grads)
    assert_close(reduced, on_replicas(lambda g: lax.pmean(g, "data"), "vmap", None)(grads))


def test_a_tuple_of_axes_under_vmap():
    x = jnp.arange(6.0).reshape(2, 3)
    inner = jax.vmap(lambda g: fdp.reduce_gradients(g, ("a", "b")), axis_name="a")
    np.testing.assert_array_equal(jax.vmap(inner, axis_name="b")(x), np.full((2, 3), 2.5))


def test_vmap_inside_shard_map_reduces_over_either_axis(mesh):
    # Unchecked: with the check on, JAX 0.10 to 0.12 fail in lax.psum over the inner axis, and so in lax.pmean.
    def replica(x):
        inner = jax.vmap(lambda g: fdp.reduce_gradients(g, "model"), axis_name="model")(x[0])
        return fdp.reduce_gradients(inner, "data")

    x = jnp.arange(16.0).reshape(8, 2)
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    np.testing.assert_array_equal(jax.jit(mapped)(x), np.full(2, 7.5))


@pytest.mark.parametrize("where", ["vmap", "shard_map checked"])
@pytest.mark.parametrize("packing", [pack.flat(), pack.leaves()], ids=lambda p: p.name)
def test_schedules_are_bit_equal_for_one_plan(where, packing, mesh):
    grads = gradients(seed=1)
    plan = plan_buckets(jax.tree.map(lambda x: x[0], grads), bucket_bytes=60, first_bucket_bytes=16)
    assert len(plan.buckets) >= 5

    def all_schedules(g):
        return [
            fdp.reduce_gradients(g, "data", plan=plan, schedule=s, pack=packing) for s in SCHEDULES
        ]

    results = [bits(x) for x in on_replicas(all_schedules, where, mesh)(grads)]
    assert all(x == results[0] for x in results)


def test_p28_p61_the_bucket_size_does_not_change_the_result():
    grads = gradients(seed=2)
    one = jax.tree.map(lambda x: x[0], grads)
    want = on_replicas(lambda g: lax.pmean(g, "data"), "vmap", None)(grads)
    counts = set()
    for cap in (1, 20, 60, 2**20):
        plan = plan_buckets(one, bucket_bytes=cap)
        counts.add(len(plan.buckets))
        assert_close(
            on_replicas(lambda g, p=plan: fdp.reduce_gradients(g, "data", plan=p), "vmap", None)(
                grads
            ),
            want,
        )
    # P61: the count of bytes starts again with each bucket; it is not one leaf a reduction from there on.
    assert counts == {8, 7, 5, 3}


@pytest.mark.parametrize("where", ["vmap", "shard_map checked"])
@pytest.mark.parametrize("packing", [pack.flat(), pack.leaves()], ids=lambda p: p.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_stay_where_they_are(where, packing, bad, mesh):
    # Launches are tied to each other by data; what is tied must not leak.
    grads = {name: jnp.arange(24.0).reshape(8, 3) + i for i, name in enumerate("abcd")}
    clean = {name: np.asarray(x).mean(0) for name, x in grads.items()}
    grads["d"] = (
        grads["d"].at[:, 0].set(bad)
    )  # the first element of the first bucket makes the token
    grads["c"] = grads["c"].at[2, 1].set(bad)
    plan = plan_buckets(jax.tree.map(lambda x: x[0], grads), bucket_bytes=24, first_bucket_bytes=12)
    assert [b.paths for b in plan.buckets] == [("d",), ("c", "b"), ("a",)]

    def all_schedules(g):
        return [
            fdp.reduce_gradients(g, "data", plan=plan, schedule=s, pack=packing) for s in SCHEDULES
        ]

    for result in on_replicas(all_schedules, where, mesh)(grads):
        for name, x in result.items():
            hit = {"d": 0, "c": 1}.get(name)
            want = clean[name].copy()
            if hit is not None:
                want[hit] = bad
            np.testing.assert_allclose(x, want, rtol=1e-6)


def test_p33_complex_gradients_keep_both_parts():
    z = jnp.asarray([[1 + 2j, 3 - 1j], [5 + 6j, -1 + 1j]], jnp.complex64)
    got = jax.vmap(lambda g: fdp.reduce_gradients(g, "data"), axis_name="data")(z)
    np.testing.assert_array_equal(
        got, np.broadcast_to(np.array([3 + 4j, 1 + 0j], np.complex64), (2, 2))
    )


def test_p35_zero_size_leaves_alone_and_among_others(mesh):
    grads = {"a": jnp.zeros((8, 0)), "b": jnp.ones((8, 2)), "c": jnp.zeros((8, 2, 0), jnp.float16)}
    for where in WHERE:
        result = on_replicas(lambda g: fdp.reduce_gradients(g, "data"), where, mesh)(grads)
        assert [x.shape for x in result.values()] == [(0,), (2,), (2, 0)]
        np.testing.assert_array_equal(result["b"], np.ones(2))


def test_left_out_leaves_come_back_as_they_went_in():
    grads = gradients()
    plan = plan_buckets(
        jax.tree.map(lambda x: x[0], grads),
        trainable=lambda path, leaf: not path.startswith("layers"),
    )
    got = jax.vmap(lambda g: fdp.reduce_gradients(g, "data", plan=plan), axis_name="data")(grads)
    assert bits(got["layers"]) == bits(grads["layers"])
    assert bits(got["w"]) != bits(grads["w"])
    without = {**grads, "layers": [None, optax.MaskedNode(), None]}
    got = jax.vmap(lambda g: fdp.reduce_gradients(g, "data", plan=plan), axis_name="data")(without)
    assert got["layers"] == [None, optax.MaskedNode(), None]


def test_leaves_that_print_alike_are_not_mixed_up():
    # "a/b" is a name here and a path there; with a left-out leaf gone, matching by printed path mixed them up.
    grads = {"a": {"b": jnp.zeros((4, 2))}, "a/b": jnp.ones((4, 2)), "c": None}
    plan = plan_buckets(
        {"a": {"b": jnp.zeros(2)}, "a/b": jnp.zeros(2), "c": jnp.zeros(1)},
        trainable={"a": {"b": True}, "a/b": True, "c": False},
    )
    got = jax.vmap(lambda g: fdp.reduce_gradients(g, "data", plan=plan), axis_name="data")(grads)
    assert bits(got) == bits(grads)


def test_predivide_splits_the_division():
    def mean(x, predivide):
        hook = hooks.all_reduce(predivide=predivide)
        return jax.vmap(lambda g: fdp.reduce_gradients(g, "data", hook=hook), axis_name="data")(x)[
            0
        ]

    large = jnp.full((4, 2), 3e4, jnp.float16)
    assert mean(large, None)[0] == mean(large, 4.0)[0] == mean(large, 2)[0] == np.float16(3e4)
    assert np.isinf(mean(large, 1.0)).all()
    # At the other end: terms that the whole division would round to zero.
    small = jnp.full((4, 2), 6e-8, jnp.float16)
    assert mean(small, None)[0] == 0
    assert mean(small, 1.0)[0] > 0
