"""The memory ladder: which rung, and the exchange that goes with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from oarlock.engine.exchange import Alone, Exchange
from oarlock.engine.owned import Owned
from oarlock.world import World


def build(
    sharding: int | str,
    world: World,
    parameters: Sequence[tuple[str, Parameter]],
    optimizer: torch.optim.Optimizer,
    bucket_bytes: int,
    overlap: bool,
) -> tuple[int, Alone]:
    """The rung and its exchange. In a world of one every rung is the same: rung 0."""
    if world.size == 1:
        return 0, Alone(parameters)
    rung = 0 if sharding == "auto" else int(sharding)
    if rung == 0:
        return 0, Exchange(world, parameters, bucket_bytes, overlap)
    return rung, Owned(world, parameters, optimizer, bucket_bytes, overlap, rung)
