"""Models, batches and rates that the figures use; quick ones are for trying whether everything runs.

Wire time of two ranks is 8 x 1.046 x bytes / rate: 1.05 s for the 50 MB of the MLP at 400 Mbit/s, as long as its
backward pass on one core; mlp-deep computes and sends as much, in 96 gradients instead of 24. ResNet-50 (102 MB) is the
one model that the frameworks compute at different speeds on a CPU: XLA's convolutions take several times as long as
oneDNN's. 16 images of 64 pixels make its 2.1 s on the wire at 400 Mbit/s about JAX's backward pass, and longer than
torch's; `--batch` and `--rate` choose others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures.runs import RATE, FigureError, figure_main, on_cluster, parser, timed


class Setting(NamedTuple):
    """One model on one kind of wire.

    Attributes:
      model: as `benchmarks.pairs` names it.
      batch: examples a rank.
      rate: of every wire.
      rounds: turns of every way.
      steps: timed in a turn.
      warm_up: steps before them.
    """

    model: str
    batch: int
    rate: str
    rounds: int
    steps: int
    warm_up: int = 2


FULL = {
    "mlp": Setting("mlp", 1024, RATE, 6, 3),
    "mlp-unequal": Setting("mlp-unequal", 1280, RATE, 6, 3),
    "mlp-deep": Setting("mlp:widths=512x49", 1024, RATE, 5, 2),
    "resnet50": Setting("resnet50:pixels=64", 16, RATE, 3, 2),
    "bert-base": Setting("bert-base", 4, "1gbit", 2, 1, 1),
}
QUICK = {
    "mlp": Setting("mlp:widths=256x7", 256, RATE, 2, 2),
    "mlp-unequal": Setting("mlp-unequal:widths=64-512-256-384-128-512-10", 256, RATE, 2, 2),
    "mlp-deep": Setting("mlp:widths=128x13", 256, RATE, 2, 2),
    "resnet50": Setting("resnet50:pixels=64,classes=10", 4, "1gbit", 2, 1),
    "bert-base": Setting("bert-base:length=32,layers=2,width=64,heads=4,words=100", 8, RATE, 2, 2),
}


def names(args: argparse.Namespace, default: tuple[str, ...]) -> tuple[str, ...]:
    """The models asked for; quickly only the first, as XLA compiles ResNet-50 for a while."""
    if args.model is not None:
        return (args.model,)
    return default[:1] if args.quick else default


def main_of_each(
    name: str,
    doc: str,
    models: tuple[str, ...],
    measure: Callable[[argparse.Namespace, Callable[[dict[str, Any]], None]], dict[str, Any]],
    draw: Callable[[dict[str, Any]], Any],
    argv: Sequence[str] | None,
    *,
    can_emulate: bool = False,
) -> int:
    """The command of a figure that has a file a model (`file_of`); returns the first exit code that is not 0.

    Args:
      name: of the figure.
      doc: of its module, for --help.
      models: without --model.
      measure, draw: see `benchmarks.figures.runs.figure_main`.
      argv: the command line.
      can_emulate: whether the figure has --emulate-compute.
    """
    made = parser(name, doc)
    made.add_argument("--batch", type=int, help="examples a rank")
    made.set_defaults(emulate_compute=False)
    if can_emulate:
        made.add_argument(
            "--emulate-compute",
            action="store_true",
            help="sleep for the measured time instead of computing (an MLP; see benchmarks.emulate)",
        )
    args = made.parse_args(argv)
    for model in names(args, ("mlp",) if args.emulate_compute else models):
        args.model = model
        file = file_of(name, model, args.rate, args.emulate_compute)
        if code := figure_main(file, args, measure, draw):
            return code
    return 0


def file_of(name: str, model: str, rate: str | None, emulated: bool = False) -> str:
    """What the file of a figure is called; a rate that was asked for has a file of its own, ``name_mlp_700mbit``, and
    so has emulated compute, ``name_mlp_700mbit_emulated``."""
    parts = [name, label(model), rate or "", "emulated" if emulated else ""]
    return "_".join(part for part in parts if part)


def label(model: str) -> str:
    """What files are called after: the model without options."""
    return model.partition(":")[0]


def chosen(model: str, args: argparse.Namespace) -> Setting:
    """The setting of a model, with what the command line says otherwise: its options, rate, rounds, batch.

    Raises:
      FigureError: a model that has none.
    """
    known = QUICK if args.quick else FULL
    name = label(model)
    if name not in known:
        raise FigureError(
            f"expected --model of {', '.join(known)}, options after a colon, got {model!r}", 2
        )
    found = known[name]
    if ":" in model:
        found = found._replace(model=model)
    if args.rate is not None:
        found = found._replace(rate=args.rate)
    if args.rounds is not None:
        found = found._replace(rounds=args.rounds)
    if getattr(args, "batch", None) is not None:
        found = found._replace(batch=args.batch)
    return found


def emulated_times(setting: Setting, quick: bool, out: Path) -> dict[str, Any]:
    """Measures how long the passes of both frameworks take on one core, see `benchmarks.emulate`; also into a file.

    Raises:
      FigureError: see `benchmarks.figures.runs.on_cluster`.
    """
    sizes = ["--model", setting.model, "--batch", str(setting.batch)]
    program = ["-m", "benchmarks.emulate", *sizes, "--rounds", "3" if quick else "9"]
    on_cluster([*program, "--out", str(out)], ranks=1, rate=None, timeout_s=1200)
    times: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return times


def time_ways(
    setting: Setting,
    ways: Sequence[str],
    keep: Callable[[dict[str, Any]], None],
    *,
    ranks: int = 2,
    more: Sequence[str] = ("--ready", "5"),
) -> dict[str, Any]:
    """Times ways and when gradients are ready, in one run of `benchmarks.rank`; keeps the rounds of one that fails.

    Raises:
      FigureError: see `benchmarks.figures.runs.on_cluster`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank.json"
        try:
            return timed(
                setting.model,
                ways,
                ranks=ranks,
                rate=setting.rate,
                batch=setting.batch,
                rounds=setting.rounds,
                steps=setting.steps,
                out=out,
                more=["--warm-up", str(setting.warm_up), *more],
            )
        except (FigureError, KeyboardInterrupt, SystemExit):  # the last two: stopped by a signal
            if out.exists():
                keep(json.loads(out.read_text("utf-8")))
            raise
