"""Flat storage of the gradients: parameters lie in buckets, each gradient is a view of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGN = 64  # elements: vectorised kernels and the owners' slices start on whole lines


@dataclass
class Slot:
    """One parameter's place: ``view`` is its gradient, shaped like it, inside the bucket."""

    name: str
    parameter: Parameter
    view: Tensor
    used: bool = False  # a micro-batch of this rank has put a gradient there in this step
    complete: bool = False  # the last micro-batch has added its part


class Bucket:
    """Some parameters' gradients in one flat tensor, exchanged in one piece.

    Attributes:
        flat: [elements], dtype and device of its parameters.
        slots: the parameters in it.
        pending: gradients still missing before it can be sent; counted in the last micro-batch.
    """

    def __init__(self, members: Sequence[tuple[str, Parameter]]) -> None:
        first = members[0][1]
        sizes = [-(-p.numel() // ALIGN) * ALIGN for _, p in members]
        # zeros, not empty: the padding is summed and its norm taken like everything else
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.slots: list[Slot] = []
        start = 0
        for (name, parameter), size in zip(members, sizes, strict=True):
            view = self.flat[start : start + parameter.numel()].view(parameter.shape)
            self.slots.append(Slot(name, parameter, view))
            start += size
        self.pending = 0
        self.sent = False

    @property
    def bytes(self) -> int:
        """Size of the flat tensor in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def clear_unused(self) -> None:
        """Zero the gradients that this rank did not compute: they hold an older step's."""
        for slot in self.slots:
            if not slot.used:
                slot.view.zero_()


def fill_buckets(
    members: Sequence[tuple[str, Parameter]], bucket_bytes: int, first_bytes: int
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
            buckets.append(Bucket(held.pop(kind)))
        if not held.get(kind):
            held[kind], size[kind] = [], 0
        held[kind].append((name, parameter))
        size[kind] += bytes_
    buckets.extend(Bucket(rest) for rest in held.values())
    return buckets
