"""From a function of one replica to a function of global arrays: through shard_map, or through pmap.

Both take ``fn(replicated, hook_state, unreduced, batch) -> (replicated, per_replica)``. Replicated trees are equal on
all replicas; ``hook_state``, ``unreduced`` and ``per_replica`` have a leading replica axis outside and none inside;
batch leaves are ``[examples, ...]`` outside, ``[examples / replicas, ...]`` inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import core
from jax.sharding import Mesh, PartitionSpec

from fdp.compat import AxisName, axis_names
from fdp.data import replica_count

ReplicaFn = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class Driver(NamedTuple):
    """A replica function made global.

    Attributes:
      run: ``(replicated, hook_state, unreduced, batch) -> (replicated, per_replica)``, compiled once per shapes.
      lower: the same arguments ``-> jax.stages.Lowered``.
      structure: the same arguments ``-> results``, without their leaves: what ``fn`` says in static nodes of its
        results. Traced once for the three of them (pmap, which has no ``trace``, lowers too).
    """

    run: ReplicaFn
    lower: Callable[..., jax.stages.Lowered]
    structure: Callable[..., Any]


def shard_map_driver(
    fn: ReplicaFn,
    mesh: Mesh,
    axis_name: AxisName,
    *,
    donate: tuple[int, ...],
    compiler_options: Mapping[str, str] | None,
) -> Driver:
    """``jax.jit(jax.shard_map(...))``. Mesh axes other than ``axis_name`` stay with XLA's partitioner."""
    here, everywhere = PartitionSpec(axis_name), PartitionSpec()

    def local(replicated: Any, hook_state: Any, unreduced: Any, batch: Any) -> tuple[Any, Any]:
        replicated, per_replica = fn(replicated, _squeeze(hook_state), _squeeze(unreduced), batch)
        return replicated, _unsqueeze(per_replica)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(everywhere, here, here, here),
        out_specs=(everywhere, here),
        axis_names=set(axis_names(axis_name)),
        # With one replica nothing is reduced, so nothing could tell JAX that a result is replicated.
        check_vma=replica_count(mesh, axis_name) > 1,
    )
    inner = jax.jit(mapped, donate_argnums=donate)
    if not compiler_options:
        return Driver(inner, inner.lower, lambda *args: inner.trace(*args).out_info)
    jitted = jax.jit(mapped, donate_argnums=donate, compiler_options=dict(compiler_options))

    def run(*args: Any) -> Any:
        # Inside somebody's jit or scan the options are theirs to give: JAX takes them at the top only.
        traced = any(isinstance(x, core.Tracer) for x in jax.tree.leaves(args))
        return (inner if traced else jitted)(*args)

    return Driver(run, jitted.lower, lambda *args: jitted.trace(*args).out_info)


def pmap_driver(
    fn: ReplicaFn, mesh: Mesh, axis_name: AxisName, *, donate: tuple[int, ...]
) -> Driver:
    """``jax.pmap`` over the mesh's devices; batch leaves must come as ``[replicas, examples / replicas, ...]``.

    Replicated trees are ordinary arrays here too, without a device axis.
    """
    keep = tuple(i for i in range(4) if i not in donate)
    axes = (None, 0, 0, 0)

    # Two groups of arguments, rather than four arguments: where an argument is an empty tree and the number of leaves
    # happens to equal the number of arguments, pmap (jax 0.10 to 0.12) takes in_axes for the leaves' own and maps the
    # wrong ones. Nested in_axes do not take that path.
    def grouped(donated: tuple[Any, ...], kept: tuple[Any, ...]) -> tuple[Any, Any]:
        by_place = dict(zip(donate + keep, donated + kept, strict=True))
        return fn(*(by_place[i] for i in range(4)))

    mapped = jax.pmap(
        grouped,
        axis_name=axis_name,
        in_axes=(tuple(axes[i] for i in donate), tuple(axes[i] for i in keep)),
        out_axes=(None, 0),
        devices=list(mesh.devices.flat),
        donate_argnums=0,
    )

    def groups(*args: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(args[i] for i in donate), tuple(args[i] for i in keep)

    def structure(*args: Any) -> Any:
        tree = mapped.lower(*groups(*args)).out_tree
        return jax.tree.unflatten(tree, [None] * tree.num_leaves)

    return Driver(
        lambda *args: mapped(*groups(*args)), lambda *args: mapped.lower(*groups(*args)), structure
    )


def split_over_replicas(batch: Any, replicas: int) -> Any:
    """Batch leaves ``[examples, ...]`` as ``[replicas, examples / replicas, ...]``."""

    def split(x: Any) -> Any:
        shape = (replicas, x.shape[0] // replicas, *x.shape[1:])
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return x.reshape(shape)

    return jax.tree.map(split, batch)


def _squeeze(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _unsqueeze(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
