"""The weighted mode: sums over examples, microbatches, replicas and windows, divided once by the total weight."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fdp
from fdp.loss import canonical_loss
from tests.models import assert_replicas_bit_equal, one_device_run, relative_difference
from tests.stateful_hook import error_feedback

OPTIMIZER = optax.sgd(0.1, momentum=0.9)  # nothing that would hide a wrong size
PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.zeros(3)}
STATE = {"mean": jnp.full(4, 0.25), "steps": jnp.zeros((), jnp.int32)}


def make_batch(seed):
    """32 examples; the second of eight replicas has none that count, the others between one and four."""
    rng = np.random.default_rng(seed)
    mask = np.ones((8, 4), np.float32)
    for replica, empty in enumerate(rng.permutation([0, 1, 2, 3, 0, 1, 2])):
        mask[replica + (replica > 0), :empty] = 0
    mask[1] = 0
    x, y = rng.normal(size=(32, 4)), rng.normal(size=(32, 3))
    return {
        "x": x.astype(np.float32),
        "y": y.astype(np.float32),
        "mask": mask.reshape(32),
    }


DATA = [make_batch(seed) for seed in range(4)]
EMPTY = {**DATA[0], "mask": np.zeros(32, np.float32)}


def fractions(batch):
    """The same examples; the second replica's count nothing, those of the others differently much."""
    weights = np.tile(np.asarray([1, 0.5, 0.25, 2], np.float32), 8)
    weights[4:8] = 0
    return {**batch, "mask": weights + batch["mask"] * (weights > 0)}


def sums(params, batch, model_state=None):
    """(loss sum, weight, model state, aux). Without examples the new mean is 0/0."""
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    weight = jnp.sum(batch["mask"])
    masked = batch["mask"][:, None]
    aux = {
        "abs": jnp.sum(masked * jnp.sqrt(error)),
        "hits": jnp.sum(masked * error < 0.5),
        "half": jnp.sum(masked * error).astype(jnp.bfloat16),
    }
    if model_state is not None:
        mean = jnp.sum(masked * batch["x"], 0) / weight
        model_state = {
            "mean": 0.5 * model_state["mean"] + 0.5 * mean,
            "steps": model_state["steps"] + 1,
        }
    return jnp.sum(masked * error), weight, model_state, aux


@functools.cache
def trainer_of(via="shard_map", microbatches=1):
    return fdp.data_parallel(
        sums,
        OPTIMIZER,
        via=via,
        num_microbatches=microbatches,
        weighted=True,
        has_aux=True,
        has_model_state=True,
        bucket_bytes=20,
        pack=fdp.pack.flat(),
    )


def ratio(params, *batches):
    parts = [sums(params, batch)[:2] for batch in batches]
    return sum(part[0] for part in parts) / sum(part[1] for part in parts)


WAYS = [("shard_map", 1), ("shard_map", 2), ("pmap", 2)]


