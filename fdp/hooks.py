"""How one bucket crosses the axis.

A hook is a pair of pure functions in the style of optax: ``init`` gives the state a bucket needs (per replica,
carried by the caller), ``reduce`` takes a bucket's unreduced buffers and returns the reduced ones. Hooks compose by
wrapping. Where torch's hooks receive undivided gradients and must divide themselves, an fdp hook is told the
reduction (``"mean"`` or ``"sum"``) and does all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from fdp.compat import AxisName
from fdp.pack import Buffers
from fdp.plan import Bucket

HookState = Any


class BucketView(NamedTuple):
    """What a hook may know about the bucket in its hands (torch: ``GradBucket``).

    Attributes:
      bucket: leaf paths, shapes, dtype, bytes. Under flat packing the one buffer holds the leaves in this order.
      index: place in the launch order.
      is_last: whether it is the last one launched.
      axis_name: the mesh axis, or tuple of axes, to reduce over.
      axis_size: number of replicas.
      op: ``"mean"`` or ``"sum"``.
    """

    bucket: Bucket
    index: int
    is_last: bool
    axis_name: AxisName
    axis_size: int
    op: str


class CommHook(NamedTuple):
    """A communication hook.

    Attributes:
      name: for reports.
      init: ``bucket -> state``, a pytree of arrays that belongs to one replica; ``()`` for a hook without state.
      reduce: ``(buffers, state, view) -> (buffers, state)``. Must return buffers of the shapes and dtypes it got,
        equal on all replicas (under ``shard_map``'s check: replicated by type), and issue the same collectives on
        every replica.
    """

    name: str
    init: Callable[[Bucket], HookState]
    reduce: Callable[[Buffers, HookState, BucketView], tuple[Buffers, HookState]]


def all_reduce(*, predivide: float | None = None) -> CommHook:
    """Mean or sum of the buffers over the axis, by ``jax.lax.psum`` (torch: ``allreduce_hook``).

    For a mean the division comes before the sum, as in torch's reducer: the float16 sum of four gradients of 3e4
    is inf, their mean is not. With very many replicas and low precision the divided terms may lose bits at the
    other end; ``predivide`` splits the division into ``predivide`` before and ``replicas / predivide`` after.

    Args:
      predivide: factor to divide by before the sum, more than 0; all of it by default. Used for ``"mean"`` only.

    Raises:
      TypeError: ``predivide`` is no number.
      ValueError: ``predivide`` is not positive and finite.
    """
    if predivide is not None:
        if isinstance(predivide, bool) or not isinstance(predivide, (int, float)):
            raise TypeError(
                f"expected predivide to be a number, got {predivide!r} of type {type(predivide).__name__}: "
                "1.0 divides after the sum, None before it."
            )
        if not (predivide > 0 and math.isfinite(predivide)):
            raise ValueError(
                f"expected predivide to be more than 0 and finite, got {predivide!r}: 1.0 divides after the sum."
            )

    def init(bucket: Bucket) -> HookState:
        return ()

    def reduce(buffers: Buffers, state: HookState, view: BucketView) -> tuple[Buffers, HookState]:
        if view.op == "sum":
            return lax.psum(buffers, view.axis_name), state
        before = view.axis_size if predivide is None else predivide
        reduced: Buffers = lax.psum(tuple(_divide(x, before) for x in buffers), view.axis_name)
        return tuple(_divide(x, view.axis_size / before) for x in reduced), state

    return CommHook("all_reduce", init, reduce)


def _divide(x: jax.Array, by: float) -> jax.Array:
    return x if by == 1 else x / by
