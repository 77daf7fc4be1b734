"""One rank of Figure 2: a fixed volume, reduced in pieces of several sizes, launched together and waited for together.

    python -m benchmarks.cluster -n 2 --rate 400mbit -- \
        -m benchmarks.figures.on_ranks.allreduce --params 20000000 --sizes 100000 1000000 --out result.json

PyTorch: one ``all_reduce(async_op=True)`` for each piece, then a wait for each. JAX: one compiled program with one
``psum`` for each piece, which XLA is told not to join. Both on arrays of zeros, over Gloo; sizes and frameworks take
turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fdp
from benchmarks import machine, rank, timing
from benchmarks.ways import in_jax
from benchmarks.ways.way import AXIS, globally
from fdp.launch import initialize

Reduce = Callable[[], None]


def pieces(params: int, size: int) -> list[int]:
    """Sizes that add up to ``params``: as many of ``size`` as fit, and the rest."""
    whole, rest = divmod(params, size)
    return [size] * whole + [rest] * bool(rest)


def in_torch(sizes: Sequence[int]) -> Reduce:
    import torch
    from torch import distributed

    arrays = [torch.zeros(size) for size in sizes]

    def reduce() -> None:
        for work in [distributed.all_reduce(x, async_op=True) for x in arrays]:
            work.wait()

    return reduce


def in_xla(sizes: Sequence[int]) -> Reduce:
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    platform = mesh.devices.flat[0].platform

    def of_one_replica(arrays: list[jax.Array]) -> list[jax.Array]:
        return [lax.psum(x, AXIS) for x in arrays]

    mapped = jax.shard_map(of_one_replica, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    options = in_jax.compiler_options("off", platform)
    program = jax.jit(mapped, donate_argnums=0, compiler_options=options)
    arrays = globally([np.zeros(size, np.float32) for size in sizes], mesh, P())

    def reduce() -> None:
        nonlocal arrays
        arrays = jax.block_until_ready(program(arrays))

    return reduce


FRAMEWORKS = {"torch": in_torch, "jax": in_xla}


def measure(params: int, sizes: Sequence[int], rounds: int, keep: Callable[[Any], None]) -> None:
    """Gives ``keep`` the result after every size, the same on all ranks.

    The result is ``{"params", "ranks", "machine", "rows": [{"size", "count", "torch": [seconds], "jax": [seconds]}]}``:
    of the slowest rank, a number a round.
    """
    rows: list[dict[str, Any]] = []
    result = {"params": params, "ranks": jax.process_count(), "machine": machine.describe()}
    for size in sizes:
        cut = pieces(params, size)
        built = {name: make(cut) for name, make in FRAMEWORKS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in built}
        for number in range(rounds + 1):  # the first to warm up: XLA compiles, Gloo connects
            for name, reduce in built.items():
                fdp.barrier("before a volume", timeout=timing.PATIENCE)
                start = time.perf_counter()
                reduce()
                took = max(timing.gather("a volume's time", time.perf_counter() - start))
                if number:
                    seconds[name].append(took)
        rows.append({"size": size, "count": len(cut), **seconds})
        keep(result | {"rows": rows})


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    initialize()
    rank.connect_torch()

    def keep(result: Any) -> None:
        if jax.process_index() == 0:
            args.out.write_text(json.dumps(result))
            print(f"{result['rows'][-1]['count']} pieces done")

    measure(args.params, args.sizes, args.rounds, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
