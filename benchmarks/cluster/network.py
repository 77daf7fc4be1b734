"""Namespaces, cables and the switch: made, found again when their owner has died, and removed.

Nothing is made in the machine's own network namespace. A run of n ranks has n + 1 namespaces: one a rank,
with a cable (veth) called eth0, and one for the switch that the other ends are plugged into. With a
namespace the kernel removes all that is in it. Their names hold the owner's process id and start time, so
that two runs do not collide, and what a killed run has left is recognized.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.cluster import shape

__all__ = ["ClusterUnavailable", "Network", "remove_stale", "unavailable_reason"]

_ETC = Path("/etc/netns")  # `ip netns exec NAME` puts the files of NAME/ over those of /etc
_NAME = re.compile(r"fdp-(\d+)-(\d+)-\d+-(?:switch|r\d+)")
_counter = itertools.count()


class ClusterUnavailable(RuntimeError):
    """This machine does not let us make a cluster; the text says what is missing."""


def unavailable_reason() -> str | None:
    """Why no cluster can be made here, None if one can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root, this user is not"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return (
            f"iproute2 is needed, {' and '.join(missing)} not found (install the package iproute2)"
        )
    name = _run_id() + "-r0"
    try:
        _ip(f"netns add {name}")
    except ClusterUnavailable as error:
        return f"this root may not make network namespaces ({error})"
    _ip(f"netns del {name}")
    return None


