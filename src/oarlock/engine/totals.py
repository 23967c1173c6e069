"""The numbers of a step: what each rank adds up, and what all ranks know at the end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.engine.agreement import Agreement
from oarlock.errors import DataError, SetupError
from oarlock.words import many


def total(rows: Iterable[Sequence[float]]) -> float:
    """The sum of all numbers, rounded once: the same in whatever order they come."""
    try:
        return math.fsum(itertools.chain.from_iterable(rows))
    except (OverflowError, ValueError):  # too large a sum, or +inf with -inf
        return sum(itertools.chain.from_iterable(rows))


class Totals:
    """The numbers of one rank's micro-batches, in their order; read to the host at the end."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self.weights: list[float] = []
        self.whole = self.fractional = 0  # micro-batches whose weight is an int, a float

    def add(self, loss_sum: Tensor, weight: float) -> None:
        """Add a micro-batch's loss sum and weight."""
        # float64 (float32 on MPS, which has no other) holds a loss of any type as it is; a copy,
        # since a compiled model may write the next one to the same place
        wide = torch.float32 if loss_sum.device.type == "mps" else torch.float64
        self._losses.append(loss_sum.detach().to(wide, copy=True))
        self.weights.append(weight)
        if isinstance(weight, int):
            self.whole += 1
        else:
            self.fractional += 1

    def losses(self) -> list[float]:
        """Each micro-batch's loss sum; one wait for the device."""
        return torch.stack(self._losses).tolist() if self._losses else []


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
        agreement: Agreement,
        totals: Totals,
        used: Sequence[bool],
        changed: Sequence[bool],
        stop: bool,
    ) -> None:
        world = self._world = agreement.world
        self._step, self._count, self._used = agreement.step, agreement.batch.count, len(used)
        # Each micro-batch's loss and weight has a place of its own, so that adding the ranks'
        # messages only adds zeros to it.
        first, end = agreement.ranges[world.rank]
        before, after = [0.0] * first, [0.0] * (self._count - end)
        self._message = torch.tensor(
            [
                *(totals.whole, totals.fractional, stop),
                *(*before, *totals.losses(), *after),
                *(*before, *totals.weights, *after),
                *(*used, *changed),
            ],
            dtype=torch.float64,
        )
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
        whole, fractional, stop = self._message[:3].tolist()
        losses, weights, rest = self._message[3:].split(
            [self._count, self._count, len(self._message) - 3 - 2 * self._count]
        )
        loss_sum, weight = total([losses.tolist()]), total([weights.tolist()])
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
        flags = (rest > 0).tolist()
        used, changed = flags[: self._used], flags[self._used :]
        return Closed(loss_sum / weight, weight, used, changed, stop > 0)
