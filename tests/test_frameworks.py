"""One perceptron in flax linen, flax nnx, equinox and haiku, each as its users write it.

Eight replicas are compared with one device, trained by plain optax in the same framework, and the four with each other.
Relative differences, in float32 after four steps, are at most 1e-6.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import frameworks as shared
from tests.frameworks import BOTH, HIDDEN, INPUTS, OUTPUTS, mse
from tests.models import assert_replicas_bit_equal, relative_difference

CLOSE = 1e-6


def plain_optax(loss_fn, params):
    """What linen and haiku users write; their functions are pure already."""
    params, _, losses = shared.one_device(
        lambda params, _, batch, step: (loss_fn(params, batch), None), params
    )
    return params, losses


class LinenPerceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(OUTPUTS, name="second")(jnp.tanh(nn.Dense(HIDDEN, name="first")(x)))


def linen():
    """(params, loss function of fdp, what one device makes of them)."""
    model = LinenPerceptron()
    w = shared.weights()
    params = {
        "first": {"kernel": w["w1"], "bias": w["b1"]},
        "second": {"kernel": w["w2"], "bias": w["b2"]},
    }

    def loss_fn(params, batch):
        return mse(model.apply({"params": params}, batch["x"]), batch)

    return params, loss_fn, plain_optax(loss_fn, params)


class NnxPerceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def nnx_perceptron():
    w = shared.weights()
    model = NnxPerceptron(nnx.Rngs(0))
    for layer, kernel, bias in ((model.first, "w1", "b1"), (model.second, "w2", "b2")):
        layer.kernel[...], layer.bias[...] = jnp.asarray(w[kernel]), jnp.asarray(w[bias])
    graphdef, params = nnx.split(model, nnx.Param)

    def loss_of(model, batch):
        return mse(model(batch["x"]), batch)

    def loss_fn(params, batch):
        return loss_of(nnx.merge(graphdef, params), batch)

    one = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    optimizer = nnx.Optimizer(one, shared.optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(one, optimizer, batch)) for batch in shared.batches()]
    return params, loss_fn, (nnx.state(one, nnx.Param), losses)


class EquinoxPerceptron(eqx.Module):
    """Has every kind of leaf: arrays, None, functions, an integer array, and static fields."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    activation: Any
    no_norm: Any
    permutation: jax.Array  # not differentiable, not trained
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return self.second(self.activation(self.first(x)))[self.permutation]


def equinox_model():
    w = jax.tree.map(jnp.asarray, shared.weights())
    key = jax.random.key(0)
    first = eqx.nn.Linear(INPUTS, HIDDEN, key=key)
    second = eqx.nn.Linear(HIDDEN, OUTPUTS, key=key)
    model = EquinoxPerceptron(first, second, jnp.tanh, None, jnp.arange(OUTPUTS), "perceptron")
    values = (w["w1"].T, w["b1"], w["w2"].T, w["b2"])
    return eqx.tree_at(
        lambda m: (m.first.weight, m.first.bias, m.second.weight, m.second.bias), model, values
    )


def second_layer_only(model):
    """A filter for ``eqx.partition``: the first layer is frozen."""
    nothing = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: (m.second.weight, m.second.bias), nothing, replace=(True, True))


def equinox_perceptron(choose: Any = lambda model: eqx.is_inexact_array):
    model = equinox_model()
    params, static = eqx.partition(model, choose(model))

    def loss_fn(params, batch):
        model = eqx.combine(params, static)
        return mse(jax.vmap(model)(batch["x"]), batch)

    optimizer = shared.optimizer()

    @eqx.filter_jit
    def step(params, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    one, opt_state, losses = params, optimizer.init(params), []
    for batch in shared.batches():
        one, opt_state, loss = step(one, opt_state, batch)
        losses.append(float(loss))
    return params, loss_fn, (one, losses)


def haiku():
    def forward(x):
        return hk.Linear(OUTPUTS, name="second")(jnp.tanh(hk.Linear(HIDDEN, name="first")(x)))

    model = hk.without_apply_rng(hk.transform(forward))
    w = shared.weights()
    params = {"first": {"w": w["w1"], "b": w["b1"]}, "second": {"w": w["w2"], "b": w["b2"]}}

    def loss_fn(params, batch):
        return mse(model.apply(params, batch["x"]), batch)

    return params, loss_fn, plain_optax(loss_fn, params)


MADE = {
    "linen": linen,
    "nnx": nnx_perceptron,
    "equinox": equinox_perceptron,
    "equinox, half frozen": lambda: equinox_perceptron(second_layer_only),
    "haiku": haiku,
}


@functools.cache
def problem(name):
    return MADE[name]()


@functools.cache
def trained(name, mesh, via):
    params, loss_fn, _ = problem(name)
    return shared.train(loss_fn, params, mesh, via, bucket_bytes=128)  # several buckets


@BOTH
@pytest.mark.parametrize("name", MADE)
def test_eight_replicas_equal_one_device(name, via, mesh):
    params, _, (expected, expected_losses) = problem(name)
    state, losses = trained(name, mesh, via)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert relative_difference(state.params, expected) <= CLOSE
    assert relative_difference(params, expected) > 0.1  # it has moved
    np.testing.assert_allclose(losses, expected_losses, rtol=CLOSE)
    assert_replicas_bit_equal(state.params)


def test_the_four_frameworks_agree(mesh):
    # Not bit for bit: equinox keeps its kernels transposed.
    _, reference = trained("linen", mesh, "shard_map")
    assert reference[-1] < reference[0]
    for name in ("nnx", "equinox", "haiku"):
        _, losses = trained(name, mesh, "shard_map")
        np.testing.assert_allclose(losses, reference, rtol=CLOSE)


def test_an_equinox_tree_has_gaps_and_is_put_together_again(mesh):
    params, _, (expected, _) = problem("equinox")
    none = [x is None for x in jax.tree.leaves(params, is_leaf=lambda x: x is None)]
    assert none.count(True) == 3  # the activation, the norm there is not, the permutation
    state, _ = trained("equinox", mesh, "shard_map")
    _, static = eqx.partition(equinox_model(), eqx.is_inexact_array)
    model, reference = eqx.combine(state.params, static), eqx.combine(expected, static)
    x = shared.batches()[0]["x"]
    np.testing.assert_allclose(jax.vmap(model)(x), jax.vmap(reference)(x), rtol=1e-5, atol=1e-6)
