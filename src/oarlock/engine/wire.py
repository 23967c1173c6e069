"""The wire: slices of flat tensors to their owners, and back to everyone.

Two wires with the same three verbs. ``Collectives`` is for backends that have a good
reduce-scatter (NCCL). gloo's is an all-reduce inside, with twice the bytes, so there ``Courier``
sends the slices from rank to rank itself.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.engine.buckets import Bucket
from oarlock.engine.tree import Node, Tree
from oarlock.world import World

PIECE_BYTES = 4 << 20  # one message; large enough for the link, small enough to add while it fills
IN_FLIGHT = 3  # messages that a rank is ready to receive from each peer


@dataclass
class Delivery:
    """Nodes of the fixed tree on their way to the owners of their slices.

    Attributes:
        bucket: whose layout the flat tensors have.
        flats: [ranks · part] each, the nodes of this rank.
        keys: for each rank, which nodes it has.
        tree: where the owner adds its slices of them up.
        copied: the flats are given up after sending, so own slices of them are copied.
        gather: [ranks · part], where each slice of the sum then comes to all ranks; None: nowhere.
    """

    bucket: Bucket
    flats: list[Tensor]
    keys: list[list[Node]]
    tree: Tree
    copied: bool
    gather: Tensor | None

    def add_own(self, rank: int) -> None:
        """Own slices of own nodes."""
        for node, flat in zip(self.keys[rank], self.flats, strict=True):
            own = self.bucket.slice(rank, flat)
            self.tree.add(node, own.clone() if self.copied else own)

    def close(self, rank: int) -> None:
        """These nodes have come: put the sum where it will be gathered from."""
        if self.gather is not None:
            assert self.tree.root is not None
            self.bucket.slice(rank, self.gather).copy_(self.tree.root)


class Wire(Protocol):
    """Moves slices. Every rank calls the verbs in the same order with tensors of one layout."""

    def to_owners(self, flat: Tensor, own: Tensor, senders: Sequence[int]) -> Any:
        """Add all ranks' ``flat`` [ranks · part] up, each slice on its owner.

        Args:
            own: [part], where this rank's slice of the sum goes: this rank's slice of ``flat``
                itself, or apart from it, and then what it holds is added to.
            senders: the ranks whose ``flat`` counts; the others' are zero and may not be sent.
        """

    def to_all(self, flat: Tensor) -> Any:
        """Overwrite each slice of ``flat`` [ranks · part] with its owner's."""

    def sum_in_tree(self, delivery: Delivery) -> Any:
        """Add all ranks' nodes up in the fixed tree, each slice on its owner."""

    def wait(self, handle: Any, doing: str) -> None:
        """Wait for what one of the verbs returned. On a GPU: its stream waits, not the host."""


def wire_for(world: World) -> Wire:
    """The wire that suits the backend."""
    return Courier(world) if world.backend == "gloo" else Collectives(world)