@pytest.mark.parametrize(("via", "microbatches"), WAYS)
def test_p19_p20_j9_equals_one_device_whatever_the_counts(via, microbatches):
    # The running mean of a microbatch without examples would be 0/0 by the loss's own fault.
    data = DATA[:3] if microbatches == 1 else [fractions(batch) for batch in DATA[:3]]
    trainer = trainer_of(via, microbatches)
    state = trainer.init(PARAMS, model_state=STATE)
    expected, opt_state, losses = one_device_run(ratio, OPTIMIZER, PARAMS, data)
    for batch, loss in zip(data, losses, strict=True):
        here = jax.device_get(state.params)
        mean_before = np.asarray(state.model_state["mean"])
        state, info = trainer.train_step(state, batch)
        total, weight, _, aux = sums(here, batch)
        np.testing.assert_allclose(info.loss, loss, rtol=2e-6)
        np.testing.assert_allclose(info.loss, total / weight, rtol=2e-6)
        np.testing.assert_allclose(info.aux["abs"], aux["abs"] / weight, rtol=2e-6)
        np.testing.assert_allclose(float(info.aux["half"]), total / weight, rtol=2e-2)
        assert info.aux["half"].dtype == jnp.bfloat16
        assert int(info.aux["hits"]) == int(aux["hits"])
        assert float(info.weight) == float(weight)
        assert bool(info.updated)
        if (
            microbatches == 1
        ):  # statistics count by what they have seen, a replica without examples not at all
            seen = np.asarray(batch["mask"], np.float64)[:, None] * batch["x"]
            mean = seen.sum(0) / float(weight)
            np.testing.assert_allclose(
                state.model_state["mean"], 0.5 * mean_before + 0.5 * mean, rtol=1e-5, atol=1e-6
            )
    assert relative_difference(state.params, expected) <= 1e-6
    assert relative_difference(state.opt_state, opt_state) <= 1e-5
    assert int(state.model_state["steps"]) == 3 * microbatches
    assert_replicas_bit_equal(state.params)


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_a_window_is_divided_once_by_all_of_its_weight(via):
    trainer = trainer_of(via, 2 if via == "pmap" else 1)
    data = DATA[:3] if via == "shard_map" else [fractions(batch) for batch in DATA[:3]]
    state = trainer.init(PARAMS, model_state=STATE)
    for batch in data[:2]:
        state, info = trainer.no_sync_step(state, batch)
        per_replica = batch["mask"].reshape(8, 4).sum(1)
        np.testing.assert_allclose(info.weight, per_replica, rtol=1e-6)
        assert info.loss.shape == (8,)
        loss = float(np.sum(np.asarray(info.loss) * per_replica) / per_replica.sum())
        np.testing.assert_allclose(loss, ratio(PARAMS, batch), rtol=2e-6)
    state, info = trainer.train_step(state, data[2])
    expected, _, _ = one_device_run(lambda p, b: ratio(p, *b), OPTIMIZER, PARAMS, [data])
    assert relative_difference(state.params, expected) <= 1e-6
    # What is reported is of the step's own batch.
    np.testing.assert_allclose(info.loss, ratio(PARAMS, data[2]), rtol=2e-6)
    assert float(info.weight) == float(data[2]["mask"].sum())
    assert state.unreduced is None


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("via", "microbatches"), WAYS)
def test_j17_no_weight_anywhere_changes_nothing(via, microbatches):
    trainer = trainer_of(via, microbatches)
    state = trainer.init(PARAMS, model_state=STATE)
    full = {**DATA[0], "mask": np.ones(32, np.float32)}
    state, _ = trainer.train_step(state, full)  # momentum is not zero
    before = bits(state)
    state, info = trainer.train_step(state, EMPTY)
    assert bits(state) == before
    assert not bool(info.updated)
    assert (float(info.loss), float(info.weight), float(info.aux["abs"])) == (0.0, 0.0, 0.0)
    if via == "pmap":
        return
    state, info = trainer.no_sync_step(state, EMPTY)
    np.testing.assert_array_equal(info.loss, np.zeros(8))
    state, info = trainer.train_step(state, EMPTY)
    assert bits(state) == before
    # A window counts as a whole: an empty last step does not lose what was held back.
    state, _ = trainer.no_sync_step(state, full)
    state, info = trainer.train_step(state, EMPTY)
    assert bool(info.updated)
    assert float(info.loss) == 0.0
    assert bits(state.params) != before
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_p26_float16_gradients_cross_as_means():
    """Each replica's gradient is 3e4, their sum is inf in float16, and 1 / weight is 0 in float16."""

    def loss(params, batch):
        return jnp.sum(params * batch).astype(jnp.float32), jnp.float32(2e6)

    trainer = fdp.data_parallel(loss, optax.sgd(1.0), weighted=True)
    start = jnp.zeros((), jnp.float16)
    state, info = trainer.train_step(trainer.init(start), np.full(8, 3e4, np.float16))
    np.testing.assert_allclose(float(state.params), -3e4 / 2e6, rtol=1e-3)
    assert float(info.weight) == 8 * 2e6


