"""Is a shaped wire what JAX's collectives really cross, and what do they reach on it?

    python -m benchmarks.cluster.smoke [--rate 400mbit] [--latency 0ms]

Two ranks sum arrays of several sizes over Gloo. Each time is set against the time the bytes take at the
wire's rate, the bytes that left through the wire are counted, and time = alpha + size / beta is fitted.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

from fdp.launch import initialize, python_command

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 * 10**6)  # bytes per rank


def sent_bytes(interface: str = "eth0") -> int:
    """What has left through an interface so far, headers and all; 0 where there is none."""
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def worker(repeats: int, sizes: list[int]) -> None:
    """On each rank: prints one line of JSON, a list of size, median seconds, bytes sent each time."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharded, whole = NamedSharding(mesh, P("data")), P()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=whole)
    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "data")

    rows = []
    for size in sizes:
        shape = (size // 4 * jax.device_count(),)
        x = jax.make_array_from_callback(
            shape, sharded, lambda index, shape=shape: np.ones(shape, np.float32)[index]
        )
        result = total(x)  # compiles, and the first time also connects the ranks
        assert float(result.addressable_data(0)[0]) == jax.device_count()
        times, before = [], sent_bytes()
        for _ in range(repeats):
            start = time.perf_counter()
            total(x).block_until_ready()
            times.append(time.perf_counter() - start)
        time.sleep(
            0.1
        )  # a rank is done when it has received all; its own last bytes may still wait
        sent = (sent_bytes() - before) / repeats
        rows.append({"bytes": size, "seconds": statistics.median(times), "sent": sent})
    print(json.dumps(rows))


def fit(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """alpha in seconds and beta in bytes per second of seconds = alpha + size / beta.

    Least squares of the relative errors: with absolute ones the largest size alone would decide.
    """
    a = sum(1 / t**2 for t in seconds)
    b = sum(s / t**2 for s, t in zip(sizes, seconds, strict=True))
    c = sum(s**2 / t**2 for s, t in zip(sizes, seconds, strict=True))
    d = sum(1 / t for t in seconds)
    e = sum(s / t for s, t in zip(sizes, seconds, strict=True))
    determinant = a * c - b * b
    return (d * c - b * e) / determinant, determinant / (a * e - b * d)


def main(argv: list[str]) -> int:
    from benchmarks.cluster import Cluster

    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.smoke", description=__doc__)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--latency", default="0ms")
    parser.add_argument("--nice", type=int, default=0, help="priority of the ranks, see Cluster")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    args = parser.parse_args(argv)
    root = str(Path(__file__).parents[2])
    with Cluster(2, rate=args.rate, latency=args.latency, nice=args.nice) as cluster:
        print(f"wire, by TCP: {cluster.report}")
        command = python_command(__file__, "--worker", str(args.repeats), *map(str, args.sizes))
        env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
        outcome = cluster.run([command] * 2, env=env, echo=False, capture=True, timeout=300)
        rate = cluster.rate or math.inf
    if outcome.code:
        print(outcome.reason, *outcome.stderr, sep="\n", file=sys.stderr)
        return outcome.code
    rows = json.loads(outcome.stdout[0].splitlines()[-1])
    print(f"{'bytes':>12} {'seconds':>9} {'line rate':>9} {'ratio':>6} {'sent / bytes':>12}")
    for row in rows:
        line = 8 * row["bytes"] / rate
        ratio, sent = (row["seconds"] / line if line else math.nan), row["sent"] / row["bytes"]
        print(
            f"{row['bytes']:>12,} {row['seconds']:>9.5f} {line:>9.5f} {ratio:>6.2f} {sent:>12.3f}"
        )
    alpha, beta = fit([row["bytes"] for row in rows], [row["seconds"] for row in rows])
    print(f"alpha {alpha * 1e3:.3f} ms, beta {beta * 8 / 1e6:.1f} Mbit/s of payload")
    # Two ranks exchange the whole array, each way once. Less on the wire means that it went elsewhere.
    if min(row["sent"] / row["bytes"] for row in rows) < 1:
        print("the bytes did not all cross the wire", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), [int(size) for size in sys.argv[3:]])
    else:
        sys.exit(main(sys.argv[1:]))