class Collectives:
    """The backend's own reduce-scatter and all-gather, on its own stream."""

    def __init__(self, world: World) -> None:
        self.world = world

    def to_owners(self, flat: Tensor, own: Tensor, senders: Sequence[int]) -> Any:
        rank, part = self.world.rank, own.numel()
        mine = flat[rank * part : (rank + 1) * part]
        apart = own.data_ptr() != mine.data_ptr()
        out = torch.empty_like(own) if apart else mine
        with self.world.lost_peer("sending gradients"):
            work = dist.reduce_scatter_tensor(out, flat, async_op=True)

        # flat is kept here until the wait: the allocator may not hand it to another stream before
        def arrive(doing: str, sent: Tensor = flat) -> None:
            self.world.wait(work, doing)
            if apart:
                own.add_(out)

        return arrive

    def to_all(self, flat: Tensor) -> Any:
        part = flat.numel() // self.world.size
        mine = flat[self.world.rank * part : (self.world.rank + 1) * part]
        with self.world.lost_peer("sending weights"):
            work = dist.all_gather_into_tensor(flat, mine, async_op=True)
        return lambda doing, sent=flat: self.world.wait(work, doing)

    def sum_in_tree(self, delivery: Delivery) -> Any:
        d, bucket, size, rank = delivery, delivery.bucket, self.world.size, self.world.rank
        others = [r for r in range(size) if r != rank]
        nodes = [node for source in others for node in d.keys[source]]
        ins = [bucket.part * len(d.flats) * (to != rank) for to in range(size)]
        outs = [bucket.part * len(d.keys[source]) * (source != rank) for source in range(size)]
        incoming = torch.empty(sum(outs), dtype=bucket.dtype, device=bucket.device)
        slices = [bucket.slice(to, flat) for to in others for flat in d.flats]
        outgoing = torch.cat(slices) if slices else incoming[:0]
        with self.world.lost_peer("sending gradients"):
            work = dist.all_to_all_single(incoming, outgoing, outs, ins, async_op=True)

        def arrive(doing: str, sent: Tensor = outgoing) -> None:  # which must live until then
            self.world.wait(work, doing)
            d.add_own(rank)
            for node, part in zip(nodes, incoming.view(-1, bucket.part), strict=True):
                d.tree.add(node, part)
            d.close(rank)
            if d.gather is not None:
                self.wait(self.to_all(d.gather), doing)

        return arrive

    def wait(self, handle: Any, doing: str) -> None:
        handle(doing)


class _Parcel:
    """A job of the courier, and whether it is done.

    The job stops once, when it has said what it is ready to receive.
    """

    def __init__(self, job: Iterator[None]) -> None:
        self.job, self.done = job, threading.Event()


