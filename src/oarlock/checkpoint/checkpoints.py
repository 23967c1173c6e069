"""Checkpoints: saved whole or not at all, verified when loaded, independent of the world.

A checkpoint is a folder. ``storage`` makes it safe on the disk, ``model`` and ``optimizer`` say
what is in it, ``collective`` keeps the ranks together. Training scripts call what is in this file.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch

from oarlock import words
from oarlock.checkpoint import model, optimizer, storage
from oarlock.checkpoint.collective import agree, announce, on_main
from oarlock.checkpoint.storage import Checkpoint
from oarlock.checkpoint.tensorfiles import Reader, Taker, check_json, unpack
from oarlock.errors import CheckpointError, ConfigError, SaveError, whole_number
from oarlock.world import World

__all__ = ["Checkpoint", "Checkpoints", "Loaded"]

log = logging.getLogger("oarlock")

STATE = "state.json"
_SPARE = 2**20  # bytes for the small files

# What a person or time can mend: the run goes on and the next save point tries again.
_PASSING = {
    getattr(errno, name)
    for name in (
        "ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS", "EIO", "ESTALE", "EFBIG", "EBUSY",
        "ENODEV", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "EMFILE", "ENFILE",
    )
    if hasattr(errno, name)
}  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """What :meth:`Checkpoints.load` found.

    Attributes:
        path: the folder that was loaded.
        step, epoch: updates made, and the epoch that the next batch belongs to.
        settings: what was given to ``save``.
        skipped: what was wrong with newer checkpoints that were passed over, one text each.
    """

    path: Path
    step: int
    epoch: int
    settings: dict[str, Any]
    skipped: list[str] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run, in one folder; the newest ``keep`` are kept.

    Only rank 0 reads and writes, so the folder need not be shared between machines.

    Args:
        folder: where they are; made when the first is saved.
        keep: how many to keep, at least 1.

    Attributes:
        last_problem: why the last save did not succeed; None after one that did.

    Raises:
        ConfigError: an impossible ``keep`` or a folder that is a file.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder, self.keep = _path(folder, "folder"), whole_number("keep", keep, 1)
        self.last_problem: str | None = None
        try:
            if self.folder.is_file():
                raise ConfigError(f"{self.folder} is a file; checkpoints need a folder.")
        except OSError as error:
            raise ConfigError(f"folder is {self.folder}: {error.strerror}.") from error

    # -- looking -------------------------------------------------------------------------------

    def list(self) -> Sequence[Checkpoint]:
        """All checkpoints, newest first, as seen from this machine. Their content is not checked;
        ``problem`` says what a first look shows."""
        storage.tidy(self.folder)
        return storage.scan(self.folder)

    def latest(self) -> Checkpoint | None:
        """The newest one without a problem at a first look; None if there is none."""
        return next((c for c in self.list() if c.problem is None), None)

    # -- saving --------------------------------------------------------------------------------

    def check(self, engine: Any) -> None:
        """Can this run be saved here? Collective; for the start of a run.

        Raises:
            CheckpointError: the folder cannot be written to, or one checkpoint does not fit.
        """
        announce(engine, "save")

        def try_out() -> None:
            try:
                self._make_ready(self._needed(engine, with_state=True))
                probe = self.folder / f".probe-{os.getpid()}"
                probe.write_bytes(b"oarlock")
                probe.unlink()
            except OSError as error:
                raise CheckpointError(
                    f"Checkpoints cannot be saved: {self._why(error, engine, with_state=True)}"
                    "\nFree space or give another folder."
                ) from error

        on_main(engine.world, try_out)

    def save(
        self,
        engine: Any,
        loader: Any = None,
        settings: dict[str, Any] | None = None,
        extra_files: Callable[[Path], None] | None = None,
    ) -> Path | None:
        """Save the state of the run. Collective: every rank calls it; rank 0 writes.

        Args:
            engine: the :class:`~oarlock.DataParallel`.
            loader: the :class:`~oarlock.Loader`, for the position in the data.
            settings: JSON to keep beside it; ``load`` gives it back.
            extra_files: called on rank 0 with a folder to put more files into (a tokenizer).

        Returns:
            The checkpoint's folder, on all ranks; or None, on all ranks, where the disk is full or
            cannot be written to: that is said, the last good checkpoint stays, and the run can go
            on and try again at the next save.

        Raises:
            SetupError: something in the run's state cannot be stored (named).
            SaveError: on the other ranks, where saving failed on rank 0 for any other reason.
            OutOfStepError: not all ranks are saving, or not after the same step.
        """
        announce(engine, "save")
        whole = engine.exchange.whole_state()
        base = on_main(engine.world, functools.partial(model.unknown_base, engine.model))
        stored = [*model.split_state(engine.model)[0], *base]
        weights = engine.exchange.whole_weights(stored)
        write = functools.partial(
            self._write, engine, weights, whole, loader, settings, extra_files
        )
        path, self.last_problem = on_main(engine.world, write)
        return path

    def _write(
        self,
        engine: Any,
        weights: dict[str, torch.Tensor],
        optimizer_state: dict[str, dict[str, Any]] | None,
        loader: Any,
        settings: dict[str, Any] | None,
        extra_files: Callable[[Path], None] | None,
    ) -> tuple[Path | None, str | None]:
        state = {
            "step": engine.steps_done,
            "epoch": int(loader.state_dict().get("epoch", 0)) if loader is not None else 0,
            "settings": {} if settings is None else settings,
            "engine": engine.state_dict(),
            "loader": None if loader is None else loader.state_dict(),
        }
        for name, value in state.items():
            check_json(value, name)

        def fill(folder: Path) -> None:
            whole = {
                **state,
                "torch": torch.__version__,
                "model": model.write_model(engine.model, folder, weights),
                "optimizer": optimizer.write_optimizer(engine, optimizer_state, folder),
                "scheduler": optimizer.write_scheduler(engine.scheduler, folder),
                "random": optimizer.random_state(engine.world.device),
            }
            if extra_files is not None:
                before = set(storage._files(folder))
                extra_files(folder)
                missing = before - set(storage._files(folder))
                if missing:
                    raise SaveError(f"extra_files removed {', '.join(sorted(missing))}.")
            (folder / STATE).write_text(json.dumps(whole) + "\n", encoding="utf-8")

        try:
            self._make_ready(self._needed(engine))
            saved = storage.write(self.folder, state["step"], state["epoch"], fill, keep=self.keep)
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            problem = f"Step {state['step']}: no checkpoint saved: {self._why(error, engine)}"
            last = self._latest_or_none()
            stays = f"The last good one stays: {last.path}. " if last else "There is none yet. "
            log.error("%s\n%sTraining goes on; the next save tries again.", problem, stays)
            return None, problem
        return saved.path, None

    def _latest_or_none(self) -> Checkpoint | None:
        """As :meth:`latest`; None also where the folder cannot be read."""
        try:
            return self.latest()
        except OSError:
            return None

    def _make_ready(self, needed: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL):
                raise CheckpointError(
                    f"{self.folder} cannot be a folder for checkpoints ({error.strerror})."
                ) from error
            raise
        storage.tidy(self.folder)  # what a killed save left may be the space that is missing
        storage.check_space(self.folder, needed)

    def _needed(self, engine: Any, with_state: bool = False) -> int:
        state = optimizer.optimizer_bytes(engine)
        if with_state and not state:  # before the first step: assume Adam's two tensors
            held = [p for group in engine.param_groups() for p in group]
            state = 2 * sum(p.numel() * p.element_size() for p in held)
        return model.model_bytes(engine.model) + state + _SPARE

    def _why(self, error: OSError, engine: Any, with_state: bool = False) -> str:
        reason = error.strerror or os.strerror(error.errno or 0)
        text = f"{reason} ({error.filename or self.folder})."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = words.size(self._needed(engine, with_state))
            try:
                free = words.size(shutil.disk_usage(self.folder).free)
            except OSError:
                free = "unknown"
            text += f"\nA checkpoint needs about {needed}; free in {self.folder}: {free}."
        return text

    # -- loading -------------------------------------------------------------------------------

    @overload
    def load(
        self,
        engine: Any,
        loader: Any = None,
        path: str | Path | None = None,
        *,
        missing_ok: Literal[False] = False,
    ) -> Loaded: ...

    @overload
    def load(
        self,
        engine: Any,
        loader: Any = None,
        path: str | Path | None = None,
        *,
        missing_ok: bool,
    ) -> Loaded | None: ...

    def load(
        self,
        engine: Any,
        loader: Any = None,
        path: str | Path | None = None,
        *,
        missing_ok: bool = False,
    ) -> Loaded | None:
        """Continue from a checkpoint: by default the newest whole one. Collective.

        Every file is hashed first. Weights are overwritten in place; nothing is changed unless
        the checkpoint fits the model, the optimizer, the scheduler and the data.

        Args:
            engine, loader: as for :meth:`save`; the number of ranks may be another.
            path: a certain checkpoint. Where it is damaged that is an error; without a path a
                damaged one is passed over, which is said.
            missing_ok: return None where the folder holds no checkpoint at all.

        Raises:
            CheckpointError: none there, none whole, the one asked for damaged (the file is
                named), or it belongs to another model, optimizer or data set.
        """
        announce(engine, "load")
        world: World = engine.world
        wanted = None if path is None else _path(path, "path")
        found = on_main(world, functools.partial(self._find, wanted, missing_ok))
        if found is None:
            return None
        source, state, skipped = found
        name = str(source)
        base = on_main(world, functools.partial(model.unknown_base, engine.model))
        weights = engine.exchange.whole_weights(base)

        def check() -> None:
            model.check_model(engine.model, state["model"], name)
            if world.is_main:  # the replicas are alike: one look at the base is enough
                model.check_base(engine.model, state["model"], name, weights)
            optimizer.check_optimizer(engine, state["optimizer"], name)
            optimizer.check_scheduler(engine.scheduler, state["scheduler"], name)
            if loader is not None:
                if state["loader"] is None:
                    raise CheckpointError(
                        f"{name} was saved without a loader, so the position in the data is not "
                        "known.\nLoad it without a loader too."
                    )
                loader.load_state_dict(state["loader"])

        agree(world, check)
        reader = Reader(source, state["files"]) if world.is_main else None
        take = Taker(world, reader)
        model.read_model(engine.model, state["model"], take)
        optimizer.read_optimizer(engine, state["optimizer"], take)
        if state["scheduler"] is not None:
            engine.scheduler.load_state_dict(unpack(state["scheduler"]["state"], take.new))
        if reader is not None:
            reader.close()
        engine.load_state_dict(state["engine"])
        optimizer.set_random_state(state["random"], world.device)
        return Loaded(source, state["step"], state["epoch"], state["settings"], [*skipped])

    def _find(
        self, path: Path | None, missing_ok: bool
    ) -> tuple[Path, dict[str, Any], Sequence[str]] | None:
        """On rank 0: the checkpoint to load, its state, and what was passed over."""
        if path is not None:
            damage = storage.find_damage(path)
            if damage:
                raise CheckpointError("\n".join([*_some(damage), self._offer(path)]))
            return path, _read_state(path), []
        try:
            entries = self.list()
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read ({error.strerror}).") from error
        skipped: list[str] = []
        for entry in entries:
            damage = [entry.problem] if entry.problem else storage.find_damage(entry.path)
            if not damage:
                return entry.path, _read_state(entry.path), skipped
            skipped += damage
            log.warning("%s is passed over: %s", entry.path.name, " ".join(_some(damage)))
        if not entries and missing_ok:
            return None
        if not entries:
            raise CheckpointError(
                f"There is no checkpoint in {self.folder}.\nOne is a folder like "
                f"{storage.folder_name(120)}; is this the folder of the run?"
            )
        raise CheckpointError(
            "\n".join([f"None of the {len(entries)} checkpoints in {self.folder} is whole:"]
                      + [f"  {line}" for line in skipped])
        )  # fmt: skip

    @staticmethod
    def _offer(path: Path) -> str:
        match = storage._NAME.fullmatch(path.name)
        step = int(match[1]) if match else -1
        try:
            for entry in storage.scan(path.parent):
                older = entry.step < step and not entry.problem
                if older and not storage.find_damage(entry.path):
                    return f"The one before is whole: {entry.path}. Load that one."
        except OSError:
            pass
        return "There is no whole one before it in the same folder."


def _path(value: Any, name: str) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ConfigError(f"{name} is {value!r}; it must be a path.")
    return Path(value).expanduser()


def _read_state(path: Path) -> dict[str, Any]:
    files = storage.read_manifest(path).files
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        stored = state["model"]["tensors"].values()
        state["optimizer"]["groups"], state["random"]["torch"], state["engine"]
        if {d["file"] for d in stored} - set(files):
            raise ValueError("it names files that the manifest does not")
        state["files"] = sorted(files)  # no others are read
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / STATE} cannot be understood ({type(error).__name__}: {error}).\n"
            "Was this checkpoint written by Oarlock?"
        ) from error
    return state


def _some(lines: list[str], most: int = 5) -> list[str]:
    return lines[:most] + ([f"… and {len(lines) - most} more."] if len(lines) > most else [])
