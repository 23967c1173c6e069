"""Kill, resume, on other worlds: each row once, and the weights of an undisturbed run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import _child, free_port
from torch import nn

import oarlock

ROWS, EPOCHS, BATCH, MICRO = 60, 2, 8, 2  # no micro-batch of one row: BatchNorm needs two
STEPS = EPOCHS * -(-ROWS // BATCH)


class Rows(torch.utils.data.Dataset):
    """Random vectors; row i is a function of i."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return torch.randn(6, generator=g), torch.randint(0, 3, (), generator=g)


def loss(model: nn.Module, data: Any) -> tuple[torch.Tensor, int]:
    x, y = data
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


def train(world: oarlock.World, folder: str, number: int, pause: float) -> dict[str, torch.Tensor]:
    """Train to the end from wherever the folder's checkpoints stand; saves after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    engine = oarlock.DataParallel(model, optimizer, world, clip_norm=1.0, scheduler=schedule)
    loader = oarlock.Loader(Rows(), BATCH, MICRO, seed=4)
    checkpoints = oarlock.Checkpoints(Path(folder) / "checkpoints", keep=2)
    checkpoints.load(engine, loader, missing_ok=True)
    with open(Path(folder) / f"ledger-{number}-{world.rank}.jsonl", "w") as ledger:
        while loader.epoch < EPOCHS:
            for batch in loader:
                engine.step(batch, loss)
                rows = [r for m in batch.micro_batches for r in m.rows]
                entry = {"attempt": number, "step": engine.steps_done, "epoch": batch.epoch}
                ledger.write(json.dumps({**entry, "rows": rows}) + "\n")
                ledger.flush()
                time.sleep(pause)
                checkpoints.save(engine, loader)
    assert engine.steps_done == STEPS
    return {k: v.clone() for k, v in model.state_dict().items()}


def lines(folder: Path) -> int:
    """How many entries the ledgers hold by now."""
    return sum(p.read_text().count("\n") for p in folder.glob("ledger-*.jsonl"))


def attempt(folder: Path, size: int, kill_after: int | None) -> dict[str, torch.Tensor] | None:
    """One start of the job. Kills a random rank at a random moment within or after so many steps;
    None if that ended it."""
    import pickle

    context = multiprocessing.get_context("fork")
    box, port = context.Queue(), free_port()
    pause = 0.0 if kill_after is None else 0.01  # a wider window between a step and its save
    before, number = lines(folder), len(list(folder.glob("ledger-*-0.jsonl")))
    children = [
        context.Process(
            target=_child, args=(train, r, size, port, (str(folder), number, pause), box)
        )
        for r in range(size)
    ]
    for child in children:
        child.start()
    if kill_after is not None:
        while lines(folder) - before < kill_after * size and all(c.is_alive() for c in children):
            time.sleep(0.005)
        time.sleep(random.random() * 0.08)
        victim = random.choice(children)
        if victim.pid and victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
            for child in children:  # the launcher's part: the rest goes too
                child.join(timeout=5)
                if child.is_alive():
                    child.kill()
                    child.join()
            return None
    answers = [box.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    bad = [value[2] for _, ok, value in answers if not ok]
    assert not bad, "\n".join(bad)
    weights = [pickle.loads(value) for _, _, value in answers]
    for other in weights[1:]:
        assert all(torch.equal(other[k], weights[0][k]) for k in other)
    return weights[0]


def check_ledger(folder: Path) -> None:
    """Each row once an epoch. Of a step that several attempts ran, the last one's update was kept:
    the attempts before were killed before they saved it."""
    steps: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path in folder.glob("ledger-*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {}).setdefault(entry["attempt"], []).append(entry)
    assert sorted(steps) == list(range(1, STEPS + 1))
    seen: dict[int, Counter[int]] = {e: Counter() for e in range(EPOCHS)}
    for attempts in steps.values():
        for entry in attempts[max(attempts)]:
            seen[entry["epoch"]].update(entry["rows"])
    for epoch in range(EPOCHS):
        assert seen[epoch] == Counter(range(ROWS)), f"epoch {epoch}"


def test_every_row_once_over_kills_and_other_worlds(tmp_path: Path) -> None:
    """SIGKILL at random moments, resume on another number of ranks, until the end is reached."""
    random.seed(11)
    straight = attempt(tmp_path / "straight", 2, None) if _made(tmp_path / "straight") else None
    assert straight is not None
    folder = tmp_path / "killed"
    folder.mkdir()
    kills = 0
    result = None
    for i in range(40):
        size = (2, 1, 3)[i % 3]
        result = attempt(folder, size, random.randint(0, 3))
        if result is not None:
            break
        kills += 1
    result = result or attempt(folder, 2, None)
    assert result is not None
    assert kills >= 4, "the job was killed too rarely to prove anything"
    check_ledger(folder)
    for name, value in straight.items():
        error = (result[name].double() - value.double()).norm() / value.double().norm()
        assert error < 1e-6, (name, float(error))


def test_interrupted_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    """On the same world, an interrupted run ends with the very bits of an undisturbed one."""
    random.seed(5)
    _made(tmp_path / "straight")
    _made(tmp_path / "killed")
    straight = attempt(tmp_path / "straight", 2, None)
    assert straight is not None
    for _ in range(3):
        attempt(tmp_path / "killed", 2, random.randint(1, 3))
    result = attempt(tmp_path / "killed", 2, None)
    assert result is not None
    for name, value in straight.items():
        assert torch.equal(result[name], value), name
    check_ledger(tmp_path / "killed")


def _made(folder: Path) -> bool:
    folder.mkdir()
    return True


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
