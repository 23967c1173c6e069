"""What README and docs say holds: names, links, commands, examples, defaults, pictures."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = ROOT / "README.md"
NAMED_TEST = r"`(?:tests/)?(test_\w+\.py)::([\w:]+)(?:\[([^\]]+)\])?`"
# What stands for a value in a command of the documentation
STAND_INS = {"N": "2", "DIR": "folder", "…": "", "args…": "", "RUN.toml": "RUN.toml"}


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks in some languages, each with the line it starts at."""
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
        if match[1] in languages:
            line = page.read_text("utf-8")[: match.start()].count("\n") + 2
            found.append((line, match[2]))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", title.strip().lower().replace("`", ""))
    return kept.replace(" ", "-")


def named_tests() -> list[Any]:
    found = {
        (page.name, *match.groups())
        for page in PAGES
        for match in re.finditer(
            r"`(?:tests/)?(test_\w+\.py)::([\w:]+)(?:\[([^\]]+)\])?`", prose(page)
        )
    }
    return [pytest.param(*f[1:], id="::".join(filter(None, f[1:]))) for f in sorted(found, key=str)]


@pytest.mark.parametrize(("file", "name", "case"), named_tests())
def test_a_named_test_exists(file: str, name: str, case: str | None) -> None:
    body: list[Any] = ast.parse((ROOT / "tests" / file).read_text("utf-8")).body
    for part in name.split("::"):
        found = [n for n in body if getattr(n, "name", "") == part]
        assert found, f"{file} has no {name}"
        body = found[0].body
    if case is not None:
        assert file == "test_parity.py", "cases are looked up in the parity table only"
        size, _, row = case.partition("-")
        count = re.fullmatch(r"(\d+) micro-batches", row)  # these are made in a loop
        table = (ROOT / "tests" / "parity_cases.py").read_text("utf-8")
        assert size in "1234"
        assert f'"{row}":' in table or (count and f" {count[1]}," in table), f"no case {row!r}"


def test_the_table_names_a_test_in_each_row() -> None:
    table = README.read_text("utf-8").split("## Beside plain DDP")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 12
    for row in rows:
        assert re.search(r"`test_\w+\.py::test_\w+", row.split("|")[4]), row


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    text = prose(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), f"{page.name}: {target} does not exist"
        assert place.is_relative_to(ROOT), f"{page.name}: {target} leads outside"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", prose(place), re.M)
            assert anchor in map(slug, titles), f"{page.name}: no heading for #{anchor}"


