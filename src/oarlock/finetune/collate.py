"""Examples to tensors: padded rows, or packed rows with positions that start again.

Masks are built from lengths, never from token ids, so a pad token that is also the end token does
no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oarlock.finetune.examples import IGNORED, Example


@dataclass(frozen=True)
class Collator:
    """Collates examples (padding) or lists of examples (packing)."""

    pad_id: int

    def __call__(self, items: Sequence[Example] | Sequence[list[Example]]) -> dict[str, Any]:
        """A batch: ``input_ids``, ``labels`` [rows, tokens], ``attention_mask`` for padded rows or
        ``position_ids`` for packed ones, and what the loss needs without asking the device:
        ``keep`` (the positions where any row predicts a target) and ``n_targets``.
        """
        packed = bool(items) and isinstance(items[0], list)
        groups: list[list[Example]] = [i if isinstance(i, list) else [i] for i in items]
        width = max((sum(map(len, group)) for group in groups), default=0)
        shape = (len(groups), width)
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for row, group in enumerate(groups):
            at = 0
            for example in group:
                n = len(example)
                ids[row, at : at + n] = example.input_ids
                labels[row, at : at + n] = example.labels
                labels[row, at : at + 1] = IGNORED  # nothing of this row comes before
                mask[row, at : at + n] = 1
                positions[row, at : at + n] = np.arange(n)
                at += n
            positions[row, at:] = np.arange(width - at)  # the filling is a row of its own
        targets = labels[:, 1:] != IGNORED
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "keep": torch.from_numpy(np.flatnonzero(targets.any(axis=0))),
            "n_targets": int(targets.sum()),
        }
        if packed:
            # transformers finds packed rows by their positions only where no mask is given
            batch["position_ids"] = torch.from_numpy(positions)
        else:
            batch["attention_mask"] = torch.from_numpy(mask)
        return batch
