"""The exchange: gradients of all ranks are summed, bucket by bucket, while backward still runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from oarlock.engine.buckets import Bucket, Slot, fill_buckets
from oarlock.errors import SetupError
from oarlock.world import World

FIRST_BUCKET_BYTES = 1 << 20


class Exchange:
    """Collects the gradients of one rank and sums them over all ranks.

    A step goes: ``begin`` → backward of the earlier micro-batches (gradients gather in the
    buckets) → ``arm`` → backward of the last one (each bucket leaves as soon as it is full) →
    ``finish``. Buckets leave in the same fixed order on all ranks, whatever the order in which
    they fill: that is what keeps ranks that take different branches from mixing them up.

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
        self.bucket_bytes = bucket_bytes
        self.sent_bytes = 0  # payload of this step's exchange, as handed to the backend
        self.wait_seconds = 0.0  # what of the exchange was not hidden behind backward
        self._collecting = self._last = self._armed = self._settled = False
        self._arrivals: list[str] = []
        self._parameters = list(parameters)
        self._next_layout: tuple[list[tuple[str, Parameter]], int] | None = None
        self._place(list(reversed(self._parameters)))  # gradients come last layer first
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self._parameters
        ]

    def _place(self, members: list[tuple[str, Parameter]], last: int = 0) -> None:
        first = min(FIRST_BUCKET_BYTES, self.bucket_bytes)
        # Nothing hides what is sent at the very end, so the gradient that comes last (an
        # embedding's, often large) keeps no other waiting; not where one bucket holds them all.
        several = sum(p.numel() * p.element_size() for _, p in members) > first
        cut = last if last > 0 and several else len(members)
        self.buckets = fill_buckets(members[:cut], self.bucket_bytes, first)
        self.buckets += fill_buckets(members[cut:], self.bucket_bytes, first)
        self._home: dict[str, tuple[Bucket, Slot]] = {
            slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots
        }
        self._works: list[tuple[Any, Bucket, Tensor]] = []
        self._next = 0

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
            if grad is not slot.view:
                # First gradient of this step: autograd made a tensor of its own. Copying it once
                # is cheaper than zeroing the bucket and adding.
                if grad is None or grad.is_sparse or grad.layout != slot.view.layout:
                    raise SetupError(
                        f"{name} has a sparse gradient, which the exchange cannot carry.\n"
                        "Build the layer with sparse=False."
                    )
                slot.view.copy_(grad)
                parameter.grad = slot.view
                slot.used = True
            if self._last and not self._settled:
                self._arrivals.append(name)
            if self._armed:
                slot.complete = True
                bucket.pending -= 1
                self._send_full()

        return arrived

    def begin(self) -> None:
        """Start a step: nothing is collected yet. No parameter's ``.grad`` may be set."""
        if self._next_layout is not None:
            # Here, since no gradient holds the old buckets any more: else they'd be there twice.
            members, last = self._next_layout
            self.buckets, self._home, self._next_layout = [], {}, None
            self._place(members, last)
        self._collecting, self._last, self._armed = True, False, False
        self._works, self._next = [], 0
        self.sent_bytes, self.wait_seconds = 0, 0.0
        for bucket in self.buckets:
            bucket.sent = False
            for slot in bucket.slots:
                slot.used = slot.complete = False

    def arm(self) -> None:
        """The next backward is this rank's last in the step: send buckets as they fill."""
        self._last, self._armed = True, self.overlap
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)

    def _send_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].pending <= 0:
            self._send(self.buckets[self._next])

    def _send(self, bucket: Bucket) -> None:
        bucket.clear_unused()
        bucket.sent = True
        self._next += 1
        wire = bucket.flat.cpu() if self.world.staged else bucket.flat
        with self.world.lost_peer("sending gradients"):
            work = dist.all_reduce(wire, async_op=True)
        self._works.append((work, bucket, wire))
        self.sent_bytes += bucket.bytes

    def finish(self) -> None:
        """Send what is left and wait for all; the buckets then hold the sums over the ranks."""
        while self._next < len(self.buckets):
            self._send(self.buckets[self._next])
        started = time.perf_counter()
        for work, bucket, wire in self._works:
            self.world.wait(work, "waiting for the other ranks' gradients")
            if wire is not bucket.flat:
                bucket.flat.copy_(wire)
        self.wait_seconds = time.perf_counter() - started
        self._works = []
        self.stop()

    def detach(self) -> None:
        """Let go of the parameters, so that the buckets can be freed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def stop(self) -> None:
        """Collect no more: gradients computed outside a step stay where autograd puts them."""
        self._collecting = self._last = self._armed = False

    def used(self) -> list[bool]:
        """For each parameter, in the order given: did this rank compute a gradient for it?"""
        return [self._home[name][1].used for name, _ in self._parameters]

    def attach(self, used: Sequence[bool]) -> list[Tensor]:
        """Point each used parameter's ``.grad`` at its sum, the others' at None.

        Returns what to divide, clip and take the norm of: the flat buckets.
        """
        for (name, parameter), is_used in zip(self._parameters, used, strict=True):
            parameter.grad = self._home[name][1].view if is_used else None
        return [bucket.flat for bucket in self.buckets]

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
            for (name, _), is_used in zip(self._parameters, used, strict=True)
        }
        members = sorted(self._parameters, key=lambda member: order[member[0]])
        self._next_layout = (members, sum(used) - 1)
