"""Figure 11: what skipping synchronization does to learning, and whether fdp and PyTorch learn the same.

    python -m benchmarks.figures.fig11_convergence --quick
    python -m benchmarks.figures.fig11_convergence

A small convolutional network on handwritten digits, two ranks, plain SGD, at 8 and at 256 examples a rank, with one of
n = 1, 2, 4, 8 iterations synchronized (`benchmarks.figures.on_ranks.converging`): both frameworks from the same initial
weights, on the same data in the same order. Their losses with n = 1 must agree to 1e-3 over 200 iterations, or the
command fails after it has written what it found. Curves are smoothed as the paper's, by an order 3 low-pass filter run
forwards and backwards.

As in torch's no_sync, gradients of a window are added and not divided by n. Learning rates are lower than the paper's
0.02 and 0.06, which for this network and n = 8 are too high: at 0.06 and 256 examples it diverges.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import drawing, runs

NAME = "fig11_convergence"
RANKS = 2
EVERY = (1, 2, 4, 8)
PANELS = ((8, 0.01, 800), (256, 0.02, 400))  # examples a rank, learning rate, iterations
QUICK_PANELS = ((8, 0.02, 64), (32, 0.02, 64))
TOLERANCE, COMPARED = 1e-3, 200  # of losses, over so many iterations
CUTOFF = 0.05  # of the filter, as a share of half the sampling rate
PROGRAM = "benchmarks.figures.on_ranks.converging"
DASHES = {"1": "-", "2": "--", "4": "-.", "8": ":"}


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains.

    Returns:
      ``{"panels": [what `PROGRAM` describes, with "largest_difference": {n: between torch and fdp}]}``, the machine,
      and ``"agree"``.
    """
    panels: list[dict[str, Any]] = []
    for batch, learning_rate, iterations in QUICK_PANELS if args.quick else PANELS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "losses.json"
            words = ["--batch", str(batch), "--learning-rate", str(learning_rate)]
            words += ["--iterations", str(iterations), "--every", *map(str, EVERY)]
            try:
                # On wires of no set rate: time is not what is looked at.
                runs.on_cluster(
                    ["-m", PROGRAM, *words, "--out", str(out)],
                    ranks=RANKS,
                    rate=args.rate,
                    timeout_s=1800,
                )
            finally:
                if out.exists():
                    panels.append(compared(json.loads(out.read_text("utf-8"))))
                    keep(whole(panels))
    return whole(panels)


def whole(panels: list[dict[str, Any]]) -> dict[str, Any]:
    worst = max(panel["largest_difference"]["1"] for panel in panels)
    return {
        "machine": panels[0]["machine"],
        "panels": [{k: v for k, v in panel.items() if k != "machine"} for panel in panels],
        "largest_difference": worst,
        "compared_iterations": COMPARED,
        "tolerance": TOLERANCE,
        "agree": worst <= TOLERANCE,
    }


def compared(panel: dict[str, Any]) -> dict[str, Any]:
    """Adds ``"largest_difference"`` between the frameworks' losses, for each n, over the first iterations."""
    torch, fdp = (panel["losses"][who] for who in ("torch", "fdp"))
    found = {
        n: max(abs(a - b) for a, b in zip(torch[n][:COMPARED], fdp[n][:COMPARED], strict=True))
        for n in torch
        if n in fdp
    }
    return panel | {"largest_difference": found}


def smooth(losses: Sequence[float]) -> list[float]:
    """An order 3 Butterworth low-pass filter, forwards and backwards: nothing is shifted."""
    from scipy import signal  # scikit-learn, which has the digits, needs it too

    b, a = signal.butter(3, CUTOFF)
    # Both ends go on mirrored for as long as the filter remembers, or they would bend.
    beyond = min(len(losses) - 1, round(4 / CUTOFF))
    return [float(x) for x in signal.filtfilt(b, a, losses, padlen=beyond)]


def draw(result: dict[str, Any]) -> Any:
    """A panel a batch size: fdp's curves, and torch's as dots on them."""
    figure, every = drawing.new(11, 4.8, columns=len(result["panels"]))
    for axes, panel in zip(every, result["panels"], strict=True):
        for number, n in enumerate(panel["losses"]["fdp"]):
            label = "every iteration" if n == "1" else f"no_sync, n = {n}"
            fdp, torch = (smooth(panel["losses"][who][n]) for who in ("fdp", "torch"))
            axes.plot(fdp, color="#1f4e79", linestyle=DASHES[n], label=f"fdp, {label}")
            apart = max(1, len(torch) // 14)
            at = range(number * apart // 4, len(torch), apart)
            axes.plot(
                at,
                [torch[i] for i in at],
                color="#c55a11",
                linestyle="none",
                marker="so^d"[number % 4],
                markersize=5,
                fillstyle="none",
                label=f"PyTorch DDP, {label}",
            )
        axes.set_xlabel("iteration")
        axes.set_ylabel("loss (mean over ranks, smoothed)")
        axes.set_title(
            f"{panel['batch']} examples a rank, learning rate {panel['learning_rate']:g}\n"
            f"torch - fdp without no_sync: at most {panel['largest_difference']['1']:.1e}"
            f"{' (quick)' if result.get('quick') else ''}",
            fontsize=10,
        )
    drawing.legend(figure, list(every), columns=4)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 too where the frameworks do not learn the same."""
    args = runs.parser(NAME, __doc__ or "", model=False).parse_args(argv)
    found: list[dict[str, Any]] = []

    def measured(*given: Any) -> dict[str, Any]:
        found.append(measure(*given))
        return found[0]

    code = runs.figure_main(NAME, args, measured, draw)
    if code == 0 and found and not found[0]["agree"]:
        print(
            f"python -m benchmarks.figures.{NAME}: expected losses of torch and fdp to agree to {TOLERANCE:g} over "
            f"{COMPARED} iterations, got a difference of {found[0]['largest_difference']:.2g}",
            file=sys.stderr,
        )
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
