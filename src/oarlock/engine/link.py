"""How large a bucket should be on the link that the ranks are joined by."""

from __future__ import annotations

import logging
import math
import time

import torch
import torch.distributed as dist

from oarlock.world import World

log = logging.getLogger("oarlock")

MIB = 2**20
# Bytes a second that a link of each class carries, and up to what measured rate it is that class:
# 100 Mbit, 1 and 2.5 Gbit, 10 Gbit or a CPU's memory, cards in one machine. Classes, so that the
# same machines always get the same buckets: their layout decides in what order numbers are added.
CLASSES = ((12e6, 40e6), (120e6, 400e6), (1.2e9, 4e9), (12e9, math.inf))
# Seconds that a message costs besides its bytes, seen as what more and smaller buckets cost a step
# of two ranks on two cores; on a GPU a kernel's launch.
MESSAGE = {"cpu": 1e-3, "cuda": 1e-4}
SMALLEST, LARGEST = MIB // 4, 25 * MIB
_PATIENCE = 0.1  # seconds; a try that takes longer is not followed by a larger one


def bucket_bytes(world: World, model_bytes: int, reproducible: bool = False) -> int:
    """The size of a bucket for a model with so many bytes of trainable weights. Collective.

    In reproducible mode it depends on the model alone.

    What is sent last is hidden behind nothing, which asks for small buckets; each message costs
    something besides its bytes, which asks for few. With a messages' cost of ``a`` seconds, a rate
    of ``r`` and ``s`` bytes in all, ``a·s/b + b/r`` is least at ``b = √(a·r·s)``.
    """
    if reproducible or world.size == 1:
        rate, link = CLASSES[-2][0], ""
    elif all(world.gather(world.local_size == world.size)):
        rate = CLASSES[-1][0] if world.device.type == "cuda" else CLASSES[-2][0]
        link = " (all ranks on one machine)"
    else:
        measured = measure(world)
        rate = next(rate for rate, up_to in CLASSES if measured <= up_to)
        link = f" (the link between the machines carries {measured / 1e6:.0f} MB/s)"
    message = MESSAGE.get(world.device.type, MESSAGE["cpu"])
    size = min(max(int(math.sqrt(message * rate * model_bytes)), SMALLEST), LARGEST)
    if world.is_main and world.size > 1:
        log.info("Buckets of %.1f MiB%s.", size / MIB, link)
    return size


def measure(world: World) -> float:
    """Bytes a second each way that an all-reduce achieves, the same on all ranks. Collective.

    Messages grow until one takes 0.1 s, or has 16 MiB; the best of three of that size counts.
    """
    size, seconds = MIB // 4, 0.0
    while seconds < _PATIENCE and size < 16 * MIB:
        size *= 4
        seconds = min(_seconds(world, size) for _ in range(3 if seconds < _PATIENCE / 4 else 1))
    return 2 * (world.size - 1) / world.size * size / seconds


def _seconds(world: World, size: int) -> float:
    flat = torch.zeros(size // 4, device="cpu" if world.staged else world.device)
    world.barrier()
    started = time.perf_counter()
    world.wait(dist.all_reduce(flat, async_op=True), "measuring the link")
    if flat.is_cuda:
        torch.cuda.synchronize()
    return max(world.gather(time.perf_counter() - started))
