"""Replicas start alike, stay alike, and numbers that are not finite are traced to their rows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import run_failing, run_ranks
from torch import Tensor, nn

import oarlock
from oarlock.engine.guard import fingerprint


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def _rows(count: int = 24) -> list[tuple[Tensor, int]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(3, generator=g), i) for i in range(count)]


def _loss(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    return (model(data[0]) - 1).square().sum(), len(data[0])


def _build(world: oarlock.World, **options: Any) -> tuple[oarlock.DataParallel, oarlock.Loader]:
    torch.manual_seed(0)
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = oarlock.DataParallel(model, optimizer, world, **options)
    return engine, oarlock.Loader(_rows(), 8, 2, world=world)


def _listen() -> list[str]:
    """The messages that the package logs from here on."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("oarlock").addHandler(Ear())
    return heard


# -- at the start ------------------------------------------------------------------------------


def _aligned(world: oarlock.World) -> tuple[list[str], list[int], list[int], str]:
    heard = _listen()
    torch.manual_seed(world.rank)
    model = _net()
    model[1].running_mean.fill_(world.rank)  # type: ignore[union-attr]
    before = [int(fingerprint(p)) for p in model.parameters()]
    engine = oarlock.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    after = [int(fingerprint(p)) for p in model.parameters()]
    return heard, before, after, engine.check_replicas()


def test_replicas_are_aligned_to_rank_0_and_it_says_so() -> None:
    ranks = run_ranks(_aligned, 3)
    assert ranks[1][1] != ranks[0][1]
    for _, _, after, whole in ranks:
        assert after == ranks[0][1], "everyone holds what rank 0 built"
        assert whole == ranks[0][3]
    assert len(ranks[0][3]) == 16
    # first layer, last layer's weight and bias, running mean; the rest began alike
    assert len(ranks[0][0]) == 1
    assert "4 of 8 tensors differed between the ranks at the start" in ranks[0][0][0]
    assert "0.weight, 3.weight, 3.bias" in ranks[0][0][0]
    assert ranks[1][0] == []


def _same_start(world: oarlock.World) -> list[str]:
    heard = _listen()
    _build(world)
    return heard


def test_nothing_is_said_where_replicas_start_alike() -> None:
    assert run_ranks(_same_start, 2) == [[], []]


# -- while it runs -----------------------------------------------------------------------------


def _flip(world: oarlock.World, name: str, rank: int) -> None:
    engine, loader = _build(world, guard_every=3)
    while True:
        for batch in loader:
            if engine.steps_done == 5 - 1 and world.rank == rank:
                tensor = dict(engine.model.state_dict())[name]
                tensor.view(-1)[1] += 1e-6
            engine.step(batch, _loss)


@pytest.mark.parametrize(
    ("size", "name", "rank"),
    [(2, "0.weight", 1), (3, "3.weight", 0), (3, "1.running_var", 2), (2, "1.running_mean", 1)],
)
def test_a_flipped_bit_is_found_by_the_next_check(size: int, name: str, rank: int) -> None:
    for error in run_failing(_flip, size, name, rank):
        assert error is not None
        assert error[0] == "DivergedError"
        # changed before step 5's forward; the next check comes after step 6
        assert error[1].startswith("Replicas differ after step 6:")
        assert f"rank {rank} (" in error[1]
        # all else is computed from sums over the ranks, so that this tensor alone differs
        assert f"step 6: {name} on" in error[1]
        assert "(1 of 8 tensors differ)" in error[1]


def _unwatched(world: oarlock.World) -> int:
    engine, loader = _build(world, guard_every=0)
    with torch.no_grad():
        engine.model[0].weight.add_(world.rank)  # type: ignore[operator,union-attr,index]
    for batch in loader:
        engine.step(batch, _loss)
    return engine.steps_done


def test_the_guard_can_be_turned_off() -> None:
    assert run_ranks(_unwatched, 2) == [3, 3]


