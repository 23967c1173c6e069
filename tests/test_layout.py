"""The house stands as CONTRIBUTING says: one-way imports, light entrances, short files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "oarlock"
FILES = sorted(SOURCE.rglob("*.py"))
# From top to bottom; a part imports only parts that stand below it.
LAYERS = (
    "cli",
    "demo",
    "finetune",
    "config",
    "launch",
    "checkpoint",
    "engine",
    "batches",
    "world",
    "rendezvous",
    "devices",
    "environment",
    "processes",
    "randomness",
    "words",
    "errors",
)
HEAVY = {
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "accelerate",
    "gguf",
    "pydantic",
    "typer",
}


def part_of(path: Path) -> str:
    """The folder or module of the package that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """All that a file imports anywhere in it, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where arrows go"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts_used(path: Path) -> set[str]:
    """The parts of the package that a file imports from."""
    names = {n.split(".")[1] for n in imported(path) if n.startswith("oarlock.")}
    return names - {"__version__", part_of(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_arrows_run_downward(path: Path) -> None:
    own = part_of(path)
    if own == "__init__":  # the public names; each is loaded when it is used
        return
    assert own in LAYERS, f"{own} is new: give it a place in LAYERS"
    below = set(LAYERS[LAYERS.index(own) + 1 :])
    used = {name for name in parts_used(path) if name in LAYERS}
    assert used <= below, f"{own} imports {sorted(used - below)}, which stands above it"


def test_the_engine_needs_torch_alone() -> None:
    for part in ("engine", "batches", "world"):
        for path in FILES:
            if part_of(path) == part:
                roots = {name.split(".")[0] for name in imported(path)}
                assert not roots & HEAVY, f"{path.name} imports {roots & HEAVY}"
                assert not parts_used(path) & {"finetune", "launch", "cli", "demo", "config"}


@pytest.mark.parametrize("module", ["oarlock", "oarlock.cli", "oarlock.launch.worker"])
def test_a_light_entrance(module: str) -> None:
    heavy = {"torch", *HEAVY} - {"typer"}
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), f"import {module} loads {done.stdout.strip()}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_file_is_long(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    assert lines <= 450, f"{path.name} has {lines} lines; cut it where a reader would"