def _start_time(pid: int) -> str | None:
    """When a process was started, in the kernel's own unit; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, the program's name in parentheses, may hold anything.
    return stat.rpartition(")")[2].split()[19]


def _run_id() -> str:
    return f"fdp-{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"


def _call(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        what = " ".join(command) + (f" <<< {text.strip()!r}" if text else "")
        raise ClusterUnavailable(f"{what}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _ip(*lines: str, namespace: str | None = None, tool: str = "ip") -> None:
    """Runs several commands of ip or tc in one process, in a namespace."""
    _call([tool, *(["-n", namespace] if namespace else []), "-batch", "-"], "\n".join(lines) + "\n")


def remove_stale() -> list[str]:
    """Removes the namespaces of owners that are dead, and returns their names."""
    found = [path.name for folder in (Path("/run/netns"), _ETC) for path in _entries(folder)]
    stale = []
    for name in sorted(set(found)):
        match = _NAME.fullmatch(name)
        if match and _start_time(int(match[1])) != match[2]:
            _remove(name)
            stale.append(name)
    return stale


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _remove(name: str) -> None:
    """Removes one namespace and what runs in it; what is not there is no error."""
    pids = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
    )
    for pid in pids.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(_ETC / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()  # only if it is empty


class Network:
    """The namespaces of one run. `create` may fail half way: call `remove` in any case."""

    def __init__(self, size: int, rate: float | None, latency: float):
        self.size, self.rate, self.latency = size, rate, latency
        run = _run_id()
        self.switch = f"{run}-switch"
        self.namespaces = [f"{run}-r{rank}" for rank in range(size)]
        # The namespaces see nothing but each other, so every run can use the same addresses.
        self.addresses = [f"10.77.0.{rank + 1}" for rank in range(size)]
        self._netem = False
        self._relay: subprocess.Popen[bytes] | None = None

    @property
    def delayed_by(self) -> str | None:
        """What holds packets back: the kernel's "netem", our own "relay", None without latency."""
        if not self.latency:
            return None
        return "netem" if self._netem else "relay"

    def exec_prefix(self, rank: int) -> list[str]:
        """What to put before a command to have it run on a rank's host."""
        return ["ip", "netns", "exec", self.namespaces[rank]]

    def create(self) -> None:
        """Makes namespaces, cables, switch and shaping.

        Raises:
          ClusterUnavailable: the kernel or iproute2 refuses; says which command and why.
        """
        _ip(*(f"netns add {name}" for name in (self.switch, *self.namespaces)))
        for rank, name in enumerate(self.namespaces):
            self._write_hosts(rank, name)
        for name in (self.switch, *self.namespaces):
            # No IPv6: nobody asks for it, and its announcements would cross the wire. Reno: the only
            # congestion control that every kernel lets a namespace choose; the default differs by machine,
            # and on a wire without loss all of them fill it.
            _call(["ip", "netns", "exec", name, "sh", "-c", _SETTINGS])
        self._netem = bool(self.latency) and self._has_netem()
        relayed = bool(self.latency) and not self._netem
        macs = [f"02:00:00:00:00:{rank + 1:02x}" for rank in range(self.size)]
        if self.latency == 0:
            _ip(
                "link add br0 type bridge mcast_snooping 0",
                "link set br0 up",
                namespace=self.switch,
            )
        segment = shape.segment_bytes(self.rate) if self.rate else 65536
        for rank, name in enumerate(self.namespaces):
            port = f"port{rank}"
            _ip(
                f"link add {port} type veth peer name eth0 address {macs[rank]} netns {name}",
                f"link set {port} up gso_max_size {segment}",
                *([f"link set {port} master br0"] if not relayed else []),
                namespace=self.switch,
            )
            others = [other for other in range(self.size) if other != rank]
            _ip(
                "link set lo up",
                f"link set eth0 up mtu {shape.MTU} gso_max_size {segment}",
                f"addr add {self.addresses[rank]}/24 dev eth0",
                # Known from the start: no questions on the wire in the middle of a measurement.
                *(
                    f"neigh add {self.addresses[o]} lladdr {macs[o]} dev eth0 nud permanent"
                    for o in others
                ),
                namespace=name,
            )
            self._shape(rank)
        if relayed:
            self._start_relay()

    def _shape(self, rank: int) -> None:
        """Slows down both ends of a cable; what comes in is delayed, where the kernel can do it."""
        parent = "root"
        lines: list[str] = []
        if self._netem:
            lines = [f"qdisc add dev port{rank} root handle 1: {shape.netem(self.latency)}"]
            parent = "parent 1:1 handle 10:"
        if self.rate:
            queue = shape.tbf(self.rate)
            lines += [f"qdisc add dev port{rank} {parent} {queue}"]
            _ip(f"qdisc add dev eth0 root {queue}", namespace=self.namespaces[rank], tool="tc")
        if lines:
            _ip(*lines, namespace=self.switch, tool="tc")

    def _has_netem(self) -> bool:
        try:
            _ip(f"qdisc add dev lo root {shape.netem(1e-3)}", namespace=self.switch, tool="tc")
        except ClusterUnavailable:
            return False
        _ip("qdisc del dev lo root", namespace=self.switch, tool="tc")
        return True

    def _write_hosts(self, rank: int, name: str) -> None:
        """A host's own name must lead to its wire: Gloo listens where the machine's name points to."""
        lines = ["127.0.0.1 localhost", f"{self.addresses[rank]} {socket.gethostname()}"]
        lines += [f"{address} rank{other}" for other, address in enumerate(self.addresses)]
        for _ in range(3):  # another run may be removing the empty /etc/netns at this moment
            with contextlib.suppress(FileNotFoundError):
                (_ETC / name).mkdir(parents=True, exist_ok=True)
                (_ETC / name / "hosts").write_text("\n".join(lines) + "\n")
                return
        raise ClusterUnavailable(f"{_ETC / name} disappears while it is being written")

    def _start_relay(self) -> None:
        """Plugs the cables into a program that holds every packet back, instead of into a bridge."""
        script = str(Path(__file__).with_name("delay.py"))
        prefix = ["ip", "netns", "exec", self.switch]
        ports = [f"port{rank}" for rank in range(self.size)]
        self._relay = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-S", script, str(self.latency), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the ranks first, the wire goes last
        )
        if not self._relay.stdout or self._relay.stdout.readline() != b"ready\n":
            raise ClusterUnavailable("the program that delays packets did not start, see above")

    def remove(self) -> None:
        """Removes everything, however much of it there is."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
        for name in (*self.namespaces, self.switch):
            _remove(name)


_SETTINGS = """
for scope in all default; do
  file=/proc/sys/net/ipv6/conf/$scope/disable_ipv6
  if [ -e $file ]; then echo 1 >$file; fi
done
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
"""
