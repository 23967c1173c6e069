"""The way back, hidden: updated weights travel while the next forward already runs.

Until a bucket's weights are there, its parameters are :class:`PendingWeight`: whoever reads one,
in a module's forward or anywhere else (``state_dict``, a print, an evaluation), waits for its
bucket and then sees an ordinary Parameter again. So nothing needs to be known about the order in
which modules run. Custom kernels take a tensor's memory without asking it; for them each module
waits for its own parameters before its forward.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from oarlock.engine.wire import Wire
from oarlock.world import World

# Facts about a tensor that do not depend on its numbers.
_FACTS = """
    shape dtype device layout ndim requires_grad is_leaf grad is_cuda is_cpu is_mps is_xpu is_meta
    is_sparse is_quantized is_nested itemsize nbytes
"""
_QUESTIONS = """
    size dim numel nelement stride storage_offset element_size is_floating_point is_complex
    is_contiguous get_device register_hook register_post_accumulate_grad_hook
"""
_KNOWN: set[Any] = {getattr(Tensor, name).__get__ for name in _FACTS.split()}
_KNOWN |= {getattr(Tensor, name) for name in _QUESTIONS.split()}
_KNOWN.add(vars(torch._C.TensorBase)["grad"].__set__)


class PendingWeight(Parameter):
    """A parameter whose numbers are still on their way from another rank."""

    _oarlock_journey: Journey

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})
        found = list(_pending_in((args, kwargs)))
        # Where the reader hides them (in an object of its own), all must have come.
        for journey in [p._oarlock_journey for p in found] or list(_under_way):
            journey.arrive()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:  # makes one of its own type
        self._oarlock_journey.arrive()
        return Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        self._oarlock_journey.arrive()
        return Parameter.__reduce_ex__(self, proto)


def _pending_in(value: Any) -> Iterator[Any]:
    if type(value) is PendingWeight:
        yield value
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from _pending_in(inner)
    elif isinstance(value, dict):
        yield from _pending_in(list(value.values()))


class Journey:
    """One bucket's weights under way.

    Args:
        flat: [ranks · part] as :meth:`Wire.to_all` takes it.
        parameters: all that are views of it.
    """

    def __init__(
        self, wire: Wire, world: World, flat: Tensor, parameters: Iterable[Parameter]
    ) -> None:
        self._wire, self._world = wire, world
        self._handle = wire.to_all(flat)
        self._parameters = list(parameters)
        self.waited = 0.0  # seconds
        for parameter in self._parameters:
            parameter.__dict__["_oarlock_journey"] = self
            parameter.__class__ = PendingWeight
        _under_way.add(self)
        world.unfinished.add(self)

    def arrive(self) -> None:
        """Wait until the weights are there; from then on the parameters are ordinary ones."""
        if self._handle is None:
            return
        started = time.perf_counter()
        self._wire.wait(self._handle, "waiting for the other ranks' weights")
        self.waited = time.perf_counter() - started
        self._handle = None
        for parameter in self._parameters:
            parameter.__class__ = Parameter
            del parameter.__dict__["_oarlock_journey"]
        _under_way.discard(self)
        self._world.unfinished.discard(self)


_under_way: weakref.WeakSet[Journey] = weakref.WeakSet()


def can_hide(model: nn.Module) -> bool:
    """May this model's weights be pending?

    Only plain Parameters can be: others' own behaviour must stay theirs. And compiled code looks at
    its tensors' types before each call: it would be compiled again and again.
    """
    plain = all(type(p) in (Parameter, PendingWeight) for p in model.parameters())
    return plain and not _something_is_compiled()


def _something_is_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0


def wait_before_forward(model: nn.Module) -> list[Any]:
    """Each module waits for its own parameters before it runs. Returns the hooks' handles."""
    return [
        module.register_forward_pre_hook(_wait_for_own)
        for module in model.modules()
        if module._parameters
    ]


def _wait_for_own(module: nn.Module, args: Any) -> None:
    for parameter in module._parameters.values():
        if type(parameter) is PendingWeight:
            parameter._oarlock_journey.arrive()
