"""What fdp costs before a program runs: planning 10,000 leaves, tracing a reduction of 2,000.

    python benchmarks/tracing.py [--repeats 7] [--out benchmarks/results/tracing.json]

Both happen once per compilation, on one host core; no device is needed. Wall time is what a person waits, the time
this process had a core is what the code costs: they differ on a busy machine. ``lax.pmean`` of the same tree is the
yardstick for tracing: it has no plan, no packing and no order.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

import fdp

PLAN_TARGET, TRACE_TARGET = 0.3, 2.0  # seconds of wall time, for 10,000 and 2,000 leaves
REPLICAS = 8


def layers(leaves: int, replicas: int = 1) -> dict[str, Any]:
    """A tree of ``leaves`` leaves, four a layer: two kernels in bfloat16, a bias and a scale in float32.

    Gradients of several replicas are stacked along the first axis: ``shard_map`` takes them apart by itself.
    """
    shapes = {"query": (64, 64), "output": (64, 32), "bias": (32,), "scale": (1,)}

    def leaf(name: str) -> jax.ShapeDtypeStruct:
        dtype = jnp.bfloat16 if name in ("query", "output") else jnp.float32
        first, *rest = shapes[name]
        return jax.ShapeDtypeStruct((replicas * first, *rest), dtype)

    return {
        f"layer_{i}": {name: leaf(name) for name in shapes} for i in range(leaves // len(shapes))
    }


def trace(reduce: Callable[[Any], Any], grads: Any) -> None:
    """Traces ``reduce`` on each of eight replicas, as ``jax.jit`` would, with the check on."""

    def replica(grads: Any) -> Any:  # a new function each time, or JAX would find its last trace
        return reduce(grads)

    mesh = AbstractMesh((REPLICAS,), ("data",))
    one_each, equal = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=one_each, out_specs=equal)
    jax.make_jaxpr(mapped)(grads)


def timed(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Seconds: the first time, and medians over the times after it."""
    wall, cpu = [], []
    for _ in range(repeats + 1):
        started = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    return {
        "first_s": round(wall[0], 4),
        "median_s": round(statistics.median(wall[1:]), 4),
        "median_cpu_s": round(statistics.median(cpu[1:]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "tracing.json"
    )
    options = parser.parse_args()

    params = layers(10_000)
    small, grads = layers(2_000), layers(2_000, REPLICAS)
    plan = fdp.plan_buckets(params)
    each = fdp.plan_buckets(small, bucket_bytes=1)
    cases: dict[str, tuple[Callable[[], Any], float | None]] = {
        "plan_buckets, 10,000 leaves": (lambda: fdp.plan_buckets(params), PLAN_TARGET),
        "plan.fingerprint, 10,000 leaves": (plan.fingerprint, None),
        "trace reduce_gradients, 2,000 leaves": (
            lambda: trace(lambda g: fdp.reduce_gradients(g, "data"), grads),
            TRACE_TARGET,
        ),
        "trace reduce_gradients, 2,000 leaves, 2,000 buckets": (
            lambda: trace(lambda g: fdp.reduce_gradients(g, "data", plan=each), grads),
            None,
        ),
        "trace lax.pmean, 2,000 leaves": (
            lambda: trace(lambda g: lax.pmean(g, "data"), grads),
            None,
        ),
    }
    results = {}
    print(f"{'':52} {'first':>8} {'median':>8} {'cpu':>8}  target")
    for name, (run, target) in cases.items():
        seconds = timed(run, options.repeats)
        results[name] = {**seconds, "target_s": target}
        verdict = (
            ""
            if target is None
            else f"< {target} s: {'met' if seconds['median_s'] < target else 'MISSED'}"
        )
        columns = " ".join(
            f"{seconds[key]:8.3f}" for key in ("first_s", "median_s", "median_cpu_s")
        )
        print(f"{name:52} {columns}  {verdict}")

    report = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 1),
        "repeats": options.repeats,
        "seconds": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
