"""Public problems of other libraries, as ``docs/cases.md`` lists them: what is carried from step to step."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from stateful_hook import error_feedback

import fdp
from tests.models import batches, mlp_loss, mlp_params, one_device_run, relative_difference

DATA = batches(4)


def mesh_of(count):
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def on_host(state):
    """What a checkpoint holds: the same tree, as numpy arrays."""
    return jax.tree.map(np.asarray, state)


def test_p4_an_output_that_the_loss_does_not_use():
    """torch's static_graph crashes; here the second head is a leaf without a gradient, in every kind of step."""

    def two_heads(params, x):
        hidden = jnp.tanh(x @ params["body"])
        return hidden @ params["head"], hidden @ params["other"]

    def loss(params, batch):
        used, _ = two_heads(params, batch["x"])
        return jnp.mean((used - batch["y"]) ** 2)

    params = {name: jnp.eye(12) * (i + 1) for i, name in enumerate(("body", "head", "other"))}
    optimizer = optax.sgd(0.1)
    trainer = fdp.data_parallel(loss, optimizer, mesh=mesh_of(2), num_microbatches=2)
    state = trainer.init(params)
    state, _ = trainer.train_step(state, DATA[0])
    state, _ = trainer.no_sync_step(state, DATA[1])
    state, _ = trainer.train_step(state, DATA[1])
    doubled = [DATA[0], {"x": DATA[1]["x"], "y": DATA[1]["y"], "twice": 1}]

    def of_window(params, batch):
        return loss(params, batch) * (2 if "twice" in batch else 1)

    expected, _, _ = one_device_run(of_window, optimizer, params, doubled)
    assert relative_difference(state.params, expected) <= 1e-6
    np.testing.assert_array_equal(state.params["other"], params["other"])
    assert fdp.unused_leaves(loss, params, DATA[0]) == (2,)


def test_p29_a_window_is_clipped_once():
    """Clipping every backward pass, or before the reduction, gives another direction."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    trainer = fdp.data_parallel(mlp_loss, optimizer, mesh=mesh_of(2), num_microbatches=2)
    state = trainer.init(mlp_params())
    state, _ = trainer.no_sync_step(state, DATA[0])
    state, _ = trainer.train_step(state, DATA[1])

    def window(params, pair):
        return sum(mlp_loss(params, batch) for batch in pair)

    expected, _, _ = one_device_run(window, optimizer, mlp_params(), [DATA[:2]])
    assert relative_difference(state.params, expected) <= 1e-6
    step = jax.tree.map(lambda p, q: p - q, mlp_params(), state.params)
    np.testing.assert_allclose(optax.tree.norm(step), 0.01, rtol=1e-4)


def test_p41_two_forward_passes_before_a_backward():
    """Statistics go in and come out: the second pass sees the first one's, and no gradient is lost."""

    def layer(params, x, average):
        new = 0.5 * average + 0.5 * jnp.mean(x, 0)
        return (x - new) * params["scale"], new

    def loss(params, batch, *, model_state):
        first, average = layer(params, batch["x"], model_state)
        second, average = layer(params, first, average)
        return jnp.mean(first + second), average

    batch = {
        "x": np.tile(DATA[0]["x"][:8], (4, 1))
    }  # equal shares: local statistics are global ones
    params, start = {"scale": jnp.full(12, 2.0)}, jnp.ones(12)
    trainer = fdp.data_parallel(loss, optax.sgd(0.1), mesh=mesh_of(4), has_model_state=True)
    state, _ = trainer.train_step(trainer.init(params, model_state=start), batch)

    def plain(params):
        return loss(params, batch, model_state=start)

    grads, average = jax.grad(plain, has_aux=True)(params)
    np.testing.assert_allclose(state.model_state, average, rtol=1e-5, atol=1e-6)
    want = params["scale"] - 0.1 * grads["scale"]
    np.testing.assert_allclose(state.params["scale"], want, rtol=1e-5)


