"""What XLA makes of real models' steps, with fdp and without, for hardware that is not here.

    python -m benchmarks.compiled [--targets h100:8,v5e:2x4] [--models mlp,resnet50,...] [--rounds 3] [--quick]

Every model (`benchmarks.models`) is compiled for every target in three ways, in turn: one `pmean` of all gradients, as
JAX programs have it; the same with XLA's limit for joining all-reduces set to fdp's bucket cap, fdp's strongest rival;
and `fdp.data_parallel` as it comes. Of each program: all-reduces, how much of their bytes has matmuls beside it,
temporary memory, memory traffic, and the seconds its compilation took (median of the rounds). Nothing runs. Needs the
compilers (`make test-aot` installs them); a target without its compiler is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import fdp
from benchmarks import models
from benchmarks.models import Model
from fdp import aot, inspect
from fdp.options import suggested_bucket_bytes

# XLA's names for the limit up to which it joins all-reduces.
LIMITS = {
    "gpu": "xla_gpu_all_reduce_combine_threshold_bytes",
    "tpu": "xla_jf_crs_combiner_threshold_in_bytes",
}
RESULT = Path(__file__).parent / "results" / "compiled.json"


def ways(
    model: Model, mesh: jax.sharding.Mesh, cap: int | None
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Name -> the lowered step."""
    platform = mesh.devices.flat[0].platform
    platform = "tpu" if platform == "tpu" else "gpu"
    limit = {LIMITS[platform]: str(cap or suggested_bucket_bytes(platform))}
    caps = {} if cap is None else {"bucket_bytes": cap, "first_bucket_bytes": cap}
    return {
        "pmean": lambda: models.lower_plain(model, mesh),
        "pmean, limit": lambda: models.lower_plain(model, mesh, limit),
        "fdp": lambda: models.lower(model, mesh, **caps)[0],
    }


def measured(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What the program communicates, and what it costs."""
    program = inspect.load(compiled)
    report = inspect.report(program)
    sent = [one for one in report.overlaps if one.collective.nbytes > 4]
    every = sum(_bytes(one) for one in sent)
    hidden = sum(_bytes(one) for one in sent if one.flops > 0)
    return {
        "all_reduces": len(sent),
        "in_loops": sum(one.collective.in_loop for one in sent),
        "beside_matmuls": sum(one.flops > 0 for one in sent),
        "bytes": every,
        "bytes_beside_matmuls": hidden,
        "temp_bytes": report.temp_bytes,
        "bytes_accessed": report.bytes_accessed,
        "bytes_accessed_from": report.bytes_accessed_source,
        "bytes_in_text": report.bytes_in_text,
        "schedules": dict(report.schedules),
    }


def _bytes(one: inspect.Overlap) -> int:
    return one.collective.nbytes * (one.collective.runs or 1)


def compare(name: str, target: str, rounds: int, cap: int | None) -> list[dict[str, Any]]:
    """One model on one target; prints a line for each way."""
    model, mesh = models.BUILDERS[name](), aot.mesh(target)
    rows: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}
    traced: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way, lower in ways(model, mesh, cap).items():
            started = time.perf_counter()
            lowered = lower()
            traced.setdefault(way, []).append(time.perf_counter() - started)
            started = time.perf_counter()
            compiled = lowered.compile()
            seconds.setdefault(way, []).append(time.perf_counter() - started)
            if way not in rows:
                rows[way] = {"model": name, "target": target, "way": way, **measured(compiled)}
    base = rows["pmean"]
    for way, row in rows.items():
        row["compile_s"] = [round(s, 2) for s in seconds[way]]
        row["trace_and_lower_s"] = [round(s, 2) for s in traced[way]]
        pairs = zip(seconds[way], seconds["pmean"], strict=True)
        row["compile_to_pmean"] = round(statistics.median(a / b for a, b in pairs), 3)
        for key in ("temp_bytes", "bytes_accessed", "bytes_in_text"):
            row[f"{key}_to_pmean"] = round(row[key] / base[key], 3) if base[key] else None
        print(line(row), flush=True)
    return list(rows.values())


HEADER = (
    f"{'model':20} {'target':9} {'way':13} {'sent':>4} {'hidden':>6} {'of bytes':>8} "
    f"{'temp MB':>8} {'':>6} {'traffic GB':>10} {'':>6} {'in text':>7} {'compile s':>9} {'':>6}"
)


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    return (
        f"{row['model']:20} {row['target']:9} {row['way']:13} {row['all_reduces']:>4} {row['beside_matmuls']:>6} "
        f"{row['bytes_beside_matmuls'] / max(row['bytes'], 1):>8.0%} {row['temp_bytes'] / 1e6:>8.1f} "
        f"{row['temp_bytes_to_pmean'] or '':>6} {row['bytes_accessed'] / 1e9:>10.3f} "
        f"{row['bytes_accessed_to_pmean']:>6.3f} {row['bytes_in_text_to_pmean']:>7.3f} "
        f"{statistics.median(row['compile_s']):>9.1f} {row['compile_to_pmean']:>6.2f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--targets", default="h100:8,v5e:2x4")
    parser.add_argument("--models", default=",".join(models.BUILDERS))
    parser.add_argument(
        "--rounds", type=int, default=3, help="compilations of each, for their time"
    )
    parser.add_argument("--bucket-mb", type=float, help="cap of a bucket in MiB (fdp's default)")
    parser.add_argument("--quick", action="store_true", help="one round of the MLP; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    unknown = set(args.models.split(",")) - set(models.BUILDERS)
    if unknown:
        parser.error(f"expected models out of {', '.join(models.BUILDERS)}, got {min(unknown)!r}")
    for name, value in aot.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    names = ["mlp"] if args.quick else args.models.split(",")
    rounds = 1 if args.quick else args.rounds
    cap = None if args.bucket_mb is None else int(args.bucket_mb * 2**20)
    print(HEADER)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for target in args.targets.split(","):
        try:
            aot.mesh(target)
        except ImportError as error:
            print(f"SKIPPED {target}: {error}")
            skipped.append(target)
            continue
        for name in names:
            rows += compare(name, target, rounds, cap)
            if not args.quick:
                write(args.out, rows, skipped, args.bucket_mb)


def write(
    out: Path, rows: Sequence[dict[str, Any]], skipped: Sequence[str], bucket_mb: float | None
) -> None:
    """What there is so far: a run that is stopped leaves its beginning behind."""
    result = {
        "jax": jax.__version__,
        "fdp": fdp.__version__,
        "cores": os.cpu_count(),
        "bucket_mb": bucket_mb,
        "load_average": round(os.getloadavg()[0], 1),
        "skipped": skipped,
        "programs": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
