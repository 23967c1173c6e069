"""Everything that can be known to go wrong before training starts, and what a run will be."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oarlock import words
from oarlock.config import RunConfig
from oarlock.errors import ConfigError, ModelError, whole_number
from oarlock.finetune.plan import Steps, batch_table, describe_steps, steps_of

OURS = ("run.toml", "checkpoints", "metrics.jsonl", "model", "adapter", "summary.json")


@dataclass
class Checked:
    """The outcome of all checks: what the run will be."""

    config: RunConfig
    ranks: int
    steps: Steps
    prepared: Any
    model_line: str
    disk_bytes: int
    settings: Any  # the model's configuration
    tokenizer: Any
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For the terminal."""
        train = self.config.train
        return [
            self.model_line,
            *self.prepared.report.lines(),
            *describe_steps(self.config, self.steps),
            *batch_table(train.batch_size, train.micro_batch_size, self.ranks),
            *self.notes,
        ]

    def will_write(self) -> list[str]:
        """What the run leaves in its output folder."""
        train, output = self.config.train, self.config.output
        result = "model" if train.method == "full" else "adapter"
        out = [
            f"{output}/run.toml, metrics.jsonl, summary.json",
            f"{output}/checkpoints: the newest {train.keep}"
            + (f", one every {train.save_every} steps" if train.save_every else ""),
            f"{output}/{result}: the result, as transformers and peft load it",
        ]
        if train.merge:
            out.append(f"{output}/model: base and adapter merged")
        if self.config.model.path.endswith(".gguf"):
            out.append(f"{output}/base: the GGUF file's model as an ordinary folder")
        out.append(f"at most {words.size(self.disk_bytes)} in all")
        return out

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "model": self.model_line,
            "ranks": self.ranks,
            "steps": self.steps.total,
            "warmup": self.steps.warmup,
            "steps_per_epoch": self.steps.per_epoch,
            "data": self.prepared.report.to_dict(),
            "output": str(self.config.output),
            "disk_bytes": self.disk_bytes,
            "notes": self.notes,
            "settings": self.config.model_dump(),
        }


def ranks_for(config: RunConfig, ranks: int | None) -> int:
    """As asked on the command line, else in the run file, else one a device.

    Raises:
        ConfigError: an impossible number, or fewer devices than ranks.
    """
    import torch

    wanted = ranks if ranks is not None else config.train.ranks
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if wanted is None:
        return max(1, devices)
    wanted = whole_number("The number of ranks", wanted, 1)
    if devices and wanted > devices:
        raise ConfigError(
            f"{wanted} ranks, but this machine has {words.many(devices, 'device')}.\n"
            f"Ask for {devices} at most; the global batch, and so the result, stays the same."
        )
    cores = os.cpu_count() or 1
    if not devices and wanted > 8 * cores:
        raise ConfigError(f"{wanted} ranks on {cores} CPU cores; ask for fewer.")
    return wanted


def check_all(
    config: RunConfig, ranks: int | None, *, resuming: bool = False, only_looking: bool = False
) -> Checked:
    """Run every check; the model's weights are not loaded, nothing is written.

    ``only_looking``: an output folder that cannot take a new run is a note, not an error.

    Raises:
        ConfigError, DataError, ModelError: the first thing that is wrong.
    """
    from oarlock.finetune.model import (
        check_targets,
        load_config,
        load_tokenizer,
        memory_of,
        quiet_environment,
        set_dropout,
        skeleton,
    )
    from oarlock.finetune.modelfiles import resolve
    from oarlock.finetune.screen import check_tensorboard
    from oarlock.finetune.setup import prepare_data

    quiet_environment()
    size = ranks_for(config, ranks)
    notes = []
    if not resuming:
        try:
            check_output(config.output)
        except ConfigError as error:
            if not only_looking:
                raise
            notes.append(f"note: training would stop here: {error}")
    if config.train.tensorboard:
        check_tensorboard()
    base = config.output / "base"
    folder = base if (base / "config.json").exists() else resolve(config.model.path)
    settings = load_config(folder, config.model)
    if config.train.dropout is not None:
        set_dropout(settings, config.train.dropout, config.model.path)
    tokenizer = load_tokenizer(folder, config.model)
    prepared = prepare_data(config, tokenizer)
    steps = steps_of(config, len(prepared.train))
    bare = skeleton(settings, config.model)
    if config.train.method == "lora" and config.lora.targets is not None:
        check_targets(bare, config.lora.targets)
    notes += _fits(config, settings, prepared)
    weights = memory_of(bare)
    disk = _disk(config, weights, bare)
    check_space(config.output, disk)
    kind = type(bare).__name__
    line = f"model: {config.model.path} ({kind}, {words.count(weights / 4)} parameters)"
    return Checked(config, size, steps, prepared, line, disk, settings, tokenizer, notes)


def _fits(config: RunConfig, settings: Any, prepared: Any) -> list[str]:
    """Do model and data belong together?"""
    text = settings.get_text_config()
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    if vocabulary and prepared.max_token_id >= vocabulary:
        raise ModelError(
            f"{config.model.path}: its tokenizer makes token {prepared.max_token_id}, but the "
            f"model knows only {vocabulary} (0 to {vocabulary - 1}).\n"
            "Tokenizer and weights do not belong together."
        )
    notes = []
    longest = int(getattr(text, "max_position_embeddings", 0) or 0)
    if longest and int(prepared.lengths.max()) > longest:
        notes.append(
            f"note: the longest row has {int(prepared.lengths.max())} tokens, the model was made "
            f"for {longest}; lower data.max_length"
        )
    if config.train.eval_every and prepared.eval is None:
        notes.append("note: train.eval_every is set, but no rows are held out to evaluate on")
    return notes


def _disk(config: RunConfig, weights: int, bare: Any) -> int:
    from oarlock.finetune.export import estimate_bytes

    trained = weights
    if config.train.method == "lora":
        names = config.lora.targets
        trained = 0
        for name, module in bare.named_modules():
            shape = getattr(getattr(module, "weight", None), "shape", ())
            wanted = names is None or any(name == t or name.endswith("." + t) for t in names)
            if len(shape) == 2 and wanted and "embed" not in name:
                trained += 4 * config.lora.rank * sum(shape)
    return estimate_bytes(
        weights,
        trained,
        method=config.train.method,
        merge=config.train.merge,
        keep=config.train.keep,
        gguf=config.model.path.endswith(".gguf"),
    )


def check_output(folder: Path) -> None:
    """May a new run write here?

    Raises:
        ConfigError: it is a file, holds another run, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"train.output {folder} is a file; it must be a folder.")
    there = [name for name in OURS if (folder / name).exists()]
    if there:
        raise ConfigError(
            f"{folder} holds another run already ({', '.join(there)}).\n"
            f"Go on with it: oarlock resume {folder}\n"
            "Or give another folder: train.output in the run file, or --output."
        )
    parent = _existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: no permission to write in {parent}.")


def check_space(folder: Path, needed: int) -> None:
    """Is there room for the run?

    Raises:
        ConfigError: with what is needed and what is free.
    """
    disk = shutil.disk_usage(_existing(folder))
    if disk.total and needed > disk.free:  # 0: no real file system; making the folder will tell
        raise ConfigError(
            f"{folder}: the run writes up to {words.size(needed)} there, but only "
            f"{words.size(disk.free)} are free.\n"
            "Make room, choose another train.output, or lower train.keep."
        )


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
