"""Global batches: each row once, in one order, whatever the world; and random numbers with them."""

from __future__ import annotations

import collections
import json
import multiprocessing
import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from oarlock.batches import Batch, Loader, MicroBatch, Plan, split
from oarlock.errors import CheckpointError, ConfigError, DataError
from oarlock.randomness import Permutation, key
from oarlock.world import World


def rank(number: int, size: int) -> World:
    """A world as one of its ranks sees it; loading needs no messages between ranks."""
    world = World("cpu")
    world.rank, world.size = number, size
    return world


def as_is(items: list[Any]) -> list[Any]:
    return items


def epoch_on(size: int, rows: Any, batch: int, micro: int, **options: Any) -> list[list[Batch]]:
    """One epoch on every rank of a world: the batches of each rank."""
    options = {"collate_fn": as_is, **options}
    return [list(Loader(rows, batch, micro, world=rank(r, size), **options)) for r in range(size)]


def joined(ranks: list[list[Batch]]) -> list[list[MicroBatch]]:
    """The micro-batches of each global batch, over the ranks in order."""
    return [[m for b in parts for m in b.micro_batches] for parts in zip(*ranks, strict=True)]


def plain(ranks: list[list[Batch]]) -> list[list[tuple[int, tuple[int, ...]]]]:
    return [[(m.index, m.rows) for m in batch] for batch in joined(ranks)]


