"""What packing costs and hides: the programs of the TPU and GPU compilers, without hardware, and time on the CPU.

    python -m benchmarks.packing [--targets v5e:2x4,h100:8,cpu] [--quick] [--out benchmarks/results/packing.json]

One MLP of kernels and biases is compiled with ``lax.pmean``, with fdp for every packing and two bucket caps, and with
fdp's strongest rival: pmean, with XLA's limit for joining all-reduces set to the bucket cap. For each program: buckets,
all-reduces, how many of these a matmul runs beside, memory traffic and temporary memory, and both relative to pmean.
TPUs get the programs with and without fdp's compiler options; GPUs need none. ``fdp.pack`` quotes the figures. Needs
the compilers (``make test-aot`` installs them); a target without its compiler is named and left out. CPU programs also
run, on this machine, and their steps are timed, ways in turn.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fdp
from fdp import aot, inspect
from fdp.options import suggested_compiler_options

MIB = 2**20
CAPS = (25 * MIB, 1 * MIB)
# XLA's names for the limit up to which all-reduces are joined; the CPU has none.
LIMITS = {
    "gpu": "xla_gpu_all_reduce_combine_threshold_bytes",
    "tpu": "xla_jf_crs_combiner_threshold_in_bytes",
}
PACKS = {"flat": fdp.pack.flat(), "leaves": fdp.pack.leaves(), "auto": fdp.pack.auto()}


class Size(NamedTuple):
    """An MLP and one replica's batch."""

    layers: int
    width: int
    rows: int

    def params(self) -> Any:
        return {
            f"layer_{i:02d}": {
                "kernel": jax.ShapeDtypeStruct((self.width, self.width), jnp.float32),
                "bias": jax.ShapeDtypeStruct((self.width,), jnp.float32),
            }
            for i in range(self.layers)
        }


FULL, QUICK, TIMED = Size(8, 2048, 512), Size(3, 512, 128), Size(12, 512, 64)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)


def lowered(mesh: Mesh, size: Size, reduce: Callable[[Any], Any]) -> jax.stages.Lowered:
    """A step of SGD that gives its parameters away, as a trainer's does."""

    def step(params: Any, x: jax.Array) -> Any:
        grads = reduce(jax.grad(loss_fn)(fdp.varying(params, "data"), x))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    jitted = jax.jit(
        mapped, in_shardings=(replicated, split), out_shardings=replicated, donate_argnums=0
    )
    x = jax.ShapeDtypeStruct((mesh.size * size.rows, size.width), jnp.float32)
    return jitted.lower(size.params(), x)


class Way(NamedTuple):
    """A way to reduce; ``limit`` is for the rival: bytes up to which XLA joins all-reduces."""

    name: str
    reduce: Callable[[Any], Any]
    plan: fdp.BucketPlan | None = None
    pack: fdp.pack.Packing | None = None
    limit: int | None = None

    def options(self, platform: str) -> dict[str, str]:
        chosen = suggested_compiler_options(platform, self.plan, pack=self.pack)
        if self.limit is not None:
            chosen[LIMITS[platform]] = str(self.limit)
        return chosen


def ways(size: Size) -> Iterator[Way]:
    def plain(grads: Any) -> Any:
        return lax.pmean(grads, "data")

    yield Way("pmean", plain)
    for cap in CAPS:
        yield Way(f"pmean, limit {cap // MIB} MiB", plain, limit=cap)
    for cap in CAPS:
        plan = fdp.plan_buckets(size.params(), bucket_bytes=cap, first_bucket_bytes=cap)
        for name, pack in PACKS.items():

            def reduce(grads: Any, plan: Any = plan, pack: Any = pack) -> Any:
                return fdp.reduce_gradients(grads, "data", plan=plan, pack=pack)

            yield Way(f"{name}, cap {cap // MIB} MiB", reduce, plan, pack)


def measured(compiled: jax.stages.Compiled, plan: fdp.BucketPlan | None) -> dict[str, Any]:
    program = inspect.load(compiled)
    found, report = inspect.collectives(program), inspect.report(program)
    return {
        "buckets": None if plan is None else len(plan.buckets),
        "all_reduces": len(found),
        "in_plan_order": plan
        and [c.nbytes for c in found] == [bucket.nbytes for bucket in plan.buckets],
        "beside_a_matmul": sum(one.flops > 0 for one in inspect.overlap(program)),
        "bytes_accessed": int(report.bytes_accessed),
        "bytes_accessed_from": report.bytes_accessed_source,
        "temp_bytes": report.temp_bytes,
        "schedule": inspect.interleaving(program),
    }


