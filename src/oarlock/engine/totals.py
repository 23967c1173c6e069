"""The numbers of a step: what each rank adds up, and what all ranks know at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.errors import DataError, SetupError
from oarlock.words import many
from oarlock.world import World


class Totals:
    """One rank's sums over its micro-batches, in float64 (float32 on MPS, which has no other)."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self.weight = 0.0
        self.whole = self.fractional = 0  # micro-batches whose weight is an int, a float

    def add(self, loss_sum: Tensor, weight: float) -> None:
        """Add a micro-batch's loss sum and weight."""
        loss = loss_sum.detach()
        loss = loss if loss.device.type == "mps" else loss.double()
        self._loss = loss if self._loss is None else self._loss + loss
        self.weight += weight
        if isinstance(weight, int):
            self.whole += 1
        else:
            self.fractional += 1

    def loss(self) -> float:
        """The sum of the losses, read to the host."""
        return 0.0 if self._loss is None else float(self._loss)


@dataclass(frozen=True)
class Closed:
    """What all ranks know after the backward passes; the same on each.

    Attributes:
        loss: mean loss over the global batch. weight: its total weight.
        used: for each trainable parameter, whether any micro-batch gave it a gradient.
        changed: for each buffer that is watched, whether any rank's forward wrote to it.
        stop: a rank was asked to stop.
    """

    loss: float
    weight: float
    used: list[bool]
    changed: list[bool]
    stop: bool


class Closing:
    """Sums the ranks' totals and flags in one small message, while the last buckets travel."""

    def __init__(
        self,
        world: World,
        step: int,
        totals: Totals,
        used: Sequence[bool],
        changed: Sequence[bool],
        stop: bool,
    ) -> None:
        self._world, self._step, self._used = world, step, len(used)
        head = [totals.loss(), totals.weight, totals.whole, totals.fractional, stop]
        self._message = torch.tensor([*head, *used, *changed], dtype=torch.float64)
        self._work: Any = None
        if world.size > 1:
            with world.lost_peer("summing the loss"):
                self._work = dist.all_reduce(self._message, group=world.control, async_op=True)

    def wait(self) -> Closed:
        """The sums over all ranks.

        Raises:
            SetupError: weights of different kinds. DataError: the total weight is zero.
        """
        if self._work is not None:
            self._world.wait(self._work, "summing the loss")
        loss_sum, weight, whole, fractional, stop = self._message[:5].tolist()
        if whole and fractional:
            raise SetupError(
                f"Step {self._step}: the weight is a whole number in "
                f"{many(int(whole), 'micro-batch', 'es')} and a fraction in {int(fractional)}, "
                "so they do not count the same thing.\n"
                "Return the same kind everywhere: tokens or samples."
            )
        if weight == 0:
            raise DataError(
                f"Step {self._step}: the total weight is zero, so there is no mean loss.\n"
                "No micro-batch of this global batch has a target; check the labels."
            )
        flags = (self._message[5:] > 0).tolist()
        used, changed = flags[: self._used], flags[self._used :]
        return Closed(loss_sum / weight, weight, used, changed, stop > 0)
