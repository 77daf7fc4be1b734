"""One rank of Figure 11: losses of several windows in both frameworks, same initial weights, same data order.

    python -m fdp.launch -n 2 -m benchmarks.figures.on_ranks.converging --batch 8 --learning-rate 0.02 --out result.json

Each iteration takes its own batch: this rank's share is drawn with a seed that names iteration and rank. With n > 1 the
first n - 1 iterations of a window add their gradients up, and the n-th reduces the sum and updates; nothing divides by
n, in either framework. The loss of an iteration is the mean over ranks, before any update that follows from it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, rank, timing, ways
from benchmarks.pairs import make_pair
from benchmarks.ways import Setting, Way
from fdp.launch import initialize

WAYS = {"torch": "torch", "fdp": "fdp"}


def seed(iteration: int, number: int, ranks: int) -> int:
    """Of the batch that a rank takes in an iteration: its own for each of both."""
    return 1 + iteration * ranks + number


def train(way: Way, setting: Setting, batch: int, iterations: int, every: int) -> list[float]:
    """This rank's loss in each iteration; one of ``every`` iterations reduces."""
    state = way.init(*setting.pair.init())
    losses: list[float] = []
    for iteration in range(iterations):
        number = seed(iteration, jax.process_index(), jax.process_count())
        share = way.place(setting.pair.batch(batch, number))
        held_back = (iteration + 1) % every != 0
        step = way.no_sync_step if held_back and way.no_sync_step is not None else way.step
        state, loss = step(state, share)
        losses.append(way.wait(state, loss))
    return losses


def measure(
    setting: Setting,
    batch: int,
    iterations: int,
    windows: Sequence[int],
    keep: Callable[[Any], None],
) -> None:
    """Gives ``keep`` the result after every window, the same on all ranks.

    It is ``{"model", "batch", "ranks", "learning_rate", "iterations", "machine", "losses": {"torch": {n: [loss]},
    "fdp": {n: [loss]}}}``, n as text.
    """
    result: dict[str, Any] = {
        "model": setting.pair.name,
        "batch": batch,
        "ranks": jax.process_count(),
        "learning_rate": setting.learning_rate,
        "iterations": iterations,
        "machine": machine.describe(),
    }
    losses: dict[str, dict[str, list[float]]] = {who: {} for who in WAYS}
    built = {who: ways.build(ways.parse(text), setting) for who, text in WAYS.items()}
    for every in windows:
        for who, way in built.items():
            mine = train(way, setting, batch, iterations, every)
            ranks = timing.gather("losses", mine)
            losses[who][str(every)] = [statistics.fmean(of) for of in zip(*ranks, strict=True)]
        keep(result | {"losses": losses})


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 3 where a loss is not finite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, required=True, help="examples a rank")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    initialize()
    setting = rank.make_setting(make_pair("digits"), args.learning_rate)
    rank.connect_torch()
    finite = True

    def keep(result: Any) -> None:
        nonlocal finite
        curves = [loss for of in result["losses"].values() for loss in of.values()]
        finite = all(math.isfinite(loss) for curve in curves for loss in curve)
        if jax.process_index() == 0:
            args.out.write_text(json.dumps(result))

    measure(setting, args.batch, args.iterations, args.every, keep)
    if not finite:
        print("expected finite losses; lower --learning-rate", file=sys.stderr)
    return 0 if finite else 3


if __name__ == "__main__":
    sys.exit(main())
