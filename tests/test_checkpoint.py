"""orbax saves and restores the training state, onto another number of devices too.

What is restored goes on bit for bit where the devices are as many as before, else within 1e-5 (Adam; relative
difference after two more steps) of the run that was not interrupted.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from stateful_hook import error_feedback

import fdp
from tests.frameworks import BOTH
from tests.models import relative_difference

WIDTH = 4
BATCHES = np.random.default_rng(0).normal(size=(4, 16, WIDTH)).astype(np.float32)
PARAMS = {"w1": np.eye(WIDTH, dtype=np.float32), "w2": np.ones((WIDTH, 1), np.float32)}
STATS = {"mean": np.zeros(WIDTH, np.float32), "seen": np.zeros((), np.int32)}


def loss_fn(params, batch, *, model_state, rng):
    """Model state, and a key that is the same for all replicas: numbers do not depend on how many there are."""
    noise = jax.random.normal(rng, (WIDTH,)) / 10
    h = jnp.tanh((batch - model_state["mean"] + noise) @ params["w1"])
    mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch, 0)
    new = {"mean": mean, "seen": model_state["seen"] + 1}
    return jnp.mean((h @ params["w2"] - 1) ** 2), new


@functools.cache
def trainer_on(count, via, **options):
    return fdp.data_parallel(
        loss_fn,
        optax.adam(1e-2),
        mesh=mesh_of(count),
        via=via,
        has_model_state=True,
        has_rng=True,
        rng_per_replica=False,
        **options,
    )


def mesh_of(count):
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def start(trainer):
    return trainer.init(PARAMS, model_state=STATS, rng=jax.random.key(5))


def shapes_for(trainer):
    """What orbax restores into: shapes, dtypes and the shardings of this trainer's mesh; nothing is computed."""
    params, stats, rng = jax.eval_shape(lambda: (PARAMS, STATS, jax.random.key(0)))
    return trainer.init(params, model_state=stats, rng=rng)


def save(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def values(state):
    """As NumPy arrays; keys as their numbers."""
    leaves = jax.tree.leaves((state.params, state.opt_state, state.model_state, state.step))
    return [*map(np.asarray, leaves), np.asarray(jax.random.key_data(state.rng))]


@functools.cache
def uninterrupted(via):
    trainer = trainer_on(8, via)
    state = start(trainer)
    for batch in BATCHES:
        state, info = trainer.train_step(state, batch)
    return state, float(info.loss)


@functools.cache
def after_two_steps(via):
    trainer = trainer_on(8, via)
    state = start(trainer)
    for batch in BATCHES[:2]:
        state, _ = trainer.train_step(state, batch)
    return state


@BOTH
@pytest.mark.parametrize("count", [8, 4, 2, 1])
def test_training_goes_on(count, via, tmp_path):
    saved = after_two_steps(via)
    save(tmp_path / "2", saved)
    trainer = trainer_on(count, via)
    state = restore(tmp_path / "2", shapes_for(trainer))
    assert isinstance(state, fdp.TrainState)
    for got, expected in zip(values(state), values(saved), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype
    assert jnp.issubdtype(state.rng.dtype, jax.dtypes.prng_key)
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.device_set == set(jax.devices()[:count])

    for batch in BATCHES[2:]:
        state, info = trainer.train_step(state, batch)
    expected, loss = uninterrupted(via)
    if count == 8:
        for got, want in zip(values(state), values(expected), strict=True):
            np.testing.assert_array_equal(got, want)
    assert int(state.step) == 4
    assert int(state.model_state["seen"]) == 4
    assert relative_difference(values(state), values(expected)) <= 1e-5
    np.testing.assert_allclose(float(info.loss), loss, rtol=1e-5)


def test_what_pmap_saved_goes_on_in_shard_map(tmp_path):
    save(tmp_path / "2", after_two_steps("pmap"))
    trainer = trainer_on(4, "shard_map")
    state = restore(tmp_path / "2", shapes_for(trainer))
    for batch in BATCHES[2:]:
        state, _ = trainer.train_step(state, batch)
    assert relative_difference(values(state), values(uninterrupted("shard_map")[0])) <= 1e-5


@functools.cache
def in_a_window(via):
    """One step is held back; the next one updates."""
    trainer = trainer_on(8, via)
    state, _ = trainer.no_sync_step(start(trainer), BATCHES[0])
    return state


def shapes_of(state):
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


@BOTH
def test_in_a_window_it_goes_on_on_as_many_devices(via, tmp_path):
    trainer, saved = trainer_on(8, via), in_a_window(via)
    save(tmp_path / "0", saved)
    state = restore(tmp_path / "0", shapes_of(saved))
    # Copies: both runs donate their state.
    expected, _ = trainer.train_step(jax.tree.map(jnp.copy, saved), BATCHES[1])
    state, _ = trainer.train_step(state, BATCHES[1])
    for got, want in zip(values(state), values(expected), strict=True):
        np.testing.assert_array_equal(got, want)
    without, _ = trainer.train_step(start(trainer), BATCHES[1])
    # What was held back did count.
    assert not np.array_equal(without.opt_state[0].mu["w2"], state.opt_state[0].mu["w2"])


def test_in_a_window_orbax_does_not_drop_what_was_held_back(tmp_path):
    """The state that ``init`` makes has no place for it."""
    save(tmp_path / "0", in_a_window("shard_map"))
    with pytest.raises(ValueError, match="unreduced"):
        restore(tmp_path / "0", shapes_for(trainer_on(4, "shard_map")))


def test_without_the_state_of_a_hook_it_goes_on_elsewhere(tmp_path):
    """Eight residuals do not become four; the run goes on with residuals of zero."""
    options = {"hook": error_feedback()}
    first, other = (trainer_on(count, "shard_map", **options) for count in (8, 4))
    state, _ = first.train_step(start(first), BATCHES[0])
    save(tmp_path / "1", state._replace(hook_state=()))
    restored = restore(tmp_path / "1", shapes_for(other)._replace(hook_state=()))
    state, _ = other.train_step(restored._replace(hook_state=start(other).hook_state), BATCHES[1])
    assert int(state.step) == 2
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.hook_state)} == {4}


