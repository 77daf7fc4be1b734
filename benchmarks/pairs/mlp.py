"""Dense layers with ReLUs between them and a squared error: equal layers, and very unequal ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.pairs.pair import Pair

EQUAL = (1024,) * 13
UNEQUAL = (784, 2048, 1024, 1536, 512, 2048, 768, 1024, 10)


class MLP(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, width in enumerate(self.widths):
            x = nn.Dense(width, name=f"layers_{i}")(nn.relu(x) if i else x)
        return x


def mlp(widths: tuple[int, ...] = EQUAL) -> Pair:
    """Widths count from the input."""
    module = MLP(tuple(widths[1:]))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((module.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    def batch(examples: int, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        shapes = {"x": (examples, widths[0]), "y": (examples, widths[-1])}
        return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def torch_module() -> Any:
        from benchmarks.pairs.in_torch import mlp as in_torch

        return in_torch.MLP(widths)

    def torch_loss(model: Any, batch: Any) -> Any:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    name = "mlp:widths=" + "-".join(map(str, widths))
    return Pair(name, module, loss_fn, ("x",), batch, torch_module, torch_loss, learning_rate=0.01)


def unequal(widths: tuple[int, ...] = UNEQUAL) -> Pair:
    """The same, with layers from 5 thousand to 2 million parameters as they come."""
    return mlp(widths)
