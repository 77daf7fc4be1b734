"""A computation as a sequence of operations that matter: matmuls, other compute, and both ends of collectives.

The order is the order of the text, which is the order in which GPU and TPU issue their work. On CPU the runtime
starts whatever has its inputs; there the order is only one of those that are possible.
"""

from __future__ import annotations

import dataclasses

from fdp.inspect.collectives import REDUCTIONS, Collective, in_computation
from fdp.inspect.cost import BOOKKEEPING, NOTHING, Cost
from fdp.inspect.hlo import Computation, Instruction
from fdp.inspect.program import Program

# Copies move data and compute nothing, whatever their size.
_MOVES = ("copy", "copy-start", "slice-start")


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation of a schedule.

    Attributes:
      kind: ``"matmul"`` (any matrix product or convolution, alone or in a fusion), ``"compute"``, ``"move"``,
        ``"start"`` and ``"done"`` of a collective, ``"loop"``, ``"branch"``.
      name: of the instruction.
      position: its place in its computation.
      cost: its work; of a loop, of all its iterations. Nothing for the ends of collectives.
      collective: what starts or ends here.
      bodies: names of the computations a loop or branch runs.
    """

    kind: str
    name: str
    position: int
    cost: Cost = NOTHING
    collective: Collective | None = None
    bodies: tuple[str, ...] = ()


def operations(program: Program, computation: Computation) -> tuple[Op, ...]:
    """The operations of one computation, in order. What a plain ``call`` runs is spliced in.

    A synchronous collective is a start directly followed by its end; if a fusion holds it together with compute
    of its own, the compute is between the two.
    """
    starts = {c.position: c for c in in_computation(program, computation)}
    ends = {c.done: c for c in starts.values() if c.done != c.position}
    found: list[Op] = []
    for instruction in computation.instructions:
        at = instruction.position
        if at in starts:
            found += _start(program, computation, instruction, starts[at])
        elif at in ends:
            found.append(Op("done", instruction.name, at, collective=ends[at]))
        elif instruction.opcode == "call":
            for called in program.module.called_by(instruction):
                found += operations(program, called)
        elif (op := _compute(program, computation, instruction)) is not None:
            found.append(op)
    return tuple(found)


def _start(
    program: Program, computation: Computation, instruction: Instruction, collective: Collective
) -> list[Op]:
    ops = [Op("start", instruction.name, instruction.position, collective=collective)]
    if collective.done != collective.position:
        return ops
    if instruction.opcode == "fusion":
        inner = program.costs.of(computation, instruction)
        if inner.is_matmul:
            ops.append(Op("matmul", instruction.name, instruction.position, inner))
    return [*ops, Op("done", instruction.name, instruction.position, collective=collective)]


def _compute(program: Program, computation: Computation, instruction: Instruction) -> Op | None:
    opcode = instruction.opcode
    if opcode in BOOKKEEPING or opcode.endswith(("-done", "-update")):
        return None
    cost = program.costs.of(computation, instruction)
    kind = "matmul" if cost.is_matmul else "move" if opcode in _MOVES else "compute"
    bodies: tuple[str, ...] = ()
    if opcode in ("while", "conditional"):
        kind = "loop" if opcode == "while" else "branch"
        called = program.module.called_by(instruction)
        conditions = instruction.called.get("condition", ())
        bodies = tuple(c.name for c in called if c.name not in conditions)
    return Op(kind, instruction.name, instruction.position, cost, bodies=bodies)


def is_reduction(collective: Collective) -> bool:
    """Whether it combines values, as gradients need it."""
    return collective.kind in REDUCTIONS