def compare(target: str, mesh: Mesh, size: Size) -> list[dict[str, Any]]:
    """Every way on one target; prints a line for each."""
    platform = {"v": "tpu", "h": "gpu", "c": "cpu"}[target[0]]
    rows: list[dict[str, Any]] = []
    for with_options in (False, True) if platform == "tpu" else (False,):
        base: dict[str, Any] = {}
        for way in ways(size):
            if way.limit is not None and (
                platform == "cpu" or (platform == "tpu" and not with_options)
            ):
                continue
            chosen = way.options(platform) if with_options or way.limit is not None else {}
            started = time.perf_counter()
            compiled = lowered(mesh, size, way.reduce).compile(compiler_options=chosen or None)
            row = {
                "target": target,
                "way": way.name,
                "options": chosen,
                **measured(compiled, way.plan),
                "compile_s": round(time.perf_counter() - started, 1),
            }
            base = base or row
            row["bytes_to_pmean"] = round(row["bytes_accessed"] / base["bytes_accessed"], 3)
            row["temp_to_pmean"] = round(row["temp_bytes"] / base["temp_bytes"], 3)
            rows.append(row)
            print(
                f"{target:9} {way.name:20} {'options' if chosen else '':8} {row['buckets'] or '':>7} "
                f"{row['all_reduces']:>4} {row['beside_a_matmul']:>7} "
                f"{row['bytes_accessed'] / 1e9:>7.3f} {row['bytes_to_pmean']:>6.3f} "
                f"{row['temp_bytes'] / 1e6:>7.1f} {row['temp_to_pmean']:>6.3f}  {row['schedule']}",
                flush=True,
            )
    return rows


def times(mesh: Mesh, size: Size, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step on this machine; the ways take turns."""
    rng = np.random.default_rng(0)

    def array(shape: Any, spec: Any) -> jax.Array:
        values = rng.normal(size=shape.shape).astype(np.float32) / size.width**0.5
        return jax.device_put(values, NamedSharding(mesh, spec))

    x = array(jax.ShapeDtypeStruct((mesh.size * size.rows, size.width), jnp.float32), P("data"))
    steps, states = {}, {}
    for way in ways(size):
        if way.limit is None:
            steps[way.name] = lowered(mesh, size, way.reduce).compile()
            states[way.name] = jax.tree.map(lambda s: array(s, P()), size.params())
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            states[name] = jax.block_until_ready(step(states[name], x))
            seconds[name].append(time.perf_counter() - started)
    return {name: round(1e3 * statistics.median(s[1:]), 2) for name, s in seconds.items()}


def mesh_of(target: str) -> Mesh:
    if target == "cpu":
        return Mesh(np.array(jax.devices("cpu")), ("data",))
    return aot.mesh(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="v5e:2x4,h100:8,cpu")
    parser.add_argument("--quick", action="store_true", help="a small model, and few rounds")
    parser.add_argument("--out", type=Path, help="results/packing.json here; nowhere with --quick")
    options = parser.parse_args()

    for name, value in aot.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    size, timed = (QUICK, QUICK) if options.quick else (FULL, TIMED)
    print(f"MLP {size.layers} x {size.width}, {size.rows} rows a replica, float32, SGD")
    print(
        f"{'target':9} {'way':20} {'':8} {'buckets':>7} {'sent':>4} {'overlap':>7} "
        f"{'GB':>7} {'/pmean':>6} {'temp MB':>7} {'/pmean':>6}  schedule"
    )
    rows: list[dict[str, Any]] = []
    cpu_ms: dict[str, float] = {}
    for target in options.targets.split(","):
        try:
            mesh = mesh_of(target)
        except ImportError as error:
            print(f"SKIPPED {target}: {error}")
            continue
        rows += compare(target, mesh, size)
        if target == "cpu":
            cpu_ms = times(mesh, timed, 3 if options.quick else 20)
            print(f"CPU, MLP {timed.layers} x {timed.width}: median milliseconds of a step")
            for name, value in cpu_ms.items():
                print(f"  {name:20} {value:8.2f}")
    report = {
        "jax": jax.__version__,
        "model": size._asdict(),
        "programs": rows,
        "cpu": {
            "model": timed._asdict(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "median_ms": cpu_ms,
        },
    }
    out = options.out
    if out is None and not options.quick:
        out = Path(__file__).parent / "results" / "packing.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
