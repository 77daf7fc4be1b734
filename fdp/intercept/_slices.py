"""How a gradient comes out of a loop: one slice an iteration, and what is done to it on the way.

scan ... -> dW[12, 1024, 1024]          Born: one slice an iteration
g = convert dW                          Apply(convert, Born)
d = add g wd                            Apply(add, Apply(convert, Born), Cut(wd)): weight decay of the loss
t = transpose d                         a move, if it moves slices; done after the loop
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax.core import ShapedArray

from fdp import jaxprs
from fdp.intercept import _ops, _precision
from fdp.intercept._flatten import Program, Step, Value

# Longer ways are possible (a parameter that a program uses in very many places) and not worth following.
_LONGEST_WAY = 200


class Born(NamedTuple):
    """A slice as the loop makes it: output ``output`` of the body."""

    output: int


class Cut(NamedTuple):
    """The slice of an array that exists before the loop, stacked like the gradient."""

    value: Value


class Whole(NamedTuple):
    """A scalar that exists before the loop."""

    value: Value


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """An equation on slices and scalars. One that is used twice is one object, and is evaluated once."""

    eqn: Any
    args: tuple[Slice, ...]


Slice = Born | Cut | Whole | Apply


@dataclasses.dataclass(frozen=True, eq=False)
class Birth:
    """How a gradient comes out of a loop.

    Attributes:
      step: position of the loop in the program.
      slice: how one slice is made.
      shape: shape of one slice.
      dtype: dtype of one slice.
      computed_in: dtype from which a slice was last widened, or its own: it has every value of the slice.
      moves: what is done with the stacked slices, in order.
      way: every value from the loop to the gradient.
      needs: values that must exist before the loop.
    """

    step: int
    slice: Slice
    shape: tuple[int, ...]
    dtype: Any
    computed_in: Any
    moves: tuple[Step, ...]
    way: frozenset[Value]
    needs: frozenset[Value]


class NotInLoop(Exception):
    """Why a gradient is reduced outside of loops."""


class Graph:
    """Who makes and who reads each value of a program.

    Attributes:
      program: the program.
      maker: value -> position of the step that makes it; arguments and constants have none.
      readers: value -> positions of the steps that read it.
    """

    def __init__(self, program: Program):
        self.program = program
        self.maker: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        for position, step in enumerate(program.steps):
            self.maker.update((value, position) for value in step.outputs if value is not None)
            for value in set(step.inputs):
                self.readers.setdefault(value, []).append(position)
        self._after: dict[int, set[Value]] = {}

    def made_after(self, loop: int) -> set[Value]:
        """All values that depend on a loop's outputs."""
        if loop not in self._after:
            made = {v for v in self.program.steps[loop].outputs if v is not None}
            for step in self.program.steps[loop + 1 :]:
                if not made.isdisjoint(step.inputs):
                    made.update(v for v in step.outputs if v is not None)
            self._after[loop] = made
        return self._after[loop]

    def birth(self, gradient: Value) -> Birth:
        """How ``gradient`` comes out of a loop.

        Raises:
          NotInLoop: it does not, or not slice by slice.
        """
        loop = self._last_loop(gradient)
        scan = jaxprs.scan_of(self.program.steps[loop].eqn)
        assert scan is not None  # _last_loop returns loops
        if scan.length < 2:
            raise NotInLoop("the loop has a single iteration")
        if not all(
            isinstance(self.program.avals[v], ShapedArray) for v in self.program.steps[loop].inputs
        ):
            raise NotInLoop("the loop works on something else than arrays")
        way = _Way(self, loop, scan)
        part = way.follow(gradient, 0)
        dtype = self.program.avals[gradient].dtype
        return Birth(
            loop,
            part.slice,
            part.shape,
            dtype,
            _computed_in(part.slice, scan.body.jaxpr, dtype),
            part.moves,
            frozenset(way.parts),
            frozenset(way.needs),
        )

    def _last_loop(self, gradient: Value) -> int:
        """The last loop that stacks what ``gradient`` is made of."""
        found: list[int] = []
        reasons: list[str] = []
        pending, seen = [gradient], {gradient}
        while pending:
            value = pending.pop()
            if value not in self.maker:
                continue
            position = self.maker[value]
            step = self.program.steps[position]
            scan = None if step.eqn is None else jaxprs.scan_of(step.eqn)
            if scan is not None and step.outputs.index(value) >= scan.num_carry:
                found.append(position)
            elif scan is not None:
                reasons.append("it is accumulated in the loop's carry")
            elif step.eqn is not None and _ops.is_followed(step.eqn):
                pending += [v for v in step.inputs if v not in seen]
                seen.update(step.inputs)
            else:
                reasons.append(f"it is made by {name_of(step)!r}, not by a loop")
        if not found:
            raise NotInLoop(reasons[0] if reasons else "it does not come out of a loop")
        return max(found)


