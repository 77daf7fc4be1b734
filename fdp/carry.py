"""Buckets that are carried over: they cross in the next step, beneath its forward pass.

    step t    forward ........ | backward .............. |
    wire        (t - 1) c  f     a     b     d     e       |          a b d e: buckets in ready order
    step t+1                                               | forward ........ | backward ...
    wire                                                   |   c  f

A step that must end with all its gradients reduced leaves the wire idle during the next forward pass. But a parameter
is needed only where the forward pass reads it: its bucket may arrive as late as that. Which buckets are carried decides
what is gained. The first to be ready must not be: with them the wire starts early in the backward pass. The last to be
ready, the first layers, are needed at once, and the forward pass would stand still for them. So they are taken evenly
from all others, and cross in the order in which the forward pass needs them, about as fast as it gets there. Tried and
slower: to carry the last to be ready (`benchmarks/NOTES.md`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fdp import schedules, wire
from fdp.plan import Bucket, BucketPlan, make_bucket
from fdp.wire import Wire


def choose(plan: BucketPlan, count: int) -> tuple[Bucket, ...]:
    """Which buckets are carried over, in the order in which they cross: the last ready, first needed, in front.

    Args:
      plan: all buckets that could be, in ready order.
      count: how many; one bucket at least is not carried.
    """
    last = len(plan.buckets) - 1
    count = min(count, last)
    return tuple(plan.buckets[last + 1 + -j * last // count] for j in range(1, count + 1))


def trees(
    plan: BucketPlan, gradients: Mapping[int, jax.Array], buckets: Sequence[Bucket]
) -> tuple[Any, ...]:
    """One tree a bucket, structured like the params, None in place of every leaf of another bucket."""
    return tuple(
        tree_of(plan, {i: gradients[i] for i in bucket.leaf_indices}) for bucket in buckets
    )


def tree_of(plan: BucketPlan, by_leaf: Mapping[int, Any]) -> Any:
    """A tree structured like the params from values by leaf index, None where there is none."""
    return jax.tree.unflatten(plan.treedef, [by_leaf.get(i) for i in range(len(plan.leaves))])


def by_leaf(plan: BucketPlan, tree: Any) -> dict[int, jax.Array]:
    """What ``tree_of`` was given."""
    leaves = plan.treedef.flatten_up_to(tree)
    return {i: leaf for i, leaf in enumerate(leaves) if leaf is not None}


def cross(
    the_wire: Wire, plan: BucketPlan, unreduced: Sequence[Any]
) -> tuple[dict[int, jax.Array], jax.Array | None]:
    """Reduces what the last step carried over.

    Args:
      the_wire: how; its hook has no state.
      plan: any plan of the params.
      unreduced: as ``trees`` returned it.

    Returns:
      Reduced gradients by leaf index, and a token: it exists once all of them do.
    """
    buckets = [by_leaf(plan, tree) for tree in unreduced]
    carried = dataclasses.replace(
        plan, buckets=tuple(make_bucket(plan.leaves, tuple(bucket)) for bucket in buckets)
    )
    launches = schedules.check_launches(the_wire.schedule, carried)
    states = tuple(the_wire.hook.init(launch.bucket) for launch in launches)
    gradients = {i: g for bucket in buckets for i, g in bucket.items()}
    sent = wire.send(the_wire, launches, gradients, wire.nothing_sent(states), used_at_once=True)
    return sent.reduced, sent.token
