"""An identity whose backward pass reduces: the explicit form of what ``fdp.intercept`` does to a traced gradient.

    forward     params, replicated          ->  params, local
    backward    local gradients             ->  reduced gradients

Put it where a model reads its parameters, inside a scan body too: there each layer's gradient is reduced in the
iteration that makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fdp import compat, jaxprs
from fdp.compat import AxisName
from fdp.reduce import reduce_gradients

Tree = TypeVar("Tree")


def reduce_in_backward(
    params: Tree,
    axis_name: AxisName,
    reduce: Callable[[Tree], Tree] | None = None,
    **options: Any,
) -> Tree:
    """``params``, unchanged; gradients that flow back through it are reduced on the way.

    Call it inside ``shard_map`` (check on or off), ``pmap`` or ``vmap(axis_name=...)``, on a whole tree, a subtree or
    one layer's slice in a scan body; in flax as the ``trans_in_fn`` of ``nn.map_variables``. A parameter that is read
    in several places must pass through it once, before it is used: each pass reduces what flows through it.

    Args:
      params: pytree of floating-point parameters. Where JAX tracks varying axes they may be replicated, or local to
        each replica already; their gradient comes back with the same type.
      axis_name: mesh axis, or tuple of axes, that ``reduce`` reduces over.
      reduce: ``gradients -> reduced gradients``, same structure, shapes and dtypes, such as
        ``lambda g: jax.lax.pmean(g, "data")``; ``fdp.reduce_gradients`` with ``options`` by default.
      **options: ``plan``, ``hook``, ``schedule``, ``pack``, ``op`` of ``fdp.reduce_gradients``.

    Returns:
      ``params``; local to each replica by type where JAX tracks that, so that JAX does not add a sum of its own.

    Raises:
      NameError: the axis is not bound.
      TypeError: a leaf has no gradient (integers, keys); ``reduce`` changes the structure, a shape or a dtype, or
        returns what still differs per replica although the parameters do not.
    """
    compat.axis_size(axis_name)
    if reduce is not None and options:
        raise TypeError(
            f"expected reduce or options of fdp.reduce_gradients, got both (reduce and {', '.join(sorted(options))})."
        )
    if reduce is None:
        reduce = functools.partial(reduce_gradients, axis_name=axis_name, **options)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"expected floating-point parameters, got {jax.typeof(leaf).str_short()} at {name!r}: pass only the "
                "part of the tree that is trained."
            )
    types = jax.tree.map(jax.typeof, params)

    @jax.custom_vjp
    def identity(tree: Tree) -> Tree:
        return compat.varying(tree, axis_name)

    def forward(tree: Tree) -> tuple[Tree, None]:
        return identity(tree), None

    def backward(_: None, grads: Tree) -> tuple[Tree]:
        reduced = reduce(grads)
        _check_same(grads, reduced)
        _check_reduced(reduced, types, axis_name)
        return (jax.tree.map(jaxprs.as_varying_as, reduced, types),)

    identity.defvjp(forward, backward)
    return identity(params)


def _check_same(grads: Any, reduced: Any) -> None:
    """Raises where ``reduce`` returned something else than reduced gradients."""
    before, after = jax.tree.structure(grads), jax.tree.structure(reduced)
    if before != after:
        raise TypeError(f"expected reduce to return the structure it got, {before}, got {after}.")
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(reduced), strict=True
    ):
        if old.shape != new.shape or old.dtype != new.dtype:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"expected reduce to keep shapes and dtypes, but at {name!r} it made "
                f"{new.dtype}{list(new.shape)} of {old.dtype}{list(old.shape)}."
            )


def _check_reduced(reduced: Any, types: Any, axis_name: AxisName) -> None:
    """Raises where JAX's own type says that a gradient of replicated parameters was not reduced."""
    for (path, grad), aval in zip(
        jax.tree_util.tree_leaves_with_path(reduced), jax.tree.leaves(types), strict=True
    ):
        if not compat.varying_axes(grad) <= compat.aval_varying_axes(aval):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"expected reduce to return gradients that are equal on all replicas of axis {axis_name!r}, but at "
                f"{name!r} they still differ: reduce them, for example with jax.lax.pmean(grads, {axis_name!r})."
            )
