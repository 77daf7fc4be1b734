"""All members of the open families, as the contract suites run them, and buckets to run them on.

A new hook, schedule or packing goes in here; ``test_contracts.test_no_member_is_left_out`` looks for those forgotten.
"""

import jax
import jax.numpy as jnp
import numpy as np
from stateful_hook import error_feedback

from fdp import hooks, pack, schedules
from fdp.plan import plan_buckets

# Name -> hook, and how far from the exact result one reduction may be, in units of the largest element.
HOOKS = {
    "all_reduce": (hooks.all_reduce(), 0.0),
    "all_reduce(predivide)": (hooks.all_reduce(predivide=2.0), 0.0),
    "error_feedback": (error_feedback(levels=8), 1 / 8),
    "compress(bfloat16)": (hooks.compress(jnp.bfloat16), 2**-7),
    "compress(float32)": (hooks.compress(jnp.float32), 0.0),
    "compress(float32, error_feedback)": (
        hooks.compress(jnp.float32, hook=error_feedback(levels=8)),
        1 / 8,
    ),
}
# Lossy hooks that keep no residual: what they lose adds up from step to step.
FORGETFUL = ("compress(bfloat16)",)
SCHEDULES = {
    "ordered()": schedules.ordered(),
    "ordered(2)": schedules.ordered(2),
    "ordered(3)": schedules.ordered(window=3),
    "ordered(100)": schedules.ordered(100),
    "serialized": schedules.serialized(),
    "fused": schedules.fused(),
    "unordered": schedules.unordered(),
}
PACKINGS = {
    "flat": pack.flat(),
    "leaves": pack.leaves(),
    "auto": pack.auto(),
    "auto(tpu)": pack.auto("tpu"),
}

REPLICAS = 4
SHAPES = {
    "several": [(3,), (2, 5), (), (0, 4)],
    "one": [(4, 3)],
    "none": [(0,), (2, 0)],
    "scalar": [()],
}
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64]
ROUNDING = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3, "complex64": 1e-6}


def bucket_of(shapes, dtype):
    """The one bucket of these leaves, and the leaves of each replica, ``[REPLICAS, *shape]``."""
    (bucket,) = plan_buckets([jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]).buckets
    rng = np.random.default_rng(0)
    leaves = []
    for shape in bucket.shapes:
        x = rng.normal(size=(REPLICAS, *shape))
        if np.issubdtype(dtype, np.complexfloating):
            x = x + 1j * rng.normal(size=x.shape)
        leaves.append(jnp.asarray(x, dtype))
    return bucket, leaves


def exact(x, op):
    """Mean or sum over replicas in double precision."""
    wide = np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)
    return wide.mean(0) if op == "mean" else wide.sum(0)
