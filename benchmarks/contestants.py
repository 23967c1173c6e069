"""One training step each way: plain PyTorch, DDP, FSDP2, and Oarlock on each rung and in each mode.

All train the same GPT with the same work: forward, backward, clipping to norm 1, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import GPT, Size, loss_sum
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oarlock
from oarlock import Batch, MicroBatch

TIME = 64  # tokens a row


def build(size: Size) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A fresh model and its optimizer, the same on every call."""
    torch.manual_seed(0)
    model = GPT(size)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


class Plain:
    """What one writes for one device; on several ranks: no communication at all."""

    def __init__(self, size: Size, world: oarlock.World) -> None:
        self.model, self.optimizer = build(size)
        self.wrap()

    def wrap(self) -> None:
        self.called: nn.Module = self.model

    def __call__(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        loss, weight = loss_sum(self.called, ids)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        float(loss.detach())


class DDP(Plain):
    """PyTorch's DistributedDataParallel with gradients as bucket views."""

    def wrap(self) -> None:
        self.called = DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class FSDP2(Plain):
    """PyTorch's ``fully_shard`` on each block and on the whole, with its own defaults."""

    def wrap(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.called = self.model


class Oarlock:
    """This engine; keeps each step's waiting time and the bytes."""

    def __init__(self, size: Size, world: oarlock.World, **options: Any) -> None:
        model, optimizer = build(size)
        self.engine = oarlock.DataParallel(model, optimizer, world, clip_norm=1.0, **options)
        self.waits: list[float] = []
        self.bytes = 0

    def __call__(self, ids: Tensor) -> None:
        world, step = self.engine.world, self.engine.steps_done
        part = MicroBatch(world.rank, tuple(range(len(ids))), ids)
        batch = Batch(0, step, world.size, world.size * len(ids), [part])  # as a Loader makes it
        result = self.engine.step(batch, loss_sum)
        self.waits.append(result.wait_seconds)
        self.bytes = result.exchanged_bytes


def oarlock_with(**options: Any) -> Callable[..., Oarlock]:
    """A maker of Oarlock contestants with these options."""
    return lambda size, world: Oarlock(size, world, **options)


MAKERS: dict[str, Callable[..., Any]] = {
    "plain": Plain,
    "DDP": DDP,
    "FSDP2": FSDP2,
    "rung 0": oarlock_with(),
    "rung 1": oarlock_with(sharding=1),
    "rung 2": oarlock_with(sharding=2),
    "reproducible 0": oarlock_with(reproducible=True),
    "reproducible 1": oarlock_with(sharding=1, reproducible=True),
    "reproducible 2": oarlock_with(sharding=2, reproducible=True),
}


def make(name: str, size: Size, world: oarlock.World) -> Any:
    """A contestant by name; "… again" is a second one of the same kind."""
    return MAKERS[name.removesuffix(" again")](size, world)
