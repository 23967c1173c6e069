"""The world: which rank this process is, on which device, and how it speaks to the others."""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from oarlock import devices
from oarlock.devices import backend_for, device_for
from oarlock.environment import read_environment
from oarlock.errors import OarlockError, OutOfStepError, PeerLostError, SetupError, WorldError
from oarlock.processes import die_with_parent
from oarlock.rendezvous import Arrival, open_store, roll_call

# What a rank can be about to do, as exchanged before it does so; see World.announce.
KINDS = (
    "step",
    "evaluation",
    "save",
    "load",
    "check",
    "construction",
    "forward",
    "barrier",
    "leaving",
)
_RECORD = 12  # int64 numbers in an announcement: kind, then up to 11 of the caller's

_current: World | None = None
_shared: list[World] = []  # the worlds of several ranks that this process joined
_joins = 0
_plain_hook: Callable[..., Any] | None = None  # what printed errors before us


def current() -> World:
    """The world that this process joined last; a world of one where it joined none."""
    return _current if _current is not None and not _current.closed else World()


class Announcement:
    """An announcement on its way; ``wait`` returns every rank's numbers or says who differs."""

    def __init__(self, world: World, kind: str, numbers: Sequence[int]) -> None:
        self._world, self._kind = world, kind
        record = [KINDS.index(kind), *numbers]
        self._mine = torch.tensor(record + [0] * (_RECORD - len(record)), dtype=torch.int64)
        self._all = self._mine.repeat(world.size, 1)
        self._work = None
        if world.size > 1:
            parts = list(self._all.unbind(0))
            self._work = dist.all_gather(parts, self._mine, group=world.control, async_op=True)
            self._parts = parts

    def wait(self) -> list[list[int]]:
        """Every rank's numbers, in the order of the ranks.

        Raises:
            OutOfStepError: the ranks are about to do different things.
            PeerLostError: a rank is gone or did not arrive in time.
        """
        if self._work is not None:
            self._world.wait(self._work, f"announcing its {self._kind}")
            self._all = torch.stack(self._parts)
        records = self._all.tolist()
        if len({r[0] for r in records}) > 1:
            self._world._failed = True
            lines = "\n".join(f"  rank {i}: {_what(r)}" for i, r in enumerate(records))
            raise OutOfStepError(
                f"The ranks are not doing the same thing (seen on rank {self._world.rank}, "
                f"{self._world.host}):\n{lines}\n"
                "Each rank must run the same steps, evaluations and saves in the same order: look "
                "for code under `if rank == 0:` or loops of unequal length."
            )
        return [r[1:] for r in records]


def _what(record: list[int]) -> str:
    kind = KINDS[record[0]]
    if kind == "step":
        return f"step {record[1]} (epoch {record[2]}, batch {record[3]})"
    return f"{kind} after {record[1]} steps"