def test_weights_join_the_small_reduction():
    lowered = trainer_of().lower(trainer_of().init(PARAMS, model_state=STATE), DATA[0])
    plan = trainer_of().plan(trainer_of().init(PARAMS, model_state=STATE), DATA[0])
    # Buckets; loss, weight, float aux and statistics in one; counts in another, as without weights.
    assert len(plan.buckets) == 2
    assert lowered.as_text().count("stablehlo.all_reduce") == 2 + 2


def test_p16_no_collective_while_holding_back():
    trainer = trainer_of()
    state = trainer.init(PARAMS, model_state=STATE)
    assert "all_reduce" not in trainer.lower(state, DATA[0], sync=False).as_text()


def test_defaults_change_no_program():
    def mean_loss(params, batch):
        return ratio(params, batch)

    def text(**options):
        trainer = fdp.data_parallel(mean_loss, OPTIMIZER, **options)
        state = trainer.init(PARAMS)
        return trainer.lower(state, DATA[0]).as_text(), trainer.lower(
            state, DATA[0], sync=False
        ).as_text()

    plain = text()
    assert plain == text(
        weighted=False,
        unused="zero",
        mean_over="all",
        model_state_policy=None,
        count_nonfinite=False,
        rng_per_replica=False,  # no key: nothing to share
    )
    # One bucket, and the loss.
    assert len(re.findall("stablehlo.all_reduce", plain[0])) == 2


@pytest.mark.parametrize(
    ("weight", "came"),
    [
        (jnp.ones(3), "float32[3]"),
        (True, "True of type bool"),
        (1j, "1j of type complex"),
        (None, "None of type NoneType"),
        (jnp.asarray(True), "bool[]"),
    ],
)
def test_weights_that_are_none(weight, came):
    loss = canonical_loss(
        lambda params, batch: (jnp.sum(params), weight),
        has_aux=False,
        has_model_state=False,
        has_rng=False,
        weighted=True,
    )
    with pytest.raises(
        TypeError, match=re.escape(f"weight that is a real scalar, got {came}: return what")
    ):
        loss(jnp.ones(2), None, None, None)


@pytest.mark.parametrize("weight", [3, 3.0, jnp.int8(3), jnp.bfloat16(3), np.float32(3)])
def test_weights_are_counted_in_float32(weight):
    loss = canonical_loss(
        lambda params, batch: (jnp.sum(params), weight),
        has_aux=False,
        has_model_state=False,
        has_rng=False,
        weighted=True,
    )
    got = loss(jnp.ones(2), None, None, None)[1][0]
    assert (float(got), got.dtype) == (3.0, jnp.float32)


def test_what_does_not_go_together():
    trainer = fdp.data_parallel(lambda p, b: jnp.sum(p * b), optax.sgd(0.1), weighted=True)
    state = trainer.init(jnp.ones(()))
    with pytest.raises(
        TypeError, match=r"return \(loss_sum, weight\) .*weighted=True\), got float32"
    ):
        trainer.train_step(state, np.ones(8, np.float32))
    with pytest.raises(ValueError, match='expected op="mean" with weighted=True'):
        fdp.data_parallel(sums, OPTIMIZER, weighted=True, op="sum")


def test_an_empty_step_leaves_a_hooks_state_alone():
    def loss(params, batch):
        return jnp.sum(batch["mask"][:, None] * jnp.sin(params * batch["x"])), jnp.sum(
            batch["mask"]
        )

    trainer = fdp.data_parallel(loss, optax.sgd(0.1), weighted=True, hook=error_feedback())
    state = trainer.init(jnp.linspace(0, 1, 4))
    state, _ = trainer.train_step(state, DATA[0])
    before = bits(state)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(state.hook_state))
    state, _ = trainer.train_step(state, EMPTY)  # would send the residuals, and lose them
    assert bits(state) == before
