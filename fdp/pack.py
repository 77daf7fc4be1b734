"""Gradients of one bucket <-> the buffers that cross the axis.

``flat``: one contiguous buffer per bucket: one collective whatever the compiler does, at the price of a copy in
and a copy out. ``leaves``: every leaf as it is: no copy, and XLA's combiner joins the leaves of a bucket into one
collective. A bucket of one leaf is never copied.

A packing is any object with the two functions of ``Packing``; ``unpack(bucket, pack(bucket, leaves))`` must return
the leaves bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from fdp import compat
from fdp.plan import Bucket

Buffers = tuple[jax.Array, ...]

# Up to here the copy into a flat buffer costs a TPU less than a synchronous all-reduce does.
FLAT_ON_TPU_BYTES = 2**20


class Packing(NamedTuple):
    """How a bucket's leaves become buffers and come back.

    Attributes:
      name: for reports.
      pack: ``(bucket, leaves) -> buffers``; leaves have the shapes of ``bucket.shapes``.
      unpack: ``(bucket, buffers) -> leaves``, its inverse. A hook keeps shapes and dtype of the buffers.
    """

    name: str
    pack: Callable[[Bucket, Sequence[jax.Array]], Buffers]
    unpack: Callable[[Bucket, Buffers], tuple[jax.Array, ...]]


def flat() -> Packing:
    """One buffer of shape ``[elements of the bucket]`` (torch DDP's layout, paper section 4.2).

    Raises:
      ValueError: when traced, where another mesh axis is left to XLA's partitioner: one flat buffer would gather what
        is sharded over it.
    """

    def pack(bucket: Bucket, leaves: Sequence[jax.Array]) -> Buffers:
        if len(leaves) == 1:
            return tuple(leaves)
        automatic = _automatic_axes()
        if automatic:
            raise ValueError(
                f"flat packing would gather leaves that are sharded over mesh axis {automatic[0]!r}, which is left to "
                f"XLA's partitioner (bucket of {bucket.paths[0]!r}): use pack=fdp.pack.leaves(), or leave pack out."
            )
        return (jnp.concatenate([jnp.ravel(leaf) for leaf in leaves]),)

    def unpack(bucket: Bucket, buffers: Buffers) -> tuple[jax.Array, ...]:
        if len(bucket.shapes) == 1:
            return buffers
        (buffer,) = buffers
        leaves: list[jax.Array] = []
        start = 0
        for size, shape in zip(bucket.sizes, bucket.shapes, strict=True):
            # Static slices: XLA reads the buffer in place, where jnp.split would go through dynamic slices.
            leaves.append(lax.slice(buffer, (start,), (start + size,)).reshape(shape))
            start += size
        return tuple(leaves)

    return Packing("flat", pack, unpack)


def leaves() -> Packing:
    """One buffer per leaf, unchanged. The compiler joins them; see ``fdp.schedules`` for what keeps buckets apart."""

    def identity(bucket: Bucket, arrays: Sequence[jax.Array]) -> Buffers:
        return tuple(arrays)

    return Packing("leaves", identity, identity)


def auto(platform: str | None = None) -> Packing:
    """``flat`` or ``leaves``, whichever was measured better on the platform the program is compiled for.

    ========  ========================================================================================
    CPU, GPU  ``flat``
    TPU       ``flat`` for buckets of up to ``FLAT_ON_TPU_BYTES``, ``leaves`` for larger ones
    ========  ========================================================================================

    Where another mesh axis is left to XLA's partitioner (``shard_map(axis_names=...)``), ``leaves``: a leaf may be
    sharded along it, and one flat buffer would gather it.

    Args:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; found out when traced if not given.
    """

    def chosen(bucket: Bucket) -> Packing:
        if _automatic_axes():
            return leaves()
        on_tpu = (platform or compat.platform()) == "tpu"
        return leaves() if on_tpu and bucket.nbytes > FLAT_ON_TPU_BYTES else flat()

    def pack(bucket: Bucket, arrays: Sequence[jax.Array]) -> Buffers:
        return chosen(bucket).pack(bucket, arrays)

    def unpack(bucket: Bucket, buffers: Buffers) -> tuple[jax.Array, ...]:
        return chosen(bucket).unpack(bucket, buffers)

    return Packing("auto", pack, unpack)


def count_buffers(packing: Packing, bucket: Bucket) -> int:
    """Buffers that ``packing`` makes of ``bucket``. Allocates nothing."""
    if len(bucket.shapes) == 1:
        return 1
    shapes = [jax.ShapeDtypeStruct(shape, bucket.dtype) for shape in bucket.shapes]
    return len(jax.eval_shape(lambda arrays: packing.pack(bucket, arrays), shapes))


def _automatic_axes() -> list[Any]:
    """Names of the mesh axes that XLA's partitioner shards over, where others are manual."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = list(zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True))
    if not any(kind == AxisType.Manual for _, kind, _ in kinds):
        return []
    return [name for name, kind, size in kinds if kind != AxisType.Manual and size > 1]
