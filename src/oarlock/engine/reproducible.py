"""Reproducible mode: the same bits of weights, losses and norms on any number of ranks.

Every micro-batch's gradient is a leaf of one fixed tree (see ``tree``). A rank adds up what it can
of its own range; the nodes that remain go, slice by slice, to the owners, who finish the tree. All
else that adds over ranks (norm, loss, BatchNorm's statistics) gathers the parts and adds them in
one fixed way.

The bits also depend on the kernels: one kind of device, one build of PyTorch, and on CPUs one
thread a rank, since kernels cut their sums by the number of threads.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from oarlock.engine.agreement import Agreement
from oarlock.engine.buckets import Bucket, Slot
from oarlock.engine.exchange import Exchange, dense
from oarlock.engine.owned import Owned
from oarlock.engine.tree import Node, Tree, merges, nodes_of
from oarlock.engine.wire import Delivery
from oarlock.errors import SetupError
from oarlock.world import World

log = logging.getLogger("oarlock")

# Elements whose squares are added in one go for the norm. Slices are multiples of it, so that no
# number of ranks cuts a block.
BLOCK = 4096


class TreeSums(Exchange):
    """What the reproducible exchanges share: gradients are summed in the fixed tree.

    ``sharding`` 2 sends every micro-batch's leaf at once; 0 and 1 add up locally first and send
    with the last backward. At 0 the sums are then gathered to all ranks.

    Args: those of the exchange that it is mixed into.
    """

    sharding = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._settled = True  # the layout may not depend on when gradients arrive
        self._pools: list[list[Tensor]] = [[] for _ in self.buckets]  # flat tensors to write to

    def _cut(self) -> tuple[int, int]:
        return self.world.size, BLOCK

    def _place(self, members: list[tuple[str, Parameter]], last: int = 0) -> None:
        # One layout at every rung and on any world: the norm is added by its blocks.
        Exchange._place(self, members, len(members) - 1)

    def begin(self) -> None:
        super().begin()
        self._lent = [list(pool) for pool in self._pools]
        self._held: list[tuple[Node, list[Tensor]]] = []  # this rank's sums: a flat a bucket
        self._targets: list[list[Tensor]] = []  # what the current leaf is added to, by bucket
        self._trees: list[Tree] = []
        self._deliveries: list[tuple[Any, Bucket, Tensor | None]] = []
        self._done = self._rounds = 0  # micro-batches of this rank; times that buckets were sent

    def _flat(self, place: int) -> Tensor:
        """A flat tensor for a bucket, its padding zero and the rest anything."""
        if self._lent[place]:
            return self._lent[place].pop()
        flat = self.buckets[place].new()
        if self.sharding < 2:
            self._pools[place].append(flat)
        return flat

    # -- backward --------------------------------------------------------------------------------

    def before_backward(self, agreement: Agreement, last: bool) -> None:
        leaf = agreement.batch.micro_batches[self._done].index
        self._done += 1
        self._begin_leaf(leaf)
        if last or self.sharding == 2:
            self._arm_tree(agreement)

    def _begin_leaf(self, leaf: int) -> None:
        count, self._node = merges([] if self.sharding == 2 else [n for n, _ in self._held], leaf)
        left = [self._held.pop()[1] for _ in range(count)]  # nearest first
        self._fresh = not left
        if self._fresh:
            flats = [self._flat(i) for i in range(len(self.buckets))] if self.sharding < 2 else []
            left = [flats]
        self._targets = [[flats[i] for flats in left if flats] for i in range(len(self.buckets))]
        for bucket in self.buckets:
            bucket.sent = False
            bucket.pending = len(bucket.slots)
            for slot in bucket.slots:
                slot.complete = False

    def _hook(self, name: str) -> Any:
        def arrived(parameter: Parameter) -> None:
            if not self._collecting:
                return
            bucket, slot = self._home[name]
            grad, parameter.grad = dense(name, parameter.grad), None
            if slot.complete:
                raise SetupError(
                    f"Step {self.world.steps + 1}: {name} got a second gradient in one backward "
                    f"(rank {self.world.rank}), so its sum has no fixed order.\n"
                    "This comes from reentrant activation checkpointing: pass "
                    "use_reentrant=False to it."
                )
            self._add(self.buckets.index(bucket), slot, grad)
            slot.used = True
            self._used.add(name)
            bucket.pending -= 1
            if self._armed:
                self._send_full()

        return arrived

    def _add(self, place: int, slot: Slot, grad: Tensor | None) -> None:
        """Add one parameter's gradient (None: zero) up as far as this rank's nodes go."""
        if not self._targets[place]:
            self._targets[place] = [self._flat(place)]
        first, *others = [slot.within(flat) for flat in self._targets[place]]
        if not self._fresh:
            first.add_(0.0 if grad is None else grad)
        elif grad is None:
            first.zero_()
        else:
            first.copy_(grad)
        for left in others:
            first = left.add_(first)
        slot.complete = True

    def after_backward(self) -> None:
        if self._last:  # the last one, or at sharding 2 each
            self._send_rest()
            self._armed = self._last = False
        else:
            for place in range(len(self.buckets)):
                self._fill_up(place)
        if self.sharding < 2:
            last = [targets[-1] for targets in self._targets]
            for place, targets in enumerate(self._targets):
                self._lent[place].extend(targets[:-1])  # already added to the last
            self._held.append((self._node, last))
        self._targets = [[] for _ in self.buckets]

    def _fill_up(self, place: int) -> None:
        """What this micro-batch did not use is a zero like any other leaf."""
        for slot in self.buckets[place].slots:
            if not slot.complete:
                self._add(place, slot, None)

    # -- to the owners ---------------------------------------------------------------------------

    def _arm_tree(self, agreement: Agreement) -> None:
        agreement.reach()
        self._last, self._armed, self._next = True, self.overlap, 0
        if not self._trees:
            self._trees = [Tree(agreement.batch.count) for _ in self.buckets]
        ranges = agreement.ranges
        if self.sharding == 2:  # this round's leaf of each rank that has one
            leaves = [(first + self._rounds, end) for first, end in ranges]
            ranges = [(leaf, min(leaf + 1, end)) for leaf, end in leaves]
        self._keys = [nodes_of(first, end) for first, end in ranges]
        self._rounds += 1

    def _send(self, bucket: Bucket) -> None:
        place = self.buckets.index(bucket)
        mine = self._keys[self.world.rank]
        flats: list[Tensor] = []
        if mine:
            self._fill_up(place)
            flats = [held[place] for _, held in self._held] + [self._targets[place][-1]]
            assert len(flats) == len(mine)
        bucket.sent = True
        self._next += 1
        gather = None
        if self.sharding == 0:
            gather = flats[0] if flats else self._flat(place)
        tree, given_up = self._trees[place], self.sharding == 2
        delivery = Delivery(bucket, flats, self._keys, tree, given_up, gather)
        self._deliveries.append((self._deliver(delivery), bucket, gather))
        size, part = self.world.size, bucket.part * bucket.dtype.itemsize
        self.sent_bytes += (size - 1) * part * (len(mine) + (gather is not None))
        del delivery, flats
        if self.sharding == 2:
            self._targets[place] = []
            while len(self._deliveries) > 2:
                self._arrived(self._deliveries.pop(0)[0])

    def _deliver(self, delivery: Delivery) -> Any:
        if self.world.size > 1:
            return self.wire.sum_in_tree(delivery)
        delivery.add_own(0)
        delivery.close(0)
        return None

    def _arrived(self, handle: Any) -> None:
        if handle is not None:
            super()._arrived(handle)

    def finish(self, agreement: Agreement) -> None:
        # A rank that has fewer micro-batches than others, or none, takes part all the same.
        self._targets = [[] for _ in self.buckets]
        rounds = max(agreement.counts) if self.sharding == 2 else 1
        while self._rounds < rounds:
            self._arm_tree(agreement)
            self._send_rest()
        for handle, _, _ in self._deliveries:
            self._arrived(handle)
        if self.sharding == 0:
            for _, bucket, flat in self._deliveries:
                assert flat is not None
                bucket.adopt(flat)
        self._deliveries, self._held = [], []
        self.synchronize()  # weights that no forward has read, on a rank without a micro-batch
        self.stop()

    def roots(self) -> list[Tensor]:
        """This rank's slice of each bucket's sum."""
        found = [tree.root for tree in self._trees]
        return [root for root in found if root is not None]

    def _clear_own(self) -> None:
        """The trees hold own slices' sums."""

    def norm(self, gradients: Sequence[Tensor]) -> float:
        return blocks_norm(self.roots(), self.world)