def test_j14_statistics_are_weighted_by_count():
    """Four, two and no valid examples: a mean of the replicas' means would be another number."""

    def loss(params, batch, *, model_state):
        count = batch["mask"].sum()
        mean = (batch["x"] * batch["mask"][:, None]).sum(0) / jnp.maximum(count, 1)
        total = jnp.sum((batch["x"] @ params) * batch["mask"])
        return total, count, {"mean": 0.5 * model_state["mean"] + 0.5 * mean}

    mask = np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0], np.float32)
    batch = {"x": DATA[0]["x"][:12], "mask": mask}
    trainer = fdp.data_parallel(
        loss, optax.sgd(0.1), mesh=mesh_of(3), weighted=True, has_model_state=True
    )
    state = trainer.init(jnp.ones(12), model_state={"mean": jnp.ones(12)})
    state, info = trainer.train_step(state, batch)
    valid = batch["x"][:6].astype(np.float64)
    np.testing.assert_allclose(state.model_state["mean"], 0.5 + 0.5 * valid.mean(0), atol=1e-6)
    np.testing.assert_allclose(state.params, 1 - 0.1 * valid.mean(0), rtol=1e-5)
    assert float(info.weight) == 6


def test_p56_the_state_of_a_hook_is_saved_like_any_other():
    """Pickled, which torch's PowerSGDState does not survive whole; the residuals are per replica, and go on."""
    trainer = fdp.data_parallel(
        mlp_loss, optax.sgd(0.1), mesh=mesh_of(2), hook=error_feedback(), bucket_bytes=1300
    )
    state, _ = trainer.train_step(trainer.init(mlp_params()), DATA[0])
    residuals = jax.tree.leaves(state.hook_state)
    assert residuals
    for residual in residuals:
        assert residual.shape[0] == 2
        assert not np.array_equal(residual[0], residual[1])
    saved = pickle.dumps(on_host(state))
    went_on, _ = trainer.train_step(state, DATA[1])
    restored, _ = trainer.train_step(pickle.loads(saved), DATA[1])
    jax.tree.map(np.testing.assert_array_equal, on_host(restored), on_host(went_on))


def test_p72_p73_j18_a_state_goes_on_on_another_number_of_devices():
    """Nothing in it is sharded, padded, stacked or bound to devices; what it is restored onto is the new mesh."""
    optimizer = optax.adam(1e-2)
    expected, _, _ = one_device_run(mlp_loss, optimizer, mlp_params(), DATA[:3])
    first = fdp.data_parallel(mlp_loss, optimizer, mesh=mesh_of(4))
    state, _ = first.train_step(first.init(mlp_params()), DATA[0])
    wanted = jax.tree.map(jnp.shape, (mlp_params(), optimizer.init(mlp_params())))
    for batch, count in zip(DATA[1:3], (2, 1), strict=True):
        saved = on_host(state)
        assert jax.tree.map(np.shape, (saved.params, saved.opt_state)) == wanted
        other = fdp.data_parallel(mlp_loss, optimizer, mesh=mesh_of(count))
        state, _ = other.train_step(saved, batch)
        for leaf in jax.tree.leaves(state):
            assert leaf.sharding.device_set == set(jax.devices()[:count])
    assert relative_difference(state.params, expected) <= 1e-5


def test_p74_the_tree_is_the_users():
    params = {"encoder": (jnp.ones(2), [jnp.ones(3)]), "module": {"w": jnp.ones(())}}

    def loss(params, x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * jnp.mean(x)

    trainer = fdp.data_parallel(loss, optax.sgd(0.1), mesh=mesh_of(2))
    state, _ = trainer.train_step(trainer.init(params), np.ones(2, np.float32))
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    paths = [path for bucket in trainer.plan(state, np.ones(2)).buckets for path in bucket.paths]
    assert set(paths) == {"encoder/0", "encoder/1/0", "module/w"}


@jax.custom_vjp
def own_square(x):
    return x * x


own_square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_j4_an_own_gradient_rule_equals_one_device(via):
    """pmap is the way out where somebody else's rule cannot live with shard_map's check."""

    def loss(params, batch):
        return jnp.mean(own_square(batch["x"] @ params["w"] - batch["y"]))

    params = {"w": jnp.eye(12)}
    expected, _, _ = one_device_run(loss, optax.sgd(0.1), params, DATA[:2])
    mesh = mesh_of(4)
    trainer = fdp.data_parallel(loss, optax.sgd(0.1), mesh=mesh, via=via)
    state = trainer.init(params)
    for batch in DATA[:2]:
        state, _ = trainer.train_step(state, batch)
    assert relative_difference(state.params, expected) <= 1e-6
