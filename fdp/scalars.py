"""Everything in a step that is not a gradient and crosses the axis: loss, aux, model state, in one small reduction."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fdp.compat import AxisName


def reduce_small(
    tree: Any, how: Any, axis_name: AxisName, axis_size: int, *, first: Any = None
) -> Any:
    """Reduces all leaves of ``tree`` in one collective per wire dtype (one in all, when all are floating).

    ``"max"`` is another operation than a sum, and so another collective per wire dtype, where it is asked for.

    Args:
      tree: arrays, small ones.
      how: same structure, one of ``"mean"``, ``"sum"``, ``"first"`` (one replica's value), ``"max"`` per leaf.
      axis_name: mesh axis or axes; must be bound.
      axis_size: number of replicas.
      first: index of the replica whose value ``"first"`` takes; 0 if not given.

    Returns:
      The reduced tree: same shapes and dtypes, except that sums of bools and of integers of less than 32 bits are
      int32 or uint32.
    """
    leaves, treedef = jax.tree.flatten(tree)
    rules = jax.tree.leaves(how)
    if axis_size == 1:
        alone = [_widen(x) if rule == "sum" else x for x, rule in zip(leaves, rules, strict=True)]
        return jax.tree.unflatten(treedef, alone)
    is_first = lax.axis_index(axis_name) == (0 if first is None else first)
    wires: dict[tuple[str, Any], list[int]] = {}
    terms: list[jax.Array] = []
    for index, (leaf, rule) in enumerate(zip(leaves, rules, strict=True)):
        x = jax.random.key_data(leaf) if _is_key(leaf) else _widen(leaf)
        wire = (
            jnp.promote_types(x.dtype, jnp.float32)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else x.dtype
        )
        x = x.astype(wire)
        if rule == "first":
            x = jnp.where(is_first, x, jnp.zeros_like(x))
        elif rule == "mean":
            x = x / axis_size
        terms.append(x)
        wires.setdefault(("max" if rule == "max" else "sum", wire), []).append(index)
    out: list[Any] = [None] * len(leaves)
    for (operation, _), members in wires.items():
        reduce = lax.pmax if operation == "max" else lax.psum
        total = reduce(jnp.concatenate([jnp.ravel(terms[i]) for i in members]), axis_name)
        start = 0
        for i in members:
            size = math.prod(terms[i].shape)
            part = total[start : start + size].reshape(terms[i].shape)
            start += size
            out[i] = _restore(part, leaves[i], rules[i])
    return jax.tree.unflatten(treedef, out)


def mean_or_sum(x: Any) -> str:
    """How metrics are reduced: floating-point ones are averaged, counts (integers, bools) are added up."""
    return "mean" if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else "sum"


def mean_or_first(x: Any) -> str:
    """How model state is made equal: floating-point statistics are averaged, anything else is replica 0's."""
    return "first" if _is_key(x) or mean_or_sum(x) == "sum" else "mean"


def over_microbatches(x: jax.Array) -> jax.Array:
    """The same rule as ``mean_or_sum`` along the leading axis, the one that ``accumulate`` stacks aux on."""
    if mean_or_sum(x) == "sum":
        return jnp.sum(_widen(x), 0, dtype=_widen(x).dtype)
    return jnp.mean(wide(x), 0).astype(x.dtype)


def wide(x: jax.Array) -> jax.Array:
    """A floating ``x`` in at least 32 bits, to be added up in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _widen(x: Any) -> Any:
    """Bools and small integers in 32 bits: three replicas with a uint8 of 100 would come to 44."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int32)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 32:
        signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
        return x.astype(jnp.int32 if signed else jnp.uint32)
    return x


def _restore(part: jax.Array, like: Any, rule: str) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(part, impl=jax.random.key_impl(like))
    return part.astype(_widen(like).dtype if rule == "sum" else like.dtype)
