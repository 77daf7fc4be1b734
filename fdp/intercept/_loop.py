"""One loop, rewritten so that each slice of the gradients is reduced while the next iteration computes.

    before                              after
    for i: g[i] = f(i)                  s = f(0)
    reduce(g)                           for i = 1..n-1:
                                            r = reduce(s)      on the wire ...
                                            s = f(i)           ... while this computes: neither needs the other
                                            out[i - 1] = r
                                        out[n - 1] = reduce(s)

The stacked result is a carried buffer that every iteration writes one slice of, and inputs are read by index: what
``lax.scan`` compiles to as well. Slicing the inputs for a shorter scan would copy all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fdp import jaxprs
from fdp.intercept import _ops
from fdp.intercept._flatten import Step, Value
from fdp.intercept._slices import Birth, Born, Cut, Slice, Whole

Slices = dict[int, jax.Array]
# (loop, unreduced slices, which iteration's, token, state) -> (reduced slices, token, state)
ReduceSlices = Callable[["Loop", Slices, jax.Array, Any, Any], tuple[Slices, Any, Any]]


class Loop(NamedTuple):
    """A loop whose gradients are reduced inside it.

    Attributes:
      index: which of the rewritten loops, in program order.
      leaves: leaves whose gradients it makes.
      slices: for each of them, shape and dtype of what one iteration makes.
      length: iterations.
      reverse: whether it runs from the last slice to the first, as most gradient loops do.
      unroll: iterations per trip of the compiled loop.
    """

    index: int
    leaves: tuple[int, ...]
    slices: tuple[jax.ShapeDtypeStruct, ...]
    length: int
    reverse: bool
    unroll: int

    @property
    def slice_nbytes(self) -> int:
        """Bytes of gradients that one iteration makes."""
        return sum(jaxprs.nbytes(one) for one in self.slices)


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """A loop and how to rewrite it.

    Attributes:
      loop: what callers are told of it.
      step: its equation in the flat program.
      births: how each leaf's gradient comes out of it.
      others: its stacked outputs that something else reads.
    """

    loop: Loop
    step: Step
    births: Mapping[int, Birth]
    others: tuple[int, ...]


class LoopResult(NamedTuple):
    """Attributes: carry, stacked ``others``, reduced stacked gradients, token and state after the loop."""

    carry: list[Any]
    others: list[Any]
    reduced: Slices
    token: Any
    state: Any


def run_loop(
    plan: LoopPlan,
    values: Mapping[Value, Any],
    reduce_slices: ReduceSlices,
    loop_token: Any,
    token: Any,
    state: Any,
    *,
    peel: bool,
    narrow: frozenset[int],
) -> LoopResult:
    """Evaluates the rewritten loop under the current trace.

    Args:
      plan: the loop.
      values: what its inputs and the values its births need are.
      reduce_slices: reduces one iteration's slices.
      loop_token: what the first reduction in the loop waits for.
      token: what the last reduction, after the loop, waits for.
      state: pytree of arrays with one entry per iteration, handed to ``reduce_slices`` with the slices.
      peel: run the first iteration before the loop, which has nothing to reduce. Otherwise the loop runs all of
        them and reduces zeros in the first: one reduction more, half the code.
      narrow: leaves whose slices wait in the dtype they were computed in.
    """
    scan = jaxprs.scan_of(plan.step.eqn)
    assert scan is not None  # a LoopPlan is made of a scan
    given = [values[v] for v in plan.step.inputs]
    consts, carry = given[: scan.num_consts], given[scan.num_consts :][: scan.num_carry]
    stacked = given[scan.num_consts + scan.num_carry :]
    last = scan.length - 1
    wait_as = {
        leaf: birth.computed_in if leaf in narrow else birth.dtype
        for leaf, birth in plan.births.items()
    }

    def place(k: Any) -> Any:
        """Where iteration ``k`` reads and writes."""
        return last - k if scan.reverse else k

    def iterate(k: Any, carry: Sequence[Any]) -> tuple[list[Any], Slices, list[Any]]:
        at = place(k)
        out = jaxprs.run_body(scan.body, [*consts, *carry, *(_cut(x, at) for x in stacked)])
        done: dict[int, Any] = {}
        slices = {
            leaf: _evaluate(birth.slice, out, values, at, done).astype(wait_as[leaf])
            for leaf, birth in plan.births.items()
        }
        return out[: scan.num_carry], slices, [out[i] for i in plan.others]

    def reduce(
        k: Any, slices: Slices, token: Any, state: Any, *, real: Any = True
    ) -> tuple[Slices, Any, Any]:
        at = place(k)
        slices = {leaf: one.astype(plan.births[leaf].dtype) for leaf, one in slices.items()}
        part = jax.tree.map(lambda whole: _cut(whole, at), state)
        reduced, token, new = reduce_slices(plan.loop, slices, at, token, part)
        if real is not True:
            new = jax.tree.map(lambda before, after: jnp.where(real, after, before), part, new)
        return reduced, token, jax.tree.map(lambda whole, one: _put(whole, one, at), state, new)

    def trip(loop_carry: Any, _: None) -> tuple[Any, None]:
        k, carry, slices, others, reduced, token, state = loop_carry
        # Zeros are reduced into a place that the next iteration writes again; state must not notice.
        before = k - 1 if peel else jnp.maximum(k - 1, 0)
        real = True if peel else k > 0
        done, token, state = reduce(before, slices, token, state, real=real)
        carry, slices, made = iterate(k, carry)
        reduced = {leaf: _put(reduced[leaf], done[leaf], place(before)) for leaf in reduced}
        others = [_put(whole, one, place(k)) for whole, one in zip(others, made, strict=True)]
        return (k + 1, carry, slices, others, reduced, token, state), None

    body_out = scan.body.jaxpr.outvars
    others = [_zeros((scan.length,), body_out[i].aval) for i in plan.others]
    if peel:
        carry, slices, made = iterate(0, carry)
        others = [_put(whole, one, place(0)) for whole, one in zip(others, made, strict=True)]
    else:
        types = jax.make_jaxpr(lambda carry: iterate(0, carry)[1])(carry).out_avals
        slices = dict(zip(sorted(plan.births), (_zeros((), aval) for aval in types), strict=True))
    types = _types(reduce, 0, slices, loop_token, state)
    reduced = {leaf: _zeros((scan.length,), types[0][leaf]) for leaf in slices}
    loop_token = jax.tree.map(jaxprs.as_varying_as, loop_token, types[1])
    state = jax.tree.map(jaxprs.as_varying_as, state, types[2])
    # A counter, not a scanned arange: XLA sees that it counts, and would load the arange from memory.
    start = (jnp.int32(int(peel)), list(carry), slices, others, reduced, loop_token, state)
    end, _ = lax.scan(trip, start, None, length=scan.length - int(peel), unroll=scan.unroll)
    _, carry, slices, others, reduced, _, state = end
    done, token, state = reduce(last, slices, token, state)
    reduced = {leaf: _put(reduced[leaf], done[leaf], place(last)) for leaf in reduced}
    return LoopResult(list(carry), list(others), reduced, token, state)


def _evaluate(
    slice_: Slice,
    body_out: Sequence[Any],
    values: Mapping[Value, Any],
    at: Any,
    done: dict[int, Any],
) -> Any:
    """The slice of iteration ``at``. ``done`` holds what is evaluated already, by identity."""
    if isinstance(slice_, Born):
        return body_out[slice_.output]
    if isinstance(slice_, Whole):
        return values[slice_.value]
    if isinstance(slice_, Cut):
        return _cut(values[slice_.value], at)
    if id(slice_) not in done:
        args = [_evaluate(arg, body_out, values, at, done) for arg in slice_.args]
        done[id(slice_)] = _ops.apply_to_slice(slice_.eqn, args)
    return done[id(slice_)]


def _cut(whole: Any, at: Any) -> Any:
    return lax.dynamic_index_in_dim(whole, at, keepdims=False, allow_negative_indices=False)


def _put(whole: Any, one: Any, at: Any) -> Any:
    return lax.dynamic_update_index_in_dim(whole, one, at, 0, allow_negative_indices=False)


def _zeros(leading: tuple[int, ...], aval: Any) -> Any:
    """Zeros that may differ between replicas where a value of type ``aval`` may."""
    return jaxprs.as_varying_as(jnp.zeros((*leading, *aval.shape), aval.dtype), aval)


def _types(fun: Callable[..., Any], *args: Any) -> Any:
    """What ``fun`` would return, as a tree of abstract values that say where replicas may differ."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)
