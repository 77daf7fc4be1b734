"""Step time of every way to train: PyTorch DDP by bucket cap, plain JAX, fdp by cap, window and what it
carries over to the next step, on the same wires.

    python -m benchmarks.figures.t1_step_time --quick
    python -m benchmarks.figures.t1_step_time --model mlp

Without --model all of mlp, mlp-unequal and resnet50, a file each: t1_step_time_mlp.json, ... Way by way, medians with
quartiles, the share of the communication that is hidden, and how far the step is from `benchmarks.figures.limits`. Two
pairs of ways are the same configuration under two names; how far those are apart is how far this run can see.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.figures import compare, drawing, limits, settings

NAME = "t1_step_time"
TORCH = [f"torch:cap={cap},view=on" for cap in (1, 5, 10, 25, 50)]
PLAIN = ["jax:pmean", "jax:pmean,combiner=off", "jax:pmap", "jax:auto"]
OURS = [
    f"fdp:ordered,cap={cap},window={window}" for cap, window in ((5, 1), (5, 2), (10, 1), (25, 1))
]
SERIALIZED = "fdp:serialized,cap=5"
CARRYING = [f"fdp:ordered,cap=5,carry={count}" for count in (2, 3, 4)]
# The same twice: what differs between these two is noise.
TWICE = {
    "torch:cap=25,view=on": "torch:ddp,cap=25,view=on",
    "fdp:ordered,cap=5,window=1": "fdp:cap=5,window=1",
}
WAYS = [*TORCH, *PLAIN, *OURS, *CARRYING, SERIALIZED, "jax:none", *TWICE.values()]
# XLA compiles a step of ResNet-50 for most of a minute, and runs it for several seconds.
# jax:auto takes batch statistics over all ranks: another program.
LEFT_OUT = {"resnet50": {*PLAIN[1:], OURS[1], CARRYING[0]}}
QUICK_WAYS = [
    TORCH[1],
    TORCH[3],
    "jax:pmean",
    OURS[0],
    OURS[1],
    CARRYING[0],
    SERIALIZED,
    *TWICE.values(),
]


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Times one model, ``args.model``; see `benchmarks.rank` for the result, `summarize` for what is added."""
    setting = settings.chosen(args.model, args)
    left_out = LEFT_OUT.get(settings.label(args.model), set())
    ways = QUICK_WAYS if args.quick else [way for way in WAYS if way not in left_out]
    return summarize(settings.time_ways(setting, ways, lambda found: keep(summarize(found))))


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Adds the limits, and ``"compared"``: what this run shows, in seconds and sentences."""
    limits.add_to(result)
    ways = result["ways"]
    speaking = {name: way for name, way in ways.items() if way["communicates"]}
    torch = [name for name in speaking if drawing.who(name) == "torch"]
    ours = [n for n in speaking if drawing.who(n) == "fdp" and "serialized" not in n]
    compared: dict[str, Any] = {
        "same_twice": {
            f"{a} and {b}": round(abs(ways[a]["median_s"] / ways[b]["median_s"] - 1), 4)
            for a, b in TWICE.items()
            if a in ways and b in ways
        }
    }
    apart = max(compared["same_twice"].values(), default=0.0)
    carrying = [name for name in ours if "carry" in name]
    if torch and ours:
        theirs = compare.best(ways, torch)[0]
        within = [
            name for name in ours if name not in carrying
        ]  # a step ends with its wire, as DDP's
        compared |= {"torch": theirs, **_against(ways, theirs, within, apart)}
        if carrying:
            compared["carrying"] = _against(ways, theirs, carrying, apart)
    result["compared"] = compared
    return result


def _against(
    ways: Mapping[str, Any], theirs: str, ours: Sequence[str], apart: float
) -> dict[str, Any]:
    """The best of ``ours`` against ``theirs``, and against the step in which nothing overlaps."""
    mine = compare.best(ways, ours)[0]
    seconds, other = ways[mine]["median_s"], ways[theirs]["median_s"]
    faster = compare.faster(ways[mine], ways[theirs])
    if abs(seconds / other - 1) <= apart:
        faster = None  # the same configuration differs by as much
    found = {"fdp": mine, "fdp_over_torch": round(seconds / other, 4), "fdp_faster": faster}
    if SERIALIZED in ways:
        found["serialized_removed"] = round(1 - seconds / ways[SERIALIZED]["median_s"], 4)
    return found


def draw(result: dict[str, Any]) -> Any:
    """A bar a way, from the framework's own fastest down; computing alone among them, and the limits as lines."""
    ways = result["ways"]
    names = [n for who in drawing.BARS for n in ways if drawing.who(n) == who]
    figure, axes = drawing.new(9.5, 1.8 + 0.27 * len(names))
    for who, style in drawing.BARS.items():
        mine = [n for n in names if drawing.who(n) == who]
        if mine:
            axes.barh(
                [names.index(n) for n in mine],
                [ways[n]["median_s"] for n in mine],
                xerr=drawing.whiskers(ways, mine),
                capsize=2,
                **style,
            )
    for i, name in enumerate(names):
        way = ways[name]
        hidden = way.get("hidden")
        said = f" {way['median_s']:.3f} s"
        if hidden is not None:
            said += f", {hidden:.0%} hidden" if hidden > 0 else ", nothing hidden"
        axes.text(way["q3_s"], i, said, va="center", fontsize=7)
    drawing.limit_lines(axes, result["limits"], vertical=True)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(way["q3_s"] for way in ways.values()))
    axes.set_xlabel("seconds a step (median, whiskers: quartiles)")
    axes.set_title("Step time by way to train\n" + drawing.about(result), fontsize=10)
    drawing.legend(figure, axes)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return settings.main_of_each(
        NAME, __doc__ or "", ("mlp", "mlp-unequal", "resnet50"), measure, draw, argv
    )


if __name__ == "__main__":
    sys.exit(main())
