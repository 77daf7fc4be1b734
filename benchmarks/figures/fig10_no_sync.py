"""Figure 10: seconds per iteration when one of n iterations synchronizes, torch's no_sync and fdp's no_sync_step.

    python -m benchmarks.figures.fig10_no_sync --quick
    python -m benchmarks.figures.fig10_no_sync

A step is n iterations: n - 1 that add their gradients up on each rank, and one that reduces the sum and updates. What
is to be expected is computing alone plus 1 / n of the exposed communication, which is what an iteration takes beyond
computing alone when all of them synchronize. The ways take turns as in `benchmarks.rank`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figures import drawing, runs, settings

NAME = "fig10_no_sync"
EVERY = (1, 2, 4, 8)
WAYS = ("torch:cap=5,view=on", "fdp:ordered,cap=5")
QUICK_WAYS = ("torch:cap=0.25,view=on", "fdp:ordered,cap=0.25")


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """See `benchmarks.rank`; adds what `summarize` does."""
    setting = settings.chosen(args.model, args)
    ways = QUICK_WAYS if args.quick else WAYS
    more = ["--every", *map(str, EVERY)]
    return summarize(settings.time_ways(setting, ways, keep, more=more), ways)


def summarize(result: dict[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    """Adds ``"no_sync"``: for torch and fdp the way, ``alone_s``, and a row for each n.

    A row has ``n``, ``median_s``, ``q1_s`` and ``q3_s`` of one iteration, ``expected_s`` and ``excess``: how far the
    median is above that, as a share of it.
    """
    found: dict[str, Any] = {}
    for way in ways:
        of = {result["ways"][way]["iterations"]: result["ways"][way]}
        of |= {x["iterations"]: x for k, x in result["ways"].items() if k.startswith(f"{way} ")}
        alone = result["alone_s"][of[1]["framework"]]
        rows = [row(x, alone, of[1]["median_s"] - alone) for _, x in sorted(of.items())]
        found[drawing.who(way)] = {"way": way, "alone_s": alone, "rows": rows}
    return result | {"no_sync": found}


def row(way: dict[str, Any], alone: float, exposed: float) -> dict[str, Any]:
    """One n: see `summarize`."""
    n = way["iterations"]
    expected = alone + exposed / n
    an_iteration = {key: way[key] / n for key in ("median_s", "q1_s", "q3_s")}
    excess = an_iteration["median_s"] / expected - 1
    return {"n": n, **an_iteration, "expected_s": expected, "excess": excess}


def draw(result: dict[str, Any]) -> Any:
    """Seconds an iteration against n: measured, expected, computing alone."""
    figure, axes = drawing.new(7, 5)
    for who, found in result["no_sync"].items():
        rows, look = found["rows"], drawing.LINES[who]
        numbers, medians = [r["n"] for r in rows], [r["median_s"] for r in rows]
        spread = [
            [r["median_s"] - r["q1_s"] for r in rows],
            [r["q3_s"] - r["median_s"] for r in rows],
        ]
        name, last = drawing.BARS[who]["label"], rows[-1]
        said = f"{name}: n = {last['n']} is {100 * last['excess']:+.1f} % off what is expected"
        axes.errorbar(
            numbers, medians, yerr=spread, capsize=4, label=said, **{**look, "linestyle": "none"}
        )
        axes.plot(
            numbers,
            [r["expected_s"] for r in rows],
            color=look["color"],
            linestyle=look["linestyle"],
            label=f"{name}, expected: computing alone + exposed / n",
        )
        axes.axhline(
            found["alone_s"],
            color=look["color"],
            linestyle=look["linestyle"],
            linewidth=0.8,
            alpha=0.6,
            label=f"{name}, computing alone: {found['alone_s']:.3g} s",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("n: one of n iterations synchronizes")
    axes.set_ylabel("seconds an iteration (median, whiskers: quartiles)")
    axes.set_title("Skipping synchronization\n" + drawing.about(result), fontsize=10)
    drawing.legend(figure, axes, columns=1)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    made = runs.parser(NAME, __doc__ or "")
    made.set_defaults(model="mlp")
    made.add_argument("--batch", type=int, help="examples a rank")
    return runs.figure_main(NAME, made.parse_args(argv), measure, draw)


if __name__ == "__main__":
    sys.exit(main())
