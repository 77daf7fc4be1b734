"""How much matmul work can run while each collective is on the wire."""

from __future__ import annotations

import dataclasses

from fdp.inspect import graph
from fdp.inspect.collectives import Collective
from fdp.inspect.hlo import Computation
from fdp.inspect.program import Inspectable, Program, load
from fdp.inspect.schedule import Op, operations


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What can hide one collective.

    Attributes:
      collective: the collective.
      flops: of the matmuls that can run while it is on the wire, each time it runs.
      matmuls: names of those matmuls (fusions, library calls, loops with matmuls in them).
      basis: how this was found: ``"schedule"`` or ``"dependencies"``.
    """

    collective: Collective
    flops: int
    matmuls: tuple[str, ...]
    basis: str


def overlap(compiled: Inspectable) -> tuple[Overlap, ...]:
    """For each collective, the matmul flops that can run while it is on the wire.

    On GPU and TPU the text is the schedule: it is the matmuls between start and end (``basis="schedule"``), none
    for a synchronous one. A matmul between the ends of two collectives counts for both. On TPU, a fusion that
    carries a collective along counts.

    On CPU the runtime starts whatever has its inputs, so it is the matmuls of the same computation that neither
    need the collective's result nor feed it (``basis="dependencies"``). That is what *can* run beside it; how
    much does depends on threads. In the body of a loop the CPU runtime works one after the other: 0 there.

    Args:
      compiled: a ``jax.stages.Compiled`` or its text.

    Returns:
      One entry per collective, in the order of ``collectives``.

    Raises:
      ValueError: the text is no compiled program of a backend that is known.
    """
    program = load(compiled)
    found: list[Overlap] = []
    visited: set[str] = set()

    def visit(computation: Computation) -> None:
        # Depth first at the place of each loop: the order in which a step comes to them.
        visited.add(computation.name)
        ops = operations(program, computation)
        for index, op in enumerate(ops):
            if op.kind == "start" and op.collective is not None:
                found.append(_overlap(program, ops, index, op.collective))
            for name in op.bodies:
                if name not in visited:
                    visit(program.module.computations[name])

    visit(program.module.entry)
    return tuple(found)


def _overlap(program: Program, ops: tuple[Op, ...], start: int, collective: Collective) -> Overlap:
    if program.platform == "cpu":
        beside = [] if collective.in_loop else _independent(program, ops, collective)
        return _result(collective, beside, "dependencies")
    between: list[Op] = []
    for op in ops[start + 1 :]:
        if op.kind == "done" and op.collective == collective:
            break
        between.append(op)
    return _result(collective, between, "schedule")


def _independent(program: Program, ops: tuple[Op, ...], collective: Collective) -> list[Op]:
    computation = program.module.computations[collective.computation]
    ordered = graph.dependents(computation, collective.name)
    ordered |= graph.dependencies(computation, collective.name)
    return [op for op in ops if op.name not in ordered]


def _result(collective: Collective, ops: list[Op], basis: str) -> Overlap:
    matmuls = [op for op in ops if op.cost.is_matmul]
    flops = sum(op.cost.flops for op in matmuls)
    return Overlap(collective, flops, tuple(op.name for op in matmuls), basis)
