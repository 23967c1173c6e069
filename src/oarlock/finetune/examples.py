"""Encoded rows in little memory: one array of tokens, one byte a token for what is trained."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORED = -100  # the label of a token that is not trained


@dataclass(frozen=True)
class Example:
    """One row as tokens. ``labels[i]`` is ``input_ids[i]`` where token i is trained, else -100."""

    input_ids: np.ndarray  # int32 [tokens]
    labels: np.ndarray  # int32 [tokens]; the first is never trained: nothing predicts it
    source: str
    truncated: bool = False
    end_supervised: bool = True  # the last trained token ends the turn or the text

    @property
    def n_targets(self) -> int:
        """How many tokens are trained."""
        return int((self.labels != IGNORED).sum())

    def __len__(self) -> int:
        return len(self.input_ids)


class Examples(Sequence[Example]):
    """A map-style data set of examples."""

    def __init__(self) -> None:
        self._ids: array[int] | np.ndarray = array("i")
        self._trained: bytearray | np.ndarray = bytearray()
        self._starts: array[int] | np.ndarray = array("q", [0])
        self._flags: bytearray | np.ndarray = bytearray()  # bit 0 truncated, bit 1 end supervised
        self._sources: list[str] = []
        self._order: np.ndarray | None = None  # which stored rows, and in which order

    def append(self, example: Example) -> None:
        """Add a row; not after :meth:`freeze`."""
        self._ids.frombytes(example.input_ids.astype(np.int32).tobytes())  # type: ignore[union-attr]
        self._trained += (example.labels != IGNORED).astype(np.uint8).tobytes()
        self._starts.append(len(self._ids))  # type: ignore[union-attr]
        self._flags.append(example.truncated + 2 * example.end_supervised)  # type: ignore[union-attr]
        self._sources.append(example.source)

    def freeze(self) -> Examples:
        """Turn the growing buffers into arrays."""
        self._ids = np.array(self._ids, dtype=np.int32)
        self._trained = np.frombuffer(bytes(self._trained), dtype=bool)
        self._starts = np.array(self._starts, dtype=np.int64)
        self._flags = np.frombuffer(bytes(self._flags), dtype=np.uint8)
        self._order = np.arange(len(self._sources))
        return self

    def select(self, rows: np.ndarray) -> Examples:
        """The given rows as another data set that shares this one's storage."""
        part = Examples.__new__(Examples)
        part.__dict__.update(self.__dict__)
        part._order = self._rows()[rows]
        return part

    def _rows(self) -> np.ndarray:
        if self._order is None:
            raise RuntimeError("call freeze() before reading examples")
        return self._order

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        row = int(self._rows()[index])
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        ids = np.asarray(self._ids)[start:end]
        trained = np.asarray(self._trained)[start:end]
        flags = int(self._flags[row])
        labels = np.where(trained, ids, np.int32(IGNORED))
        return Example(ids, labels, self._sources[row], bool(flags & 1), bool(flags & 2))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, int64 [rows]."""
        return np.diff(np.asarray(self._starts))[self._rows()]

    @property
    def targets(self) -> np.ndarray:
        """Trained tokens of every row, int64 [rows]."""
        sums = np.concatenate([[0], np.cumsum(np.asarray(self._trained), dtype=np.int64)])
        return np.diff(sums[np.asarray(self._starts)])[self._rows()]

    @property
    def truncated(self) -> int:
        """How many rows were cut."""
        return int((np.asarray(self._flags)[self._rows()] & 1).sum())

    @property
    def end_supervised_share(self) -> float:
        """The share of rows whose end token is trained; 0.0 of no rows."""
        flags = np.asarray(self._flags)[self._rows()]
        return float((flags >> 1).mean()) if len(flags) else 0.0

    def digest(self) -> str:
        """16 hex digits that follow from every row's tokens and targets and from their order."""
        hashed = hashlib.sha256()
        for part in (self._ids, self._trained, self._starts, self._rows()):
            hashed.update(np.ascontiguousarray(part).data)
        return hashed.hexdigest()[:16]

    @property
    def max_token_id(self) -> int:
        """The greatest token id stored."""
        return int(np.asarray(self._ids).max(initial=0))
