"""The command line: fast help, one line for every mistake, flags passed on as they are."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from oarlock import __version__, cli
from oarlock.errors import ConfigError, DivergedError

COMMANDS = ["demo", "check", "finetune", "launch", "resume"]


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """The command line in this process: exit status, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["oarlock", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    shown = capsys.readouterr()
    return int(leaving.value.code or 0), shown.out, shown.err


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces what the commands import, and notes how it is called."""
    noted: list[Any] = []

    def stub(module: str, name: str) -> None:
        def called(*args: Any, **kwargs: Any) -> int:
            noted.append((name, args, kwargs))
            return 0

        fake = sys.modules.get(module)
        if not isinstance(fake, _Fake):
            fake = _Fake(module)
            monkeypatch.setitem(sys.modules, module, fake)
        setattr(fake, name, called)

    for name in ("finetune", "check", "resume"):
        stub("oarlock.finetune.command", name)
    stub("oarlock.demo.run", "demo")
    stub("oarlock.launch.local", "launch")
    return noted


class _Fake(types.ModuleType):
    pass


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_fast_and_needs_no_torch(command: str | None) -> None:
    words = [command, "--help"] if command else ["--help"]
    code = (
        "import sys; sys.argv = ['oarlock', *sys.argv[1:]]\n"
        "from oarlock.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'rich'} & set(sys.modules)\n"
        "print(f'heavy {sorted(heavy)}')"
    )
    best = 60.0
    for _ in range(3):
        begin = os.times()
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
        )
        end = os.times()
        # Processor time: on a machine that is busy with something else, the clock says little
        used = end.children_user - begin.children_user + end.children_system - begin.children_system
        best = min(best, used)
        assert "Usage: oarlock" in done.stdout
        assert done.stdout.endswith("heavy []\n")
    assert best < 0.5


def test_version_and_bare_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, capsys, "--version") == (0, f"oarlock {__version__}\n", "")
    status, out, _ = run(monkeypatch, capsys)
    assert status == 0
    for command in COMMANDS:
        assert f"\n  {command} " in out


def test_flags_become_keys_of_the_run_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calls: list[Any],
    tmp_path: Path,
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    flags = [
        "--model",
        "m",
        "--data",
        "d.jsonl",
        "--output",
        "out",
        "--method",
        "lora",
        "--epochs",
        "1.5",
        "--steps",
        "9",
        "--batch-size",
        "8",
        "--micro-batch-size",
        "2",
        "--lr",
        "2e-4",
        "--max-length",
        "512",
        "--seed",
        "3",
        "--precision",
        "bf16",
        "--set",
        "lora.rank=4",
        "--set",
        "data.note=a=b",
        "-n",
        "2",
    ]
    assert run(monkeypatch, capsys, "finetune", str(run_file), *flags)[0] == 0
    expected = {
        "model.path": "m",
        "data.train": "d.jsonl",
        "data.max_length": 512,
        "train.output": "out",
        "train.method": "lora",
        "train.epochs": 1.5,
        "train.steps": 9,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.lr": 2e-4,
        "train.seed": 3,
        "train.precision": "bf16",
        "lora.rank": "4",
        "data.note": "a=b",
    }
    assert calls.pop() == ("finetune", (run_file, expected, 2), {})
    assert run(monkeypatch, capsys, "finetune", "--model", "m", "--data", "d")[0] == 0
    assert calls.pop() == ("finetune", (None, {"model.path": "m", "data.train": "d"}, None), {})
    assert run(monkeypatch, capsys, "check", str(run_file), "--json", "--lr", "1")[0] == 0
    name, args, _ = calls.pop()
    assert (name, args[:3]) == ("check", (run_file, {"train.lr": 1.0}, True))


def test_demo_and_resume_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calls: list[Any],
    tmp_path: Path,
) -> None:
    assert run(monkeypatch, capsys, "resume", str(tmp_path), "-n", "3")[0] == 0
    assert calls.pop() == ("resume", (tmp_path, 3), {})
    assert run(monkeypatch, capsys, "demo")[0] == 0
    assert calls.pop() == ("demo", (None, None), {})


@pytest.mark.parametrize(
    ("words", "target", "ranks"),
    [
        (["t.py", "-n", "9", "--help", "--", "x"], ["t.py", "-n", "9", "--help", "--", "x"], None),
        (["-n", "2", "train.py", "--lr=1"], ["train.py", "--lr=1"], 2),
        (["--ranks=2", "-m", "pack.t", "-n", "9", "-h"], ["-m", "pack.t", "-n", "9", "-h"], 2),
        (["-n", "2", "--", "train.py"], ["train.py"], 2),
    ],
)
def test_launch_leaves_the_scripts_arguments_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calls: list[Any],
    words: list[str],
    target: list[str],
    ranks: int | None,
) -> None:
    assert run(monkeypatch, capsys, "launch", *words)[0] == 0
    assert calls.pop() == ("launch", (target,), {"n": ranks, "log_dir": None})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["frobnicate"], "frobnicate"),
        (["--frobnicate"], "--frobnicate"),
        (["launch"], "No script given"),
        (["launch", "/nowhere/train.py"], "/nowhere/train.py"),
        (["launch", "/"], "is a directory"),
        (["launch", "-n", "0", __file__], "number of ranks is 0"),
        (["launch", "-n", "-1", __file__], "number of ranks is -1"),
        (["launch", "-n", "abc", __file__], "-n"),
        (["launch", "--log-dir", f"{__file__}/logs", __file__], f"{__file__}/logs"),
        (["finetune"], "RUN.toml"),
        (["finetune", "/nowhere/run.toml"], "/nowhere/run.toml"),
        (["finetune", "/"], "is a directory"),
        (["finetune", "--epochs", "many"], "--epochs"),
        (["finetune", "--model", "m", "-n", "0"], "number of ranks is 0"),
        (["finetune", "--set", "train.lr"], "train.lr"),
        (["finetune", "--lr", "1", "--set", "train.lr=2"], "train.lr is given twice"),
        (["check", "/nowhere/run.toml"], "/nowhere/run.toml"),
        (["resume"], "FOLDER"),
        (["resume", "/nowhere"], "/nowhere"),
        (["resume", __file__], "is not a folder"),
        (["demo", "-n", "0"], "number of ranks is 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: str,
) -> None:
    status, out, err = run(monkeypatch, capsys, *words)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("oarlock")
    assert named in err


def test_an_error_of_ours_has_its_status_and_no_stack(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calls: list[Any],
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("OARLOCK_TRACEBACK", raising=False)
    module = sys.modules["oarlock.finetune.command"]

    def fail(error: Exception) -> None:
        def resume(*args: Any) -> int:
            raise error

        monkeypatch.setattr(module, "resume", resume)

    fail(ConfigError("run.toml: unknown key lora.ranl.\nDid you mean lora.rank?"))
    status, _, err = run(monkeypatch, capsys, "resume", str(tmp_path))
    assert (status, err) == (
        2,
        "oarlock: run.toml: unknown key lora.ranl.\nDid you mean lora.rank?\n",
    )
    fail(DivergedError("rank 1 differs"))
    assert run(monkeypatch, capsys, "resume", str(tmp_path))[0] == 6
    monkeypatch.setenv("OARLOCK_TRACEBACK", "1")
    assert "Traceback" in run(monkeypatch, capsys, "resume", str(tmp_path))[2]
    fail(KeyboardInterrupt())
    assert run(monkeypatch, capsys, "resume", str(tmp_path))[0] == 130
    fail(ModuleNotFoundError("No module named 'peft'", name="peft"))
    status, _, err = run(monkeypatch, capsys, "resume", str(tmp_path))
    assert status == 2
    assert "pip install 'oarlock[finetune]'" in err
    monkeypatch.setattr(sys, "argv", ["oarlock", "resume", str(tmp_path)])
    fail(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):  # our own mistakes keep their traceback
        cli.main()


def test_a_script_is_launched_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(9)\n")
    done = subprocess.run(
        [sys.executable, "-m", "oarlock.cli", "launch", "-n", "1", str(script), "--lr", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (9, "['--lr', '1']\n"), done.stderr
    assert done.stderr == ""
