"""The guard: were the replicas built alike, and are they still identical?"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from oarlock.engine.dtensors import whole
from oarlock.engine.names import named_state
from oarlock.errors import DivergedError, SetupError
from oarlock.world import World

log = logging.getLogger("oarlock")
_CHUNK = 1 << 18  # elements hashed at a time: the int64 copies stay in cache
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit fingerprint of a tensor's bits. 0-dim int64, on the tensor's device.

    A position-weighted sum of its words modulo 2^64 with odd weights: changing any one element
    always changes it, and whole-number sums are the same on every device and in any order.
    """
    flat = whole(tensor.detach()).contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    size = flat.element_size()
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32))
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        total = total * _MULTIPLIER + (part * weights[: part.numel()]).sum()
    return total


_cache: dict[torch.device, Tensor] = {}


def _weights(device: torch.device) -> Tensor:
    if device not in _cache:
        index = torch.arange(_CHUNK, dtype=torch.int64)
        mixed = (index ^ (index << 21)) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
        _cache[device] = (mixed | 1).to(device)
    return _cache[device]


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """The fingerprint of each tensor, read to the host in one go."""
    if not tensors:
        return []
    return torch.stack([fingerprint(t).to(tensors[0].device) for t in tensors]).tolist()


def combine(values: Sequence[int]) -> str:
    """One 16-digit hexadecimal fingerprint of many."""
    return hashlib.blake2b(json.dumps(list(values)).encode(), digest_size=8).hexdigest()


def check_replicas(model: nn.Module, world: World, last_good: int) -> str:
    """Compare parameters and buffers over the ranks. Collective. Returns their fingerprint.

    ``last_good``: the step after which the replicas were last seen alike.

    Raises:
        DivergedError: names the first tensor that differs, the odd rank and the step.
    """
    state = named_state(model)
    mine = fingerprints([t for _, t in state])
    whole = combine(mine)
    everyone = world.gather(whole)
    if len(set(everyone)) == 1:
        return whole
    table = world.gather(mine)
    column = next(i for i in range(len(state)) if len({row[i] for row in table}) > 1)
    values = [row[column] for row in table]
    common, votes = Counter(values).most_common(1)[0]
    odd = [r for r, v in enumerate(values) if v != common]
    if votes * 2 <= len(values):  # no majority: take rank 0's as the measure
        odd = [r for r, v in enumerate(values) if v != values[0]]
    differ = sum(len({row[i] for row in table}) > 1 for i in range(len(state)))
    hosts = world.gather(world.host)
    names = ", ".join(f"rank {r} ({hosts[r]})" for r in odd)
    raise DivergedError(
        f"Replicas differ after step {world.steps}: {state[column][0]} on {names} is not what the "
        f"other ranks hold ({differ} of {len(state)} tensors differ).\n"
        f"They were alike after step {last_good}: continue from a checkpoint saved at or before "
        "it; later ones hold weights that no single process would have.\n"
        "Likely causes: weights changed outside engine.step (an own optimizer.step, a callback on "
        "one rank), a buffer that a custom operation writes, or a faulty device."
    )


def align_replicas(model: nn.Module, world: World) -> list[str]:
    """At the start: where ranks' parameters or buffers differ, take rank 0's. Names of those."""
    if world.size == 1:
        return []
    state = named_state(model)
    table = world.gather(fingerprints([t for _, t in state]))
    differ = [i for i in range(len(state)) if len({row[i] for row in table}) > 1]
    for i in differ:
        world.broadcast_tensor(state[i][1])
    names = [state[i][0] for i in differ]
    if names and world.is_main:
        log.warning(
            "%d of %d tensors differed between the ranks at the start and were taken from rank 0 "
            "(%s%s).",
            len(names),
            len(state),
            ", ".join(names[:3]),
            ", …" if len(names) > 3 else "",
        )
    return names


def compare_construction(description: list[str], world: World) -> None:
    """Compare what each rank built, line by line, before anything depends on it. Collective.

    Raises:
        SetupError: on every rank, with the first line that differs, side by side.
    """
    world.announce("construction").wait()
    digest = hashlib.blake2b("\n".join(description).encode(), digest_size=16).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return
    everyone: list[list[str]] = world.gather(description)
    length = max(map(len, everyone))
    for i in range(length):
        lines = [d[i] if i < len(d) else "(nothing more)" for d in everyone]
        if len(set(lines)) > 1:
            rows = "\n".join(f"  rank {r}: {line}" for r, line in enumerate(lines))
            raise SetupError(
                f"The ranks built different things:\n{rows}\n"
                "Model, optimizer and settings must be made by the same code on every rank."
            )
