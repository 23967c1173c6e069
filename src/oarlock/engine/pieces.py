"""An optimizer on pieces: each rank updates, and keeps the state of, its part of each parameter.

An elementwise optimizer computes the same for a piece of a tensor as for the whole. So the
optimizer's groups get, instead of each parameter, this rank's piece of it: a flat Parameter that
shares its memory with the model's. Updating it updates the model in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from oarlock.engine.buckets import Slot
from oarlock.errors import SetupError
from oarlock.world import World

State = dict[str, dict[str, Any]]  # an optimizer's state by the parameters' names
Span = Callable[[str, int], tuple[int, int]]


class Pieces:
    """Puts an optimizer onto this rank's pieces.

    Args:
        parameters: the model's trainable ones by name, as the optimizer holds them now.
        pieces: of those of which this rank has some, its piece; flat.
        span: ``span(name, rank)``: from which element to which a rank has of a parameter, in the
            order in which they lie in memory; start ≥ end: none.
        optimizer: elementwise, over these parameters (and perhaps frozen ones, left alone). State
            that it has already is cut to the pieces.

    Attributes:
        groups: for each group of the optimizer, the model's parameters that belong there.
    """

    def __init__(
        self,
        parameters: dict[str, Parameter],
        pieces: dict[str, Parameter],
        span: Span,
        optimizer: torch.optim.Optimizer,
        world: World,
    ) -> None:
        self.world, self.optimizer = world, optimizer
        self._whole, self._pieces, self._span = parameters, pieces, span
        self.groups: list[list[Parameter]] = [list(g["params"]) for g in optimizer.param_groups]
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._cut_optimizer()

    def _cut_optimizer(self) -> None:
        self._held: list[list[Parameter]] = []
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            kept = [p for p in members if p not in self._names or self._names[p] in self._pieces]
            pieces = [self._pieces[self._names[p]] if p in self._names else p for p in kept]
            if "param_names" in group:
                names = dict(zip(map(id, members), group["param_names"], strict=True))
                self._all_names = {**getattr(self, "_all_names", {}), **names}
                group["param_names"] = [names[id(p)] for p in kept]
            group["params"] = pieces
            self._held.append(pieces)
        for parameter, name in self._names.items():
            entry = self.optimizer.state.pop(parameter, None)
            if entry is not None and name in self._pieces:
                self.optimizer.state[self._pieces[name]] = {
                    k: self.cut(name, k, v) for k, v in entry.items()
                }

    def check_in_place(self) -> None:
        """SetupError where a group of the optimizer was replaced meanwhile."""
        groups = [g["params"] for g in self.optimizer.param_groups]
        same = len(groups) == len(self._held) and all(
            len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
            for a, b in zip(groups, self._held, strict=True)
        )
        if not same:
            raise SetupError(
                "The optimizer's parameters were changed after the engine was built.\n"
                "Build a new DataParallel after adding a group or replacing parameters."
            )

    # -- the optimizer's state, whole and cut ----------------------------------------------------

    def owns(self, name: str) -> bool:
        """Is some of that parameter in this rank's slices?"""
        return name in self._pieces

    def piece(self, name: str) -> Parameter:
        """This rank's piece of that parameter, as the optimizer holds it."""
        return self._pieces[name]

    def cut(self, name: str, key: str, value: Any) -> Any:
        """Of a state tensor like the parameter, this rank's piece; anything else as it is."""
        parameter = self._whole[name]
        alike = isinstance(value, Tensor) and value.shape == parameter.shape
        if not alike or key == "step":  # the parameter may be one number, as a step count is
            return value
        flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
        _like(parameter, flat).copy_(value)
        start, end = self._span(name, self.world.rank)
        return flat[start:end].clone()

    def whole_state(self, everywhere: bool = False) -> State | None:
        """The optimizer's state with whole tensors, on the host. Collective.

        None on ranks other than 0, unless ``everywhere``.
        """
        mine = {n: self.optimizer.state.get(p) for n, p in self._pieces.items()}
        outline = {
            n: {k: v.dtype if self._is_cut(n, v) else v for k, v in entry.items()}
            for n, entry in mine.items()
            if entry
        }
        outlines = self.world.gather(outline)
        wanted = everywhere or self.world.is_main
        whole: State = {}
        for name, parameter in self._whole.items():
            holders = {self._span(name, r): r for r in reversed(range(self.world.size))}
            owners = sorted(r for r in holders.values() if name in outlines[r])
            if not owners:
                continue
            entry = whole.setdefault(name, {})
            for key, kind in outlines[owners[0]][name].items():
                if not isinstance(kind, torch.dtype):
                    entry[key] = kind
                    continue
                flat = torch.zeros(parameter.numel() if wanted else 0, dtype=kind)
                for rank in owners:
                    start, end = self._span(name, rank)
                    own = mine[name][key] if rank == self.world.rank else None  # type: ignore[index]
                    piece = flat[start:end] if wanted else None
                    self._bring(own, piece, rank, end - start, kind, everywhere)
                if wanted:
                    entry[key] = _like(parameter, flat)
        return whole if wanted else None

    def _is_cut(self, name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self._pieces[name].shape

    def _bring(
        self,
        own: Tensor | None,
        target: Tensor | None,
        owner: int,
        numel: int,
        dtype: torch.dtype,
        everywhere: bool,
    ) -> None:
        """A piece from its owner to rank 0 (or all), through host memory."""
        me, group = self.world.rank, self.world.control
        if own is not None and target is not None:
            target.copy_(own)
        if (not everywhere and me not in (0, owner)) or (owner == 0 and not everywhere):
            return
        wire = torch.empty(numel, dtype=dtype) if own is None else own.detach().cpu()
        raw = wire.view(torch.uint8)  # backends know fewer dtypes than PyTorch
        with self.world.lost_peer("gathering the optimizer's state"):
            if everywhere:
                dist.broadcast(raw, src=owner, group=group)
            elif me == owner:
                dist.send(raw, dst=0, group=group)
            else:
                dist.recv(raw, src=owner, group=group)
        if target is not None:
            target.copy_(wire)

    def restore(self) -> None:
        """Give the optimizer the model's own parameters and the whole state back. Collective."""
        self.world.announce("construction").wait()
        whole = self.whole_state(everywhere=True) or {}
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = list(members)
            if "param_names" in group:
                group["param_names"] = [self._all_names[id(p)] for p in members]
        for name, parameter in self._whole.items():
            if name in self._pieces:
                self.optimizer.state.pop(self._pieces[name], None)
            if name in whole:
                device = parameter.device
                self.optimizer.state[parameter] = {
                    k: v.to(device) if isinstance(v, Tensor) and k != "step" else v
                    for k, v in whole[name].items()
                }


def _like(parameter: Tensor, flat: Tensor) -> Tensor:
    """``flat`` [numel], with the elements in the order in which the parameter's lie in memory."""
    return Slot("", parameter, 0).within(flat)  # type: ignore[arg-type]
