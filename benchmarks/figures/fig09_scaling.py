"""Figure 9: seconds a step on 1, 2, 4 and 8 ranks, the same batch on each (weak scaling).

    python -m benchmarks.figures.fig09_scaling --quick
    python -m benchmarks.figures.fig09_scaling

An MLP of 12 layers of 1024 x 1024. More ranks than cores cannot compute at full speed, so their layers sleep for what
PyTorch's and JAX's passes took alone on one core (`benchmarks.emulate`); steps, buckets, reductions and wires are real.
Up to as many ranks as cores the figure has both: what computes says how far what sleeps can be believed.
`--emulate-compute` sleeps everywhere and leaves the computing out, `--no-emulate-compute` leaves out the sleeping and
every number of ranks that needs it. What is left to compute, 50 MB of updates and copies a rank, and the kernel's work
for the wires do share the cores: with 8 ranks that is part of the step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.figures import drawing, runs, settings
from benchmarks.pairs import make_pair
from fdp.launch import available_cores

NAME = "fig09_scaling"
RANKS = (1, 2, 4, 8)
WAYS = ("torch:cap=5,view=on", "fdp:ordered,cap=5")
QUICK_WAYS = ("torch:cap=0.25,view=on", "fdp:ordered,cap=0.25")


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Runs of `benchmarks.rank`, one for each number of ranks and kind.

    Returns:
      ``{"model", "batch", "rate", "times": what `benchmarks.emulate.measure` returns, "rows": [{"ranks", "emulated":
      bool, "wire_s", "alone_s", "ways"}]}``; a row's ways are named "torch" and "fdp".
    """
    setting = settings.chosen(args.model, args)
    ways = QUICK_WAYS if args.quick else WAYS
    result: dict[str, Any] = {
        "model": make_pair(setting.model).name,
        "batch": setting.batch,
        "ranks": "1 to " + str(max(args.ranks)),
        "rate": setting.rate,
        "cores": available_cores(),
        "machine": machine.describe(),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        if args.emulate_compute is not False:
            result["times"] = settings.emulated_times(setting, args.quick, times)
        for ranks, emulated in plan(args.ranks, args.emulate_compute, available_cores()):
            more = ["--emulate-compute", str(times)] if emulated else []
            found = settings.time_ways(setting, ways, lambda _: None, ranks=ranks, more=more)
            result["rows"].append(row(found, ways, emulated))
            result["machine"] = found["machine"]
            keep(result)
    return result


def plan(ranks: Sequence[int], emulate: bool | None, cores: int) -> list[tuple[int, bool]]:
    """Which runs there are: numbers of ranks, and whether they sleep. Computing needs a core a rank.

    Raises:
      FigureError: there is none.
    """
    computing = [(n, False) for n in ranks if n <= cores and emulate is not True]
    sleeping = [(n, True) for n in ranks if emulate is not False]
    if not computing + sleeping:
        raise runs.FigureError(
            f"expected --ranks of at most {cores}, the cores here, with --no-emulate-compute, got {list(ranks)}",
            2,
        )
    return computing + sleeping


def row(found: dict[str, Any], ways: Sequence[str], emulated: bool) -> dict[str, Any]:
    """What of one run goes into the result."""
    kept = ("median_s", "q1_s", "q3_s", "sent_bytes_per_step", "steps_s")
    return {
        "ranks": found["ranks"],
        "emulated": emulated,
        "wire_s": found["wire_s"],
        "alone_s": found["alone_s"],
        "ways": {drawing.who(n): {k: found["ways"][n][k] for k in kept} | {"way": n} for n in ways},
    }


def draw(result: dict[str, Any]) -> Any:
    """Seconds a step against ranks: sleeping filled, computing hollow; and the larger of compute and wire."""
    figure, axes = drawing.new(8, 5.2)
    for who, framework in (("torch", "torch"), ("fdp", "jax")):
        look = drawing.LINES[who]
        for emulated in (True, False):
            rows = [r for r in result["rows"] if r["emulated"] == emulated]
            if not rows:
                continue
            of = [r["ways"][who] for r in rows]
            medians = [x["median_s"] for x in of]
            style = look if emulated else {**look, "linestyle": "none", "fillstyle": "none"}
            axes.errorbar(
                [r["ranks"] for r in rows],
                medians,
                yerr=[
                    [x["median_s"] - x["q1_s"] for x in of],
                    [x["q3_s"] - x["median_s"] for x in of],
                ],
                capsize=4,
                markersize=7 if emulated else 13,
                label=f"{drawing.BARS[who]['label']}, {'compute slept' if emulated else 'computing'}",
                **style,
            )
            if emulated:
                bound = [max(r["alone_s"][framework], r["wire_s"] or 0.0) for r in rows]
                axes.plot(
                    [r["ranks"] for r in rows],
                    bound,
                    color=look["color"],
                    linestyle=":",
                    linewidth=1.2,
                    marker="_",
                    label=f"{framework}: max(compute, wire)",
                )
    ranks = sorted({r["ranks"] for r in result["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"ranks (one machine of {result['cores']} cores)")
    axes.set_ylabel("seconds a step (median, whiskers: quartiles)")
    axes.set_title("Weak scaling\n" + drawing.about(result), fontsize=10)
    drawing.legend(figure, axes, columns=2)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    made = runs.parser(NAME, __doc__ or "")
    made.set_defaults(model="mlp")
    made.add_argument("--batch", type=int, help="examples a rank")
    made.add_argument(
        "--ranks", type=int, nargs="+", help="numbers of ranks (1 2 4 8; quick: 1 2 4)"
    )
    made.add_argument(
        "--emulate-compute",
        action=argparse.BooleanOptionalAction,
        help="sleep for the measured time instead of computing (where ranks outnumber cores)",
    )
    args = made.parse_args(argv)
    args.ranks = args.ranks or (RANKS[:3] if args.quick else RANKS)
    if min(args.ranks) < 1:
        made.error(f"expected --ranks of at least 1, got {min(args.ranks)}")
    return runs.figure_main(NAME, args, measure, draw)


if __name__ == "__main__":
    sys.exit(main())
