"""Which gradients are born in a loop, slice by slice, and whether each slice can be reduced there.

    scan ... -> dW[12, 1024, 1024]          born, one slice an iteration
    g = convert dW                          followed: elementwise
    g' = transpose g                        followed: a move
    return g'                               the gradient of the leaf, and nobody else reads dW, g or g'

A gradient is placed in the loop when the equations between are all elementwise or moves and nobody else reads the
values on the way: whoever does must see them unreduced, and then the reduction waits until after the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fdp import jaxprs
from fdp.intercept import _ops
from fdp.intercept._flatten import Program, Step, Value


class Born(NamedTuple):
    """A slice as the loop makes it: output ``output`` of the body."""

    output: int


class Cut(NamedTuple):
    """The slice of an array that exists before the loop, stacked like the gradient."""

    value: Value


class Whole(NamedTuple):
    """A scalar that exists before the loop."""

    value: Value


class Apply(NamedTuple):
    """An elementwise equation on slices."""

    eqn: Any
    args: tuple[Slice, ...]


Slice = Born | Cut | Whole | Apply


@dataclasses.dataclass(frozen=True)
class Birth:
    """How a gradient comes out of a loop.

    Attributes:
      step: position of the loop in the program.
      slice: how one slice is made.
      shape: shape of one slice.
      dtype: dtype of one slice.
      moves: what is done with the stacked slices, in order.
      way: every value from the loop to the gradient.
      needs: values that must exist before the loop.
    """

    step: int
    slice: Slice
    shape: tuple[int, ...]
    dtype: Any
    moves: tuple[Step, ...]
    way: frozenset[Value]
    needs: frozenset[Value]


class NotInLoop(Exception):
    """Why a gradient is reduced after the loop."""


def find_births(
    program: Program, grads: Mapping[int, Value], min_slice_bytes: float
) -> tuple[dict[int, Birth], dict[int, str]]:
    """Decides for every gradient.

    Args:
      program: the gradient computation.
      grads: leaf -> its gradient.
      min_slice_bytes: loops whose slices together are smaller are left alone.

    Returns:
      Births of the leaves that are reduced in a loop, and for all others the reason why not.
    """
    graph = _Graph(program)
    births: dict[int, Birth] = {}
    reasons: dict[int, str] = {}
    for leaf, value in grads.items():
        try:
            births[leaf] = graph.birth(value)
        except NotInLoop as reason:
            reasons[leaf] = str(reason)
    while True:
        refused = _small_loops(births, min_slice_bytes) or _read_elsewhere(graph, grads, births)
        if not refused:
            return births, reasons
        for leaf, reason in refused.items():
            del births[leaf]
            reasons[leaf] = reason


def _small_loops(births: Mapping[int, Birth], min_slice_bytes: float) -> dict[int, str]:
    total: dict[int, int] = {}
    for birth in births.values():
        size = int(np.prod(birth.shape, dtype=np.int64)) * birth.dtype.itemsize
        total[birth.step] = total.get(birth.step, 0) + size
    return {
        leaf: f"an iteration makes {total[birth.step]:,} bytes of gradients, less than {min_slice_bytes:,}"
        for leaf, birth in births.items()
        if total[birth.step] < min_slice_bytes
    }


def _read_elsewhere(
    graph: _Graph, grads: Mapping[int, Value], births: Mapping[int, Birth]
) -> dict[int, str]:
    """Births whose values are also read by something that is not on the way to a gradient of that loop."""
    ways: dict[int, set[Value]] = {}
    for birth in births.values():
        ways.setdefault(birth.step, set()).update(birth.way)
    needed = {value for birth in births.values() for value in birth.needs}
    ends = [grads[leaf] for leaf in births]
    refused: dict[int, str] = {}
    for leaf, birth in births.items():
        for value in birth.way:
            if value in needed:
                refused[leaf] = "a gradient of a later loop is made from it"
            elif graph.program.outputs.count(value) != ends.count(value):
                refused[leaf] = "it is also returned as something else than this gradient"
            else:
                for reader in graph.readers[value]:
                    made = graph.program.steps[reader].outputs
                    if not set(made) <= ways[birth.step]:
                        name = _name(graph.program.steps[reader])
                        refused[leaf] = f"{name!r} also reads it, before it is reduced"
    return refused


def _name(step: Step) -> str:
    return "optimization_barrier" if step.eqn is None else jaxprs.primitive_name(step.eqn)


class _Graph:
    """Who makes and who reads each value."""

    def __init__(self, program: Program):
        self.program = program
        self.maker: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {v: [] for v in range(len(program.avals))}
        for position, step in enumerate(program.steps):
            for value in step.outputs:
                if value is not None:
                    self.maker[value] = position
            for value in set(step.inputs):
                self.readers[value].append(position)
        self._after: dict[int, set[Value]] = {}

    def birth(self, grad: Value) -> Birth:
        """How ``grad`` comes out of a loop; ``NotInLoop`` if it does not."""
        step, reasons = self._last_loop(grad)
        if step is None:
            raise NotInLoop(reasons[0] if reasons else "it does not come out of a loop")
        scan = jaxprs.scan_of(self.program.steps[step].eqn)
        assert scan is not None  # _last_loop returns loops
        if scan.length < 2:
            raise NotInLoop("the loop has a single iteration")
        way: set[Value] = set()
        needs: set[Value] = set()
        made, shape, moves = self._slice(grad, step, scan, way, needs)
        aval = self.program.avals[grad]
        return Birth(step, made, shape, aval.dtype, moves, frozenset(way), frozenset(needs))

    def _last_loop(self, value: Value) -> tuple[int | None, list[str]]:
        """The last loop that ``value`` is stacked by, and what else was met on the way back."""
        found: int | None = None
        reasons: list[str] = []
        pending, seen = [value], {value}
        while pending:
            current = pending.pop()
            position = self.maker.get(current)
            if position is None:
                continue
            step = self.program.steps[position]
            scan = None if step.eqn is None else jaxprs.scan_of(step.eqn)
            if scan is not None:
                if step.outputs.index(current) >= scan.num_carry:
                    found = position if found is None else max(found, position)
                else:
                    reasons.append("it is accumulated in the loop's carry")
            elif step.eqn is not None and _ops.is_followed(step.eqn):
                pending += [v for v in step.inputs if v not in seen]
                seen.update(step.inputs)
            else:
                reasons.append(f"it is made by {_name(step)!r}, not by a loop")
        return found, reasons

    def _slice(
        self, value: Value, loop: int, scan: jaxprs.Scan, way: set[Value], needs: set[Value]
    ) -> tuple[Slice, tuple[int, ...], tuple[Step, ...]]:
        """A slice of ``value``, its shape, and the moves that remain for afterwards."""
        position = self.maker.get(value)
        if value not in self._made_after(loop):
            return self._existing(value, loop, scan, needs), (), ()
        assert position is not None  # inputs are not made after anything
        step = self.program.steps[position]
        way.add(value)
        if position == loop:
            output = step.outputs.index(value)
            if output < scan.num_carry:
                raise NotInLoop("it is accumulated in the loop's carry")
            return Born(output), tuple(self.program.avals[value].shape[1:]), ()
        if step.eqn is None or not _ops.is_followed(step.eqn):
            raise NotInLoop(f"{_name(step)!r} stands between the loop and the gradient")
        parts = [(v, *self._slice(v, loop, scan, way, needs)) for v in step.inputs]
        own = [
            (part, shape, moves) for v, part, shape, moves in parts if v in self._made_after(loop)
        ]
        part, shape, moves = own[0]
        if _ops.is_move(step.eqn) and (moves or _ops.slice_params(step.eqn) is None):
            return part, shape, (*moves, step)
        alone = len(own) == 1 and all(
            isinstance(other, Whole) for _, other, _, _ in parts if other is not part
        )
        if any(later for _, _, later in own) and not (alone and _ops.is_elementwise(step.eqn)):
            raise NotInLoop(f"{_name(step)!r} needs other arrays in the layout of the gradient")
        if not _ops.is_elementwise(step.eqn):
            shape = tuple(self.program.avals[value].shape[1:])
        return Apply(step.eqn, tuple(part for _, part, _, _ in parts)), shape, moves

    def _existing(self, value: Value, loop: int, scan: jaxprs.Scan, needs: set[Value]) -> Slice:
        """``value`` does not depend on the loop; can it be there before the loop starts?"""
        pending, seen = [value], {value}
        while pending:
            position = self.maker.get(pending.pop())
            if position is None or position < loop:
                continue
            step = self.program.steps[position]
            if step.eqn is not None and (step.eqn.effects or jaxprs.scan_of(step.eqn) is not None):
                raise NotInLoop(f"{_name(step)!r} comes after the loop and is needed in it")
            pending += [v for v in step.inputs if v not in seen]
            seen.update(step.inputs)
        needs.add(value)
        shape = self.program.avals[value].shape
        if shape == ():
            return Whole(value)
        if shape[0] != scan.length:
            raise NotInLoop(
                "it is combined with an array that is not stacked like the loop's outputs"
            )
        return Cut(value)

    def _made_after(self, loop: int) -> set[Value]:
        """All values that depend on a loop's outputs."""
        if loop not in self._after:
            made = {v for v in self.program.steps[loop].outputs if v is not None}
            for step in self.program.steps[loop + 1 :]:
                if not made.isdisjoint(step.inputs):
                    made.update(v for v in step.outputs if v is not None)
            self._after[loop] = made
        return self._after[loop]
