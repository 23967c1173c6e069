"""The loader: the same ordered global batches on any world, each rank its contiguous range."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from oarlock.batches.batch import Batch
from oarlock.batches.loading import Failed, MicroBatches, Stream, load
from oarlock.batches.order import Plan, split
from oarlock.errors import CheckpointError, ConfigError, DataError, whole_number
from oarlock.world import World, current

log = logging.getLogger("oarlock")


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
        self.world = world or current()
        self.dataset, self.drop_last = dataset, drop_last
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1)
        self.seed = whole_number("seed", seed, 0)
        self.workers = whole_number("workers", workers, 0)
        self.prefetch = whole_number("prefetch", prefetch, 1)
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

        source = MicroBatches(self.dataset, self.collate, self.seed)
        with closing(self._load(source, wanted())) as loaded:
            for step in range(first, plan.steps):
                rows = len(plan.batch_rows(epoch, step))
                count = -(-rows // self.micro_batch_size)
                batch = Batch(epoch, step, count, rows, seed=self.seed)
                for _ in split(count, self.shares)[self.world.rank]:
                    batch.micro_batches.append(self._good(next(loaded)))
                yield batch, step + 1 == plan.steps

    def _stream(self) -> Iterator[tuple[Batch, bool]]:
        stream = Stream(
            self.dataset,
            self.collate,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            seed=self.seed,
            drop_last=self.drop_last,
            rank=self.world.rank,
            shares=self.shares,
            epoch=self.epoch,
            first_step=self.step_in_epoch,
        )
        held: Batch | None = None
        with closing(self._load(stream, None)) as loaded:
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

    def _load(self, dataset: Any, sampler: Iterable | None) -> Generator[Any, None, None]:
        return load(dataset, sampler, self.workers, self.prefetch, self.pin_memory)

    def _good(self, item: Any) -> Any:
        if isinstance(item, Failed):
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

        Another micro-batch size is taken, with a word: the rows and their order stay the same,
        only random numbers and BatchNorm see them in other groups. A smaller card may need it.

        Raises:
            CheckpointError: the state belongs to other data, another seed or batch size.
        """
        mine = self.state_dict()
        if not isinstance(state, dict) or not all(
            type(state.get(name)) is int and state[name] >= 0 for name in ("epoch", "step")
        ):
            raise CheckpointError(f"This is no position of a Loader: {str(state)[:200]}")
        for name in list(mine)[2:]:
            if state.get(name) == mine[name]:
                continue
            if name == "micro_batch_size":
                if self.world.is_main:
                    log.warning(
                        "The checkpoint was made with micro_batch_size = %s, this run has %s: the "
                        "same rows in the same global batches, but other random numbers in them.",
                        state.get(name),
                        mine[name],
                    )
                continue
            raise CheckpointError(
                f"The checkpoint was made with {name} = {state.get(name)}, this run has "
                f"{mine[name]}; continuing would use rows twice or never.\n"
                f"Set {name} back to {state.get(name)}, or start a new run."
            )
        self.epoch, self.step_in_epoch = int(state["epoch"]), int(state["step"])
        if self.plan is not None and self.step_in_epoch >= self.plan.steps:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0
