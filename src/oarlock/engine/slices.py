"""Owner's slices: weights in flat buckets, and an optimizer that sees only this rank's slices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from oarlock.engine.buckets import Bucket, Slot
from oarlock.engine.pieces import Pieces
from oarlock.errors import SetupError
from oarlock.world import World


class OwnerSlices(Pieces):
    """Puts a model's trainable weights into flat tensors and the optimizer onto own slices.

    Args:
        buckets: where each parameter lies.
        optimizer, world: as for :class:`Pieces`; this rank's number says which slices are its own.

    Attributes:
        weights: for each bucket, all weights in it, flat; the model's parameters are views.

    Raises:
        SetupError: two parameters share memory without being one.
    """

    def __init__(
        self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        self.buckets = buckets
        self._slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        _refuse_shared_memory([slot for _, slot in self._slots.values()])
        self.weights = [self._flatten(bucket) for bucket in buckets]
        pieces = {
            slot.name: Parameter(flat[slot.start + start : slot.start + end])
            for bucket, flat in zip(buckets, self.weights, strict=True)
            for slot in bucket.slots
            for start, end in [self._own(slot.name, world.rank)]
            if end > start
        }
        parameters = {name: slot.parameter for name, (_, slot) in self._slots.items()}
        super().__init__(parameters, pieces, self._own, optimizer, world)

    @staticmethod
    @torch.no_grad()
    def _flatten(bucket: Bucket) -> Tensor:
        flat = bucket.new()
        for slot in bucket.slots:
            view = slot.within(flat)
            view.copy_(slot.parameter)
            slot.parameter.data = view  # the old memory goes, parameter by parameter
        return flat

    def _own(self, name: str, rank: int) -> tuple[int, int]:
        """Which elements of the parameter lie in that rank's slice."""
        bucket, slot = self._slots[name]
        first = rank * bucket.part - slot.start
        return max(0, first), min(slot.parameter.numel(), first + bucket.part)

    # -- in the step -----------------------------------------------------------------------------

    def attach(self, gradients: Sequence[Tensor], used: set[str]) -> None:
        """Point each own piece's ``.grad`` into ``gradients`` ([part] a bucket); None if unused."""
        for bucket, own in zip(self.buckets, gradients, strict=True):
            first = self.world.rank * bucket.part
            for slot in bucket.slots:
                if slot.name in self._pieces:
                    start, end = self._own(slot.name, self.world.rank)
                    start, end = start + slot.start - first, end + slot.start - first
                    grad = own[start:end] if slot.name in used else None
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
        super().check_in_place()


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
