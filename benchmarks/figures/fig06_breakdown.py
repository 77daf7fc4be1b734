"""Figure 6: where a step's time goes, PyTorch DDP and fdp, with communication overlapped and not.

    python -m benchmarks.figures.fig06_breakdown --quick
    python -m benchmarks.figures.fig06_breakdown --model mlp
    python -m benchmarks.figures.fig06_breakdown --model mlp --rate 700mbit --emulate-compute

Forward, backward and optimizer are of the step that computes alone (`benchmarks.figures.on_ranks.parts`); exposed
communication is what a step takes beyond that. Nothing overlaps in fdp's serialized schedule, and in DDP with one
bucket for all gradients, which is full only when the last is there. Carried over are buckets
that fdp leaves to the next step. Each framework's step without overlap counts as 1,
as in the paper. With --emulate-compute layers sleep for what they were measured to take, so that communication takes
no core from them. A layer that sleeps still holds JAX's thread, and what stands behind it in that queue.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import compare, drawing, limits, runs, settings

NAME = "fig06_breakdown"
PARTS = ("forward", "backward", "exposed", "optimizer")
CAPS = ("1", "5", "10", "25")
CARRIED = ("2", "4")
QUICK_CAPS = ("0.5",)


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """See `benchmarks.rank`; adds ``"parts"`` of `benchmarks.figures.on_ranks.parts`, and what `summarize` says."""
    setting = settings.chosen(args.model, args)
    caps = QUICK_CAPS if args.quick else CAPS
    overlapped = {
        "torch": [f"torch:cap={cap},view=on" for cap in caps],
        "fdp": [f"fdp:ordered,cap={cap}" for cap in caps],
    }
    carrying = [f"fdp:ordered,cap={caps[-1] if args.quick else 5},carry={n}" for n in CARRIED]
    alone = {"torch": "torch:cap=100000,view=on", "fdp": f"fdp:serialized,cap={caps[-1]}"}
    names = [*overlapped["torch"], *overlapped["fdp"], *carrying, *alone.values()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "parts.json"
        sizes = ["--model", setting.model, "--batch", str(setting.batch), "--out", str(out)]
        runs.on_cluster(
            [
                "-m",
                "benchmarks.figures.on_ranks.parts",
                *sizes,
                "--steps",
                "3" if args.quick else "9",
            ],
            ranks=2,
            rate=setting.rate,
            timeout_s=1800,
        )
        parts = json.loads(out.read_text("utf-8"))
        more = ["--ready", "5"]
        if args.emulate_compute:  # what is left to take apart is the forward pass's sleep
            file = Path(folder) / "times.json"
            times = settings.emulated_times(setting, args.quick, file)
            more += ["--emulate-compute", str(file)]
            for framework, found in parts.items():
                found["forward_s"] = times[framework]["forward"]

        def complete(result: dict[str, Any]) -> dict[str, Any]:
            return summarize({**result, "parts": parts}, overlapped, alone, carrying)

        def kept(result: dict[str, Any]) -> None:
            keep(complete(result))

        return complete(settings.time_ways(setting, names, kept, more=more))


def summarize(
    result: dict[str, Any],
    overlapped: dict[str, list[str]],
    serialized: dict[str, str],
    carrying: Sequence[str] = (),
) -> dict[str, Any]:
    """Adds limits and ``"bars"``, by title: ``"way"``, ``"step"`` in seconds, the PARTS it is the sum of, and more.

    ``of_serialized`` is the step over that of the same framework without overlap, ``separated`` whether this run can
    tell that it is less. What the parts leave of the step that computes alone counts as backward: hooks, copies.
    """
    limits.add_to(result)
    bars: dict[str, dict[str, Any]] = {}
    for who, names in overlapped.items():
        framework = "torch" if who == "torch" else "jax"
        alone, parts = result["alone_s"][framework], result["parts"][framework]
        forward, after = parts["forward_s"], parts["optimizer_s"]
        best = compare.best(result["ways"], names)[0]
        whole = result["ways"][serialized[who]]["median_s"]
        kinds = {"not overlapped": serialized[who], "overlapped": best}
        if who == "fdp" and carrying:
            kinds["carried over"] = compare.best(result["ways"], carrying)[0]
        for kind, name in kinds.items():
            step = result["ways"][name]["median_s"]
            bars[f"{drawing.BARS[who]['label']}, {kind}"] = {
                "way": name,
                "forward": forward,
                "backward": alone - forward - after,
                "exposed": step - alone,
                "optimizer": after,
                "step": step,
                "of_serialized": step / whole,
                "separated": compare.faster(result["ways"][name], result["ways"][serialized[who]]),
            }
    result["bars"] = bars
    return result


def draw(result: dict[str, Any]) -> Any:
    """Stacked bars, each framework's step without overlap being 1, seconds written in."""
    figure, axes = drawing.new(8, 5)
    looks = {
        "forward": {"color": "#e8e8e8", "hatch": ""},
        "backward": {"color": "#9fb8d0", "hatch": "//"},
        "exposed": {"color": "#f2b27a", "hatch": ".."},
        "optimizer": {"color": "#404040", "hatch": ""},
    }
    said = {"exposed": "exposed communication"}
    for x, bar in enumerate(result["bars"].values()):
        whole, bottom = bar["step"] / bar["of_serialized"], 0.0
        for part in PARTS:
            height = max(bar[part], 0.0) / whole
            axes.bar(
                x,
                height,
                0.6,
                bottom=bottom,
                edgecolor="black",
                label=said.get(part, part),
                **looks[part],
            )
            if height > 0.05:
                axes.text(
                    x,
                    bottom + height / 2,
                    f"{bar[part]:.3g} s",
                    ha="center",
                    va="center",
                    fontsize=8,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )
            bottom += height
        axes.text(x, bottom, f"{bar['of_serialized']:.3f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(
        range(len(result["bars"])),
        [
            f"{name.replace(', ', chr(10))}\n{_in_lines(bar['way'])}"
            for name, bar in result["bars"].items()
        ],
        fontsize=8,
    )
    axes.set_ylim(0, 1.15)
    axes.set_ylabel("share of the framework's step without overlap")
    axes.set_title("Where a step's time goes\n" + drawing.about(result), fontsize=10)
    drawing.legend(figure, axes, columns=4)
    return figure


def _in_lines(way: str) -> str:
    """The name of a way, short enough to stand under its bar."""
    return way.replace(":", ": ").replace("100000", "all").replace(",carry", ",\ncarry")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    models = ("mlp", "resnet50")
    return settings.main_of_each(NAME, __doc__ or "", models, measure, draw, argv, can_emulate=True)


if __name__ == "__main__":
    sys.exit(main())
