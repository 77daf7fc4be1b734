"""Decides, before anything runs, where each gradient of a traced computation will be reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fdp import jaxprs
from fdp.intercept._births import find_births
from fdp.intercept._flatten import Program, Value, flatten
from fdp.intercept._loop import Loop, LoopPlan


class Placement(NamedTuple):
    """Where one gradient is reduced.

    Attributes:
      leaf: which leaf's gradient.
      loop: index of the loop it is reduced in; None when it is reduced outside of loops.
      reason: why there.
    """

    leaf: int
    loop: int | None
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class Interception:
    """A traced gradient computation and the decision for each of its gradients.

    Attributes:
      loops: loops whose gradients are reduced inside, in program order.
      placements: one for each gradient, by leaf.
      body: the computation as it was given.
      program: the computation, flattened.
      grads: leaf -> its gradient in the program.
      positions: output of the jaxpr -> leaf.
      plans: how to rewrite each loop.
    """

    loops: tuple[Loop, ...]
    placements: tuple[Placement, ...]
    body: jaxprs.Body = dataclasses.field(repr=False)
    program: Program = dataclasses.field(repr=False)
    grads: Mapping[int, Value] = dataclasses.field(repr=False)
    positions: Mapping[int, int] = dataclasses.field(repr=False)
    plans: tuple[LoopPlan, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.report()

    def report(self, paths: Sequence[str] | None = None) -> str:
        """A table for people: the loops, then every gradient and where it is reduced.

        Args:
          paths: names of the leaves, by leaf index.
        """
        lines = [
            f"loop {loop.index}: {loop.length} iterations, {len(loop.leaves)} gradients, "
            f"{loop.slice_nbytes:,} bytes an iteration"
            for loop in self.loops
        ] or ["no loop makes gradients that can be reduced inside it"]
        for leaf, loop, reason in self.placements:
            name = f"leaf {leaf}" if paths is None else paths[leaf]
            where = "outside of loops" if loop is None else f"in loop {loop}"
            lines.append(f"  {name}: {where} ({reason})")
        return "\n".join(lines)


def analyze(
    closed_jaxpr: Any, grad_outputs: Mapping[int, int], *, min_slice_bytes: float = 0
) -> Interception:
    """Finds the gradients that come out of loops slice by slice.

    Args:
      closed_jaxpr: a computation that returns gradients, from ``jax.make_jaxpr``.
      grad_outputs: which outputs are gradients, and of which leaf: ``{output: leaf}``.
      min_slice_bytes: loops that make fewer bytes of gradients an iteration are left alone: a reduction has a cost
        that does not depend on its size, and there it would be paid in every iteration. ``math.inf``: none.

    Returns:
      The decision; ``evaluate`` carries it out.

    Raises:
      ValueError: ``grad_outputs`` names an output that is not there, or one leaf twice.
    """
    body = jaxprs.body_of(closed_jaxpr)
    count = len(body.jaxpr.outvars)
    wrong = [position for position in grad_outputs if not 0 <= position < count]
    if wrong:
        raise ValueError(
            f"expected grad_outputs to name outputs of the jaxpr, 0 to {count - 1}, got {wrong[0]}."
        )
    if len(set(grad_outputs.values())) != len(grad_outputs):
        raise ValueError(
            f"expected grad_outputs to name every leaf once, got leaves {sorted(grad_outputs.values())}."
        )
    program = flatten(closed_jaxpr, grad_outputs)
    grads = {leaf: program.outputs[position] for position, leaf in grad_outputs.items()}
    births, reasons = find_births(program, grads, min_slice_bytes)
    plans: list[LoopPlan] = []
    for position in sorted({birth.step for birth in births.values()}):
        step = program.steps[position]
        scan = jaxprs.scan_of(step.eqn)
        assert scan is not None  # births come out of loops
        here = {leaf: births[leaf] for leaf in sorted(births) if births[leaf].step == position}
        on_the_way = {value for birth in here.values() for value in birth.way}
        loop = Loop(
            index=len(plans),
            leaves=tuple(here),
            slices=tuple(jax.ShapeDtypeStruct(b.shape, b.dtype) for b in here.values()),
            length=scan.length,
            reverse=scan.reverse,
            unroll=scan.unroll,
        )
        others = tuple(
            i
            for i, value in enumerate(step.outputs)
            if i >= scan.num_carry and value is not None and value not in on_the_way
        )
        plans.append(LoopPlan(loop, step, here, others))
    loop_of = {leaf: plan.loop.index for plan in plans for leaf in plan.births}
    nested = {leaf for plan in plans for leaf in plan.births if _made_by_inner_loop(plan, leaf)}
    placements = tuple(
        Placement(leaf, loop_of.get(leaf), reasons.get(leaf, _WHY_IN_LOOP[leaf in nested]))
        for leaf in sorted(grads)
    )
    return Interception(
        tuple(p.loop for p in plans),
        placements,
        body,
        program,
        grads,
        dict(grad_outputs),
        tuple(plans),
    )


_WHY_IN_LOOP = {
    False: "each iteration makes a slice of it",
    True: "each iteration makes a slice of it in a loop of its own, which is reduced whole",
}


def _made_by_inner_loop(plan: LoopPlan, leaf: int) -> bool:
    """Whether the slices of a gradient come out of a loop inside the loop."""
    scan = jaxprs.scan_of(plan.step.eqn)
    assert scan is not None  # a LoopPlan is made of a scan
    position = plan.step.outputs.index
    return _leads_to_scan(
        scan.body, {position(v) for v in plan.births[leaf].way if v in plan.step.outputs}
    )


def _leads_to_scan(body: jaxprs.Body, wanted: set[int]) -> bool:
    followed = {
        body.jaxpr.outvars[i] for i in wanted if not jaxprs.is_literal(body.jaxpr.outvars[i])
    }
    for eqn in reversed(body.jaxpr.eqns):
        outs = {i for i, var in enumerate(eqn.outvars) if var in followed}
        if not outs:
            continue
        call = jaxprs.call_body(eqn)
        if jaxprs.scan_of(eqn) is not None or (call is not None and _leads_to_scan(call, outs)):
            return True
        if jaxprs.primitive_name(eqn) in (
            "convert_element_type",
            "reshape",
            "transpose",
            "add_any",
            "mul",
        ):
            followed |= {atom for atom in eqn.invars if not jaxprs.is_literal(atom)}
    return False
