"""grain as the input of data parallel training: examples/grain_input.py."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples import grain_input as example


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_example_counts_once_an_epoch(processes):
    data = example.make_data()
    parts = [list(example.epoch_batches(data, 3, p, processes)) for p in range(processes)]
    assert {len(batches) for batches in parts} == {4}  # 210 examples in steps of 64
    rows = [batch["x"][batch["weight"] > 0] for batches in parts for batch in batches]
    read = np.concatenate(rows)
    assert sorted(map(tuple, read.tolist())) == sorted(map(tuple, data["x"].tolist()))
    # One step reads the same examples, however many processes share it.
    (alone,) = [list(example.epoch_batches(data, 3, 0, 1))]
    for step, batch in enumerate(alone):
        joined = np.concatenate([batches[step]["x"] for batches in parts])
        np.testing.assert_array_equal(joined, batch["x"])


def test_eight_replicas_train_as_one_device_on_what_counts(mesh):
    data = example.make_data()
    params, losses = example.train(data, mesh)
    w, expected = np.zeros(example.FEATURES), []
    for epoch in range(example.EPOCHS):
        for batch in example.epoch_batches(data, epoch, 0, 1):
            counts = batch["weight"] > 0  # the oracle never sees padding
            x, y = batch["x"][counts].astype(float), batch["y"][counts].astype(float)
            errors = x @ w - y
            expected.append(np.mean(errors**2))
            w = w - 0.1 * 2 * x.T @ errors / len(y)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(params), w, rtol=1e-5, atol=2e-7)
    assert jax.device_count() == 8
