"""Devices: which one a rank computes on, and which backend speaks for it."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from oarlock import words
from oarlock.errors import WorldError


def device_for(local_rank: int, local_size: int) -> torch.device:
    """This rank's device: the accelerator of its number, made current; the CPU without one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    if count == 1 and local_size > 1 and _bound_by_launcher():
        index = 0  # the launcher shows each rank its own device only
    elif local_size > count or local_rank >= count:
        raise WorldError(
            f"{max(local_size, local_rank + 1)} ranks on {socket.gethostname()}, but only "
            f"{words.many(count, f'{kind.type} device')}.\n"
            f"Start {words.many(count, 'rank')} on this machine (`oarlock launch -n {count} "
            "…`), or pass join(device='cpu')."
        )
    else:
        index = local_rank
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def _bound_by_launcher() -> bool:
    return "SLURM_STEP_GPUS" in os.environ or "SLURM_GPUS_PER_TASK" in os.environ


def backend_for(device: torch.device) -> str:
    """The backend that carries tensors of ``device``; gloo where it has none of its own."""
    if device.type == "cuda" and dist.is_nccl_available():
        return "nccl"
    if device.type == "xpu" and dist.is_xccl_available():
        return "xccl"
    return "gloo"


def device_identity(device: torch.device) -> str:
    """What tells one device of a machine from another; '' where ranks may share it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return "" if device.type == "cpu" else str(device)


def memory_of(device: torch.device) -> int:
    """All of a device's memory in bytes; the machine's own for the CPU."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
