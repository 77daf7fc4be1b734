"""Everything in fdp that knows a JAX version.

Supported: jax >= 0.10, < 0.13. Only public names are used, but for one that has no public form (``coordination``).
The one moving part today is how a value's *varying axes* are spelled: with ``jax.shard_map(check_vma=True)`` every
value inside carries the set of mesh axes along which replicas may hold different data. jax 0.10 to 0.12 keep it in
``jax.typeof(x).mat.varying``; releases before and the documentation say ``jax.typeof(x).vma``. ``pmap``,
``vmap(axis_name=...)`` and ``check_vma=False`` track nothing: the set is always empty there.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import jax
from jax import lax

Tree = TypeVar("Tree")
AxisName = Hashable | tuple[Hashable, ...]


def axis_names(axis_name: AxisName) -> tuple[Hashable, ...]:
    """``axis_name`` as a tuple of names."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def varying_axes(x: Any) -> frozenset[Hashable]:
    """Mesh axes along which ``x`` may differ between replicas, as far as JAX tracks it."""
    return aval_varying_axes(jax.typeof(x))


def aval_varying_axes(aval: Any) -> frozenset[Hashable]:
    """The same for an abstract value (what ``jax.typeof`` and jaxpr variables carry)."""
    tracked = getattr(aval, "mat", None)
    if tracked is not None:
        return tracked.varying
    return getattr(aval, "vma", frozenset())


def axis_size(axis_name: AxisName) -> int:
    """Number of replicas along ``axis_name`` (the product, for several names).

    Raises:
      NameError: ``axis_name`` is not bound where this is called.
    """
    try:
        size = 1
        for name in axis_names(axis_name):
            size *= lax.axis_size(name)
        return size
    except NameError as error:
        raise NameError(
            f"expected mesh axis {axis_name!r} to be bound, but it is not: call this inside "
            f"jax.shard_map over a mesh with that axis, jax.pmap(..., axis_name={axis_name!r}) or "
            f"jax.vmap(..., axis_name={axis_name!r})."
        ) from error


def tracked_axes(axis_name: AxisName) -> tuple[Hashable, ...]:
    """Those names of ``axis_name`` along which JAX tracks varying values (``shard_map`` with the check on).

    ``axis_index`` differs on every replica by definition, so its type tells. A ``vmap`` inside a ``shard_map`` has
    an axis of each kind. On an axis of size one JAX can be configured to forget the axis; nothing is lost, because
    there is nothing to reduce.
    """
    names = axis_names(axis_name)
    return tuple(name for name in names if name in varying_axes(lax.axis_index(name)))


def tracks_varying(axis_name: AxisName) -> bool:
    """Whether JAX tracks varying values along any of the names."""
    return bool(tracked_axes(axis_name))


def varying(tree: Tree, axis_name: AxisName) -> Tree:
    """Marks every array of ``tree`` as differing per replica, so that gradients with respect to it stay local.

    Without it, ``jax.grad`` of replicated parameters inside a checked ``shard_map`` returns gradients that JAX
    has already summed over the axis, once per use of the parameter. Where nothing is tracked (``pmap``,
    ``vmap``, ``check_vma=False``) gradients are local anyway and this returns ``tree`` as it is.
    ``jax.lax.pcast`` alone is not idempotent and fails under ``vmap``; this is safe to call anywhere.
    """
    names = tracked_axes(axis_name)
    if not names:
        return tree

    def cast(x: Any) -> Any:
        missing = tuple(name for name in names if name not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def platform() -> str:
    """Platform the surrounding program is traced for: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Inside ``shard_map`` and ``pmap`` the mesh tells, also when compiling ahead of time for hardware that is not
    here; elsewhere it is the default backend.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    name = getattr(device, "platform", None) or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def coordination() -> tuple[Any, int, int] | None:
    """JAX's key-value client, this process's number in it, and how many processes there are.

    ``jax.distributed`` connects every process to a key-value store on process 0's host, and JAX has no public name
    for its client (0.10 to 0.12): the one private name used here. Unlike a collective, the store answers while
    devices are busy or disagree, and it can give up after a while. None where ``jax.distributed.initialize`` was not
    called, or where a later JAX has moved the name: callers then fall back to public collectives, which cannot give up.
    """
    try:
        from jax._src.distributed import global_state

        client, process = global_state.client, global_state.process_id
        return None if client is None else (client, process, global_state.num_processes)
    except (ImportError, AttributeError):
        return None
