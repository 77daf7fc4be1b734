"""Dropout in flax linen, flax nnx, equinox and haiku, with the key of the step; and linen's layers in a scan.

The one device that is compared with maps over the eight shares of the batch, each with the key that ``data_parallel``
documents for its replica. Relative differences, in float32 after four steps, are at most 1e-5.
"""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests import frameworks as shared
from tests.frameworks import BOTH, HIDDEN, INPUTS, OUTPUTS, REPLICAS, STEPS, mse

CLOSE = 1e-5
SHAPE = jax.ShapeDtypeStruct((1, INPUTS), jnp.float32)
KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
RNG = 7


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(HIDDEN)(x)))
        return nn.Dense(OUTPUTS)(h)


def linen():
    """(loss function, shapes of params)."""
    model = LinenDropped()

    def loss_fn(params, batch, *, rng):
        return mse(model.apply({"params": params}, batch["x"], rngs={"dropout": rng}), batch)

    shapes = jax.eval_shape(model.init, {"params": KEY, "dropout": KEY}, SHAPE)
    return loss_fn, shapes["params"]


class NnxDropped(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)  # without a stream of its own: the key comes with each call
        self.second = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x, rngs):
        return self.second(self.dropout(nnx.relu(self.first(x)), rngs=rngs))


def nnx_dropped():
    abstract = nnx.eval_shape(lambda: NnxDropped(nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract, nnx.Param)

    def loss_fn(params, batch, *, rng):
        return mse(nnx.merge(graphdef, params)(batch["x"], nnx.Rngs(dropout=rng)), batch)

    return loss_fn, params


def equinox():
    def make(first, second):
        layers = [
            eqx.nn.Linear(INPUTS, HIDDEN, key=first),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Dropout(0.5),
            eqx.nn.Linear(HIDDEN, OUTPUTS, key=second),
        ]
        return eqx.nn.Sequential(layers)

    shapes = eqx.filter_eval_shape(make, KEY, KEY)
    params, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss_fn(params, batch, *, rng):
        model = eqx.combine(params, static)
        keys = jax.random.split(rng, len(batch["x"]))
        return mse(jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys), batch)

    return loss_fn, params


def haiku():
    def forward(x):
        h = hk.dropout(hk.next_rng_key(), 0.5, jax.nn.relu(hk.Linear(HIDDEN)(x)))
        return hk.Linear(OUTPUTS)(h)

    model = hk.transform(forward)

    def loss_fn(params, batch, *, rng):
        return mse(model.apply(params, rng, batch["x"]), batch)

    return loss_fn, jax.eval_shape(model.init, KEY, SHAPE)


DROPPED = {"linen": linen, "nnx": nnx_dropped, "equinox": equinox, "haiku": haiku}


@functools.cache
def keys():
    """The key of every step and replica, ``[steps, replicas]``; made once, since every such program compiles slowly."""

    @jax.jit
    def key(step, replica):
        folded = jax.random.key(RNG)
        for number in (step, 0, replica, 0):  # nothing was held back, one microbatch
            folded = jax.random.fold_in(folded, number)
        return folded

    return jnp.stack([jnp.stack([key(s, r) for r in range(REPLICAS)]) for s in range(STEPS)])


@functools.cache
def by_share(name):
    loss_fn, params = DROPPED[name]()
    params = shared.filled(params)
    drawn = keys()

    def loss(params, _, batch, step):
        def of_share(share, key):
            return loss_fn(params, share, rng=key)

        return jnp.mean(jax.vmap(of_share)(shared.shares(batch), drawn[step])), None

    return loss_fn, params, shared.one_device(loss, params)


# Not all eight: programs that draw random numbers compile slowly on CPU.
@pytest.mark.parametrize(
    ("name", "via"),
    [
        ("linen", "shard_map"),
        ("linen", "pmap"),
        ("nnx", "shard_map"),
        ("nnx", "pmap"),
        ("equinox", "pmap"),
        ("haiku", "shard_map"),
    ],
)
def test_dropout(name, via, mesh):
    loss_fn, params, expected = by_share(name)
    got = shared.train(loss_fn, params, mesh, via, rng=jax.random.key(RNG))
    shared.check(got, expected, CLOSE)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        return h + jnp.tanh(nn.Dense(INPUTS)(h)), None


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes, keys = {"params": 0}, {"params": True}
        layers = nn.scan(LinenLayer, variable_axes=axes, split_rngs=keys, length=3)
        h, _ = layers()(x, None)
        return nn.Dense(OUTPUTS)(h)


@functools.cache
def scanned():
    model = LinenScanned()
    params = shared.filled(jax.eval_shape(model.init, KEY, SHAPE)["params"])

    def loss_fn(params, batch):
        return mse(model.apply({"params": params}, batch["x"]), batch)

    def alone(params, _, batch, step):
        return loss_fn(params, batch), None

    return loss_fn, params, shared.one_device(alone, params)


@BOTH
def test_linen_layers_in_a_scan(via, mesh):
    loss_fn, params, expected = scanned()
    shared.check(shared.train(loss_fn, params, mesh, via), expected, CLOSE)
