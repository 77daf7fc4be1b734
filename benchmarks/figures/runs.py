"""What the figures share: runs on a cluster of this machine, options, results as files.

def measure(args, keep) -> dict: ...        # keep(result) saves what there is so far
def draw(result) -> Figure: ...

def main(argv=None) -> int:
    args = parser("fig07_bucket_cap", __doc__).parse_args(argv)
    return figure_main("fig07_bucket_cap", args, measure, draw)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, ClusterUnavailable, UnreachableRate, unavailable_reason
from benchmarks.cluster.shape import WIRE_BYTES_PER_PAYLOAD, parse_rate
from benchmarks.figures.files import RESULTS, command_line, save, save_picture
from fdp.launch import python_command

__all__ = [
    "RATE",
    "RESULTS",
    "FigureError",
    "check_arguments",
    "command_line",
    "figure_main",
    "on_cluster",
    "parser",
    "save",
    "save_picture",
    "timed",
    "wire_seconds",
]

RATE = "400mbit"
BUSY = 20.0  # seconds to wait before a wire that was too slow is tried again


class FigureError(Exception):
    """One line for a person; the figure ends with `code`: 2 for wrong use, 1 for a run that failed."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def on_cluster(
    program: Sequence[str],
    *,
    ranks: int,
    rate: str | None,
    nice: int | None = -20,
    timeout_s: float,
    tries: int = 4,
) -> None:
    """Runs ``-m module args...`` or ``script.py args...`` on every rank, a core each where there are enough.

    Without root or iproute2 all ranks share the loopback interface, unshaped, and a line says so: the program finds no
    rate in `benchmarks.machine.wire` then.

    Args:
      program: what follows ``python``.
      ranks: how many.
      rate: of every wire, ``"400mbit"``; None for as fast as the kernel is.
      nice: priority of the ranks; negative needs root. None leaves it.
      timeout_s: seconds until all ranks are stopped.
      tries: how often the wire is set up, if other work on this machine keeps it from reaching its rate.

    Raises:
      FigureError: wrong arguments, a rank that failed or took too long, a rate that is not reached. Everything that
        was started is stopped.
    """
    reason = unavailable_reason()
    if reason:
        print(
            f"no wires on this machine: {reason}; all ranks on loopback, unshaped", file=sys.stderr
        )
    as_module = program[0] == "-m"
    command = python_command(*program[1 if as_module else 0 :], module=as_module)
    chosen = 0 if nice is None or (nice < 0 and os.geteuid() != 0) else nice
    wires = {"loopback": True} if reason else {"rate": rate}
    for left in reversed(range(max(tries, 1))):
        try:
            with Cluster(ranks, nice=chosen, **wires) as cluster:  # type: ignore[arg-type]
                if cluster.report is not None:
                    print(f"{ranks} ranks, {cluster.report}", file=sys.stderr)
                outcome = cluster.run([command] * ranks, timeout=timeout_s)
        except UnreachableRate as error:
            if not left:
                raise FigureError(str(error)) from None
            print(f"{error}; again in {BUSY:.0f} s", file=sys.stderr)
            time.sleep(BUSY)
            continue
        except (ValueError, ClusterUnavailable) as error:
            raise FigureError(str(error), 2) from None
        if outcome.code:
            raise FigureError(
                f"expected {shlex.join(program[:2])} to succeed on {ranks} ranks, got exit code {outcome.code}: "
                f"{outcome.reason or 'see its output above'}",
                2 if outcome.code == 2 else 1,
            )
        return


