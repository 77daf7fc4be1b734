"""NaN and Inf, counted before the reduction spreads them: which replica, which bucket.

Afterwards every replica has them. (To skip such a step, ``optax.apply_if_finite`` around the optimizer is enough: it
sees reduced gradients, so all replicas decide alike.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdp.plan import BucketPlan


def count_nonfinite(gradients: Mapping[int, jax.Array], plan: BucketPlan) -> jax.Array:
    """Elements of each bucket that are NaN or Inf: int32 ``[buckets]``, of gradients by leaf index."""
    counts = [
        sum(
            jnp.sum(~jnp.isfinite(gradients[i]), dtype=jnp.int32) + jnp.zeros((), jnp.int32)
            for i in bucket.leaf_indices
        )
        for bucket in plan.buckets
    ]
    return jnp.stack(counts) if counts else jnp.zeros((0,), jnp.int32)


def describe_nonfinite(nonfinite: Any, plan: BucketPlan) -> str:
    """``StepInfo.nonfinite`` in words: one line for each replica and bucket that had NaN or Inf.

    Args:
      nonfinite: int32 ``[replicas, buckets]``. Where several processes hold it, each tells of its own replicas.
      plan: what ``trainer.plan`` gives for that state and batch.

    Returns:
      Text; empty if there is nothing to tell.

    Raises:
      TypeError: there are no counts, or ``plan`` is no plan.
      ValueError: the plan has another number of buckets.

    Example:
      >>> import jax.numpy as jnp, numpy as np, fdp
      >>> plan = fdp.plan_buckets({"w": jnp.zeros(3), "b": jnp.zeros(2)}, bucket_bytes=1)
      >>> print(fdp.describe_nonfinite(np.array([[0, 0], [0, 2]]), plan))
      replica 1: 2 of 2 gradient values in bucket 1 are NaN or Inf; its leaves: b
    """
    if not isinstance(plan, BucketPlan):
        raise TypeError(
            f"expected plan to be a BucketPlan, got {type(plan).__name__}: pass what trainer.plan(state, batch) gives."
        )
    if nonfinite is None:
        raise TypeError(
            "expected counts of shape [replicas, buckets], got None: build the trainer with count_nonfinite=True, and "
            "pass StepInfo.nonfinite of its train_step."
        )
    if np.ndim(nonfinite) != 2 or nonfinite.shape[1] != len(plan.buckets):
        raise ValueError(
            f"expected counts of shape [replicas, {len(plan.buckets)} buckets], got {np.shape(nonfinite)}: pass "
            "StepInfo.nonfinite, and the plan that trainer.plan(state, batch) gives for that step."
        )
    rows: dict[int, np.ndarray[Any, Any]] = {}
    if isinstance(nonfinite, jax.Array) and not nonfinite.is_fully_addressable:
        for shard in nonfinite.addressable_shards:
            start = shard.index[0].start or 0
            rows.update(enumerate(np.asarray(shard.data), start))
    else:
        rows.update(enumerate(np.asarray(nonfinite)))
    return "\n".join(
        f"replica {replica}: {row[k]} of {sum(bucket.sizes)} gradient values in bucket {k} are NaN or Inf; its "
        f"leaves: {', '.join(bucket.paths)}"
        for replica, row in sorted(rows.items())
        for k, bucket in enumerate(plan.buckets)
        if row[k]
    )
