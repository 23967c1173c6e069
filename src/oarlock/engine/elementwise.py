"""Which optimizers may work on slices: those that treat each element by itself."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict

import torch
from torch import Tensor
from torch.nn import Parameter

from oarlock.errors import SetupError

_NAMES = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
_ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES.split())
_ROWS, _COLUMNS = 64, 256  # of the tensor tried out; 8-bit optimizers leave small ones alone


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str:
    """Empty where slices of a tensor may be updated apart; else what speaks against it.

    ``torch.optim``'s own are known. Any other is tried out: three updates of one matrix, whole and
    in two flat halves, must give the same numbers and keep one number of state per element.
    """
    if type(optimizer) in _ELEMENTWISE:
        return ""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ROWS, _COLUMNS, generator=generator)
    whole = Parameter(start.clone())
    halves = [Parameter(h.clone()) for h in start.flatten().chunk(2)]
    try:
        one, two = _over(optimizer, [whole]), _over(optimizer, halves)
        for _ in range(3):
            whole.grad = torch.randn(_ROWS, _COLUMNS, generator=generator)
            for half, grad in zip(halves, whole.grad.flatten().chunk(2), strict=True):
                half.grad = grad.clone()
            one.step()
            two.step()
    except Exception as error:
        return f"trying it out on a slice failed ({type(error).__name__}: {error})"
    apart = float((torch.cat([h.detach() for h in halves]) - whole.detach().flatten()).abs().max())
    if not apart <= 1e-6:
        return f"a slice of a tensor gets other updates than the whole (by {apart:.1e})"
    for key, value in two.state[halves[0]].items():
        plain = type(value) is Tensor and value.shape == halves[0].shape
        if isinstance(value, Tensor) and value.dim() and not plain:
            return f"it keeps {key!r} as a {type(value).__name__} of shape {list(value.shape)}"
    return ""


def _over(optimizer: torch.optim.Optimizer, parameters: list[Parameter]) -> torch.optim.Optimizer:
    """The same optimizer, with its options and without its hooks, over other parameters."""
    other = copy.copy(optimizer)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "param_names"}
    other.param_groups = [{**options, "params": parameters}]
    other.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(other, name, OrderedDict())
    return other


def check_elementwise(optimizer: torch.optim.Optimizer, sharding: int) -> None:
    """SetupError where the optimizer needs whole tensors."""
    why = why_not_elementwise(optimizer)
    if why:
        raise SetupError(
            f"{type(optimizer).__name__} cannot work on slices of tensors: {why}.\n"
            f"Use sharding=0 (or 'auto'), or for sharding={sharding} an optimizer that updates "
            "each element by itself: Adam, AdamW, SGD, Adagrad, RMSprop, Lion."
        )
