"""Runs several processes as one: output by rank, signals passed on, all stopped when one fails."""

import contextlib
import functools
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import IO, NamedTuple, TextIO, cast

__all__ = ["Command", "Outcome", "supervise"]

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (*_STOPPING, signal.SIGUSR1, signal.SIGUSR2)
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
_POLL = 0.05  # seconds between two looks at signals and time limits: 20 short wake-ups a second


class Command(NamedTuple):
    """What one rank runs. `cpus`: the cores it may use, None for those of the caller."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cpus: frozenset[int] | None = None


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
      code: 0, or the exit code of the first rank that failed: 128 + the signal's number for one killed
        by a signal, 124 when the time was up, 128 + number after a signal that was passed on.
      rank: the first rank that failed, None if none did.
      reason: a sentence for a person, empty if all went well.
      signal: the stopping signal that was received and passed on, None if none was.
      stdout: per rank what it wrote, empty unless asked for with `capture`.
      stderr: the same.
    """

    code: int
    rank: int | None
    reason: str
    signal: int | None
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]


class _Stream:
    """One output pipe of one rank: whole lines go on with a prefix."""

    def __init__(self, pipe: IO[bytes], prefix: str, target: TextIO | None, keep: bool):
        self.pipe, self.prefix, self.target, self.keep = pipe, prefix, target, keep
        self.rest = b""
        self.kept = bytearray()

    def read(self) -> bool:
        """Takes what is there; False at the end of the stream."""
        data = os.read(self.pipe.fileno(), 65536)
        if self.keep:
            self.kept += data
        if self.target is not None:
            # A last line without an end gets one, or the next rank would go on in it.
            self.rest += data or (b"\n" if self.rest else b"")
            lines = _LINE.findall(self.rest)
            self.rest = self.rest[sum(map(len, lines)) :]
            if lines:
                text = [self.prefix + line.decode(errors="replace") for line in lines]
                self.target.write("".join(text))
                self.target.flush()
        return bool(data)

    def text(self) -> str:
        return self.kept.decode(errors="replace")


