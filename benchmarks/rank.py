"""One rank of a run that times ways to train, PyTorch's and JAX's, in turns.

    python -m benchmarks.cluster -n 2 --rate 400mbit --nice -20 -- \
        -m benchmarks.rank --model mlp --batch 1024 --rounds 8 --out result.json \
        --ways torch:cap=25 torch:cap=5,view=on jax:pmean jax:pmean,combiner=off fdp:cap=4 fdp:cap=4,window=2

`benchmarks.pairs` lists the models, `benchmarks.ways` the ways; without wires: cluster's --loopback, or
`python -m fdp.launch -n 2 -m benchmarks.rank ...`. Every rank is one process in which both frameworks live: torch's
Gloo group has a port of its own beside `jax.distributed`, and torch as many threads as the rank has cores. The ways
take turns, round by round and every other round in reverse, so that what else the machine does meets them all alike.
In a turn all ranks start together; a step has ended when this rank has its results. First every way takes one step
from the same weights on the same data: where losses or updates differ, the run says so, times nothing and fails.

Each framework's computing alone is timed too (torch:none; fdp:none, or jax:none without fdp) unless --no-alone.
--ready also says when each gradient is there (`benchmarks.ready`), --every what it is worth to reduce only once in so
many iterations (a step is then that many; `no_sync` in torch, `no_sync_step` in fdp), and --emulate-compute lets layers
sleep (`benchmarks.emulate`). Rank 0 prints a table and writes --out after every round,
`"complete": false` until the last:

    {"model", "batch", "ranks", "gradient_bytes", "wire_s", "rounds", "steps", "warm_up", "learning_rate",
     "machine": see benchmarks.machine, "check": see benchmarks.timing.check,
     "alone_s": {"torch": seconds, "jax": seconds},       # medians of computing alone
     "ways": {name: {"framework", "communicates", "iterations": of a step, and what timing.summary returns}},
     "emulated": times or null, and with --ready what benchmarks.ready.measure returns}

`wire_s` is how long the gradients take at the wire's rate: every rank sends 2 (ranks - 1) / ranks of their bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

from benchmarks import emulate, machine, ready, timing, ways
from benchmarks.cluster.shape import WIRE_BYTES_PER_PAYLOAD
from benchmarks.pairs import PAIRS, Pair, make_pair
from benchmarks.timing import Timed
from benchmarks.ways import Setting, Spec, Way
from fdp.launch import free_port, initialize


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.rank",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "--model",
        default="mlp",
        help=f"one of {', '.join(PAIRS)}, with options: mlp:widths=1024x13",
    )
    add("--batch", type=int, default=1024, help="examples a rank (1024)")
    add(
        "--ways",
        nargs="+",
        required=True,
        metavar="WAY",
        help="torch:cap=25 fdp:cap=4 jax:pmean ...",
    )
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=3, help="timed in a round (3)")
    add(
        "--warm-up",
        type=int,
        default=2,
        help="not timed before them; DDP settles in its first 2 (2)",
    )
    add("--learning-rate", type=float, help="of plain SGD (the model's own)")
    add("--no-alone", action="store_true", help="do not add the ways that compute alone")
    add(
        "--ready", type=int, default=0, metavar="STEPS", help="watch gradients in so many steps (0)"
    )
    add(
        "--every",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="also N iterations of which the last reduces, for ways that can: 2 4 8",
    )
    add("--emulate-compute", type=Path, metavar="FILE", help="from python -m benchmarks.emulate")
    add("--out", type=Path, help="rank 0 writes the result here")
    return made


def asked_ways(texts: Sequence[str], alone: bool) -> list[Spec]:
    """The ways, each framework's computing alone added if `alone`.

    Raises:
      ValueError: an unknown way or option, or one given twice.
      MissingTorch: a torch way without torch.
    """
    found = [ways.parse(text) for text in texts]
    repeated = {text for text in texts if texts.count(text) > 1}
    if repeated:
        raise ValueError(f"expected every way once, got {min(repeated)!r} again")
    if alone:
        names = {spec.name for spec in found}
        silent = {spec.name for spec in found if spec.word == "none"}
        # fdp's own stands for JAX where fdp takes part.
        wanted = names - {"jax"} if "fdp" in names else names
        found += [ways.parse(f"{name}:none") for name in sorted(wanted - silent)]
    for spec in found:
        ways.check_torch(spec)
    return found


def connect_torch() -> None:
    """Joins torch's ranks: at the address that torchrun's variables give, or beside JAX's coordinator."""
    from benchmarks.ways import in_torch

    host = os.environ.get("FDP_COORDINATOR_ADDRESS", "127.0.0.1:0").rpartition(":")[0]
    address = os.environ.get("MASTER_ADDR", host)
    if address == "127.0.0.1":  # else Gloo asks where the machine's own name leads to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port = os.environ.get("MASTER_PORT")
    if port is None:
        port = timing.gather("torch's port", free_port() if jax.process_index() == 0 else 0)[0]
    in_torch.connect(address, int(port), jax.process_index(), jax.process_count())


def make_setting(pair: Pair, learning_rate: float | None) -> Setting:
    """For one device a rank.

    Raises:
      ValueError: there are more.
    """
    if jax.local_device_count() != 1:
        raise ValueError(
            f"expected one device a rank, got {jax.local_device_count()}: torch's ranks have one replica each; unset "
            "JAX_NUM_CPU_DEVICES, or start more ranks"
        )
    mesh = jax.make_mesh((jax.device_count(),), (ways.AXIS,), axis_types=(AxisType.Auto,))
    return Setting(pair, mesh, pair.learning_rate if learning_rate is None else learning_rate)


