"""Agreement before the exchange: all ranks run one step, and their ranges make up the batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from oarlock.batches import Batch, MicroBatch
from oarlock.errors import DataError, OutOfStepError, SetupError
from oarlock.world import Announcement, World

# The numbers of a step's announcement, in this order.
_FIELDS = ("step", "epoch", "batch", "micro-batches", "rows", "first", "end", "seed")
_STEP, _EPOCH, _BATCH, _COUNT, _ROWS, _FIRST, _END, _SEED = range(len(_FIELDS))
_NOTHING, _OWN_LIST = -1, -2  # in place of the first micro-batch's index


class Agreement:
    """One step's announcement: sent when the step begins, compared just before the exchange.

    The answers travel while forward runs, so that the check costs next to nothing.

    Args:
        world: the ranks.
        given: what the user handed to ``step``: a Batch, or this rank's list of micro-batches.
        step: the update's number, from 1.
        seed: for the random numbers of micro-batches that come as a list.

    Raises:
        SetupError: something else was handed over.
    """

    def __init__(self, world: World, given: Batch | Sequence[Any], step: int, seed: int) -> None:
        self.world, self.step = world, step
        if isinstance(given, Batch):
            self.batch = given
            own = given.micro_batches
            first = own[0].index if own else _NOTHING
        elif isinstance(given, (list, tuple)):
            self.batch = Batch(0, step - 1, len(given), 0, list(given), seed)
            first = _OWN_LIST
        else:
            raise SetupError(
                "step() takes a Batch from a Loader or a list of micro-batches, not a "
                f"{type(given).__name__}."
            )
        batch = self.batch
        end = first + len(batch.micro_batches)
        self._announced: Announcement = world.announce(
            "step", step, batch.epoch, batch.step, batch.count, batch.rows, first, end, batch.seed
        )
        self.counts: list[int] = []  # micro-batches of each rank; known once reached
        if first == _OWN_LIST:
            self._number_own_lists()

    def _number_own_lists(self) -> None:
        """The user's own lists: a micro-batch's index follows from all ranks' counts."""
        records = self._announced.wait()
        counts = [r[_COUNT] if r[_FIRST] == _OWN_LIST else 0 for r in records]
        offset = sum(counts[: self.world.rank])
        self.batch.count = sum(counts)
        self.batch.micro_batches = [
            MicroBatch(offset + i, (), data) for i, data in enumerate(self.batch.micro_batches)
        ]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """For each rank, the index of its first micro-batch (or where it would be) and the end."""
        ends = list(itertools.accumulate(self.counts, initial=0))
        return list(itertools.pairwise(ends))

    @property
    def last_rank(self) -> int:
        """The rank that runs the last micro-batch."""
        return self.senders(0)[-1]

    def senders(self, round_: int) -> list[int]:
        """The ranks that have more than ``round_`` micro-batches."""
        return [rank for rank, count in enumerate(self.counts) if count > round_]

    def reach(self, equal_counts: bool = False) -> None:
        """Wait for all ranks' announcements and compare them; only the first call does something.
        ``equal_counts``: also refuse ranks with more micro-batches than others.

        Raises:
            OutOfStepError: on all ranks, with what each is doing.
            DataError: no rank has a micro-batch. SetupError: ``equal_counts`` is not met.
        """
        if self.counts:
            return
        records = self._announced.wait()
        own_lists = {r[_FIRST] == _OWN_LIST for r in records}
        if own_lists == {True}:
            counts = [r[_COUNT] for r in records]
            self._compare(records, (_STEP,))
        else:
            counts = [r[_END] - r[_FIRST] if r[_FIRST] >= 0 else 0 for r in records]
            self._compare(records, (_STEP, _EPOCH, _BATCH, _COUNT, _ROWS, _SEED))
            if len(own_lists) > 1:
                self._differ(records, "kind of batch")
            self._check_cover(records)
        if not any(counts):
            raise DataError(f"Step {self.step} has no micro-batch on any rank.")
        if equal_counts and len(set(counts)) > 1:
            raise SetupError(
                f"Step {self.step}: sync_batchnorm needs the same number of micro-batches on every "
                f"rank, but they have {counts}.\n"
                "Choose batch_size and micro_batch_size so that each rank gets as many "
                "(drop_last=True for the last batch), or sync_batchnorm=False."
            )
        self.counts = counts

    def _compare(self, records: list[list[int]], fields: Sequence[int]) -> None:
        for field in fields:
            if len({r[field] for r in records}) > 1:
                self._differ(records, _FIELDS[field])

    def _differ(self, records: list[list[int]], what: str) -> None:
        lines = "\n".join(
            f"  rank {i}: step {r[_STEP]}, epoch {r[_EPOCH]}, batch {r[_BATCH]}, "
            f"{r[_COUNT]} micro-batches, {r[_ROWS]} rows, seed {r[_SEED]}"
            for i, r in enumerate(records)
        )
        raise OutOfStepError(
            f"The ranks run different steps ({what} differs):\n{lines}\n"
            "Give every rank the same dataset, batch size, micro-batch size and seed, and load the "
            "same checkpoint on all."
        )

    def _check_cover(self, records: list[list[int]]) -> None:
        """Each micro-batch is run once: the ranks' ranges follow each other without a gap."""
        covered = 0
        for rank, record in enumerate(records):
            if record[_FIRST] == _NOTHING:
                continue
            if record[_FIRST] != covered:
                raise OutOfStepError(
                    f"Step {self.step}: micro-batch {covered} of {self.batch.count} is run by no "
                    f"rank or by two (rank {rank} starts at {record[_FIRST]}).\n"
                    "Use one Loader with the same shares on every rank, as it deals the ranges."
                )
            covered = record[_END]
        if covered != self.batch.count:
            raise OutOfStepError(
                f"Step {self.step}: {covered} of {self.batch.count} micro-batches are run.\n"
                "Use one Loader with the same shares on every rank, as it deals the ranges."
            )
