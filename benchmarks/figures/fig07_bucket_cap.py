"""Figures 7 and 8: step time against bucket cap, PyTorch DDP and fdp, from a bucket a gradient to one for all.

    python -m benchmarks.figures.fig07_bucket_cap --quick
    python -m benchmarks.figures.fig07_bucket_cap --model mlp-deep

Without --model mlp-deep and resnet50, a file each.

The paper's finding is that both ends are worse than the middle. The result says for each framework whether this run
shows that, shows something else, or cannot tell (`benchmarks.figures.compare`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figures import compare, drawing, limits, settings

NAME = "fig07_bucket_cap"
# In MiB, as ways write them.
EACH = "0.000001"  # a byte: a bucket a gradient
ALL = "100000"  # one bucket
CAPS = (EACH, "0.25", "1", "2", "4", "8", "16", "25", "50", ALL)
QUICK_CAPS = (EACH, "0.25", "1", ALL)


def ways(caps: Sequence[str]) -> dict[str, list[str]]:
    """The ways of each framework, in order of their cap, the first bucket's too."""
    return {
        "torch": [f"torch:cap={cap},view=on" for cap in caps],
        "fdp": [f"fdp:ordered,cap={cap}" for cap in caps],
    }


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """See `benchmarks.rank`; adds ``"swept"``: {framework: ways in order of cap}, and ``"optimum"`` of each."""
    setting = settings.chosen(args.model, args)
    swept = ways(QUICK_CAPS if args.quick else CAPS)
    names = [*swept["torch"], *swept["fdp"]]
    result = settings.time_ways(setting, names, lambda found: keep(summarize(found, swept)))
    return summarize(result, swept)


def summarize(result: dict[str, Any], swept: dict[str, list[str]]) -> dict[str, Any]:
    """Adds limits, the sweep and its optimum."""
    limits.add_to(result)
    result["swept"] = swept
    result["optimum"] = {
        who: compare.optimum(result["ways"], names, _said) for who, names in swept.items()
    }
    return result


def cap_of(name: str) -> str:
    """The cap that a way's name gives, for people."""
    [found] = [item[4:] for item in name.partition(":")[2].split(",") if item.startswith("cap=")]
    return {EACH: "a bucket\na gradient", ALL: "one\nbucket"}.get(found, found)


def _said(name: str) -> str:
    found = cap_of(name).replace("\n", " ")
    return f"{found} MiB" if found[0].isdigit() else found


def draw(result: dict[str, Any]) -> Any:
    """A line a framework with whiskers; caps at equal distances, as they come."""
    figure, axes = drawing.new(8, 5)
    for shift, (who, names) in zip((-0.06, 0.06), result["swept"].items(), strict=True):
        medians = [result["ways"][name]["median_s"] for name in names]
        axes.errorbar(
            [i + shift for i in range(len(names))],
            medians,
            yerr=drawing.whiskers(result["ways"], names),
            capsize=3,
            label=f"{drawing.BARS[who]['label']}: {result['optimum'][who]['said']}",
            **drawing.LINES[who],
        )
        best = names.index(result["optimum"][who]["best"])
        axes.plot(best + shift, medians[best], "o", markersize=13, fillstyle="none", color="black")
    drawing.limit_lines(axes, result["limits"], vertical=False)
    caps = [cap_of(name) for name in result["swept"]["torch"]]
    axes.set_xticks(range(len(caps)), caps)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bucket cap in MiB")
    axes.set_ylabel("seconds a step (median, whiskers: quartiles)")
    axes.set_title(
        "Step time against bucket cap (circle: best)\n" + drawing.about(result), fontsize=10
    )
    drawing.legend(figure, axes, columns=1)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return settings.main_of_each(NAME, __doc__ or "", ("mlp-deep", "resnet50"), measure, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
