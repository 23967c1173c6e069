"""The memory ladder: which rung, and the exchange that goes with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter

from oarlock.devices import memory_of
from oarlock.engine import link
from oarlock.engine.elementwise import check_elementwise, why_not_elementwise
from oarlock.engine.exchange import Alone, Exchange
from oarlock.engine.owned import Owned
from oarlock.engine.reproducible import ReproducibleExchange, ReproducibleOwned
from oarlock.engine.sharded import HYBRID, Sharded
from oarlock.world import World

_USABLE = 0.8  # of a device's memory; the rest is for activations and the allocator's gaps


def choose(
    world: World,
    parameters: Sequence[tuple[str, Parameter]],
    optimizer: torch.optim.Optimizer,
) -> int:
    """The rung for 'auto', the same on all ranks. Collective.

    1 where weights, gradients and the slice of the state fit into 80 % of the smallest device's
    memory: it sends no more than 0 and keeps less. Else 2, which sends every micro-batch's
    gradients. 0 where the optimizer needs whole tensors.
    """
    if why_not_elementwise(optimizer):
        return 0
    whole = sum(p.numel() * p.element_size() for _, p in parameters)
    needed = 2 * whole + 2 * whole / world.size  # Adam's two tensors; SGD keeps less
    memory = min(world.gather(memory_of(world.device) / _sharers(world)))
    return 1 if needed <= _USABLE * memory else 2


def _sharers(world: World) -> int:
    """How many ranks take from the same memory."""
    return world.local_size if world.device.type in ("cpu", "mps") else 1


def build(
    sharding: int | str,
    world: World,
    parameters: Sequence[tuple[str, Parameter]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    bucket_mb: float | str,
    overlap: bool,
    reproducible: bool = False,
    shard_blocks: Sequence[type[nn.Module]] | None = None,
) -> tuple[int, Alone]:
    """The rung and its exchange. In a world of one every rung is the same: rung 0."""
    if bucket_mb == "auto":
        trainable = sum(p.numel() * p.element_size() for _, p in parameters)
        bucket_bytes = link.bucket_bytes(world, trainable, reproducible)
    else:
        bucket_bytes = int(float(bucket_mb) * link.MIB)
    if world.size == 1:
        if reproducible:
            return 0, ReproducibleExchange(world, parameters, bucket_bytes, overlap)
        return 0, Alone(parameters)
    if sharding == "auto":
        rung = choose(world, parameters, optimizer)
    else:
        rung = 3 if sharding == HYBRID else int(sharding)
    if rung:
        check_elementwise(optimizer, rung)
    if rung == 3:
        return 3, Sharded(world, model, optimizer, shard_blocks, sharding == HYBRID)
    if rung == 0:
        whole = ReproducibleExchange if reproducible else Exchange
        return 0, whole(world, parameters, bucket_bytes, overlap)
    owned = ReproducibleOwned if reproducible else Owned
    return rung, owned(world, parameters, model, optimizer, bucket_bytes, overlap, rung)
