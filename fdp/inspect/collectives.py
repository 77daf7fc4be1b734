"""The collectives that a compiled program really issues, and when.

Each backend writes them in its own way:

* CPU: ``all-reduce(...)``; the text order is not the order at run time, see ``fdp.inspect.overlap``.
* GPU: ``all-reduce-start`` and ``all-reduce-done``; whatever stands between runs while it is on the wire.
* TPU: ``all-reduce(...)``, during which nothing else runs; or, as an *async collective fusion*, a fusion that
  starts it, fusions of matmuls that carry it along, and a fusion that waits for it. All of them hold an
  ``all-reduce`` inside, and a chain number tells which belong together.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from fdp.inspect.hlo import Computation, Instruction, Module
from fdp.inspect.program import Inspectable, Program, load
from fdp.inspect.shapes import Array, numpy_name

KINDS = (
    *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
REDUCTIONS = ("all-reduce", "reduce-scatter")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_IOTA_GROUPS = re.compile(r"\[([\d,]+)\]<=")
_MESH_GROUPS = re.compile(r"mesh\[([^\]]*)\]\s*\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      name: of the instruction that starts it.
      kind: XLA's name: ``"all-reduce"``, ``"reduce-scatter"``, ``"all-gather"``, ...
      reduction: what it computes: ``"add"``, ``"maximum"``, ...; empty for kinds that compute nothing.
      dtype: numpy's name of the type on the wire; several, sorted and joined by ``+``, where types are mixed.
      nbytes: bytes that one device puts in, each time it runs.
      operand_shapes: shapes of what it puts in. Several means that XLA sends several arrays in one go.
      group_size: devices that take part together.
      computation: the computation it stands in: the entry, or a loop's body.
      in_loop: whether that is (in) the body of a loop.
      runs: times it runs in a step, or None where a loop's trip count is not in the program.
      position: place in the schedule of its computation.
      done: place of what waits for it; equal to ``position`` if it is synchronous.
      asynchronous: whether other work may run while it is on the wire.
      carried_by: on TPU, the fusions between start and end that carry it along with their own work.
    """

    name: str
    kind: str
    reduction: str
    dtype: str
    nbytes: int
    operand_shapes: tuple[tuple[int, ...], ...]
    group_size: int
    computation: str
    in_loop: bool
    runs: int | None
    position: int
    done: int
    asynchronous: bool
    carried_by: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """The same as ``position``."""
        return self.position

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends, each time, by ring algorithms (nccl-tests, PERFORMANCE.md)."""
        n = self.group_size
        factor = {
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": (n - 1) / n,
            "all-to-all": (n - 1) / n,
            "ragged-all-to-all": (n - 1) / n,
            "all-gather": n - 1,
        }
        return round(self.nbytes * factor.get(self.kind, 1 if n > 1 else 0))


def collectives(compiled: Inspectable) -> tuple[Collective, ...]:
    """Lists what a program sends, in the order in which a step first reaches it.

    Args:
      compiled: a ``jax.stages.Compiled`` or its ``as_text()``; of CPU, GPU or TPU.

    Returns:
      One entry per collective instruction; a start and its end are one. Bodies of loops are listed once, with
      the number of runs.

    Raises:
      ValueError: the text is no compiled program of a backend that is known.

    Example:
      >>> import jax, jax.numpy as jnp, fdp
      >>> mean = jax.pmap(lambda x: jax.lax.pmean(x, "data"), axis_name="data")
      >>> compiled = mean.lower(jnp.ones((jax.device_count(), 256))).compile()
      >>> [(c.kind, c.nbytes) for c in fdp.inspect.collectives(compiled)]
      [('all-reduce', 1024)]
    """
    program = load(compiled)
    found: list[Collective] = []

    def visit(computation: Computation) -> None:
        own = {c.position: c for c in in_computation(program, computation)}
        for instruction in computation.instructions:
            if instruction.position in own:
                found.append(own[instruction.position])
            elif instruction.opcode in ("while", "conditional", "call", "async-start"):
                for called in program.module.called_by(instruction):
                    if called.name not in seen:
                        seen.add(called.name)
                        visit(called)

    seen = {program.module.entry.name}
    visit(program.module.entry)
    return tuple(found)


def in_computation(program: Program, computation: Computation) -> list[Collective]:
    """The collectives of one scheduled computation, in schedule order."""
    found: list[Collective] = []
    open_chains: dict[str, tuple[Collective, list[str]]] = {}
    for instruction in computation.instructions:
        inner = sent_by(program.module, instruction)
        if inner is None:
            continue
        where, collective = inner
        role = _role(program.module, instruction, collective)
        chain = _chain(collective)
        made = _make(program, computation, instruction, where, collective)
        if role == "start":
            open_chains[chain] = (made, [])
        elif role == "carry" and chain in open_chains:
            open_chains[chain][1].append(instruction.name)
        elif role == "done" and chain in open_chains:
            begun, carried = open_chains.pop(chain)
            end = {"done": instruction.position, "asynchronous": True, "carried_by": tuple(carried)}
            found.append(dataclasses.replace(begun, **end))
        else:
            found.append(_with_end(computation, instruction, collective, made))
    return sorted(found, key=lambda c: c.position)


def sent_by(
    module: Module, instruction: Instruction
) -> tuple[Computation | None, Instruction] | None:
    """The collective that an instruction is, or wraps, and the computation it is in if that is another."""
    if kind_of(instruction):
        return None, instruction
    if instruction.opcode in ("fusion", "async-start"):
        for called in module.called_by(instruction):
            for inner in called.instructions:
                if kind_of(inner):
                    return called, inner
                nested = sent_by(module, inner) if inner.opcode == "fusion" else None
                if nested:
                    return nested[0] or called, nested[1]
    return None


def kind_of(instruction: Instruction) -> str:
    """Which of ``KINDS`` the instruction runs or starts; empty for others, and for what only waits."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def _role(module: Module, instruction: Instruction, collective: Instruction) -> str:
    """Part of an instruction in a TPU's async collective fusion; empty for everything else."""
    if (
        instruction.opcode != "fusion"
        or "async_collective_fusion_config" not in collective.backend_config
    ):
        return ""
    targets = {
        inner.target for called in module.called_by(instruction) for inner in called.instructions
    }
    if "AsyncCollectiveStart" in targets:
        return "start"
    return "done" if "AsyncCollectiveDone" in targets else "carry"


