"""What a step does besides being right: its traffic, its results, evaluation, stopping, options."""

from __future__ import annotations

import gc
import json
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_failing, run_ranks
from torch import Tensor, nn

import oarlock
import oarlock.errors


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def _data(rows: int) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(2))


def _loss(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
    return (model(data) - 1).square().sum(), len(data)


def _build(world: oarlock.World, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = _net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return oarlock.DataParallel(model, optimizer, world, **options)


def _loader(world: oarlock.World, rows: int, batch: int, micro: int, **options: Any) -> Any:
    return oarlock.Loader(_data(rows), batch, micro, world=world, **options)


def _weights(engine: oarlock.DataParallel) -> list[Tensor]:
    return [t.detach().clone() for t in engine.model.state_dict().values()]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- the exchange ------------------------------------------------------------------------------


def _traffic(world: oarlock.World) -> list[tuple[int, int, int, int]]:
    """(micro-batches on this rank, gradient exchanges, their bytes, bytes as reported)."""
    calls: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is not world.control:
            calls.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    out = []
    for micro_batches in (1, 4):
        engine = _build(world)
        for batch in _loader(world, 16, 2 * micro_batches, 1):
            calls.clear()
            result = engine.step(batch, _loss)
            out.append((len(batch.micro_batches), len(calls), sum(calls), result.exchanged_bytes))
    return out


def test_one_exchange_a_step_however_many_micro_batches() -> None:
    parameters = sum(p.numel() for p in _net().parameters())
    for rank in run_ranks(_traffic, 2):
        assert [r[0] for r in rank] == [1] * 8 + [4] * 2
        for _, exchanges, sent, reported in rank:
            assert exchanges == 1  # all of this model fits one bucket
            assert 4 * parameters <= sent <= 4 * (parameters + 256 * 6)
            assert sent == reported


def _variants(world: oarlock.World) -> dict[str, Any]:
    out = {}
    for name, options in {
        "usual": {},
        "again": {},
        "tiny buckets": {"bucket_mb": 1e-6},
        "small buckets": {"bucket_mb": 0.0005},
        "huge buckets": {"bucket_mb": 1e6},
        "no overlap": {"overlap": False},
        "tiny, no overlap": {"bucket_mb": 1e-6, "overlap": False},
    }.items():
        engine = _build(world, **options)
        for batch in _loader(world, 44, 8, 2):
            engine.step(batch, _loss)
        out[name] = (_weights(engine), len(engine.exchange.buckets))
    return out


def test_buckets_and_overlap_do_not_change_a_bit() -> None:
    for size in (2, 3):
        found = run_ranks(_variants, size)[0]
        assert found["huge buckets"][1] == 1
        assert found["tiny buckets"][1] == 6
        assert 1 < found["small buckets"][1] < 6
        usual = found["usual"][0]
        for name, (weights, _) in found.items():
            if size == 2 or name in ("usual", "again", "no overlap"):
                assert _equal(weights, usual), name
            else:  # three terms: gloo's order of adding depends on where in a bucket a number lies
                torch.testing.assert_close(weights, usual, rtol=1e-5, atol=1e-7)
        assert _equal(found["tiny, no overlap"][0], found["tiny buckets"][0])


def _replaced(world: oarlock.World) -> bool:
    engine = _build(world)
    batch = next(iter(_loader(world, 8, 4, 1)))
    engine.step(batch, _loss)
    flat = weakref.ref(engine.exchange.buckets[0].flat)
    second = oarlock.DataParallel(engine.model, engine.optimizer, world)
    del engine
    second.step(batch, _loss)
    gc.collect()
    return flat() is None


def test_an_engine_that_was_replaced_keeps_no_memory() -> None:
    assert run_ranks(_replaced, 2) == [True, True]


def _laid_out_anew(world: oarlock.World) -> tuple[bool, bool]:
    """In the step that lays the buckets out as gradients came, are the first ones gone by then?"""
    engine = _build(world, bucket_mb=0.0005)
    first, second, *_ = _loader(world, 12, 4, 1)
    engine.step(first, _loss)
    old = [weakref.ref(bucket.flat) for bucket in engine.exchange.buckets]
    place, gone = engine.exchange._place, []

    def watched(*args: Any) -> None:
        gc.collect()
        gone.append(all(flat() is None for flat in old))
        place(*args)

    engine.exchange._place = watched  # type: ignore[method-assign]
    engine.step(second, _loss)
    return len(old) > 1, gone == [True]


def test_buckets_laid_out_anew_never_lie_beside_the_old_ones() -> None:
    assert run_ranks(_laid_out_anew, 2) == [(True, True)] * 2


def _numpy_settings(world: oarlock.World) -> tuple[type, type]:
    engine = _build(world, seed=np.int64(3), guard_every=np.int64(2))
    engine.step(next(iter(_loader(world, 8, 4, 1))), _loss)
    return type(engine.seed), type(engine.guard_every)


def test_numpys_integers_are_settings_like_any_other() -> None:
    assert run_ranks(_numpy_settings, 2) == [(int, int)] * 2


# -- results -----------------------------------------------------------------------------------


def _results(world: oarlock.World) -> list[dict[str, Any]]:
    engine = _build(world, clip_norm=1.0)
    out = []
    for _ in range(2):
        out += [vars(engine.step(b, _loss)) for b in _loader(world, 9, 2, 1)]
    return out


def test_results_are_those_of_the_whole_batch_and_alike_on_all_ranks() -> None:
    ranks = run_ranks(_results, 2)
    (alone,) = run_ranks(_results, 1)
    own = ("seconds", "wait_seconds", "exchanged_bytes")
    assert len(ranks[0]) == 10
    # nine rows, two at a time on two ranks: the last step has one row, and none is lost
    assert [r["weight"] for r in ranks[0]] == [2, 2, 2, 2, 1] * 2
    for zero, one, single in zip(*ranks, alone, strict=True):
        assert {k: v for k, v in zero.items() if k not in own} == {
            k: v for k, v in one.items() if k not in own
        }
        assert zero["step"] == single["step"]
        assert zero["lr"] == 0.01
        assert not zero["skipped"]
        assert zero["loss"] == pytest.approx(single["loss"], rel=1e-5)
        assert zero["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-5)
        assert 0 <= zero["wait_seconds"] <= zero["seconds"]
        assert single["exchanged_bytes"] == 0 < zero["exchanged_bytes"]


def _own_lists(world: oarlock.World) -> tuple[list[float], list[Tensor]]:
    """Micro-batches that the user cuts: three on the first of two ranks, one on the second."""
    pieces = list(_data(10).split([1, 4, 2, 3]))
    mine = pieces if world.size == 1 else (pieces[:3], pieces[3:])[world.rank]
    engine = _build(world)

    def noisy(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
        return _loss(model, data + 0.1 * torch.randn(()))

    return [engine.step(mine, noisy).loss for _ in range(5)], _weights(engine)


def test_own_lists_of_micro_batches() -> None:
    (alone,), two = run_ranks(_own_lists, 1), run_ranks(_own_lists, 2)
    assert two[0][0] == two[1][0]
    assert two[0][0] == pytest.approx(alone[0], rel=1e-5)
    torch.testing.assert_close(two[0][1], alone[1], rtol=1e-5, atol=1e-7)


def _streams(world: oarlock.World) -> tuple[list[Any], list[Any]]:
    engine, loader = _build(world), _loader(world, 12, 4, 2)

    def draw() -> list[Any]:
        return [random.random(), float(np.random.rand()), torch.rand(3).tolist()]

    def noisy(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
        draw()
        return _loss(model, data)

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    untouched = [draw() for _ in range(4)]
    seed()
    seen = [draw()]
    for batch in loader:
        engine.step(batch, noisy)
        seen.append(draw())
    seed()
    draw()
    engine.evaluate(_loader(world, 5, 4, 2, shuffle=False), noisy)
    assert draw() == untouched[1]
    return untouched, seen


def test_the_users_random_streams_are_left_alone() -> None:
    for size in (1, 2):
        for untouched, seen in run_ranks(_streams, size):
            assert seen == untouched


# -- evaluation --------------------------------------------------------------------------------


def _evaluations(world: oarlock.World) -> list[tuple[float, float, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    engine = _build(world, model)
    model[1].eval()
    modes = [m.training for m in model.modules()]
    before = _weights(engine)

    def loss_fn(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return _loss(model, data)

    out = []
    for rows, batch, micro in ((9, 5, 5), (9, 5, 2), (9, 1, 1), (9, 64, 64), (1, 5, 5)):
        loader = _loader(world, rows, batch, micro, shuffle=False)
        result = engine.evaluate(loader, loss_fn)
        out.append((result.loss, result.weight, result.rows))
    assert [m.training for m in model.modules()] == modes, "modes are put back one by one"
    assert _equal(_weights(engine), before)
    assert all(p.grad is None for p in model.parameters())

    # the same for something that can be counted by hand: the values 1, 1, 1, 1, 9
    values = torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0])
    for batch in (1, 2, 8):
        loader = oarlock.Loader(values, batch, 1, shuffle=False, world=world)
        result = engine.evaluate(loader, lambda _, v: (v.sum(), len(v)))
        out.append((result.loss, result.weight, result.rows))
    return out


def test_evaluation_is_exact_on_any_number_of_ranks() -> None:
    (one,) = run_ranks(_evaluations, 1)
    assert [r[1:] for r in one[:5]] == [(9, 9)] * 4 + [(1, 1)]
    assert [r[0] for r in one[:4]] == pytest.approx([one[0][0]] * 4, rel=1e-6)
    assert one[5:] == [(2.6, 5, 5)] * 3
    for size in (2, 4):
        ranks = run_ranks(_evaluations, size)
        for rank in ranks:
            assert rank == ranks[0]
            for got, want in zip(rank, one, strict=True):
                assert got == pytest.approx(want, rel=1e-12)


# -- stopping and going on ---------------------------------------------------------------------


def _stop(world: oarlock.World) -> list[tuple[int, bool]]:
    engine = _build(world)
    seen = []
    for batch in _loader(world, 40, 4, 1):
        if engine.steps_done == 3 and world.rank == 1:
            engine.request_stop()
        engine.step(batch, _loss)
        seen.append((engine.steps_done, engine.stopping))
        if engine.stopping:
            break
    return seen


def test_a_stop_asked_on_one_rank_stops_all_after_the_same_step() -> None:
    ranks = run_ranks(_stop, 3)
    assert ranks == [[(1, False), (2, False), (3, False), (4, True)]] * 3


def _continued(world: oarlock.World) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    engine = _build(world, precision="fp16", seed=4)
    for batch in _loader(world, 12, 4, 1):
        engine.step(batch, _loss)
    engine.precision.scale = 512.0
    state = json.loads(json.dumps(engine.state_dict()))
    other = _build(world, precision="fp16", seed=4)
    other.load_state_dict(state)
    result = other.step(next(iter(_loader(world, 12, 4, 1))), _loss)
    return state, engine.state_dict(), [result.step, other.precision.scale, world.steps]


def test_the_engines_state_travels_as_json() -> None:
    for state, before, after in run_ranks(_continued, 2):
        assert state == before
        assert state["steps_done"] == 3
        assert state["loss_scale"] == 512.0
        assert after == [4, 512.0, 4]


# -- BatchNorm over the ranks ------------------------------------------------------------------


def _bn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def _synchronised(world: oarlock.World, micro: int) -> list[Tensor]:
    """Batches of 8 rows, in twos or fours on two ranks; in one piece (or two) on one."""
    model = _bn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"sync_batchnorm": True} if world.size > 1 else {}
    engine = oarlock.DataParallel(model, optimizer, world, **options)
    for _ in range(3):
        for batch in _loader(world, 32, 8, micro, shuffle=False):
            engine.step(batch, _loss)
    return _weights(engine)


def test_sync_batchnorm_equals_the_concatenated_batch() -> None:
    two, (one,) = run_ranks(_synchronised, 2, 4), run_ranks(_synchronised, 1, 8)
    assert _equal(two[0], two[1])
    torch.testing.assert_close(two[0], one, rtol=1e-5, atol=1e-6)


def _synchronised_nonfinite(world: oarlock.World) -> None:
    model = _bn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = oarlock.DataParallel(model, optimizer, world, sync_batchnorm=True)

    def loss_fn(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
        loss, weight = _loss(model, data)
        return loss * (float("inf") if torch.equal(data, _data(32)[16:20]) else 1.0), weight

    for batch in _loader(world, 32, 32, 4, shuffle=False):
        engine.step(batch, loss_fn)


def test_sync_batchnorm_and_a_loss_that_is_not_finite() -> None:
    """The search for the bad rows runs forwards again, which are collective here."""
    for error in run_failing(_synchronised_nonfinite, 2):
        assert error is not None
        assert error[0] == "NonFiniteError"
        assert "first in the loss, on rank 1 (" in error[1]
        assert "micro-batch 4, rows [16, 17, 18, 19]." in error[1]


def _synchronised_unequal(world: oarlock.World) -> None:
    engine = oarlock.DataParallel(
        model := _bn(), torch.optim.SGD(model.parameters(), lr=0.1), world, sync_batchnorm=True
    )
    for batch in _loader(world, 6, 6, 2):
        engine.step(batch, _loss)


def test_sync_batchnorm_refuses_unequal_counts() -> None:
    for error in run_failing(_synchronised_unequal, 2):
        assert error is not None
        assert error[0] == "SetupError"
        assert error[1].startswith("Step 1: sync_batchnorm needs the same number of micro-batches")
        assert "[1, 2]" in error[1]


def test_sync_batchnorm_needs_a_batchnorm() -> None:
    with pytest.raises(oarlock.errors.SetupError, match="no BatchNorm layer"):
        _build(oarlock.World("cpu"), sync_batchnorm=True)
