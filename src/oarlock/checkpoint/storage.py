"""Checkpoint folders that are whole or not there: hashed, synced, renamed into place, rotated.

Nothing here knows what is inside a checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from oarlock.errors import CheckpointError

log = logging.getLogger("oarlock")

MANIFEST = "manifest.json"
FORMAT, VERSION = "oarlock-checkpoint", 1
_NAME = re.compile(r"step-(\d{8,})")
# What a process works on has a name that no reader takes for a checkpoint.
_WORK = re.compile(r"\.(step-\d{8,})\.(partial|replaced|removed)-(\d+)-(.+)")
_DAY = 86400.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder as its manifest describes it; its content is not read.

    Attributes:
        path: the folder.
        step, epoch: updates made, and the epoch that the next batch belongs to.
        serial: counts up with every save into the same folder; the order is by it, so that a run
            taken back to an earlier step continues from its own saves.
        saved_at: seconds since 1970.
        bytes: size of all files.
        problem: what is wrong at a first look (manifest, missing files, sizes); None if nothing.
        files: name to {"bytes", "sha256"}.
    """

    path: Path
    step: int
    epoch: int = 0
    serial: int = 0
    saved_at: float = 0.0
    bytes: int = 0
    problem: str | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)


def folder_name(step: int) -> str:
    """The name of the checkpoint after ``step`` updates."""
    return f"step-{step:08d}"


# -- reading -----------------------------------------------------------------------------------


def read_manifest(path: Path) -> Checkpoint:
    """The checkpoint at ``path``. CheckpointError where it is none or its manifest is damaged."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder like {folder_name(120)}."
        )
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        inside = ", ".join(sorted(p.name for p in path.iterdir() if _NAME.fullmatch(p.name))[-3:])
        advice = f"It holds checkpoints: give one of them ({inside}).\n" if inside else ""
        raise CheckpointError(
            f"{path} is no whole checkpoint: it has no {MANIFEST}.\n{advice}"
            f"A checkpoint is a folder like {folder_name(120)}, as Checkpoints.save wrote it."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    try:
        whole = json.loads(text)
        content = whole["content"]
        if content["format"] != FORMAT:
            raise ValueError("another format")
        if content["version"] > VERSION:
            raise CheckpointError(
                f"{path} was written by a newer Oarlock (format {content['version']}, this one "
                f"reads up to {VERSION}).\nUpdate Oarlock."
            )
        if whole["sha256"] != _digest(content):
            raise ValueError("its own hash differs")
        files = {str(n): dict(f) for n, f in content["files"].items()}
        for name, entry in files.items():
            _check_name(name)
            entry["bytes"], entry["sha256"] = int(entry["bytes"]), str(entry["sha256"])
        return Checkpoint(
            path,
            int(content["step"]),
            int(content["epoch"]),
            int(content["serial"]),
            float(content["saved_at"]),
            sum(f["bytes"] for f in files.values()),
            None,
            files,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({_short(error)}).") from error


def _short(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return "empty" if not error.doc.strip() else "no valid JSON"
    return f"no {error}" if isinstance(error, KeyError) else str(error)[:100]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_name(name: str) -> None:
    """Only files inside the folder: a manifest must not make anyone read elsewhere."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\\" in name or ":" in parts[0]:
        raise ValueError(f"it names a file outside the folder: {name!r}")


def scan(folder: Path) -> list[Checkpoint]:
    """All that is named like a checkpoint in ``folder``, newest first; problems are noted in it."""
    found = []
    with_problem = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if not match:
            continue
        try:
            entry = read_manifest(path)
        except CheckpointError as error:
            why = str(error).splitlines()[0]
            with_problem.append(Checkpoint(path, int(match[1]), problem=why))
            continue
        found.append(replace(entry, problem=next(_sizes(entry), None)))
    found.sort(key=lambda c: (c.serial, c.step), reverse=True)
    # Their serial is unknown. Named first, so that nobody takes an older one without a word.
    with_problem.sort(key=lambda c: c.step, reverse=True)
    return with_problem + found


def _sizes(entry: Checkpoint) -> Iterator[str]:
    for name, expected in entry.files.items():
        try:
            size = (entry.path / name).stat().st_size
        except OSError:
            yield f"{entry.path / name} is missing."
            continue
        if size != expected["bytes"]:
            what = "is empty" if size == 0 else f"has {size} bytes"
            yield f"{entry.path / name} {what} instead of {expected['bytes']} bytes."


