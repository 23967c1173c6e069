"""The numbers of a run that follow from its file: steps, warmup, learning rate, micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from oarlock import words
from oarlock.config import RunConfig
from oarlock.errors import ConfigError


@dataclass(frozen=True)
class Steps:
    """How long the run is. None of it depends on the number of ranks."""

    total: int
    warmup: int
    per_epoch: int

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.total / self.per_epoch


def steps_of(config: RunConfig, items: int) -> Steps:
    """Steps and warmup for ``items`` rows (or packed sequences).

    Raises:
        ConfigError: a warmup longer than the run.
    """
    per_epoch = -(-items // config.train.batch_size)
    total = config.train.steps or math.ceil((config.train.epochs or 1) * per_epoch - 1e-9)
    wanted = config.train.warmup
    warmup = wanted if isinstance(wanted, int) else math.ceil(wanted * total)
    if warmup > total:
        raise ConfigError(
            f"train.warmup is {warmup} steps, but the run has {total} "
            f"({items} rows in batches of {config.train.batch_size}).\n"
            "Give fewer steps, or a fraction such as 0.03."
        )
    return Steps(total, warmup, per_epoch)


def schedule(kind: str, steps: Steps) -> Callable[[int], float]:
    """The learning rate's factor for the update number 0, 1, 2, …, whatever the world."""

    def factor(update: int) -> float:
        if update < steps.warmup:
            return (update + 1) / steps.warmup
        if kind == "constant":
            return 1.0
        done = min(1.0, (update - steps.warmup) / max(1, steps.total - steps.warmup))
        return 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def shares_of(micro_batches: int, ranks: int) -> list[int]:
    """How many micro-batches each rank takes, as the loader deals them."""
    from oarlock.batches import split

    return [len(part) for part in split(micro_batches, [1.0] * ranks)]


def batch_table(batch_size: int, micro_batch_size: int, ranks: int) -> list[str]:
    """The global batch and what each rank takes of it."""
    size = min(micro_batch_size, batch_size)
    count = -(-batch_size // size)
    lines = [
        f"global batch: {batch_size} rows = {count} micro-batch{'es' * (count > 1)} "
        f"of {'up to ' * (batch_size % size > 0)}{size}, for any number of ranks"
    ]
    shares = shares_of(count, ranks)
    first = 0
    while first < ranks:
        last = first
        while last + 1 < ranks and shares[last + 1] == shares[first]:
            last += 1
        who = f"rank {first}" if first == last else f"ranks {first}-{last}, each"
        n = shares[first]
        lines.append(f"  {who}: {n} micro-batch{'es' * (n != 1)} a step")
        first = last + 1
    if 0 in shares:
        lines.append(
            f"  {shares.count(0)} of {ranks} ranks have nothing to do: a smaller "
            "train.micro_batch_size or a larger train.batch_size gives them work"
        )
    return lines


def describe_steps(config: RunConfig, steps: Steps) -> list[str]:
    """The length of the run and its learning rate, for the terminal."""
    train = config.train
    factor = schedule(train.schedule, steps)
    assert train.lr is not None
    warmup = f"{words.many(steps.warmup, 'step')} of warmup, then " if steps.warmup else ""
    passes = f"{steps.epochs:.4g} epoch{'s' * (steps.epochs != 1)}"
    return [
        f"{words.many(steps.total, 'step')} ({passes} of "
        f"{words.many(steps.per_epoch, 'step')}), one update each",
        f"learning rate {train.lr:g}: {warmup}{train.schedule}; "
        f"last step {train.lr * factor(steps.total - 1):.3g}",
    ]
