"""What a wire really does: rate and latency between ranks, over plain TCP.

The ranks form a ring, as in a ring all-reduce. First each in turn sends single bytes to the next and waits
for the answer; then all send to the next at once, as fast as they can, while they receive. Run by path on
every rank; the answers are one line of JSON each.
"""

import json
import socket
import statistics
import sys
import threading
import time
from typing import NamedTuple

PINGS = 200
WARM_UP = 0.1  # seconds until TCP has filled the wire
CONNECT = 20.0  # seconds to wait for the neighbours


class UnreachableRate(ValueError):
    """The wire asked for is not what this machine can give."""


class LinkReport(NamedTuple):
    """Achieved between ranks: the slowest of them for the rate, the median of all pings for the latency.

    Attributes:
      rate: bits per second on the wire, headers counted, as tc counts them.
      goodput: bits per second of payload, in each direction while both are busy.
      latency: seconds one way, half of a round trip of one byte; with what the two kernels add.
    """

    rate: float
    goodput: float
    latency: float

    def __str__(self) -> str:
        return (
            f"{self.rate / 1e6:,.1f} Mbit/s on the wire ({self.goodput / 1e6:,.1f} of payload) "
            f"each way, {self.latency * 1e3:.3f} ms one way"
        )

    def check(self, rate: float | None, latency: float) -> None:
        """Compares with what was asked for.

        Raises:
          UnreachableRate: the rate is more than 5 % away, or the latency is too short.
        """
        if rate is not None and self.rate < 0.95 * rate:
            raise UnreachableRate(
                f"expected {rate / 1e6:,.0f} Mbit/s between ranks, measured {self.rate / 1e6:,.0f}: "
                f"ask for less than that, for fewer ranks, or stop what else keeps this machine busy"
            )
        if rate is not None and self.rate > 1.05 * rate:
            raise UnreachableRate(
                f"expected {rate / 1e6:,.0f} Mbit/s between ranks, measured {self.rate / 1e6:,.0f}: "
                "the wire is not slowed down as asked; does this kernel have the qdisc tbf?"
            )
        if self.latency < 0.95 * latency:
            raise UnreachableRate(
                f"expected {latency * 1e3:g} ms one way, measured {self.latency * 1e3:.3f}: "
                "packets are not held back as asked"
            )


def combine(lines: list[str], wire_bytes_per_payload: float) -> LinkReport:
    """The report from what the ranks have printed."""
    answers = [json.loads(line) for line in lines]
    goodput = min(answer["goodput"] for answer in answers)
    latency = statistics.median(answer["latency"] for answer in answers)
    return LinkReport(goodput * wire_bytes_per_payload, goodput, latency)


def _connect(address: tuple[str, int]) -> socket.socket:
    end = time.monotonic() + CONNECT
    while True:
        try:
            return socket.create_connection(address, timeout=CONNECT)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _ping(link: socket.socket) -> float:
    times = []
    for _ in range(PINGS):
        start = time.perf_counter()
        link.send(b"p")
        link.recv(1)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 2


def _echo(link: socket.socket) -> None:
    while link.recv(1) == b"p":
        link.send(b"p")


def _flood(link: socket.socket, seconds: float) -> None:
    data, end = bytes(1 << 18), time.perf_counter() + seconds
    while time.perf_counter() < end:
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)


def _drain(link: socket.socket, seconds: float) -> float:
    """Bits per second that arrive between the warm-up and `seconds`."""
    buffer, start = bytearray(1 << 18), time.perf_counter()
    counted, first, last = 0, 0.0, 0.0
    while size := link.recv_into(buffer):
        now = time.perf_counter()
        if WARM_UP < now - start < seconds:
            # The clock starts with the first arrival, whose bytes were sent before it.
            counted, first, last = (counted + size, first, now) if first else (0, now, now)
    return 8 * counted / (last - first) if last > first else 0.0


def main(argv: list[str]) -> None:
    rank, seconds = int(argv[0]), float(argv[1])
    own, after = (argv[2], int(argv[3])), (argv[4], int(argv[5]))
    with socket.create_server(own) as server:
        server.settimeout(CONNECT)
        following = _connect(after)
        previous, _ = server.accept()
    with following, previous:
        for link in (following, previous):
            link.settimeout(CONNECT)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A token goes round: whoever has it pings. A second round starts the flood everywhere.
        if rank:
            _echo(previous)
        latency = _ping(following)
        following.send(b"t")
        if not rank:
            _echo(previous)
            following.send(b"t")
        previous.recv(1)
        if rank:
            following.send(b"t")
        sender = threading.Thread(target=_flood, args=(following, seconds + WARM_UP))
        sender.start()
        goodput = _drain(previous, seconds + WARM_UP)
        sender.join()
    print(json.dumps({"latency": latency, "goodput": goodput}))


if __name__ == "__main__":
    main(sys.argv[1:])
