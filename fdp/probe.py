"""Which inputs a computation really used, on this replica, for this batch: read from its trace while it runs.

The traced computation is run equation by equation; beside every value goes a mask, one bool for each input that is
asked about: can a gradient flow from the input to this value? An equation joins the masks of what it reads. Only a
branch makes the answer depend on data:

    y = lax.cond(p, f(a), g(b))      mask of y = where p: mask of a, otherwise: mask of b

so masks are known while tracing (NumPy), until a branch turns one into a value of the program (JAX). They exist with
the loss, before the backward pass starts.

Masks say too much rather than too little. Branches are looked into through ``jit``, ``scan`` and ``checkpoint``; inside
a function with a derivative of its own (``custom_vjp``) all branches count as taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fdp import compat, jaxprs
from fdp.compat import AxisName

Mask = (
    Any  # bool [inputs asked about]; NumPy where known while tracing, JAX where it depends on data
)

# No gradient flows through these.
_CUTS = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})


def with_use(fn: Callable[..., Any], axis_name: AxisName) -> Callable[..., tuple[Any, jax.Array]]:
    """``fn`` with a mask: ``(first, *rest) -> (fn(first, *rest), mask)``.

    Args:
      fn: any function; the first element of what it returns (or all of it) is what is used for.
      axis_name: mesh axis or axes that masks may differ along.

    Returns:
      A function that computes the same. ``mask`` is bool ``[leaves of first]``: which leaves of ``first`` the first
      leaf of the result was computed from, in the branches that were taken.
    """

    def wrapped(first: Any, *rest: Any) -> tuple[Any, jax.Array]:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(first, *rest)
        count = len(jax.tree.leaves(first))
        values = jax.tree.leaves((first, rest))
        masks = [np.eye(count, dtype=bool)[i] for i in range(count)]
        masks += [np.zeros(count, bool)] * (len(values) - count)
        outs, out_masks = _Run(count, axis_name).body(jaxprs.body_of(closed), values, masks)
        result = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        return result, compat.varying(jnp.asarray(out_masks[0]), axis_name)

    return wrapped


class _Run:
    """Runs bodies with masks of ``count`` entries."""

    def __init__(self, count: int, axis_name: AxisName) -> None:
        self.none = np.zeros(count, bool)
        self.axis_name = axis_name

    def body(
        self, body: jaxprs.Body, values: Sequence[Any], masks: Sequence[Mask]
    ) -> tuple[list[Any], list[Mask]]:
        known: dict[Any, tuple[Any, Mask]] = {
            var: (value, self.none)
            for var, value in zip(body.jaxpr.constvars, body.consts, strict=True)
        }
        inputs = zip(body.jaxpr.invars, zip(values, masks, strict=True), strict=True)
        known.update(inputs)

        def read(atom: Any) -> tuple[Any, Mask]:
            return (atom.val, self.none) if jaxprs.is_literal(atom) else known[atom]

        def result(atom: Any) -> tuple[Any, Mask]:
            value, mask = read(atom)
            return (jaxprs.as_array(value, atom.aval) if jaxprs.is_literal(atom) else value), mask

        for eqn in body.jaxpr.eqns:
            given = [read(atom) for atom in eqn.invars]
            outs, out_masks = self.equation(
                body, eqn, [value for value, _ in given], [mask for _, mask in given]
            )
            for var, value, mask in zip(eqn.outvars, outs, out_masks, strict=True):
                if not jaxprs.is_dropped(var):
                    known[var] = value, mask if _has_gradient(var) else self.none
        results = [result(atom) for atom in body.jaxpr.outvars]
        return [value for value, _ in results], [mask for _, mask in results]

    def equation(
        self, body: jaxprs.Body, eqn: Any, values: list[Any], masks: list[Mask]
    ) -> tuple[Sequence[Any], Sequence[Mask]]:
        name = jaxprs.primitive_name(eqn)
        call = jaxprs.call_body(eqn)
        if call is not None and name in _INLINED:
            return self.body(call, values, masks)
        if _branches(eqn):
            scan = jaxprs.scan_of(eqn)
            if name == "cond" and eqn.params.get("branches_platforms") is None:
                return self.cond(eqn, values, masks)
            if scan is not None:
                return self.scan(scan, values, masks)
            if call is not None and jaxprs.is_remat(eqn):
                return self.remat(eqn, call, values, masks)
        mask = self.none if name in _CUTS else functools.reduce(_either, masks, self.none)
        return jaxprs.run_eqn(body.jaxpr, eqn, values), [mask] * len(eqn.outvars)

    def cond(
        self, eqn: Any, values: list[Any], masks: list[Mask]
    ) -> tuple[Sequence[Any], Sequence[Mask]]:
        def taken(branch: jaxprs.Body) -> Callable[[list[Any]], tuple[list[Any], list[Any]]]:
            def run(operands: list[Any]) -> tuple[list[Any], list[Any]]:
                outs, out_masks = self.body(branch, operands, masks[1:])
                return outs, self.dynamic(out_masks)

            return run

        return lax.switch(values[0], [taken(b) for b in jaxprs.branches_of(eqn)], values[1:])

    def scan(
        self, scan: jaxprs.Scan, values: list[Any], masks: list[Mask]
    ) -> tuple[Sequence[Any], Sequence[Mask]]:
        first, last = scan.num_consts, scan.num_consts + scan.num_carry

        def iteration(carry: Any, xs: list[Any]) -> Any:
            state, state_masks = carry
            outs, out_masks = self.body(
                scan.body,
                [*values[:first], *state, *xs],
                [*masks[:first], *state_masks, *masks[last:]],
            )
            out_masks, kept = self.dynamic(out_masks), scan.num_carry
            return (outs[:kept], out_masks[:kept]), (outs[kept:], out_masks[kept:])

        carry = (values[first:last], self.dynamic(masks[first:last]))
        (state, state_masks), (ys, y_masks) = lax.scan(
            iteration,
            carry,
            values[last:],
            length=scan.length,
            reverse=scan.reverse,
            unroll=scan.unroll,
        )
        return [*state, *ys], [*state_masks, *(jnp.any(mask, axis=0) for mask in y_masks)]

    def remat(
        self, eqn: Any, call: jaxprs.Body, values: list[Any], masks: list[Mask]
    ) -> tuple[Sequence[Any], Sequence[Mask]]:
        def run(values: list[Any]) -> tuple[list[Any], list[Any]]:
            outs, out_masks = self.body(call, values, masks)
            return outs, self.dynamic(out_masks)

        again = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(run, **again)(values)

    def dynamic(self, masks: Sequence[Mask]) -> list[jax.Array]:
        """As values of the program, of one type in every branch and iteration."""
        return [compat.varying(jnp.asarray(mask), self.axis_name) for mask in masks]


def _branches(eqn: Any) -> bool:
    """Whether an equation is a branch, or has one inside that can be looked into."""
    if jaxprs.primitive_name(eqn) == "cond":
        return True
    call, scan = jaxprs.call_body(eqn), jaxprs.scan_of(eqn)
    inner = call or (None if scan is None else scan.body)
    return inner is not None and any(map(_branches, inner.jaxpr.eqns))


def _has_gradient(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _either(a: Mask, b: Mask) -> Mask:
    both_known = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    return np.logical_or(a, b) if both_known else jnp.logical_or(a, b)
