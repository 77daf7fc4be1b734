"""Whether a tree is the one a plan was made for; if not, where it differs first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fdp.leaves import LeafSpec, path_string
from fdp.plan import BucketPlan


def flatten_like_plan(plan: BucketPlan, tree: Any, what: str = "gradients") -> list[Any]:
    """Leaves of ``tree`` by the plan's leaf indices, after checking that it is the tree the plan was made for.

    Left-out leaves may be anything, ``None`` included.

    Raises:
      ValueError: structure, shape or dtype differ; the message names the first differing path.
    """
    try:
        leaves: list[Any] = plan.treedef.flatten_up_to(tree)
    except ValueError:
        raise _other_structure(plan, tree, what) from None
    for spec, leaf in zip(plan.leaves, leaves, strict=True):
        if not spec.planned:
            continue
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape == spec.shape and dtype == spec.dtype:
            continue
        if leaf is None:
            raise _missing_leaf(spec, what)
        got = f"{leaf!r} of type {type(leaf).__name__}"
        if shape is not None and dtype is not None:
            # A NumPy float64 array is float32 to JAX, unless 64 bits are switched on.
            dtype = jnp.result_type(leaf)
            if shape == spec.shape and dtype == spec.dtype:
                continue
            got = f"{dtype.name}[{','.join(map(str, shape))}]"
        raise ValueError(
            f"{what} do not match the bucket plan at {spec.path!r}: the plan expects {spec}, got {got}. "
            "Make the plan from the same params (fdp.plan_buckets(params)), or cast the leaf."
        )
    return leaves


def _other_structure(plan: BucketPlan, tree: Any, what: str) -> ValueError:
    """The error for a tree of another structure than the plan's; it names the first difference."""
    found = [path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    there = set(found)
    for spec in plan.leaves:
        if spec.planned and spec.path not in there:
            return _missing_leaf(spec, what)
    known = {spec.path for spec in plan.leaves}
    for path in found:
        if path not in known:
            return ValueError(
                f"{what} do not match the bucket plan: got a leaf {path!r} that the plan does not know. "
                "Make the plan from the same params (fdp.plan_buckets(params))."
            )
    return ValueError(
        f"{what} do not match the bucket plan: same paths, but other containers; the plan expects "
        f"{plan.treedef}, got {jax.tree.structure(tree)}. Make the plan from the same params; where a leaf is "
        "left out, None may stand in its place."
    )


def _missing_leaf(spec: LeafSpec, what: str) -> ValueError:
    return ValueError(
        f"{what} do not match the bucket plan: the plan expects a leaf {spec.path!r} ({spec}), got none there. "
        "Make the plan from the same params (fdp.plan_buckets(params)); a leaf that needs no reduction is left "
        "out with trainable=."
    )
