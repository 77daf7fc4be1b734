"""What every hook, every schedule and every packing must do: one suite a family, run over all its ``members``."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ancestry import ancestry, expected_ancestors
from jax.sharding import PartitionSpec as P
from members import (
    DTYPES,
    FORGETFUL,
    HOOKS,
    PACKINGS,
    REPLICAS,
    ROUNDING,
    SCHEDULES,
    SHAPES,
    bucket_of,
    exact,
)

from fdp import hooks, pack, schedules
from fdp.dependency import token_of
from fdp.hooks import BucketView
from fdp.plan import plan_buckets
from fdp.reduce import make_reducer


@pytest.mark.parametrize(
    ("module", "kind", "registry"),
    [
        (hooks, "CommHook", [hook.name.partition("(")[0] for hook, _ in HOOKS.values()]),
        (schedules, "Schedule", [name.partition("(")[0] for name in SCHEDULES]),
        (pack, "Packing", list(PACKINGS)),
    ],
    ids=["hooks", "schedules", "packings"],
)
def test_no_member_is_left_out(module, kind, registry):
    functions = inspect.getmembers(module, inspect.isfunction)
    members = [
        name
        for name, fn in functions
        if str(inspect.signature(fn).return_annotation).endswith(kind)
    ]
    assert members
    assert set(members) <= set(registry)


def run_hook(hook, bucket, leaves, op, packing, steps=1):
    """Sum over steps of the reduced leaves, with a leading replica axis; the same gradients at every step."""

    def one(leaves):
        def step(carry, _):
            state, total = carry
            view = BucketView(bucket, 0, True, "data", REPLICAS, op)
            reduced, state = hook.reduce(packing.pack(bucket, leaves), state, view)
            reduced = packing.unpack(bucket, reduced)
            return (state, [t + x for t, x in zip(total, reduced, strict=True)]), None

        zeros = [jnp.zeros_like(x) for x in leaves]
        if steps == 1:
            return step((hook.init(bucket), zeros), None)[0][1]
        return jax.lax.scan(step, (hook.init(bucket), zeros), None, length=steps)[0][1]

    return jax.jit(jax.vmap(one, axis_name="data"))(leaves)


# Packing, operation and dtype for the numbers; every pair of them at least once.
COMBINATIONS = [
    ("flat", "mean", jnp.float32),
    ("flat", "sum", jnp.bfloat16),
    ("flat", "mean", jnp.complex64),
    ("leaves", "sum", jnp.float32),
    ("leaves", "mean", jnp.bfloat16),
    ("leaves", "mean", jnp.float16),
    ("leaves", "sum", jnp.complex64),
    ("flat", "sum", jnp.float16),
]


@pytest.mark.parametrize("name", HOOKS)
class TestHooks:
    @pytest.mark.parametrize(("packing", "op", "dtype"), COMBINATIONS)
    def test_reduces_and_keeps_shapes_and_dtype(self, name, packing, op, dtype):
        hook, loss = HOOKS[name]
        bucket, leaves = bucket_of(SHAPES["several"], dtype)
        reduced = run_hook(hook, bucket, leaves, op, PACKINGS[packing])
        for x, got in zip(leaves, reduced, strict=True):
            assert (got.shape, got.dtype) == (x.shape, x.dtype)
            if not x.size:
                continue
            scale = np.abs(np.asarray(x)).max().astype(np.float64) * (
                REPLICAS if op == "sum" else 1
            )
            error = np.abs(np.asarray(got)[0].astype(np.complex128) - exact(x, op)).max()
            assert error <= scale * (loss + ROUNDING[bucket.dtype.name])
            # Bit for bit the same on every replica.
            assert all(np.array_equal(got[0], got[r]) for r in range(1, REPLICAS))

    @pytest.mark.parametrize("shapes", ["none", "scalar", "one"])
    def test_any_bucket_will_do(self, name, shapes):
        hook, _ = HOOKS[name]
        bucket, leaves = bucket_of(SHAPES[shapes], jnp.float32)
        reduced = run_hook(hook, bucket, leaves, "mean", pack.flat())
        assert [x.shape for x in reduced] == [x.shape for x in leaves]

    def test_init_is_pure_and_abstractable(self, name):
        hook, _ = HOOKS[name]
        bucket, _ = bucket_of(SHAPES["several"], jnp.float32)
        first, second = hook.init(bucket), hook.init(bucket)
        assert jax.tree.structure(first) == jax.tree.structure(second)
        assert all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))
        abstract = jax.eval_shape(lambda: hook.init(bucket))
        assert [x.shape for x in jax.tree.leaves(abstract)] == [
            x.shape for x in jax.tree.leaves(first)
        ]

    def test_state_keeps_its_form_so_that_a_scan_can_carry_it(self, name):
        hook, _ = HOOKS[name]
        plan = plan_buckets([jax.ShapeDtypeStruct((3, 2), jnp.float32)] * 3, bucket_bytes=48)
        reducer = make_reducer("data", plan=plan, hook=hook)
        grads = [jnp.ones((REPLICAS, 3, 2))] * 3

        def many(grads):
            def step(state, _):
                reduced, state = reducer.update(grads, state)
                return state, reduced

            return jax.lax.scan(step, reducer.init(grads), None, length=2)

        _, reduced = jax.vmap(many, axis_name="data")(grads)
        np.testing.assert_allclose(reduced[0], np.ones((REPLICAS, 2, 3, 2)), rtol=1e-6)

    def test_nothing_is_lost_over_many_steps(self, name):
        # What a hook with a residual holds back must come later: the sum of T results stays within one step's error.
        hook, loss = HOOKS[name]
        bucket, leaves = bucket_of(SHAPES["one"], jnp.float32)
        (total,) = run_hook(hook, bucket, leaves, "mean", pack.flat(), steps=32)
        steps = 32 if name in FORGETFUL else 2
        bound = steps * np.abs(np.asarray(leaves[0])).max() * (loss + 1e-5)
        assert np.abs(total[0] - 32 * exact(leaves[0], "mean")).max() <= bound

    def test_results_are_replicated_by_type_and_state_is_local(self, name, mesh):
        hook, _ = HOOKS[name]
        plan = plan_buckets(jax.ShapeDtypeStruct((3,), jnp.float32))
        reducer = make_reducer("data", plan=plan, hook=hook)
        states = jax.tree.map(lambda x: jnp.stack([x] * 8), reducer.init(None))

        def replica(grads, state):
            state = jax.tree.map(lambda x: x[0], state)
            reduced, state = reducer.update(grads[0], state)
            return reduced, jax.tree.map(lambda x: x[None], state)

        mapped = jax.shard_map(
            replica, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P(), P("data"))
        )
        reduced, states = jax.jit(mapped)(jnp.ones((8, 3)), states)
        np.testing.assert_allclose(reduced, np.ones(3), rtol=1e-6)


PLANS = {
    "many buckets": plan_buckets([jnp.zeros(2)] * 9, bucket_bytes=16, first_bucket_bytes=8),
    "mixed dtypes": plan_buckets(
        [jnp.zeros(2, d) for d in DTYPES for _ in range(3)], bucket_bytes=8
    ),
    "one bucket": plan_buckets([jnp.zeros(2)] * 3),
    "with empty buckets": plan_buckets(
        [jnp.zeros(2, jnp.float16), jnp.zeros(0), jnp.zeros(2)], bucket_bytes=1
    ),
    "some left out": plan_buckets(
        [jnp.zeros(2)] * 4, bucket_bytes=8, trainable=[True, False, True, False]
    ),
    "nothing to do": plan_buckets([jnp.zeros(2)], trainable=[False]),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", SCHEDULES)
class TestSchedules:
    def test_launches_every_planned_leaf_once_and_waits_only_backwards(self, name, plan):
        launches = SCHEDULES[name].launches(plan)
        launched = [i for launch in launches for i in launch.bucket.leaf_indices]
        assert sorted(launched) == sorted(i for b in plan.buckets for i in b.leaf_indices)
        for k, launch in enumerate(launches):
            assert all(0 <= j < k for j in launch.after)
            assert {plan.leaves[i].dtype for i in launch.bucket.leaf_indices} == {
                launch.bucket.dtype
            }
        assert schedules.check_launches(SCHEDULES[name], plan) == launches

    def test_launches_are_data_and_the_same_every_time(self, name, plan):
        launches = SCHEDULES[name].launches(plan)
        assert launches == SCHEDULES[name].launches(plan)
        assert isinstance(launches, tuple)
        hash(launches)

    def test_keeps_the_plan_order(self, name, plan):
        firsts = [launch.bucket.leaf_indices[0] for launch in SCHEDULES[name].launches(plan)]
        planned = [i for b in plan.buckets for i in b.leaf_indices]
        assert firsts == sorted(firsts, key=planned.index)

    def test_what_it_says_is_in_the_program(self, name, plan):
        """Launch k's collective depends on those it waits for, and on no other: read from the jaxpr."""
        schedule = SCHEDULES[name]
        launches = schedule.launches(plan)
        reducer = make_reducer("data", plan=plan, schedule=schedule, pack=pack.flat())
        grads = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in plan.leaves]

        def update(grads):
            return reducer.update(grads, reducer.init(grads))[0]

        jaxpr = jax.make_jaxpr(update, axis_env=[("data", REPLICAS)])(grads).jaxpr
        behind = [waits for primitive, waits in ancestry(jaxpr) if primitive == "psum"]
        assert len(behind) == len(launches)
        inputs = {id(v): i for i, v in enumerate(jaxpr.invars)}
        for k, launch in enumerate(launches):
            earlier = {op for op in behind[k] if op[0] == "psum"}
            needed = {("psum", j) for j in expected_ancestors(launches, k)}
            assert earlier == needed
            if launch.after_backward:
                read = {inputs[v] for kind, v in behind[k] if kind == "in"}
                has_elements = {
                    i for b in plan.buckets for i in b.leaf_indices if plan.leaves[i].nbytes
                }
                assert has_elements <= read


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("ordered()", [(), (0,), (1,), (2,), (3,)]),
        ("ordered(2)", [(), (), (0,), (1,), (2,)]),
        ("ordered(3)", [(), (), (), (0,), (1,)]),
        ("ordered(100)", [()] * 5),
        ("serialized", [(), (0,), (1,), (2,), (3,)]),
        ("fused", [()]),
        ("unordered", [()] * 5),
    ],
)
def test_what_each_schedule_is(name, after):
    launches = SCHEDULES[name].launches(PLANS["many buckets"])
    assert [launch.after for launch in launches] == after
    assert [launch.after_backward for launch in launches] == [name == "serialized"] + [False] * (
        len(after) - 1
    )


