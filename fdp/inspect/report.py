"""Everything about the communication of a compiled step, in one table that a person reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fdp.inspect.collectives import Collective
from fdp.inspect.interleave import interleavings
from fdp.inspect.matching import Match, match_buckets
from fdp.inspect.overlap import Overlap, overlap
from fdp.inspect.program import Inspectable, Program, load
from fdp.plan import BucketPlan

# A string of a schedule that is longer than this is cut in the printed report; the field holds all of it.
_LONGEST = 160


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled step communicates. ``str`` gives a table.

    Attributes:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      device_kind: JAX's name of the device; empty if only the text was given.
      device_count: devices the program was compiled for.
      plan: the plan that was given, or None.
      buckets: what became of each bucket; empty without a plan.
      overlaps: every collective, with the matmul flops that can hide it.
      schedules: pairs of computation and its string, as ``interleavings`` returns them.
      temp_bytes: of temporary memory on one device, or None if only the text was given.
      peak_bytes: of all memory in use at once, arguments and results included, or None likewise.
      bytes_accessed: in device memory in one step, as ``bytes_accessed_source`` counts them.
      bytes_accessed_source: ``"XLA"`` (``compiled.cost_analysis()``, loop bodies once), or ``"text"`` where XLA does
        not tell (GPU compiles without the hardware): operands and results of every instruction, loops in full.
      bytes_in_text: the latter on every platform, without collectives, which are charged to the wire. XLA's number for
        a TPU has on-chip memory in it, through which a collective woven into many fusions is handed on and on.
      matmul_flops: of matrix products and convolutions in one step.
    """

    platform: str
    device_kind: str
    device_count: int
    plan: BucketPlan | None
    buckets: tuple[Match, ...]
    overlaps: tuple[Overlap, ...]
    schedules: tuple[tuple[str, str], ...]
    temp_bytes: int | None
    peak_bytes: int | None
    bytes_accessed: int
    bytes_accessed_source: str
    bytes_in_text: int
    matmul_flops: int

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, in the order in which a step first reaches it."""
        return tuple(o.collective for o in self.overlaps)

    @property
    def payload_bytes(self) -> int:
        """Bytes that one device puts into collectives in one step; unknown trip counts count once."""
        return sum(c.nbytes * _runs(c) for c in self.collectives)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one step if the collectives run on rings."""
        return sum(c.wire_bytes * _runs(c) for c in self.collectives)

    @property
    def merged(self) -> tuple[tuple[int, ...], ...]:
        """Groups of buckets that the compiler put into one reduction."""
        groups = {
            tuple(sorted((m.bucket, *m.merged_with))): None for m in self.buckets if m.merged_with
        }
        return tuple(groups)

    @property
    def all_alone(self) -> bool:
        """Whether every bucket of the plan has a reduction of its own, in a loop or not."""
        return all(match.verdict in ("alone", "in loop") for match in self.buckets)

    def __str__(self) -> str:
        parts = [self._head(), *([self._buckets()] if self.plan else []), self._collectives()]
        return "\n\n".join([*parts, self._schedules()])

    def _head(self) -> str:
        unknown = (
            ""
            if all(c.runs is not None for c in self.collectives)
            else " (or more: a loop of unknown length)"
        )
        counted = "" if self.bytes_accessed_source == "text" else f", {self.bytes_in_text:,} (text)"
        rows = [
            ("program for", f"{self.device_count} x {self.device_kind or self.platform}"),
            (
                "collectives",
                f"{len(self.collectives)}, {self.payload_bytes:,} bytes a step{unknown}",
            ),
            ("sent by ring", f"{self.wire_bytes:,} bytes a step and device"),
            ("matmuls", f"{self.matmul_flops / 1e9:,.2f} GFLOP a step and device"),
            ("temp memory", _bytes(self.temp_bytes)),
            ("peak memory", _bytes(self.peak_bytes)),
            ("bytes accessed", f"{self.bytes_accessed:,} ({self.bytes_accessed_source}){counted}"),
        ]
        return "\n".join(f"{name:<15}{value}" for name, value in rows)

    def _buckets(self) -> str:
        assert self.plan is not None
        rows = [("bucket", "bytes", "dtype", "leaves", "in the program", "can hide it")]
        for match, bucket in zip(self.buckets, self.plan.buckets, strict=True):
            # The remainder behind a loop, with nothing left to hide it, does not speak for the loop.
            carriers = [self.overlaps[i] for i in match.collectives]
            carriers = [o for o in carriers if o.collective.in_loop] or carriers
            hides = min((o.flops for o in carriers), default=0)
            rows.append(
                (
                    str(match.bucket),
                    f"{bucket.nbytes:,}",
                    bucket.dtype.name,
                    str(len(bucket.paths)),
                    _verdict(match),
                    f"{hides / 1e9:,.2f} GFLOP" if match.collectives else "",
                )
            )
        merged = "".join(
            f"\nmerged by the compiler: buckets {', '.join(map(str, group))}"
            for group in self.merged
        )
        return _table(rows, right=(0, 1, 3, 5)) + merged

    def _collectives(self) -> str:
        if not self.overlaps:
            return "no collectives"
        rows = [
            (
                "#",
                "collective",
                "bytes",
                "dtype",
                "arrays",
                "devices",
                "runs",
                "in",
                "",
                "can hide it",
            )
        ]
        for i, found in enumerate(self.overlaps):
            c = found.collective
            rows.append(
                (
                    str(i),
                    c.kind,
                    f"{c.nbytes:,}",
                    c.dtype,
                    str(len(c.operand_shapes)),
                    str(c.group_size),
                    "?" if c.runs is None else str(c.runs),
                    "loop" if c.in_loop else "entry",
                    "async" if c.asynchronous else "sync",
                    f"{found.flops / 1e9:,.2f} GFLOP",
                )
            )
        basis = (
            "can hide it: matmuls that do not depend on it (CPU text has no run-time order)"
            if self.overlaps[0].basis == "dependencies"
            else "can hide it: matmuls between its start and its end in the schedule"
        )
        return _table(rows, right=(0, 2, 4, 5, 6, 9)) + "\n" + basis

    def _schedules(self) -> str:
        lines = [
            "schedule (G matmul, f other compute, [ ] reduction, { } other collective, W loop)"
        ]
        for name, text in self.schedules:
            shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} letters)"
            lines.append(f"  {name}: {shown}")
        return "\n".join(lines)


