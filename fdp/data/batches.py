"""Batches on a mesh, and whether they fit it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdp.compat import AxisName, axis_names
from fdp.leaves import path_string


def global_batch(batch: Any, mesh: Mesh, axis_name: AxisName = "data") -> Any:
    """A batch whose leading axis is sharded over ``axis_name``.

    In one process ``batch`` is the whole batch. With several, NumPy and process-local arrays are this process's
    share, the same number of examples on each (``jax.make_array_from_process_local_data``); arrays that already
    span processes are taken as they are.

    Args:
      batch: pytree of arrays ``[examples, ...]``.
      mesh: mesh with the axis.
      axis_name: mesh axis, or tuple of axes.

    Returns:
      The same tree of global arrays; ``jax.ShapeDtypeStruct`` leaves get the sharding.
    """
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch))
    if jax.process_count() == 1 and not shapes:
        return jax.device_put(batch, sharding)

    def place(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        return jax.make_array_from_process_local_data(sharding, x)

    return jax.tree.map(place, batch)


def check_batch(batch: Any, replicas: int, num_microbatches: int, processes: int = 1) -> None:
    """Checks that the batch splits evenly.

    Args:
      batch: pytree of arrays ``[examples, ...]``.
      replicas: replicas the leading axis is split over, in this process's share.
      num_microbatches: microbatches each replica's share is split into.
      processes: processes that each bring such a share; for the message.

    Raises:
      ValueError: the batch is empty, a leaf has no leading axis, leaves disagree on their number of examples, or that
        number does not divide by replicas x microbatches; the message gives the numbers and the nearest sizes.
    """
    examples, unit = count_examples(batch), replicas * num_microbatches
    if examples == 0 or examples % unit:
        below, above = examples // unit * unit, (examples // unit + 1) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        share = f" in each of {processes} processes" if processes > 1 else ""
        raise ValueError(
            f"expected a batch size that divides by {replicas} replicas x {num_microbatches} microbatches = {unit}"
            f"{share}, got {examples} examples: the nearest sizes are {nearest}."
        )


def count_examples(batch: Any) -> int:
    """Length of the leading axis that all leaves of ``batch`` share.

    Raises:
      ValueError: the batch has no leaves, a leaf has no leading axis, or leaves disagree; names the paths.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(batch)
    if not with_paths:
        raise ValueError("expected a batch with at least one array, got an empty tree.")
    first: tuple[Any, int] | None = None
    for path, leaf in with_paths:
        shape = jnp.shape(leaf)
        if not shape:
            raise ValueError(
                f"expected every batch leaf to have a leading axis of examples, got a scalar at {path_string(path)!r}: "
                "close over constants in loss_fn, or broadcast it to one value per example."
            )
        if first is None:
            first = (path, shape[0])
        elif shape[0] != first[1]:
            raise ValueError(
                f"expected batch leaves with the same number of examples, got {first[1]} at "
                f"{path_string(first[0])!r} and {shape[0]} at {path_string(path)!r}."
            )
    return first[1] if first else 0


def replica_count(mesh: Mesh, axis_name: AxisName) -> int:
    """Number of replicas on ``mesh`` along ``axis_name``.

    Raises:
      ValueError: the mesh has no such axis.
    """
    missing = [name for name in axis_names(axis_name) if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"expected a mesh with axis {missing[0]!r}, got axes {tuple(mesh.shape)}: pass axis_name=..., or name the "
            f"mesh's axis {missing[0]!r}."
        )
    return math.prod(mesh.shape[name] for name in axis_names(axis_name))