def bits(x):
    """The array's bytes: NaNs with their payload, zeros with their sign."""
    return np.asarray(x).tobytes()


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PACKINGS)
class TestPackings:
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
    def test_comes_back_bit_for_bit(self, name, shapes, dtype):
        packing = PACKINGS[name]
        bucket, leaves = bucket_of(shapes, dtype)
        leaves = [x[0] for x in leaves]
        leaves[0] = jnp.where(leaves[0] > 0, leaves[0], jnp.asarray(-jnp.nan, dtype))
        leaves[-1] = -jnp.zeros_like(leaves[-1]) if leaves[-1].size else leaves[-1]
        there_and_back = jax.jit(lambda x: packing.unpack(bucket, packing.pack(bucket, x)))(leaves)
        assert [x.shape for x in there_and_back] == [x.shape for x in leaves]
        assert [x.dtype for x in there_and_back] == [x.dtype for x in leaves]
        assert list(map(bits, there_and_back)) == list(map(bits, leaves))

    def test_j34_buffers_have_the_bucket_dtype(self, name, shapes):
        bucket, leaves = bucket_of(shapes, jnp.bfloat16)
        buffers = PACKINGS[name].pack(bucket, [x[0] for x in leaves])
        assert buffers
        assert {x.dtype for x in buffers} == {bucket.dtype}
        assert sum(x.size for x in buffers) >= sum(bucket.sizes)

    def test_commutes_with_what_a_collective_does(self, name, shapes):
        packing = PACKINGS[name]
        bucket, leaves = bucket_of(shapes, jnp.float32)

        def doubled(leaves):
            buffers = tuple(x + x for x in packing.pack(bucket, leaves))
            return packing.unpack(bucket, buffers)

        for x, got in zip(leaves, jax.jit(jax.vmap(doubled))(leaves), strict=True):
            assert bits(got) == bits(x + x)

    def test_one_leaf_is_never_copied(self, name, shapes):
        if len(shapes) > 1:
            shapes = shapes[:1]
        packing = PACKINGS[name]
        bucket, leaves = bucket_of(shapes, jnp.float32)
        jaxpr = jax.make_jaxpr(lambda x: packing.unpack(bucket, packing.pack(bucket, [x])))(
            leaves[0][0]
        )
        assert jaxpr.eqns == []

    def test_a_token_can_be_made_of_its_buffers(self, name, shapes):
        bucket, leaves = bucket_of(shapes, jnp.bfloat16)
        token = token_of(PACKINGS[name].pack(bucket, [x[0] for x in leaves]))
        assert (token is None) == (sum(bucket.sizes) == 0)
