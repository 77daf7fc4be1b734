"""The first measurements of overlap on CPU, `results/overlap_cpu_*.json`, as one command of `benchmarks.rank`.

    python -m benchmarks.cluster -n 2 --rate 400mbit --nice -20 -- -m benchmarks.overlap_cpu --out result.json
    ... -m benchmarks.overlap_cpu --layers 784,2048,1024,1536,512,2048,768,1024,10 --batch 1280 --out result.json

Same models, ways, cap and turns as those two files; ways there have the names on the left of WAYS, and the layout is
that of `benchmarks.rank`. PyTorch takes no part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import rank

WAYS = {
    "none": "jax:none",
    "pmean": "jax:pmean",
    "pmean, combiner off": "jax:pmean,combiner=off",
    "serialized": "fdp:serialized,cap={cap:g}",
    "ordered": "fdp:ordered,cap={cap:g}",
    "ordered, window 2": "fdp:ordered,cap={cap:g},window=2",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap_cpu", description=__doc__)
    parser.add_argument("--layers", default="1024x13", help="widths, input first: 1024x12,10")
    parser.add_argument("--batch", default="1024", help="examples a rank")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="cap of a bucket in MiB")
    parser.add_argument("--rounds", default="4")
    parser.add_argument("--steps", default="2", help="timed in a round")
    parser.add_argument("--out", help="rank 0 writes the result here")
    args = parser.parse_args(argv)
    names = [name.format(cap=args.bucket_mb) for name in WAYS.values()]
    sizes = ["--model", "mlp:widths=" + args.layers.replace(",", "-"), "--batch", args.batch]
    turns = ["--rounds", args.rounds, "--steps", args.steps, "--warm-up", "1", "--no-alone"]
    out = [] if args.out is None else ["--out", args.out]
    return rank.main([*sizes, *turns, *out, "--ways", *names])


if __name__ == "__main__":
    sys.exit(main())
