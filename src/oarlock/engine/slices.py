"""Owner's slices: weights in flat buckets, and an optimizer that sees only this rank's slices.

An elementwise optimizer computes the same for a piece of a tensor as for the whole. So the
optimizer's groups get, instead of each parameter, the piece of it that lies in this rank's slice:
a flat Parameter that shares its memory with the model's. Updating it updates the model in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from oarlock.engine.buckets import Bucket, Slot
from oarlock.errors import SetupError
from oarlock.world import World

State = dict[str, dict[str, Any]]  # an optimizer's state by the parameters' names


class OwnerSlices:
    """Puts a model's trainable weights into flat tensors and the optimizer onto own slices.

    Args:
        buckets: where each parameter lies.
        optimizer: elementwise, over these parameters (and perhaps frozen ones, left alone). State
            that it has already is cut to the slices.
        world: this rank's number says which slices are its own.

    Attributes:
        weights: for each bucket, all weights in it, flat; the model's parameters are views.
        groups: for each group of the optimizer, the model's parameters that belong there.

    Raises:
        SetupError: two parameters share memory without being one.
    """

    def __init__(
        self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        self.world, self.optimizer, self.buckets = world, optimizer, buckets
        self._slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        _refuse_shared_memory([slot for _, slot in self._slots.values()])
        self.weights = [self._flatten(bucket) for bucket in buckets]
        self._pieces = {
            slot.name: Parameter(flat[start:end])
            for bucket, flat in zip(buckets, self.weights, strict=True)
            for slot in bucket.slots
            for start, end in [self._own(bucket, slot)]
            if end > start
        }
        self.groups: list[list[Parameter]] = [list(g["params"]) for g in optimizer.param_groups]
        self._names = {slot.parameter: slot.name for _, slot in self._slots.values()}
        self._cut_optimizer()

    @staticmethod
    @torch.no_grad()
    def _flatten(bucket: Bucket) -> Tensor:
        flat = bucket.new()
        for slot in bucket.slots:
            view = slot.within(flat)
            view.copy_(slot.parameter)
            slot.parameter.data = view  # the old memory goes, parameter by parameter
        return flat

    def _own(self, bucket: Bucket, slot: Slot) -> tuple[int, int]:
        """Which elements of the bucket are both this rank's and the slot's; start ≥ end: none."""
        first = self.world.rank * bucket.part
        return max(slot.start, first), min(slot.end, first + bucket.part)

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

    # -- in the step -----------------------------------------------------------------------------

    def attach(self, gradients: Sequence[Tensor], used: set[str]) -> None:
        """Point each own piece's ``.grad`` into ``gradients`` ([part] a bucket); None if unused."""
        for bucket, own in zip(self.buckets, gradients, strict=True):
            first = self.world.rank * bucket.part
            for slot in bucket.slots:
                if slot.name in self._pieces:
                    start, end = self._own(bucket, slot)
                    grad = own[start - first : end - first] if slot.name in used else None
                    self._pieces[slot.name].grad = grad

    def check_in_place(self) -> None:
        """SetupError where a parameter or a group of the optimizer was replaced meanwhile."""
        for bucket, flat in zip(self.buckets, self.weights, strict=True):
            base, size = flat.data_ptr(), flat.element_size()
            for slot in bucket.slots:
                p = slot.parameter
                with torch._C.DisableTorchFunctionSubclass():  # it may still be pending
                    there = p.data_ptr()
                if p.numel() and there != base + slot.start * size:
                    raise SetupError(
                        f"The memory of {slot.name} was replaced after the engine was built, so "
                        "updates would no longer reach it.\nCopy into it (p.data.copy_) instead of "
                        "assigning to p.data; move or cast the model before building the engine."
                    )
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
        bucket, slot = self._slots[name]
        alike = isinstance(value, Tensor) and value.shape == slot.parameter.shape
        if not alike or key == "step":  # the parameter may be one number, as a step count is
            return value
        flat = torch.empty(slot.parameter.numel(), dtype=value.dtype, device=value.device)
        _like(slot.parameter, flat).copy_(value)
        start, end = self._own(bucket, slot)
        return flat[start - slot.start : end - slot.start].clone()

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
        for name, (bucket, slot) in self._slots.items():
            owners = [r for r in range(self.world.size) if name in outlines[r]]
            if not owners:
                continue
            entry = whole.setdefault(name, {})
            for key, kind in outlines[owners[0]][name].items():
                if not isinstance(kind, torch.dtype):
                    entry[key] = kind
                    continue
                flat = torch.zeros(slot.parameter.numel() if wanted else 0, dtype=kind)
                for rank in owners:
                    start = max(slot.start, rank * bucket.part) - slot.start
                    end = min(slot.end, (rank + 1) * bucket.part) - slot.start
                    own = mine[name][key] if rank == self.world.rank else None  # type: ignore[index]
                    piece = flat[start:end] if wanted else None
                    self._bring(own, piece, rank, end - start, kind, everywhere)
                if wanted:
                    entry[key] = _like(slot.parameter, flat)
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
        for name, (_, slot) in self._slots.items():
            if name in self._pieces:
                self.optimizer.state.pop(self._pieces[name], None)
            if name in whole:
                device = slot.parameter.device
                self.optimizer.state[slot.parameter] = {
                    k: v.to(device) if isinstance(v, Tensor) and k != "step" else v
                    for k, v in whole[name].items()
                }


def _like(parameter: Tensor, flat: Tensor) -> Tensor:
    """``flat`` [numel], with the elements in the order in which the parameter's lie in memory."""
    return Slot("", parameter, 0).within(flat)  # type: ignore[arg-type]


def _refuse_shared_memory(slots: Sequence[Slot]) -> None:
    """Parameters that overlap in memory cannot be moved apart; each would go its own way."""
    spans = sorted(
        (
            (p.device.type, p.device.index or 0, p.data_ptr()),
            p.data_ptr() + p.numel() * p.element_size(),
            slot.name,
        )
        for slot in slots
        for p in [slot.parameter]
        if p.numel()
    )
    for (a, end, one), (b, _, other) in itertools.pairwise(spans):
        if a[:2] == b[:2] and b[2] < end:
            raise SetupError(
                f"{one} and {other} share memory without being one parameter, which sharding 1 and "
                "2 cannot keep.\nTie them as one Parameter (a.weight = b.weight), or use "
                "sharding=0."
            )
