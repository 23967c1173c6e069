"""The exchange: gradients of all ranks are summed, bucket by bucket, while backward still runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from oarlock.batches import MicroBatch
from oarlock.engine.agreement import Agreement
from oarlock.engine.buckets import ALIGN, Bucket, Slot, fill_buckets
from oarlock.engine.norm import global_norm
from oarlock.engine.pieces import Pieces
from oarlock.engine.wire import wire_for
from oarlock.errors import SetupError
from oarlock.world import World

FIRST_BUCKET_BYTES = 1 << 20
WAITING = "waiting for the other ranks' gradients"


class Alone:
    """In a world of one gradients stay where autograd puts them: there is nothing to exchange.

    Its methods are those of :class:`Exchange`, and say in short what each is for.
    """

    wait_seconds = 0.0  # what of the exchange was not hidden behind backward
    slices: Pieces | None = None  # where the optimizer holds slices only
    sent_bytes = 0  # payload of this step's exchange, as handed to the backend

    def __init__(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        self._parameters = [p for _, p in parameters]
        self.buckets: list[Bucket] = []

    def rounds(
        self, own: Sequence[MicroBatch], agreement: Agreement | None = None
    ) -> Iterable[tuple[MicroBatch, bool]]:
        """The micro-batches that this rank runs, and whether each counts.

        Where every forward is collective some may be run again, only to take part. Then this is
        collective too. ``agreement``: of the step, in which they are run.
        """
        return [(micro_batch, True) for micro_batch in own]

    def meetings(self) -> AbstractContextManager[None]:
        """Around forwards and backwards: those that are collective may lose a peer."""
        return nullcontext()

    def begin(self) -> None:
        """Start a step. No parameter's ``.grad`` may be set."""

    def before_backward(self, agreement: Agreement, last: bool) -> None:
        """A micro-batch's backward follows; ``last``: this rank's last one in the step."""

    def after_backward(self) -> None:
        """That backward is done."""

    def finish(self, agreement: Agreement) -> None:
        """Send what is left and wait for all: the gradients are now sums over all ranks."""

    def stop(self) -> None:
        """Collect no more: gradients computed outside a step stay where autograd puts them."""

    def used(self) -> list[bool]:
        """For each parameter, in the order given: did this rank compute a gradient for it?"""
        return [p.grad is not None for p in self._parameters]

    def attach(self, used: Sequence[bool]) -> list[Tensor]:
        """Give the optimizer its gradients: the sums, None for what no rank used.

        Returns what to divide, clip and take the norm of, as few tensors as possible.
        """
        return [p.grad for p in self._parameters if p.grad is not None]

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """The 2-norm of the whole summed gradient, the same on all ranks."""
        return global_norm(gradients)

    def bad_gradient(self) -> str:
        """Where no rank can compute a gradient alone: the last parameter's name whose sum is not
        finite. Collective. Empty: none, or look for it by yourself."""
        return ""

    def updated(self) -> None:
        """The optimizer has made its update."""

    def synchronize(self) -> None:
        """Wait for weights that are still on their way; they come by themselves when read."""

    def settle(self, used: Sequence[bool]) -> None:
        """The step is over: prepare the next."""

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[Parameter]]:
        """The model's parameters in each group of the optimizer."""
        return [group["params"] for group in optimizer.param_groups]

    def whole_state(self) -> dict[str, dict[str, Any]] | None:
        """Where the optimizer holds slices: its state by name, whole, on rank 0. Collective."""
        return None

    def whole_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Where ranks hold parts of the weights only: these, whole, on rank 0's host. Collective.
        Empty where the model's own tensors are whole."""
        return {}

    def detach(self) -> None:
        """Let go of parameters and optimizer, so that another engine can take them."""


def dense(name: str, grad: Tensor | None) -> Tensor:
    """A parameter's gradient. SetupError where it is sparse."""
    if grad is None or grad.layout != torch.strided:
        raise SetupError(
            f"{name} has a sparse gradient, which the exchange cannot carry.\n"
            "Build the layer with sparse=False."
        )
    return grad


