"""A report in plain words: how many all-reduces, how large, do they overlap, what would more devices do."""

from __future__ import annotations

import dataclasses

from fdp.cli.estimating import ASSUMPTIONS, Estimate
from fdp.inspect import Collective, Overlap, Report

# Bytes that a compiler may add to a buffer.
_PADDING = 256


@dataclasses.dataclass(frozen=True)
class Answers:
    """The numbers behind the words. Counts and bytes are of one step; a loop's count each time it runs.

    Attributes:
      devices: that the program is for.
      all_reduces: all of them, those of gradients and of scalars (loss, auxiliary output, model state).
      gradient_all_reduces: those that carry buckets.
      in_loops: of these, those inside loops over layers.
      smallest_bytes: of these, the smallest; 0 if there are none.
      largest_bytes: the largest.
      gradient_bytes: all of them together.
      sent_bytes: that one device sends if they run on rings, everything included.
      hidden_all_reduces: of gradient all-reduces, those with matmuls to run beside them.
      hidden_bytes: the bytes of these.
      other_collectives: that reduce nothing (all-gather, ...).
      basis: how overlap was found, ``"schedule"`` or ``"dependencies"``; empty without collectives.
      last_only: the only gradient all-reduce with nothing beside it is the last one.
      merged: groups of buckets that the compiler joined.
      not_found: buckets that no collective carries as they are; their leaves are reduced in parts.
    """

    devices: int
    all_reduces: int
    gradient_all_reduces: int
    in_loops: int
    smallest_bytes: int
    largest_bytes: int
    gradient_bytes: int
    sent_bytes: int
    hidden_all_reduces: int
    hidden_bytes: int
    other_collectives: int
    basis: str
    last_only: bool
    merged: tuple[tuple[int, ...], ...]
    not_found: tuple[int, ...]

    @classmethod
    def of(cls, report: Report, other_bytes: int) -> Answers:
        """The numbers of a report that was made with a plan.

        Args:
          report: of a step.
          other_bytes: what a step reduces beside gradients: loss, auxiliary output, model state.
        """
        reductions = [one for one in report.overlaps if _is_reduction(one.collective)]
        carrying = {i for match in report.buckets for i in match.collectives}
        not_found = tuple(m.bucket for m in report.buckets if m.verdict == "not found")
        if not_found:
            # Leaves of one bucket that different loops make are reduced apart, so no collective has its size. What is
            # in a loop, or larger than all that is no gradient, is a gradient's.
            carrying |= {
                i
                for i, one in enumerate(report.overlaps)
                if _is_reduction(one.collective)
                and (one.collective.in_loop or one.collective.nbytes > other_bytes + _PADDING)
            }
        ours = [report.overlaps[i] for i in sorted(carrying)]
        hidden = [one for one in ours if one.flops > 0]
        sizes = [one.collective.nbytes for one in ours]
        return cls(
            devices=report.device_count,
            all_reduces=_count(reductions),
            gradient_all_reduces=_count(ours),
            in_loops=_count([one for one in ours if one.collective.in_loop]),
            smallest_bytes=min(sizes, default=0),
            largest_bytes=max(sizes, default=0),
            gradient_bytes=_total(ours),
            sent_bytes=report.wire_bytes,
            hidden_all_reduces=_count(hidden),
            hidden_bytes=_total(hidden),
            other_collectives=_count(list(report.overlaps)) - _count(reductions),
            basis=report.overlaps[0].basis if report.overlaps else "",
            last_only=bool(hidden) and [one for one in ours if not one.flops] == ours[-1:],
            merged=report.merged,
            not_found=not_found,
        )


def in_words(a: Answers, guess: Estimate | None) -> list[tuple[str, str]]:
    """Questions and their answers."""
    rows = [
        ("How many all-reduces does a step make?", _how_many(a)),
        ("How large are they?", _how_large(a)),
        ("Do they overlap with the backward pass?", _overlap(a)),
    ]
    if guess is None:
        hint = "Add --devices 64 --hardware h100 for an estimate, or compile for --target h100:8."
        rows.append(("What would more devices do?", hint))
    else:
        question = f"What would {guess.devices} devices do? (an estimate)"
        rows.append((question, f"{_guess(guess)}. {ASSUMPTIONS[0].upper()}{ASSUMPTIONS[1:]}."))
    return rows


def size(nbytes: int) -> str:
    """Bytes as people say them."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"


def _how_many(a: Answers) -> str:
    if not a.all_reduces:
        if a.devices == 1:
            return "None: with one device there is nobody to reduce with."
        return "None: the program sends nothing."
    scalars = a.all_reduces - a.gradient_all_reduces
    text = f"{a.all_reduces}: {a.gradient_all_reduces} for gradients"
    if a.in_loops:
        text += f" ({a.in_loops} of them inside loops over layers)"
    if scalars:
        text += f", {scalars} for the loss and whatever else is averaged"
    text += "."
    if a.merged:
        groups = "; ".join(", ".join(map(str, group)) for group in a.merged)
        text += f" The compiler merged buckets {groups}."
    if a.not_found:
        named = ", ".join(map(str, a.not_found))
        text += f" Buckets {named} of the plan do not cross as one: loops make their leaves and reduce them."
    if a.other_collectives:
        text += f" There are {a.other_collectives} other collectives, see the table."
    return text


def _how_large(a: Answers) -> str:
    if not a.gradient_all_reduces:
        return "There are none for gradients."
    spread = size(a.largest_bytes)
    if a.smallest_bytes != a.largest_bytes:
        spread = f"{size(a.smallest_bytes)} to {spread}"
    return (
        f"Those for gradients {spread} each, {size(a.gradient_bytes)} a step; on a ring of {a.devices} devices each "
        f"sends {size(a.sent_bytes)} a step."
    )


def _overlap(a: Answers) -> str:
    if not a.gradient_all_reduces:
        return "There is nothing to overlap."
    part = f"{a.hidden_all_reduces} of {a.gradient_all_reduces}"
    share = f"{a.hidden_bytes / max(a.gradient_bytes, 1):.0%} of their bytes"
    if not a.hidden_all_reduces:
        return "No: nothing is computed beside any of them, the step waits until each is done."
    if a.basis == "dependencies":
        text = (
            f"They can: {part} ({share}) have matmuls that do not depend on them. How much then runs at the same "
            "time is up to the CPU's threads"
        )
    else:
        text = f"Yes: {part} ({share}) have matmuls between their start and their end"
    if a.last_only:
        text += "; the last one never does, because nothing is left to compute"
    return text + "."


def _guess(guess: Estimate) -> str:
    return (
        f"On {guess.devices} x {guess.device} a step takes {_time(guess.step_seconds)}: {_time(guess.compute_seconds)} "
        f"of compute, {_time(guess.link_seconds)} of communication, of which {guess.hidden:.0%} is hidden and "
        f"{_time(guess.exposed_seconds)} are waited for. That is {guess.efficiency:.0%} of the throughput of "
        f"{guess.devices} devices that need not communicate"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _is_reduction(collective: Collective) -> bool:
    return collective.kind in ("all-reduce", "reduce-scatter")


def _runs(one: Overlap) -> int:
    return one.collective.runs or 1


def _count(found: list[Overlap]) -> int:
    return sum(map(_runs, found))


def _total(found: list[Overlap]) -> int:
    return sum(one.collective.nbytes * _runs(one) for one in found)