# -- each row once, in the same order on any world ------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 120),
    size=st.integers(1, 5),
    batch=st.integers(1, 40),
    micro=st.integers(1, 50),
    drop_last=st.booleans(),
    grouped=st.booleans(),
    shuffle=st.booleans(),
    weights=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=5, max_size=5),
    seed=st.integers(0, 2**64),
)
@example(9, 2, 4, 2, False, False, True, [1.0] * 5, 0)  # the last batch is partial
@example(1, 4, 8, 2, False, False, True, [1.0] * 5, 0)  # fewer rows than ranks
def test_each_row_once_in_an_order_that_knows_no_ranks(
    rows: int,
    size: int,
    batch: int,
    micro: int,
    drop_last: bool,
    grouped: bool,
    shuffle: bool,
    weights: list[float],
    seed: int,
) -> None:
    lengths = [row * 7 % 31 for row in range(rows)] if grouped else None
    shares = weights[:size] if sum(weights[:size]) else None
    options = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "lengths": lengths}
    if drop_last and rows < batch:
        with pytest.raises(ConfigError, match="drop_last leaves no batch"):
            Loader(range(rows), batch, micro, **options)
        return
    ranks = epoch_on(size, range(rows), batch, micro, shares=shares, **options)
    alone = epoch_on(1, range(rows), batch, micro, **options)
    assert plain(ranks) == plain(alone)

    batches = joined(ranks)
    used = [row for b in batches for m in b for row in m.rows]
    assert len(used) == len(set(used)) == (rows // batch * batch if drop_last else rows)
    if not shuffle and not grouped:
        assert used == list(range(len(used)))
    for step, parts in enumerate(zip(*ranks, strict=True)):
        sizes = [len(m.rows) for m in batches[step]]
        assert all(s == min(micro, batch) for s in sizes[:-1] if step + 1 < len(batches))
        assert [m.index for m in batches[step]] == list(range(len(sizes)))  # ranges, contiguous
        for part in parts:
            assert (part.epoch, part.step, part.seed) == (0, step, seed)
            assert (part.count, part.rows) == (len(sizes), sum(sizes))
            assert all(list(m.rows) == m.data for m in part.micro_batches)


@given(st.integers(0, 1000), st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_ranges_are_in_proportion_to_the_shares(count: int, shares: list[float]) -> None:
    if sum(shares) < 1e-3:
        return
    ranges = split(count, shares)
    assert [i for r in ranges for i in r] == list(range(count))
    for share, part in zip(shares, ranges, strict=True):
        assert abs(len(part) - share / sum(shares) * count) <= 1 + 1e-6


def test_a_rank_without_share_or_micro_batch_still_gets_every_batch() -> None:
    ranks = epoch_on(3, range(10), 4, 2, shares=[1, 0, 3])
    assert [[len(b.micro_batches) for b in part] for part in ranks] == [
        [0, 0, 0],
        [0, 0, 0],
        [2, 2, 1],
    ]


def test_epochs_differ_and_seeds_differ() -> None:
    loader = Loader(range(50), 10, 5, collate_fn=as_is)
    orders = [[m.rows for b in loader for m in b.micro_batches] for _ in range(3)]
    assert loader.epoch == 3
    assert len({str(o) for o in orders}) == 3
    other = Loader(range(50), 10, 5, seed=1, collate_fn=as_is)
    assert [m.rows for b in other for m in b.micro_batches] != orders[0]
    again = Loader(range(50), 10, 5, collate_fn=as_is)
    assert [m.rows for b in again for m in b.micro_batches] == orders[0]
    still = Loader(range(50), 10, 5, shuffle=False)
    first, second = ([m.rows for b in still for m in b.micro_batches] for _ in range(2))
    assert first == second == [tuple(range(i, i + 5)) for i in range(0, 50, 5)]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_permutation_is_one(n: int, key_: int) -> None:
    there = Permutation(n, key_)(np.arange(n))
    assert sorted(there.tolist()) == list(range(n))
    some = np.arange(n)[:: max(1, n // 7)]
    assert Permutation(n, key_)(some).tolist() == there[some].tolist()  # random access


def test_a_permutation_is_even_handed() -> None:
    counts = np.zeros((7, 7))
    for epoch in range(4000):
        counts[np.arange(7), Permutation(7, key(0, 1, epoch))(np.arange(7))] += 1
    assert np.abs(counts / 4000 - 1 / 7).max() < 0.03


def test_a_billion_rows_need_no_table() -> None:
    n = 10**9 + 7
    tracemalloc.start()
    permutation = Permutation(n, 3)
    ends = permutation(np.arange(n - 1000, n))
    starts = permutation(np.arange(1000))
    rows = Plan(n, 4096, 8, 0, True, False, None).batch_rows(5, n // 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    both = np.concatenate([starts, ends])
    assert len(set(both.tolist())) == 2000
    assert both.min() >= 0
    assert both.max() < n
    assert both.max() - both.min() > n / 2
    assert len(rows) == n % 4096
    assert peak < 2**20


def test_grouping_by_length_saves_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 5000).astype(int) + 1

    def padded_share(**options: Any) -> float:
        plan, padded = Loader(range(5000), 32, 4, **options).plan, 0
        assert plan is not None
        for step in range(plan.steps):
            padded += sum(len(m) * int(lengths[m].max()) for m in plan.micro_batches(0, step))
        return 1 - lengths.sum() / padded

    plain_share, grouped_share = padded_share(), padded_share(lengths=lengths)
    assert plain_share > 0.3
    assert grouped_share < 0.05
    plan = Loader(range(5000), 32, 4, lengths=lengths).plan
    assert plan is not None
    means = [lengths[plan.batch_rows(0, step)].mean() for step in range(40)]
    assert sorted(means) != means  # long and short batches come mixed


# -- resume -------------------------------------------------------------------------------------


class Counting:
    """Counts the rows that were read."""

    def __init__(self, rows: int) -> None:
        self.rows, self.read = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        self.read += 1
        return row


def test_resuming_jumps_to_the_position() -> None:
    straight = Loader(range(10**6), 500, 500, seed=3, collate_fn=as_is)
    assert straight.plan is not None
    rows = Counting(10**6)
    loader = Loader(rows, 500, 500, seed=3, collate_fn=as_is)
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": 2, "step": 1990})
    batches = list(loader)
    assert rows.read == 5000  # the 10 batches that remain, not one row more
    assert [(b.epoch, b.step) for b in batches] == [(2, s) for s in range(1990, 2000)]
    wanted = [straight.plan.batch_rows(2, s).tolist() for s in range(1990, 2000)]
    assert [b.micro_batches[0].data for b in batches] == wanted
    assert (loader.epoch, loader.step_in_epoch) == (3, 0)


@pytest.mark.parametrize("stop", [1, 7, 13, 14, 15, 20, 27])
def test_stop_anywhere_resume_on_another_world(stop: int) -> None:
    """Four epochs of 7 batches, stopped after ``stop`` of them; the last batch is partial."""

    def run(loader: Loader, batches: int | None = None) -> list[tuple[int, int, int]]:
        ledger = []
        for _ in range(4):
            if loader.epoch == 4:
                break
            for batch in loader:
                ledger += [
                    (batch.epoch, batch.step, r) for m in batch.micro_batches for r in m.rows
                ]
                if batches is not None and (batch.epoch * 7 + batch.step + 1) == batches:
                    return ledger
        return ledger

    before, after = [], []
    states = []
    for r in range(3):
        loader = Loader(range(65), 10, 3, world=rank(r, 3), collate_fn=as_is)
        before += run(loader, stop)
        states.append(json.dumps(loader.state_dict(), sort_keys=True))
    assert len(set(states)) == 1  # the same on every rank
    for r in range(2):
        loader = Loader(range(65), 10, 3, world=rank(r, 2), collate_fn=as_is)
        loader.load_state_dict(json.loads(states[0]))
        after += run(loader)
    straight = run(Loader(range(65), 10, 3, collate_fn=as_is))
    assert sorted(before + after) == sorted(straight)
    assert collections.Counter(row for *_, row in before + after) == dict.fromkeys(range(65), 4)


def test_breaking_off_an_epoch_continues_it() -> None:
    loader = Loader(range(10), 2, 2, shuffle=False)
    for batch in loader:
        if batch.step == 1:
            break
    assert (loader.epoch, loader.step_in_epoch) == (0, 2)
    assert [b.step for b in loader] == [2, 3, 4]
    assert (loader.epoch, loader.step_in_epoch) == (1, 0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 5})  # an epoch's very end
    assert (loader.epoch, loader.step_in_epoch) == (1, 0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seed", {"seed": 1}),
        ("batch_size", {"batch_size": 5}),
        ("rows", {"dataset": range(11)}),
        ("shuffle", {"shuffle": False}),
        ("drop_last", {"drop_last": True}),
        ("grouped", {"lengths": range(10)}),
    ],
)
def test_a_position_in_something_else_is_refused(name: str, change: dict[str, Any]) -> None:
    first = {"dataset": range(10), "batch_size": 4, "micro_batch_size": 2}
    state = Loader(**first).state_dict()
    loader = Loader(**{**first, **change})
    with pytest.raises(CheckpointError, match=f"was made with {name} = "):
        loader.load_state_dict(state)
    assert (loader.epoch, loader.step_in_epoch) == (0, 0)


@pytest.mark.parametrize(
    "change", [{"epoch": "2"}, {"step": -1}, {"step": None}, {"epoch": 1.5}, None]
)
def test_a_broken_position_is_refused(change: dict[str, Any] | None) -> None:
    loader = Loader(range(10), 4, 2)
    state = "nothing" if change is None else {**loader.state_dict(), **change}
    with pytest.raises(CheckpointError, match="no position of a Loader"):
        loader.load_state_dict(state)  # type: ignore[arg-type]


# -- random numbers and worker processes -----------------------------------------------------------


class Augmented:
    """Rows with random numbers in them, from all three generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> tuple[float, float, float, int]:
        return float(torch.rand(())), random.random(), float(np.random.rand()), row


def numbers(size: int, batch: int = 8, **options: Any) -> dict[int, list[float]]:
    """The random numbers of each row."""
    found: dict[int, list[float]] = {}
    for global_batch in joined(epoch_on(size, Augmented(), batch, 2, **options)):
        found |= {item[3]: list(item[:3]) for m in global_batch for item in m.data}
    return found


def test_random_numbers_in_a_row_depend_on_seed_epoch_and_row_alone() -> None:
    here = numbers(1)
    assert len(here) == 24
    assert len({tuple(v) for v in here.values()}) == 24
    torch.manual_seed(5)
    assert numbers(3, workers=2) == here
    assert numbers(2, batch=5) == here
    assert numbers(1, seed=1)[0] != here[0]
    loader = Loader(Augmented(), 8, 2, collate_fn=as_is)
    list(loader)
    later = {i[3]: list(i[:3]) for b in loader for m in b.micro_batches for i in m.data}
    assert all(later[row] != here[row] for row in here)


def test_the_callers_random_streams_are_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    def seeded() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seeded()
    wanted = [draw() for _ in range(3)]
    for workers, dataset, shuffle in (
        (0, Augmented(), True),
        (2, Augmented(), True),
        (0, RandomStream(9), False),
    ):
        seeded()
        drawn = [draw()]
        batches = iter(Loader(dataset, 4, 2, workers=workers, shuffle=shuffle))
        next(batches)
        drawn.append(draw())
        list(batches)
        drawn.append(draw())
        assert drawn == wanted


def test_worker_processes_change_nothing() -> None:
    def contents(workers: int) -> list[Any]:
        ranks = epoch_on(2, Augmented(), 7, 3, workers=workers, drop_last=True)
        return [[(m.index, m.rows, m.data) for m in b] for b in joined(ranks)]

    assert contents(2) == contents(0)


class Failing:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> int:
        if row == 7:
            raise OSError("cannot read image 7.png")
        return row


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_cannot_be_loaded_is_named(workers: int) -> None:
    loader = Loader(Failing(), 4, 2, shuffle=False, workers=workers, world=rank(1, 2))
    with pytest.raises(DataError) as caught:
        list(loader)
    message = str(caught.value)
    assert "On rank 1 (" in message
    assert "row 7 of the dataset failed: OSError: cannot read image 7.png" in message
    assert "(epoch 0, batch 1, micro-batch 1, rows [6, 7])" in message


def test_worker_processes_end_with_the_iteration() -> None:
    before = set(multiprocessing.active_children())
    batches = iter(Loader(range(100), 4, 2, workers=1))
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == 1
    started = time.monotonic()
    del batches
    assert set(multiprocessing.active_children()) == before
    with pytest.raises(DataError) as caught:
        list(Loader(Failing(), 4, 2, workers=1))
    assert caught.traceback  # still held, as in a notebook
    assert set(multiprocessing.active_children()) == before
    assert time.monotonic() - started < 4


def test_a_collate_function_that_fails_is_named() -> None:
    loader = Loader([torch.ones(1), torch.ones(2)], 2, 2, shuffle=False)
    with pytest.raises(DataError, match="the collate function failed: RuntimeError") as caught:
        list(loader)
    assert "rows [0, 1]" in str(caught.value)


# -- iterable datasets ---------------------------------------------------------------------------


class Stream(IterableDataset):
    """A stream of numbers, another 1000 in each epoch."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 1000, self.epoch * 1000 + self.rows))


class RandomStream(Stream):
    def __iter__(self) -> Iterator[int]:
        rows = list(range(self.rows))
        random.shuffle(rows)
        for row in rows:
            yield row * 1000 + random.randrange(1000)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 12), st.integers(1, 13), st.booleans())
