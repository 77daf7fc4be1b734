"""What a pair is: one model, written in flax and in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from benchmarks.pairs import convert


class Pair(NamedTuple):
    """One model in both frameworks, float32, parameter for parameter the same.

    Attributes:
      name: for results, sizes included: ``"resnet50:pixels=64"``.
      module: the flax linen module.
      loss_fn: for fdp: ``(params, batch) -> loss``, or, where ``model_state`` is, ``(params, batch, *, model_state) ->
        (loss, model_state)``. A mean over the examples.
      example: ``batch`` leaves that ``module`` is called with, in order.
      batch: ``(examples, seed) -> {name: array}``, NumPy, images ``[n, height, width, channels]``, made up unless the
        model's module says otherwise. Both frameworks get this one.
      torch_module: ``() -> torch.nn.Module`` in training mode, with torch's own initial values.
      torch_loss: ``(module, torch batch) -> loss``; ``module`` may be wrapped in DDP.
      learning_rate: SGD's. Moves parameters by about a thousandth of their norm a step: enough for float32 to show
        whether two updates agree, too little to spoil a long run on made-up data.
      update_tolerance: relative difference between the frameworks' first updates that float32 leaves.
      has_model_state: whether there are batch statistics.
      initial: ``(shapes, seed) -> arrays``, NumPy.
    """

    name: str
    module: nn.Module
    loss_fn: Callable[..., Any]
    example: tuple[str, ...]
    batch: Callable[[int, int], dict[str, np.ndarray]]
    torch_module: Callable[[], Any]
    torch_loss: Callable[[Any, dict[str, Any]], Any]
    learning_rate: float
    update_tolerance: float = 1e-3
    has_model_state: bool = False
    initial: Callable[[Any, int], Any] = convert.initial

    def shapes(self) -> tuple[Any, Any]:
        """``(params, model_state)`` as shapes; ``model_state`` is None where there is none. Nothing is computed."""
        batch = self.batch(1, 0)
        inputs = [jax.ShapeDtypeStruct(batch[k].shape, batch[k].dtype) for k in self.example]
        made = jax.eval_shape(self.module.init, jax.random.key(0), *inputs)
        return made["params"], made.get("batch_stats")

    def init(self, seed: int = 0) -> tuple[Any, Any]:
        """``(params, model_state)`` as NumPy arrays, the same on every rank."""
        params, model_state = self.shapes()
        return tuple(None if x is None else self.initial(x, seed) for x in (params, model_state))

    def full_loss(self, params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, Any]:
        """``(loss, model_state)`` whether or not there is model state."""
        if not self.has_model_state:
            return self.loss_fn(params, batch), None
        return self.loss_fn(params, batch, model_state=model_state)

    def to_torch(self, params: Any, model_state: Any = None) -> dict[str, Any]:
        """The ``state_dict`` of ``torch_module()`` with these values."""
        return convert.to_torch(params, model_state)

    def named(self, params: Any, model_state: Any = None) -> dict[str, np.ndarray]:
        """The same in NumPy, without torch; gradients too."""
        return convert.named(params, model_state)

    def torch_batch(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """``batch`` as ``torch_loss`` takes it."""
        return convert.torch_batch(batch)