def find_damage(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint, a line each with the file's name; [] if whole.

    Reads and hashes every file. Files that the manifest does not name are only warned of: they
    are never read.
    """
    try:
        entry = read_manifest(path)
        damage = list(_sizes(entry))
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror})."]
    if damage:
        return damage
    for name, expected in entry.files.items():
        try:
            with open(path / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            damage.append(f"{path / name} cannot be read ({error.strerror}).")
            continue
        if digest != expected["sha256"]:
            damage.append(f"{path / name} is damaged: its content is not what was written.")
    extra = sorted(set(_files(path)) - set(entry.files) - {MANIFEST})
    if extra:
        log.warning("%s holds files that were not saved with it: %s", path, ", ".join(extra))
    return damage


def _files(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir())


# -- writing -----------------------------------------------------------------------------------


def check_space(folder: Path, needed: int) -> None:
    """OSError (ENOSPC) where ``needed`` bytes do not fit."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def write(
    folder: Path, step: int, epoch: int, fill: Callable[[Path], None], *, keep: int
) -> Checkpoint:
    """Write one checkpoint and remove all but the newest ``keep``.

    ``fill`` writes the files into the folder that it is given. Until everything is on the disk
    the checkpoint has a name that readers skip; one rename makes it a checkpoint. Whatever
    happens before that, the others stay as they are.
    """
    tidy(folder)
    serial = max((c.serial for c in scan(folder)), default=0) + 1
    target = folder / folder_name(step)
    partial = _work_path(target, "partial")
    try:
        partial.mkdir()
        fill(partial)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "epoch": epoch,
            "serial": serial,
            "saved_at": time.time(),
            "files": {name: _seal(partial / name) for name in _files(partial)},
        }
        whole = {"content": content, "sha256": _digest(content)}
        manifest = partial / MANIFEST
        manifest.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        _seal(manifest)
        for place, _, _ in os.walk(partial, topdown=False):
            _sync_folder(Path(place))
        _put(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    saved = read_manifest(target)
    _rotate(folder, keep, saved)
    return saved


def _work_path(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{os.getpid()}-{socket.gethostname()}"


def _seal(path: Path) -> dict[str, Any]:
    """Hash a file and see it onto the disk."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put(partial: Path, target: Path) -> None:
    """Give the finished folder its name; an older save of the same step makes way for it."""
    if not target.exists():
        os.rename(partial, target)
        _sync_folder(target.parent)
        return
    old = partial
    if not _exchange(partial, target):
        old = _work_path(target, "replaced")
        os.rename(target, old)
        try:
            os.rename(partial, target)  # killed before this: tidy() puts the older one back
        except BaseException:
            os.rename(old, target)
            raise
    _sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one go. False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2  # Linux
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _rotate(folder: Path, keep: int, saved: Checkpoint) -> None:
    """Remove all but the newest ``keep``; a folder that is no readable checkpoint is left alone."""
    whole = [c for c in scan(folder) if c.problem is None and c.path != saved.path]
    for old in whole[keep - 1 :]:
        removed = _work_path(old.path, "removed")
        try:
            os.rename(old.path, removed)  # a kill while deleting must not leave half a checkpoint
            shutil.rmtree(removed)
        except OSError as error:
            log.warning("The old checkpoint %s could not be removed: %s", old.path, error.strerror)


def tidy(folder: Path) -> None:
    """Clear away what processes that ended in the middle of a save have left."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _WORK.fullmatch(path.name)
        if not match or not _is_left(path, int(match[3]), match[4]):
            continue
        target = folder / match[1]
        try:
            if match[2] == "replaced" and not target.exists():
                os.rename(path, target)
            else:
                shutil.rmtree(path)
        except OSError as error:
            log.debug("%s could not be cleared away: %s", path, error)


def _is_left(path: Path, pid: int, host: str) -> bool:
    if host == socket.gethostname() and (pid == os.getpid() or not psutil.pid_exists(pid)):
        return True
    try:  # another machine's, or a process id used again: no save goes on for a day
        places = [path, *path.rglob("*")]
        return time.time() - max(p.lstat().st_mtime for p in places) > _DAY
    except OSError:
        return False