def commands() -> list[Any]:
    """Every `oarlock …` in a block of shell or between backticks."""
    found = []
    for page in PAGES:
        lines = [line for _, block in blocks(page, "sh", "bash", "") for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", prose(page))
        for line in lines:
            words = (
                shlex.split(line.removeprefix("$ "), comments=True) if "oarlock " in line else []
            )
            if words[:1] in (["oarlock"], [".venv/bin/oarlock"]) and len(words) > 1:
                found.append(pytest.param(words[1:], id=f"{page.name}: {' '.join(words)}"))
    return found


@pytest.mark.parametrize("words", commands())
def test_commands_parse(words: list[str]) -> None:
    import typer

    from oarlock.cli import app

    program: Any = typer.main.get_command(app)
    words = [w for w in (STAND_INS.get(w, w) for w in words) if w]
    if words[0].startswith("-"):
        assert words[0] in ("--help", "-h", "--version")
        return
    assert words[0] in program.commands, f"no command {words[0]}"
    command = program.commands[words[0]]
    if words[1:] in (["--help"], ["-h"]):
        return
    # Raises where a flag is unknown, a value of the wrong kind, or a word too many.
    context = command.make_context(words[0], words[1:])
    known = {name for p in command.params for name in p.opts} | {"-h", "--help"}
    if words[0] != "launch":  # the script's own flags follow
        assert {w for w in words[1:] if w.startswith("-")} <= known
    assert context.params


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_compile(page: Path) -> None:
    for line, block in blocks(page, "python", "py"):
        compile("\n" * (line - 1) + block, str(page), "exec")


def test_the_readme_shows_the_example() -> None:
    shown = [block for _, block in blocks(README, "python")]
    assert (ROOT / "examples" / "five_lines.py").read_text("utf-8") in shown


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty folder, and the worlds that were joined in it are left again."""
    from oarlock.world import current

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # join() puts its own in
    monkeypatch.chdir(tmp_path)
    yield
    current().close()


@pytest.mark.usefixtures("alone")
def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "five_lines.py"))
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^epoch \d: loss ([\d.]+)$", out, re.M)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


@pytest.mark.usefixtures("alone")
def test_the_librarys_examples_run(tmp_path: Path) -> None:
    import torch

    import oarlock
    from oarlock.world import current

    names: dict[str, Any] = {}
    for line, block in blocks(ROOT / "docs" / "library.md", "python"):
        exec(compile("\n" * (line - 1) + block, "library.md", "exec"), names)
        current().close()
    model = torch.nn.Linear(4, 2)
    engine = oarlock.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = [(torch.randn(4), 1) for _ in range(100)]
    loader = oarlock.Loader(rows, 20, 5)
    before = names["held_out_loss"](engine, rows, names["loss_fn"])
    names["train"](engine, loader, names["loss_fn"], epochs=2)
    assert names["held_out_loss"](engine, rows, names["loss_fn"]) < before
    assert [p.name for p in (tmp_path / "runs/mine/checkpoints").iterdir()] == ["step-00000010"]
    other = torch.nn.Linear(4, 2)
    engine = oarlock.DataParallel(other, torch.optim.SGD(other.parameters(), lr=0.1))
    names["train"](engine, oarlock.Loader(rows, 20, 5), names["loss_fn"], epochs=2)
    assert torch.equal(other.weight, model.weight), "it continued at the end"


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for page in PAGES:
        text = prose(page) + "".join(b for _, b in blocks(page, "sh"))
        for target in re.findall(r"(?:^|`)make (\w+)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


def run_files() -> list[Any]:
    return [
        pytest.param(block, id=f"{page.name}:{line}")
        for page in PAGES
        for line, block in blocks(page, "toml")
    ]


@pytest.mark.parametrize("text", run_files())
def test_run_files_are_accepted(text: str, tmp_path: Path) -> None:
    from oarlock.config import load

    (tmp_path / "RUN.toml").write_text(text, "utf-8")
    assert load(tmp_path / "RUN.toml").train.batch_size >= 1


def test_every_key_of_the_run_file_is_documented_with_its_default() -> None:
    from oarlock.config import SECTIONS, load

    config = load(None, {"model.path": "org/name", "data.train": "rows.jsonl"})
    text = (ROOT / "docs" / "finetune.md").read_text("utf-8")
    for section, kind in SECTIONS.items():
        part = text.split(f"### [{section}]")[1].split("\n#")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \| ", part, re.M))
        assert set(rows) == set(kind.model_fields), section
        for key, shown in rows.items():
            value = getattr(getattr(config, section), key)
            if key in ("path", "train", "lr"):  # needed, or as said in the text
                assert shown == "–"
            elif key == "output":
                assert Path(value).name == tomllib.loads(f"x = {shown}")["x"]
            else:
                documented = None if shown == "–" else tomllib.loads(f"x = {shown}")["x"]
                assert documented == value, f"{section}.{key}"
                assert type(documented) is type(value), f"{section}.{key}"


def test_every_error_is_documented_with_its_status() -> None:
    from oarlock import errors

    table: dict[str, int] = {}
    for names, status in re.findall(
        r"^\| (`\w+Error`.*?) \| (\d+) \|", (ROOT / "docs" / "library.md").read_text("utf-8"), re.M
    ):
        table |= dict.fromkeys(re.findall(r"`(\w+)`", names), int(status))
    real = {
        name: value.exit_status
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OarlockError)
    }
    assert table == real


def test_pictures_are_as_drawn() -> None:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.draw()
    there = {p.name: p.read_text("utf-8") for p in (ROOT / "docs" / "pictures").iterdir()}
    assert set(drawn) == set(there)
    stale = [name for name in drawn if drawn[name] != there[name]]
    assert not stale, f"{stale}: draw them again with `make pictures`"
    shown = "".join(page.read_text("utf-8") for page in PAGES)
    assert all(name in shown for name in drawn), "a picture that no page shows"
