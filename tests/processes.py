"""Starts the same script in several processes that JAX connects, and collects what each wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent


class Ended(NamedTuple):
    """One process: what it wrote (None if nothing), its exit code (None if it was killed), its log."""

    result: Any
    code: int | None
    log: str


def start(
    module: str, case: str, processes: int, folder: Path, timeout: float = 180
) -> list[Ended]:
    """Runs ``python -m module case process processes port out`` and waits ``timeout`` seconds for all together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outs = [folder / f"{case}-{processes}-{process}.json" for process in range(processes)]
    logs = [out.with_suffix(".log") for out in outs]
    # A collective holds one of XLA's threads until it is done. With two devices and as many threads as this machine
    # has cores, two collectives under way can hold all of them, and wait for a third in the other process: for ever.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "NPROC": "8"}
    running = []
    for process, (out, log) in enumerate(zip(outs, logs, strict=True)):
        arguments = [case, str(process), str(processes), str(port), str(out)]
        with log.open("w") as file:
            command = [sys.executable, "-m", module, *arguments]
            running.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
                )
            )
    deadline = time.monotonic() + timeout
    codes: list[int | None] = []
    try:
        for one in running:
            try:
                codes.append(one.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for one in running:
            one.kill()
            one.wait()
    results = [json.loads(out.read_text()) if out.exists() else None for out in outs]
    texts = [log.read_text() for log in logs]
    return [Ended(*ended) for ended in zip(results, codes, texts, strict=True)]
