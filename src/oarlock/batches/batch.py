"""What a step runs over: a rank's part of a global batch, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``fn`` applied to every tensor in it, through dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        items = {k: map_tensors(v, fn) for k, v in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, fn) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(v, fn) for v in value)
    return value


@dataclass
class MicroBatch:
    """What one forward and backward runs over.

    Attributes:
        index: its place in the global batch.
        rows: the rows of the dataset in it (for a stream: their positions).
        data: the collated rows, as ``collate_fn`` made them.
    """

    index: int
    rows: tuple[int, ...]
    data: Any

    def pin_memory(self) -> MicroBatch:
        """Called by PyTorch's DataLoader: the same with its tensors in page-locked memory."""
        return MicroBatch(self.index, self.rows, map_tensors(self.data, torch.Tensor.pin_memory))


@dataclass
class Batch:
    """This rank's part of one global batch.

    Attributes:
        epoch, step: where the batch stands: the step counts from 0 in each epoch.
        count: micro-batches in the whole global batch.
        rows: rows in the whole global batch.
        micro_batches: this rank's contiguous range of them; may be empty.
        seed: the loader's seed, from which micro-batches' random numbers derive.
    """

    epoch: int
    step: int
    count: int
    rows: int
    micro_batches: list[MicroBatch] = field(default_factory=list)
    seed: int = 0

    def pin_memory(self) -> Batch:
        """As :meth:`MicroBatch.pin_memory`, for all of them."""
        return replace(self, micro_batches=[m.pin_memory() for m in self.micro_batches])
