"""The commands finetune, check and resume: check everything here, then start the ranks."""

from __future__ import annotations

import json as json_format
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oarlock.config import RunConfig, dump, load
from oarlock.errors import ConfigError, OarlockError

if TYPE_CHECKING:
    from oarlock.finetune.checks import Checked

Overrides = dict[str, object]


def finetune(
    run_file: str | Path | None, overrides: Overrides | None = None, ranks: int | None = None
) -> int:
    """Fine-tune as the run file says. Returns the exit status.

    Everything that can be checked without training is checked first, in this process; only then
    are ranks started. Inside torchrun's environment this process is one rank.
    """
    config = load(run_file, overrides)
    rank = os.environ.get("RANK")
    if rank is not None and rank != "0":
        return _one_rank(config, resume=False)
    from oarlock.finetune.checks import check_all

    checked = check_all(config, ranks if rank is None else None)
    claim(config)
    try:
        convert(config, checked)
    except OarlockError:  # a GGUF file that only now turns out to be damaged: leave no trace
        (config.output / "run.toml").unlink(missing_ok=True)
        if not any(config.output.iterdir()):
            config.output.rmdir()
        raise
    if rank is not None:
        return _one_rank(config, resume=False)
    return _start(config, checked.ranks, resume=False)


def resume(run_folder: str | Path, ranks: int | None = None) -> int:
    """Go on with the run in a folder, on the same or another number of ranks."""
    folder = Path(run_folder)
    if not folder.exists():
        raise ConfigError(f"{folder}: no such folder.")
    if not (folder / "run.toml").is_file():
        inside = folder.parent if folder.name == "checkpoints" else None
        hint = f" Did you mean {inside}?" if inside and (inside / "run.toml").exists() else ""
        raise ConfigError(f"{folder} holds no run: it has no run.toml.{hint}")
    config = load(folder / "run.toml", {"train.output": str(folder.resolve())})
    if (folder / "summary.json").exists():
        print(f"This run is finished; its results are in {folder}.")
        return 0
    rank = os.environ.get("RANK")
    if rank is not None:
        return _one_rank(config, resume=True)
    from oarlock.finetune.checks import check_all

    checked = check_all(config, ranks, resuming=True)
    return _start(config, checked.ranks, resume=True)


def check(
    run_file: str | Path | None,
    overrides: Overrides | None = None,
    json: bool = False,
    ranks: int | None = None,
) -> int:
    """All checks without training; prints what the run would be. Writes nothing."""
    from oarlock.finetune.checks import check_all

    checked = check_all(load(run_file, overrides), ranks, only_looking=True)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if json:
        shown = checked.prepared.show(3)
        print(json_format.dumps(checked.to_dict() | {"examples": shown}, default=str, indent=1))
        return 0
    for line in checked.lines():
        print(line)
    print("\nThe first rows, trained tokens marked:")
    for number, text in enumerate(checked.prepared.show(3, color=color), 1):
        print(f"--- {number} ---\n{text}")
    print("\nThe run will write:")
    for line in checked.will_write():
        print(f"  {line}")
    print("\nEverything is in order; nothing was written.")
    return 0


def claim(config: RunConfig) -> None:
    """Make the output folder and write the settings there."""
    output = config.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "run.toml").write_text(dump(config), "utf-8")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}.") from None


def convert(config: RunConfig, checked: Checked) -> None:
    """Open a GGUF file once, here, so that ranks have an ordinary folder to load."""
    if not config.model.path.endswith(".gguf"):
        return
    from oarlock.finetune.model import convert_gguf

    print(f"Opening {config.model.path} …", flush=True)
    target = config.output / "base"
    convert_gguf(Path(config.model.path), target, checked.settings, checked.tokenizer)


def _one_rank(config: RunConfig, resume: bool) -> int:
    from oarlock.finetune.recipe import run

    return run(config, resume)


def _start(config: RunConfig, ranks: int, resume: bool) -> int:
    """Run here when alone; otherwise start one process a rank."""
    if ranks == 1:
        return _one_rank(config, resume)
    from oarlock.finetune.screen import for_ranks
    from oarlock.launch.local import launch

    target = ["-m", "oarlock.finetune.recipe", str(config.output / "run.toml")]
    return launch(
        target + ["--resume"] * resume,
        ranks,
        log_dir=config.output / "logs",
        env=for_ranks(),
        prefix_main=False,
    )
