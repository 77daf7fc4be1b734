"""BERT for pre-training (Devlin et al., "BERT", 2018): masked words and the next sentence.

BERT-base has 110,106,428 parameters: 109,482,240 in embeddings, layers and pooler, the rest in the two heads; the
decoder of the first is the word embedding. No dropout, so that both frameworks compute the same numbers, and no
padding. The head sees the masked places only, 15 % of them, as in the original.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.pairs import convert
from benchmarks.pairs.pair import Pair

EPSILON = 1e-12
MASKED = 0.15

_norm = functools.partial(nn.LayerNorm, epsilon=EPSILON)
_gelu = functools.partial(nn.gelu, approximate=False)


class Layer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]

        def heads(name: str) -> jax.Array:
            y = nn.Dense(width, name=name)(x)
            return y.reshape(*x.shape[:-1], self.heads, width // self.heads)

        y = jax.nn.dot_product_attention(heads("query"), heads("key"), heads("value"))
        x = _norm(name="norm1")(x + nn.Dense(width, name="out")(y.reshape(x.shape)))
        y = nn.Dense(width, name="down")(_gelu(nn.Dense(4 * width, name="up")(x)))
        return _norm(name="norm2")(x + y)


class BERT(nn.Module):
    layers: int
    width: int
    heads: int
    words: int
    places: int

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segments: jax.Array, masked: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Logits of the words at the places ``masked``, and of the second sentence being the next."""
        word = nn.Embed(self.words, self.width, name="word")
        x = word(tokens) + nn.Embed(2, self.width, name="segment")(segments)
        x = x + nn.Embed(self.places, self.width, name="place")(jnp.arange(tokens.shape[1]))
        x = _norm(name="norm")(x)
        for i in range(self.layers):
            x = Layer(self.heads, name=f"layers_{i}")(x)
        y = jnp.take_along_axis(x, masked[..., None], axis=1)
        y = _norm(name="transform_norm")(_gelu(nn.Dense(self.width, name="transform")(y)))
        logits = word.attend(y) + self.param("words_bias", nn.initializers.zeros, (self.words,))
        pooled = nn.tanh(nn.Dense(self.width, name="pooler")(x[:, 0]))
        return logits, nn.Dense(2, name="next")(pooled)


def bert(
    length: int = 128,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    words: int = 30522,
    places: int = 512,
) -> Pair:
    """``length`` tokens an example, ``places`` that the table of positions has; BERT-base unless told otherwise."""
    if length > places:
        raise ValueError(f"expected at most {places} tokens an example, got length={length}")
    if width % heads:
        raise ValueError(
            f"expected a width that divides by the heads, got width={width}, heads={heads}"
        )
    module = BERT(layers, width, heads, words, places)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        inputs = (batch["tokens"], batch["segments"], batch["masked"])
        logits, following = module.apply({"params": params}, *inputs)
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(logits, batch["labels"]).mean() + entropy(following, batch["next"]).mean()

    def batch(examples: int, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        count = max(1, round(MASKED * length))
        order = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (examples, 1)), axis=1)
        split = rng.integers(1, length, (examples, 1))
        return {
            "tokens": rng.integers(0, words, (examples, length), np.int32),
            "segments": (np.arange(length) >= split).astype(np.int32),
            "masked": np.sort(order[:, :count], axis=1),
            "labels": rng.integers(0, words, (examples, count), np.int32),
            "next": rng.integers(0, 2, examples, np.int32),
        }

    def torch_module() -> Any:
        from benchmarks.pairs.in_torch import bert as in_torch

        return in_torch.BERT(layers, width, heads, words, places)

    def torch_loss(model: Any, batch: Any) -> Any:
        from torch.nn import functional

        logits, following = model(batch["tokens"], batch["segments"], batch["masked"])
        words_loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return words_loss + functional.cross_entropy(following, batch["next"])

    sizes = f"length={length},layers={layers},width={width},heads={heads},words={words}"
    return Pair(
        f"bert:{sizes},places={places}",
        module,
        loss_fn,
        ("tokens", "segments", "masked"),
        batch,
        torch_module,
        torch_loss,
        learning_rate=0.004,
        initial=functools.partial(convert.initial, std=0.02),
    )
