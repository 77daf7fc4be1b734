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
from fdp import birth
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
    # Buckets; loss, weight, float aux and statistics in one; counts in another, as without weights; and which replica
    # is the first with weight, whose counter is taken.
    assert len(plan.buckets) == 2
    assert lowered.as_text().count("stablehlo.all_reduce") == 2 + 2 + 1


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


def zero_over_zero(params, batch):
    """The loss of someone who divides first and multiplies again: 0/0, gradients too, without examples."""
    weight = jnp.sum(batch["mask"])
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    mean = jnp.sum(batch["mask"][:, None] * error) / weight
    return mean * weight, weight, {"abs": jnp.sqrt(mean) * weight, "mean": mean * weight}


# In the last way half of each share of DATA is a microbatch without examples, on some replicas.
@pytest.mark.parametrize(("via", "microbatches"), [("shard_map", 1), ("pmap", 2), ("shard_map", 4)])
def test_nan_without_weight_has_no_say(via, microbatches):
    trainer = fdp.data_parallel(
        zero_over_zero,
        OPTIMIZER,
        via=via,
        num_microbatches=microbatches,
        weighted=True,
        has_aux=True,
        count_nonfinite=True,
    )
    state = trainer.init(PARAMS)
    parts = DATA[0]["mask"].reshape(8 * microbatches, -1).sum(1)
    assert (parts == 0).sum() >= microbatches  # otherwise this tests nothing
    expected, _, losses = one_device_run(ratio, OPTIMIZER, PARAMS, DATA[:2])
    for batch, loss in zip(DATA[:2], losses, strict=True):
        state, info = trainer.train_step(state, batch)
        np.testing.assert_allclose(info.loss, loss, rtol=2e-6)
        np.testing.assert_allclose(info.aux["mean"], loss, rtol=2e-6)
        assert np.isfinite(info.aux["abs"])
        assert not np.asarray(info.nonfinite).any()
    assert relative_difference(state.params, expected) <= 1e-6


def test_nan_with_weight_is_not_hidden():
    poisoned = {**DATA[0], "x": np.where(np.arange(32)[:, None] == 0, np.nan, DATA[0]["x"])}
    trainer = trainer_of()
    state, info = trainer.train_step(trainer.init(PARAMS, model_state=STATE), poisoned)
    assert np.isnan(info.loss)
    assert np.isnan(state.params["w"]).any()


def test_nan_without_weight_stays_out_of_what_loops_reduce(monkeypatch):
    monkeypatch.setattr(birth, "MIN_SLICE_BYTES", 0)

    def loss(params, batch):
        weight = jnp.sum(batch["mask"])
        out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params)
        return jnp.sum(batch["mask"][:, None] * out**2) / weight * weight, weight

    trainer = fdp.data_parallel(loss, optax.sgd(1.0), weighted=True, in_loops=True)
    start = jnp.stack([jnp.linspace(-1, 1, 16).reshape(4, 4)] * 3)
    state = trainer.init(start)
    assert "in loop 0 (each iteration" in trainer.explain(state, DATA[0])
    state, info = trainer.train_step(state, DATA[0])
    want, _, losses = one_device_run(
        lambda p, b: loss(p, b)[0] / loss(p, b)[1], optax.sgd(1.0), start, DATA[:1]
    )
    np.testing.assert_allclose(info.loss, losses[0], rtol=2e-6)
    assert relative_difference(state.params, want) <= 1e-6


