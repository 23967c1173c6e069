"""What is saved comes back to the bit: models, optimizers, schedulers, positions, on any world."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import Net, adamw, assert_same, build, fingerprint, run, saved, sgd
from ranks import run_failing, run_ranks
from torch import nn

import oarlock
from oarlock.checkpoint import Checkpoints
from oarlock.errors import CheckpointError, ConfigError, SetupError

lr_scheduler = torch.optim.lr_scheduler


def _sequence(opt: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(opt, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(opt, [warm, lr_scheduler.CosineAnnealingLR(opt, 9)], [3])


def _rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.RMSprop(trainable, lr=1e-3, centered=True, momentum=0.5)


CASES = [
    (adamw, None),
    (adamw, _sequence),
    (adamw, lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1.0])),
    (adamw, lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4])),
    (adamw, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)),
    (sgd, lambda o: lr_scheduler.StepLR(o, 2)),
    (_rmsprop, None),
]


@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
def test_roundtrip_and_the_steps_after_it_are_bit_exact(
    tmp_path: Path, optimizer: Any, scheduler: Any
) -> None:
    """Saved in the middle of an epoch; a fresh run with other weights continues to the bit."""
    kw = {"optimizer": optimizer, "scheduler": scheduler}
    engine, loader = build(**kw)
    run(engine, loader, 5)
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(engine, loader, {"lr": 0.1, "names": ["a", None]})
    assert path == tmp_path / "step-00000005"
    before = fingerprint(engine)
    run(engine, loader, 4)
    after = fingerprint(engine)

    other, position = build(seed=99, **kw)
    tensors = [id(p) for p in other.model.parameters()]
    memory = [p.data_ptr() for p in other.model.parameters()]
    info = checkpoints.load(other, position)
    assert info is not None
    assert (info.step, info.epoch, info.path) == (5, 1, path)
    assert info.settings == {"lr": 0.1, "names": ["a", None]}
    assert_same(fingerprint(other), before)
    assert [id(p) for p in other.model.parameters()] == tensors
    assert [p.data_ptr() for p in other.model.parameters()] == memory
    run(other, position, 4)
    assert_same(fingerprint(other), after)
    assert (other.steps_done, position.epoch) == (engine.steps_done, loader.epoch)


def test_nothing_is_pickled_and_names_are_names(tmp_path: Path) -> None:
    """A checkpoint is safetensors and JSON; the optimizer's tensors go by parameter."""
    _, _, path = saved(tmp_path)
    names = sorted(p.name for p in path.iterdir())
    assert names == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    from safetensors.torch import load_file

    weights = load_file(path / "model.safetensors")
    assert "left.weight" in weights
    assert "right.weight" not in weights  # tied: stored once
    assert "seen" in weights  # a buffer that state_dict leaves out
    state = json.loads((path / "state.json").read_text())
    assert state["model"]["ties"] == {"right.weight": "left.weight"}
    assert "first.weight/exp_avg" in load_file(path / "optimizer.safetensors")


def test_random_streams_continue(tmp_path: Path) -> None:
    """torch, random and NumPy go on where they stood."""
    engine, loader, _ = saved(tmp_path)
    random.random(), np.random.rand(3), torch.rand(3)
    Checkpoints(tmp_path).save(engine, loader)
    first = (random.random(), np.random.rand(), float(torch.rand(())), random.gauss(0, 1))
    Checkpoints(tmp_path).load(engine, loader)
    again = (random.random(), np.random.rand(), float(torch.rand(())), random.gauss(0, 1))
    assert first == again


def test_state_of_another_dtype_keeps_it(tmp_path: Path) -> None:
    """PyTorch would cast fp32 state to a bf16 parameter's dtype when loading."""
    engine, loader = build()
    run(engine, loader, 1)
    scale = engine.model.scale
    wide = torch.linspace(0, 1, 8, dtype=torch.float32)
    engine.optimizer.state[scale]["exp_avg"] = wide.clone()
    Checkpoints(tmp_path).save(engine, loader)
    other, _ = build(seed=5)
    Checkpoints(tmp_path).load(other)
    assert torch.equal(other.optimizer.state[other.model.scale]["exp_avg"], wide)


