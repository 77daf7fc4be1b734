"""Figure 12: several buckets in flight. fdp with windows of 1, 3 and 5.

    python -m benchmarks.figures.fig12_windows --quick
    python -m benchmarks.figures.fig12_windows --model mlp

The paper got them from process groups used in turn (rr1, rr3, rr5). PyTorch has removed those groups; its DDP, one
bucket after the other on one group, is here for comparison at the same caps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figures import compare, drawing, limits, settings

NAME = "fig12_windows"
WINDOWS = (1, 3, 5)
CAPS = (1, 5, 10)
QUICK_CAPS = (1,)


def swept(caps: Sequence[float]) -> dict[str, list[str]]:
    """For each cap, as text: fdp by window, then DDP."""
    return {
        f"{cap:g}": [
            *(f"fdp:ordered,cap={cap:g},window={window}" for window in WINDOWS),
            f"torch:cap={cap:g},view=on",
        ]
        for cap in caps
    }


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """See `benchmarks.rank`; adds ``"windows"``: {cap: what the windows gain there}."""
    setting = settings.chosen(args.model, args)
    groups = swept(QUICK_CAPS if args.quick else CAPS)
    names = [name for group in groups.values() for name in group]
    result = settings.time_ways(setting, names, lambda found: keep(summarize(found, groups)))
    return summarize(result, groups)


def summarize(result: dict[str, Any], groups: dict[str, list[str]]) -> dict[str, Any]:
    """Adds limits, and for each cap which window is fastest, and whether this run can tell."""
    limits.add_to(result)
    ways, found = result["ways"], {}
    for cap, names in groups.items():
        ours = [name for name in names if drawing.who(name) == "fdp"]
        best, alike = compare.best(ways, ours)
        gain = 1 - ways[best]["median_s"] / ways[ours[0]]["median_s"]
        if ours[0] in (best, *alike):
            said = "no gain seen"
        else:
            said = f"window {best.rpartition('=')[2]} takes {gain:.1%} off"
        found[cap] = {
            "ways": names,
            "best": best,
            "not_separated": alike,
            "gain": gain,
            "said": said,
        }
    result["windows"] = found
    return result


def draw(result: dict[str, Any]) -> Any:
    """A group of bars a cap: windows in rising darkness, then DDP."""
    figure, axes = drawing.new(8, 5)
    shades = ("#dbe6f1", "#7fa6c9", "#2b5d8a")
    for group, found in enumerate(result["windows"].values()):
        for i, name in enumerate(found["ways"]):
            way = result["ways"][name]
            style = dict(drawing.BARS[drawing.who(name)])
            if drawing.who(name) == "fdp":
                style |= {"color": shades[i], "label": f"fdp, window {WINDOWS[i]}"}
            axes.bar(
                group + 0.2 * (i - 1.5),
                way["median_s"],
                0.2,
                yerr=drawing.whiskers(result["ways"], [name]),
                capsize=3,
                **style,
            )
            axes.text(
                group + 0.2 * (i - 1.5),
                way["q3_s"],
                f"{way['median_s']:.3g}",
                ha="center",
                va="bottom",
                fontsize=7,
            )
    drawing.limit_lines(axes, result["limits"], vertical=False)
    axes.set_xticks(
        range(len(result["windows"])),
        [f"{cap} MiB\n{found['said']}" for cap, found in result["windows"].items()],
        fontsize=8,
    )
    axes.set_xlabel("bucket cap")
    axes.set_ylabel("seconds a step (median, whiskers: quartiles)")
    axes.set_title("Several buckets in flight\n" + drawing.about(result), fontsize=10)
    drawing.legend(figure, axes)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return settings.main_of_each(NAME, __doc__ or "", ("mlp", "resnet50"), measure, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
