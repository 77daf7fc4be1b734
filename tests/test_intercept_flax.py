"""Models that scan over their layers, as people write them in flax: linen and nnx, unchanged."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from intercept_helpers import intercepted, reduced_afterwards, run, where

WIDTH, LAYERS = 8, 3
BATCH = jax.random.normal(jax.random.key(0), (16, WIDTH))


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        z = nn.Dense(2 * WIDTH, dtype=jnp.bfloat16)(nn.LayerNorm()(h))
        return h + nn.Dense(WIDTH, dtype=jnp.bfloat16)(nn.gelu(z)).astype(h.dtype), None


class Model(nn.Module):
    remat: bool = False
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(
            block, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=LAYERS
        )
        h, _ = layers(name="layers")(nn.Dense(WIDTH, name="first")(x), None)
        return nn.Dense(3, name="head")(h)


def compare(loss, params):
    seen = []
    got = run(intercepted(loss, seen=seen), "shard_map", params, BATCH)
    expected = run(reduced_afterwards(loss), "shard_map", params, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    return where(seen[0], params)


@pytest.mark.parametrize(("remat", "axis"), [(False, 0), (True, 0), (False, 1)])
def test_linen_scan(remat, axis):
    model = Model(remat, axis)
    params = model.init(jax.random.key(1), BATCH)["params"]
    found = compare(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2), params)
    in_loop = {path for path, words in found.items() if words == "loop 0"}
    assert in_loop == {path for path in found if path.startswith("layers/")}
    assert len(in_loop) == 6


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h):
        return h + jnp.tanh(self.dense(h))


class Stack(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(h, layer):
            return layer(h)

        return self.head(forward(x, self.layers))


def test_nnx_scan():
    graph, params = nnx.split(Stack(nnx.Rngs(0)))
    found = compare(lambda p, x: jnp.mean(nnx.merge(graph, p)(x) ** 2), params)
    in_loop = {path for path, words in found.items() if words == "loop 0"}
    assert in_loop == {path for path in found if path.startswith("layers/")}
    assert len(in_loop) == 2
