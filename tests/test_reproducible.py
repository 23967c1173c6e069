"""Reproducible mode: the same bits of weights, losses and norms on any number of ranks."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_failing, run_ranks
from torch import Tensor, nn

import oarlock
from oarlock.checkpoint import Checkpoints
from oarlock.engine.names import named_state
from oarlock.engine.tree import Tree, nodes_of
from oarlock.errors import ConfigError

STEPS = 50
WORLDS = (1, 2, 3, 4, 8)
SHARES = {2: [6.0, 2.0], 3: [1.0, 5.0, 2.0], 4: [5.0, 0.0, 2.0, 1.0], 8: [1, 0, 3, 1, 1, 0, 1, 1]}


class GPT(nn.Module):
    """Two blocks of attention and MLP with dropout, a tied head, a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(50, 24), nn.Embedding(12, 24)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                24, 2, 48, dropout=0.1, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(2)
        )
        self.norm, self.unused = nn.LayerNorm(24), nn.Linear(3, 3)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class CNN(nn.Module):
    """Convolutions with BatchNorm (one layer called twice, one averaging cumulatively)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.last(self.norm(self.again(x))))
        return self.head(torch.dropout(x.flatten(1), 0.2, self.training))


def _rows(kind: str) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(5)
    if kind == "gpt":
        ids = torch.randint(0, 50, (61, 13), generator=g)
        return [(row[:-1], row[1:]) for row in ids]
    return [
        (torch.randn(1, 6, 6, generator=g), torch.randint(0, 10, (), generator=g))
        for _ in range(61)
    ]


def _loss(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    out, y = model(data[0]), data[1]
    return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum"), y.numel()


def _build(world: oarlock.World, kind: str, optimizer: str, rung: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT() if kind == "gpt" else CNN()
    opt: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=3e-3)
        if optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    options = {"reproducible": True, "clip_norm": 1.0, "bucket_mb": 0.03, **options}
    engine = oarlock.DataParallel(model, opt, world, sharding=rung, **options)
    return engine, model


def _bits(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for _, tensor in named_state(model):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _run(engine: Any, loader: Any, steps: int) -> list[tuple[float, ...]]:
    history: list[tuple[float, ...]] = []
    while len(history) < steps:
        for batch in loader:
            r = engine.step(batch, _loss)
            history.append((r.loss, r.grad_norm, r.weight))
            if len(history) == steps:
                break
    return history


def _train(
    world: oarlock.World, jobs: list[tuple[str, str]], rung: int, shares: Any, options: Any
) -> list[Any]:
    out = []
    for kind, optimizer in jobs:
        engine, model = _build(world, kind, optimizer, rung, **options)
        # 61 rows in batches of 18: the last one has 4 micro-batches, of which one is partial
        loader = oarlock.Loader(_rows(kind), 18, 2, seed=1, shares=shares, world=world)
        history = _run(engine, loader, STEPS)
        evaluated = engine.evaluate(
            oarlock.Loader(_rows(kind), 18, 2, shuffle=False, world=world), _loss
        )
        out.append((_bits(model), history, evaluated))
    return out


JOBS = [("gpt", "adamw"), ("gpt", "sgd"), ("cnn", "adamw"), ("cnn", "sgd")]


@functools.cache
def _alone() -> Any:
    return run_ranks(_train, 1, JOBS, 0, None, {})[0]


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize("rung", [0, 1, 2])
@pytest.mark.parametrize("size", WORLDS[1:])
def test_the_same_bits_on_any_world(size: int, rung: int, unequal: bool) -> None:
    # on eight ranks every job at every rung would take minutes on two cores
    jobs = JOBS if size < 8 else JOBS[:1] if (rung == 1) != unequal else JOBS[2:3]
    shares = SHARES[size] if unequal else None
    ranks = run_ranks(_train, size, jobs, rung, shares, {}, timeout=300.0)
    for result in ranks:
        for job, got in zip(jobs, result, strict=True):
            want = _alone()[JOBS.index(job)]
            assert got[1] == want[1], f"{job}: losses, norms"
            assert got[0] == want[0], f"{job}: weights and buffers"
            assert got[2] == want[2], f"{job}: evaluation"


def test_ordinary_mode_gives_other_bits() -> None:
    """Else equality would show nothing."""
    plain = {"reproducible": False}
    one = run_ranks(_train, 1, JOBS[:1], 0, None, plain)[0][0]
    two = run_ranks(_train, 2, JOBS[:1], 0, None, plain)[0][0]
    assert one[0] != two[0]
    assert one[1][-1] == pytest.approx(_alone()[0][1][-1], rel=1e-3)  # but the same training


def _kill_and_resume(world: oarlock.World, rung: int, folder: Path, done: int, more: int) -> Any:
    engine, model = _build(world, "gpt", "adamw", rung)
    loader = oarlock.Loader(_rows("gpt"), 18, 2, seed=1, world=world)
    saved = Checkpoints(folder)
    if done:
        saved.load(engine, loader)
    history = _run(engine, loader, more)
    saved.save(engine, loader)
    return _bits(model), history


def test_over_resume_on_another_world_and_rung(tmp_path: Path) -> None:
    first = run_ranks(_kill_and_resume, 3, 1, tmp_path, 0, 17)[0]
    second = run_ranks(_kill_and_resume, 2, 2, tmp_path, 17, 20)[0]
    third = run_ranks(_kill_and_resume, 1, 0, tmp_path, 37, STEPS - 37)[0]
    bits, history, _ = _alone()[0]
    assert [*first[1], *second[1], *third[1]] == history
    assert third[0] == bits


def _by_collectives(world: oarlock.World, rung: int) -> Any:
    from oarlock.engine.wire import Collectives

    engine, model = _build(world, "gpt", "adamw", rung)
    if world.size > 1:
        engine.exchange.wire = Collectives(world)
    loader = oarlock.Loader(_rows("gpt"), 18, 2, seed=1, shares=SHARES[3], world=world)
    return _run(engine, loader, 8), _bits(model)


@pytest.mark.parametrize("rung", [0, 1, 2])
def test_by_the_backends_own_collectives(rung: int) -> None:
    """The path that NCCL takes."""
    history = run_ranks(_by_collectives, 3, rung)[0][0]
    assert history == _alone()[0][1][:8]


# -- the tree ------------------------------------------------------------------------------------


def _recursive(values: list[Tensor], first: int, width: int) -> Tensor:
    if width == 1:
        return values[first]
    half = width // 2
    left = _recursive(values, first, half)
    if first + half >= len(values):
        return left
    return left + _recursive(values, first + half, half)


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 6, 7, 8, 13, 16])
def test_the_tree_is_the_plain_recursion_whoever_adds(leaves: int) -> None:
    values = list(torch.randn(leaves, 9, generator=torch.Generator().manual_seed(leaves)) * 1e3)
    width = 1 << (leaves - 1).bit_length()
    want = _recursive(values, 0, width)
    for first in range(leaves + 1):
        for end in range(first, leaves + 1):
            tree = Tree(leaves)
            for a, b in ((end, leaves), (0, first), (first, end)):  # in another order, too
                for level, index in nodes_of(a, b):
                    low, size = index << level, 1 << level
                    assert low + size <= b
                    tree.add((level, index), _recursive(values[: low + size], low, size).clone())
            assert tree.root is not None
            assert torch.equal(tree.root, want)


# -- refusals ------------------------------------------------------------------------------------


class _Put(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return x * self.weight


def _without_kernel(world: oarlock.World) -> None:
    model = _Put()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = oarlock.DataParallel(model, opt, world, reproducible=True)
    try:
        engine.step([torch.ones(4)], lambda model, data: (model(data).sum(), 1))
    finally:
        assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    errors = run_failing(_without_kernel, 2)
    for error in errors:
        assert error is not None
        assert error[0] == "SetupError"
        assert error[1].startswith("Reproducible mode: put_ has no deterministic kernel"), error[1]


def _reentrant(world: oarlock.World) -> None:
    from parity_models import Checkpointed

    model = Checkpointed(use_reentrant=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = oarlock.DataParallel(model, opt, world, reproducible=True)
    engine.step([torch.ones(2, 6)], lambda model, data: (model(data).sum(), 2))


@pytest.mark.parametrize("size", [1, 2])
def test_reentrant_checkpointing_is_refused(size: int) -> None:
    for error in run_failing(_reentrant, size):
        assert error is not None
        assert "Step 1: shared." in error[1]
        assert "use_reentrant=False" in error[1]


def test_statistics_over_ranks_are_refused() -> None:
    model = CNN()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="sync_batchnorm"):
        oarlock.DataParallel(
            model, opt, oarlock.World("cpu"), reproducible=True, sync_batchnorm=True
        )