def timed(
    model: str,
    ways: Sequence[str],
    *,
    ranks: int,
    rate: str | None,
    batch: int,
    rounds: int,
    steps: int,
    out: Path,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Times ways with `benchmarks.rank` on the cluster.

    Args:
      model: as `benchmarks.pairs` names it.
      ways: as `benchmarks.ways` names them.
      ranks: how many, one device each.
      rate: of every wire.
      batch: examples a rank.
      rounds: turns of every way.
      steps: timed in a turn.
      out: where rank 0 writes; rounds that were complete are kept there if a rank fails, marked incomplete.
      more: further options of `benchmarks.rank`.

    Returns:
      What `benchmarks.rank` describes.

    Raises:
      FigureError: see `on_cluster`.
    """
    if any(way.startswith("torch") for way in ways) and importlib.util.find_spec("torch") is None:
        raise FigureError(
            "expected PyTorch to compare with, which is not installed: install the extra bench "
            "(pip install 'fdp[bench]', in a clone make bench-deps)",
            2,
        )
    out = out.resolve()
    out.unlink(missing_ok=True)
    sizes = [
        "--model",
        model,
        "--batch",
        str(batch),
        "--rounds",
        str(rounds),
        "--steps",
        str(steps),
    ]
    program = ["-m", "benchmarks.rank", *sizes, *more, "--out", str(out), "--ways", *ways]
    turns = rounds * (steps + 4) * (len(ways) + 2)
    on_cluster(program, ranks=ranks, rate=rate, timeout_s=600 + 60 * turns)
    return json.loads(out.read_text("utf-8"))


def parser(name: str, doc: str, *, model: bool = True) -> argparse.ArgumentParser:
    """Options that figures have in common; None where a figure has its own value for full and quick runs.

    Args:
      name: of the module, without package.
      doc: its docstring.
      model: False for a figure that has no choice of models.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.figures.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    made.set_defaults(module=name)
    add = made.add_argument
    add("--quick", action="store_true", help="small sizes, under two minutes")
    add(
        "--out-dir",
        type=Path,
        default=RESULTS,
        help=f"for {name}.json and .png (benchmarks/results); a quick or partial result does not replace a full one",
    )
    add("--draw-only", action="store_true", help="draw the picture again from the JSON there")
    add(
        "--rate", help=f"of every wire ({RATE}); a figure of a model then has it in its file's name"
    )
    add("--rounds", type=int, help="turns of every way")
    if model:
        add("--model", help="as benchmarks.pairs names it, with options: mlp:widths=1024x13")
    return made


def wire_seconds(nbytes: int, rate_bits: float, ranks: int) -> float:
    """Time of a ring all-reduce at line rate: every rank sends 2 (ranks - 1) / ranks of the bytes, plus headers."""
    return 8 * 2 * (ranks - 1) / ranks * nbytes * WIRE_BYTES_PER_PAYLOAD / rate_bits


def check_arguments(args: argparse.Namespace) -> None:
    """What can be known to be wrong before anything starts.

    Raises:
      FigureError: with code 2.
    """
    if args.rounds is not None and args.rounds < 1:
        raise FigureError(f"expected --rounds of at least 1, got {args.rounds}", 2)
    if args.rate is not None:
        try:
            parse_rate(args.rate)
        except ValueError as error:
            raise FigureError(f"{error}, from --rate", 2) from None


def figure_main(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Callable[[dict[str, Any]], None]], dict[str, Any]],
    draw: Callable[[dict[str, Any]], Any],
) -> int:
    """Measures, saves and draws, or only draws; returns the exit code.

    ``measure`` is given the arguments and ``keep(result)``, which saves what there is so far, marked incomplete.
    """
    kept: list[Path] = []
    finished = False

    def keep(result: dict[str, Any]) -> None:
        partial = {**result, "complete": False, "quick": args.quick}
        kept[:] = [save(name, partial, None, args.out_dir)]

    try:
        check_arguments(args)
        _need_matplotlib()
        if args.draw_only:
            path = args.out_dir / f"{name}.json"
            if not path.exists():
                raise FigureError(f"expected {path} to draw, there is none: measure first", 2)
            save_picture(draw(json.loads(path.read_text("utf-8"))), path.with_suffix(".png"))
            print(path.with_suffix(".png"))
            return 0
        result = measure(args, keep)
        result["quick"] = args.quick
        path = save(name, result, draw(result), args.out_dir)
        finished = True
        print(f"{path}\n{path.with_suffix('.png')}")
        return 0
    except FigureError as error:
        module = getattr(args, "module", name)
        print(f"python -m benchmarks.figures.{module}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    finally:
        if kept and not finished:
            print(f"what was measured until then: {kept[0]}, marked incomplete", file=sys.stderr)


def _need_matplotlib() -> None:
    try:
        import matplotlib
    except ImportError:
        raise FigureError(
            "expected matplotlib for the picture, which is not installed: install the extra bench "
            "(pip install 'fdp[bench]', in a clone make bench-deps)",
            2,
        ) from None
    matplotlib.use("Agg")
