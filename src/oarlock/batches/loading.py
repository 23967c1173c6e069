"""Loading: rows become micro-batches, in worker processes or here; streams are dealt in order."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from oarlock.batches.batch import Batch, MicroBatch
from oarlock.batches.order import split
from oarlock.randomness import key, own_random_state, seed_everything

_ROW = 3  # the domain of rows' random numbers


@dataclass
class Failed:
    """A row that could not be loaded, carried out of a worker process as a value."""

    message: str


class MicroBatches(Dataset):
    """Maps (epoch, step, index, rows) to a loaded, collated MicroBatch; runs in the workers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __getitem__(self, what: tuple[int, int, int, tuple[int, ...]]) -> MicroBatch | Failed:
        epoch, step, index, rows = what
        row: int | None = None
        try:
            with own_random_state():
                items = []
                for row in rows:
                    seed_everything(key(self.seed, _ROW, epoch, row))
                    items.append(self.dataset[row])
                row = None
                return MicroBatch(index, rows, self.collate(items))
        except Exception as error:
            what_failed = "the collate function" if row is None else f"row {row} of the dataset"
            return Failed(
                f"{what_failed} failed: {type(error).__name__}: {error}\n"
                f"(epoch {epoch}, batch {step}, micro-batch {index}, rows {list(rows)[:16]})"
            )


class Stream(IterableDataset):
    """Deals the rows of an iterable dataset by global position; yields this rank's batches.

    Every rank reads the whole stream and keeps its own range of each global batch, so nothing
    depends on the world and each row is used once; resuming reads past the rows already used.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        drop_last: bool,
        rank: int,
        shares: Sequence[float],
        epoch: int,
        first_step: int,
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self.batch_size, self.size, self.seed = batch_size, micro_batch_size, seed
        self.drop_last, self.rank, self.shares = drop_last, rank, shares
        self.epoch, self.first_step = epoch, first_step

    def __iter__(self) -> Iterator[Batch | Failed]:
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
            yield Failed(
                f"the iterable dataset failed after {position} rows: {type(error).__name__}: "
                f"{error}\n(epoch {self.epoch}, batch {step})"
            )

    def _items(self) -> Iterator[Any]:
        """The stream's rows; its random numbers depend on seed, epoch and position alone."""
        with own_random_state():
            seed_everything(key(self.seed, _ROW, self.epoch))
            items = iter(self.dataset)
        for position in itertools.count():
            with own_random_state():
                seed_everything(key(self.seed, _ROW, self.epoch, position))
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
                seed_everything(key(self.seed, _ROW, self.epoch, rows[-1]))
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


def _drain(loaded: Iterator[Any]) -> Generator[Any, None, None]:
    """A DataLoader's iterator whose workers end with ``close()``, as it holds the only handle.

    Left to the garbage collector, PyTorch may wait for them in vain.
    """
    yield from loaded


def load(
    dataset: Any, sampler: Iterable | None, workers: int, prefetch: int, pin_memory: bool
) -> Generator[Any, None, None]:
    """The items of ``dataset`` that ``sampler`` asks for, through PyTorch's DataLoader."""
    before = set(multiprocessing.active_children())
    loader: DataLoader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_quiet_worker,
        generator=torch.Generator(),  # leaves the global random stream alone
    )
    loaded = _drain(iter(loader))
    if workers:
        _open.add(loaded)
        _workers.update(set(multiprocessing.active_children()) - before)
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)  # the latest registered runs first
    return loaded
