"""Trees structured like the params in which a plan says which leaves are there; None stands for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fdp.plan import BucketPlan


def tree_of(plan: BucketPlan, by_leaf: Mapping[int, Any]) -> Any:
    """A tree structured like the params from values by leaf index, None where there is none."""
    return jax.tree.unflatten(plan.treedef, [by_leaf.get(i) for i in range(len(plan.leaves))])


def by_leaf(plan: BucketPlan, tree: Any) -> dict[int, jax.Array]:
    """What ``tree_of`` was given."""
    leaves = plan.treedef.flatten_up_to(tree)
    return {i: leaf for i, leaf in enumerate(leaves) if leaf is not None}


def select_trainable(plan: BucketPlan, params: Any) -> Any:
    """``params`` with None in place of every leaf the plan leaves out: what is differentiated and optimized."""
    if not plan.excluded:
        return params
    leaves = jax.tree.leaves(params)
    kept = [x if spec.planned else None for x, spec in zip(leaves, plan.leaves, strict=True)]
    return jax.tree.unflatten(plan.treedef, kept)


def merge_frozen(plan: BucketPlan, trainable: Any, params: Any) -> Any:
    """``trainable`` with its gaps filled from ``params``."""
    if not plan.excluded:
        return trainable
    trained = iter(jax.tree.leaves(trainable))
    leaves = jax.tree.leaves(params)
    merged = [
        next(trained) if spec.planned else x for x, spec in zip(leaves, plan.leaves, strict=True)
    ]
    return jax.tree.unflatten(plan.treedef, merged)
