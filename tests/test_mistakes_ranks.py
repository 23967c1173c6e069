"""What ranks can do unlike each other: seen on all of them, named, and never a hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_failing, run_ranks
from torch import Tensor, nn

import oarlock
from oarlock.batches import Batch, MicroBatch
from oarlock.errors import OarlockError

SGD = torch.optim.SGD


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def _loss(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
    return model(data).square().sum(), len(data)


def _engine(world: oarlock.World, **options: Any) -> oarlock.DataParallel:
    torch.manual_seed(0)
    model = _net()
    return oarlock.DataParallel(model, SGD(model.parameters(), lr=0.1), world, **options)


def _loader(world: oarlock.World, rows: int = 8, batch: int = 4, **options: Any) -> oarlock.Loader:
    data = torch.linspace(-1, 1, 2 * rows).view(rows, 2)
    return oarlock.Loader(data, batch, options.pop("micro", 1), world=world, **options)


def _said(action: Callable[[], Any]) -> tuple[str, str]:
    """The class and the message of what ``action`` raises."""
    try:
        action()
    except OarlockError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# -- ranks that differ, seen alike on all of them -------------------------------------------------


def _construct(world: oarlock.World) -> dict[str, tuple[str, str]]:
    """Each time rank 1 builds something else; all see it, and the world can be used on."""
    odd = world.rank == 1

    def build(model: nn.Module, lr: float = 0.1, kind: Any = SGD, **options: Any) -> Any:
        return oarlock.DataParallel(model, kind(model.parameters(), lr=lr), world, **options)

    def half_frozen() -> nn.Module:
        model = _net()
        model[0].requires_grad_(not odd)  # type: ignore[index]
        return model

    def scheduled() -> None:
        model = _net()
        optimizer = SGD(model.parameters(), lr=0.1)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
        oarlock.DataParallel(model, optimizer, world, scheduler=constant if odd else None)

    deeper = nn.Sequential(*_net(), nn.Linear(1, 1))
    return {
        "shape": _said(lambda: build(nn.Linear(2, 4 if odd else 3))),
        "depth": _said(lambda: build(deeper if odd else _net())),
        "dtype": _said(lambda: build(nn.Linear(2, 3).double() if odd else nn.Linear(2, 3))),
        "frozen": _said(lambda: build(half_frozen())),
        "lr": _said(lambda: build(_net(), lr=0.2 if odd else 0.1)),
        "optimizer": _said(lambda: build(_net(), kind=torch.optim.Adam if odd else SGD)),
        "scheduler": _said(scheduled),
        "clip_norm": _said(lambda: build(_net(), clip_norm=1.0 if odd else None)),
        "precision": _said(lambda: build(_net(), precision="bf16" if odd else "fp32")),
        "bucket_mb": _said(lambda: build(_net(), bucket_mb=1 if odd else 25)),
        "seed": _said(lambda: build(_net(), seed=int(odd))),
        "wrapped": _said(lambda: build(nn.parallel.DistributedDataParallel(_net()))),
        "overlap": _said(lambda: build(_net(), overlap=odd)),
        "sync_batchnorm": _said(
            lambda: build(nn.Sequential(nn.BatchNorm1d(2)), sync_batchnorm=odd)
        ),
        "nothing": _said(lambda: build(_net())),
    }


def test_different_things_built() -> None:
    zero, one, two = run_ranks(_construct, 3)
    assert zero == one == two, "all ranks say the same"
    assert zero.pop("nothing") == ("nothing", "")
    # when gradients travel is nothing that a peer depends on
    assert zero.pop("overlap") == ("nothing", "")
    assert zero["wrapped"][0] == "SetupError"
    assert "wrapped in DistributedDataParallel" in zero.pop("wrapped")[1]
    expected = {
        "shape": ["rank 0: parameter weight [3, 2]", "rank 1: parameter weight [4, 2]"],
        "depth": ["rank 1: parameter 3.weight [1, 1]"],
        "dtype": ["rank 0: parameter weight [3, 2] torch.float32", "torch.float64"],
        "frozen": ["rank 1: parameter 0.weight [3, 2] torch.float32 frozen"],
        "lr": ["rank 0: optimizer group 0", "('lr', 0.1)", "('lr', 0.2)"],
        "optimizer": ["rank 0: optimizer SGD", "rank 1: optimizer Adam"],
        "scheduler": ["rank 0: setting scheduler = NoneType", "scheduler = ConstantLR"],
        "clip_norm": ["rank 0: setting clip_norm = None", "rank 1: setting clip_norm = 1.0"],
        "precision": ["rank 1: setting precision = bf16"],
        "bucket_mb": ["rank 1: setting bucket_mb = 1"],
        "seed": ["rank 0: setting seed = 0", "rank 1: setting seed = 1"],
        "sync_batchnorm": ["rank 1: setting sync_batchnorm = True"],
    }
    assert set(expected) == set(zero)
    for name, words in expected.items():
        kind, message = zero[name]
        assert kind == "SetupError", name
        assert message.startswith("The ranks built different things:"), name
        for word in words:
            assert word in message, name


def _disagree(world: oarlock.World) -> dict[str, tuple[str, str]]:
    odd = world.rank == 1

    def step(batch: Any, loss_fn: Any = _loss) -> tuple[str, str]:
        return _said(lambda: _engine(world).step(batch, loss_fn))

    def first(**options: Any) -> Batch:
        return next(iter(_loader(world, **options)))

    def later() -> tuple[str, str]:
        batches = list(_loader(world))
        return step(batches[1] if odd else batches[0])

    def mixed(model: nn.Module, data: Tensor) -> tuple[Tensor, Any]:
        loss, weight = _loss(model, data)
        return loss, float(weight) if odd else weight

    def shares() -> tuple[str, str]:
        return step(first(shares=[3.0, 1.0] if odd else [1.0, 1.0]))

    own = [MicroBatch(0, (0,), torch.ones(1, 2))]
    return {
        "batch size": step(first(batch=2 if odd else 4)),
        "micro-batch size": step(first(micro=2 if odd else 1)),
        "rows": step(first(rows=3 if odd else 8)),
        "seed": step(first(seed=7 if odd else 0)),
        "position": later(),
        "shares": shares(),
        "same part": step(Batch(0, 0, 2, 2, own)),
        "kind": step([torch.ones(1, 2)] if odd else first()),
        "weights": step(first(), mixed),
        "zero weight": step(first(), lambda m, d: (_loss(m, d)[0], 0)),
        "nothing": step([]),
        "right": step(first()),
    }


def test_different_steps() -> None:
    zero, one = run_ranks(_disagree, 2)
    assert zero == one, "both ranks say the same"
    assert zero.pop("right") == ("nothing", "")
    expected = {
        "batch size": ("OutOfStepError", ["micro-batches differs", "rank 0: step 1", "4 micro"]),
        "micro-batch size": ("OutOfStepError", ["micro-batches differs", "2 micro-batches"]),
        "rows": ("OutOfStepError", ["4 rows", "3 rows"]),
        "seed": ("OutOfStepError", ["seed differs", "seed 0", "seed 7"]),
        "position": ("OutOfStepError", ["batch differs", "rank 1: step 1, epoch 0, batch 1"]),
        "shares": ("OutOfStepError", ["micro-batch 2 of 4", "by two (rank 1 starts at 3)"]),
        "same part": ("OutOfStepError", ["micro-batch 1 of 2", "rank 1 starts at 0"]),
        "kind": ("OutOfStepError", ["differs"]),
        "weights": ("SetupError", ["whole number in 2", "fraction in 2", "tokens or samples"]),
        "zero weight": ("DataError", ["Step 1: the total weight is zero"]),
        "nothing": ("DataError", ["no micro-batch on any rank"]),
    }
    assert set(expected) == set(zero)
    for name, (kind, words) in expected.items():
        assert zero[name][0] == kind, (name, zero[name])
        for word in words:
            assert word in zero[name][1], (name, zero[name])


# -- ranks that part ------------------------------------------------------------------------------


def _stops_early(world: oarlock.World) -> None:
    engine = _engine(world)
    for batch in _loader(world, rows=20):
        if world.rank == 1 and engine.steps_done == 2:
            return
        engine.step(batch, _loss)


def _evaluates_alone(world: oarlock.World) -> None:
    engine, loader = _engine(world), _loader(world)
    for batch in loader:
        engine.step(batch, _loss)
        if world.is_main:
            engine.evaluate(_loader(world), _loss)


def _saves_alone(world: oarlock.World, folder: Path) -> None:
    engine, loader = _engine(world), _loader(world)
    for batch in loader:
        engine.step(batch, _loss)
        if world.is_main:
            oarlock.Checkpoints(folder).save(engine, loader)


def _checks_alone(world: oarlock.World) -> None:
    engine, loader = _engine(world), _loader(world)
    for batch in loader:
        engine.step(batch, _loss)
        if world.rank == 1:
            engine.check_replicas()


def _steps_again(world: oarlock.World) -> None:
    """As with a hand-made loop over ranks' own lists, of unequal length."""
    engine = _engine(world)
    for _ in range(5 - world.rank):
        engine.step([torch.ones(2, 2)], _loss)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (_stops_early, ["rank 0: step 3 (epoch 0, batch 2)", "rank 1: leaving after 2 steps"]),
        (_evaluates_alone, ["rank 0: evaluation after 1 steps", "rank 1: step 2"]),
        (_saves_alone, ["rank 0: save after 1 steps", "rank 1: step 2"]),
        (_checks_alone, ["rank 0: step 2", "rank 1: check after 1 steps"]),
        (_steps_again, ["rank 0: step 5", "rank 1: leaving after 4 steps"]),
    ],
)
def test_ranks_that_part_are_both_named(parts: Any, words: list[str], tmp_path: Path) -> None:
    args = [tmp_path] if parts is _saves_alone else []
    for error in run_failing(parts, 2, *args):
        assert error is not None
        assert error[0] == "OutOfStepError"
        assert error[1].startswith("The ranks are not doing the same thing")
        for word in words:
            assert word in error[1]
    assert list(tmp_path.iterdir()) == []