def wire_seconds(gradient_bytes: int, ranks: int, rate: float | None) -> float | None:
    """Time at line rate, in bit/s with headers; None where there is no limit."""
    sent = 2 * (ranks - 1) / ranks * gradient_bytes * WIRE_BYTES_PER_PAYLOAD
    return 8 * sent / rate if rate else None


def alone_seconds(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Median of computing alone, by framework: of fdp's trainer rather than of the plain program, if both are there."""
    silent = sorted(name for name, way in found.items() if not way["communicates"])
    return {found[name]["framework"]: found[name]["median_s"] for name in reversed(silent)}


def table(result: dict[str, Any]) -> str:
    """For people: one line a way, the fastest first."""
    width = max(map(len, result["ways"]))
    lines = [f"{'':{width}}  median s  quartiles        sent MB"]
    for name, way in sorted(result["ways"].items(), key=lambda item: item[1]["median_s"]):
        sent = way["sent_bytes_per_step"]
        lines.append(
            f"{name:{width}}  {way['median_s']:8.4f}  {way['q1_s']:.4f}-{way['q3_s']:.4f}"
            f"  {'-' if sent is None else f'{sent / 1e6:.1f}':>8}"
        )
    return "\n".join(lines)


def run(
    args: argparse.Namespace,
    setting: Setting,
    built: dict[str, Way],
    beside: Mapping[str, tuple[Way, int]] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Checks and times; every rank returns the same result.

    Args:
      args: of the command line.
      setting: what the ways were built for.
      built: checked and timed, by name.
      beside: only timed: see `timing.windows`.
      more: goes into the result.

    Raises:
      DifferentPrograms: the ways do not compute the same; nothing was timed.
      FloatingPointError: a loss is not finite.
    """
    pair = setting.pair
    share = pair.batch(args.batch, 1 + jax.process_index())
    iterations = dict.fromkeys(built, 1) | {
        name: count for name, (_, count) in (beside or {}).items()
    }
    checked, built = built, built | {name: way for name, (way, _) in (beside or {}).items()}
    batch = {name: way.place(share) for name, way in built.items()}
    weights = pair.init()
    gradient_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights[0]))
    described = machine.describe()
    rate = (described["wire"] or {}).get("rate")
    result: dict[str, Any] = {
        "complete": False,
        "model": pair.name,
        "batch": args.batch,
        "ranks": jax.process_count(),
        "gradient_bytes": gradient_bytes,
        "wire_s": wire_seconds(gradient_bytes, jax.process_count(), rate),
        **{key: getattr(args, key) for key in ("rounds", "steps", "warm_up")},
        "learning_rate": setting.learning_rate,
        "machine": described,
        "check": timing.check(checked, setting, batch),
        **(more or {}),
    }
    turns: dict[str, list[list[Timed]]] = {name: [] for name in built}
    for number in range(args.rounds):
        names = list(built) if number % 2 == 0 else list(reversed(built))
        for name in names:
            timed = timing.time_way(built[name], weights, batch[name], args.warm_up, args.steps)
            ranks = [Timed(*values) for values in timing.gather("a turn's times", timed)]
            if not all(math.isfinite(one.loss) for one in ranks):
                raise FloatingPointError(
                    f"expected a finite loss, got {[one.loss for one in ranks]} from {name!r} in round {number}: "
                    "numbers that overflow take another time; lower --learning-rate"
                )
            turns[name].append(ranks)
        found = {
            name: {
                "framework": way.framework,
                "communicates": way.communicates,
                "iterations": iterations[name],
                **timing.summary(turns[name]),
            }
            for name, way in built.items()
        }
        result |= {"alone_s": alone_seconds(found), "ways": found}
        result["complete"] = number + 1 == args.rounds
        if args.out is not None and jax.process_index() == 0:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a wrong argument, 3 where times would mean nothing."""
    made = parser()
    args = made.parse_args(argv)
    try:
        for name, least in (
            ("batch", 1),
            ("rounds", 1),
            ("steps", 1),
            ("warm_up", 0),
            ("ready", 0),
        ):
            if getattr(args, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"expected {flag} of at least {least}, got {getattr(args, name)}")
        if any(count < 1 for count in args.every):
            raise ValueError(f"expected --every of at least 1, got {min(args.every)}")
        pair, specs = make_pair(args.model), asked_ways(args.ways, not args.no_alone)
        emulated = (
            None if args.emulate_compute is None else emulate.read_times(args.emulate_compute)
        )
        initialize()
        if emulated is not None:
            pair = emulate.asleep(pair, emulated)
        setting = make_setting(pair, args.learning_rate)
        built = {spec.text: ways.build(spec, setting) for spec in specs}
    except (ValueError, ways.MissingTorch) as error:
        print(f"{made.prog}: {error}", file=sys.stderr)
        return 2
    with_torch = any(way.framework == "torch" for way in built.values())
    if with_torch:
        connect_torch()
    if with_torch and emulated is not None:
        emulate.one_thread()
    try:
        more: dict[str, Any] = {"emulated": emulated}
        if args.ready:
            share = pair.batch(args.batch, 1 + jax.process_index())
            frameworks = {way.framework for way in built.values()}
            more |= ready.measure(setting, share, frameworks, args.warm_up, args.ready)
        result = run(args, setting, built, timing.windows(built, args.every), more)
    except (timing.DifferentPrograms, FloatingPointError) as error:
        print(f"{made.prog}: {error}", file=sys.stderr)
        return 3
    if jax.process_index() == 0:
        print(table(result))
    if with_torch:
        from benchmarks.ways import in_torch

        in_torch.disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
