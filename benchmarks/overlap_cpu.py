"""One rank that trains an MLP with several gradient reductions in turn, and times their steps.

    python -m benchmarks.cluster -n 2 --rate 400mbit -- \
        -m benchmarks.overlap_cpu --layers 1024x13 --batch 1024 --reduce none pmean

Every rank prints one line of JSON: median step seconds per reduction, with all the single ones. The
reductions alternate within one process, round by round, so that what else the machine does meets them all
alike. --reduce takes names from REDUCTIONS, or "package.module:attribute" of a Reduction or a function.
"""

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cluster.smoke import sent_bytes
from fdp.launch import initialize

AXIS = "data"


@dataclass(frozen=True)
class Reduction:
    """How gradients cross the axis, and the options the step is compiled with."""

    reduce: Callable[[Any, str], Any]
    compiler_options: Mapping[str, str] = field(default_factory=dict)


REDUCTIONS = {
    "none": Reduction(lambda grads, axis: grads),  # compute alone: the replicas drift apart
    "pmean": Reduction(jax.lax.pmean),
}


def find_reduction(name: str) -> Reduction:
    """Looks a reduction up by name, or imports it from "module:attribute"."""
    if name in REDUCTIONS:
        return REDUCTIONS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"expected one of {', '.join(REDUCTIONS)} or module:attribute, got {name!r}"
        )
    found = getattr(importlib.import_module(module), attribute)
    return found if isinstance(found, Reduction) else Reduction(found)


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


def make_step(reduction: Reduction, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """A jitted SGD step: params and batch to params and each replica's loss, which is not reduced."""

    # Without the check, gradients are local, and a reduction that does nothing is let through too.
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=(P(), P(AXIS)), check_vma=False)
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = reduction.reduce(grads, AXIS)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss[None]

    return jax.jit(step, donate_argnums=0, compiler_options=dict(reduction.compiler_options))


def globally(tree: Any, mesh: jax.sharding.Mesh, spec: P) -> Any:
    """Arrays over all processes, from what each of them holds."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def time_steps(
    step: Callable[..., Any], params: Any, batch: Any, count: int
) -> tuple[Any, list[float]]:
    """Seconds of each of `count` steps; one more before them meets the others and is not counted."""
    times = []
    for _ in range(count + 1):
        start = time.perf_counter()
        params, loss = step(params, batch)
        jax.block_until_ready((params, loss))
        times.append(time.perf_counter() - start)
    return params, times[1:]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap_cpu", description=__doc__)
    parser.add_argument("--layers", default="1024x13", help="widths, input first: 1024x12,10")
    parser.add_argument("--batch", type=int, default=1024, help="examples a rank")
    parser.add_argument("--reduce", nargs="+", default=list(REDUCTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    args = parser.parse_args(argv)
    widths = parse_layers(args.layers)
    reductions = {name: find_reduction(name) for name in args.reduce}

    initialize()
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    rng = np.random.default_rng(1 + jax.process_index())
    local = args.batch * jax.local_device_count()
    shapes = ((local, widths[0]), (local, widths[-1]))
    batch = globally(tuple(rng.standard_normal(s, np.float32) for s in shapes), mesh, P(AXIS))
    steps = {name: make_step(reduction, mesh) for name, reduction in reductions.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, int] = dict.fromkeys(steps, 0)
    params = init_params(widths)
    for step in steps.values():  # compiled before any is timed
        time_steps(step, globally(params, mesh, P()), batch, 0)
    for _ in range(args.rounds):
        for name, step in steps.items():
            before = sent_bytes()
            _, seconds = time_steps(step, globally(params, mesh, P()), batch, args.steps)
            times[name] += seconds
            sent[name] += sent_bytes() - before
    result = {
        "rank": jax.process_index(),
        "ranks": jax.process_count(),
        "layers": widths,
        "batch": args.batch,
        "gradient_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "reductions": {
            name: {
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "sent_bytes_per_step": sent[name] // (args.rounds * (args.steps + 1)),
                "steps_s": [round(t, 6) for t in seconds],
            }
            for name, seconds in times.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
