"""Whether two ways differ by more than the same way differs from itself within one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def repeatability(way: Mapping[str, Any]) -> float | None:
    """How far two halves of a run of one way are apart: the medians of its even and its odd rounds, in seconds.

    Ways take turns, so the two halves lie inside each other in time, as the ways do that they are compared with.

    Returns:
      None after a single round.
    """
    rounds = way["steps_s"]
    halves = [[s for turn in rounds[start::2] for s in turn] for start in (0, 1)]
    if not all(halves):
        return None
    return abs(statistics.median(halves[0]) - statistics.median(halves[1]))


def faster(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool | None:
    """Whether way ``a`` takes less time a step than ``b``; None if this run cannot tell.

    It can if their medians are further apart than either way's own two halves, and than half of the wider
    interquartile range.
    """
    own = [repeatability(a), repeatability(b)]
    if any(x is None for x in own):
        return None
    spread = max(w["q3_s"] - w["q1_s"] for w in (a, b)) / 2
    difference = b["median_s"] - a["median_s"]
    if abs(difference) <= max(spread, *(x for x in own if x is not None)):
        return None
    return difference > 0


def best(ways: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> tuple[str, list[str]]:
    """The way with the least median among ``names``, and those that this run cannot tell from it."""
    first = min(names, key=lambda name: ways[name]["median_s"])
    alike = [n for n in names if n != first and faster(ways[first], ways[n]) is None]
    return first, alike


def optimum(
    ways: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
    label: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Whether ``names``, in order of a parameter, have their optimum inside, both ends being worse.

    Args:
      ways: of a result of `benchmarks.rank`.
      names: of ways, in order.
      label: a way's name for the sentence.

    Returns:
      ``{"best": name, "not_separated": [names], "inside": bool or None, "said": a sentence}``; ``inside`` is None where
      this run cannot tell one of the ends from the best.
    """
    first, alike = best(ways, names)
    ends = [names[0], names[-1]]
    inside: bool | None = None
    unclear = [name for name in alike if first in ends or name in ends]
    if unclear:
        said = f"{label(first)} is best, not separated from {' and '.join(map(label, unclear))}"
    elif first in ends:
        inside, said = False, f"the best is at an end: {label(first)}"
    else:
        inside, said = True, f"{label(first)} is best, and both ends are worse"
    return {"best": first, "not_separated": alike, "inside": inside, "said": said}
