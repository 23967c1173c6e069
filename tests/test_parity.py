"""N ranks compute what one plain process does: see the table in ``parity_cases``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from parity_cases import CASES, Case
from ranks import run_failing, run_ranks
from torch import Tensor, nn
from torch.utils.data import default_collate

import oarlock
from oarlock.engine.dtensors import whole
from oarlock.engine.guard import fingerprints

WORLDS = (1, 2, 3, 4)
RUNGS = (0, 1, 2, 3)
NOT_SHARDED = {  # cases that sharding 3 refuses, and what it says
    "two dtypes": "needs trainable parameters of one dtype",
    "scalars and strange strides": "doesn't support scalar parameters",
    "gradient penalty": "cannot run a backward of its own",
    "tokens, nothing run without targets": "the ranks do not run the same blocks",
}
WIDE_WORLDS = (3,)  # in float64 too: tells a small mistake from rounding, unequal split and all
Key = tuple[str, bool]  # a case's name; whether in float64
KEYS: list[Key] = [
    (n, wide) for n, case in CASES.items() for wide in (False, True)[: 1 + case.wide]
]


def _wide(data: Any) -> Any:
    """Floating-point tensors in float64."""
    if isinstance(data, Tensor):
        return data.double() if data.is_floating_point() else data
    if isinstance(data, dict):
        return {k: _wide(v) for k, v in data.items()}
    return type(data)(map(_wide, data)) if isinstance(data, (list, tuple)) else data


def _prepare(case: Case, wide: bool, world: oarlock.World) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = case.model()
    if wide:
        model.double()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    loader = oarlock.Loader(
        case.rows,
        case.batch,
        case.micro,
        seed=3,
        collate_fn=case.collate,
        shares=case.shares.get(world.size),
        world=world,
    )

    def loss_fn(model: nn.Module, data: Any) -> tuple[Tensor, Any]:
        return case.loss(model, _wide(data) if wide else data)

    return model, optimizer, scheduler, loader, loss_fn


def _state(model: nn.Module) -> list[Tensor]:
    return [whole(t.detach()).clone() for t in (*model.parameters(), *model.buffers())]


def _batches(loader: oarlock.Loader, steps: int) -> Any:
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            yield batch
            done += 1


def _engine(world: oarlock.World, case: Case, wide: bool, rung: int = 0) -> dict[str, Any]:
    """The case on this world."""
    model, optimizer, scheduler, loader, loss_fn = _prepare(case, wide, world)
    engine = oarlock.DataParallel(
        model,
        optimizer,
        world,
        scheduler=scheduler,
        guard_every=5,
        sharding=rung,
        **case.engine,
    )
    history = []
    for batch in _batches(loader, case.steps):
        r = engine.step(batch, loss_fn)
        history.append((r.loss, r.weight, r.grad_norm, r.lr, r.skipped, engine.precision.scale))
    state = _state(model)
    return {
        "history": history,
        "prints": fingerprints(state),
        "state": state if world.is_main else None,
    }


def _plain(case: Case, wide: bool) -> dict[str, Any]:
    """The case in plain PyTorch: one process, no engine."""
    world = oarlock.World("cpu")
    model, optimizer, scheduler, loader, loss_fn = _prepare(case, wide, world)
    collate = case.collate or default_collate
    precision = case.engine.get("precision", "fp32")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    scale = 65536.0 if precision == "fp16" else 1.0
    history = []
    for batch in _batches(loader, case.steps):
        pieces = [m.rows for m in batch.micro_batches]
        if case.reference == "whole":
            pieces = [tuple(row for piece in pieces for row in piece)]
        optimizer.zero_grad()
        total, count = 0.0, 0.0
        for piece in pieces:
            data = collate([case.rows[row] for row in piece])
            with torch.autocast("cpu", dtype=dtype, enabled=precision != "fp32"):
                loss, weight = loss_fn(model, data)
            if loss.requires_grad:
                (loss * scale).backward()
            total, count = total + loss.item(), count + float(weight)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(count * scale)
        clip = case.engine.get("clip_norm") or float("inf")
        trainable = [p for p in model.parameters() if p.requires_grad]
        norm = float(nn.utils.clip_grad_norm_(trainable, clip))
        lr, finite = optimizer.param_groups[0]["lr"], torch.isfinite(torch.tensor(norm)).item()
        if finite:
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        else:
            scale /= 2
        history.append((total / count, count, norm, lr, not finite, scale))
    return {"history": history, "state": _state(model)}


def _all_on(world: oarlock.World, keys: list[Key], rung: int) -> dict[Key, Any]:
    return {(n, wide): _engine(world, CASES[n], wide, rung) for n, wide in keys}


def _all_plain(_: oarlock.World) -> dict[Key, Any]:
    return {(n, w): _plain(CASES[n], w) for n, w in KEYS if CASES[n].reference != "one rank"}


@functools.cache
def _plain_results() -> dict[Key, Any]:
    # in a process of its own: this one must stay without threads, since it forks
    return run_ranks(_all_plain, 1)[0]


def _runs(size: int, name: str, wide: bool, rung: int = 0) -> bool:
    case = CASES[name]
    if rung and size == 1:
        return False  # alone, every rung is the same
    if rung == 3 and (name in NOT_SHARDED or size == 4):
        return False  # four ranks: test_sharded has them, hybrid
    wanted = not wide or size in WIDE_WORLDS or (size == 1 and case.reference == "one rank")
    return size in case.worlds and wanted


@functools.cache
def _results(size: int, rung: int = 0) -> dict[Key, Any]:
    """Every case on ``size`` ranks, in one set of processes; apart where one of them fails."""
    keys = [key for key in KEYS if _runs(size, *key, rung)]
    try:
        ranks = run_ranks(_all_on, size, keys, rung)
        return {key: [r[key] for r in ranks] for key in keys}
    except AssertionError:
        found: dict[Key, Any] = {}
        for key in keys:
            try:
                found[key] = [r[key] for r in run_ranks(_all_on, size, [key], rung, timeout=30)]
            except AssertionError as error:
                found[key] = str(error)
        return found


def _apart(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖; whole numbers must be equal."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    difference = float((a.double() - b.double()).norm())
    return difference / max(float(b.double().norm()), 1e-30)


def _checks() -> list[Any]:
    return [
        pytest.param(size, rung, name, wide, id=f"{size}-rung{rung}-{name}{'-float64' * wide}")
        for size in WORLDS
        for rung in RUNGS
        for name, wide in KEYS
        if _runs(size, name, wide, rung)
    ]


@pytest.mark.parametrize(("size", "rung", "name", "wide"), _checks())
def test_equals_one_process(size: int, rung: int, name: str, wide: bool) -> None:
    case, ranks = CASES[name], _results(size, rung)[name, wide]
    assert not isinstance(ranks, str), ranks
    if case.reference == "one rank":
        expected = _results(1)[name, wide][0]
    else:
        expected = _plain_results()[name, wide]
    limit = 1e-12 if wide else case.tolerance

    assert len({tuple(r["prints"]) for r in ranks}) == 1, "replicas differ"
    histories = {repr(r["history"]) for r in ranks}  # as text: a skipped step's norm is no number
    assert len(histories) == 1, "results differ between ranks"
    apart = [_apart(a, b) for a, b in zip(ranks[0]["state"], expected["state"], strict=True)]
    assert max(apart) <= limit, apart
    for step, (got, want) in enumerate(
        zip(ranks[0]["history"], expected["history"], strict=True), 1
    ):
        # loss, weight and norm to rounding (all are of order one); the rest exactly
        assert got[:3] == pytest.approx(want[:3], rel=10 * limit, nan_ok=True), f"step {step}"
        assert got[3:] == want[3:], f"step {step}"


def test_the_table_reaches_what_it_is_for() -> None:
    """The cases do what their names say: otherwise equality would show nothing."""
    plain = _plain_results()
    skipped = [h[4] for h in plain["fp16", False]["history"]]
    assert 2 <= sum(skipped) <= len(skipped) - 10  # as many updates as elsewhere
    scales = [h[5] for h in plain["fp16", False]["history"]]
    assert scales[-1] == 65536.0 / 2 ** sum(skipped)
    weights = [h[1] for h in plain["tokens", False]["history"]]
    assert max(weights) > 3 * min(weights)
    assert all(h[2] > 0.5 for h in plain["clipping", False]["history"])
    rates = [h[3] for h in plain["warm-up", False]["history"]]
    assert rates[:4] == pytest.approx([3e-3 * k / 4 for k in (1, 2, 3, 4)])
    torch.manual_seed(0)
    router = CASES["routed"].model()
    moved = [
        not torch.equal(a, b)
        for a, b in zip(_state(router), plain["routed, sgd", False]["state"], strict=True)
    ]
    assert moved == [True] * 10 + [False] * 2, "expert 4 alone is never used, and never decayed"
    losses = [h[0] for h in plain["digits", False]["history"]]
    assert losses[-1] < losses[0]


# -- what the table cannot say -------------------------------------------------------------------


def _one(world: oarlock.World, name: str) -> None:
    _engine(world, CASES[name], False, 3)


@pytest.mark.parametrize("name", NOT_SHARDED)
def test_what_sharding_3_cannot_do_is_said_on_all_ranks(name: str) -> None:
    errors = run_failing(_one, 2, name)
    for error in errors:
        assert error is not None
        assert error[0] == "SetupError"
        assert NOT_SHARDED[name] in error[1]


def _reentrant(world: oarlock.World) -> None:
    case = CASES["checkpointing, reentrant, no overlap"]
    model, optimizer, _, loader, loss_fn = _prepare(case, False, world)
    engine = oarlock.DataParallel(model, optimizer, world, bucket_mb=1e-4)
    for batch in loader:
        engine.step(batch, loss_fn)


def test_reentrant_checkpointing_of_a_shared_layer_is_named() -> None:
    errors = run_failing(_reentrant, 2)
    assert [e and e[0] for e in errors] == ["SetupError", "SetupError"]
    for error in errors:
        assert error is not None
        assert "Step 1: shared." in error[1]
        assert "use_reentrant=False" in error[1]


def _masks(world: oarlock.World) -> list[tuple[int, int, list[float], int, int]]:
    """For each micro-batch: which positions dropout left, and Python's and NumPy's numbers."""
    import random

    import numpy as np

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    engine = oarlock.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    loader = oarlock.Loader(torch.ones(12, 1), 6, 1, world=world)
    seen: list[Any] = []

    def loss_fn(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
        mask = nn.functional.dropout(torch.ones(32), 0.5)
        seen.append((mask.tolist(), random.getrandbits(60), int(np.random.randint(1 << 60))))
        return model(data).sum() * mask.mean(), 1

    out = []
    for _ in range(2):
        for batch in loader:
            seen.clear()
            engine.step(batch, loss_fn)
            for micro_batch, numbers in zip(batch.micro_batches, seen, strict=True):
                out.append((batch.epoch, batch.step, micro_batch.index, *numbers))
    return out


def test_random_numbers_belong_to_the_micro_batch() -> None:
    one = sorted(run_ranks(_masks, 1)[0])
    three = sorted(item for rank in run_ranks(_masks, 3) for item in rank)
    assert one == three
    assert len(one) == 2 * 2 * 6
    for column in (3, 4, 5):  # mask, Python's, NumPy's: no two micro-batches share them
        assert len({str(item[column]) for item in one}) == len(one)


def _inductor(world: oarlock.World) -> tuple[list[Tensor], list[Tensor]]:
    case = CASES["compiled"]
    states = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        if compiled:
            model = torch.compile(model, dynamic=False)
        engine = oarlock.DataParallel(model, case.optimizer(model), world)
        loader = oarlock.Loader(case.rows, 8, 4, world=world)
        for batch in loader:
            engine.step(batch, case.loss)
        assert all("_orig_mod" not in name for name in engine.named_trainable)
        states.append(_state(model))
    return states[0], states[1]


@pytest.mark.timeout(600)
def test_compiled_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler in this process's own thread, in a process of its own: its pool of compiling
    # processes may wait for ever in a fork of a process that has threads. A slow, cold machine
    # compiles for a minute.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    plain, compiled = run_ranks(_inductor, 2, timeout=500.0, method="spawn")[0]
    assert max(map(_apart, compiled, plain)) <= 1e-6
