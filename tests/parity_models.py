"""Small models of every kind that must train on many ranks as on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Answer:
    """What a module may return besides tensors."""

    y: Tensor
    hidden: Tensor


class MLP(nn.Module):
    """Two layers; ``returns`` a tensor, tuple, dict or dataclass."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.inner, self.outer, self.returns = nn.Linear(6, 8), nn.Linear(8, 3), returns

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.inner(x))
        y = self.outer(hidden)
        answers = {
            "tensor": y,
            "tuple": (y, hidden),
            "dict": {"hidden": hidden, "y": y},
            "dataclass": Answer(y, hidden),
        }
        return answers[self.returns]


class Router(nn.Module):
    """Each row goes through one expert, so a micro-batch uses only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(5))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        out = hidden.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            chosen = route == i
            if chosen.any():
                out = out.index_add(0, chosen.nonzero()[:, 0], expert(hidden[chosen]))
        return out

    @staticmethod
    def loss(model: nn.Module, data: Any) -> tuple[Tensor, int]:
        """Expert 0, 1, 2 for rows 0 to 29; 3 for row 30 alone; 4 never."""
        out = model(data[0], torch.div(data[2], 10, rounding_mode="floor"))
        return (out - data[1]).square().sum(), len(out)


class LM(nn.Module):
    """A bag of earlier tokens predicts the next one; the head may be tied to the embedding."""

    def __init__(self, tied: bool = True, frozen: bool = False, vocabulary: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.embedding.requires_grad_(False)
            self.inner.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        seen = self.embedding(ids).cumsum(1)
        return self.head(torch.tanh(self.inner(seen)))


class DigitsNet(nn.Module):
    """A CNN for 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(6, 6, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(54, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class BatchNormNet(nn.Module):
    """A CNN with BatchNorm: ``twice`` calls one layer two times, ``frozen`` keeps it as it is."""

    def __init__(
        self, momentum: float | None = 0.1, twice: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6, momentum=momentum)
        self.again = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.other = nn.BatchNorm2d(6, momentum=momentum)
        self.head = nn.Linear(6 * 64, 10)
        self.twice = twice
        if frozen:
            self.norm.running_mean.add_(0.3)  # type: ignore[union-attr]
            self.norm.eval()
            self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        second = self.norm if self.twice else self.other
        x = torch.tanh(second(self.again(x)))
        return self.head(x.flatten(1))


class Buffered(MLP):
    """Buffers of its own: a counter, values that each forward overwrites, one that rests."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(5))
        self.register_buffer("last", torch.zeros(6))
        self.register_buffer("anew", torch.zeros(6))
        self.register_buffer("rests", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += len(x)
            self.last.copy_(x.mean(0))
            self.anew = x.amax(0)
        return super().forward(x + self.rests[1])


class Checkpointed(nn.Module):
    """A shared layer, run three times under activation checkpointing."""

    def __init__(self, use_reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.shared, self.outer = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout, self.use_reentrant = nn.Dropout(dropout), use_reentrant

    def _block(self, h: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.shared(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        for _ in range(3):
            h = checkpoint(self._block, h, use_reentrant=self.use_reentrant)
        return self.outer(h)


class Dropping(MLP):
    """Dropout between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(nn.functional.dropout(torch.tanh(self.inner(x)), 0.4, self.training))


class Mixed(nn.Module):
    """One layer in float32, one in float64: they cannot share a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)).double()).float()


class Odd(nn.Module):
    """A parameter without dimensions, one transposed in memory, one with an empty dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(3, 6).t())  # strides (1, 6)
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * torch.tanh(x @ self.weight)
        return torch.cat([y, self.nothing])


def llama(tied: bool = True) -> LlamaForCausalLM:
    """A real architecture at a toy size."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).train()


def llama_lora() -> nn.Module:
    """LoRA with activation checkpointing."""
    model = llama()
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.enable_input_require_grads()
    return adapted.train()
