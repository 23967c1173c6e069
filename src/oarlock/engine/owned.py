"""Sharding 1 and 2: gradients go to the owners of slices, who update, and weights come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from oarlock.engine.agreement import Agreement
from oarlock.engine.buckets import ALIGN, Bucket
from oarlock.engine.exchange import Exchange
from oarlock.engine.norm import global_norm
from oarlock.engine.pieces import State
from oarlock.engine.slices import OwnerSlices
from oarlock.engine.weights import Journey, can_hide, wait_before_forward
from oarlock.world import World

_IN_FLIGHT = 2  # buckets on their way at sharding 2; a third waits until the first has arrived


class Owned(Exchange):
    """Each rank keeps whole weights, but the optimizer's state only for its slices (ZeRO-1).

    At sharding 2 (ZeRO-2) gradients too are kept only for own slices: *every* micro-batch's
    backward is a round of the exchange, and a bucket's memory is given back once it has left.
    A rank that has fewer micro-batches than another sits the last rounds out, receiving.

    (Rajbhandari et al., "ZeRO", 2020.) Args: as :class:`Exchange`, and the optimizer, whose
    groups then hold this rank's pieces.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, Parameter]],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        bucket_bytes: int,
        overlap: bool,
        sharding: int,
    ) -> None:
        self.sharding = sharding
        super().__init__(world, parameters, bucket_bytes, overlap)
        # Weights lie in the buckets, so that these stay as they are; the first layer's gradient
        # comes last, in whatever model.
        self._settled = True
        self.slices: OwnerSlices = OwnerSlices(self.buckets, optimizer, world)
        self._own: list[Tensor] = []  # at sharding 2: the sums of own slices
        self._round = 0
        self._journeys: list[Journey] = []
        self._model = model
        self._waits: list[Any] = []  # hooks of the modules

    def _cut(self) -> tuple[int, int]:
        return self.world.size, ALIGN

    def _place(self, members: list[tuple[str, Parameter]], last: int = 0) -> None:
        super()._place(members, len(members) - 1)

    def begin(self) -> None:
        self.slices.check_in_place()
        super().begin()
        self._round = 0
        self._clear_own()

    def _clear_own(self) -> None:
        if self.sharding == 2:
            if not self._own:
                self._own = [
                    torch.zeros(b.part, dtype=b.dtype, device=b.device) for b in self.buckets
                ]
            torch._foreach_zero_(self._own)

    def before_backward(self, agreement: Agreement, last: bool) -> None:
        if last or self.sharding == 2:
            self._arm(agreement)

    def _arm(self, agreement: Agreement) -> None:
        super()._arm(agreement)
        self._senders = agreement.senders(self._round)
        if self.sharding == 2:
            self._next = 0
            for bucket in self.buckets:
                bucket.sent = False
                for slot in bucket.slots:
                    slot.used = slot.complete = False

    def after_backward(self) -> None:
        if self.sharding == 2:
            self._end_round()

    def _end_round(self) -> None:
        self._send_rest()
        self._armed = False
        self._round += 1

    def _carry(self, bucket: Bucket, flat: Tensor) -> None:
        rank = self.world.rank
        own = bucket.slice(rank, flat)
        if self.sharding == 2:
            own = self._own[self.buckets.index(bucket)]
        self._works.append((self.wire.to_owners(flat, own, self._senders), bucket, flat))
        if rank in self._senders:
            self.sent_bytes += (self.world.size - 1) * own.numel() * own.element_size()
        if self.sharding == 2:
            for slot in bucket.slots:
                slot.parameter.grad = None
            bucket.release()
            del flat
            while len(self._works) > _IN_FLIGHT:
                self._arrived(self._works.pop(0)[0])

    def finish(self, agreement: Agreement) -> None:
        if self.sharding == 1:
            self._senders = agreement.senders(0)
            self._send_rest()
        else:
            while self._round < max(agreement.counts):
                self._arm(agreement)
                self._end_round()
        for handle, _, _ in self._works:
            self._arrived(handle)
        self._works = []
        self.synchronize()  # what no forward has read: long there, since it left before these
        self.stop()

    def attach(self, used: Sequence[bool]) -> list[Tensor]:
        for _, parameter in self._named:
            parameter.grad = None
        own = self.roots()
        names = {name for (name, _), is_used in zip(self._named, used, strict=True) if is_used}
        self.slices.attach(own, names)
        return own

    def roots(self) -> list[Tensor]:
        """This rank's slice of each bucket's sum."""
        if self.sharding == 1:
            return [b.slice(self.world.rank, b.allocate()) for b in self.buckets]
        return self._own

    def norm(self, gradients: Sequence[Tensor]) -> float:
        square = torch.tensor(global_norm(gradients) ** 2, dtype=torch.float64)
        with self.world.lost_peer("summing the gradient's norm"):
            dist.all_reduce(square, group=self.world.control)
        return math.sqrt(float(square))

    def updated(self) -> None:
        hidden = self.overlap and can_hide(self._model)
        if hidden and not self._waits:
            self._waits = wait_before_forward(self._model)
        pairs = list(zip(self.buckets, self.slices.weights, strict=True))
        for bucket, weights in reversed(pairs):  # as the next forward needs them
            members = [slot.parameter for slot in bucket.slots]
            self._journeys.append(Journey(self.wire, self.world, weights, members))
            self.sent_bytes += (self.world.size - 1) * bucket.part * weights.element_size()
        if not hidden:
            self.synchronize()

    def synchronize(self) -> None:
        for journey in self._journeys:
            journey.arrive()
        self.wait_seconds += sum(journey.waited for journey in self._journeys)
        self._journeys = []
        self._forget_waits()  # layers that choose a kernel by it see a model without hooks

    def _forget_waits(self) -> None:
        for hook in self._waits:
            hook.remove()
        self._waits = []

    def settle(self, used: Sequence[bool]) -> None:
        pass

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[Parameter]]:
        return self.slices.groups

    def whole_state(self) -> State | None:
        return self.slices.whole_state()

    def detach(self) -> None:
        self.synchronize()
        super().detach()
        self.slices.restore()