class _Process:
    """One rank and everything it started: its own session, so that a signal reaches them all."""

    def __init__(self, rank: int, command: Command, echo: bool, capture: bool):
        self.rank = rank
        self.code: int | None = None
        # A child gets the affinity of the thread that starts it, before its first instruction.
        own = os.sched_getaffinity(0) if command.cpus is not None else None
        try:
            if command.cpus is not None:
                os.sched_setaffinity(0, command.cpus)
            self.popen = subprocess.Popen(
                [*_die_with_parent(), *command.argv],
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            if own is not None:
                os.sched_setaffinity(0, own)
        out, err = cast(IO[bytes], self.popen.stdout), cast(IO[bytes], self.popen.stderr)
        self.stdout = _Stream(out, f"[{rank}] ", sys.stdout if echo else None, capture)
        self.stderr = _Stream(err, f"[{rank}] ", sys.stderr if echo else None, capture)

        # Readable when the process has ended. When one rank dies the next fails within a millisecond,
        # so the order counts, and epoll reports events in theirs. Elsewhere than on Linux: by rank.
        self.end: int | None = None
        self.ended_at = 0.0
        with contextlib.suppress(AttributeError, OSError):
            self.end = os.pidfd_open(self.popen.pid)
            self.ended_at = float("inf")

    def read(self) -> bool:
        """Takes note of the end; False because nothing more is to come."""
        self.ended_at = time.monotonic()
        return False

    def send(self, signum: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signum)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.ended_at == float("inf") or self.code is not None:
            return self.code
        if (code := self.popen.poll()) is not None:
            self.send(signal.SIGKILL)  # what it started and left behind
            self.code = code if code >= 0 else 128 - code
        return self.code

    def close(self) -> None:
        """Ends it, if it has not ended by itself."""
        self.send(signal.SIGKILL)
        self.popen.wait()
        self.stdout.pipe.close()
        self.stderr.pipe.close()
        if self.end is not None:
            os.close(self.end)


@functools.cache
def _die_with_parent() -> tuple[str, ...]:
    """A prefix that has Linux kill a rank when its launcher dies without a chance to do so."""
    prefix = ("setpriv", "--pdeathsig", "KILL", "--")
    if shutil.which("setpriv") is None:
        return ()
    works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if works else ()


@contextlib.contextmanager
def _signals(received: list[int]) -> Generator[None]:
    """Collects the signals to pass on; those that are ignored (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals
        return
    numbers = [n for n in _FORWARDED if signal.getsignal(n) != signal.SIG_IGN]
    old = {n: signal.signal(n, lambda number, _: received.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def supervise(
    commands: Sequence[Command],
    *,
    grace: float = 5.0,
    timeout: float | None = None,
    echo: bool = True,
    capture: bool = False,
) -> Outcome:
    """Runs one process per command until all have ended or one has failed.

    When one fails the others get SIGTERM, and SIGKILL `grace` seconds later: processes that have called
    `jax.distributed.initialize` do not end on SIGTERM, JAX takes it for a notice of preemption. Signals
    to the caller are passed on; a second Ctrl-C kills at once. Nothing started here outlives the call.

    Args:
      commands: one per rank.
      grace: seconds between the request to stop and the kill.
      timeout: seconds after which all are stopped, None for no limit.
      echo: write the ranks' output to this process's, line by line, as "[rank] line".
      capture: keep the output and return it.

    Returns:
      The outcome. A failing rank is no exception here.

    Raises:
      ValueError: a command that is not to be found, before anything is started.
    """
    for command in commands:
        if shutil.which(command.argv[0], path=command.env.get("PATH", os.defpath)) is None:
            raise ValueError(
                f"expected a command that can be run, got {command.argv[0]!r}, which is not on PATH: "
                "give the path of an executable file"
            )
    return _Run(grace, timeout).run(commands, echo=echo, capture=capture)


class _Run:
    """One call of supervise: the processes, and why and when they have to stop."""

    def __init__(self, grace: float, timeout: float | None):
        self.grace, self.timeout = grace, timeout
        self.kill_at = float("inf")
        self.processes: list[_Process] = []
        self.rank: int | None = None
        self.code = 0
        self.reason = ""
        self.signal: int | None = None

    def run(self, commands: Sequence[Command], *, echo: bool, capture: bool) -> Outcome:
        received: list[int] = []
        with _signals(received), selectors.DefaultSelector() as selector:
            try:
                for rank, command in enumerate(commands):
                    process = _Process(rank, command, echo, capture)
                    self.processes.append(process)
                    for stream in (process.stdout, process.stderr):
                        selector.register(stream.pipe, selectors.EVENT_READ, stream)
                    if process.end is not None:
                        selector.register(process.end, selectors.EVENT_READ, process)
                started = time.monotonic()
                while [p for p in self.processes if p.poll() is None]:
                    _pump(selector)
                    while received:
                        self._pass_on(received.pop(0))
                    self._look_for_failure(time.monotonic() - started)
                    if time.monotonic() > self.kill_at:
                        self._send(signal.SIGKILL)
                self._look_for_failure(0.0)
                # The rest of the output. Bounded: what left its session may hold a pipe open.
                end = time.monotonic() + 1.0
                while selector.get_map() and time.monotonic() < end:
                    _pump(selector)
            finally:
                for process in self.processes:
                    process.close()
        return Outcome(
            self.code,
            self.rank,
            self.reason,
            self.signal,
            tuple(p.stdout.text() for p in self.processes),
            tuple(p.stderr.text() for p in self.processes),
        )

    def _send(self, signum: int) -> None:
        for process in self.processes:
            process.send(signum)

    def _stop(self, signum: int) -> None:
        self.kill_at = min(self.kill_at, time.monotonic() + self.grace)
        self._send(signum)

    def _pass_on(self, signum: int) -> None:
        if signum not in _STOPPING:
            self._send(signum)
            return
        self._stop(signum)
        if self.signal is not None:
            self.kill_at = 0.0  # asked a second time
        self.signal = signum
        self.reason = self.reason or f"stopped by {signal.Signals(signum).name}"

    def _look_for_failure(self, elapsed: float) -> None:
        failed = sorted((p for p in self.processes if p.poll()), key=lambda p: p.ended_at)
        if self.signal is not None and self.code == 0 and failed:
            # A rank that ends well after the signal has done what was asked of it; this one has not.
            self.rank, self.code = failed[0].rank, 128 + self.signal
        elif failed and not self.reason:
            self.rank, self.code = failed[0].rank, failed[0].poll() or 0
            self.reason = f"process {self.rank} failed with exit code {self.code}"
            if any(p.poll() is None for p in self.processes):
                self.reason += ", the others were stopped"
            self._stop(signal.SIGTERM)
        elif self.timeout is not None and elapsed > self.timeout and not self.reason:
            self.code, self.reason = 124, f"stopped after the time limit of {self.timeout:g} s"
            self._stop(signal.SIGTERM)


def _pump(selector: selectors.BaseSelector) -> None:
    """Passes on the output that is there, or waits a moment for some, or for an end."""
    for key, _ in selector.select(_POLL):
        if not key.data.read():
            selector.unregister(key.fileobj)