def _computed_in(slice_: Slice, body: Any, dtype: Any) -> Any:
    """The dtype from which ``slice_``, of type ``dtype``, was last widened."""
    if isinstance(slice_, Born):
        return _precision.computed_in(body, body.outvars[slice_.output])
    if isinstance(slice_, Apply) and _precision.widens(slice_.eqn):
        return slice_.eqn.invars[0].aval.dtype
    return dtype


def name_of(step: Step) -> str:
    """What a step is, for messages."""
    return "optimization_barrier" if step.eqn is None else jaxprs.primitive_name(step.eqn)


class _Part(NamedTuple):
    """A slice of a value on the way, its shape, and the moves that remain for after the loop."""

    slice: Slice
    shape: tuple[int, ...]
    moves: tuple[Step, ...]


class _Way:
    """From one loop to one gradient, followed backwards.

    Attributes:
      parts: every value on the way.
      needs: values that the way meets and that must exist before the loop.
    """

    def __init__(self, graph: Graph, loop: int, scan: jaxprs.Scan):
        self.parts: dict[Value, _Part] = {}
        self.needs: set[Value] = set()
        self._graph = graph
        self._loop = loop
        self._scan = scan
        self._after = graph.made_after(loop)

    def follow(self, value: Value, depth: int) -> _Part:
        """A slice of ``value``, which depends on the loop."""
        if depth > _LONGEST_WAY:
            raise NotInLoop(
                f"more than {_LONGEST_WAY} operations stand between the loop and the gradient"
            )
        if value not in self.parts:
            self.parts[value] = self._follow(value, depth)
        return self.parts[value]

    def _follow(self, value: Value, depth: int) -> _Part:
        position = self._graph.maker[value]
        step = self._graph.program.steps[position]
        slice_shape = tuple(self._graph.program.avals[value].shape[1:])
        if position == self._loop:
            output = step.outputs.index(value)
            if output < self._scan.num_carry:
                raise NotInLoop("it is accumulated in the loop's carry")
            return _Part(Born(output), slice_shape, ())
        if step.eqn is None or not _ops.is_followed(step.eqn):
            raise NotInLoop(f"{name_of(step)!r} stands between the loop and the gradient")
        own = [self.follow(v, depth + 1) for v in dict.fromkeys(step.inputs) if v in self._after]
        moves = own[0].moves
        if _ops.is_move(step.eqn) and (moves or _ops.slice_params(step.eqn) is None):
            return _Part(own[0].slice, own[0].shape, (*moves, step))
        args = tuple(
            self.parts[v].slice if v in self._after else self._existing(v) for v in step.inputs
        )
        if any(part.moves for part in own):
            alone = len(own) == 1 and all(isinstance(a, Whole) or a is own[0].slice for a in args)
            if not alone or not _ops.is_elementwise(step.eqn):
                raise NotInLoop(
                    f"{name_of(step)!r} needs other arrays in the layout of the gradient"
                )
            slice_shape = own[0].shape
        return _Part(Apply(step.eqn, args), slice_shape, moves)

    def _existing(self, value: Value) -> Slice:
        """``value`` does not depend on the loop; can it be there before the loop starts?"""
        pending, seen = [value], {value}
        while pending:
            position = self._graph.maker.get(pending.pop(), -1)
            if position < self._loop:
                continue
            step = self._graph.program.steps[position]
            if step.eqn is not None and (step.eqn.effects or jaxprs.scan_of(step.eqn) is not None):
                raise NotInLoop(f"{name_of(step)!r} comes after the loop and is needed in it")
            pending += [v for v in step.inputs if v not in seen]
            seen.update(step.inputs)
        shape = self._graph.program.avals[value].shape
        if shape and shape[0] != self._scan.length:
            raise NotInLoop(
                "it is combined with an array that is not stacked like the loop's outputs"
            )
        self.needs.add(value)
        return Cut(value) if shape else Whole(value)
