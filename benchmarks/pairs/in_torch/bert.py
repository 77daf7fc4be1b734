"""`benchmarks.pairs.bert` in torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.pairs.bert import EPSILON


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, EPSILON)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = functional.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x))
        )
        x = self.norm1(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class BERT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, places: int):
        super().__init__()
        self.word, self.segment = nn.Embedding(words, width), nn.Embedding(2, width)
        self.place, self.norm = nn.Embedding(places, width), nn.LayerNorm(width, EPSILON)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.transform, self.transform_norm = (
            nn.Linear(width, width),
            nn.LayerNorm(width, EPSILON),
        )
        self.words_bias = nn.Parameter(torch.zeros(words))
        self.pooler, self.next = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(
        self, tokens: torch.Tensor, segments: torch.Tensor, masked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.word(tokens) + self.segment(segments) + self.place(places))
        for layer in self.layers:
            x = layer(x)
        y = x.gather(1, masked[..., None].expand(-1, -1, x.shape[-1]))
        y = self.transform_norm(functional.gelu(self.transform(y)))
        logits = functional.linear(y, self.word.weight, self.words_bias)
        return logits, self.next(self.pooler(x[:, 0]).tanh())
