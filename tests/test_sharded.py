"""Sharding 3: which blocks, what each rank holds, hybrid, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import llama as tiny_llama
from ranks import run_failing, run_ranks
from torch import Tensor, nn

import oarlock
from oarlock.checkpoint import Checkpoints
from oarlock.engine.dtensors import local
from oarlock.engine.sharded import find_blocks, make_mesh
from oarlock.errors import ConfigError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


def _loss(model: nn.Module, data: Tensor) -> tuple[Tensor, int]:
    return (model(data) - 1).square().sum(), len(data)


def _build(world: oarlock.World, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = oarlock.DataParallel(model, optimizer, world, **{"sharding": 3, **options})
    rows = torch.randn(22, 5, generator=torch.Generator().manual_seed(1))
    return engine, oarlock.Loader(rows, 10, 2, world=world)


def _train(world: oarlock.World, engine: Any, loader: Any, epochs: int = 2) -> list[float]:
    return [engine.step(batch, _loss).loss for _ in range(epochs) for batch in loader]


# -- blocks --------------------------------------------------------------------------------------


def test_blocks_are_what_repeats() -> None:
    net = Net()
    assert find_blocks(net, None) == list(net.blocks)
    assert find_blocks(net, (nn.Linear,)) == [m for m in net.modules() if type(m) is nn.Linear]
    llama = tiny_llama()
    assert find_blocks(llama, None) == list(llama.model.layers)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    assert find_blocks(nn.Sequential(nn.Linear(3, 8), encoder), None) == list(encoder.layers)
    assert find_blocks(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), None) == []
    with pytest.raises(ConfigError, match="names Conv2d, but the model has no such module"):
        find_blocks(net, (nn.Conv2d,))


def test_experts_are_no_blocks() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block(4) for _ in range(3))

    assert find_blocks(Mixture(), None) == []


# -- what each rank holds ------------------------------------------------------------------------


def _held(world: oarlock.World) -> dict[str, Any]:
    engine, loader = _build(world)
    _train(world, engine, loader, 1)
    state = engine.optimizer.state
    return {
        "weights": sum(local(p).numel() for p in engine.model.parameters()),
        "state": sum(t.numel() for e in state.values() for k, t in e.items() if k != "step"),
        "whole": sum(p.numel() for p in engine.model.parameters()),
        "gradients": [n for n, p in engine.model.named_parameters() if p.grad is not None],
    }


def test_each_rank_holds_its_part_of_everything() -> None:
    ranks = run_ranks(_held, 3)
    whole = ranks[0]["whole"]
    assert sum(r["weights"] for r in ranks) == whole
    assert sum(r["state"] for r in ranks) == 2 * whole
    assert max(r["weights"] for r in ranks) < 0.45 * whole  # a bias of one element has one owner
    assert all(not r["gradients"] for r in ranks)


# -- hybrid --------------------------------------------------------------------------------------


def _two_machines(world: oarlock.World, sharding: Any, folder: Path | None = None) -> Any:
    if world.size == 4:  # as if two machines had two ranks each
        world.local_rank, world.local_size = world.rank % 2, 2
    engine, loader = _build(world, sharding=sharding, clip_norm=0.5)
    losses = _train(world, engine, loader)
    held = sum(local(p).numel() for p in engine.model.parameters())
    if folder is not None:
        Checkpoints(folder).save(engine, loader)
        Checkpoints(folder).load(engine, loader)
    return losses, held, engine.check_replicas()


def test_hybrid_shards_inside_a_machine_and_equals_one_rank(tmp_path: Path) -> None:
    four = run_ranks(_two_machines, 4, "hybrid", tmp_path)
    one = run_ranks(_two_machines, 1, 0)[0]
    assert len({r[2] for r in four}) == 1
    for losses, held, _ in four:
        assert losses == pytest.approx(one[0], rel=1e-5)
        assert 0.4 * one[1] < held < 0.6 * one[1]


def _uneven(world: oarlock.World) -> None:
    world.local_size = 2 if world.rank < 2 else 1
    world.local_rank = world.rank % 2
    make_mesh(world, hybrid=True)


def test_hybrid_needs_as_many_ranks_on_every_machine() -> None:
    for error in run_failing(_uneven, 3):
        assert error is not None
        assert error[0] == "ConfigError"
        assert "the same number of ranks on every machine" in error[1]


# -- what goes wrong -----------------------------------------------------------------------------


class Bad(Net):
    """The second block gives a number that is not finite for rows that say so."""

    gradient_only = False

    def forward(self, x: Tensor) -> Tensor:
        bad = (x[:, :1] > 1e3).float()
        x = self.first(x)
        x = self.blocks[0](x)
        if self.gradient_only:
            zero = (bad - 1).clamp_max(0) + (1 - bad)  # zero everywhere
            x = x + bad * (zero * x).abs().sqrt()  # √0: the slope is infinite
        else:
            x = self.blocks[1](x / (1 - bad))
        return self.last(x)


def _bad(world: oarlock.World, gradient_only: bool) -> None:
    Bad.gradient_only = gradient_only
    engine, _ = _build(world, Bad())
    rows = torch.zeros(6, 5)
    rows[4] = 2e3
    for batch in oarlock.Loader(rows, 6, 1, shuffle=False, world=world):
        engine.step(batch, _loss)


def test_a_bad_number_is_traced_to_rank_and_rows_in_lockstep() -> None:
    for error in run_failing(_bad, 2, False):
        assert error is not None
        assert error[0] == "NonFiniteError"
        assert "first in the output of blocks.1" in error[1] or "output of blocks.1.up" in error[1]
        assert "on rank 1" in error[1]
        assert "micro-batch 4, rows [4]" in error[1]


def test_a_bad_gradient_is_named() -> None:
    for error in run_failing(_bad, 2, True):
        assert error is not None
        assert error[0] == "NonFiniteError"
        assert "the sum of the gradients of blocks.0." in error[1]


def _twice(world: oarlock.World) -> None:
    engine, _ = _build(world)
    _build(world, engine.model)


def test_a_second_engine_on_a_sharded_model_is_refused() -> None:
    for error in run_failing(_twice, 2):
        assert error is not None
        assert error[0] == "SetupError"
        assert "sharded already" in error[1]


def _reproducible(world: oarlock.World, sharding: Any) -> None:
    _build(world, sharding=sharding, reproducible=True)


@pytest.mark.parametrize("sharding", [3, "hybrid"])
def test_reproducible_mode_is_refused_with_the_reason(sharding: Any) -> None:
    for error in run_failing(_reproducible, 2, sharding):
        assert error is not None
        assert error[0] == "ConfigError"
        assert "FSDP2 leaves adding gradients to the backend" in error[1]


def _lost(world: oarlock.World) -> None:
    engine, loader = _build(world)
    for i, batch in enumerate(loader):
        if i and world.rank == 1:
            raise ValueError("boom")
        engine.step(batch, _loss)


def test_a_lost_peer_is_named() -> None:
    error = run_failing(_lost, 2)[0]
    assert error is not None
    assert error[0] == "PeerLostError"
    assert "Rank 0" in error[1]
    assert "lost a peer" in error[1]


# -- folders that others read --------------------------------------------------------------------


def _save_llama(world: oarlock.World, folder: Path, lora: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = tiny_llama()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine = oarlock.DataParallel(model, torch.optim.SGD(trainable, lr=0.1), world, sharding=3)

    def loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
        return model(input_ids=ids, labels=ids).loss * ids.numel(), ids.numel()

    ids = torch.randint(0, 30, (4, 6), generator=torch.Generator().manual_seed(2))
    for batch in oarlock.Loader(ids, 4, 1, world=world):
        engine.step(batch, loss)
    path = Checkpoints(folder).save(engine)
    Checkpoints(folder).load(engine)
    value = engine.evaluate(oarlock.Loader(ids, 4, 1, world=world), loss).loss
    return {"path": path, "loss": value, "print": engine.check_replicas()}


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_is_a_folder_for_transformers(tmp_path: Path, lora: bool) -> None:
    from transformers import AutoModelForCausalLM

    saved = run_ranks(_save_llama, 2, tmp_path, lora)[0]
    one = run_ranks(_save_llama, 1, tmp_path / "one", lora)[0]
    assert saved["loss"] == pytest.approx(one["loss"], rel=1e-5)
    if lora:
        from peft import PeftModel

        torch.manual_seed(0)
        model: Any = PeftModel.from_pretrained(tiny_llama(), str(saved["path"]))
    else:
        model = AutoModelForCausalLM.from_pretrained(saved["path"])
        assert model.config.architectures == ["LlamaForCausalLM"]
    ids = torch.randint(0, 30, (4, 6), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = float(model.eval()(input_ids=ids, labels=ids).loss)
    assert found == pytest.approx(saved["loss"], rel=1e-5)