class ReproducibleExchange(TreeSums):
    """Sharding 0 in reproducible mode, also for a world of one."""

    def roots(self) -> list[Tensor]:
        return [b.slice(self.world.rank, b.allocate()) for b in self.buckets]


class ReproducibleOwned(TreeSums, Owned):
    """Sharding 1 and 2 in reproducible mode."""


def blocks_norm(roots: Sequence[Tensor], world: World) -> float:
    """The 2-norm over all ranks' slices: squares added block by block, then exactly (``fsum``).

    Args:
        roots: this rank's slices, each a whole number of blocks.
    """
    blocks = [block for root in roots for block in root.split(BLOCK)]
    per_rank = len(blocks)
    squares = torch.zeros(world.size, per_rank, dtype=torch.float64)
    own = [torch.dot(block, block) for block in map(_full, blocks)]
    squares[world.rank] = torch.stack(own).cpu().double()
    if world.size > 1:
        with world.lost_peer("summing the gradient's norm"):
            dist.all_reduce(squares, group=world.control)  # to zeros only: exact
    try:
        return math.sqrt(math.fsum(squares.flatten().tolist()))
    except OverflowError:
        return math.inf


def _full(block: Tensor) -> Tensor:
    return block.float() if block.dtype in (torch.float16, torch.bfloat16) else block


def prepare(world: World) -> None:
    """Fix what the bits would depend on besides the order of sums."""
    if world.device.type == "cuda":
        # cuBLAS reads it when it starts; without it deterministic mode refuses every product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif world.device.type == "cpu" and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        log.info(
            "Reproducible mode: each rank computes with one thread, since CPU kernels give other "
            "bits with another number of threads."
        )


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask PyTorch for deterministic kernels.

    Raises:
        SetupError: naming an operation that has none.
    """
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise SetupError(
            f"Reproducible mode: {str(error).split(' does not ')[0]} has no deterministic kernel "
            "here, so no two runs of it need give the same bits.\nReplace that operation, or use "
            f"reproducible=False.\nPyTorch says: {error}"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