def _chain(collective: Instruction) -> str:
    match = _CHAIN.search(collective.attributes.get("frontend_attributes", ""))
    return match[1] if match else ""


def _with_end(
    computation: Computation, instruction: Instruction, collective: Instruction, made: Collective
) -> Collective:
    """Looks for the instruction that waits for what this one started."""
    if not instruction.opcode.endswith("-start"):
        return made
    done = next(_waits(computation, instruction), None)
    if done is None:
        return made
    config = collective.backend_config.get("collective_backend_config", {})
    # XLA's GPU compiler marks a pair with nothing in between; it runs as a synchronous call.
    return dataclasses.replace(
        made, done=done.position, asynchronous=not config.get("is_sync", False)
    )


def _waits(computation: Computation, start: Instruction) -> Iterator[Instruction]:
    for user in computation.users.get(start.name, ()):
        if user.opcode.endswith("-done"):
            yield user
        elif user.opcode.endswith("-update"):
            yield from _waits(computation, user)


def _make(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    where: Computation | None,
    collective: Instruction,
) -> Collective:
    arrays = _operands(where or computation, collective)
    site = program.sites[computation.name]
    return Collective(
        name=instruction.name,
        kind=kind_of(collective),
        reduction=_reduction(program.module, collective),
        dtype="+".join(sorted({numpy_name(array.element_type) for array in arrays})),
        nbytes=sum(array.nbytes for array in arrays),
        operand_shapes=tuple(array.dims for array in arrays),
        group_size=_group_size(program.module, collective),
        computation=computation.name,
        in_loop=site.in_loop,
        runs=site.runs,
        position=instruction.position,
        done=instruction.position,
        asynchronous=False,
    )


def _operands(computation: Computation, collective: Instruction) -> tuple[Array, ...]:
    return tuple(a for o in computation.operands(collective) for a in o.shape.arrays)


def _reduction(module: Module, collective: Instruction) -> str:
    names = collective.called.get("to_apply", ())
    return (
        module.computations[names[0]].root.opcode
        if names and names[0] in module.computations
        else ""
    )


def _group_size(module: Module, collective: Instruction) -> int:
    """Devices in one group. ``{{0,1},{2,3}}``, ``[2,2]<=[4]`` and ``mesh['a'=2,'b'=2] {'b'}`` all mean pairs."""
    text = collective.attributes.get("replica_groups", "")
    if match := _IOTA_GROUPS.match(text):
        return int(match[1].split(",")[-1])
    if match := _MESH_GROUPS.match(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        # An axis may be split: {'a':(2)4} is a part of size 4 of it.
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    if match := re.match(r"\{\{([\d,]+)\}", text):
        return len(match[1].split(","))
    # No groups: all devices take part. A permutation names pairs instead.
    pairs = re.findall(r"\{(\d+),(\d+)\}", collective.attributes.get("source_target_pairs", ""))
    return len({device for pair in pairs for device in pair}) or module.device_count