def test_fingerprints_see_every_bit() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        a = (torch.randn(300) * 100).to(dtype)
        base = int(fingerprint(a))
        assert int(fingerprint(a.clone())) == base
        bits = a.view(torch.uint8)
        seen = {base}
        for byte in range(0, bits.numel(), max(1, bits.numel() // 50)):
            kept = bits[byte].clone()
            bits[byte] ^= 1
            seen.add(int(fingerprint(a)))
            bits[byte] = kept
        changed = len(range(0, bits.numel(), max(1, bits.numel() // 50)))
        assert len(seen) == changed + 1
    swapped = torch.arange(10.0)
    assert int(fingerprint(swapped)) != int(fingerprint(swapped.flip(0)))


# -- not finite --------------------------------------------------------------------------------

# Row 13 is the bad one.


def _bad_loss(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    loss, weight = _loss(model, data)
    return (loss * float("inf") if 13 in data[1].tolist() else loss), weight


def _bad_gradient(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    loss, weight = _loss(model, data)
    if 13 in data[1].tolist():
        nothing = (model[0].weight * 0).sum()  # type: ignore[index]
        loss = loss + nothing.sqrt()  # zero, but its slope is infinite
    return loss, weight


def _bad_output(model: nn.Module, data: Any) -> tuple[Tensor, int]:
    x = data[0].clone()
    x[data[1] == 13] = float("nan")
    return _loss(model, (x, data[1]))


_BAD = {
    "loss": (_bad_loss, "the loss is not finite: first in the loss, "),
    "gradient": (_bad_gradient, "the gradient is not finite: first in the gradient of 0.weight, "),
    "output": (_bad_output, "the loss is not finite: first in the output of 0 (Linear), "),
}


def _run(world: oarlock.World, kind: str, **options: Any) -> dict[str, Any]:
    heard = _listen()
    engine, loader = _build(world, **options)
    where, results, kept = None, [], True
    for batch in loader:
        for m in batch.micro_batches:
            if 13 in m.rows:
                where = (world.rank, batch.step, m.index, m.rows)
        before = _everything(engine)
        result = engine.step(batch, _BAD[kind][0])
        if result.skipped:
            kept = kept and repr(before) == repr(_everything(engine))
        results.append(result)
    return {
        "where": where,
        "heard": heard,
        "skipped": [r.skipped for r in results],
        "kept": kept,
        "state": [t.clone() for t in engine.model.state_dict().values()],
    }


def _everything(engine: oarlock.DataParallel) -> list[Any]:
    """Weights, buffers and the optimizer's state, to the bit."""
    state = [t.tolist() for t in engine.model.state_dict().values()]
    momentum = [s["momentum_buffer"].tolist() for s in engine.optimizer.state.values()]
    return [state, momentum]


@pytest.mark.parametrize("kind", list(_BAD))
@pytest.mark.parametrize("size", [1, 2])
def test_stop_names_rank_micro_batch_rows_and_tensor(kind: str, size: int) -> None:
    wheres = [r["where"] for r in run_ranks(_run_continue, size, kind) if r["where"]]
    (rank, step, index, rows) = wheres[0]
    for error in run_failing(_run, size, kind):
        assert error is not None
        assert error[0] == "NonFiniteError"
        first, rest = error[1].split("\n", 1)
        assert first.startswith(f"Step {step + 1} (epoch 0, batch {step}): {_BAD[kind][1]}")
        assert f"on rank {rank} (" in first
        assert first.endswith(f"micro-batch {index}, rows {list(rows)}.")
        assert "nonfinite='skip'" in rest


def _run_continue(world: oarlock.World, kind: str) -> dict[str, Any]:
    return _run(world, kind, nonfinite="continue", guard_every=0)


def _run_skip(world: oarlock.World, kind: str) -> dict[str, Any]:
    return _run(world, kind, nonfinite="skip")


def test_skip_leaves_everything_as_if_the_step_had_not_been() -> None:
    for kind in _BAD:
        one, two = run_ranks(_run_skip, 1, kind), run_ranks(_run_skip, 2, kind)
        for rank in (*one, *two):
            assert sum(rank["skipped"]) == 1
            assert rank["skipped"] == one[0]["skipped"]
            assert rank["kept"], "weights, buffers or optimizer state moved in a skipped step"
            for mine, other in zip(rank["state"], one[0]["state"], strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
        assert any("(policy: skip)" in message for message in two[0]["heard"])
        assert two[1]["heard"] == []


def test_continue_goes_on() -> None:
    for rank in run_ranks(_run_continue, 2, "gradient"):
        assert rank["skipped"] == [False] * 3
        assert any(torch.isnan(t).any() for t in rank["state"] if t.is_floating_point())


def _always_bad(world: oarlock.World) -> tuple[list[str], list[bool]]:
    heard = _listen()
    engine, loader = _build(world, precision="fp16")
    batch = next(iter(loader))
    skipped = [
        engine.step(batch, lambda m, d: (_loss(m, d)[0] * float("inf"), len(d[1]))).skipped
        for _ in range(12)
    ]
    return heard, skipped


def test_fp16_that_only_skips_says_so_before_it_gives_up() -> None:
    (heard, skipped), (other, _) = run_ranks(_always_bad, 2)
    assert all(skipped)
    (message,) = [line for line in heard if "skipped" in line]
    assert message.startswith("Step 10: 10 updates in a row were skipped, the loss scale is down")
    assert not any("skipped" in line for line in other)
