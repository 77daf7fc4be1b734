"""A small convolutional network on real handwritten digits, for what is learned rather than for time.

Smooth all through: a ReLU or a maximum on the edge would make a large difference out of a rounded digit, and the two
frameworks' loss curves could not be compared.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

from benchmarks.pairs.pair import Pair


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Conv(16, (3, 3), name="conv1")(x))
        x = nn.gelu(nn.Conv(32, (3, 3), name="conv2")(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.gelu(nn.Conv(64, (3, 3), name="conv3")(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.gelu(nn.Dense(64, name="hidden")(x.reshape(x.shape[0], -1)))
        return nn.Dense(10, name="out")(x)


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray]:
    """All images, float32 ``[1797, 8, 8, 1]`` from 0 to 1, and labels, int32. Needs scikit-learn (fdp[demo])."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return (found.images[..., None] / 16).astype(np.float32), found.target.astype(np.int32)


def digits() -> Pair:
    """40,394 parameters; ``batch`` draws from the data without repeating an image while there are enough."""
    module = Network()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = module.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def batch(examples: int, seed: int) -> dict[str, np.ndarray]:
        images, labels = data()
        chosen = np.random.default_rng(seed).permutation(len(labels))
        chosen = np.resize(chosen, examples)
        return {"image": images[chosen], "label": labels[chosen]}

    def torch_module() -> Any:
        from benchmarks.pairs.in_torch import digits as in_torch

        return in_torch.Network()

    def torch_loss(model: Any, batch: Any) -> Any:
        from torch.nn import functional

        return functional.cross_entropy(model(batch["image"]), batch["label"])

    return Pair(
        "digits", module, loss_fn, ("image",), batch, torch_module, torch_loss, learning_rate=0.03
    )
