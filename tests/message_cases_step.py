"""Errors about what a step is told to do. Run by ``test_messages``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from message_cases_plan import Case

import fdp
from fdp import model_state, used
from fdp.loss import canonical_loss

PLAN = fdp.plan_buckets({"w": jnp.ones(3)})
LOCAL = fdp.TrainState(0, {}, (), {"n": None}, None, (), None, {"n": jnp.zeros((2, 3))})


def weight(value):
    loss = canonical_loss(
        lambda params, batch: (jnp.sum(params), value),
        has_aux=False,
        has_model_state=False,
        has_rng=False,
        weighted=True,
    )
    return loss(jnp.ones(2), None, None, None)


def mapped(optimizer):
    params = {"a": jnp.ones(3)}
    used.map_per_parameter(
        optimizer, lambda x, _: x, optimizer.init(params), params, otherwise=lambda x: x
    )


def can_skip(optimizer):
    params = {"a": jnp.ones(3)}
    used.check_can_skip(optimizer, params, optimizer.init(params))


def multi_steps():
    return optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()


CASES = {
    "weight is no scalar": Case(
        lambda: weight(jnp.ones(3)),
        TypeError,
        ("expected loss_fn to return (loss_sum, weight)", "real scalar, got float32[3]", "jnp.sum"),
    ),
    "policies of another tree": Case(
        lambda: model_state.resolve(["mean"], {"n": jnp.ones(3)}),
        ValueError,
        ("expected model_state_policy to be one policy", "{'n': *}", "got PyTreeDef([*])"),
    ),
    "policy is unknown": Case(
        lambda: model_state.resolve("median", {"n": jnp.ones(3)}),
        ValueError,
        ('"mean", "max", "first" or "local" for model state \'n\'', "got 'median'"),
    ),
    "average of integers": Case(
        lambda: model_state.resolve("mean", {"n": jnp.int32(3)}),
        ValueError,
        ("floating-point model state", "got int32 at 'n'", "use 'first' or 'max' there"),
    ),
    "largest of keys": Case(
        lambda: model_state.resolve("max", {"n": jax.random.key(0)}),
        ValueError,
        ("an order for the policy 'max'", "at 'n'", "use 'first'"),
    ),
    "local state of another policy": Case(
        lambda: model_state.split_by_policy("local", {"n": jnp.ones(3)}, {"n": jnp.ones(3)}),
        ValueError,
        ("local model state that model_state_policy asks for", "got PyTreeDef", "make the state"),
    ),
    "joined into local": Case(
        lambda: fdp.consistent_model_state(LOCAL, "local"),
        ValueError,
        ("expected a policy that makes local model state one", "got 'local'", "pass 'mean'"),
    ),
    "counts of another plan": Case(
        lambda: fdp.describe_nonfinite(np.zeros((2, 3), np.int32), PLAN),
        ValueError,
        ("expected counts of shape [replicas, 1 buckets]", "got (2, 3)", "trainer.plan"),
    ),
    "steps of which some use a leaf": Case(
        lambda: can_skip(optax.chain(optax.clip(1.0), multi_steps())),
        ValueError,
        (
            'expected an optimizer that updates at every step with unused="skip"',
            "got optax.MultiSteps",
            "num_microbatches=k",
            "trainer.no_sync_step for all steps of a window but the last",
        ),
    ),
    "state of no parameter": Case(
        lambda: can_skip(optax.flatten(optax.adam(0.1))),
        ValueError,
        (
            'expected an optimizer that keeps its state per parameter with unused="skip"',
            "ValueError: Need at least one array to concatenate",
            "Leave optax.flatten away",
            'unused="zero"',
        ),
    ),
    "state that cannot be mapped": Case(
        lambda: mapped(optax.flatten(optax.adam(0.1))),
        used.NotPerParameterError,
        ("ValueError: Need at least one array to concatenate",),
    ),
}
