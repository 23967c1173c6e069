"""The order of the rows: a pure function of (seed, epoch, step) that knows nothing of ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from oarlock.randomness import Permutation, key

_ORDER, _WINDOW = 1, 2  # domains of the keys


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
