"""Global batches: which rows, in which order, cut into which micro-batches, on which rank.

The plan of a global batch is a pure function of (seed, epoch, step): the rows, their order and
the micro-batches know nothing of ranks. A rank only takes a contiguous range of the micro-batches.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from oarlock.errors import CheckpointError, ConfigError, DataError
from oarlock.randomness import Permutation, key, own_random_state, seed_host
from oarlock.world import World, current

_ORDER, _WINDOW, _ROW = 1, 2, 3  # domains of the keys


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


def split(count: int, shares: Sequence[float]) -> list[range]:
    """Cut ``range(count)`` into contiguous ranges, one a rank, in proportion to ``shares``."""
    total, done, edges = sum(shares), 0.0, [0]
    for share in shares:
        done += share
        edges.append(int(done / total * count + 1e-9))
    edges[-1] = count
    return [range(a, b) for a, b in itertools.pairwise(edges)]


class Plan:
    """The order of a map-style dataset: ``micro_batches(epoch, step)`` with random access.

    With ``lengths``, rows of like length share a micro-batch: the permuted rows are sorted by
    length inside windows of ``window`` global batches, and the batches of a window come in keyed
    order, so that each row still comes once and nothing depends on the world.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        lengths: Sequence[int] | None,
        window: int = 50,
    ) -> None:
        self.rows, self.batch_size, self.micro_batch_size = rows, batch_size, micro_batch_size
        self.seed, self.shuffle, self.window = seed, shuffle, window
        self.lengths = None if lengths is None else np.asarray(lengths, dtype=np.int64)
        whole, rest = divmod(rows, batch_size)
        self.steps = whole if drop_last else whole + (rest > 0)
        self.used_rows = whole * batch_size if drop_last else rows

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a plan lives as long as its loader
    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self.rows, key(self.seed, _ORDER, epoch))

    def _at(self, epoch: int, start: int, stop: int) -> np.ndarray:
        positions = np.arange(start, stop)
        return self._permutation(epoch)(positions) if self.shuffle else positions

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def _grouped(self, epoch: int, window: int) -> list[np.ndarray]:
        assert self.lengths is not None
        start = window * self.window * self.batch_size
        rows = self._at(epoch, start, min(start + self.window * self.batch_size, self.used_rows))
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        whole = len(rows) // self.batch_size  # a partial batch stays last
        if not self.shuffle:
            return batches
        order = Permutation(whole, key(self.seed, _WINDOW, epoch, window))(np.arange(whole))
        return [batches[i] for i in order] + batches[whole:]

    def batch_rows(self, epoch: int, step: int) -> np.ndarray:
        """The rows of a global batch in order. int64 [batch_size], fewer in a last partial one."""
        if self.lengths is not None:
            window, inside = divmod(step, self.window)
            return self._grouped(epoch, window)[inside]
        start = step * self.batch_size
        return self._at(epoch, start, min(start + self.batch_size, self.used_rows))

    def micro_batches(self, epoch: int, step: int) -> list[np.ndarray]:
        """The global batch, cut into micro-batches."""
        rows, size = self.batch_rows(epoch, step), self.micro_batch_size
        return [rows[i : i + size] for i in range(0, len(rows), size)]


@dataclass
class _Failed:
    """A row that could not be loaded, carried out of a worker process as a value."""

    message: str


