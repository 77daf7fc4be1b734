"""How one bucket crosses the axis.

A hook is a pair of pure functions in the style of optax: ``init`` gives the state a bucket needs (per replica,
carried by the caller), ``reduce`` takes a bucket's unreduced buffers and returns the reduced ones. Hooks compose by
wrapping. Where torch's hooks receive undivided gradients and must divide themselves, an fdp hook is told the
reduction (``"mean"`` or ``"sum"``) and does all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fdp import compat
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

    For a mean the division comes before the sum, as in torch's reducer: the float16 sum of four gradients of 3e4 is
    inf, their mean is not. On TPU, types with the range of float32 are divided after the sum, as ``lax.pmean`` does:
    there XLA makes the division part of the update, where before the sum it is a copy of the bucket.
    With very many replicas and low precision the divided terms may lose bits at the other end; ``predivide`` splits the
    division into ``predivide`` before and ``replicas / predivide`` after.

    Args:
      predivide: factor to divide by before the sum, more than 0; by default the number of replicas, and 1 on TPU for
        types with the range of float32. Used for ``"mean"`` only.

    Raises:
      TypeError: ``predivide`` is no number.
      ValueError: ``predivide`` is not positive and finite.
    """
    _check_predivide(predivide)

    def init(bucket: Bucket) -> HookState:
        return ()

    def reduce(buffers: Buffers, state: HookState, view: BucketView) -> tuple[Buffers, HookState]:
        if view.op == "sum":
            return lax.psum(buffers, view.axis_name), state
        before = _divides_first(view) if predivide is None else predivide
        reduced: Buffers = lax.psum(tuple(_divide(x, before) for x in buffers), view.axis_name)
        return tuple(_divide(x, view.axis_size / before) for x in reduced), state

    return CommHook("all_reduce", init, reduce)


def _divides_first(view: BucketView) -> float:
    """What a bucket is divided by before it is summed, where the caller leaves it open."""
    narrow = jnp.finfo(view.bucket.dtype).max < jnp.finfo(jnp.bfloat16).max
    return 1.0 if compat.platform() == "tpu" and not narrow else view.axis_size


def compress(
    dtype: Any, *, hook: CommHook | None = None, predivide: float | None = None
) -> CommHook:
    """Sends a bucket in another floating-point type: narrower to send less, wider to sum more exactly.

    ==========================  ============================================================================
    gradients, wire             use
    ==========================  ============================================================================
    float32, bfloat16           half the bytes (torch: ``bf16_compress_hook``)
    float32, float16            half the bytes and three more bits, but nothing above 65504 (``fp16_compress_hook``)
    bfloat16, float32           twice the bytes, and a sum over many replicas that is not rounded on the way
    complex64, any of these     as pairs of real and imaginary parts; the size of a part changes like a float's
    ==========================  ============================================================================

    A mean is divided in the wider of both types, before the sum and before the cast to a narrower wire: float32
    gradients whose *mean* fits float16 do not overflow. torch's hooks cast first. A bucket that has the wire's type
    already is not cast. What the cast rounds off is lost for good.

    The compilers for TPU and GPU keep the type that is asked for. XLA's CPU backend widens a 16-bit sum to float32,
    so that nothing is saved there, while values are rounded to the wire's type all the same.

    Args:
      dtype: of the wire: a floating-point type of 16 bits or more, such as ``jnp.bfloat16``.
      hook: what sends the buffers that were cast; ``all_reduce()`` by default. It is always told ``"sum"``, because
        the division is done here, and sees the bucket in the wire's type. A complex leaf of shape ``s`` is one of
        shape ``[*s, 2]`` for it.
      predivide: factor to divide a mean by before the cast, the number of replicas by default; the rest of the division
        comes after the sum.

    Raises:
      TypeError: ``dtype`` is no floating-point type, ``hook`` no ``CommHook``, or ``predivide`` no number.
      ValueError: ``dtype`` is narrower than 16 bits, or JAX does not hold it; ``predivide`` is not positive and finite.

    Source: torch ``default_hooks.fp16_compress_wrapper`` and ``bf16_compress_wrapper``; paper section 6.2.3.

    Example:
      >>> import jax, jax.numpy as jnp, fdp
      >>> hook = fdp.hooks.compress(jnp.bfloat16)  # eight bits of every number
      >>> grads = jnp.array([1.001, 2.0, 3.0])  # one gradient on each of three replicas
      >>> jax.vmap(
      ...     lambda g: fdp.reduce_gradients(g, "data", hook=hook, op="sum"), axis_name="data"
      ... )(grads)
      Array([6., 6., 6.], dtype=float32)
    """
    wire = _wire_dtype(dtype)
    _check_predivide(predivide)
    inner = all_reduce() if hook is None else hook
    if not isinstance(inner, CommHook):
        raise TypeError(
            f"expected hook to be a CommHook, got {inner!r}: call what makes it, for example "
            "fdp.hooks.compress(jnp.bfloat16, hook=fdp.hooks.all_reduce())."
        )

    def init(bucket: Bucket) -> HookState:
        return inner.init(_on_the_wire(bucket, wire))

    def reduce(buffers: Buffers, state: HookState, view: BucketView) -> tuple[Buffers, HookState]:
        before, after = 1.0, 1.0
        if view.op == "mean":
            before = view.axis_size if predivide is None else predivide
            after = view.axis_size / before
        sent = tuple(_cast(_divide(_widen(_parts(x), wire), before), wire) for x in buffers)
        seen = view._replace(bucket=_on_the_wire(view.bucket, wire), op="sum")
        got, state = inner.reduce(sent, state, seen)
        wide = jnp.promote_types(wire, jnp.finfo(view.bucket.dtype).dtype)
        out = (_divide(_cast(x, wide), after) for x in got)
        return tuple(_whole(x, like) for x, like in zip(out, buffers, strict=True)), state

    return CommHook(f"compress({wire.name}, {inner.name})", init, reduce)


