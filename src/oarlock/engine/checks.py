"""What is refused at construction: models, optimizers and schedulers that could only go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from oarlock.engine.names import clean, named_buffers, named_parameters
from oarlock.errors import ConfigError, SetupError, whole_number
from oarlock.words import many
from oarlock.world import World

SHARDINGS = (0, 1, 2, 3, "hybrid", "auto")
NONFINITE = ("stop", "skip", "continue")
# These need the whole loss function again, several times within one update.
_CLOSURE_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.SparseAdam)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_model(model: nn.Module, world: World) -> list[tuple[str, Parameter]]:
    """The trainable parameters of a model that can be trained. SetupError where it can't."""
    if not isinstance(model, nn.Module):
        raise SetupError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise SetupError(
            f"The model is wrapped in {type(model).__name__}; pass the module inside it "
            "(model.module).\nThe engine averages the gradients itself."
        )
    parameters = named_parameters(model)
    lazy = [n for n, p in parameters if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise SetupError(
            f"Lazy parameters have no shape yet: {_some(lazy)}.\nRun one forward before building "
            "the engine."
        )
    trainable = [(n, p) for n, p in parameters if p.requires_grad]
    if not trainable:
        raise SetupError("No parameter of the model is trainable (requires_grad is False on all).")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise SetupError(
                f"{clean(name) or 'The model'} gives sparse gradients, which the exchange cannot "
                "carry.\nBuild the layer with sparse=False."
            )
    wrong = [n for n, p in trainable if not p.is_floating_point()]
    if wrong:
        raise SetupError(
            f"Trainable parameters must be real floating-point numbers; these are not: "
            f"{_some(wrong)}.\nKeep a complex parameter as a real one with a last dimension of 2 "
            "(torch.view_as_real) and convert in forward."
        )
    away = [n for n, p in parameters if p.device.type != world.device.type]
    if away:
        raise SetupError(
            f"{_some(away)} on {dict(parameters)[away[0]].device}, but this rank computes on "
            f"{world.device}.\nMove the model first: model.to(world.device)."
        )
    return trainable


def check_optimizer(
    optimizer: Any, model: nn.Module, groups: Sequence[Sequence[Parameter]] | None = None
) -> None:
    """The optimizer must hold the model's trainable parameters, all of them and no others.

    ``groups``: the model's parameters in each of its groups, where it holds slices of them.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SetupError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer."
        )
    if isinstance(optimizer, _CLOSURE_OPTIMIZERS):
        raise SetupError(
            f"{type(optimizer).__name__} does not fit a step of one gradient on one global batch.\n"
            "Use AdamW, Adam, SGD or another optimizer that needs no closure."
        )
    parameters = {id(p): n for n, p in named_parameters(model)}
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    held = [p for group in groups for p in group]
    strangers = [p for p in held if id(p) not in parameters]
    if strangers:
        raise SetupError(
            f"The optimizer holds {many(len(strangers), 'parameter')} that the model has not, the "
            f"first of shape {list(strangers[0].shape)}.\nBuild the optimizer from this model's "
            "parameters, after any .to(), LoRA or resizing that replaces them."
        )
    ids = {id(p) for p in held}
    forgotten = [n for n, p in named_parameters(model) if p.requires_grad and id(p) not in ids]
    if forgotten:
        raise SetupError(
            f"The optimizer does not hold {many(len(forgotten), 'trainable parameter')}: "
            f"{_some(forgotten)}.\nThey would never be updated. Add them to a group, or freeze "
            "them with requires_grad_(False)."
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """A scheduler must belong to the optimizer and be stepped without arguments."""
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise SetupError(
            "ReduceLROnPlateau needs a measured value: step it yourself with the result of "
            "engine.evaluate, which is the same on all ranks."
        )
    if not hasattr(scheduler, "step") or getattr(scheduler, "optimizer", None) is not optimizer:
        raise SetupError("scheduler must be a learning-rate scheduler of this very optimizer.")


def describe(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> list[str]:
    """What this rank built, a line a fact, for the comparison between ranks."""
    names = {id(p): n for n, p in named_parameters(model)}
    lines = [f"setting {k} = {v}" for k, v in settings.items()]
    lines += [
        f"parameter {n} {list(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
        for n, p in named_parameters(model)
    ]
    lines += [f"buffer {n} {list(b.shape)} {b.dtype}" for n, b in named_buffers(model)]
    lines.append(f"optimizer {type(optimizer).__name__}")
    for i, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in group.items() if k != "params"}
        lines.append(f"optimizer group {i}: {sorted(options.items(), key=lambda o: o[0])}")
        lines.append(f"optimizer group {i} holds {[names[id(p)] for p in group['params']]}")
    return lines


def check_settings(
    sharding: int | str,
    clip_norm: float | None,
    bucket_mb: float | str,
    guard_every: int,
    nonfinite: str,
    seed: int,
) -> None:
    """The engine's own numbers. ConfigError where one is impossible."""
    if isinstance(sharding, bool) or sharding not in SHARDINGS:
        raise ConfigError(
            f"sharding is {sharding!r}; it must be 0 (every rank keeps everything whole), 1 (a "
            "slice of the optimizer's state), 2 (and of the gradients), 3 (and of the weights), "
            "'hybrid' (3 within each machine) or 'auto'."
        )
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm is {clip_norm!r}; it must be a positive number, or None.")
    if bucket_mb != "auto" and not (_is_number(bucket_mb) and 0 < float(bucket_mb) < math.inf):
        raise ConfigError(
            f"bucket_mb is {bucket_mb!r}; it must be a positive number of MiB, or 'auto'."
        )
    whole_number("guard_every", guard_every, 0, " (0: never)")
    whole_number("seed", seed, 0)
    if nonfinite not in NONFINITE:
        raise ConfigError(f"nonfinite is {nonfinite!r}; it must be one of {', '.join(NONFINITE)}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_loss(answer: Any) -> tuple[Tensor, float]:
    """What a loss function returned: a scalar that depends on the model, and a weight."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise SetupError(
            "loss_fn must return (loss_sum, weight): the sum of the losses and how many there "
            f"are. It returned a {type(answer).__name__}."
        )
    loss, weight = answer
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise SetupError(
            f"loss_fn must return a scalar tensor as loss_sum, not {shape}.\n"
            "Sum over the items: reduction='sum', or loss.sum()."
        )
    number = weight
    if hasattr(weight, "item") and math.prod(getattr(weight, "shape", (0,))) == 1:
        number = weight.item()  # a tensor's or NumPy's single number
    if not _is_number(number) or not 0 <= number < math.inf:
        raise SetupError(
            "loss_fn must return a weight that is a finite number and not negative, not "
            f"{weight!r}."
        )
    if not loss.requires_grad and number and torch.is_grad_enabled():
        raise SetupError(
            "The loss does not depend on any trainable parameter (it has no gradient).\n"
            "Is part of the model frozen, detached, or run under torch.no_grad()?"
        )
    return loss, number
