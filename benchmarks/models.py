"""Models that the benchmarks share: a plain GPT in three sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """A GPT's size. ``tokens``: tokens a rank sees in one step."""

    name: str
    width: int
    layers: int
    vocabulary: int
    tokens: int = 512


SIZES = (
    Size("1.8M", 128, 4, 8192),
    Size("13.8M", 384, 6, 8192),
    Size("44M", 640, 8, 8192),
)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).unbind(2)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with tied embeddings. Input: token ids [batch, time]; output: logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, max(1, size.width // 64)) for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for p in self.parameters():  # small, as for any GPT: large tied embeddings saturate
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_sum(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
    """Sum of the next-token losses over ``ids`` [batch, time + 1], and how many there are."""
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return loss, ids[:, 1:].numel()