class Courier:
    """Sends slices from rank to rank in pieces, on a thread of its own.

    A rank sends each slice to its owner and adds what comes in to its own slice as it comes, in
    the order of the ranks. On two ranks that is half of the bytes of an all-reduce each way, and
    each element is added once.

    gloo sends a message only when its receiver has said that it is ready, and says so on the same
    connection as it sends on. Said late, it stands in line behind megabytes going the other way,
    and the two directions take turns instead of running at once: on a 1 Gbit link that was half the
    speed. So each job first gets ready to receive, also the one after the job that is running.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._jobs: queue.SimpleQueue[_Parcel] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        rank, size = world.rank, world.size
        self._others = [(rank + k) % size for k in range(1, size)]  # not all to rank 0 at once
        self._posted = 0

    def to_owners(self, flat: Tensor, own: Tensor, senders: Sequence[int]) -> Any:
        return self._post(self._give_and_add(flat, own, senders, self._tag()))

    def to_all(self, flat: Tensor) -> Any:
        return self._post(self._give_and_take(flat, self._tag()))

    def sum_in_tree(self, delivery: Delivery) -> Any:
        return self._post(self._give_and_climb(delivery, self._tag()))

    def wait(self, handle: Any, doing: str) -> None:
        # An error of the thread ends all jobs after it; the others' end is seen by gloo's timeout.
        handle.done.wait()
        if self._error is not None:
            with self.world.lost_peer(doing):
                raise self._error

    def _tag(self) -> int:
        """What tells the messages of jobs that overlap apart."""
        self._posted += 1
        return self._posted % 4

    def _post(self, job: Iterator[None]) -> _Parcel:
        if self._thread is None:
            # a daemon: a peer that is gone must not keep this process from ending
            self._thread = threading.Thread(target=self._work, name="oarlock-wire", daemon=True)
            self._thread.start()
        parcel = _Parcel(job)
        self._jobs.put(parcel)
        return parcel

    def _work(self) -> None:
        started: deque[_Parcel] = deque()
        while True:
            while not started or (len(started) < 2 and not self._jobs.empty()):
                started.append(self._jobs.get())
                self._advance(started[-1], 1)
            parcel = started.popleft()
            self._advance(parcel, None)
            parcel.job = iter(())  # lets go of the tensors
            parcel.done.set()
            del parcel

    def _advance(self, parcel: _Parcel, stops: int | None) -> None:
        """Run a job to its stop, or to its end."""
        try:
            if self._error is None:
                for _ in itertools.islice(parcel.job, stops):
                    pass
        except Exception as error:  # any: a thread that ended would leave its peers waiting
            self._error = error

    def _give_and_add(
        self, flat: Tensor, own: Tensor, senders: Sequence[int], tag: int
    ) -> Iterator[None]:
        rank, part = self.world.rank, own.numel()
        sources = [s for s in senders if s != rank]
        wanted = [(piece, source) for piece in _pieces(own) for source in sources]
        ready = IN_FLIGHT * len(sources)
        coming = deque(self._expect(*one, tag) for one in wanted[:ready])
        yield
        sends = []
        wire = flat.cpu() if self.world.staged else flat
        if rank in senders:
            slices = {to: wire[to * part : (to + 1) * part] for to in self._others}
            sends = self._send(slices, tag)
            mine = flat[rank * part : (rank + 1) * part]
            if own.data_ptr() != mine.data_ptr():
                own.add_(mine)
        for i in range(len(wanted)):
            work, piece, incoming = coming.popleft()
            work.wait()
            piece.add_(incoming.to(piece.device) if self.world.staged else incoming)
            if i + ready < len(wanted):
                coming.append(self._expect(*wanted[i + ready], tag))
        for work in sends:
            work.wait()

    def _give_and_climb(self, d: Delivery, tag: int) -> Iterator[None]:
        rank, sends = self.world.rank, []
        coming: list[tuple[Node, Tensor, list[Any]]] = []
        for source in (r for r in range(self.world.size) if r != rank):
            for node in d.keys[source]:
                part = torch.empty(d.bucket.part, dtype=d.bucket.dtype)
                coming.append((node, part, self._receive(part, source, tag)))
        yield
        for flat in d.flats:
            wire = flat.cpu() if self.world.staged else flat
            sends += self._send({to: d.bucket.slice(to, wire) for to in self._others}, tag)
        d.add_own(rank)
        for node, part, works in coming:
            for work in works:
                work.wait()
            d.tree.add(node, part.to(self.world.device))
        for work in sends:
            work.wait()
        d.close(rank)
        if d.gather is not None:
            for _ in self._give_and_take(d.gather, tag):
                pass

    def _give_and_take(self, flat: Tensor, tag: int) -> Iterator[None]:
        size, rank = self.world.size, self.world.rank
        wire = flat.cpu() if self.world.staged else flat
        slices = list(wire.view(size, -1))
        takes = [w for source in self._others for w in self._receive(slices[source], source, tag)]
        yield
        sends = self._send(dict.fromkeys(self._others, slices[rank]), tag)
        for work in (*takes, *sends):
            work.wait()
        if wire is not flat:
            flat.copy_(wire)

    def _send(self, slices: dict[int, Tensor], tag: int) -> list[Any]:
        pieces = [[(piece, to) for piece in _pieces(part)] for to, part in slices.items()]
        return [
            dist.isend(piece, dst=to, tag=tag)
            for turn in zip(*pieces, strict=True)
            for piece, to in turn
        ]

    def _receive(self, part: Tensor, source: int, tag: int) -> list[Any]:
        return [dist.irecv(piece, src=source, tag=tag) for piece in _pieces(part)]

    def _expect(self, piece: Tensor, source: int, tag: int) -> tuple[Any, Tensor, Tensor]:
        incoming = torch.empty(piece.shape, dtype=piece.dtype)
        return dist.irecv(incoming, src=source, tag=tag), piece, incoming


def _pieces(part: Tensor) -> Sequence[Tensor]:
    return part.split(max(1, PIECE_BYTES // part.element_size()))
