"""Errors about schedules, hooks, reductions, microbatches and losses. Run by ``test_messages``."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from message_cases_plan import ONES, PARAMS, PLAN, Case, on_two, reduce
from stateful_hook import error_feedback

import fdp
from fdp import hooks, pack, schedules
from fdp.loss import canonical_loss
from fdp.plan import Bucket, plan_buckets
from fdp.reduce import make_reducer
from fdp.schedules import Launch, Schedule


def checked_shard_map(fn):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.make_jaxpr(jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P()))(PARAMS)


def launching(*launches):
    """A schedule that launches exactly this."""
    return Schedule("custom", lambda plan: launches)


def loss_of(result, **options):
    flags = {"has_aux": False, "has_model_state": False, "has_rng": False, **options}
    return canonical_loss(lambda params, batch, **keywords: result, **flags)(None, None, None, None)


def accumulated(result, k=2, **options):
    return fdp.accumulate(lambda params, batch: (result, params), k, **options)(
        ONES, jnp.arange(4.0)
    )


def flat_beside_an_automatic_axis():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    def fn(grads):
        return fdp.reduce_gradients(grads, "data", pack=pack.flat())

    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    return jax.make_jaxpr(mapped)({"a": jnp.ones(2), "b": jnp.ones(2)})


def narrow():
    def reduce(buffers, state, view):
        return tuple(x[:1] for x in buffers), state

    return hooks.CommHook("narrow", lambda bucket: (), reduce)


FIRST, SECOND = PLAN.buckets
MIXED = plan_buckets([jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)])
MIXED_BUCKET = Bucket((1, 0), ("1", "0"), ((2,), (2,)), np.dtype(jnp.float32), 12)

CASES = {
    # schedules and hooks
    "window is a bool": Case(
        lambda: schedules.ordered(True),
        TypeError,
        ("expected window to be a whole number of buckets", "got True of type bool"),
    ),
    "window is zero": Case(
        lambda: schedules.ordered(0),
        ValueError,
        ("expected window to be at least 1, got 0", "unordered() has no limit"),
    ),
    "a schedule forgets a leaf": Case(
        lambda: reduce(PARAMS, plan=PLAN, schedule=launching(Launch(FIRST))),
        ValueError,
        (
            "expected schedule 'custom' to launch each planned leaf once",
            "leaf 'a' is launched 0 times",
        ),
    ),
    "a schedule repeats a leaf": Case(
        lambda: reduce(
            PARAMS, plan=PLAN, schedule=launching(*map(Launch, (FIRST, SECOND, SECOND)))
        ),
        ValueError,
        ("to launch each planned leaf once", "leaf 'a' is launched 2 times"),
    ),
    "a schedule waits for the future": Case(
        lambda: reduce(
            PARAMS, plan=PLAN, schedule=launching(Launch(FIRST, after=(1,)), Launch(SECOND))
        ),
        ValueError,
        (
            "expected launch 0 of schedule 'custom' to wait for earlier launches only",
            "got after=(1,)",
        ),
    ),
    "J34 a schedule mixes dtypes": Case(
        lambda: reduce(
            [jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)],
            plan=MIXED,
            schedule=launching(Launch(MIXED_BUCKET)),
        ),
        ValueError,
        (
            "to hold one dtype",
            "got ['bfloat16', 'float32'] in a bucket of float32",
            "merge buckets of equal dtype only",
        ),
    ),
    "predivide is no number": Case(
        lambda: hooks.all_reduce(predivide="2"),
        TypeError,
        ("expected predivide to be a number", "got '2' of type str", "1.0 divides after the sum"),
    ),
    "predivide is zero": Case(
        lambda: hooks.all_reduce(predivide=0.0),
        ValueError,
        ("expected predivide to be more than 0 and finite", "got 0.0", "1.0 divides after the sum"),
    ),
    "a hook changes shapes": Case(
        lambda: reduce(PARAMS, plan=PLAN, hook=narrow()),
        ValueError,
        (
            "expected hook 'narrow' to return the shapes and dtypes it was given",
            "['float32[3]'] for bucket 0",
            "'b/c'",
            "got ['float32[1]']",
        ),
    ),
    # reduce
    "flat packing beside an axis of the partitioner's": Case(
        flat_beside_an_automatic_axis,
        ValueError,
        (
            "flat packing would gather",
            "mesh axis 'model'",
            "bucket of 'b'",
            "use pack=fdp.pack.leaves()",
        ),
    ),
    "unbound axis": Case(
        lambda: fdp.reduce_gradients(ONES, "data"),
        NameError,
        ("expected mesh axis 'data' to be bound, but it is not", "jax.pmap(..., axis_name='data')"),
    ),
    "one of two axes unbound": Case(
        lambda: on_two(lambda g: fdp.reduce_gradients(g, ("data", "model")), ONES),
        NameError,
        ("expected mesh axis ('data', 'model') to be bound",),
    ),
    "an unknown op": Case(
        lambda: fdp.reduce_gradients(ONES, "data", op="avg"),
        ValueError,
        ('expected op to be "mean" or "sum", got \'avg\'',),
    ),
    "plan is no plan": Case(
        lambda: fdp.reduce_gradients(ONES, "data", plan=ONES),
        TypeError,
        (
            "expected plan to be a BucketPlan",
            "got ArrayImpl",
            "make it with fdp.plan_buckets(params)",
        ),
    ),
    "a factory instead of its product": Case(
        lambda: fdp.reduce_gradients(ONES, "data", schedule=schedules.fused),
        TypeError,
        (
            "expected schedule to be a Schedule",
            "got <function fused",
            "call it: fdp.schedules.ordered()",
        ),
    ),
    "a hook of another kind": Case(
        lambda: fdp.reduce_gradients(ONES, "data", hook=pack.flat()),
        TypeError,
        (
            "expected hook to be a CommHook",
            "got Packing(name='flat'",
            "for example fdp.hooks.all_reduce()",
        ),
    ),
    "a state that would be lost": Case(
        lambda: fdp.reduce_gradients(ONES, "data", hook=error_feedback()),
        ValueError,
        ("expected a hook without state, got 'error_feedback'", "fdp.bucketed(...)"),
    ),
    "hook states of another plan": Case(
        lambda: on_two(lambda g: make_reducer("data", plan=PLAN).update(g, ((),)), PARAMS),
        ValueError,
        (
            "expected one hook state per launch (2 under schedule 'ordered(window=1)')",
            "got 1",
            "init(params) of the same reducer",
        ),
    ),
    "J5 gradients that JAX has summed": Case(
        lambda: checked_shard_map(lambda p: fdp.reduce_gradients(p, "data")),
        ValueError,
        (
            "expected gradients that differ per replica over axis 'data'",
            "already summed 2 of them, the first at 'a'",
            "params = fdp.varying(params, 'data') before jax.grad",
        ),
    ),
    # accumulate
    "microbatches are a float": Case(
        lambda: accumulated(1.0, 2.0),
        TypeError,
        ("expected num_microbatches to be a whole number", "got 2.0 of type float"),
    ),
    "no microbatches": Case(
        lambda: accumulated(1.0, 0),
        ValueError,
        ("expected num_microbatches to be at least 1, got 0", "1 does not accumulate"),
    ),
    "an unknown op of accumulate": Case(
        lambda: accumulated(1.0, op="max"),
        ValueError,
        ('expected op to be "mean" or "sum", got \'max\'',),
    ),
    "sums of integers": Case(
        lambda: accumulated(1.0, dtype=jnp.int32),
        TypeError,
        ("expected the dtype of the sums to be floating-point", "int32", "float32 suits bfloat16"),
    ),
    "a batch that does not divide": Case(
        lambda: fdp.accumulate(jax.value_and_grad(jnp.vdot), 2)(ONES, {"x": [jnp.zeros((3, 5))]}),
        ValueError,
        (
            "expected batch leaf 'x/0' to have a leading axis that divides by num_microbatches = 2",
            "got shape (3, 5)",
        ),
    ),
    "aux unannounced": Case(
        lambda: accumulated((jnp.float32(0), "aux")),
        TypeError,
        (
            "expected value_and_grad_fn to return (value, grads)",
            "got a tuple of 2 as value",
            "has_aux=True to accumulate",
        ),
    ),
    "aux announced and absent": Case(
        lambda: accumulated(1.5, has_aux=True),
        TypeError,
        (
            "expected value_and_grad_fn to return ((value, aux), grads)",
            "got 1.5",
            "has_aux=True to jax.value_and_grad too",
        ),
    ),
    # loss
    "a loss per example": Case(
        lambda: loss_of(ONES),
        TypeError,
        (
            "expected loss_fn to return loss with a loss that is a floating-point scalar",
            "got float32[3]",
            "return jnp.mean(",
        ),
    ),
    "an integer loss": Case(
        lambda: loss_of(3),
        TypeError,
        ("a floating-point scalar", "got 3 of type int", "return jnp.mean("),
    ),
    "a loss with more than was announced": Case(
        lambda: loss_of((jnp.float32(0), "aux")),
        TypeError,
        (
            "expected loss_fn to return loss",
            "got a tuple of 2",
            "pass has_aux=True (or has_model_state=True)",
        ),
    ),
    "a loss with less than was announced": Case(
        lambda: loss_of(jnp.float32(0), has_aux=True, has_model_state=True),
        TypeError,
        (
            "expected loss_fn to return (loss, model_state, aux) (has_model_state=True, has_aux=True)",
            "got float32[]",
            "return that tuple",
        ),
    ),
}
