"""Two processes with two devices each, over Gloo, against one process."""

from __future__ import annotations

import numpy as np
import pytest
from processes import start


def launch(case, processes, tmp_path, timeout=180):
    """Runs the worker in ``processes`` processes; returns what each wrote."""
    ended = start("tests.process_worker", case, processes, tmp_path, timeout)
    for one in ended:
        assert one.result is not None, one.log
    return [one.result for one in ended]


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


def test_stateful_hooks_and_local_model_state_across_processes(tmp_path):
    first, second = launch("stateful", 2, tmp_path)
    assert first.get("error") is None, first
    assert first == second
    np.testing.assert_allclose(first["pmap"]["losses"], first["shard_map"]["losses"], rtol=1e-5)
    # Process 0's 10, and on each of four replicas twice its example: 0, 1, 2 and 3.
    assert first["local"] == {"shard_map": [16.0, 13.0], "pmap": [16.0, 13.0]}


@pytest.fixture(scope="module")
def other_models(tmp_path_factory):
    return launch("other models", 2, tmp_path_factory.mktemp("other_models"))


@pytest.mark.parametrize(
    ("case", "path", "here", "there"),
    [
        ("shape", "params/layer_3/kernel", "float32[12,12]", "float32[12,13]"),
        ("dtype", "params/layer_5/bias", "float32[12]", "bfloat16[12]"),
        ("missing", "params/layer_3/bias", "float32[12]", "params/layer_5/bias"),
    ],
)
def test_p66_processes_with_other_models_are_told_apart(case, path, here, there, other_models):
    for result in other_models:
        message = result[case]
        assert message.startswith("ValueError: expected init arguments with the same structure")
        assert f"process 0 has '{path}: {here}'" in message
        assert "process 1 has" in message
        assert there in message
        assert result["none"] is None  # and afterwards the same model is taken
