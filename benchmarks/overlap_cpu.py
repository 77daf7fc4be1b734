"""One rank that trains an MLP with several ways to reduce in turn, and times their steps.

    python -m benchmarks.cluster -n 2 --rate 400mbit --nice -20 -- \
        -m benchmarks.overlap_cpu --layers 1024x13 --batch 1024 --out benchmarks/results/overlap_cpu.json

Every rank prints one line of JSON: median step seconds per way, with all the single ones. The ways alternate within one
process, round by round, so that what else the machine does meets them all alike. Rank 0 writes --out.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fdp
from benchmarks.cluster.smoke import sent_bytes
from fdp.launch import initialize

AXIS = "data"
RATE = 1e-3


class Way(NamedTuple):
    """A way to train: ``init(params) -> state``, ``step(state, batch) -> (state, loss)``."""

    init: Callable[[Any], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]


def plain(
    reduce: Callable[[Any, str], Any],
    mesh: jax.sharding.Mesh,
    options: Mapping[str, str] | None = None,
) -> Way:
    """A step without fdp: gradients reduced after the backward by ``reduce``, the loss by nobody."""

    # Without the check, gradients are local, and a reduction that does nothing is let through too.
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=(P(), P(AXIS)), check_vma=False)
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = reduce(grads, AXIS)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss[None]

    jitted = jax.jit(step, donate_argnums=0, compiler_options=dict(options or {}) or None)
    return Way(lambda params: globally(params, mesh, P()), jitted)


def with_fdp(mesh: jax.sharding.Mesh, cap: int, schedule: fdp.schedules.Schedule) -> Way:
    """fdp's own step, loss reduction included."""
    trainer = fdp.data_parallel(
        loss_fn,
        optax.sgd(RATE),
        mesh=mesh,
        schedule=schedule,
        bucket_bytes=cap,
        first_bucket_bytes=cap,
    )
    return Way(trainer.init, trainer.train_step)


WAYS: dict[str, Callable[[jax.sharding.Mesh, int], Way]] = {
    # compute alone: the replicas drift apart
    "none": lambda mesh, cap: plain(lambda grads, axis: grads, mesh),
    "pmean": lambda mesh, cap: plain(jax.lax.pmean, mesh),
    "pmean, combiner off": lambda mesh, cap: plain(
        jax.lax.pmean, mesh, {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
    ),
    "serialized": lambda mesh, cap: with_fdp(mesh, cap, fdp.schedules.serialized()),
    "fused": lambda mesh, cap: with_fdp(mesh, cap, fdp.schedules.fused()),
    "unordered": lambda mesh, cap: with_fdp(mesh, cap, fdp.schedules.unordered()),
    "ordered": lambda mesh, cap: with_fdp(mesh, cap, fdp.schedules.ordered()),
    "ordered, window 2": lambda mesh, cap: with_fdp(mesh, cap, fdp.schedules.ordered(window=2)),
}


def parse_layers(text: str) -> list[int]:
    """[1024, 1024, 1024, 10] of "1024x3,10": the widths, input first."""
    widths = []
    for part in text.split(","):
        width, _, times = part.partition("x")
        if not width.isdecimal() or not (times or "1").isdecimal():
            raise ValueError(f"expected widths such as 1024x12,10, got {text!r}")
        widths += [int(width)] * int(times or 1)
    if len(widths) < 2:
        raise ValueError(f"expected at least two widths, got {text!r}")
    return widths


def init_params(widths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """The same on every rank."""
    rng = np.random.default_rng(0)
    return [
        {
            "w": (rng.standard_normal((a, b)) * (2 / a) ** 0.5).astype(np.float32),
            "b": np.zeros(b, np.float32),
        }
        for a, b in itertools.pairwise(widths)
    ]


def loss_fn(params: list[dict[str, jax.Array]], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def globally(tree: Any, mesh: jax.sharding.Mesh, spec: P) -> Any:
    """Arrays over all processes, from what each of them holds."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def time_steps(way: Way, state: Any, batch: Any, count: int) -> tuple[Any, list[float]]:
    """Seconds of each of `count` steps; one more before them meets the others and is not counted."""
    times = []
    for _ in range(count + 1):
        start = time.perf_counter()
        state, loss = way.step(state, batch)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - start)
    return state, times[1:]


def main(argv: Sequence[str]) -> None:
    """Times the ways that --ways names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap_cpu", description=__doc__)
    parser.add_argument("--layers", default="1024x13", help="widths, input first: 1024x12,10")
    parser.add_argument("--batch", type=int, default=1024, help="examples a rank")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="cap of a bucket in MiB")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--out", type=Path, help="rank 0 writes the result here")
    args = parser.parse_args(argv)
    widths = parse_layers(args.layers)

    initialize()
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(1 + jax.process_index())
    local = args.batch * jax.local_device_count()
    shapes = ((local, widths[0]), (local, widths[-1]))
    batch = globally(tuple(rng.standard_normal(s, np.float32) for s in shapes), mesh, P(AXIS))
    ways = {name: WAYS[name](mesh, int(args.bucket_mb * 2**20)) for name in args.ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, int] = dict.fromkeys(ways, 0)
    params = init_params(widths)
    for way in ways.values():  # compiled before any is timed
        time_steps(way, way.init(params), batch, 0)
    for _ in range(args.rounds):
        for name, way in ways.items():
            state = way.init(params)
            before = sent_bytes()
            _, seconds = time_steps(way, state, batch, args.steps)
            times[name] += seconds
            sent[name] += sent_bytes() - before
    result = {
        "rank": jax.process_index(),
        "ranks": jax.process_count(),
        "layers": widths,
        "batch": args.batch,
        "bucket_mb": args.bucket_mb,
        "gradient_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "machine": {"cores": os.cpu_count(), "cpu": platform.machine(), "jax": jax.__version__},
        "ways": {
            name: {
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "max_s": max(seconds),
                "sent_bytes_per_step": sent[name] // (args.rounds * (args.steps + 1)),
                "steps_s": [round(t, 4) for t in seconds],
            }
            for name, seconds in times.items()
        },
    }
    print(json.dumps(result))
    if args.out is not None and jax.process_index() == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
