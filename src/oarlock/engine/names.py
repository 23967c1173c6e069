"""Names of a model's tensors, as people know them: one name each, without wrappers' prefixes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Parameter


def clean(name: str) -> str:
    """The name without what torch.compile puts before it."""
    return name.replace("_orig_mod.", "")


def named_parameters(model: nn.Module) -> list[tuple[str, Parameter]]:
    """Every parameter once; a tied one under its first name."""
    return [(clean(n), p) for n, p in model.named_parameters()]


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every buffer once, those that are not saved included."""
    return [(clean(n), b) for n, b in model.named_buffers()]


def named_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, then buffers: everything that must be alike on all replicas."""
    return [*named_parameters(model), *named_buffers(model)]
