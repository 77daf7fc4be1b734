"""Several hosts on one machine, joined by wires of a chosen speed.

    python -m benchmarks.cluster -n 2 --rate 400mbit --latency 0.1ms -- script.py args

or, from Python:

    with Cluster(2, rate="400mbit") as cluster:
        outcome = cluster.run([python_command("worker.py")] * 2)

Each rank is a network namespace of its own: its traffic to the others crosses a virtual cable and a switch
that `tc` slows down to the rate asked for, in both directions at once. Linux, root and iproute2 are needed;
`loopback=True` (`--loopback`) does without them, and without the wires.
"""

from benchmarks.cluster.cluster import Cluster
from benchmarks.cluster.measure import LinkReport, UnreachableRate
from benchmarks.cluster.network import ClusterUnavailable, remove_stale, unavailable_reason

__all__ = [
    "Cluster",
    "ClusterUnavailable",
    "LinkReport",
    "UnreachableRate",
    "remove_stale",
    "unavailable_reason",
]
