"""The dict for a log: says what the step does, survives JSON, measures only when asked."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fdp
from fdp import train
from fdp.log import log_data


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["frozen"])
    return jnp.mean((hidden @ params["w2"]) ** 2)


PARAMS = {
    "w1": np.ones((3, 4), np.float32) / 3,
    "w2": np.ones((4, 1), np.float32),
    "frozen": np.zeros(4, np.float32),
    "nowhere": np.zeros(5, np.float32),
}
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)}


@pytest.fixture
def made(mesh, monkeypatch):
    """A trainer that carries its configuration, and a state."""

    def make(**options):
        configs = []
        real = train.StepConfig
        with monkeypatch.context() as patch:
            patch.setattr(train, "StepConfig", lambda **k: configs.append(real(**k)) or configs[0])
            trainer = fdp.data_parallel(loss, optax.sgd(0.1), mesh=mesh, **options)
        trainer = SimpleNamespace(**{**trainer._asdict(), "config": configs[0]})
        return trainer, trainer.init(PARAMS)

    return make


def test_it_says_what_the_step_does(made):
    trainer, state = made(
        bucket_bytes=40,
        first_bucket_bytes=16,
        schedule=fdp.schedules.ordered(window=2),
        trainable=lambda path, leaf: path != "frozen",
    )
    data = log_data(trainer, state, BATCH)
    assert json.loads(json.dumps(data)) == data
    device = jax.devices()[0]
    expected = {
        "world_size": 8,
        "process": 0,
        "processes": 1,
        "backend": "cpu",
        "device_kind": device.device_kind,
        "mesh": {"data": 8},
        "axis_names": ["data"],
        "iteration": 0,
        "num_parameter_tensors": 4,
        "total_parameter_size_bytes": 4 * (12 + 4 + 4 + 5),
        "dtypes": ["float32"],
        "bucket_cap_bytes": 40,
        "first_bucket_cap_bytes": 16,
        "bucket_sizes": [16, 48],
        "bucket_dtypes": ["float32"] * 2,
        "bucket_paths": [["w2"], ["w1"]],
        "per_bucket_param_indices": [[3], [2]],
        "grad_order": [3, 2],
        "bytes_reduced": 64,
        "plan_fingerprint": trainer.plan(state, BATCH).fingerprint(),
        "frozen_paths": ["frozen"],
        "unused_paths": ["nowhere"],
        "unused_parameter_size": 20,
        "schedule": fdp.schedules.ordered(window=2).name,
        "hook": "all_reduce",
        "pack": fdp.pack.auto("cpu").name,
    }
    assert {name: data[name] for name in expected} == expected
    assert data["versions"]["jax"] == jax.__version__
    assert data["options"]["num_microbatches"] == 1
    assert set(data) == {*expected, "versions", "options"}


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}])
def test_times_are_measured_when_asked_for(made, options):
    trainer, state = made(**options)
    before = jax.tree.map(np.asarray, state)
    times = log_data(trainer, state, BATCH, profile_steps=3)["times"]
    assert min(times[name] for name in ("step", "compute", "forward", "communication")) > 0
    assert times["backward"] == times["compute"] - times["forward"]
    assert times["communication_exposed"] == times["step"] - times["compute"]
    hidden = max(0, times["communication"] - times["communication_exposed"])
    assert times["overlap"] == hidden
    # The state is still there, and still the same.
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))


def test_a_hook_with_state_is_not_measured_alone(made):
    from stateful_hook import error_feedback

    trainer, state = made(hook=error_feedback())
    times = log_data(trainer, state, BATCH, profile_steps=1)["times"]
    assert times["communication"] is None
    assert times["overlap"] is None
    assert times["step"] > 0


def test_the_communication_that_is_measured_is_that_of_the_step(made, monkeypatch):
    # All of it, bucket by bucket, and nothing that XLA could leave out.
    from fdp import drivers, log

    texts = []
    real = drivers.shard_map_driver

    def recording(fn, *args, **options):
        driver = real(fn, *args, **options)

        def run(*arguments):
            texts.append(driver.lower(*arguments).compile())
            return driver.run(*arguments)

        return driver._replace(run=run)

    trainer, state = made(bucket_bytes=40, first_bucket_bytes=16)
    monkeypatch.setattr(log.drivers, "shard_map_driver", recording)
    log_data(trainer, state, BATCH, profile_steps=1)
    counts = [len(fdp.inspect.collectives(compiled)) for compiled in texts]
    buckets = len(trainer.plan(state, BATCH).buckets)
    # Forward, twice (once to compile): nothing. Buckets, twice: one all-reduce each.
    assert counts == [0, 0, buckets, buckets]


def test_what_is_no_trainer_is_refused():
    with pytest.raises(
        TypeError, match=r"expected a Trainer, got int: pass what fdp\.data_parallel"
    ):
        log_data(3, None, None)


def test_negative_steps_are_refused(made):
    trainer, state = made()
    with pytest.raises(ValueError, match="expected profile_steps to be a number of steps from 0"):
        log_data(trainer, state, BATCH, profile_steps=-1)
