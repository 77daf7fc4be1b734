"""The problem that the tests of frameworks share; training it data parallel, and by plain optax on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fdp
from tests.models import assert_replicas_bit_equal, relative_difference

REPLICAS, STEPS, EXAMPLES, INPUTS, HIDDEN, OUTPUTS = 8, 4, 64, 6, 10, 3

BOTH = pytest.mark.parametrize("via", ["shard_map", "pmap"])


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, EXAMPLES, INPUTS)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(INPUTS, OUTPUTS)).astype(np.float32))
    return [{"x": x[i], "y": y[i]} for i in range(STEPS)]


def weights() -> dict[str, np.ndarray]:
    """Initial weights of a perceptron with one hidden layer, kernels as ``[inputs, outputs]``."""
    rng = np.random.default_rng(1)
    return {
        "w1": (rng.normal(size=(INPUTS, HIDDEN)) / INPUTS**0.5).astype(np.float32),
        "b1": rng.normal(size=HIDDEN).astype(np.float32) / 10,
        "w2": (rng.normal(size=(HIDDEN, OUTPUTS)) / HIDDEN**0.5).astype(np.float32),
        "b2": rng.normal(size=OUTPUTS).astype(np.float32) / 10,
    }


def filled(shapes: Any) -> Any:
    """Arrays of these shapes, positive and random: quicker than a framework's own initializers, which compile."""
    rng = np.random.default_rng(2)

    def fill(x: Any) -> Any:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return (
            rng.uniform(0.1, 0.6, x.shape).astype(x.dtype)
            if floating
            else np.zeros(x.shape, x.dtype)
        )

    return jax.tree.map(fill, shapes)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def mse(predicted: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((predicted - batch["y"]) ** 2)


def one_device(loss_fn: Any, params: Any, model_state: Any = None) -> tuple[Any, Any, list[float]]:
    """Plain optax on ``loss_fn(params, model_state, batch, step) -> (loss, model_state)``.

    Returns:
      (params, model state, losses).
    """
    tx = optimizer()

    @jax.jit
    def update(params, opt_state, model_state, batch, step):
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, model_state), grads = value_and_grad(params, model_state, batch, step)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state, loss

    opt_state, losses = tx.init(params), []
    for step, batch in enumerate(batches()):
        params, opt_state, model_state, loss = update(params, opt_state, model_state, batch, step)
        losses.append(float(loss))
    return params, model_state, losses


def shares(batch: Any) -> Any:
    """``[examples, ...]`` as ``[replicas, examples of one, ...]``, for what each replica does for itself."""
    return jax.tree.map(lambda x: x.reshape(REPLICAS, -1, *x.shape[1:]), batch)


def check(got: Any, expected: Any, close: float) -> None:
    """``got`` as ``train`` returns it, ``expected`` as ``one_device``."""
    (state, losses), (params, model_state, expected_losses) = got, expected
    np.testing.assert_allclose(losses, expected_losses, rtol=close)
    for mine, one in ((state.params, params), (state.model_state, model_state)):
        assert jax.tree.structure(mine) == jax.tree.structure(one)
        assert relative_difference(mine, one) <= close
        assert_replicas_bit_equal(mine)


def train(
    loss_fn: Any,
    params: Any,
    mesh: jax.sharding.Mesh,
    via: str,
    *,
    model_state: Any = None,
    rng: Any = None,
    bucket_bytes: int = 2**20,
) -> tuple[fdp.TrainState, list[float]]:
    """Four steps on eight replicas."""
    trainer = fdp.data_parallel(
        loss_fn,
        optimizer(),
        mesh=mesh,
        via=via,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=bucket_bytes,
        has_model_state=model_state is not None,
        has_rng=rng is not None,
    )
    state = trainer.init(params, model_state=model_state, rng=rng)
    losses = []
    for batch in batches():
        state, info = trainer.train_step(state, batch)
        losses.append(float(info.loss))
    return state, losses
