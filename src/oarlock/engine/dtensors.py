"""Tensors of which a rank holds a part only (DTensors, at sharding 3), beside ordinary ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Does this rank hold only its part of the tensor?"""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Tensor:
    """What this rank holds of it, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """All of it. Collective, where it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def put(target: Any, value: Tensor) -> None:
    """Overwrite a sharded tensor with its part of ``value``, which every rank has whole."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = target.device_mesh, target.placements
    part = distribute_tensor(value, mesh, placements, src_data_rank=None)  # sends nothing
    target.to_local().copy_(part.to_local())
