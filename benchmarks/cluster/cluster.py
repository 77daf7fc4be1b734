"""The cluster as a context manager: a network, a core for each rank, commands to run on them."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.cluster import measure, shape
from benchmarks.cluster.network import ClusterUnavailable, Network, remove_stale, unavailable_reason
from fdp.launch import environment, free_port
from fdp.supervise import Command, Outcome, supervise

__all__ = ["Cluster"]

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Seconds of each try to measure the wires: longer ones outlast a neighbour that takes the machine for a moment.
_TRIES = (0.3, 0.3, 0.3, 1.0, 2.0, 4.0)

# A rank is a session of its own. Where sessions are what shares the cores, they have a priority too.
_NICE = 'f=/proc/self/autogroup; if [ -w $f ]; then echo "$0" >$f; fi; exec nice -n "$0" "$@"'


class Cluster:
    """Hosts 0 to size - 1 on this machine, and the wires between them.

    A host sees its own network alone: a cable to a switch, of the given rate in each direction at the same
    time, at both of its ends. `latency` is what the wire adds to the 0.01 to 0.1 ms that the kernels take.

    Everything is removed at the end of the `with` block, however it ends: by an error, by Ctrl-C, by SIGTERM
    (which becomes SystemExit while the cluster is there). What a killed run left, the next one removes.

    Args:
      size: number of ranks.
      rate: of a wire, "400mbit"; None for as fast as the kernel is.
      latency: of a wire, one way, "0.1ms". Where the kernel has no netem a program of ours holds the packets
        back, which takes about half a core at 400 Mbit/s; `delayed_by` says which it is.
      loopback: no namespaces and no shaping: all ranks on 127.0.0.1. Needs no root.
      pin: True gives each rank cores of its own, False none, None (the default) where there are enough.
      cores: how many cores a rank gets then.
      nice: priority of the ranks, -20 (first) to 19. On a machine that is busy with other things, negative
        values (root only) make times repeatable; `nice` before this program's own command does nothing for
        them where the kernel shares the cores out by session first (autogroup), as most do.
      check: measure the wires first, and raise if they are not as asked.

    Raises:
      ValueError: arguments that do not make sense.
      ClusterUnavailable: not on this machine, or not as this user; from `with`.
      UnreachableRate: the wires are not as asked; from `with`.
    """

    def __init__(
        self,
        size: int,
        *,
        rate: str | None = None,
        latency: str = "0ms",
        loopback: bool = False,
        pin: bool | None = None,
        cores: int = 1,
        nice: int = 0,
        check: bool = True,
    ):
        if not 1 <= size <= 64:
            raise ValueError(f"expected 1 to 64 ranks, got {size}")
        if cores < 1:
            raise ValueError(f"expected at least 1 core a rank, got {cores}")
        if not -20 <= nice <= 19:
            raise ValueError(f"expected a priority from -20 to 19, got nice={nice}")
        self.size, self.nice = size, nice
        self.rate = None if rate is None else shape.parse_rate(rate)
        self.latency = shape.parse_time(latency)
        if loopback and (self.rate is not None or self.latency):
            raise ValueError(
                f"expected no rate and no latency with loopback, got rate={rate!r}, latency={latency!r}: "
                "loopback cannot be shaped, leave them out"
            )
        self.cpus = _share_cores(size, cores, pin)
        self.loopback, self.check = loopback, check
        self.report: measure.LinkReport | None = None
        self._network: Network | None = None
        self._ports = itertools.count(29400, 2)
        self._handlers: dict[int, object] = {}

    @property
    def addresses(self) -> list[str]:
        """The address of every rank, as the others see it."""
        return self._network.addresses if self._network else ["127.0.0.1"] * self.size

    @property
    def interface(self) -> str:
        """The name of the network interface that leads to the other ranks."""
        return "eth0" if self._network else "lo"

    @property
    def delayed_by(self) -> str | None:
        """What makes the latency: the kernel's "netem", our own "relay", None without latency."""
        return self._network.delayed_by if self._network else None

    def __enter__(self) -> "Cluster":
        if not self.loopback and (reason := unavailable_reason()):
            raise ClusterUnavailable(
                f"expected a machine that can make wires of its own: {reason}. "
                "Without wires: --loopback, or Cluster(..., loopback=True)"
            )
        self._catch_signals()
        try:
            if not self.loopback:
                remove_stale()
                self._network = Network(self.size, self.rate, self.latency)
                self._network.create()
            if self.check and self.size > 1 and not self.loopback:
                self._check()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes everything. A second signal must not stop it half way, so they wait until it is done."""
        with _held_back():
            if self._network is not None:
                self._network.remove()
                self._network = None
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers.clear()

    def _check(self) -> None:
        """Measures the wires. What else runs here can only make them slower, so one good try is enough."""
        *earlier, last = _TRIES
        for seconds in earlier:
            with contextlib.suppress(measure.UnreachableRate):
                self.measure(seconds).check(self.rate, self.latency)
                return
        self.measure(last).check(self.rate, self.latency)

    def _catch_signals(self) -> None:
        def leave(number: int, _: FrameType | None) -> None:
            raise SystemExit(128 + number)

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, leave)

    def measure(self, seconds: float = 1.0) -> measure.LinkReport:
        """Measures rate and latency between neighbours, all at once, for so many seconds."""
        if self.size < 2:
            raise ValueError("expected at least 2 ranks to measure between, got 1")
        script = str(Path(__file__).with_name("measure.py"))
        ports = [free_port() if self.loopback else 29300 for _ in range(self.size)]
        commands = [
            [sys.executable, "-I", "-S", script, str(rank), str(seconds)]
            + [
                str(part)
                for r in (rank, (rank + 1) % self.size)
                for part in (self.addresses[r], ports[r])
            ]
            for rank in range(self.size)
        ]
        outcome = self.run(commands, echo=False, capture=True, timeout=60 + seconds)
        if outcome.code:
            raise RuntimeError(f"measuring failed: {outcome.reason}\n{''.join(outcome.stderr)}")
        self.report = measure.combine(list(outcome.stdout), shape.WIRE_BYTES_PER_PAYLOAD)
        return self.report

    def run(
        self,
        commands: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        threads: int = 2,
        timeout: float | None = None,
        grace: float = 5.0,
        echo: bool = True,
        capture: bool = False,
    ) -> Outcome:
        """Runs one command per rank, all at once, and stops all when one fails.

        Each finds its number and the others in the variables of `fdp.launch` (so that
        `fdp.launch.initialize()` works) and of torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
        MASTER_PORT), and in FDP_CLUSTER what the wires are, as JSON.

        Args:
          commands: the command of each rank. For a Python script that calls `initialize`, use
            `fdp.launch.python_command`, which does not linger when the script fails.
          env: variables to set in all of them.
          threads: XLA threads each; a pool of one, which one core would get, overlaps nothing.
          timeout: seconds until all are stopped, None for no limit.
          grace: seconds between the request to stop and the kill.
          echo: write the output on, "[rank] line".
          capture: keep the output for the outcome.

        Returns:
          The outcome; a rank that fails is no exception here, `outcome.code` says so. A signal such as
          Ctrl-C is passed on to the ranks, and then takes effect here as if they had not been there.

        Raises:
          ValueError: not one command per rank, or one that is not found.
        """
        if len(commands) != self.size:
            raise ValueError(
                f"expected one command for each of {self.size} ranks, got {len(commands)}"
            )
        if not self.loopback and self._network is None:
            raise ValueError(
                "expected a cluster that is set up, got one that is not: use it in `with`"
            )
        base = {**os.environ, **(env or {})}
        for command in commands:
            if not command or shutil.which(command[0], path=base.get("PATH")) is None:
                raise ValueError(
                    f"expected commands that can be run, got {list(command)}: not on PATH"
                )
        port = free_port() if self.loopback else next(self._ports)
        second = free_port() if self.loopback else port + 1
        prefixes = [self._network.exec_prefix(r) if self._network else [] for r in range(self.size)]
        if self.nice:
            prefixes = [[*prefix, "sh", "-c", _NICE, str(self.nice)] for prefix in prefixes]
        outcome = supervise(
            [
                Command(
                    [*prefix, *command],
                    {**self._environment(rank, port, second, threads, base), **(env or {})},
                    None if self.cpus is None else self.cpus[rank],
                )
                for rank, (prefix, command) in enumerate(zip(prefixes, commands, strict=True))
            ],
            grace=grace,
            timeout=timeout,
            echo=echo,
            capture=capture,
        )
        if outcome.signal is not None:
            signal.raise_signal(outcome.signal)
        return outcome

    def _environment(
        self, rank: int, port: int, second: int, threads: int, base: Mapping[str, str]
    ) -> dict[str, str]:
        master = self.addresses[0]
        env = environment(rank, self.size, f"{master}:{port}", threads=threads, base=base)
        return env | {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(second),
            "GLOO_SOCKET_IFNAME": self.interface,  # torch's; JAX's Gloo asks for the host's name
            "FDP_CLUSTER": json.dumps(self._described()),
        }

    def _described(self) -> dict[str, object]:
        """What results should say of the wires; `benchmarks.machine.wire` reads it."""
        found = self.report
        return {
            "rate": self.rate,
            "latency": self.latency,
            "measured_rate": found and found.rate,
            "measured_goodput": found and found.goodput,
            "measured_latency": found and found.latency,
            "interface": self.interface,
            "pinned": self.cpus is not None,
            "nice": self.nice,
        }


def _share_cores(size: int, cores: int, pin: bool | None) -> list[frozenset[int]] | None:
    """The cores of each rank, None if they are not kept apart."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    usable = sorted(affinity(0)) if affinity else []
    if pin is False or (pin is None and size * cores > len(usable)):
        return None
    if size * cores > len(usable):
        raise ValueError(
            f"expected {size * cores} cores for {size} ranks of {cores}, got {len(usable)}: "
            "ask for fewer ranks, or do without cores of their own (pin=False, --no-pin)"
        )
    return [frozenset(usable[rank * cores : (rank + 1) * cores]) for rank in range(size)]


@contextlib.contextmanager
def _held_back() -> Generator[None]:
    """Signals that would stop this thread wait until the block is done."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
