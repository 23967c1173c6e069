"""Owner's slices: what each rank holds, what its optimizer sees, and checkpoints across rungs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import adamw, assert_same, build, fingerprint, run, sgd
from ranks import run_failing, run_ranks
from torch import Tensor, nn

import oarlock
from oarlock.checkpoint import Checkpoints


def _loss(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
    return (model(data) - 1).square().sum(), len(data)


def _loader(world: oarlock.World, rows: int = 16, batch: int = 8, micro: int = 2) -> Any:
    data = torch.randn(rows, 5, generator=torch.Generator().manual_seed(2))
    return oarlock.Loader(data, batch, micro, world=world)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def _engine(world: oarlock.World, rung: int, **options: Any) -> Any:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return oarlock.DataParallel(model, optimizer, world, sharding=rung, **options)


# -- checkpoints from any rung to any other ------------------------------------------------------


def _save(
    world: oarlock.World, rung: int, folder: Path, optimizer: Any, one_dtype: bool
) -> dict[str, bytes]:
    engine, loader = build(world, optimizer=optimizer, sharding=rung, one_dtype=one_dtype)
    run(engine, loader, 3)
    Checkpoints(folder).save(engine, loader)
    return fingerprint(engine)


def _load_and_save(
    world: oarlock.World, rung: int, source: Path, target: Path, optimizer: Any, one_dtype: bool
) -> dict[str, bytes]:
    engine, loader = build(world, seed=9, optimizer=optimizer, sharding=rung, one_dtype=one_dtype)
    run(engine, loader, 1)  # what it held before must not matter
    Checkpoints(source).load(engine, loader)
    Checkpoints(target).save(engine, loader)
    return fingerprint(engine)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ((2, 0), (3, 1)),
        ((3, 1), (2, 2)),
        ((2, 2), (1, 0)),
        ((1, 0), (4, 2)),
        ((4, 1), (2, 0)),
        ((2, 1), (3, 3)),
        ((3, 3), (2, 0)),
        ((2, 3), (4, 3)),
    ],
)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_a_checkpoint_loads_at_any_other_rung_and_world(
    tmp_path: Path, there: tuple[int, int], here: tuple[int, int], optimizer: Any
) -> None:
    one_dtype = 3 in (there[1], here[1])  # which sharding 3 needs
    a, b = tmp_path / "a", tmp_path / "b"
    saved = run_ranks(_save, there[0], there[1], a, optimizer, one_dtype)[0]
    loaded = run_ranks(_load_and_save, here[0], here[1], a, b, optimizer, one_dtype)[0]
    assert_same(loaded, saved)
    files = ("model.safetensors", "optimizer.safetensors")
    for file in files:
        one, other = (next((tmp_path / f).iterdir()) / file for f in "ab")
        assert one.read_bytes() == other.read_bytes()


# -- what each rank holds ------------------------------------------------------------------------


def _held(world: oarlock.World, rung: int) -> dict[str, int]:
    engine = _engine(world, rung)
    for batch in _loader(world):
        engine.step(batch, _loss)
    state = sum(
        t.numel()
        for entry in engine.optimizer.state.values()
        for k, t in entry.items()
        if k != "step"
    )
    gradients = sum(b.flat.numel() for b in engine.exchange.buckets if b.flat is not None)
    gradients += sum(t.numel() for t in getattr(engine.exchange, "_own", []))
    return {"state": state, "gradients": gradients}


def test_state_and_gradients_are_kept_by_the_rungs_rule() -> None:
    numel = sum(p.numel() for p in _net().parameters())
    padding = 6 * 256 + 4 * 256
    for size in (2, 4):
        whole, zero1, zero2 = (run_ranks(_held, size, rung) for rung in (0, 1, 2))
        assert {r["state"] for r in whole} == {2 * numel}
        for ranks in (zero1, zero2):
            assert sum(r["state"] for r in ranks) == 2 * numel  # each element once
            assert max(r["state"] for r in ranks) <= 2 * (numel + padding) / size
        assert min(r["gradients"] for r in zero1) >= numel
        assert max(r["gradients"] for r in zero2) <= (numel + padding) / size


def _memory_between_rounds(world: oarlock.World) -> list[int]:
    """At sharding 2: gradient elements that are alive at each forward of a step."""
    engine = _engine(world, 2, bucket_mb=0.001)
    seen: list[int] = []

    def watching(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
        flats = [b.flat for b in engine.exchange.buckets if b.flat is not None]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append(sum(t.numel() for t in (*flats, *grads)))
        return _loss(model, data)

    for batch in _loader(world, rows=16, batch=16, micro=2):
        engine.step(batch, watching)
    return seen


def test_sharding_2_frees_gradients_between_micro_batches() -> None:
    assert run_ranks(_memory_between_rounds, 2) == [[0] * 4] * 2


# -- mistakes ------------------------------------------------------------------------------------


def _replaced_memory(world: oarlock.World) -> None:
    engine = _engine(world, 1)
    engine.model[0].weight.data = engine.model[0].weight.data.clone()
    engine.step(next(iter(_loader(world))), _loss)


def _group_added(world: oarlock.World) -> None:
    engine = _engine(world, 1)
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    engine.step(next(iter(_loader(world))), _loss)


def _overlapping(world: oarlock.World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)  # another Parameter, the same memory
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    oarlock.DataParallel(model, optimizer, world, sharding=2)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (_replaced_memory, "The memory of 0.weight was replaced"),
        (_group_added, "The optimizer's parameters were changed"),
        (_overlapping, "0.weight and 1.weight share memory"),
    ],
)
def test_what_slices_cannot_follow_is_refused(mistake: Any, said: str) -> None:
    for error in run_failing(mistake, 2):
        assert error is not None
        assert error[0] == "SetupError"
        assert said in error[1]


def _taken_over(world: oarlock.World) -> tuple[list[Any], list[Any]]:
    """Two steps with one engine, two with another on the same optimizer; and four with one."""
    out = []
    for rungs in ((1, 0), (2, 1), (0, 0)):
        model = _net()
        names = [(n, p) for n, p in model.named_parameters()]
        optimizer = torch.optim.AdamW(names, lr=0.01)
        for rung in rungs:
            engine = oarlock.DataParallel(model, optimizer, world, sharding=rung)
            for batch in _loader(world, rows=16):
                engine.step(batch, _loss)
        groups = [len(g["params"]) == len(g["param_names"]) for g in optimizer.param_groups]
        assert all(groups)
        out.append([p.detach().clone() for p in model.parameters()])
    return out[:-1], out[-1]


def test_another_engine_takes_the_state_over() -> None:
    for sharded, plain in run_ranks(_taken_over, 2):
        for weights in sharded:
            torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-7)
