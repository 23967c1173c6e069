"""Adapters with one thing broken in each: with them, tests that pass must fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from adapter import Adapter
from torch import nn
from torch.utils import _pytree

import oarlock


class NoEngine(Adapter):
    """Nothing is compared, aligned or exchanged: each rank keeps the gradients that it has."""

    def _build(self, world: oarlock.World, bucket_mb: float) -> Any:
        return None

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        yield

    def _step(self, micro_batches: list[Any]) -> bool:
        for pairs in micro_batches:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return bool(micro_batches)


class Sum(Adapter):
    """The gradients are those of all ranks together, not divided."""

    def _step(self, micro_batches: list[Any]) -> bool:
        done = super()._step(micro_batches)
        for parameter in self._trainable:
            if parameter.grad is not None:
                parameter.grad *= self.engine.world.size
        return done


class LastOnly(Adapter):
    """Micro-batches before the last one are lost."""

    def _step(self, micro_batches: list[Any]) -> bool:
        return super()._step(micro_batches[-1:])


class Zeros(Adapter):
    """A parameter that no rank used has a gradient of zeros, not None."""

    def _step(self, micro_batches: list[Any]) -> bool:
        done = super()._step(micro_batches)
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return done


class NeedsAll(Adapter):
    """As DDP without find_unused_parameters: each parameter must be used in each step."""

    def _step(self, micro_batches: list[Any]) -> bool:
        done = super()._step(micro_batches)
        if any(parameter.grad is None for parameter in self._trainable):
            raise RuntimeError("a parameter was not used")
        return done


class NeedsElements(Adapter):
    """A parameter without elements is refused."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        if not all(parameter.numel() for parameter in module.parameters()):
            raise RuntimeError("an empty parameter")
        super().__init__(module, **options)


class MeetsInForward(Adapter):
    """A rank that runs the model alone waits for the others."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.world.barrier()
        return super().forward(*args, **kwargs)


class AllOutputs(Adapter):
    """Outputs that need no gradient come back as if they did."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = _pytree.tree_flatten(super().forward(*args, **kwargs))
        one = torch.ones((), requires_grad=True)
        return _pytree.tree_unflatten([leaf * one for leaf in leaves], structure)


class PlainInputs(Adapter):
    """Named tuples arrive in the model as tuples."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = [tuple(a) if isinstance(a, tuple) else a for a in args]
        return super().forward(*plain, **kwargs)


class Swallows(Adapter):
    """An error in the model is not raised."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except ValueError:
            return torch.zeros((), requires_grad=True)

    def _step(self, micro_batches: list[Any]) -> bool:
        try:
            return super()._step(micro_batches)
        except RuntimeError:
            return False


class LocalNorm(Adapter):
    """BatchNorm that was to be over all ranks is over one."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.__class__ = nn.BatchNorm1d
        super().__init__(module, **options)


class Contiguous(Adapter):
    """Outputs lose their memory format."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).contiguous()
