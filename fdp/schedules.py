"""When each bucket crosses the axis.

A schedule is a function from a plan to a list of launches: plain data that says what must have happened before. The
reducer turns "must have happened" into data dependencies (``fdp.dependency``), so the compiled program holds it.

    ordered(1)     #0 -> #1 -> #2 -> #3            one on the wire at a time, each as soon as it is ready
    ordered(2)     #0 -> #2, #1 -> #3              two on the wire (the paper's round-robin groups, section 5.4)
    serialized()   backward -> #0 -> #1 -> ...     nothing before the whole backward is done: the honest baseline
    fused()        one reduction per dtype         what XLA makes of separate psums by itself
    unordered()    #0, #1, #2, #3                  independent: the compiler may merge and reorder them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fdp.plan import Bucket, BucketPlan, make_bucket


class Launch(NamedTuple):
    """One reduction.

    Attributes:
      bucket: what is reduced.
      after: positions of earlier launches whose results must exist before this one starts.
      after_backward: whether all gradients must exist before this one starts.
    """

    bucket: Bucket
    after: tuple[int, ...] = ()
    after_backward: bool = False


class Schedule(NamedTuple):
    """A named function from a plan to its launches, in launch order; every planned leaf in exactly one launch.

    Attributes:
      name: for reports.
      launches: ``plan -> (Launch, ...)``; ``after`` may only point backwards.
      in_loops: whether gradients that a loop makes slice by slice may be reduced inside it, before the loop is done.
    """

    name: str
    launches: Callable[[BucketPlan], tuple[Launch, ...]]
    in_loops: bool = True


def ordered(window: int = 1) -> Schedule:
    """Buckets in plan order, at most ``window`` on the wire: bucket k starts once bucket k - window is reduced.

    One order on all replicas is torch DDP's rule too (paper section 3.2.3: never launch bucket i + 1 before
    bucket i). XLA can neither merge nor reorder what depends on each other.

    Args:
      window: buckets in flight, at least 1. With 2 or more the compiler may merge buckets of one window.

    Raises:
      TypeError: ``window`` is no integer.
      ValueError: ``window`` is less than 1.
    """
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(
            f"expected window to be a whole number of buckets, got {window!r} of type {type(window).__name__}."
        )
    if window < 1:
        raise ValueError(
            f"expected window to be at least 1, got {window}: unordered() has no limit, serialized() no overlap."
        )

    def launches(plan: BucketPlan) -> tuple[Launch, ...]:
        return tuple(
            Launch(bucket, after=(k - window,) if k >= window else ())
            for k, bucket in enumerate(plan.buckets)
        )

    return Schedule(f"ordered(window={window})", launches)


def serialized() -> Schedule:
    """No reduction starts before every gradient exists; then one bucket after the other. Nothing overlaps."""

    def launches(plan: BucketPlan) -> tuple[Launch, ...]:
        return tuple(
            Launch(bucket, after=(k - 1,) if k else (), after_backward=k == 0)
            for k, bucket in enumerate(plan.buckets)
        )

    return Schedule("serialized", launches, in_loops=False)


def fused() -> Schedule:
    """All buckets of one dtype in one reduction, which can start only when the last gradient exists."""

    def launches(plan: BucketPlan) -> tuple[Launch, ...]:
        by_dtype: dict[str, list[int]] = {}
        for bucket in plan.buckets:
            by_dtype.setdefault(bucket.dtype.name, []).extend(bucket.leaf_indices)
        merged = (make_bucket(plan.leaves, indices) for indices in by_dtype.values())
        return tuple(Launch(bucket) for bucket in merged)

    return Schedule("fused", launches, in_loops=False)


def unordered() -> Schedule:
    """Independent reductions; how many the program runs is the compiler's choice."""

    def launches(plan: BucketPlan) -> tuple[Launch, ...]:
        return tuple(Launch(bucket) for bucket in plan.buckets)

    return Schedule("unordered", launches)


def check_launches(schedule: Schedule, plan: BucketPlan) -> tuple[Launch, ...]:
    """The schedule's launches for ``plan``, after checking the contract of ``Schedule``.

    Raises:
      ValueError: a planned leaf is launched twice or never, a launch mixes dtypes, or a launch waits for a later one.
    """
    launches = schedule.launches(plan)
    launched: Sequence[int] = [i for launch in launches for i in launch.bucket.leaf_indices]
    expected = [i for bucket in plan.buckets for i in bucket.leaf_indices]
    if sorted(launched) != sorted(expected):
        wrong = sorted(set(launched) ^ set(expected)) or sorted(
            i for i in set(launched) if launched.count(i) > 1
        )
        raise ValueError(
            f"expected schedule {schedule.name!r} to launch each planned leaf once; leaf "
            f"{_path(plan, wrong[0])!r} is launched {launched.count(wrong[0])} times."
        )
    for k, launch in enumerate(launches):
        dtypes = {plan.leaves[i].dtype for i in launch.bucket.leaf_indices}
        if dtypes != {launch.bucket.dtype}:
            raise ValueError(
                f"expected launch {k} of schedule {schedule.name!r} to hold one dtype, since a buffer has one; got "
                f"{sorted(dtype.name for dtype in dtypes)} in a bucket of {launch.bucket.dtype.name}: merge buckets "
                "of equal dtype only."
            )
        late = [j for j in launch.after if not 0 <= j < k]
        if late:
            raise ValueError(
                f"expected launch {k} of schedule {schedule.name!r} to wait for earlier launches only, "
                f"got after={launch.after}."
            )
    return launches


def _path(plan: BucketPlan, index: int) -> str:
    return plan.leaves[index].path if 0 <= index < len(plan.leaves) else f"<no leaf {index}>"
