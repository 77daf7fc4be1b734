"""Two processes with two devices each, over Gloo, against one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


def launch(case, processes, tmp_path, timeout=180):
    """Runs the worker in ``processes`` processes; returns what each wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outs = [tmp_path / f"{case}-{processes}-{process}.json" for process in range(processes)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.process_worker",
                case,
                str(process),
                str(processes),
                str(port),
                str(out),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process, out in enumerate(outs)
    ]
    try:
        logs = [process.communicate(timeout=timeout)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for out, log in zip(outs, logs, strict=True):
        assert out.exists(), log
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_two_processes_of_two_devices_equal_one_process(via, tmp_path):
    first, second = launch(via, 2, tmp_path)
    (alone,) = launch(via, 1, tmp_path)
    assert first.get("error") is None, first
    assert first == second  # replicas are equal bit for bit across processes too
    assert first["step"] == alone["step"] == 5
    np.testing.assert_allclose(first["losses"], alone["losses"], rtol=1e-5)
    for got, expected in zip(first["params"], alone["params"], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_stateful_hooks_across_processes(tmp_path):
    first, second = launch("stateful", 2, tmp_path)
    assert first.get("error") is None, first
    assert first == second
    np.testing.assert_allclose(first["pmap"]["losses"], first["shard_map"]["losses"], rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "path", "here", "there"),
    [
        ("shape", "params/layer_3/kernel", "float32[12,12]", "float32[12,13]"),
        ("dtype", "params/layer_5/bias", "float32[12]", "bfloat16[12]"),
        ("missing", "params/layer_3/bias", "float32[12]", "params/layer_5/bias"),
    ],
)
def test_p66_processes_with_other_models_are_told_apart(case, path, here, there, tmp_path):
    for result in launch(case, 2, tmp_path):
        message = result["error"]
        assert message.startswith("ValueError: expected init arguments with the same structure")
        assert f"process 0 has '{path}: {here}'" in message
        assert "process 1 has" in message
        assert there in message
