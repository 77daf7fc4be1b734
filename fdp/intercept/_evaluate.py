"""Runs a gradient computation again, with the reductions where the gradients are born."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fdp import jaxprs
from fdp.intercept import _ops
from fdp.intercept._analyze import Interception
from fdp.intercept._flatten import Program, Step, Value
from fdp.intercept._loop import Loop, LoopPlan, ReduceSlices, run_loop

# (gradients that exist and are not reduced yet, token) -> (those of them that are reduced now, token)
ReduceReady = Callable[[dict[int, Any], Any], tuple[dict[int, Any], Any]]


class Evaluation(NamedTuple):
    """What ``evaluate`` returns.

    Attributes:
      outputs: all outputs of the jaxpr, in order. Gradients in ``reduced`` are reduced, the others are not.
      reduced: leaves whose gradients are reduced.
      token: the token after the last reduction made here.
      loop_states: the state after each rewritten loop, by ``Loop.index``.
    """

    outputs: list[Any]
    reduced: frozenset[int]
    token: Any
    loop_states: tuple[Any, ...]


def evaluate(
    interception: Interception,
    args: Sequence[Any],
    *,
    reduce_slices: ReduceSlices,
    copied: Callable[[Loop], frozenset[int]] = lambda loop: frozenset(),
    reduce_ready: ReduceReady | None = None,
    token: Any = (),
    loop_states: Sequence[Any] | None = None,
    peel: bool = True,
) -> Evaluation:
    """Evaluates an analyzed gradient computation under the current trace.

    Args:
      interception: from ``analyze``.
      args: flat arguments of the jaxpr.
      reduce_slices: ``(loop, slices, index, token, state) -> (reduced, token, state)``, called inside the loop, and
        once after it for the last slices, with the slices that iteration ``index`` made, by leaf. The reduced ones
        must have the shapes and dtypes it got.
      copied: leaves of a loop that ``reduce_slices`` copies first of all. Until then they wait in the dtype they were
        computed in, where that is narrower and has every value they can have.
      reduce_ready: ``(gradients, token) -> (reduced, token)``, called before each rewritten loop with the gradients
        that exist by then; it may reduce any of them and returns those. Not called where no such loop follows:
        in straight code a reduction after the fact compiles to the same schedule.
      token: what the first reduction waits for, any pytree of arrays. Threaded through all reductions outside of
        loops. Inside of a loop the chain starts from this first token again: were it to start from the latest, the
        loop could not start before every reduction in front of it is done.
      loop_states: for each rewritten loop a pytree of arrays whose leading axis is the iterations; ``reduce_slices``
        gets and returns one iteration's.
      peel: run the first iteration of a loop, which has nothing to reduce, before it: exactly one reduction per
        iteration, twice the code of the loop body. Otherwise the first iteration reduces zeros.

    Raises:
      ValueError: ``loop_states`` has not one state per rewritten loop.
    """
    plans = interception.plans
    states = [()] * len(plans) if loop_states is None else list(loop_states)
    if len(states) != len(plans):
        raise ValueError(
            f"expected one state per rewritten loop ({len(plans)}), got {len(states)}: make one for each of "
            "interception.loops."
        )
    if not plans:
        outputs = jaxprs.run_body(interception.body, args)
        return Evaluation(outputs, frozenset(), token, ())
    on_the_way = {v for plan in plans for birth in plan.births.values() for v in birth.way}
    run = _Run(interception.program, args, on_the_way)
    plan_of = {id(plan.step): plan for plan in plans}
    in_loops = {leaf for plan in plans for leaf in plan.births}
    reduced: dict[int, Any] = {}
    first_token = token
    for step in interception.program.steps:
        plan = plan_of.get(id(step))
        if plan is None:
            run.step(step)
            continue
        for value in (*step.inputs, *(v for birth in plan.births.values() for v in birth.needs)):
            run.make(value)
        if reduce_ready is not None:
            ready = {
                leaf: run.values[value]
                for leaf, value in interception.grads.items()
                if value in run.values and leaf not in reduced and leaf not in in_loops
            }
            now, token = reduce_ready(ready, token)
            reduced.update(now)
        index = plan.loop.index
        result = run_loop(
            plan,
            run.values,
            reduce_slices,
            token if peel else first_token,
            token,
            states[index],
            peel=peel,
            narrow=copied(plan.loop),
        )
        token, states[index] = result.token, result.state
        run.keep(plan, result.carry, result.others)
        for leaf, stacked in result.reduced.items():
            reduced[leaf] = stacked
            for move in plan.births[leaf].moves:
                reduced[leaf] = _ops.apply_to_whole(move.eqn, reduced[leaf])
    outputs = []
    for position, value in enumerate(interception.program.outputs):
        leaf = interception.positions.get(position)
        outputs.append(reduced[leaf] if leaf in reduced else run.result(value))
    return Evaluation(outputs, frozenset(reduced), token, tuple(states))


class _Run:
    """Values of a program, as far as it has run. Values on the way from a loop to a reduced gradient never exist."""

    def __init__(self, program: Program, args: Sequence[Any], on_the_way: set[Value]):
        self._avals, self._constants = program.avals, program.constants
        self.values: dict[Value, Any] = dict(program.constants)
        self.values.update(zip(program.inputs, args, strict=True))
        self._makers = {v: step for step in program.steps for v in step.outputs if v is not None}
        self._on_the_way = on_the_way
        self._done: set[int] = set()

    def result(self, value: Value) -> Any:
        """A value as an array: constants of the program may be of JAX's own types."""
        found = self.values[value]
        return jaxprs.as_array(found, self._avals[value]) if value in self._constants else found

    def step(self, step: Step) -> None:
        """Runs a step, unless it has run or only serves gradients that are reduced in a loop."""
        made = {v for v in step.outputs if v is not None}
        if id(step) in self._done or (made and made <= self._on_the_way):
            return
        self._done.add(id(step))
        results = step.run([self.values[v] for v in step.inputs])
        self._write(step, results)

    def make(self, value: Value) -> None:
        """Runs what ``value`` depends on, wherever in the program it stands."""
        pending = [value]
        while pending:
            if pending[-1] in self.values:
                pending.pop()
                continue
            step = self._makers[pending[-1]]
            missing = [v for v in step.inputs if v not in self.values]
            if missing:
                pending += missing
            else:
                self.step(step)

    def keep(self, plan: LoopPlan, carry: Sequence[Any], others: Sequence[Any]) -> None:
        """Takes over what a rewritten loop made besides reduced gradients."""
        results: list[Any] = [None] * len(plan.step.outputs)
        results[: len(carry)] = carry
        for position, value in zip(plan.others, others, strict=True):
            results[position] = value
        self._done.add(id(plan.step))
        self._write(plan.step, results)

    def _write(self, step: Step, results: Sequence[Any]) -> None:
        for value, result in zip(step.outputs, results, strict=True):
            if value is not None and value not in self._on_the_way:
                self.values[value] = result
