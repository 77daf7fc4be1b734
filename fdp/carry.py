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
from fdp.trees import by_leaf
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


def buckets_of(
    gradients: Mapping[int, jax.Array], buckets: Sequence[Bucket], op: str
) -> tuple[dict[str, jax.Array], ...]:
    """Each bucket's gradients, by operation, place in the bucket and index of the leaf: ``"mean_0003_17"``.

    A dict is sorted by its keys, and the place in a flat buffer decides in which order a ring adds up. The operation is
    there because the rest of the same gradient, in ``state.carried.reduced``, has been through it.
    """
    return tuple(
        {f"{op}_{place:04}_{i}": gradients[i] for place, i in enumerate(bucket.leaf_indices)}
        for bucket in buckets
    )


def _leaf_of(key: str) -> int:
    return int(key.rpartition("_")[2])


def cross(
    the_wire: Wire, plan: BucketPlan, unreduced: Sequence[Mapping[str, jax.Array]]
) -> tuple[dict[int, jax.Array], jax.Array | None]:
    """Reduces what the last step carried over.

    Args:
      the_wire: how; its hook has no state.
      plan: any plan of the params.
      unreduced: as ``buckets_of`` returned it.

    Returns:
      Reduced gradients by leaf index, and a token: it exists once all of them do.
    """
    places = [[_leaf_of(key) for key in sorted(bucket)] for bucket in unreduced]
    carried = dataclasses.replace(
        plan, buckets=tuple(make_bucket(plan.leaves, indices) for indices in places)
    )
    launches = schedules.check_launches(the_wire.schedule, carried)
    states = tuple(the_wire.hook.init(launch.bucket) for launch in launches)
    gradients = {
        i: bucket[key]
        for bucket, indices in zip(unreduced, places, strict=True)
        for key, i in zip(sorted(bucket), indices, strict=True)
    }
    sent = wire.send(the_wire, launches, gradients, wire.nothing_sent(states), used_at_once=True)
    return sent.reduced, sent.token


def check_carried(
    plan: BucketPlan, reduced: Any, unreduced: Sequence[Mapping[str, Any]], op: str
) -> None:
    """Whether a state carries one gradient for each leaf that is trained, for this trainer's ``op``.

    Raises:
      ValueError: it was carried by a trainer of other params, of another ``trainable=`` or of another ``op=``; names
        the first leaf.
    """
    other = [key for bucket in unreduced for key in bucket if not key.startswith(f"{op}_")]
    if other:
        place, had = _leaf_of(other[0]), other[0].partition("_")[0]
        path = plan.leaves[place].path if place < len(plan.leaves) else f"leaf {place}"
        raise ValueError(
            f"expected state.carried to hold gradients for op={op!r}, as this trainer reduces them, but those of "
            f"{path!r} are for op={had!r}, and others are reduced that way already: end the step with finish(state) of "
            "the trainer that made it."
        )
    found = [_leaf_of(key) for bucket in unreduced for key in bucket]
    try:
        found += by_leaf(plan, reduced)
    except ValueError:  # another structure altogether
        found = []
    planned = {i for i, leaf in enumerate(plan.leaves) if leaf.planned}
    wrong = sorted(planned.symmetric_difference(found))
    if wrong:
        path = plan.leaves[wrong[0]].path if wrong[0] < len(plan.leaves) else f"leaf {wrong[0]}"
        has, needs = ("none", "one") if wrong[0] in planned else ("one", "none")
        raise ValueError(
            f"expected state.carried to hold a gradient for each leaf that this trainer trains, but at {path!r} it has "
            f"{has} and needs {needs}: end the step with finish(state) of the trainer that made it."
        )
