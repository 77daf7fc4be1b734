"""`benchmarks.pairs.digits` in torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")  # flax's default


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden, self.out = nn.Linear(2 * 2 * 64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _gelu(self.conv2(_gelu(self.conv1(x))))
        x = _gelu(self.conv3(functional.avg_pool2d(x, 2)))
        x = functional.avg_pool2d(x, 2)
        # Channels last, as flax flattens: the next layer's weights then mean the same in both.
        x = x.permute(0, 2, 3, 1).flatten(1)
        return self.out(_gelu(self.hidden(x)))
