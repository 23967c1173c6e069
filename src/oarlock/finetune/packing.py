"""Several rows in one sequence, each blind to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oarlock.errors import ModelError
from oarlock.finetune.examples import Example, Examples

if TYPE_CHECKING:
    import torch


def pack(lengths: Sequence[int] | np.ndarray, max_length: int) -> list[list[int]]:
    """Group rows so that each group has at most ``max_length`` tokens; every row once.

    Best fit, longest rows first: a row goes where the least room remains. It depends on the lengths
    and ``max_length`` alone, so it is the same on every world and in every epoch.
    """
    sizes = [int(n) for n in lengths]
    if any(n > max_length for n in sizes):
        raise ValueError(f"a row of {max(sizes)} tokens does not fit into {max_length}")
    groups: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(max_length + 1)]
    rooms = 0  # bit r is set where some group has room for exactly r tokens
    for row in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = rooms >> sizes[row]
        if fitting:
            room = sizes[row] + (fitting & -fitting).bit_length() - 1
            group = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, group = max_length, len(groups)
            groups.append([])
        groups[group].append(row)
        by_room[room - sizes[row]].append(group)
        rooms |= 1 << (room - sizes[row])
    return sorted(sorted(group) for group in groups)


class Packed(Sequence[list[Example]]):
    """A map-style data set of packed groups."""

    def __init__(self, examples: Examples, max_length: int) -> None:
        self.examples = examples
        self.groups = pack(examples.lengths, max_length)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[Example]:  # type: ignore[override]
        return [self.examples[row] for row in self.groups[index]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every group, int64 [groups]."""
        lengths = self.examples.lengths
        return np.array([lengths[group].sum() for group in self.groups], dtype=np.int64)


def check_packing(model: torch.nn.Module) -> None:
    """Show on this model that packed rows do not see each other; raise ModelError otherwise.

    The loss of two packed batches must be the sum of the rows' own losses. Positions that start
    again tell transformers where rows begin; not every model listens.
    """
    import torch

    from oarlock.finetune.collate import Collator
    from oarlock.finetune.loss import causal_lm_loss

    config: Any = model.config
    vocabulary = int(config.get_text_config().vocab_size)
    random = np.random.default_rng(0)
    rows = [random.integers(0, vocabulary, n, dtype=np.int32) for n in (7, 4, 5, 6, 3)]
    examples = [
        Example(ids, np.concatenate([[-100], ids[1:]]).astype(np.int32), "") for ids in rows
    ]
    collate = Collator(pad_id=0)
    device = next(model.parameters()).device

    def loss(items: list[Any]) -> float:
        batch = {k: v.to(device) if hasattr(v, "to") else v for k, v in collate(items).items()}
        return float(causal_lm_loss(model, batch)[0])

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed = loss([examples[:3], examples[3:]])
            alone = sum(loss([[example]]) for example in examples)
    finally:
        model.train(training)
    exact = next(model.parameters()).dtype == torch.float32
    if not abs(packed - alone) <= (1e-4 if exact else 2e-2) * abs(alone):
        raise ModelError(
            f"packing: in {type(model).__name__} packed rows see each other "
            f"(loss {packed:.4f} packed, {alone:.4f} alone).\n"
            "Set packing = false; rows are then grouped by length and padded."
        )
