"""Errors about plans, and about gradients that are not the plan's. Run by ``test_messages``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fdp
from fdp.plan import plan_buckets

ONES = jnp.ones(3)
PARAMS = {"a": jnp.zeros((2, 3)), "b": {"c": jnp.zeros(3)}}
PLAN = plan_buckets(PARAMS, bucket_bytes=1)
PARTLY = plan_buckets(PARAMS, trainable={"a": True, "b": {"c": False}})
MAKE_THE_PLAN = "Make the plan from the same params (fdp.plan_buckets(params))"


class Case(NamedTuple):
    """``call`` raises ``kind`` with every one of ``says`` in its text: expected, came, edit."""

    call: Callable[[], Any]
    kind: type[Exception]
    says: tuple[str, ...]


def on_two(fn, *args):
    """``fn`` traced where an axis "data" of two replicas is bound."""
    return jax.make_jaxpr(fn, axis_env=[("data", 2)])(*args)


def reduce(grads, **options):
    return on_two(lambda g: fdp.reduce_gradients(g, "data", **options), grads)


CASES = {
    # plan
    "cap is a bool": Case(
        lambda: plan_buckets(PARAMS, bucket_bytes=True),
        TypeError,
        (
            "expected bucket_bytes to be a whole number of bytes",
            "got True of type bool",
            "write for example bucket_bytes=",
        ),
    ),
    "cap is a float": Case(
        lambda: plan_buckets(PARAMS, first_bucket_bytes=1e6),
        TypeError,
        (
            "expected first_bucket_bytes to be a whole number",
            "got 1000000.0 of type float",
            "first_bucket_bytes=25 * 2**20",
        ),
    ),
    "cap is zero": Case(
        lambda: plan_buckets(PARAMS, bucket_bytes=0),
        ValueError,
        (
            "expected bucket_bytes to be at least 1 byte",
            "got 0",
            "1 puts every leaf into its own bucket",
        ),
    ),
    "empty params": Case(
        lambda: plan_buckets({"a": None}),
        ValueError,
        (
            "expected params with at least one array leaf",
            "got an empty tree",
            "pass the parameters",
        ),
    ),
    "P40 an integer leaf": Case(
        lambda: plan_buckets({"a": {"steps": jnp.arange(3)}}),
        TypeError,
        (
            "expected a floating-point or complex array at 'a/steps'",
            "got dtype int32",
            "leave it out with trainable=",
        ),
    ),
    "P40 a float0 gradient": Case(
        lambda: reduce({"n": np.zeros(3, jax.dtypes.float0)}),
        TypeError,
        (
            "array at 'n', got dtype float0 (no gradient)",
            "keep it out of the differentiated params",
        ),
    ),
    "a PRNG key": Case(
        lambda: plan_buckets({"key": jax.random.key(0)}),
        TypeError,
        ("at 'key', got dtype key<fry> (a PRNG key)", "leave it out with trainable="),
    ),
    "a Python number": Case(
        lambda: plan_buckets([1.0]),
        TypeError,
        ("expected an array at '0'", "got 1.0 of type float", "wrap it in jnp.asarray("),
    ),
    "an unknown order": Case(
        lambda: plan_buckets(PARAMS, order="forward"),
        ValueError,
        ('expected order to be "reverse" or a permutation', "got 'forward'"),
    ),
    "order of other things": Case(
        lambda: plan_buckets(PARAMS, order=[0.0, 1.0]),
        TypeError,
        (
            "permutation of leaf indices (whole numbers)",
            "'float' object",
            "fdp.gradient_ready_order(",
        ),
    ),
    "no permutation": Case(
        lambda: plan_buckets(PARAMS, order=[1, 1, 2]),
        ValueError,
        (
            "each leaf index from 0 to 1 once",
            "got 3 indices; missing [0], repeated [1], out of range [2]",
            "gradient_ready_order",
        ),
    ),
    "unhidden holds other things": Case(
        lambda: plan_buckets(PARAMS, unhidden=["a"]),
        TypeError,
        (
            "expected unhidden to hold leaf indices (whole numbers)",
            "'str' object",
            "fdp.unhidden_leaves(",
        ),
    ),
    "unhidden holds no leaf": Case(
        lambda: plan_buckets(PARAMS, unhidden=(0, 7)),
        ValueError,
        ("leaf indices from 0 to 1", "got [7]", "fdp.unhidden_leaves(loss_fn, params, ...)"),
    ),
    "trainable has another structure": Case(
        lambda: plan_buckets(PARAMS, trainable={"a": True}),
        ValueError,
        ("a predicate on (path, leaf) or a tree of bools", "got PyTreeDef({'a': *})"),
    ),
    "trainable holds no bools": Case(
        lambda: plan_buckets(PARAMS, trainable={"a": True, "b": {"c": "yes"}}),
        TypeError,
        ("expected trainable to hold True or False at 'b/c'", "got 'yes' of type str"),
    ),
    # gradients that are not the plan's
    "P51 a leaf is missing": Case(
        lambda: reduce({"a": jnp.zeros((2, 3))}, plan=PLAN),
        ValueError,
        ("the plan expects a leaf 'b/c' (float32[3])", "got none there", MAKE_THE_PLAN),
    ),
    "P51 a leaf is None": Case(
        lambda: reduce({"a": jnp.zeros((2, 3)), "b": {"c": None}}, plan=PLAN),
        ValueError,
        (
            "the plan expects a leaf 'b/c' (float32[3])",
            "got none there",
            "left out with trainable=",
        ),
    ),
    "P51 a leaf too many": Case(
        lambda: reduce({**PARAMS, "new": ONES}, plan=PLAN),
        ValueError,
        (
            "gradients do not match the bucket plan",
            "got a leaf 'new' that the plan does not know",
            MAKE_THE_PLAN,
        ),
    ),
    "P51 other containers": Case(
        lambda: reduce((ONES, ONES), plan=plan_buckets([ONES, ONES])),
        ValueError,
        (
            "same paths, but other containers",
            "the plan expects PyTreeDef([*, *]), got PyTreeDef((*, *))",
            "Make the plan",
        ),
    ),
    "a left-out leaf is missing": Case(
        lambda: reduce({"a": jnp.zeros((2, 3)), "b": {}}, plan=PARTLY),
        ValueError,
        ("other containers", "where a leaf is left out, None may stand in its place"),
    ),
    "P37 another dtype": Case(
        lambda: reduce({**PARAMS, "a": jnp.zeros((2, 3), jnp.bfloat16)}, plan=PLAN),
        ValueError,
        (
            "at 'a': the plan expects float32[2,3], got bfloat16[2,3]",
            MAKE_THE_PLAN,
            "or cast the leaf",
        ),
    ),
    "a container where the plan has a leaf": Case(
        lambda: fdp.match.flatten_like_plan(
            PLAN, {"a": jnp.zeros((2, 3)), "b": {"c": [1.0, 2.0]}}, "params"
        ),
        ValueError,
        (
            "params do not match the bucket plan at 'b/c': the plan expects float32[3], got [1.0, 2.0] of type list",
        ),
    ),
}
