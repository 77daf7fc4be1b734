"""Errors about arguments that JAX or NumPy would take, or refuse in words of their own. Run by ``test_messages``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from message_cases_plan import Case

import fdp
from fdp.checks import check_flags, check_init, check_state
from fdp.data import epoch_indices
from fdp.loss import canonical_loss

PLAN = fdp.plan_buckets({"w": jnp.ones(3)})
ALONE = fdp.TrainState(0, {}, (), {"n": jnp.ones(3)}, None, (), None, None)
LOCAL = ALONE._replace(model_state={"n": None}, local_model_state={"n": jnp.ones((2, 3))})


def loss_of(out, **options):
    names = ("has_aux", "has_model_state", "has_rng")
    loss = canonical_loss(
        lambda params, batch, **_: out, **{**dict.fromkeys(names, False), **options}
    )
    return loss(jnp.ones(2), None, None, None)


def branch_on_constant():
    loss = canonical_loss(
        lambda params, x: lax.cond(x.sum() > 0, lambda: 0.0, lambda: jnp.mean(x)),
        has_aux=False,
        has_model_state=False,
        has_rng=False,
    )
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = PartitionSpec("data")
    jax.make_jaxpr(
        jax.shard_map(
            lambda x: loss(None, x, None, None)[0][None], mesh=mesh, in_specs=rows, out_specs=rows
        )
    )(jnp.ones(2))


def check_consumed():
    consumed = jnp.ones(3)
    consumed.delete()
    fdp.check_replicas({"w": consumed})


SUM_AND_WEIGHT = (jnp.float32(8), jnp.float32(4))

CASES = {
    "weight without weighted": Case(
        lambda: loss_of(SUM_AND_WEIGHT),
        TypeError,
        (
            "expected loss_fn to return loss with a loss that is",
            "got a tuple of 2: pass weighted=True to fdp.data_parallel if the loss is a sum",
            "pass has_aux=True (or has_model_state=True) if the loss is a mean already",
        ),
    ),
    "weight and aux without weighted": Case(
        lambda: loss_of((*SUM_AND_WEIGHT, {}), has_aux=True),
        TypeError,
        ("(loss, aux)", "got a tuple of 3: return that tuple, or pass weighted=True"),
    ),
    "aux without has_aux, weighted": Case(
        lambda: loss_of((*SUM_AND_WEIGHT, {}), weighted=True),
        TypeError,
        ("(loss_sum, weight)", "got a tuple of 3", "pass has_aux=True (or has_model_state=True)"),
    ),
    "weighted loss that is no scalar": Case(
        lambda: loss_of((jnp.ones(3), 3), weighted=True),
        TypeError,
        ("(loss_sum, weight)", "got float32[3]: return jnp.sum(per_example_loss)"),
    ),
    "keys as aux": Case(
        lambda: loss_of((jnp.float32(1), {"k": jax.random.key(0)}), has_aux=True),
        TypeError,
        ("expected aux of numbers", "got key<fry>[] at 'k'", "return it as model state"),
    ),
    "text as aux": Case(
        lambda: loss_of((jnp.float32(1), {"k": "name"}), has_aux=True),
        TypeError,
        ("expected aux of numbers", "got 'name' of type str at 'k'", "leave it out"),
    ),
    "a branch that is a constant": Case(
        branch_on_constant,
        TypeError,
        (
            "expected branches of lax.cond and lax.switch in loss_fn that all differ",
            "such as the constant 0.0",
            "0.0 * x.sum()",
            "fdp.varying(0.0, axis_name)",
            "cond branches must have equal output types",
        ),
    ),
    "a seed of more than 64 bits": Case(
        lambda: epoch_indices(8, epoch=0, process=0, process_count=1, seed=2**64),
        ValueError,
        ("expected seed to be below 2**64", "got 18446744073709551616", "seed % 2**64"),
    ),
    "a flag that is text": Case(
        lambda: fdp.data_parallel(len, optax.sgd(0.1), weighted="yes"),
        TypeError,
        ("expected weighted to be True or False", "got 'yes'", "weighted=True"),
    ),
    "a flag that is None": Case(
        lambda: check_flags(count_nonfinite=True, rng_per_replica=None),
        TypeError,
        ("expected rng_per_replica to be True or False", "got None"),
    ),
    "a seed for a key": Case(
        lambda: check_init(False, None, True, jax.ShapeDtypeStruct((), jnp.uint32)),
        TypeError,
        ("expected rng to be a key such as jax.random.key(0)", "got ShapeDtypeStruct(shape=()"),
    ),
    "model state of a dict": Case(
        lambda: fdp.consistent_model_state({"a": 1}),
        TypeError,
        ("expected a TrainState, got dict", "train_step returned"),
    ),
    "a step of a dict": Case(
        lambda: check_state({"a": 1}, 8),
        TypeError,
        ("expected a TrainState, got dict", "the last step returned"),
    ),
    "held back by other replicas": Case(
        lambda: check_state(ALONE._replace(unreduced={"w": jnp.ones((8, 3))}), 4),
        ValueError,
        (
            "state.unreduced",
            "to have 4 replicas",
            "got shape [8, 3] at 'w'",
            "with train_step before",
        ),
    ),
    "a misspelt policy where nothing is local": Case(
        lambda: fdp.consistent_model_state(ALONE, "lokal"),
        ValueError,
        ('"mean", "max", "first" or "local" for local model state', "got 'lokal'"),
    ),
    "joined into local by a function": Case(
        lambda: fdp.consistent_model_state(LOCAL, lambda path, leaf: "local"),
        ValueError,
        ("expected a policy that makes local model state one", "got 'local'"),
    ),
    "counts without a plan": Case(
        lambda: fdp.describe_nonfinite(np.zeros((2, 1), np.int32), None),
        TypeError,
        ("expected plan to be a BucketPlan, got NoneType", "trainer.plan(state, batch)"),
    ),
    "counts that nobody asked for": Case(
        lambda: fdp.describe_nonfinite(None, PLAN),
        TypeError,
        ("expected counts of shape [replicas, buckets], got None", "count_nonfinite=True"),
    ),
    "agree on a list": Case(
        lambda: fdp.agree([1]),
        TypeError,
        ("expected facts by name, got list", "pass a dict"),
    ),
    "verify what was consumed": Case(
        check_consumed,
        ValueError,
        ("the one at 'w' was consumed", "Check the state that it returned"),
    ),
}