def test_compiled_models_and_plain_ones_share_checkpoints(tmp_path: Path) -> None:
    """torch.compile's prefix is in no name."""
    engine, _, _ = saved(tmp_path)
    compiled, _ = build(seed=4, model=torch.compile(Net(), backend="eager"))
    Checkpoints(tmp_path).load(compiled)
    assert_same(
        {k: v for k, v in fingerprint(compiled).items() if k.startswith("model/")},
        {k: v for k, v in fingerprint(engine).items() if k.startswith("model/")},
    )


def test_extra_files_and_looking_at_the_list(tmp_path: Path) -> None:
    """Extra files are hashed like the rest; the list is newest first and says what it sees."""
    engine, loader = build()
    checkpoints = Checkpoints(tmp_path / "deep" / "folder")
    assert list(checkpoints.list()) == []
    assert checkpoints.latest() is None
    assert checkpoints.load(engine, loader, missing_ok=True) is None

    def extra(folder: Path) -> None:
        (folder / "tokens").mkdir()
        (folder / "tokens" / "vocab.txt").write_text("a b c")

    for _ in range(2):
        run(engine, loader, 1)
        checkpoints.save(engine, loader, extra_files=extra)
    assert [c.step for c in checkpoints.list()] == [2, 1]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 2
    (latest.path / "tokens" / "vocab.txt").write_text("a b d")
    with pytest.raises(CheckpointError, match=r"tokens/vocab\.txt is damaged"):
        checkpoints.load(engine, loader, latest.path)


# -- what does not fit -------------------------------------------------------------------------


class _Wide(Net):
    def __init__(self) -> None:
        super().__init__(width=9)


def _untied() -> Net:
    net = Net()
    net.right.weight = nn.Parameter(net.left.weight.detach().clone())
    return net


def _without_unused() -> Net:
    net = Net()
    del net.unused
    return net


def _half() -> Net:
    net = Net()
    net.out.half()
    return net


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": trainable[:3]}, {"params": trainable[3:]}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": _Wide}, r"scale is bfloat16 \[8\] there and bfloat16 \[9\]"),
        ({"model": _half}, r"out\.weight is float32 .* and float16"),
        ({"model": _untied}, r"has no right\.weight \(there it is tied to left\.weight\)"),
        ({"model": _without_unused}, r"it has unused\.weight, which this run's model has not"),
        ({"optimizer": sgd}, "was saved with AdamW, this run uses SGD"),
        ({"optimizer": _two_groups}, "groups the optimizer's parameters otherwise"),
        ({"scheduler": lambda o: lr_scheduler.StepLR(o, 3)}, "saved with no scheduler, .* StepLR"),
    ],
)
def test_another_run_is_refused_and_untouched(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """The first thing that differs is named; neither weights nor position change."""
    saved(tmp_path)
    if "model" in changes:
        changes = {"model": changes["model"]()}
    engine, loader = build(seed=8, **changes)
    before = fingerprint(engine)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoints(tmp_path).load(engine, loader)
    assert "step-00000002" in str(caught.value)
    assert_same(fingerprint(engine), before)
    assert (engine.steps_done, loader.step_in_epoch) == (0, 0)


def test_other_data_is_refused(tmp_path: Path) -> None:
    """The loader's own check speaks: a position means nothing for another seed."""
    saved(tmp_path)
    engine, loader = build()
    loader.seed = 17
    with pytest.raises(CheckpointError, match="seed"):
        Checkpoints(tmp_path).load(engine, loader)
    assert engine.steps_done == 0


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    """Objects in settings or in the scheduler: an error, no pickle, nothing left behind."""
    engine, loader = build()
    run(engine, loader, 1)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(SetupError, match=r"settings\['where'\] is a PosixPath"):
        checkpoints.save(engine, loader, {"where": tmp_path})
    engine.optimizer.state[engine.model.scale]["odd"] = object()
    with pytest.raises(SetupError, match=r"scale/odd is a object"):
        checkpoints.save(engine, loader)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "3"])
def test_impossible_numbers(tmp_path: Path, keep: Any) -> None:
    """keep must be a whole number of at least 1."""
    with pytest.raises(ConfigError, match="keep is"):
        Checkpoints(tmp_path, keep=keep)


