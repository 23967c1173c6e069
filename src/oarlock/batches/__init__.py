"""Global batches: which rows, in which order, cut into which micro-batches, on which rank.

The plan of a global batch is a pure function of (seed, epoch, step): the rows, their order and
the micro-batches know nothing of ranks. A rank only takes a contiguous range of the micro-batches.
"""

from __future__ import annotations

from oarlock.batches.batch import Batch, MicroBatch, map_tensors
from oarlock.batches.loader import Loader
from oarlock.batches.order import Plan, split

__all__ = ["Batch", "Loader", "MicroBatch", "Plan", "map_tensors", "split"]