def test_a_stream_is_dealt_by_position(
    rows: int, size: int, batch: int, micro: int, drop_last: bool
) -> None:
    if drop_last and rows < batch:
        return
    options = {"shuffle": False, "drop_last": drop_last}
    streamed = epoch_on(size, Stream(rows), batch, micro, **options)
    assert plain(streamed) == plain(epoch_on(1, range(rows), batch, micro, **options))
    used = [row for b in joined(streamed) for m in b for row in m.data]
    assert used == list(range(rows // batch * batch if drop_last else rows))
    assert [(b.count, b.rows) for b in streamed[0]] == [(b.count, b.rows) for b in streamed[-1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_resumes_and_knows_its_epoch(workers: int) -> None:
    loader = Loader(Stream(10), 4, 2, shuffle=False, workers=workers, collate_fn=as_is)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["step"]) == (0, 1)
    ranks = []
    for r in range(2):
        other = Loader(Stream(10), 4, 2, shuffle=False, world=rank(r, 2), collate_fn=as_is)
        other.load_state_dict(state)
        ranks.append([*other, *other])
        assert (other.epoch, other.step_in_epoch) == (2, 0)
    rows = [row for b in joined(ranks) for m in b for row in m.data]
    assert rows == [*range(4, 10), *range(1000, 1010)]


def test_random_numbers_in_a_stream_are_the_same_everywhere() -> None:
    def read(size: int, **options: Any) -> list[int]:
        random.seed(size)
        ranks = epoch_on(size, RandomStream(20), 6, 2, shuffle=False, **options)
        return [row for b in joined(ranks) for m in b for row in m.data]

    rows = read(1)
    assert sorted(row // 1000 for row in rows) == list(range(20))
    assert read(3) == read(2, workers=1) == rows
    assert read(1, seed=1) != rows


def test_what_a_stream_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be shuffled or grouped by length"):
        Loader(Stream(4), 2, 1)
    with pytest.raises(ConfigError, match="cannot be shuffled or grouped by length"):
        Loader(Stream(4), 2, 1, shuffle=False, lengths=[1, 2, 3, 4])
    with pytest.raises(ConfigError, match="workers is 2; a stream is read in order"):
        Loader(Stream(4), 2, 1, shuffle=False, workers=2)
    with pytest.raises(TypeError, match="not known"):
        len(Loader(Stream(4), 2, 1, shuffle=False))
    with pytest.raises(DataError, match="yielded no rows in epoch 0"):
        list(Loader(Stream(0), 2, 1, shuffle=False))
    with pytest.raises(DataError, match="yielded no whole global batch"):
        list(Loader(Stream(3), 4, 1, shuffle=False, drop_last=True))
    shorter = Loader(Stream(3), 2, 1, shuffle=False)
    shorter.load_state_dict({**shorter.state_dict(), "step": 5})
    with pytest.raises(DataError, match="no rows in epoch 0 after batch 5"):
        list(shorter)  # not an endless loop over nothing


class BrokenStream(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("the connection is gone")


def test_a_stream_that_breaks_off_is_named() -> None:
    with pytest.raises(DataError) as caught:
        list(Loader(BrokenStream(9), 2, 1, shuffle=False))
    assert "failed after 5 rows: OSError: the connection is gone" in str(caught.value)
    assert "(epoch 0, batch 2)" in str(caught.value)


# -- bad arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number, at least 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
        ({"micro_batch_size": -1}, "micro_batch_size is -1"),
        ({"micro_batch_size": "4"}, "micro_batch_size is '4'"),
        ({"seed": -1}, "seed is -1"),
        ({"workers": -1}, "workers is -1"),
        ({"prefetch": 0}, "prefetch is 0"),
        ({"shares": [1.0]}, "it must be 2 numbers"),
        ({"shares": [1.0, -1.0]}, "none negative"),
        ({"shares": [0, 0]}, "not all zero"),
        ({"shares": [1.0, float("nan")]}, "shares is"),
        ({"shares": [1.0, float("inf")]}, "shares is"),
        ({"shares": ["fast", "slow"]}, "shares is"),
        ({"lengths": [1, 2]}, "lengths has 2 entries for 10 rows"),
        ({"batch_size": 11, "drop_last": True}, "10 rows and a global batch of 11"),
        ({"dataset": []}, "The dataset is empty"),
        ({"dataset": 5}, "int is no dataset"),
        ({"dataset": iter([1])}, "is no dataset: it needs __len__ and __getitem__"),
    ],
)
def test_bad_arguments(change: dict[str, Any], facts: str) -> None:
    good = {"dataset": range(10), "batch_size": 4, "micro_batch_size": 2, "world": rank(0, 2)}
    with pytest.raises((ConfigError, DataError)) as caught:
        Loader(**{**good, **change})
    assert facts in str(caught.value)


def test_a_micro_batch_larger_than_the_batch_is_fine() -> None:
    loader = Loader(range(10), 4, 100)
    assert len(loader) == 3
    assert [b.count for b in loader] == [1, 1, 1]


def test_tensors_are_collated_as_usual() -> None:
    rows = [{"x": torch.full((3,), float(i)), "y": i} for i in range(4)]
    [batch] = Loader(rows, 4, 4, shuffle=False)
    data = batch.micro_batches[0].data
    assert data["x"].shape == (4, 3)
    assert data["y"].tolist() == [0, 1, 2, 3]


def test_a_resume_may_take_another_micro_batch_size(caplog: pytest.LogCaptureFixture) -> None:
    """A smaller card needs smaller micro-batches; the rows that follow stay the same."""
    before = Loader(range(20), 6, 3, seed=2, world=World("cpu"))
    next(iter(before))
    after = Loader(range(20), 6, 2, seed=2, world=World("cpu"))
    with caplog.at_level("WARNING", logger="oarlock"):
        after.load_state_dict(before.state_dict())
    assert "micro_batch_size = 3, this run has 2" in caplog.text
    rest = [[r for m in b.micro_batches for r in m.rows] for b in after]
    assert rest == [[r for m in b.micro_batches for r in m.rows] for b in before]
