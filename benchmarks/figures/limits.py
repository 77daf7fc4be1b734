"""What no schedule can beat, and how near a measured step comes.

A step that takes c seconds without communication has gradients of b_1, b_2, ... bytes ready at r_1 <= r_2 <= ... The
wire takes w(b) seconds for b bytes, which it sends in any order and in pieces of any size, never before they are ready.

`step_boundary`, the best that a schedule can do that ends each step before the next begins, as DDP does: the last
byte arrives at max over k of r_k + w(b_k + b_k+1 + ...), because what is ready at r_k or later cannot have been sent
before; and whatever follows the last gradient, c - r_last, which is mostly the optimizer, follows the last byte.

When a gradient is ready is not a law but what one program did: XLA, left alone, puts off most of the gradients of a
deep network until its backward pass is over, and fdp's schedule has them earlier. So each framework is held to the
better of what both measured, as shares of a step that computes alone; else a step could beat its "limit".

`overall`, max(c, w(all)): also for schedules that let the wire run on into the next step's forward pass.

The wire is that of a ring all-reduce at line rate, free of latency, of the time that its copies take from the cores,
and of waiting for the slower rank. Real steps have all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.figures.runs import FigureError


def last_arrival(ready: Sequence[tuple[float, float]], seconds_per_byte: float) -> float:
    """When the last byte has arrived at the earliest.

    Args:
      ready: (seconds since the step began, bytes) of every gradient, in any order.
      seconds_per_byte: of the wire.

    Raises:
      FigureError: no gradients.
    """
    if not ready:
        raise FigureError("expected at least one gradient, got none")
    latest, later_bytes = 0.0, 0.0
    for seconds, nbytes in sorted(ready, reverse=True):
        later_bytes += nbytes
        latest = max(latest, seconds + later_bytes * seconds_per_byte)
    return latest


def step_boundary(
    ready: Sequence[tuple[float, float]], compute: float, seconds_per_byte: float
) -> float:
    """The shortest step in seconds, if it ends before the next begins.

    Args:
      ready: (seconds since the step began, bytes) of every gradient.
      compute: seconds of the step without communication.
      seconds_per_byte: of the wire.
    """
    after = max(0.0, compute - max(seconds for seconds, _ in ready)) if ready else 0.0
    return last_arrival(ready, seconds_per_byte) + after


def hidden(step: float, compute: float, wire: float) -> float:
    """Share of the communication that a step hides: seconds saved over computing first and then sending at line rate.

    1 where the step is as long as the longer of the two, which is `overall`; 0 where nothing is hidden; below 0 where
    communication takes longer than its time at line rate.
    """
    return (compute + wire - step) / min(compute, wire)


def from_rank(result: dict[str, Any]) -> dict[str, Any]:
    """The limits of a result of `benchmarks.rank`, by framework.

    Computing alone is the fastest of the framework's ways that do, so that a trainer that computes slowly does not get
    a limit that is easier to reach. Ready times count as shares of the watched step they were seen in, of the framework
    that gives the lower limit.

    Returns:
      ``{"torch" or "jax": {"compute_s", "wire_s", "step_boundary_s", "overall_s"}}``. Without a rate all but
      ``compute_s`` are None; ``step_boundary_s`` is also None where no ready times were measured.
    """
    wire, nbytes = result["wire_s"], result["gradient_bytes"]
    times, watched = result.get("ready") or {}, result.get("ready_alone_s") or {}
    found: dict[str, Any] = {}
    for framework, alone in result["alone_s"].items():
        silent = [
            way["median_s"]
            for way in result["ways"].values()
            if way["framework"] == framework
            and not way["communicates"]
            and way.get("iterations", 1) == 1
        ]
        compute = min([alone, *silent])
        bound = None
        if times.get(framework) and wire:
            bound = min(
                _bound(ready, watched[who]["watched"], compute, wire / nbytes)
                for who, ready in times.items()
                if ready
            )
        overall = None if wire is None else max(compute, wire)
        found[framework] = {
            "compute_s": compute,
            "wire_s": wire,
            "step_boundary_s": bound,
            "overall_s": overall,
        }
    return found


def _bound(
    ready: Sequence[tuple[float, float]], watched: float, compute: float, seconds_per_byte: float
) -> float:
    """`step_boundary` of a step of ``compute`` seconds whose gradients come as in one of ``watched`` seconds."""
    return step_boundary([(s * compute / watched, b) for s, b in ready], compute, seconds_per_byte)


def add_to(result: dict[str, Any]) -> dict[str, Any]:
    """Puts ``"limits"`` into a result of `benchmarks.rank`, and ``"hidden"`` and ``"over_limit"`` into its ways.

    ``hidden`` is the share above; ``over_limit`` the median step over its framework's ``step_boundary_s``; None where
    they are not known or the way does not communicate.
    """
    result["limits"] = from_rank(result)
    for way in result["ways"].values():
        limit = result["limits"].get(way["framework"])
        way["hidden"] = way["over_limit"] = None
        if limit is None or not way["communicates"]:
            continue
        if limit["wire_s"]:
            way["hidden"] = round(hidden(way["median_s"], limit["compute_s"], limit["wire_s"]), 4)
        if limit["step_boundary_s"]:
            way["over_limit"] = round(way["median_s"] / limit["step_boundary_s"], 4)
    return result
