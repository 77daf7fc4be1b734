"""`benchmarks.emulate` in torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Pause(torch.autograd.Function):
    """Lets a number through as it is after a while, and its gradient too; that times the number is every weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        forward: float,
        backward: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.shapes, ctx.seconds = (weight.shape, bias.shape), backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        (x,), (given,) = ctx.saved_tensors, outputs
        time.sleep(ctx.seconds)
        value = float(given * x)
        weight, bias = (torch.full(shape, value) for shape in ctx.shapes)
        return given, weight, bias, None, None


class Asleep(nn.Module):
    """The layers of ``module`` under their own names, without their arithmetic."""

    def __init__(self, module: nn.Module, forward: Sequence[float], backward: Sequence[float]):
        super().__init__()
        self.layers = module.layers
        self.seconds = list(zip(forward, backward, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = x[:, 0].square().mean()
        # The first layer's input needs a gradient as the others' do, or torch would leave its backward out.
        for layer, seconds in zip(self.layers, self.seconds, strict=True):
            number = Pause.apply(number, layer.weight, layer.bias, *seconds)
        return number.square() / 2
