"""What a result has to say about where it comes from: machine, wires, versions, settings."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from fdp.launch import available_cores

VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "fdp")
SETTINGS = ("NPROC", "OMP_NUM_THREADS", "XLA_FLAGS", "JAX_PLATFORMS")


def describe() -> dict[str, Any]:
    """Plain data: this machine, and this process's part of it. No name and no path of the machine."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "cores_of_this_rank": available_cores(),
        "memory_gib": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "wire": wire(),
    }


def wire() -> dict[str, Any] | None:
    """What `benchmarks.cluster` says of the wires between ranks; None under another launcher.

    Keys: ``rate`` and ``latency`` as asked for, in bit/s and s (rate None: not limited), ``measured_rate``,
    ``measured_goodput`` and ``measured_latency`` (None: not measured), ``interface``, ``pinned``, ``nice``.
    """
    text = os.environ.get("FDP_CLUSTER")
    return json.loads(text) if text else None


def sent_bytes() -> int | None:
    """What has left this rank through its shaped wire so far, headers and all; None where there is none."""
    found = wire()
    if not found or found["interface"] == "lo":
        return None
    counter = Path(f"/sys/class/net/{found['interface']}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else None


def _cpu() -> str:
    with_name = Path("/proc/cpuinfo")  # Linux only
    text = with_name.read_text() if with_name.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
