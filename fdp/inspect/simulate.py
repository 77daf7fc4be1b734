"""A step, played through on two clocks: one device that computes, and its links."""

from __future__ import annotations

import dataclasses
import heapq

from fdp.inspect.collectives import Collective
from fdp.inspect.hardware import Hardware
from fdp.inspect.hlo import Computation
from fdp.inspect.program import Program
from fdp.inspect.schedule import Op, operations

# Of a longer loop this many iterations are laid out, and the rest takes as long as the last of them did.
MAX_ITERATIONS = 64


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation on the timeline.

    Attributes:
      lane: ``"compute"`` or ``"link"``.
      kind: ``"matmul"``, ``"compute"``, ``"collective"``, ``"loop"`` or ``"branch"`` (parts not laid out).
      name: of the instruction.
      start: estimated seconds since the step began.
      end: the same.
      flops: of matmuls.
      nbytes: touched in memory, or put into a collective.
    """

    lane: str
    kind: str
    name: str
    start: float
    end: float
    flops: int = 0
    nbytes: int = 0


class Simulation:
    """Times of the operations of one step.

    Attributes:
      events: what ran when.
      now: the device's clock, in seconds.
      link_free: when the links are done with all they were given.
      exposed: seconds that the device waited for the links.
    """

    def __init__(self, program: Program, hardware: Hardware, efficiency: float) -> None:
        self.events: list[Event] = []
        self.now = 0.0
        self.link_free = 0.0
        self.exposed = 0.0
        self._program = program
        self._hardware = hardware
        self._efficiency = efficiency
        self._on_wire: dict[str, float] = {}

    def step(self) -> None:
        """Plays the entry computation through."""
        entry = self._program.module.entry
        if self._program.platform == "cpu":
            self._by_dependencies(entry)
        else:
            self._in_order(entry)

    def _in_order(self, computation: Computation) -> None:
        for op in operations(self._program, computation):
            if op.kind == "start" and op.collective is not None:
                self._on_wire[op.collective.name] = self._launch(op.collective)
            elif op.kind == "done" and op.collective is not None:
                self._wait_until(self._on_wire.pop(op.collective.name, self.now))
            else:
                self._run(computation, op)

    def _by_dependencies(self, computation: Computation) -> None:
        """Always the first operation, in text order, that has its inputs: what the CPU's runtime does."""
        ops = [op for op in operations(self._program, computation) if op.kind != "done"]
        index = {op.name: i for i, op in enumerate(ops)}
        waiting, users = _edges(computation, index)
        ready = [i for i, count in enumerate(waiting) if count == 0]
        on_wire: list[tuple[float, int]] = []
        while ready or on_wire:
            if not ready:
                self._wait_until(on_wire[0][0])
            finished: list[int] = []
            while on_wire and on_wire[0][0] <= self.now:
                finished.append(heapq.heappop(on_wire)[1])
            if ready and not finished:
                i = heapq.heappop(ready)
                collective = ops[i].collective
                if collective is not None:
                    heapq.heappush(on_wire, (self._launch(collective), i))
                else:
                    self._run(computation, ops[i])
                    finished.append(i)
            for user in [user for i in finished for user in users[i]]:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, user)

    def _run(self, computation: Computation, op: Op) -> None:
        if op.kind == "loop":
            self._loop(computation, op)
        elif not op.name.startswith(("copy-start", "slice-start")):
            # Asynchronous copies run beside the compute, on engines of their own.
            self._compute(op, self._hardware.compute_seconds(op.cost, self._efficiency))

    def _loop(self, computation: Computation, op: Op) -> None:
        sites = self._program.sites
        outer, inner = sites[computation.name].runs, sites[op.bodies[0]].runs
        trips = inner // outer if outer and inner is not None else 1
        last = 0.0
        for _ in range(min(trips, MAX_ITERATIONS)):
            before = self.now
            self._in_order(self._program.module.computations[op.bodies[0]])
            last = self.now - before
        if trips > MAX_ITERATIONS:
            self._compute(op, last * (trips - MAX_ITERATIONS))

    def _compute(self, op: Op, seconds: float) -> None:
        kind = "compute" if op.kind == "move" else op.kind
        end = self.now + seconds
        if seconds > 0:
            event = Event("compute", kind, op.name, self.now, end, op.cost.flops, op.cost.nbytes)
            self.events.append(event)
        self.now = end

    def _launch(self, collective: Collective) -> float:
        start = max(self.now, self.link_free)
        self.link_free = start + self._hardware.collective_seconds(collective)
        self.events.append(
            Event(
                "link", "collective", collective.name, start, self.link_free, 0, collective.nbytes
            )
        )
        return self.link_free

    def _wait_until(self, time: float) -> None:
        self.exposed += max(0.0, time - self.now)
        self.now = max(self.now, time)


def _edges(computation: Computation, index: dict[str, int]) -> tuple[list[int], list[list[int]]]:
    """For each operation: how many others it needs, and which need it. Bookkeeping in between is bridged."""
    waiting, users = [0] * len(index), [list[int]() for _ in index]
    through: dict[str, frozenset[int]] = {}
    for instruction in computation.instructions:
        needs = frozenset[int]().union(*(through.get(name, ()) for name in instruction.operands))
        own = index.get(instruction.name)
        if own is None:
            through[instruction.name] = needs
            continue
        through[instruction.name] = frozenset([own])
        waiting[own] = len(needs)
        for need in needs:
            users[need].append(own)
    return waiting, users