def _raises(world: oarlock.World) -> None:
    engine = _engine(world)

    def loss_fn(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
        if world.rank == 1 and engine.steps_done == 1:
            raise ValueError("boom")
        return _loss(model, data)

    for batch in _loader(world):
        engine.step(batch, loss_fn)


def _returns_a_vector(world: oarlock.World) -> None:
    engine = _engine(world)
    for batch in _loader(world):
        engine.step(batch, (lambda m, d: (m(d), 1)) if world.rank == 1 else _loss)


def test_an_error_on_one_rank_ends_the_others() -> None:
    for action, own in ((_raises, ("ValueError", "boom")), (_returns_a_vector, None)):
        zero, one = run_failing(action, 2)
        assert zero is not None
        assert zero[0] == "PeerLostError"
        assert "Rank 0" in zero[1]
        assert "The peer's own error is the cause" in zero[1]
        assert one is not None
        assert one == own if own else one[0] == "SetupError"


# -- around the engine --------------------------------------------------------------------------


def _around(world: oarlock.World) -> dict[str, tuple[str, str]]:
    out = {}

    engine = _engine(world)
    out["foreign update"] = _said(engine.optimizer.step)
    second = oarlock.DataParallel(engine.model, engine.optimizer, world)
    batch = next(iter(_loader(world)))
    out["second engine"] = _said(lambda: second.step(batch, _loss))
    out["foreign update, second engine"] = _said(engine.optimizer.step)

    engine = _engine(world)
    for p in engine.model.parameters():
        p.grad = torch.full_like(p, float(world.rank + 1))  # of a backward without the engine
    engine.step(batch, _loss)
    fresh = _engine(world)
    fresh.step(batch, _loss)
    same = engine.check_replicas() == fresh.check_replicas()
    out["stray gradient"] = ("nothing", "has no influence" if same else "changed the update")

    engine = _engine(world)
    engine.model[2].requires_grad_(False)  # type: ignore[index,operator]
    out["frozen later"] = _said(lambda: engine.step(batch, _loss))

    engine = _engine(world)
    engine.model.extra = nn.Parameter(torch.ones(3))
    out["added later"] = _said(lambda: engine.step(batch, _loss))

    torch.manual_seed(0)
    model = _net()
    model[0].requires_grad_(False)  # type: ignore[index]
    engine = oarlock.DataParallel(model, SGD(model.parameters(), lr=0.1), world)
    model[0].requires_grad_(True)  # type: ignore[index]
    out["unfrozen later"] = _said(lambda: engine.step(batch, _loss))
    return out


def test_what_happens_around_the_engine() -> None:
    zero, one = run_ranks(_around, 2)
    assert zero == one
    assert zero["foreign update"][0] == "SetupError"
    assert "optimizer.step() was called outside engine.step()" in zero["foreign update"][1]
    assert zero["second engine"] == ("nothing", "")
    assert zero["foreign update, second engine"] == zero["foreign update"]
    assert zero["stray gradient"] == ("nothing", "has no influence")
    for name in ("frozen later", "added later", "unfrozen later"):
        assert zero[name][0] == "SetupError", name
        assert "trainable parameters are not those" in zero[name][1], name
        assert "Build a new DataParallel" in zero[name][1], name
