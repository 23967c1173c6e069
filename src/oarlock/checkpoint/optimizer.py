"""Optimizer, scheduler and random numbers, as files and back.

Everything is stored under the names of parameters, nothing by rank or by position.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oarlock.checkpoint.tensorfiles import Taker, pack, unpack, write_tensors
from oarlock.engine.names import named_parameters
from oarlock.errors import CheckpointError

OPTIMIZER = "optimizer.safetensors"
SCHEDULER = "scheduler.safetensors"

# How to compute, not what: these follow the device, so the present optimizer's stay.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def _group_names(engine: Any) -> list[list[str]]:
    """The names of the model's parameters in each group, whole or in slices."""
    names = {id(p): n for n, p in named_parameters(engine.model)}
    return [[names[id(p)] for p in group] for group in engine.param_groups()]


def optimizer_bytes(engine: Any) -> int:
    """About how much disk space the optimizer's state takes, all ranks' slices together."""
    own = sum(
        t.numel() * t.element_size()
        for entry in engine.optimizer.state.values()
        if isinstance(entry, dict)
        for t in entry.values()
        if isinstance(t, Tensor)
    )
    return own * (engine.world.size if engine.sharding else 1)


def write_optimizer(
    engine: Any, whole: dict[str, dict[str, Any]] | None, folder: Path
) -> dict[str, Any]:
    """Write the optimizer's tensors as '<parameter>/<key>'; returns the rest as JSON.

    ``whole``: the state by name, where the optimizer itself holds slices only.
    """
    optimizer = engine.optimizer
    state = optimizer.state_dict()
    groups = _group_names(engine)
    names = [name for group in groups for name in group]
    tensors: dict[str, Tensor] = {}
    packed_groups = []
    for i, (group, members) in enumerate(zip(state["param_groups"], groups, strict=True)):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        packed = pack(options, f"group {i}", OPTIMIZER, tensors)
        packed_groups.append({"names": members, "options": packed})
    states = {n: pack(v, n, OPTIMIZER, tensors) for n, v in (whole or {}).items()}
    shared = {}
    for key, value in state["state"].items():
        if isinstance(key, int):
            if whole is None:
                states[names[key]] = pack(value, names[key], OPTIMIZER, tensors)
        else:
            shared[str(key)] = pack(value, f"shared/{key}", OPTIMIZER, tensors)
    if tensors:
        write_tensors(folder / OPTIMIZER, tensors)
    kind = type(optimizer).__name__
    return {"type": kind, "groups": packed_groups, "state": states, "shared": shared}


def check_optimizer(engine: Any, described: dict[str, Any], source: str) -> None:
    """CheckpointError where the optimizer is of another class or groups parameters otherwise."""
    kind = type(engine.optimizer).__name__
    if kind != described["type"]:
        raise CheckpointError(
            f"{source} was saved with {described['type']}, this run uses {kind}: the optimizer's "
            f"state does not fit.\nUse {described['type']}, or start a new run from the weights."
        )
    there = {n: i for i, g in enumerate(described["groups"]) for n in g["names"]}
    here = {n: i for i, group in enumerate(_group_names(engine)) for n in group}
    partner: dict[int, int] = {}
    for name in (*here, *there):
        if name not in here or name not in there:
            holder = "the checkpoint's" if name in there else "this run's"
            raise CheckpointError(
                f"{source} does not fit the optimizer: only {holder} holds {name}.\nFreeze and "
                "group the parameters as in the run that saved this."
            )
        if partner.setdefault(here[name], there[name]) != there[name]:
            raise CheckpointError(
                f"{source} groups the optimizer's parameters otherwise: {name} is in group "
                f"{there[name]} there and in group {here[name]} here.\nBuild the groups as in the "
                "run that saved this."
            )
    if len(set(partner.values())) != len(partner):
        raise CheckpointError(
            f"{source} has {len(described['groups'])} groups of parameters in its optimizer, this "
            f"run has {len(partner)}.\nBuild the groups as in the run that saved this."
        )


def read_optimizer(engine: Any, described: dict[str, Any], take: Taker) -> None:
    """Put the stored state and the groups' options (learning rates and so on) back.

    Every rank receives every tensor, one after the other, and keeps its piece of it.
    """
    optimizer, slices = engine.optimizer, engine.exchange.slices
    whole = dict(named_parameters(engine.model))
    names = {id(slices.piece(n) if slices and slices.owns(n) else p): n for n, p in whole.items()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    index = {names[id(p)]: i for i, p in enumerate(held)}
    there = {name: g["options"] for g in described["groups"] for name in g["names"]}
    restored = []
    for group, members in zip(optimizer.param_groups, _group_names(engine), strict=True):
        options = {k: v for k, v in group.items() if k != "params"}
        if members:
            stored = unpack(there[members[0]], take.new)
            options |= {k: v for k, v in stored.items() if k not in _IMPLEMENTATION}
        restored.append({**options, "params": [index[names[id(p)]] for p in group["params"]]})
    state: dict[Any, Any] = {}
    for name, packed in described["state"].items():
        device = whole[name].device

        def at_home(d: dict[str, Any], device: torch.device = device, name: str = name) -> Tensor:
            # PyTorch keeps the step count on the host, and moves it itself where it does not
            key = str(d["tensor"]).rpartition("/")[2]
            tensor = take.new(d, "cpu" if key == "step" else device)
            return slices.cut(name, key, tensor) if slices and slices.owns(name) else tensor

        entry = unpack(packed, at_home)
        if name in index:
            state[index[name]] = entry
    state |= {key: unpack(packed, take.new) for key, packed in described["shared"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": restored})
    # load_state_dict casts to the parameter's dtype; the state keeps its own
    for i, stored in state.items():
        now = optimizer.state[held[i]] if isinstance(i, int) else {}
        for key, value in stored.items() if now else ():
            if isinstance(value, Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)


def write_scheduler(scheduler: Any, folder: Path) -> dict[str, Any] | None:
    """The scheduler's state as JSON (and its tensors, if it has any, in a file)."""
    if scheduler is None:
        return None
    tensors: dict[str, Tensor] = {}
    packed = pack(scheduler.state_dict(), "scheduler", SCHEDULER, tensors)
    if tensors:
        write_tensors(folder / SCHEDULER, tensors)
    return {"type": type(scheduler).__name__, "state": packed}


def check_scheduler(scheduler: Any, described: dict[str, Any] | None, source: str) -> None:
    """CheckpointError where the scheduler is of another class, or only one side has one."""
    there = described["type"] if described else "no scheduler"
    here = type(scheduler).__name__ if scheduler is not None else "no scheduler"
    if there != here:
        raise CheckpointError(
            f"{source} was saved with {there}, this run has {here}.\n"
            "Use the same learning-rate scheduler as the run that saved this."
        )


# -- random numbers ----------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of torch (host and device), ``random`` and NumPy, as JSON."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "python": [version, list(numbers), gauss],
    }
    if device.type in ("cuda", "xpu", "mps"):
        generator = torch.get_device_module(device)
        numbers_ = generator.get_rng_state(*_at(device))
        state[device.type] = bytes(numbers_.cpu().tolist()).hex()
    if "numpy.random" in sys.modules:
        kind, keys, *rest = sys.modules["numpy.random"].get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back where :func:`random_state` saw them."""
    torch.set_rng_state(_from_hex(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type in state:
        generator = torch.get_device_module(device)
        generator.set_rng_state(_from_hex(state[device.type]), *_at(device))
    if "numpy" in state and "numpy.random" in sys.modules:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def _at(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
