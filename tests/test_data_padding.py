"""Partial batches filled up: their weighted loss is that of what was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp.data import pad_batch


def make(examples, seed=0):
    x = np.random.default_rng(seed).normal(size=(examples, 3)).astype(np.float32)
    return {"x": x, "label": np.arange(examples, dtype=np.int32)}


@given(st.integers(1, 20), st.integers(0, 20))
def test_examples_come_first_and_padding_counts_nothing(examples, more):
    batch = make(examples)
    padded, mask = pad_batch(batch, examples + more)
    assert mask.dtype == np.float32
    np.testing.assert_array_equal(mask, [1] * examples + [0] * more)
    for name, x in padded.items():
        assert x.dtype == batch[name].dtype
        assert isinstance(x, np.ndarray)
        np.testing.assert_array_equal(x[:examples], batch[name])
        np.testing.assert_array_equal(x[examples:], np.repeat(batch[name][:1], more, axis=0))


@pytest.mark.parametrize(("examples", "size"), [(1, 8), (7, 8), (8, 8), (9, 16)])
def test_multiple_of(examples, size):
    _, mask = pad_batch(make(examples), multiple_of=8)
    assert (mask.shape, mask.sum()) == ((size,), examples)


def test_p23_the_weighted_gradient_is_that_of_the_examples_given():
    def loss(w, x, mask):  # not defined at zero: what padding by zeros would do to it is NaN
        direction = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        return jnp.sum((direction @ w - 1) ** 2 * mask) / jnp.sum(mask)

    batch = make(13)
    padded, mask = pad_batch(batch, 16)
    w = jnp.arange(3.0)
    got = jax.value_and_grad(loss)(w, padded["x"], mask)
    expected = jax.value_and_grad(loss)(w, batch["x"], np.ones(13, np.float32))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)
    zeros = {"x": np.concatenate([batch["x"], np.zeros((3, 3), np.float32)])}
    assert np.isnan(jax.grad(loss)(w, zeros["x"], mask)).any()


def test_jax_arrays_and_keys_stay_jax_arrays():
    batch = {"x": jnp.ones((3, 2), jnp.bfloat16), "key": jax.random.split(jax.random.key(0), 3)}
    padded, _ = pad_batch(batch, 4)
    assert padded["x"].dtype == jnp.bfloat16
    assert padded["key"].shape == (4,)
    assert jax.random.key_data(padded["key"])[3].tolist() == [
        *jax.random.key_data(batch["key"])[0].tolist()
    ]
