"""Flat storage: parameters lie in buckets, each gradient (and weight) is a view of one.

A bucket is cut into as many slices as there are ranks, all of one size, and each rank owns one:
``[slice of rank 0 | slice of rank 1 | …]``. With one slice it is simply a flat tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

# Elements. Vectorised kernels then start on whole lines in any slice, and 8-bit optimizers, which
# scale 256 numbers together, find the same blocks in a slice as in the whole parameter.
ALIGN = 256


@dataclass
class Slot:
    """One parameter's place in its bucket: elements ``start`` to ``end``."""

    name: str
    parameter: Parameter
    start: int
    view: Tensor | None = None  # its gradient, shaped like it, inside the bucket
    used: bool = False  # a micro-batch of this rank has put a gradient there
    complete: bool = False  # the last micro-batch has added its part

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel()

    def within(self, flat: Tensor) -> Tensor:
        """This parameter's elements of ``flat``, with its shape and, if it is dense, strides."""
        shape, strides = self.parameter.shape, self.parameter.stride()
        if not _dense(self.parameter):
            return flat[self.start : self.end].view(shape)
        return flat.as_strided(shape, strides, flat.storage_offset() + self.start)


def _dense(tensor: Tensor) -> bool:
    """Do the strides reach each of ``numel`` neighbouring elements once (channels_last, say)?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


class Bucket:
    """Some parameters' gradients in one flat tensor, exchanged in one piece.

    Args:
        members: name and parameter; all of one dtype and device.
        ranks: how many slices.
        align: slices begin at multiples of this, in elements.

    Attributes:
        part: elements in a slice.
        flat: [ranks · part], the gradients; None while it is released.
        slots: the parameters in it.
        pending: gradients still missing before it can be sent; counted in the last micro-batch.
    """

    def __init__(
        self, members: Sequence[tuple[str, Parameter]], ranks: int = 1, align: int = ALIGN
    ) -> None:
        first = members[0][1]
        self.dtype, self.device = first.dtype, first.device
        self.slots: list[Slot] = []
        end = 0
        for name, parameter in members:
            self.slots.append(Slot(name, parameter, end))
            end += -(-parameter.numel() // ALIGN) * ALIGN
        self.ranks, self.part = ranks, -(-end // (ranks * align)) * align
        self.flat: Tensor | None = None
        self.pending = 0
        self.sent = False

    def new(self) -> Tensor:
        """A flat tensor of this layout. Zeros: the padding is summed like everything else."""
        return torch.zeros(self.ranks * self.part, dtype=self.dtype, device=self.device)

    def allocate(self) -> Tensor:
        """Make room for the gradients, if there is none."""
        return self.adopt(self.new()) if self.flat is None else self.flat

    def release(self) -> None:
        """Give the gradients' memory back (once nobody else holds it)."""
        self.flat = None
        for slot in self.slots:
            slot.view = None

    def adopt(self, flat: Tensor) -> Tensor:
        """Let this flat tensor of the bucket's layout be the gradients."""
        self.flat = flat
        for slot in self.slots:
            slot.view = slot.within(flat)
        return flat

    def slice(self, rank: int, flat: Tensor) -> Tensor:
        """Rank ``rank``'s slice of a flat tensor of this layout."""
        return flat[rank * self.part : (rank + 1) * self.part]

    @property
    def bytes(self) -> int:
        """Size of the flat tensor in bytes."""
        return self.ranks * self.part * self.dtype.itemsize

    def clear_unused(self) -> None:
        """Zero the gradients that this rank did not compute: they hold an older step's."""
        for slot in self.slots:
            if not slot.used and slot.view is not None:
                slot.view.zero_()


def fill_buckets(
    members: Sequence[tuple[str, Parameter]],
    bucket_bytes: int,
    first_bytes: int,
    ranks: int = 1,
    align: int = ALIGN,
) -> list[Bucket]:
    """Cut ``members`` (in the order in which gradients are expected) into buckets.

    Each holds parameters of one dtype and device, up to ``bucket_bytes``; the first one is small,
    so that the exchange starts early. A parameter larger than a bucket has one to itself.
    """
    buckets: list[Bucket] = []
    held: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, parameter in members:
        kind = (parameter.dtype, parameter.device)
        bytes_ = parameter.numel() * parameter.element_size()
        limit = bucket_bytes if buckets else first_bytes
        if held.get(kind) and size[kind] + bytes_ > limit:
            buckets.append(Bucket(held.pop(kind), ranks, align))
        if not held.get(kind):
            held[kind], size[kind] = [], 0
        held[kind].append((name, parameter))
        size[kind] += bytes_
    buckets.extend(Bucket(rest, ranks, align) for rest in held.values())
    return buckets
