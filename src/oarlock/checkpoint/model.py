"""The model's weights and buffers, as files and back into the very same tensors."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oarlock.checkpoint.tensorfiles import (
    Reader,
    Taker,
    as_bytes,
    describe,
    disk_errors,
    plain,
    same_bits,
    write_tensors,
)
from oarlock.engine.dtensors import is_sharded, put
from oarlock.engine.names import clean, named_parameters, named_state
from oarlock.errors import CheckpointError, OarlockError

log = logging.getLogger("oarlock")

WEIGHTS = "model.safetensors"  # all weights of a plain model
TRAINABLE = "trainable.safetensors"  # beside an adapter: the exact trained tensors and buffers
EXTRA = "extra.safetensors"  # what save_pretrained does not write, such as unsaved buffers

Weights = Mapping[str, Tensor]
_known_bases: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def inner_model(model: nn.Module) -> nn.Module:
    """The model that torch.compile wrapped; the model itself where it is not compiled."""
    return getattr(model, "_orig_mod", model)


def is_adapter(model: nn.Module) -> bool:
    """True for a PEFT model: its base is not part of a checkpoint."""
    return bool(getattr(inner_model(model), "peft_config", None))


def is_pretrained(model: nn.Module) -> bool:
    """True for a transformers or PEFT model, which writes a folder of its own kind."""
    inner = inner_model(model)
    return callable(getattr(inner, "save_pretrained", None)) and hasattr(inner, "config")


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers that are stored, and those that the base model brings."""
    state = dict(named_state(model))
    if not is_adapter(model):
        return state, {}
    frozen = {n for n, p in named_parameters(model) if not p.requires_grad}
    # a frozen part of an adapter is not in the base model
    prefix = getattr(getattr(inner_model(model), "base_model", None), "prefix", None)
    base = {n for n in frozen if not (prefix and prefix in n)}
    stored = {n: t for n, t in state.items() if n not in base}
    return stored, {n: t for n, t in state.items() if n in base}


def ties(model: nn.Module) -> dict[str, str]:
    """Other names of tied tensors: the alias, and the name it is stored under."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for walk in (model.named_parameters, model.named_buffers):
        for name, tensor in walk(remove_duplicate=False):
            name = clean(name)
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


def unknown_base(model: nn.Module) -> list[str]:
    """The names of the base model's tensors, if they are still to be hashed, which rank 0 does."""
    base = split_state(model)[1]
    return [] if set(_known_bases.get(model, {})) == set(base) else list(base)


def base_hashes(model: nn.Module, weights: Weights) -> dict[str, str]:
    """A hash of each tensor of the base model; computed once, since they do not change."""
    base = split_state(model)[1]
    known = _known_bases.get(model)
    if known is None or set(known) != set(base):
        known = {}
        for name, tensor in base.items():
            value = plain(weights.get(name, tensor), name)
            digest = hashlib.sha256(str(describe(value)).encode())
            digest.update(as_bytes(value).numpy().data)
            known[name] = digest.hexdigest()
        _known_bases[model] = known
    return known


def model_bytes(model: nn.Module) -> int:
    """About how much disk space the model's files take."""
    size = sum(t.numel() * t.element_size() for t in split_state(model)[0].values())
    return 2 * size if is_adapter(model) else size  # the adapter is there in two forms


def write_model(model: nn.Module, folder: Path, weights: Weights) -> dict[str, Any]:
    """Write the model's files; returns where each tensor is, as JSON.

    ``weights``: the whole tensors, by name, where the model itself holds parts of them.
    """
    stored, base = split_state(model)
    stored = {name: weights.get(name, tensor) for name, tensor in stored.items()}
    where: dict[str, dict[str, Any]] = {}
    own = WEIGHTS
    if is_pretrained(model):
        if _save_pretrained(model, folder, weights):
            own = EXTRA
        if is_adapter(model):
            own = TRAINABLE
        else:
            where = _find_in(folder, stored, ties(model)) if own == EXTRA else {}
    rest = {n: t for n, t in stored.items() if n not in where}
    if rest:
        write_tensors(folder / own, rest)
        where |= {n: {"file": own, "key": n, **describe(t)} for n, t in rest.items()}
    return {
        "type": type(inner_model(model)).__name__.removeprefix("FSDP"),
        "tensors": {n: where[n] for n in stored},
        "ties": ties(model),
        "base": base_hashes(model, weights) if base else {},
    }


