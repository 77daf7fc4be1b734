"""Rates and latencies as people write them, and the tc commands that make a wire have them.

Which queueing discipline: measured on 2 cores, two namespaces, one TCP connection each way, wire rate asked
for 400 Mbit/s, of which TCP can carry 382.6 as payload:

    htb, defaults                                378 one way, 379 both ways at once
    tbf, burst 16 kB, 64 kB segments             380          369
    tbf, burst 128 kB, 64 kB segments            382.6        382.2
    tbf, burst  20 kB, 16 kB segments            382.6        380

The kernel hands packets of up to 64 kB to a virtual cable. A burst that is smaller than such a packet has tbf
cut it up, at a cost that shows; a larger burst reaches the rate, but goes out at once after each pause:
1 MiB after a pause took 19.4 ms with 128 kB, with 20 kB 21.6, and 21.9 is right. So the packets are made
smaller (gso_max_size) and the burst is just above them: about a third of a millisecond at the rate.
"""

import re

__all__ = [
    "MTU",
    "WIRE_BYTES_PER_PAYLOAD",
    "burst_bytes",
    "parse_rate",
    "parse_time",
    "segment_bytes",
    "tbf",
]

MTU = 1500
# 1448 bytes of payload (1500 less IP, TCP and timestamps) travel as 1514 with the Ethernet header, and
# those are what tc counts.
WIRE_BYTES_PER_PAYLOAD = 1514 / 1448

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(
            f"expected {what} such as {example} (units {', '.join(units)}), got {text!r}"
        )
    return float(match[1]) * units[match[2]]


def parse_rate(text: str) -> float:
    """Bits per second of "400mbit" (bit, kbit, mbit, gbit: powers of 1000, as tc reads them).

    Raises:
      ValueError: not a rate, or below 1 Mbit/s, where a single packet takes 12 ms.
    """
    rate = _parse(text, _RATES, "a rate", "400mbit or 1gbit")
    if rate < 1e6:
        raise ValueError(f"expected a rate of at least 1mbit, got {text!r}")
    return rate


def parse_time(text: str) -> float:
    """Seconds of "0.1ms" (us, ms, s).

    Raises:
      ValueError: not a time, or above a second.
    """
    seconds = _parse(text, _TIMES, "a latency", "0.1ms")
    if seconds > 1:
        raise ValueError(f"expected a latency of at most 1s, got {text!r}")
    return seconds


def segment_bytes(rate: float) -> int:
    """The largest packet handed to the wire at once: a third of a millisecond's worth, 4 to 64 kB."""
    return int(min(max(rate / 8 * 0.33e-3, 4096), 65536))


def burst_bytes(rate: float) -> int:
    """What may pass at full speed after a pause: one segment with its headers."""
    return int(1.25 * segment_bytes(rate))


def tbf(rate: float) -> str:
    """Arguments of `tc qdisc add dev X root` for one direction of a wire.

    The queue holds 100 ms, so that nothing is dropped: TCP itself keeps little in a queue of its own host.
    """
    return f"tbf rate {rate:.0f}bit burst {burst_bytes(rate)} latency 100ms"


def netem(latency: float) -> str:
    """Arguments of `tc qdisc add dev X root` for a delay, of as many packets as a fast wire sends meanwhile."""
    return f"netem delay {latency * 1e6:.0f}us limit 100000"
