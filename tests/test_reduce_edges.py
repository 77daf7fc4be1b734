"""``reduce_gradients`` at its edges: what it refuses, what one replica costs, what the program holds, hook state."""

import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from replicas import bits, gradients, on_replicas
from stateful_hook import error_feedback, quantized

import fdp
from fdp import pack, schedules
from fdp.hooks import CommHook
from fdp.plan import plan_buckets
from fdp.reduce import make_reducer


class TestAlreadySummed:
    """Fact 10: inside a checked shard_map, JAX itself sums the gradient of replicated parameters."""

    def trace(self, mesh, replica):
        w = {"w": jnp.ones(3)}
        mapped = jax.shard_map(replica, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.make_jaxpr(mapped)(w, jnp.ones((8, 3)))

    def grads(self, params, x):
        return jax.grad(lambda p: jnp.sum(p["w"] * x))(params)

    def test_is_refused(self, mesh):
        with pytest.raises(ValueError, match=r"params = fdp\.varying\(params, 'data'\)"):
            self.trace(mesh, lambda p, x: fdp.reduce_gradients(self.grads(p, x), "data"))

    def test_the_edit_in_the_message_works(self, mesh):
        def replica(p, x):
            return fdp.reduce_gradients(self.grads(fdp.varying(p, "data"), x), "data")

        x = np.arange(24, dtype=np.float32).reshape(8, 3)
        mapped = jax.shard_map(replica, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        got = jax.jit(mapped)({"w": jnp.ones(3)}, x)["w"]
        np.testing.assert_array_equal(got, x.mean(0))  # small whole numbers: exact

    def test_j5_a_second_reduction_is_refused(self, mesh):
        def twice(p, x):
            grads = self.grads(fdp.varying(p, "data"), x)
            return fdp.reduce_gradients(fdp.reduce_gradients(grads, "data"), "data")

        with pytest.raises(ValueError, match="already summed 1 of them, the first at 'w'"):
            self.trace(mesh, twice)

    def test_j5_a_sum_inside_a_custom_vjp_is_refused(self, mesh):
        @jax.custom_vjp
        def times(w, x):
            return jnp.sum(w * x)

        times.defvjp(
            lambda w, x: (times(w, x), x),
            lambda x, ct: (lax.psum(ct * x, "data"), jnp.zeros_like(x)),
        )
        with pytest.raises(ValueError, match="JAX has already summed"):
            self.trace(
                mesh,
                lambda p, x: fdp.reduce_gradients({"w": jax.grad(times)(p["w"], x[0])}, "data"),
            )

    def test_forgetting_to_reduce_is_an_error_of_jax(self, mesh):
        with pytest.raises(ValueError, match="out_specs"):
            self.trace(mesh, lambda p, x: self.grads(fdp.varying(p, "data"), x))


class TestOneReplica:
    def jaxpr(self, grads, **options):
        fn = jax.make_jaxpr(
            lambda g: fdp.reduce_gradients(g, "data", **options), axis_env=[("data", 1)]
        )
        return fn(grads).jaxpr

    @pytest.mark.parametrize("op", ["mean", "sum"])
    def test_nothing_at_all_is_traced(self, op):
        grads = {"a": jnp.ones(3), "b": jnp.ones(2)}
        jaxpr = self.jaxpr(grads, op=op)
        # What is left of the question whether JAX tracks varying axes; nothing reads it.
        assert {eqn.primitive.name for eqn in jaxpr.eqns} <= {"axis_index"}
        assert jaxpr.outvars == jaxpr.invars

    def test_a_hook_is_not_called_and_keeps_its_state(self):
        reducer = make_reducer("data", hook=error_feedback())
        grads = jnp.asarray([[0.3, 1.0]])
        state = reducer.init(grads[0])
        got, new = jax.vmap(lambda g: reducer.update(g, state), axis_name="data")(grads)
        np.testing.assert_array_equal(got, grads)
        np.testing.assert_array_equal(new[0]["residual"][0], state[0]["residual"])

    @pytest.mark.parametrize("where", ["pmap", "shard_map unchecked"])
    def test_the_compiled_program_has_no_collective(self, where, mesh):
        mesh = Mesh(mesh.devices[:1], ("data",))
        fn = on_replicas(lambda g: fdp.reduce_gradients(g, "data"), where, mesh)
        text = fn.lower(jnp.ones((1, 4))).compile().as_text()
        assert "all-reduce" not in text
        assert "concatenate" not in text

    def test_the_check_is_content(self, mesh):
        mesh = Mesh(mesh.devices[:1], ("data",))
        fn = on_replicas(lambda g: fdp.reduce_gradients(g, "data"), "shard_map checked", mesh)
        np.testing.assert_array_equal(fn(jnp.arange(4.0)[None]), np.arange(4.0))


@pytest.mark.parametrize("where", ["pmap", "shard_map checked", "shard_map unchecked"])
def test_stablehlo_holds_one_all_reduce_a_bucket(where, mesh):
    grads = gradients()
    plan = plan_buckets(jax.tree.map(lambda x: x[0], grads), bucket_bytes=60, first_bucket_bytes=16)
    fn = on_replicas(
        lambda g: fdp.reduce_gradients(g, "data", plan=plan, pack=pack.flat()), where, mesh
    )
    text = fn.lower(grads).as_text()
    assert len(re.findall(r"stablehlo\.all_reduce", text)) == len(plan.buckets)


def test_unbound_axis_name():
    with pytest.raises(NameError, match="expected mesh axis 'data' to be bound"):
        fdp.reduce_gradients(jnp.ones(3), "data")


def test_p37_p51_gradients_of_another_model_are_refused_when_traced():
    plan = plan_buckets({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})

    def reduce(grads):
        return jax.eval_shape(
            jax.vmap(lambda g: fdp.reduce_gradients(g, "data", plan=plan), axis_name="data"), grads
        )

    good = {"w": jnp.zeros((4, 2, 3)), "b": jnp.zeros((4, 3))}
    reduce(good)
    with pytest.raises(
        ValueError, match=r"at 'w': the plan expects float32\[2,3\], got bfloat16\[2,3\]"
    ):
        reduce({**good, "w": good["w"].astype(jnp.bfloat16)})
    with pytest.raises(
        ValueError, match=r"at 'w': the plan expects float32\[2,3\], got float32\[2,4\]"
    ):
        reduce({**good, "w": jnp.zeros((4, 2, 4))})
    with pytest.raises(ValueError, match=r"got a leaf 'head' that the plan does not know"):
        reduce({**good, "head": jnp.zeros((4, 3))})


def test_a_hook_that_changes_the_dtype_is_refused():
    def widen(buffers, state, view):
        return lax.psum(tuple(x.astype(jnp.float32) for x in buffers), view.axis_name), state

    hook = CommHook("widening", lambda bucket: (), widen)
    with pytest.raises(
        ValueError, match=r"\['bfloat16\[3\]'\] for bucket 0 .*got \['float32\[3\]'\]"
    ):
        jax.vmap(lambda g: fdp.reduce_gradients(g, "data", hook=hook), axis_name="data")(
            jnp.ones((2, 3), jnp.bfloat16)
        )


class TestStatefulHook:
    """A hook with state goes through ``bucketed``, an optax transformation that carries it."""

    PARAMS: ClassVar = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}

    def optimizer(self, **options):
        plan = plan_buckets(self.PARAMS, bucket_bytes=24, first_bucket_bytes=24)
        assert len(plan.buckets) == 2
        reduced = fdp.bucketed("data", plan=plan, hook=error_feedback(levels=4), **options)
        return optax.chain(reduced, optax.sgd(0.1))

    @pytest.mark.parametrize("packing", [pack.flat(), pack.leaves()], ids=lambda p: p.name)
    def test_in_optax_chain_under_shard_map(self, packing, mesh):
        rng = np.random.default_rng(0)
        grads = {
            name: jnp.asarray(rng.normal(size=(8, *x.shape)), jnp.float32)
            for name, x in self.PARAMS.items()
        }
        optimizer = self.optimizer(pack=packing)
        one_state = optimizer.init(self.PARAMS)
        # The residuals belong to one replica each: stacked, and sharded over the axis.
        stacked = jax.tree.map(lambda x: jnp.stack([x] * 8), one_state)

        def replica(params, state, grads):
            state, grads = jax.tree.map(lambda x: x[0], (state, grads))
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), jax.tree.map(lambda x: x[None], state)

        step = jax.jit(
            jax.shard_map(
                replica, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P("data"))
            )
        )
        params, state = self.PARAMS, stacked
        want = {name: np.zeros(x.shape) for name, x in self.PARAMS.items()}
        residual = {name: jnp.zeros((8, *x.shape)) for name, x in self.PARAMS.items()}
        for _ in range(3):
            params, state = step(params, state, grads)
            for name in want:
                wanted = grads[name] + residual[name]
                sent = jnp.stack([quantized(x, 4) for x in wanted])
                residual[name] = wanted - sent
                want[name] -= 0.1 * np.asarray(sent, np.float64).mean(0)
                np.testing.assert_allclose(params[name], want[name], rtol=1e-4, atol=1e-5)
        # One state a launch: the plan launches "w" first, then "b".
        assert [x["residual"].shape for x in state[0].hook_states] == [(8, 6), (8, 3)]
        held = np.asarray(state[0].hook_states[0]["residual"]).reshape(8, 2, 3)
        np.testing.assert_allclose(held, residual["w"], rtol=1e-4, atol=1e-5)
        assert len({x.tobytes() for x in held}) == 8

    def test_reduce_gradients_will_not_lose_the_state(self):
        with pytest.raises(ValueError, match="'error_feedback', whose state would be lost"):
            fdp.reduce_gradients(jnp.ones(3), "data", hook=error_feedback())

    def test_state_of_another_schedule_is_refused(self):
        # fused() makes one launch of the two buckets, so one state.
        state = self.optimizer(schedule=schedules.fused()).init(self.PARAMS)
        with pytest.raises(
            ValueError, match=r"one hook state per launch \(2 under schedule 'ordered.*got 1"
        ):
            jax.make_jaxpr(self.optimizer().update, axis_env=[("data", 2)])(self.PARAMS, state)


def test_bucketed_is_reduce_gradients():
    grads = gradients()
    transformation = fdp.bucketed("data", op="sum")

    def both(g):
        return transformation.update(g, transformation.init(g))[0], fdp.reduce_gradients(
            g, "data", op="sum"
        )

    ours, theirs = on_replicas(both, "vmap", None)(grads)
    assert bits(ours) == bits(theirs)
