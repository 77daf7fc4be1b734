"""Figure 2: what a reduction costs by its size, and when gradients become ready. The two reasons for buckets.

    python -m benchmarks.figures.fig02_allreduce --quick
    python -m benchmarks.figures.fig02_allreduce

Left: a fixed volume of float32 parameters, reduced in pieces of several sizes that are launched together and waited for
together (`benchmarks.figures.on_ranks.allreduce`). The paper has 60 million parameters over NVLink; here there are as
many as take seconds at the wire's rate. Right: how much of ResNet-50's gradients is ready how long after the start of a
step that computes alone (`benchmarks.ready`), both ranks at once, one core each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import drawing, runs, settings

NAME = "fig02_allreduce"
RANKS = 2
PARAMS, QUICK_PARAMS = 20_000_000, 2_000_000
SIZES = (20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 20_000_000)
QUICK_SIZES = (20_000, 200_000, 2_000_000)
QUICK = settings.Setting("digits", 64, runs.RATE, 1, 1)  # XLA compiles ResNet-50 for a minute
PROGRAM = "benchmarks.figures.on_ranks.allreduce"


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Both halves.

    Returns:
      What `benchmarks.figures.on_ranks.allreduce` describes, with ``"wire_s"`` of the volume; under ``"gradients"`` the
      model, batch, ``"ready"`` and ``"ready_alone_s"`` of `benchmarks.ready`.
    """
    setting = QUICK if args.quick else settings.chosen("resnet50", args)
    if args.batch is not None:
        setting = setting._replace(batch=args.batch)
    rate = args.rate or runs.RATE
    params, sizes = (QUICK_PARAMS, QUICK_SIZES) if args.quick else (PARAMS, SIZES)
    rounds = args.rounds or (2 if args.quick else 7)
    options = ["--params", str(params), "--rounds", str(rounds), "--sizes", *map(str, sizes)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "volumes.json"
        try:
            runs.on_cluster(
                ["-m", PROGRAM, *options, "--out", str(out)],
                ranks=RANKS,
                rate=rate,
                timeout_s=300 + 60 * rounds * len(sizes),
            )
        except runs.FigureError:
            if out.exists():
                keep(with_wire(json.loads(out.read_text("utf-8"))))
            raise
        result = with_wire(json.loads(out.read_text("utf-8")))
    keep(result)
    alone = settings.time_ways(
        setting._replace(rounds=1, steps=1, rate=rate),
        ["torch:none", "fdp:none"],
        lambda _: None,
        ranks=RANKS,
        more=["--ready", "3" if args.quick else "15"],
    )
    kept = ("model", "batch", "gradient_bytes", "ready", "ready_alone_s")
    return result | {"gradients": {key: alone[key] for key in kept}}


def with_wire(result: dict[str, Any]) -> dict[str, Any]:
    """Adds ``"wire_s"``: the volume at line rate, None without a limit."""
    rate = (result["machine"]["wire"] or {}).get("rate")
    volume = 4 * result["params"]
    return result | {
        "wire_s": runs.wire_seconds(volume, rate, result["ranks"]) if rate else None,
    }


def draw(result: dict[str, Any]) -> Any:
    """Seconds against size of a piece; megabytes of gradients against seconds."""
    figure, (left, right) = drawing.new(11, 4.8, columns=2)
    draw_volume(left, result)
    if "gradients" in result:
        draw_ready(right, result["gradients"])
    return figure


def draw_volume(axes: Any, result: dict[str, Any]) -> None:
    sizes = [row["size"] for row in result["rows"]]
    for framework, label in (("torch", "PyTorch all_reduce"), ("jax", "JAX psum")):
        medians = [statistics.median(row[framework]) for row in result["rows"]]
        low = [m - min(row[framework]) for m, row in zip(medians, result["rows"], strict=True)]
        high = [max(row[framework]) - m for m, row in zip(medians, result["rows"], strict=True)]
        look = drawing.LINES["torch" if framework == "torch" else "fdp"]
        axes.errorbar(sizes, medians, yerr=[low, high], capsize=3, label=label, **look)
    if result["wire_s"] is not None:
        said = f"line rate: {result['wire_s']:.3g} s"
        axes.axhline(result["wire_s"], color="black", linestyle=":", label=said)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters a reduction (float32)")
    axes.set_ylabel("seconds for all (median, whiskers: least and most)")
    wire = (result["machine"]["wire"] or {}).get("rate")
    at = f"{wire / 1e6:g} Mbit/s" if wire else "unshaped"
    title = f"{result['params'] / 1e6:g} million parameters, Gloo, {result['ranks']} ranks, {at}"
    axes.set_title(title + remark(result), fontsize=10)
    axes.legend(fontsize=8)


def draw_ready(axes: Any, found: dict[str, Any]) -> None:
    for framework, label in (("torch", "PyTorch"), ("jax", "JAX")):
        times = [0.0, *(at for at, _ in found["ready"][framework])]
        sizes = itertools.accumulate((size / 1e6 for _, size in found["ready"][framework]))
        alone = found["ready_alone_s"][framework]
        look = drawing.LINES["torch" if framework == "torch" else "fdp"]
        said = f"{label}: step {alone['watched']:.3g} s, unwatched {alone['unwatched']:.3g} s"
        axes.step(times, [0.0, *sizes], where="post", label=said, **{**look, "markersize": 3})
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the step began")
    axes.set_ylabel("megabytes of gradients ready (median)")
    title = f"{drawing.short(found['model'])}, batch {found['batch']}, one core a rank"
    axes.set_title("Gradients ready\n" + title, fontsize=10)
    axes.legend(fontsize=8)


def remark(result: dict[str, Any]) -> str:
    """A title's last line, where something is to be said."""
    if result.get("quick"):
        return "\n(quick: sizes too small to compare)"
    return "" if result.get("complete", True) else "\n(incomplete)"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    made = runs.parser(NAME, __doc__ or "", model=False)
    made.add_argument("--batch", type=int, help="images a rank, for the gradients")
    return runs.figure_main(NAME, made.parse_args(argv), measure, draw)


if __name__ == "__main__":
    sys.exit(main())