def _save_pretrained(model: nn.Module, folder: Path, weights: Weights) -> bool:
    inner: Any = inner_model(model)
    options: dict[str, Any] = {}
    if weights or any(clean(n) != n for n in inner.state_dict()):  # layers compiled one by one
        stored_as = ties(model)
        options["state_dict"] = {
            clean(n): weights.get(stored_as.get(clean(n), clean(n)), t)
            for n, t in inner.state_dict().items()
        }
    if is_adapter(model) and "save_embedding_layers" in _parameters(inner.save_pretrained):
        # 'auto' asks the hub about a model that is not a local folder; no save waits for a network
        bases = [getattr(c, "base_model_name_or_path", None) for c in inner.peft_config.values()]
        if any(b and not os.path.isdir(b) for b in bases):
            options["save_embedding_layers"] = False
    try:
        with _quiet(), disk_errors(folder):
            inner.save_pretrained(str(folder), **options)
    except (OarlockError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault
        # The run's work is worth more than its folder's form: keep the exact tensors ourselves.
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        log.warning(
            "%s.save_pretrained failed (%s: %s): the checkpoint is whole and can be resumed, but "
            "from_pretrained may not read it.",
            type(inner).__name__, type(error).__name__, str(error)[:300],
        )  # fmt: skip
        return False
    return True


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a save: the run has one of its own."""
    bars = sys.modules.get("transformers.utils.logging")
    was_on = bars is not None and bars.is_progress_bar_enabled()
    if was_on:
        bars.disable_progress_bar()  # type: ignore[union-attr]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if was_on:
            bars.enable_progress_bar()  # type: ignore[union-attr]


def _find_in(
    folder: Path, stored: dict[str, Tensor], tied: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Which tensors save_pretrained wrote under our names, bit for bit. It may rename or merge."""
    where: dict[str, dict[str, Any]] = {}
    names: dict[str, list[str]] = {n: [n] for n in stored}
    for alias, name in tied.items():
        names.get(name, []).append(alias)
    with Reader(folder) as reader:
        keys = {
            k: f.name for f in sorted(folder.glob("*.safetensors")) for k in reader.keys(f.name)
        }
        for name, tensor in stored.items():
            for key in names[name]:
                if key in keys and same_bits(reader.get(keys[key], key), plain(tensor, name)):
                    where[name] = {"file": keys[key], "key": key, **describe(tensor)}
                    break
    return where


def check_model(model: nn.Module, described: dict[str, Any], source: str) -> None:
    """CheckpointError naming the first tensor that is not alike in the model and the checkpoint."""
    there = {**described["tensors"], **described["base"]}
    stored, base = split_state(model)
    mine = {**stored, **base}
    here_tied, there_tied = ties(model), described["ties"]
    difference = None
    for name, tensor in mine.items():
        if name not in there:
            tied = f" (there it is tied to {there_tied[name]})" if name in there_tied else ""
            difference = f"it has no {name}{tied}, which the model has"
        elif (name in stored) != (name in described["tensors"]):
            kept = "stored" if name in described["tensors"] else "part of the frozen base model"
            difference = f"{name} is {kept} there and not here: other layers are frozen"
        elif name in stored:
            theirs, ours = there[name], describe(tensor)
            if (theirs["dtype"], theirs["shape"]) != (ours["dtype"], ours["shape"]):
                difference = (
                    f"{name} is {theirs['dtype']} {theirs['shape']} there and {ours['dtype']} "
                    f"{ours['shape']} in this run's model"
                )
        if difference:
            break
    else:
        for name in there:
            if name not in mine:
                tied = f" (here it is tied to {here_tied[name]})" if name in here_tied else ""
                difference = f"it has {name}{tied}, which this run's model has not"
                break
    if difference:
        raise CheckpointError(
            f"{source} belongs to another model: {difference}.\n"
            f"Build the model as it was in the run that saved this (a {described['type']})."
        )


def check_base(model: nn.Module, described: dict[str, Any], source: str, weights: Weights) -> None:
    """CheckpointError where the frozen base model is not the one of the checkpoint. Hashes it."""
    if not described["base"]:
        return
    mine = base_hashes(model, weights)
    for name, digest in described["base"].items():
        if mine[name] != digest:
            raise CheckpointError(
                f"{source} is for an adapter on another base model: {name} has other values (or "
                "another dtype) there.\nLoad the very base model that the run started from."
            )


def read_model(model: nn.Module, described: dict[str, Any], take: Taker) -> None:
    """Overwrite parameters and buffers in place, so that views of them stay valid."""
    state = dict(named_state(model))
    with torch.no_grad():
        for name, description in described["tensors"].items():
            target = state[name].detach()
            if is_sharded(target):
                put(target, take.new(description, target.device))
            else:
                take.into(target, description)