def _wire_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        wire = np.dtype(dtype)
    except TypeError:
        wire = None
    if wire is None or not jnp.issubdtype(wire, jnp.floating):
        raise TypeError(
            f"expected dtype to be a floating-point type, got {dtype!r}: integers would round gradients to whole "
            "numbers, and complex ones are sent as pairs of the type given here. Write for example "
            "fdp.hooks.compress(jnp.bfloat16)."
        )
    if wire.itemsize < 2:
        raise ValueError(
            f"expected dtype to have 16 bits or more, got {wire.name}: a sum over replicas needs more digits, and "
            "the backends cannot add it. Use jnp.bfloat16 or jnp.float16."
        )
    if jax.dtypes.canonicalize_dtype(wire) != wire:
        raise ValueError(
            f"expected a dtype that JAX holds as it is, got {wire.name}: switch 64-bit mode on with "
            'jax.config.update("jax_enable_x64", True), or use jnp.float32.'
        )
    return wire


def _on_the_wire(bucket: Bucket, wire: np.dtype[Any]) -> Bucket:
    """``bucket`` as the hook inside ``compress`` sees it."""
    shapes = bucket.shapes
    if jnp.issubdtype(bucket.dtype, jnp.complexfloating):
        shapes = tuple((*shape, 2) for shape in shapes)
    nbytes = sum(math.prod(shape) for shape in shapes) * wire.itemsize
    return dataclasses.replace(bucket, shapes=shapes, dtype=wire, nbytes=nbytes)


def _parts(x: jax.Array) -> jax.Array:
    """A complex array as pairs of its parts, side by side, so that the leaves of a flat buffer stay where they are."""
    if not jnp.iscomplexobj(x):
        return x
    pairs = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
    return pairs.reshape(-1) if x.ndim == 1 else pairs


def _whole(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of ``_parts`` and of the cast."""
    if not jnp.iscomplexobj(like):
        return _cast(x, like.dtype)
    part = _cast(x, jnp.finfo(like.dtype).dtype).reshape(*like.shape, 2)
    return lax.complex(part[..., 0], part[..., 1])


def _widen(x: jax.Array, wire: np.dtype[Any]) -> jax.Array:
    return _cast(x, jnp.promote_types(x.dtype, wire))


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else x.astype(dtype)


def _check_predivide(predivide: Any) -> None:
    if predivide is None:
        return
    if isinstance(predivide, bool) or not isinstance(predivide, (int, float)):
        raise TypeError(
            f"expected predivide to be a number, got {predivide!r} of type {type(predivide).__name__}: "
            "1.0 divides after the sum, None before it."
        )
    if not (predivide > 0 and math.isfinite(predivide)):
        raise ValueError(
            f"expected predivide to be more than 0 and finite, got {predivide!r}: 1.0 divides after the sum."
        )


def _divide(x: jax.Array, by: float) -> jax.Array:
    return x if by == 1 else x / by
