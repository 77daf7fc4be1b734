"""The command: run something on every rank, measure the wires, remove what killed runs have left."""

import argparse
import sys

from benchmarks.cluster import (
    Cluster,
    ClusterUnavailable,
    UnreachableRate,
    remove_stale,
    unavailable_reason,
)
from fdp.launch import python_command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description="Several hosts on one machine, joined by wires of a chosen speed. Needs root and iproute2.",
        usage="%(prog)s [run|measure|clean] -n N [options] [-- COMMAND ... | SCRIPT.py ... | -m MODULE ...]",
        epilog="A SCRIPT.py or MODULE is run by this Python as fdp.launch would: when a rank fails it ends at "
        "once, where a plain python script.py lingers for minutes in JAX's exit handler.",
    )
    add = made.add_argument
    add(
        "action",
        nargs="?",
        default="run",
        choices=["run", "measure", "clean"],
        help="run COMMAND on every rank (the default), measure rate and latency between ranks, "
        "or remove what killed runs have left",
    )
    add("-n", "--ranks", type=int, default=2, metavar="N", help="hosts (2)")
    add("--rate", help="of every wire, in each direction: 400mbit, 1gbit (as fast as it goes)")
    add("--latency", default="0ms", help="that a wire adds, one way: 0.1ms (0ms)")
    add("--loopback", action="store_true", help="no wires: all ranks on 127.0.0.1, no root needed")
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="a core of its own for each rank (if enough)",
    )
    add("--cores", type=int, default=1, help="cores a rank when pinned (1)")
    add(
        "--nice",
        type=int,
        default=0,
        help="priority of the ranks, -20 (first) to 19; see Cluster (0)",
    )
    add("--threads", type=int, default=2, help="XLA CPU threads a rank (2)")
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the wires first",
    )
    add("--timeout", type=float, help="seconds until all ranks are stopped (no limit)")
    return made


def describe(cluster: Cluster) -> str:
    parts = [f"{cluster.size} ranks", str(cluster.report or "wires not measured")]
    if cluster.delayed_by:
        parts.append(f"delayed by {cluster.delayed_by}")
    parts.append("a core each" if cluster.cpus else "cores shared")
    return ", ".join(parts)


def as_command(words: list[str]) -> list[str]:
    """What follows --: a command, or a script or module for this Python."""
    if words[0] == "-m" and len(words) > 1:
        return python_command(*words[1:], module=True)
    return python_command(*words) if words[0].endswith(".py") else words


def main(argv: list[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    made = parser()
    args, command = made.parse_args(argv[:split]), argv[split + 1 :]
    if args.action == "clean":
        if reason := unavailable_reason():
            made.error(reason)
        print("\n".join(f"removed {name}" for name in remove_stale()) or "nothing was left")
        return 0
    if args.action == "run" and not command:
        made.error("expected a command after --, got none: -- python script.py")
    if args.action == "measure" and args.ranks < 2:
        made.error("expected at least 2 ranks to measure between")
    try:
        cluster = Cluster(
            args.ranks,
            rate=args.rate,
            latency=args.latency,
            loopback=args.loopback,
            pin=args.pin,
            cores=args.cores,
            nice=args.nice,
            check=args.check and args.action == "run",
        )
        with cluster:
            if args.action == "measure":
                report = cluster.measure()
                print(describe(cluster))
                report.check(cluster.rate, cluster.latency)
                return 0
            print(describe(cluster), file=sys.stderr)
            outcome = cluster.run(
                [as_command(command)] * args.ranks, threads=args.threads, timeout=args.timeout
            )
    except UnreachableRate as error:
        print(f"{made.prog}: {error}", file=sys.stderr)
        return 3
    except (ValueError, ClusterUnavailable) as error:
        made.error(str(error))
    except KeyboardInterrupt:
        return 130
    if outcome.reason:
        print(f"{made.prog}: {outcome.reason}", file=sys.stderr)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