class Exchange(Alone):
    """Sharding 0: collects the gradients of one rank and sums them over all ranks.

    A step goes: ``begin`` → backward of the earlier micro-batches (gradients gather in the
    buckets) → ``before_backward(last=True)`` → backward of the last one (each bucket leaves as
    soon as it is full) → ``finish``. Buckets leave in the same fixed order on all ranks, whatever
    the order in which they fill: that keeps ranks that take different branches from mixing them up.

    Args:
        world: the ranks, more than one.
        parameters: name and parameter of everything trainable.
        bucket_bytes: size of a bucket.
        overlap: False sends everything after backward; slower, for debugging.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, Parameter]],
        bucket_bytes: int,
        overlap: bool = True,
    ) -> None:
        self.world, self.overlap = world, overlap
        self.wire = wire_for(world)  # for the rungs and modes that move slices
        self.bucket_bytes = bucket_bytes
        self._collecting = self._last = self._armed = self._settled = False
        self._arrivals: list[str] = []
        self._named = list(parameters)
        self._next_layout: tuple[list[tuple[str, Parameter]], int] | None = None
        self._works: list[tuple[Any, Bucket, Tensor]] = []
        self._next = 0  # the bucket to send next
        self._place(list(reversed(self._named)))  # gradients come last layer first
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self._named
        ]

    def _place(self, members: list[tuple[str, Parameter]], last: int = 0) -> None:
        first = min(FIRST_BUCKET_BYTES, self.bucket_bytes)
        # Nothing hides what is sent at the very end, so the gradient that comes last (an
        # embedding's, often large) keeps no other waiting; not where one bucket holds them all.
        several = sum(p.numel() * p.element_size() for _, p in members) > first
        cut = last if last > 0 and several else len(members)
        self.buckets = [
            bucket
            for some in (members[:cut], members[cut:])
            for bucket in fill_buckets(some, self.bucket_bytes, first, *self._cut())
        ]
        self._home: dict[str, tuple[Bucket, Slot]] = {
            slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots
        }

    def _cut(self) -> tuple[int, int]:
        """Into how many slices a bucket is cut, and at multiples of how many elements."""
        return 1, ALIGN

    def _hook(self, name: str) -> Any:
        def arrived(parameter: Parameter) -> None:
            if not self._collecting:
                return
            bucket, slot = self._home[name]
            grad = parameter.grad
            if self._armed and slot.complete:
                raise SetupError(
                    f"Step {self.world.steps + 1}: {name} got a second gradient in one backward "
                    f"(rank {self.world.rank}), when its bucket may have left.\n"
                    "This comes from reentrant activation checkpointing: pass "
                    "use_reentrant=False to it, or overlap=False to DataParallel."
                )
            if slot.view is None or grad is not slot.view:
                # First gradient of this step: autograd made a tensor of its own. Copying it once
                # is cheaper than zeroing the bucket and adding.
                bucket.allocate()
                assert slot.view is not None
                slot.view.copy_(dense(name, grad))
                parameter.grad = slot.view
                slot.used = True
                self._used.add(name)
            if self._last and not self._settled:
                self._arrivals.append(name)
            if self._armed:
                slot.complete = True
                bucket.pending -= 1
                self._send_full()

        return arrived

    def begin(self) -> None:
        if self._next_layout is not None:
            # Here, since no gradient holds the old buckets any more: else they'd be there twice.
            members, last = self._next_layout
            self.buckets, self._home, self._next_layout = [], {}, None
            self._place(members, last)
        self._collecting, self._last, self._armed = True, False, False
        self._works, self._next = [], 0
        self._used: set[str] = set()
        self.sent_bytes, self.wait_seconds = 0, 0.0
        for bucket in self.buckets:
            bucket.sent = False
            for slot in bucket.slots:
                slot.used = slot.complete = False

    def before_backward(self, agreement: Agreement, last: bool) -> None:
        if last:
            self._arm(agreement)

    def _arm(self, agreement: Agreement) -> None:
        """In the backward that follows buckets are sent as they fill."""
        agreement.reach()  # all ranks must be at one place
        self._last, self._armed = True, self.overlap
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)

    def _send_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].pending <= 0:
            self._send(self.buckets[self._next])

    def _send(self, bucket: Bucket) -> None:
        flat = bucket.allocate()
        bucket.clear_unused()
        bucket.sent = True
        self._next += 1
        self._carry(bucket, flat)

    def _carry(self, bucket: Bucket, flat: Tensor) -> None:
        wire = flat.cpu() if self.world.staged else flat
        with self.world.lost_peer("sending gradients"):
            work = dist.all_reduce(wire, async_op=True)
        self._works.append((work, bucket, wire))
        self.sent_bytes += bucket.bytes

    def _send_rest(self) -> None:
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])

    def _arrived(self, handle: Any) -> None:
        """Wait for what the wire carries."""
        started = time.perf_counter()
        self.wire.wait(handle, WAITING)
        self.wait_seconds += time.perf_counter() - started

    def finish(self, agreement: Agreement) -> None:
        self._send_rest()
        started = time.perf_counter()
        for work, bucket, wire in self._works:
            self.world.wait(work, WAITING)
            if wire is not bucket.flat and bucket.flat is not None:
                bucket.flat.copy_(wire)
        self.wait_seconds = time.perf_counter() - started
        self._works = []
        self.stop()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def stop(self) -> None:
        self._collecting = self._last = self._armed = False

    def used(self) -> list[bool]:
        return [name in self._used for name, _ in self._named]

    def attach(self, used: Sequence[bool]) -> list[Tensor]:
        for (name, parameter), is_used in zip(self._named, used, strict=True):
            parameter.grad = self._home[name][1].view if is_used else None
        return [bucket.allocate() for bucket in self.buckets]

    def settle(self, used: Sequence[bool]) -> None:
        """After the first step: from the next on, order the buckets as gradients came on rank 0.

        Parameters that no rank used come last, so that they hold no other bucket up.
        """
        if self._settled:
            return
        self._settled = True
        arrivals = self.world.broadcast(self._arrivals)
        place = {name: i for i, name in enumerate(arrivals)}
        late = len(place)
        order = {
            name: (not is_used, place.get(name, late))
            for (name, _), is_used in zip(self._named, used, strict=True)
        }
        members = sorted(self._named, key=lambda member: order[member[0]])
        self._next_layout = (members, sum(used) - 1)