class World:
    """A rank's view of all ranks. Made by :func:`join`; ``World()`` is a world of one.

    Attributes:
        rank, size: this rank's number, and how many there are.
        local_rank, local_size: the same among the ranks of this machine.
        host: this machine's name.
        device: where this rank computes.
        backend: 'nccl', 'xccl' or 'gloo'; 'none' in a world of one.
        staged: gradients must pass through host memory, because the backend is gloo and the
            device is not the CPU.
        control: a gloo group for small host-side messages; it never carries tensors of the model.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        self.host = socket.gethostname()
        self.device = torch.device(device) if device is not None else device_for(0, 1)
        self.backend, self.staged, self.closed = "none", False, False
        self.timeout = 600.0
        self.control: dist.ProcessGroup | None = None
        self.steps = 0  # updates so far, kept by the engine: named when ranks differ
        self.unfinished: set[Any] = set()  # transfers to wait for (arrive()) before leaving
        self._store: dist.Store | None = None
        self._failed = False

    @property
    def is_main(self) -> bool:
        """True on rank 0, the one that prints and writes."""
        return self.rank == 0

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.host}, {self.device}, {self.backend})"

    # -- small messages between hosts; each is a collective: all ranks call it ------------------

    def announce(self, kind: str, *numbers: int) -> Announcement:
        """Tell the others what this rank is about to do; ``wait`` on the result compares.

        This is the cheap check that keeps a mistake (a save on rank 0 only, one batch more on one
        rank) from becoming a hang: 96 bytes a rank, over host memory, before the real collectives.
        """
        self._check_open()
        return Announcement(self, kind, numbers or (self.steps,))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (a small picklable object), in the order of the ranks."""
        self._check_open()
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with self.lost_peer("a gather"):
            dist.all_gather_object(out, value, group=self.control)
        return out

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` (a small picklable object), on all ranks."""
        self._check_open()
        if self.size == 1:
            return value
        box = [value]
        with self.lost_peer("a broadcast"):
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` with rank ``source``'s, in place, whatever its device."""
        self._check_open()
        if self.size == 1:
            return
        with torch.no_grad(), self.lost_peer("a broadcast"):
            wire = tensor.detach()
            if self.staged or wire.device != self.device or not wire.is_contiguous():
                wire = wire.to("cpu" if self.staged else self.device).contiguous()
            group = self.control if wire.device.type == "cpu" else None
            if wire.dtype == torch.bool:
                wire = wire.to(torch.uint8)
            dist.broadcast(wire, src=source, group=group)
            if wire.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(wire)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.announce("barrier").wait()

    def wait(self, work: Any, doing: str) -> None:
        """Wait for a collective; a failure becomes a :class:`PeerLostError` that says where."""
        with self.lost_peer(doing):
            work.wait()

    def lost_peer(self, doing: str) -> _Lost:
        """Around a collective: a backend's error becomes a PeerLostError that says where."""
        return _Lost(self, doing)

    def _check_open(self) -> None:
        if self.closed:
            raise SetupError("This world is closed: join() again before using it.")

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave in order: all ranks meet, then the process group is destroyed. Idempotent.

        Raises:
            OutOfStepError: other ranks are still in the middle of something.
        """
        global _current
        if self.closed:
            return
        try:
            if self.size > 1 and not self._failed:
                for transfer in list(self.unfinished):
                    transfer.arrive()
                self.announce("leaving").wait()
                self._meet("left")
        finally:
            self.closed = True
            if _current is self:
                _current = None
            if self.size > 1 and dist.is_initialized():
                if not self._failed:
                    dist.destroy_process_group()
                    self._meet("gone", only_main=True)
                self._store = None

    def _meet(self, word: str, only_main: bool = False, seconds: float = 10.0) -> None:
        """Count the ranks at a point, over the store: a peer's late reads never meet a closed
        socket, and the store's owner (rank 0) goes last."""
        store = self._store
        if store is None:
            return
        try:
            count = store.add(word, 1)
            end = time.monotonic() + seconds
            while count < self.size and (self.is_main or not only_main) and time.monotonic() < end:
                time.sleep(0.005)
                count = store.add(word, 0)
        except RuntimeError:
            pass  # the store is gone, so the others are: nothing to wait for

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failed = True  # meeting the others would block: they learn it from our absence
        self.close()


class _Lost:
    """Turns a backend's error into one that says which rank waited, where and for what."""

    def __init__(self, world: World, doing: str) -> None:
        self.world, self.doing = world, doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, OarlockError):
            self.world._failed = True
            said = str(error).splitlines()[0][:200]
            where = f"at step {self.world.steps}, while {self.doing}"
            me = f"Rank {self.world.rank} ({self.world.host})"
            if "imed out" in said or "imeout" in said:
                text = (
                    f"{me} waited {self.world.timeout:g} s for a peer that did not answer, {where}."
                    "\nA rank hangs, or a step takes longer than join(timeout=…) allows."
                )
            else:
                text = (
                    f"{me} lost a peer {where}.\n"
                    "The peer's own error is the cause; look at the other ranks' output."
                )
            raise PeerLostError(f"{text}\n(the backend said: {said})") from error


