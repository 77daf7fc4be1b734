"""A measured step: what ``jax.profiler`` saw of one run of a compiled program on CPU devices."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fdp.inspect.program import Inspectable, Program, load
from fdp.inspect.schedule import operations


@dataclasses.dataclass(frozen=True)
class Span:
    """One operation as it ran.

    Attributes:
      device: its number, from 0.
      kind: ``"matmul"``, ``"compute"`` or ``"collective"``.
      name: of the instruction.
      start: seconds since the first operation of the run began, on any device.
      end: the same. A collective's time includes waiting for the devices that come later.
    """

    device: int
    kind: str
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """One run of a step on all devices of this process, measured.

    Attributes:
      spans: by start.
      seconds: from the first operation's start to the last one's end.
    """

    spans: tuple[Span, ...]
    seconds: float

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices that ran something."""
        return tuple(sorted({span.device for span in self.spans}))

    def collective_seconds(self, device: int) -> float:
        """Seconds that at least one collective of this device was open, waiting for other devices included."""
        return _length(self._intervals(device, collective=True))

    def beside(self, device: int) -> float:
        """Part of ``collective_seconds``, 0 to 1, in which the device computed as well; 1 if there is none."""
        wire = self._intervals(device, collective=True)
        compute = self._intervals(device, collective=False)
        if not wire:
            return 1.0
        both = _length(wire) + _length(compute) - _length(_union([*wire, *compute]))
        return min(1.0, max(0.0, both / _length(wire)))

    def _intervals(self, device: int, *, collective: bool) -> list[tuple[float, float]]:
        return _union(
            (span.start, span.end)
            for span in self.spans
            if span.device == device and (span.kind == "collective") == collective
        )

    def __str__(self) -> str:
        lines = [
            f"measured on {len(self.devices)} devices: {self.seconds * 1e3:.2f} ms a step",
            "device  in collectives ms  of it beside compute",
        ]
        lines += [
            f"{device:6d}{self.collective_seconds(device) * 1e3:19.2f}{self.beside(device):22.0%}"
            for device in self.devices
        ]
        return "\n".join(lines)


def read_trace(path: str | Path, compiled: Inspectable, *, run: int = -1) -> Trace:
    """Reads what the profiler saw of one run of a compiled program.

    A trace is made like this::

        jax.block_until_ready(state)  # or the end of an earlier step is the first run in the trace
        with jax.profiler.trace(folder):
            for _ in range(3):
                state, info = trainer.train_step(state, batch)
            jax.block_until_ready(state)
        print(fdp.inspect.read_trace(folder, trainer.lower(state, batch).compile()))

    Only operations of the program are kept, of which the profiler records the instruction's name; the program says
    which of them are collectives. A loop is left out, its iterations' operations are not. Fake CPU devices share the
    machine's cores, so their times say what ran beside what, not how fast real devices are.

    Args:
      path: the folder that was given to ``jax.profiler.trace``, of which the newest trace is read, or one
        ``*.trace.json.gz`` file.
      compiled: the program that ran: a ``jax.stages.Compiled`` or its text, compiled for CPU.
      run: which of the runs in the trace, as an index into a list: 0 is the first, -1 the last.

    Returns:
      A ``Trace``; ``fdp.inspect.plot_trace`` draws it.

    Raises:
      FileNotFoundError: there is no trace.
      ValueError: the program is not one for CPU, the trace holds no run of it, or fewer than ``run`` asks for.
    """
    program = load(compiled)
    if program.platform != "cpu":
        raise ValueError(
            f"expected a program compiled for CPU, whose operations the profiler records by name, got one for "
            f"{program.platform}. Look at its trace in Perfetto or XProf instead."
        )
    file = _newest(Path(path))
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    ran = [
        event for event in events if {"hlo_op", "device_ordinal"} <= event.get("args", {}).keys()
    ]
    name = program.module.name
    own = [event for event in ran if event["args"]["hlo_module"] == name]
    order = sorted(own, key=lambda event: event["ts"])
    runs = list(dict.fromkeys(event["args"]["run_id"] for event in order))
    if not runs:
        others = sorted({event["args"]["hlo_module"] for event in ran})
        raise ValueError(
            f"expected operations of {name!r} in {file.name}, got those of {', '.join(others) or 'no program'}. "
            "Run the compiled step inside `with jax.profiler.trace(folder):`, on CPU devices."
        )
    if not -len(runs) <= run < len(runs):
        raise ValueError(
            f"expected run from {-len(runs)} to {len(runs) - 1}, for the {len(runs)} runs of {name!r} in "
            f"{file.name}, got {run}."
        )
    return _trace([event for event in order if event["args"]["run_id"] == runs[run]], program)


def _newest(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime_ns)
    if not found:
        raise FileNotFoundError(
            f"expected a *.trace.json.gz file, or a folder that jax.profiler.trace wrote one to, got {path}."
        )
    return found[-1]


def _trace(events: list[dict[str, Any]], program: Program) -> Trace:
    kinds = _kinds(program)
    first = events[0]["ts"]  # microseconds
    spans = [
        Span(
            int(event["args"]["device_ordinal"]),
            kind,
            event["args"]["hlo_op"],
            (event["ts"] - first) / 1e6,
            (event["ts"] - first + event["dur"]) / 1e6,
        )
        for event in events
        if (kind := kinds.get(event["args"]["hlo_op"], "compute")) is not None
    ]
    return Trace(tuple(spans), max((span.end for span in spans), default=0.0))


def _kinds(program: Program) -> dict[str, str | None]:
    """Kind of each instruction; None for those whose parts run under names of their own."""
    kinds: dict[str, str | None] = {}
    for name in program.sites:
        for op in operations(program, program.module.computations[name]):
            if op.collective is not None:
                kinds[op.collective.name] = kinds[op.name] = "collective"
            elif op.kind in ("loop", "branch"):
                kinds[op.name] = None
            else:
                kinds.setdefault(op.name, "matmul" if op.kind == "matmul" else "compute")
    return kinds


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(intervals: list[tuple[float, float]]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
