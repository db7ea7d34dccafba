"""The GPT and the ConvNet of tfdist.models, written for PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A pre-norm transformer block with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.size = width // heads
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.qkv = _linear(width, 3 * width)
        self.out = _linear(width, width, 0.02 / math.sqrt(2 * layers))
        self.norm2 = nn.LayerNorm(width, eps=1e-5)
        self.up = _linear(width, 4 * width)
        self.down = _linear(4 * width, width, 0.02 / math.sqrt(2 * layers))

    def forward(self, x):
        """[batch, time, width] to the same."""
        # Heads come first in the columns, so a slice of these has whole heads.
        fused = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.size))
        query, key, value = fused.permute(3, 0, 2, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(hidden)


class GPT(nn.Module):
    """A part of the decoder, or all of it.

    Args:
        sizes: Layers, width, heads, tokens and vocabulary.
        blocks: Which blocks; with the first comes the embedding, with the last the head.
        tied: Whether the head's kernel is the embedding's.
    """

    def __init__(
        self, sizes: Mapping[str, int], blocks: Iterable[int] | None = None, tied: bool = True
    ):
        super().__init__()
        layers, width, vocabulary = sizes["layers"], sizes["width"], sizes["vocabulary"]
        chosen = range(layers) if blocks is None else list(blocks)
        self.embedding: nn.Embedding | None = None
        self.positions: nn.Parameter | None = None
        self.norm: nn.LayerNorm | None = None
        self.head: nn.Linear | None = None
        if 0 in chosen:
            self.embedding = nn.Embedding(vocabulary, width)
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.positions = nn.Parameter(0.02 * torch.randn(sizes["tokens"], width))
        self.blocks = nn.ModuleList(Block(width, sizes["heads"], layers) for _ in chosen)
        if layers - 1 in chosen:
            self.norm = nn.LayerNorm(width, eps=1e-5)
            self.head = nn.Linear(width, vocabulary, bias=False)
            nn.init.normal_(self.head.weight, std=0.02)
            if tied and self.embedding is not None:
                self.head.weight = self.embedding.weight

    def forward(self, x):
        """Tokens, or what the block before gave, to logits, or to what the next block takes."""
        if self.embedding is not None:
            x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class ConvNet(nn.Sequential):
    """Two blocks of two convolutions, a hidden layer and logits."""

    def __init__(self, sizes: Mapping[str, int]):
        layers: list[nn.Module] = []
        before, side = 3, sizes["side"]
        for filters in (32, 64):
            for _ in range(2):
                layers += [
                    nn.Conv2d(before, filters, 3, padding=1, bias=False),
                    nn.BatchNorm2d(filters, eps=1e-3, momentum=0.1),
                    nn.ReLU(inplace=True),
                ]
                before = filters
            layers.append(nn.MaxPool2d(2))
            side //= 2
        layers += [
            nn.Flatten(),
            nn.Linear(before * side * side, 128),
            nn.ReLU(inplace=True),
            nn.Dropout(0.25),
            nn.Linear(128, sizes["classes"]),
        ]
        super().__init__(*layers)


def loss_of(logits, labels):
    """The mean cross-entropy."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _linear(inputs: int, outputs: int, stddev: float = 0.02) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=stddev)
    nn.init.zeros_(layer.bias)
    return layer