class _MicroBatches(Dataset):
    """Maps (epoch, step, index, rows) to a loaded, collated MicroBatch; runs in the workers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __getitem__(self, what: tuple[int, int, int, tuple[int, ...]]) -> MicroBatch | _Failed:
        epoch, step, index, rows = what
        row: int | None = None
        try:
            with own_random_state():
                items = []
                for row in rows:
                    seed_host(key(self.seed, _ROW, epoch, row))
                    items.append(self.dataset[row])
                row = None
                return MicroBatch(index, rows, self.collate(items))
        except Exception as error:
            what_failed = "the collate function" if row is None else f"row {row} of the dataset"
            return _Failed(
                f"{what_failed} failed: {type(error).__name__}: {error}\n"
                f"(epoch {epoch}, batch {step}, micro-batch {index}, rows {list(rows)[:16]})"
            )


class _Stream(IterableDataset):
    """Deals the rows of an iterable dataset by global position; yields this rank's batches.

    Every rank reads the whole stream and keeps its own range of each global batch, so nothing
    depends on the world and each row is used once; resuming reads past the rows already used.
    """

    def __init__(
        self, dataset: Any, loader: Loader, epoch: int, first_step: int, collate: Callable
    ) -> None:
        self.dataset, self.epoch, self.first_step, self.collate = (
            dataset,
            epoch,
            first_step,
            collate,
        )
        self.batch_size, self.size = loader.batch_size, loader.micro_batch_size
        self.rank, self.shares = loader.world.rank, loader.shares
        self.drop_last, self.seed = loader.drop_last, loader.seed

    def __iter__(self) -> Iterator[Batch | _Failed]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        held: list[Any] = []
        step, position = 0, 0
        try:
            for item in self._items():
                position += 1
                if step >= self.first_step:
                    held.append(item)
                if position % self.batch_size == 0:
                    if step >= self.first_step:
                        yield self._deal(step, held)
                        held = []
                    step += 1
            if held and not self.drop_last:
                yield self._deal(step, held)
        except Exception as error:
            yield _Failed(
                f"the iterable dataset failed after {position} rows: {type(error).__name__}: "
                f"{error}\n(epoch {self.epoch}, batch {step})"
            )

    def _items(self) -> Iterator[Any]:
        """The stream's rows; its random numbers depend on seed, epoch and position alone."""
        with own_random_state():
            seed_host(key(self.seed, _ROW, self.epoch))
            items = iter(self.dataset)
        for position in itertools.count():
            with own_random_state():
                seed_host(key(self.seed, _ROW, self.epoch, position))
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def _deal(self, step: int, items: list[Any]) -> Batch:
        count = -(-len(items) // self.size)
        first = step * self.batch_size
        batch = Batch(self.epoch, step, count, len(items), seed=self.seed)
        for i in split(count, self.shares)[self.rank]:
            mine = items[i * self.size : (i + 1) * self.size]
            rows = tuple(range(first + i * self.size, first + i * self.size + len(mine)))
            with own_random_state():
                seed_host(key(self.seed, _ROW, self.epoch, rows[-1]))
                batch.micro_batches.append(MicroBatch(i, rows, self.collate(mine)))
        return batch


def _quiet_worker(_: int) -> None:
    # Ctrl-C and SIGTERM reach the whole process group; the rank decides, its workers go on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)


_open: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators that have worker processes
_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # these processes


def _end_workers() -> None:
    """At the end of the script. Python would send SIGTERM, which they ignore, and wait."""
    for loaded in list(_open):
        loaded.close()
    for worker in list(_workers):
        if worker.is_alive():
            worker.kill()


def _drain(loaded: Iterator[Any]) -> Iterator[Any]:
    """A DataLoader's iterator whose workers end with ``close()``, as it holds the only handle."""
    yield from loaded


class Loader:
    """The same ordered global batches on any world.

    Iterating yields the rest of the current epoch as :class:`Batch` objects and then stands at the
    start of the next epoch. The order is a keyed permutation of (seed, epoch) with random access:
    no table of indices, and resuming jumps.

    Args:
        dataset: map-style (``__getitem__`` and ``__len__``), or an ``IterableDataset`` with
            ``shuffle=False``, whose rows are dealt by position: every rank reads the whole stream.
        batch_size: rows in a global batch, over all ranks.
        micro_batch_size: rows in one forward and backward. Larger than the batch is fine.
        seed: order of the rows, and all random numbers in them.
        shuffle: a new order each epoch; False keeps the dataset's.
        drop_last: leave out a last partial batch. By default it is used, with exact weights.
        collate_fn: list of rows to a micro-batch's data; PyTorch's default otherwise.
        lengths: one integer a row; groups rows of like length (see :class:`Plan`).
        shares: relative speeds, one a rank: how many of the micro-batches each takes.
        workers: processes that load ahead; 0 loads in this one. (At most 1 for a stream.)
        prefetch: micro-batches that each worker loads ahead.
        pin_memory: page-locked host memory; by default on CUDA.
        world: the ranks; by default the world that this process joined.

    Raises:
        ConfigError: an impossible number. DataError: a dataset that is empty or no dataset, or,
            while iterating, a row that cannot be loaded (named).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        micro_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        lengths: Sequence[int] | None = None,
        shares: Sequence[float] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        world: World | None = None,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("micro_batch_size", micro_batch_size, 1),
            ("workers", workers, 0),
            ("prefetch", prefetch, 1),
            ("seed", seed, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number, at least {least}."
                )
        self.world = world or current()
        self.dataset, self.batch_size, self.micro_batch_size = dataset, batch_size, micro_batch_size
        self.seed, self.drop_last, self.workers, self.prefetch = seed, drop_last, workers, prefetch
        self.collate = collate_fn or default_collate
        try:
            self.shares = [1.0] * self.world.size if shares is None else [float(s) for s in shares]
            total = sum(self.shares)
        except (TypeError, ValueError):
            self.shares, total = [], 0.0
        wrong = len(self.shares) != self.world.size or min(self.shares) < 0
        if wrong or not 0 < total < math.inf:
            raise ConfigError(
                f"shares is {shares}; it must be {self.world.size} numbers (one a rank), "
                "none negative, not all zero."
            )
        self.pin_memory = self.world.device.type == "cuda" if pin_memory is None else pin_memory
        self.epoch, self.step_in_epoch = 0, 0
        self.plan: Plan | None = None
        self._loading: DataLoader | None = None
        if isinstance(dataset, IterableDataset):
            self._check_stream(shuffle, lengths)
        else:
            self._check_map(shuffle, lengths)

    def _check_stream(self, shuffle: bool, lengths: Sequence[int] | None) -> None:
        if shuffle or lengths is not None:
            raise ConfigError(
                "An IterableDataset cannot be shuffled or grouped by length, since its rows come "
                "in their own order.\nPass shuffle=False and no lengths (the stream may shuffle "
                "itself in set_epoch(epoch), alike on all ranks), or use a map-style dataset."
            )
        if self.workers > 1:
            raise ConfigError(
                f"workers is {self.workers}; a stream is read in order, by at most 1 worker."
            )

    def _check_map(self, shuffle: bool, lengths: Sequence[int] | None) -> None:
        try:
            rows = len(self.dataset)
            self.dataset.__getitem__  # noqa: B018
        except (TypeError, AttributeError):
            raise DataError(
                f"{type(self.dataset).__name__} is no dataset: it needs __len__ and __getitem__, "
                "or must be a torch IterableDataset."
            ) from None
        if rows == 0:
            raise DataError("The dataset is empty: it has 0 rows.")
        if lengths is not None and len(lengths) != rows:
            raise ConfigError(f"lengths has {len(lengths)} entries for {rows} rows.")
        if self.drop_last and rows < self.batch_size:
            raise ConfigError(
                f"drop_last leaves no batch: {rows} rows and a global batch of {self.batch_size}."
            )
        self.plan = Plan(
            rows,
            self.batch_size,
            self.micro_batch_size,
            self.seed,
            shuffle,
            self.drop_last,
            lengths,
        )

    def __len__(self) -> int:
        """Steps (global batches) in an epoch. TypeError for a stream, whose end is not known."""
        if self.plan is None:
            raise TypeError("the length of an iterable dataset is not known")
        return self.plan.steps

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.epoch
        pieces = self._stream() if self.plan is None else self._map(self.plan)
        for batch, last in pieces:
            # The position moves on before the batch is handed out, so that a checkpoint made
            # after its step continues with the next one.
            if last:
                self.epoch, self.step_in_epoch = epoch + 1, 0
            else:
                self.step_in_epoch = batch.step + 1
            yield batch

    def _map(self, plan: Plan) -> Iterator[tuple[Batch, bool]]:
        epoch, first = self.epoch, self.step_in_epoch

        def wanted() -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
            for step in range(first, plan.steps):
                cut = plan.micro_batches(epoch, step)
                for i in split(len(cut), self.shares)[self.world.rank]:
                    yield epoch, step, i, tuple(cut[i].tolist())

        loaded = self._load(_MicroBatches(self.dataset, self.collate, self.seed), wanted())
        for step in range(first, plan.steps):
            count = -(-len(plan.batch_rows(epoch, step)) // self.micro_batch_size)
            batch = Batch(epoch, step, count, len(plan.batch_rows(epoch, step)), seed=self.seed)
            for _ in split(count, self.shares)[self.world.rank]:
                batch.micro_batches.append(self._good(next(loaded)))
            yield batch, step + 1 == plan.steps

    def _stream(self) -> Iterator[tuple[Batch, bool]]:
        stream = _Stream(self.dataset, self, self.epoch, self.step_in_epoch, self.collate)
        loaded = self._load(stream, None)
        held: Batch | None = None
        for item in loaded:  # one batch is held back, to know which is the last
            if held is not None:
                yield held, False
            held = self._good(item)
        if held is not None:
            yield held, True
        else:
            what = "no whole global batch" if self.drop_last else "no rows"
            raise DataError(
                f"The iterable dataset yielded {what} in epoch {self.epoch}"
                + (f" after batch {self.step_in_epoch}." if self.step_in_epoch else ".")
            )

    def _load(self, dataset: Any, sampler: Iterable | None) -> Iterator[Any]:
        before = set(multiprocessing.active_children())
        loader: DataLoader = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
            pin_memory=self.pin_memory,
            worker_init_fn=_quiet_worker,
            generator=torch.Generator(),  # leaves the global random stream alone
        )
        loaded = _drain(iter(loader))
        if self.workers:
            _open.add(loaded)
            _workers.update(set(multiprocessing.active_children()) - before)
            atexit.unregister(_end_workers)
            atexit.register(_end_workers)  # the latest registered runs first
        return loaded

    def _good(self, item: Any) -> Any:
        if isinstance(item, _Failed):
            raise DataError(f"On rank {self.world.rank} ({self.world.host}), {item.message}")
        return item

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it means: JSON-able, the same on all ranks and worlds."""
        return {
            "epoch": self.epoch,
            "step": self.step_in_epoch,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "rows": self.plan.rows if self.plan else None,
            "shuffle": self.plan.shuffle if self.plan else False,
            "drop_last": self.drop_last,
            "grouped": self.plan is not None and self.plan.lengths is not None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where ``state`` stood.

        Raises:
            CheckpointError: the state belongs to other data, another seed or other batch sizes.
        """
        mine = self.state_dict()
        if not isinstance(state, dict) or not all(
            type(state.get(name)) is int and state[name] >= 0 for name in ("epoch", "step")
        ):
            raise CheckpointError(f"This is no position of a Loader: {str(state)[:200]}")
        for name in list(mine)[2:]:
            if state.get(name) != mine[name]:
                raise CheckpointError(
                    f"The checkpoint was made with {name} = {state.get(name)}, this run has "
                    f"{mine[name]}; continuing would use rows twice or never.\n"
                    f"Set {name} back to {state.get(name)}, or start a new run."
                )
        self.epoch, self.step_in_epoch = int(state["epoch"]), int(state["step"])
        if self.plan is not None and self.step_in_epoch >= self.plan.steps:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0
