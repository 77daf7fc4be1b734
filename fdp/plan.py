"""Which gradient goes into which bucket: shapes in, a frozen plan out. No array is touched here.

    leaves in tree order    a   b   c   d   e
    ready in this order     e   d   c   b   a      order="reverse": the last layer's gradient is born first
                            └┬┘ └──┬──┘ └──┬──┘    a cap of two leaves, a first cap of one
    buckets                 #0    #1      #2       #0 is small, so that communication starts early

A bucket closes when the next leaf would take it over the cap, so no bucket of several leaves exceeds the cap.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from fdp.leaves import LeafSpec, read_leaves

DEFAULT_BUCKET_BYTES = 25 * 2**20
DEFAULT_FIRST_BUCKET_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves that cross the axis together.

    Attributes:
      leaf_indices: positions of the leaves in ``jax.tree.leaves`` order, in the order they are packed.
      paths: their paths, such as ``"dense/kernel"``.
      shapes: their shapes.
      dtype: the one dtype all of them share.
      nbytes: their size together, in bytes.
    """

    leaf_indices: tuple[int, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    nbytes: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each leaf."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """A partition of a parameter tree into buckets, in launch order. Hashable; holds no arrays.

    Attributes:
      buckets: in the order they are launched.
      leaves: one ``LeafSpec`` per leaf of the tree, in ``jax.tree.leaves`` order.
      treedef: structure of the tree the plan was made for.
      bucket_bytes: the cap it was made with.
      first_bucket_bytes: the cap of the first bucket.
    """

    buckets: tuple[Bucket, ...]
    leaves: tuple[LeafSpec, ...]
    treedef: Any
    bucket_bytes: int
    first_bucket_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes reduced in one step."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def excluded(self) -> tuple[int, ...]:
        """Indices of the leaves that no bucket holds (frozen parameters)."""
        return tuple(i for i, leaf in enumerate(self.leaves) if not leaf.planned)

    def fingerprint(self) -> str:
        """64 hex digits, equal on two hosts exactly when their plans would issue the same reductions."""
        content = (
            [(b.leaf_indices, b.paths, b.shapes, b.dtype.name) for b in self.buckets],
            [(leaf.path, leaf.shape, leaf.dtype.name, leaf.planned) for leaf in self.leaves],
        )
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def __str__(self) -> str:
        rows = [("bucket", "leaves", "bytes", "dtype", "first path", "last path")]
        for index, bucket in enumerate(self.buckets):
            first, last = bucket.paths[0], bucket.paths[-1]
            count = str(len(bucket.paths))
            rows.append((str(index), count, f"{bucket.nbytes:,}", bucket.dtype.name, first, last))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        right = (True, True, True, False, False, False)
        lines = [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in rows
        ]
        planned = len(self.leaves) - len(self.excluded)
        lines.append(
            f"{len(self.buckets)} buckets, {planned} leaves, {self.nbytes:,} bytes; "
            f"cap {self.bucket_bytes:,}, first bucket {self.first_bucket_bytes:,}"
            + (f"; {len(self.excluded)} leaves excluded" if self.excluded else "")
        )
        return "\n".join(lines)


def plan_buckets(
    params: Any,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    order: str | Sequence[int] = "reverse",
    unhidden: Collection[int] = (),
    trainable: Callable[[str, Any], bool] | Any | None = None,
) -> BucketPlan:
    """Partitions ``params`` into buckets.

    Walks the leaves in ``order``. Each dtype has one open bucket; it closes when the next leaf would take it
    over the cap. A leaf that fills the cap by itself gets a bucket of its own and leaves the open one
    open, so that a model of large kernels and small biases does not send every bias alone. Buckets are launched
    in the order in which their *last* leaf comes up. Leaves of ``unhidden`` do not join a bucket of other leaves that
    is worth a launch, one of at least ``first_bucket_bytes``: it would wait for them, and lose what it could hide
    behind.

    Follows torch DDP (paper section 3.2.2 and 4.2; ``compute_bucket_assignment_by_size``) with four departures:
    torch closes a bucket after adding the leaf that crosses the cap and so overshoots it, fdp never does; torch
    gives every dtype a small first bucket, fdp only the one that is opened first, since a small bucket serves
    to start communication early; torch finds the ready order by running one step and rebuilding, fdp takes it as
    an argument (see ``gradient_ready_order``) before the first; and torch knows nothing of ``unhidden``.

    Args:
      params: a pytree of arrays or ``jax.ShapeDtypeStruct``; only shapes and dtypes are read. ``None`` leaves
        pass through. Zero-size leaves are kept.
      bucket_bytes: cap of a bucket in bytes; 25 MiB is torch's default. 1 gives every leaf its own bucket.
      first_bucket_bytes: cap of the bucket that is opened first; at most ``bucket_bytes`` counts.
      order: ``"reverse"`` (reverse tree order, torch's first guess) or a permutation of the leaf indices, first
        to be ready first.
      unhidden: indices of leaves whose reduction nothing can hide: what ``unhidden_leaves`` returns.
      trainable: leaves for which this is false are left out: a predicate on (path, leaf), or a pytree of bools
        with the structure of ``params``. Left-out leaves may have any dtype.

    Returns:
      A ``BucketPlan``. The same input gives the same plan on every host.

    Raises:
      TypeError: a leaf is no array or has a dtype that has no gradient (the message names its path); a cap or
        an element of ``order`` is no integer.
      ValueError: ``params`` has no leaves, a cap is not positive, ``order`` is no permutation, ``unhidden`` holds
        what is no leaf index, or ``trainable`` has another structure.

    Example:
      >>> import jax, jax.numpy as jnp, fdp
      >>> params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32), "b": jnp.zeros(256)}
      >>> [bucket.paths for bucket in fdp.plan_buckets(params).buckets]
      [('w', 'b')]
    """
    bucket_bytes = _check_cap("bucket_bytes", bucket_bytes)
    first_bucket_bytes = min(_check_cap("first_bucket_bytes", first_bucket_bytes), bucket_bytes)
    leaves, treedef = read_leaves(params, trainable)
    groups = _assign(
        leaves,
        _order_indices(order, len(leaves)),
        _check_unhidden(unhidden, len(leaves)),
        bucket_bytes,
        first_bucket_bytes,
    )
    buckets = tuple(make_bucket(leaves, group) for group in groups)
    return BucketPlan(buckets, leaves, treedef, bucket_bytes, first_bucket_bytes)


def make_bucket(leaves: Sequence[LeafSpec], indices: Sequence[int]) -> Bucket:
    """The bucket that holds ``leaves[i] for i in indices``."""
    chosen = [leaves[i] for i in indices]
    return Bucket(
        leaf_indices=tuple(indices),
        paths=tuple(leaf.path for leaf in chosen),
        shapes=tuple(leaf.shape for leaf in chosen),
        dtype=chosen[0].dtype,
        nbytes=sum(leaf.nbytes for leaf in chosen),
    )


def without(plan: BucketPlan, leaf_indices: Collection[int]) -> BucketPlan:
    """``plan`` with these leaves taken out of its buckets (they are reduced elsewhere); empty buckets are dropped."""
    if not leaf_indices:
        return plan
    kept = [[i for i in bucket.leaf_indices if i not in leaf_indices] for bucket in plan.buckets]
    buckets = tuple(make_bucket(plan.leaves, indices) for indices in kept if indices)
    return dataclasses.replace(plan, buckets=buckets)


def _check_cap(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"expected {name} to be a whole number of bytes, got {value!r} of type {type(value).__name__}: "
            f"write for example {name}=25 * 2**20 for 25 MiB."
        )
    if value <= 0:
        raise ValueError(
            f"expected {name} to be at least 1 byte, got {value}: 1 puts every leaf into its own bucket, a "
            "number above the model's size puts all into one."
        )
    return int(value)


def _order_indices(order: Any, count: int) -> list[int]:
    if isinstance(order, str):
        if order != "reverse":
            raise ValueError(
                f'expected order to be "reverse" or a permutation of leaf indices, got {order!r}.'
            )
        return list(range(count - 1, -1, -1))
    try:
        indices = [operator.index(i) for i in order]
    except TypeError as error:
        raise TypeError(
            f'expected order to be "reverse" or a permutation of leaf indices (whole numbers), got {error}: pass what '
            "fdp.gradient_ready_order(loss_fn, params, ...) returns."
        ) from None
    if sorted(indices) != list(range(count)):
        repeated = sorted(i for i, times in collections.Counter(indices).items() if times > 1)[:3]
        missing = sorted(set(range(count)) - set(indices))[:3]
        outside = sorted({i for i in indices if not 0 <= i < count})[:3]
        raise ValueError(
            f"expected order to hold each leaf index from 0 to {count - 1} once, got {len(indices)} indices; "
            f"missing {missing}, repeated {repeated}, out of range {outside} (at most three of each shown): "
            "pass what fdp.gradient_ready_order(loss_fn, params, ...) returns for the same params."
        )
    return indices


def _check_unhidden(unhidden: Any, count: int) -> frozenset[int]:
    try:
        indices = frozenset(operator.index(i) for i in unhidden)
    except TypeError as error:
        raise TypeError(
            f"expected unhidden to hold leaf indices (whole numbers), got {error}: pass what "
            "fdp.unhidden_leaves(loss_fn, params, ...) returns."
        ) from None
    if outside := sorted(i for i in indices if not 0 <= i < count)[:3]:
        raise ValueError(
            f"expected unhidden to hold leaf indices from 0 to {count - 1}, got {outside} (at most three shown): "
            "pass what fdp.unhidden_leaves(loss_fn, params, ...) returns for the same params."
        )
    return indices


def _assign(
    leaves: Sequence[LeafSpec],
    order: Sequence[int],
    unhidden: Collection[int],
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> list[list[int]]:
    """Groups of leaf indices, in launch order."""
    closed: list[list[int]] = []
    open_: dict[np.dtype[Any], tuple[list[int], int, int]] = {}  # dtype -> (indices, bytes, cap)
    next_cap = first_bucket_bytes
    for index in order:
        leaf = leaves[index]
        if not leaf.planned:
            continue
        if leaf.dtype in open_:
            group, size, cap = open_[leaf.dtype]
            waits = index in unhidden and group[-1] not in unhidden
            if size + leaf.nbytes <= cap and not (waits and size >= first_bucket_bytes):
                group.append(index)
                open_[leaf.dtype] = (group, size + leaf.nbytes, cap)
                continue
        if leaf.nbytes >= next_cap:
            closed.append([index])
        else:
            if leaf.dtype in open_:
                closed.append(open_[leaf.dtype][0])
            open_[leaf.dtype] = ([index], leaf.nbytes, next_cap)
        next_cap = bucket_bytes
    closed.extend(group for group, _, _ in open_.values())
    position = {index: place for place, index in enumerate(order)}
    return sorted(closed, key=lambda group: position[group[-1]])