def join(
    *,
    timeout: float = 600.0,
    device: torch.device | str | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
) -> World:
    """Join the ranks that the launcher started; alone, a world of one without a process group.

    Reads torchrun's variables (also set by ``oarlock launch``), Slurm's or Open MPI's.

    Args:
        timeout: seconds to wait for the other ranks, here and in every later collective.
        device: overrides the device, for example 'cpu'.
        backend: overrides the backend ('nccl', 'gloo', 'xccl').
        env: the variables to read; this process's own by default.

    Raises:
        WorldError: half-set variables, a rank out of range or taken twice, fewer devices than
            local ranks, a port in use, or ranks that did not arrive (named).
    """
    global _current, _joins
    if timeout <= 0:
        raise WorldError(f"timeout is {timeout}; it must be a positive number of seconds.")
    if _current is not None and not _current.closed:
        raise WorldError("This process has already joined a world; close() that one first.")
    _print_errors_well()
    variables = os.environ if env is None else env
    place = read_environment(variables)
    if "TORCHELASTIC_RUN_ID" in variables:
        die_with_parent()  # torchrun itself leaves its workers behind when it is killed
    if place is None or (place.size == 1 and backend is None):
        world = World(device)
        world.timeout = timeout
        _current = world
        return world

    world = World("cpu")
    world.rank, world.size, world.timeout = place.rank, place.size, timeout
    local_rank = place.local_rank if place.local_rank is not None else place.rank
    local_size = place.local_size or local_rank + 1  # not told: what its own number proves
    if device is not None:
        world.device = torch.device(device)
    else:
        if place.local_rank is None and torch.accelerator.is_available():
            raise WorldError(
                "RANK and WORLD_SIZE are set, but not LOCAL_RANK, so this rank cannot know its "
                "device.\nStart it with `oarlock launch` or torchrun, or pass join(device=…)."
            )
        world.device = device_for(local_rank, local_size)
    world.backend = backend or backend_for(world.device)
    world.staged = world.backend == "gloo" and world.device.type != "cpu"

    deadline = time.monotonic() + timeout
    base = open_store(place, variables, timeout)
    prefix = f"oarlock/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_joins}"
    _joins += 1
    store = dist.PrefixStore(prefix, base)
    identity = devices.device_identity(world.device)
    me = Arrival(world.rank, world.size, world.host, identity, timeout)
    hosts = roll_call(me, store, deadline)
    world.local_size = place.local_size or hosts.count(world.host)
    world.local_rank = (
        place.local_rank if place.local_rank is not None else hosts[: world.rank].count(world.host)
    )
    span = datetime.timedelta(seconds=timeout)
    if not dist.is_initialized():
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=span,
            device_id=world.device if world.backend == "nccl" else None,
        )
    world.control = dist.new_group(backend="gloo", timeout=span)
    world._store = store
    _current = world
    _end_well(world)
    return world


def _print_errors_well() -> None:
    """An uncaught error of ours is printed without a stack trace; in a world, it also ends hard.

    Destroying a process group waits for peers that will never come, so after an error in a world
    of several ranks the process exits at once: launcher and peers then notice within moments.
    """
    global _plain_hook
    if sys.excepthook is not _hook:
        if _plain_hook is None:
            _plain_hook = sys.excepthook
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    ours = isinstance(error, OarlockError)
    if ours and not os.environ.get("OARLOCK_TRACEBACK"):
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    else:
        (_plain_hook or sys.__excepthook__)(kind, error, tb)
    status = error.exit_status if isinstance(error, OarlockError) else 1
    if any(not w.closed or w._failed for w in _shared):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else status)
    if ours:
        raise SystemExit(status)  # in a hook, this sets the status of an orderly exit


def _end_well(world: World) -> None:
    """At the end of the script, leave in order."""
    _shared.append(world)
    _print_errors_well()  # again: PyTorch's process group has put a hook of its own over it

    def leave() -> None:
        try:
            world.close()
        except OarlockError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_status)

    atexit.register(leave)