def test_impossible_folders(tmp_path: Path) -> None:
    """A file, nothing, something else."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        Checkpoints(tmp_path / "file")
    for wrong in ("", None, 3, "a\0b"):
        with pytest.raises(ConfigError, match="must be a path"):
            Checkpoints(wrong)  # type: ignore[arg-type]
    engine, loader = build()
    with pytest.raises(CheckpointError, match="cannot be a folder"):
        Checkpoints(tmp_path / "file" / "below").save(engine, loader)
    with pytest.raises(ConfigError, match="too long"):
        Checkpoints(tmp_path / ("x" * 300))


# -- several ranks -----------------------------------------------------------------------------


def _stage(world: oarlock.World, folder: str, steps: int) -> dict[str, bytes]:
    engine, loader = build(world, seed=world.size)
    checkpoints = Checkpoints(folder)
    checkpoints.load(engine, loader, missing_ok=True)
    loaded = fingerprint(engine)
    assert len(set(world.gather(repr(sorted(loaded.items()))))) == 1
    run(engine, loader, steps)
    path = checkpoints.save(engine, loader)
    assert world.gather(path) == [path] * world.size
    engine.check_replicas()
    return fingerprint(engine) if steps else loaded


def test_two_ranks_then_one_then_three(tmp_path: Path) -> None:
    """The state travels between worlds to the bit, and the position goes on."""
    folder = str(tmp_path)
    states = [run_ranks(_stage, size, folder, 3)[0] for size in (2, 1, 3)]
    assert [c.step for c in Checkpoints(folder).list()] == [9, 6, 3]
    for step, state in zip((3, 6, 9), states, strict=True):
        engine, loader = build(seed=50)
        info = Checkpoints(folder).load(engine, loader, tmp_path / f"step-{step:08d}")
        assert info is not None
        assert_same(fingerprint(engine), state)
        assert loader.epoch * 4 + loader.step_in_epoch == step


def _only_main(world: oarlock.World, folder: str) -> None:
    engine, loader = build(world)
    if world.is_main:
        Checkpoints(folder).save(engine, loader)
    else:
        run(engine, loader, 1)


def test_saving_on_one_rank_is_an_error_at_once(tmp_path: Path) -> None:
    """Under `if rank == 0:` every rank says what it and the others were doing."""
    errors = run_failing(_only_main, 2, str(tmp_path))
    for error in errors:
        assert error is not None
        assert error[0] == "OutOfStepError"
        assert "save after 0 steps" in error[1]
    assert list(tmp_path.iterdir()) == []


def _verdicts(world: oarlock.World, folder: str) -> list[Any]:
    """Rank 0 alone meets a full disk, a bug and damage; all ranks hear the same."""
    import errno

    engine, loader = build(world)
    run(engine, loader, 1)
    checkpoints = Checkpoints(folder)

    def full(place: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(place))

    def bug(place: Path) -> None:
        raise ZeroDivisionError("a bug")

    heard: list[Any] = [checkpoints.save(engine, loader, extra_files=full)]
    heard.append("No space left" in (checkpoints.last_problem or ""))
    try:
        checkpoints.save(engine, loader, extra_files=bug)
    except Exception as error:
        heard.append((type(error).__name__, str(error)))
    path = checkpoints.save(engine, loader)
    assert path is not None
    heard.append((path.name, checkpoints.last_problem))
    world.barrier()
    if world.is_main:
        (path / "optimizer.safetensors").write_bytes(b"")
    world.barrier()
    try:
        checkpoints.load(engine, loader, path)
    except CheckpointError as error:
        heard.append(str(error))
    return heard


def test_all_ranks_hear_the_same(tmp_path: Path) -> None:
    """None, an error or a path: never a hang, never two answers."""
    main, other = run_ranks(_verdicts, 2, str(tmp_path))
    assert main[:2] == other[:2] == [None, True]
    assert main[2] == ("ZeroDivisionError", "a bug")
    assert other[2][0] == "SaveError"
    assert "ZeroDivisionError: a bug" in other[2][1]
    assert main[3] == other[3] == ("step-00000001", None)
    assert main[4] == other[4]
    assert "optimizer.safetensors is empty" in main[4]


def _slow(world: oarlock.World, folder: str) -> Any:
    import time

    engine, loader = build(world)
    world.timeout = 0.4  # "not yet" every 0.1 s
    return Checkpoints(folder).save(engine, loader, extra_files=lambda _: time.sleep(0.5))


def test_a_slow_disk_keeps_the_others_waiting_patiently(tmp_path: Path) -> None:
    """The others hear that rank 0 is still writing."""
    assert run_ranks(_slow, 2, str(tmp_path)) == [tmp_path / "step-00000000"] * 2
