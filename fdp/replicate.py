"""The same values on every device of every process, and the proof that they can be.

torch DDP verifies shapes across ranks and broadcasts rank 0's values when it is constructed (paper section 4.1,
``_verify_param_shape_across_processes``); this does the same when a training state is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdp import exchange


def replicate(tree: Any, mesh: Mesh, what: str = "params") -> Any:
    """Copies process 0's values of ``tree`` to every device of ``mesh``, after verifying that processes agree.

    Shapes (``jax.ShapeDtypeStruct``) become shapes with the sharding they would have. Otherwise always a copy: the
    result may be donated without taking the caller's arrays along. Arrays that are already sharded over this mesh (a
    model that is sharded over other axes) keep their sharding.

    Args:
      tree: pytree of arrays, the same structure, shapes and dtypes in every process.
      mesh: where to.
      what: name of the tree, for messages.

    Raises:
      ValueError: processes hold different trees; names the first path that differs and the process.
    """
    if is_abstract(tree):
        return jax.tree.map(lambda x: abstract(x, _sharding_on(x, mesh)), tree)
    if jax.process_count() > 1:
        verify_same_structure(tree, what)
        tree = _broadcast(tree)

    shardings = jax.tree.map(lambda x: _sharding_on(x, mesh), tree)
    # A typed key cannot be put on devices of other processes, its numbers can.
    placed = jax.device_put(jax.tree.map(_key_data, tree), shardings)
    impls = [jax.random.key_impl(x) if _is_key(x) else None for x in jax.tree.leaves(tree)]

    def copied(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        whole = [
            jnp.copy(x) if impl is None else jax.random.wrap_key_data(jnp.copy(x), impl=impl)
            for x, impl in zip(leaves, impls, strict=True)
        ]
        return jax.tree.unflatten(treedef, whole)

    # device_put may hand back the caller's own buffers, whatever may_alias says, for the device they live on already.
    return jax.jit(copied, out_shardings=shardings)(placed)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def is_abstract(tree: Any) -> bool:
    """Whether ``tree`` holds shapes in place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and a sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def make(fn: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """``fn(*args)`` laid out by ``shardings`` (a tree, or one for all); shapes if ``args`` are."""
    if not is_abstract(args):
        return jax.jit(fn, out_shardings=shardings)(*args)
    shapes = jax.eval_shape(fn, *args)
    if not isinstance(shardings, NamedSharding):
        return jax.tree.map(abstract, shapes, shardings)
    return jax.tree.map(lambda x: abstract(x, shardings), shapes)


def _sharding_on(x: Any, mesh: Mesh) -> NamedSharding:
    """Its own sharding if that is on this mesh, replicated otherwise."""
    kept = getattr(x, "sharding", None)
    if isinstance(kept, NamedSharding) and kept.mesh == mesh:
        return kept
    return NamedSharding(mesh, PartitionSpec())


def verify_same_structure(tree: Any, what: str) -> None:
    """Checks that every process holds the same structure, shapes and dtypes. All processes call it.

    Raises:
      ValueError: in every process; names the first path that differs, the process, and both sides.
      TimeoutError: a process did not come to compare.
    """
    described = exchange.compare(f"comparing {what}", exchange.describe(tree))
    if described:
        raise ValueError(first_difference(described, what))


def first_difference(described: list[list[str]], what: str) -> str:
    """The message for processes that describe their trees differently."""
    found = exchange.first_difference(described)
    leaves = [len(described[process]) - 1 for process in (0, found.process)]
    return (
        f"expected {what} with the same structure, shapes and dtypes in every process, but "
        f"{exchange.these_processes(found.processes)} differ{'s' * (len(found.processes) == 1)} from process 0: "
        f"process 0 has {found.reference!r}, process {found.process} has {found.line!r} ({leaves[0]} and {leaves[1]} "
        "leaves). Build the model from the same configuration everywhere."
    )


def _broadcast(tree: Any) -> Any:
    """Process 0's values of every leaf that is local; arrays that span processes are consistent already."""
    leaves, treedef = jax.tree.flatten(tree)
    local = [
        i for i, x in enumerate(leaves) if not isinstance(x, jax.Array) or x.is_fully_addressable
    ]

    values = multihost_utils.broadcast_one_to_all([np.asarray(_key_data(leaves[i])) for i in local])
    for i, value in zip(local, values, strict=True):
        x = leaves[i]
        leaves[i] = (
            jax.random.wrap_key_data(value, impl=jax.random.key_impl(x)) if _is_key(x) else value
        )
    return jax.tree.unflatten(treedef, leaves)