def report(program: Any, plan: BucketPlan | None = None, *args: Any, **kwargs: Any) -> Report:
    """Reports what a compiled step communicates, and what became of a plan.

    Args:
      program: a ``jax.stages.Compiled`` or its text; or something with a ``lower`` method (a trainer, a jitted
        function), or a ``jax.stages.Lowered``, which is then compiled.
      plan: the plan the step was made with, or None. Its buckets are found in the program by their sizes.
      *args: what ``lower`` is called with: ``report(trainer, plan, state, batch)``.
      **kwargs: the same.

    Returns:
      A ``Report``; print it.

    Raises:
      TypeError: ``program`` cannot be inspected, ``plan`` is no plan, or arguments are missing or too many.
      ValueError: the text is no compiled program of a backend that is known.
    """
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(
            f"expected plan to be a fdp.BucketPlan or None, got {type(plan).__name__}: "
            "call report(trainer, plan, state, batch), or report(compiled, plan)."
        )
    loaded = load(_compiled(program, args, kwargs))
    overlaps = overlap(loaded)
    collectives = tuple(o.collective for o in overlaps)
    total = loaded.costs.total(loaded.module.entry)
    accessed = loaded.xla_cost.get("bytes accessed")
    return Report(
        platform=loaded.platform,
        device_kind=loaded.device_kind,
        device_count=loaded.module.device_count,
        plan=plan,
        buckets=match_buckets(plan, collectives) if plan else (),
        overlaps=overlaps,
        schedules=tuple(interleavings(loaded).items()),
        temp_bytes=getattr(loaded.memory, "temp_size_in_bytes", None),
        peak_bytes=getattr(loaded.memory, "peak_memory_in_bytes", None),
        bytes_accessed=total.nbytes if accessed is None else int(accessed),
        bytes_accessed_source="text" if accessed is None else "XLA",
        bytes_in_text=total.nbytes,
        matmul_flops=total.flops,
    )


def _compiled(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inspectable:
    if isinstance(program, str | Program | jax.stages.Compiled | jax.stages.Lowered):
        if args or kwargs:
            raise TypeError(
                f"expected no further arguments with a {type(program).__name__}, got "
                f"{len(args) + len(kwargs)}: they are for what still has to be lowered, such as a trainer."
            )
        return program.compile() if isinstance(program, jax.stages.Lowered) else program
    lower = getattr(program, "lower", None)
    if not callable(lower):
        return load(program)  # raises, and says what is wanted
    if not args and not kwargs:
        raise TypeError(
            f"expected the arguments to lower {type(program).__name__} with, got none: "
            "call report(trainer, plan, state, batch), or report(trainer.lower(state, batch).compile(), plan)."
        )
    lowered: Any = lower(*args, **kwargs)
    return lowered.compile()


def _bytes(count: int | None) -> str:
    return "not known from text" if count is None else f"{count:,} bytes"


def _runs(collective: Collective) -> int:
    return 1 if collective.runs is None else collective.runs


def _verdict(match: Match) -> str:
    carriers = ", ".join(f"#{i}" for i in match.collectives)
    if match.merged_with:
        return f"merged with {', '.join(map(str, match.merged_with))} ({carriers})"
    return f"{match.verdict} ({carriers})" if carriers else match.verdict


def _table(rows: list[tuple[str, ...]], right: tuple[int, ...]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
