"""Batch norm in flax linen, flax nnx and haiku: its statistics are model state.

A replica normalizes by its own examples, so the one device that is compared with maps over the eight shares of the
batch. Where a norm takes its mean over the mesh axis, the one device sees the whole batch. Relative differences, in
float32 after four steps, are at most 1e-5. A layer in front of a norm has no bias: its gradient would be rounding.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests import frameworks as shared
from tests.frameworks import BOTH, EXAMPLES, HIDDEN, INPUTS, OUTPUTS, mse

CLOSE = 1e-5
SHAPE = jax.ShapeDtypeStruct((EXAMPLES, INPUTS), jnp.float32)
KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)


class LinenNormed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(HIDDEN, use_bias=False)(x)
        h = nn.BatchNorm(use_running_average=False, momentum=0.8, axis_name=self.axis_name)(h)
        return nn.Dense(OUTPUTS)(nn.relu(h))


def linen(axis_name=None):
    """(loss function, shapes of params, shapes of model state); axis_name: what the norm takes its mean over."""
    model = LinenNormed(axis_name)

    def loss_fn(params, batch, *, model_state):
        variables = {"params": params, "batch_stats": model_state}
        predicted, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return mse(predicted, batch), new["batch_stats"]

    shapes = jax.eval_shape(LinenNormed().init, KEY, SHAPE)
    return loss_fn, shapes["params"], shapes["batch_stats"]


class NnxNormed(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.first = nnx.Linear(INPUTS, HIDDEN, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.8, axis_name=axis_name, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


def nnx_normed(axis_name=None):
    abstract = nnx.eval_shape(lambda: NnxNormed(axis_name, nnx.Rngs(0)))
    graphdef, params, stats = nnx.split(abstract, nnx.Param, nnx.BatchStat)

    def loss_fn(params, batch, *, model_state):
        model = nnx.merge(graphdef, params, model_state, copy=True)
        loss = mse(model(batch["x"]), batch)
        return loss, nnx.state(model, nnx.BatchStat)

    return loss_fn, params, stats


def haiku():
    def forward(x):
        h = hk.Linear(HIDDEN, with_bias=False)(x)
        h = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.8)(h, True)
        return hk.Linear(OUTPUTS)(jax.nn.relu(h))

    model = hk.without_apply_rng(hk.transform_with_state(forward))

    def loss_fn(params, batch, *, model_state):
        predicted, model_state = model.apply(params, model_state, batch["x"])
        return mse(predicted, batch), model_state

    return loss_fn, *jax.eval_shape(model.init, KEY, SHAPE)


NORMED = {"linen": linen, "nnx": nnx_normed, "haiku": haiku}


def mean_of_shares(x):
    """What fdp makes of model state: floating leaves are averaged, others are replica 0's."""
    return x.mean(0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


@functools.cache
def by_share(name):
    loss_fn, params, stats = NORMED[name]()
    params, stats = shared.filled((params, stats))

    def loss(params, stats, batch, step):
        losses, new = jax.vmap(lambda share: loss_fn(params, share, model_state=stats))(
            shared.shares(batch)
        )
        return jnp.mean(losses), jax.tree.map(mean_of_shares, new)

    return loss_fn, params, stats, shared.one_device(loss, params, stats)


@BOTH
@pytest.mark.parametrize("name", NORMED)
def test_statistics_of_a_share(name, via, mesh):
    loss_fn, params, stats, expected = by_share(name)
    got = shared.train(loss_fn, params, mesh, via, model_state=stats)
    shared.check(got, expected, CLOSE)
    if name == "haiku":  # how often its averages were updated: an integer, which nobody averages
        counters = [x for x in jax.tree.leaves(got[0].model_state) if x.dtype == jnp.int32]
        assert [int(x) for x in counters] == [shared.STEPS] * 2


@functools.cache
def of_the_whole_batch(name):
    loss_fn, params, stats = NORMED[name]()
    params, stats = shared.filled((params, stats))

    def loss(params, stats, batch, step):
        return loss_fn(params, batch, model_state=stats)

    return params, stats, shared.one_device(loss, params, stats)


@BOTH
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_statistics_of_the_whole_batch(name, via, mesh):
    params, stats, expected = of_the_whole_batch(name)
    loss_fn, _, _ = NORMED[name](axis_name="data")
    got = shared.train(loss_fn, params, mesh, via, model_state=stats)
    shared.check(got, expected, CLOSE)
