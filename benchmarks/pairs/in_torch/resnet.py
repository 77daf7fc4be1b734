"""`benchmarks.pairs.resnet` in torch, with torchvision's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, features: int, stride: int):
        super().__init__()
        outputs = 4 * features
        self.conv1, self.bn1 = _conv(inputs, features, 1), nn.BatchNorm2d(features)
        self.conv2, self.bn2 = _conv(features, features, 3, stride), nn.BatchNorm2d(features)
        self.conv3, self.bn3 = _conv(features, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            shorter = _conv(inputs, outputs, 1, stride)
            self.downsample = nn.Sequential(shorter, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(y))
        return ((x if self.downsample is None else self.downsample(x)) + y).relu()


class ResNet(nn.Module):
    def __init__(self, blocks: Sequence[int], classes: int):
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        inputs = 64
        for stage, count in enumerate(blocks):
            features, made = 64 * 2**stage, []
            for i in range(count):
                made.append(Bottleneck(inputs, features, 2 if stage and not i else 1))
                inputs = 4 * features
            self.add_module(f"layer{stage + 1}", nn.Sequential(*made))
        self.stages = len(blocks)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.bn1(self.conv1(x)).relu())
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))