def masked_state(params, batch, *, model_state):
    real = batch > 2  # none of them on the first two replicas: 0/0 there
    mean = jnp.sum(jnp.where(real, batch, 0)) / jnp.sum(real)
    state = {"mean": mean, "key": jax.random.fold_in(model_state["key"], jnp.int32(mean))}
    return jnp.sum(jnp.where(real, params * batch, 0)), jnp.sum(real), state


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_the_first_is_the_first_with_weight(via):
    key = jax.random.key(0)
    trainer = fdp.data_parallel(
        masked_state,
        optax.sgd(0.1),
        via=via,
        weighted=True,
        has_model_state=True,
        model_state_policy="first",
    )
    state = trainer.init(jnp.ones(()), model_state={"mean": jnp.full((), 9.0), "key": key})
    # -1, 0 on the first replica, 1, 2 on the second, 3, 4 on the third
    state, _ = trainer.train_step(state, np.arange(-1, 15, dtype=np.float32))
    assert float(state.model_state["mean"]) == 3.5
    expected = jax.random.key_data(jax.random.fold_in(key, 3))
    got = jax.random.key_data(state.model_state["key"])
    np.testing.assert_array_equal(got, expected)
    before = bits({**state.model_state, "key": got})
    state, info = trainer.train_step(state, np.zeros(16, np.float32))  # nobody is the first
    assert not bool(info.updated)
    got = jax.random.key_data(state.model_state["key"])
    assert bits({**state.model_state, "key": got}) == before


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sums_of_16_bit_losses_are_wide(dtype):
    """Loss and aux sums of 300 microbatches: past 65504 for float16, past 8 bits for bfloat16."""

    def loss(params, batch):
        total = jnp.sum(batch, dtype=dtype) + 0 * params
        return total, jnp.float32(len(batch)), total

    trainer = fdp.data_parallel(
        loss, optax.sgd(0.1), weighted=True, has_aux=True, num_microbatches=300
    )
    state = trainer.init(jnp.ones((), dtype))
    values = np.arange(2400) % 50 + 250.0  # all of them are bfloat16 up to 256, and float16
    values = np.asarray(values, dtype).astype(np.float64)
    for step in (trainer.no_sync_step, trainer.train_step):
        state, info = step(state, values.astype(dtype))
        assert (info.loss.dtype, info.aux.dtype) == (dtype, dtype)
        shares = values.reshape(8, -1).mean(1) if info.loss.ndim else values.mean()
        want = np.asarray(shares).astype(dtype).astype(np.float64)
        np.testing.assert_array_equal(np.asarray(info.loss, np.float64), want)
        np.testing.assert_array_equal(np.asarray(info.aux, np.float64), want)


@pytest.mark.parametrize(("size", "scale"), [(8192, 1.0), (1, 1e-9)])
def test_a_narrow_wire_carries_means_not_sums(size, scale):
    """Gradient sums of 8e4, over what float16 holds, or of 1e-8, under it; the mean is 10 both times."""

    def loss(params, batch):
        return jnp.sum(params * batch) * scale, jnp.float32(batch.size * scale)

    trainer = fdp.data_parallel(
        loss, optax.sgd(0.1), weighted=True, hook=fdp.hooks.compress(jnp.float16)
    )
    batch = np.full(8 * size, 10.0, np.float32)
    state = trainer.init(jnp.full((), 3.0))
    state, _ = trainer.no_sync_step(state, batch)
    state, info = trainer.train_step(state, batch)  # the weight of the whole window counts
    np.testing.assert_allclose(state.params, 2.0, rtol=1e-3)
    np.testing.assert_allclose(info.loss, 30.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("held", "then", "says"),
    [
        ({}, {"weighted": True}, "with weighted=True, like this one, got it from one without"),
        ({"weighted": True}, {}, "without weighted=True, like this one, got it from one with"),
        ({}, {"unused": "skip"}, 'with unused="skip" or mean_over="users"'),
        ({"mean_over": "users"}, {}, 'without unused="skip" or mean_over="users"'),
    ],
)
def test_a_window_belongs_to_trainers_of_the_same_options(held, then, says):
    def trainer(options):
        def loss(params, batch):
            total = jnp.sum(params * batch)
            return (total, 4.0) if options.get("weighted") else total

        return fdp.data_parallel(loss, optax.sgd(0.1), **options)

    batch = np.ones(8, np.float32)
    state, _ = trainer(held).no_sync_step(trainer(held).init(jnp.ones(())), batch)
    for step in ("train_step", "no_sync_step"):
        with pytest.raises(ValueError, match=re.escape(says)):
            getattr(trainer(then), step)(state, batch)


def test_largest_and_local_state_are_of_replicas_with_weight():
    def loss(params, batch, *, model_state):
        real = batch < 0
        state = {
            "largest": jnp.max(batch),
            "most": jnp.max(batch).astype(jnp.int32),
            "mine": jnp.sum(jnp.where(real, batch, 0)) / jnp.sum(real),  # 0/0
        }
        return jnp.sum(jnp.where(real, params * batch, 0)), jnp.sum(real), state

    trainer = fdp.data_parallel(
        loss,
        optax.sgd(0.1),
        weighted=True,
        has_model_state=True,
        model_state_policy={"largest": "max", "most": "max", "mine": "local"},
    )
    start = {"largest": jnp.zeros(()), "most": jnp.int32(0), "mine": jnp.full((), 7.0)}
    state = trainer.init(jnp.ones(()), model_state=start)
    batch = np.asarray([0, -2, -3, -4, -5, 6, -7, -8], np.float32)
    state, _ = trainer.train_step(state, batch)
    assert (float(state.model_state["largest"]), int(state.model_state["most"])) == (-2.0, -2)
    want = np.where(batch < 0, batch, 7)
    np.testing.assert_array_equal(state.local_model_state["mine"], want)