def on_fewer_devices(saved, count, tmp_path):
    """Restored with every leaf laid out as before, on a mesh of fewer devices: what a user may well write."""
    mesh = mesh_of(count)

    def laid_out(x):
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    save(tmp_path / "0", saved)
    return restore(tmp_path / "0", jax.tree.map(laid_out, saved))


# (options, what is done to the first state): it then has leaves with an axis of replicas. Under shard_map a device of
# a smaller mesh would get several of them, and use the first.
KEPT = {
    "held back": ({}, lambda trainer, state: trainer.no_sync_step(state, BATCHES[0])[0]),
    "hook": ({"hook": error_feedback()}, lambda trainer, state: state),
    "local": ({"model_state_policy": "local"}, lambda trainer, state: state),
}


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_other_replicas_kept_is_refused(kept, via, tmp_path):
    options, prepare = kept
    trainer = trainer_on(8, via, **options)
    state = on_fewer_devices(prepare(trainer, start(trainer)), 4, tmp_path)
    with pytest.raises(ValueError, match=r"to have 4 replicas as its first axis, got shape \[8"):
        trainer_on(4, via, **options).train_step(state, BATCHES[1])


def test_local_statistics_are_joined_to_go_on_elsewhere(tmp_path):
    """The way for what replicas keep for themselves: one consistent copy, given to ``init`` of the new trainer."""
    first = trainer_on(8, "shard_map", model_state_policy="local")
    state, _ = first.train_step(start(first), BATCHES[0])
    whole = state._replace(model_state=fdp.consistent_model_state(state), local_model_state=None)
    save(tmp_path / "1", whole)
    other = trainer_on(2, "shard_map", model_state_policy="local")
    restored = restore(tmp_path / "1", shapes_for(trainer_on(2, "shard_map")))
    fresh = other.init(restored.params, model_state=restored.model_state, rng=restored.rng)
    state = fresh._replace(step=restored.step, opt_state=restored.opt_state)
    np.testing.assert_allclose(
        state.local_model_state["mean"], [0.1 * BATCHES[0].mean(0)] * 2, rtol=1e-5, atol=1e-7
    )
    state, _ = other.train_step(state, BATCHES[1])
    assert int(state.step) == 2
    np.testing.assert_array_equal(state.local_model_state["seen"], [2, 2])
