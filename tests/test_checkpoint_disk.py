"""Checkpoints against damage, kills in the middle of a save, full disks and missing permission."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import assert_same, build, fingerprint, run, saved

from oarlock.checkpoint import Checkpoints, storage
from oarlock.errors import CheckpointError

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _link_away(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


# -- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [_flip, _truncate, _empty, Path.unlink, _link_away])
@pytest.mark.parametrize("file", FILES)
def test_damage_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, file: str, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for by path: refused, with the file and the one before. Not asked for: passed over."""
    engine, loader, first = saved(tmp_path)
    good = fingerprint(engine)
    run(engine, loader, 1)
    second = Checkpoints(tmp_path).save(engine, loader)
    assert second is not None
    harm(second / file)

    other, position = build(seed=6)
    before = fingerprint(other)
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).load(other, position, second)
    message = str(caught.value)
    assert file in message.splitlines()[0]
    assert f"The one before is whole: {first}." in message
    assert_same(fingerprint(other), before)

    info = Checkpoints(tmp_path).load(other, position)
    assert info is not None
    assert info.path == first
    assert len(info.skipped) == 1
    assert file in info.skipped[0]
    assert "step-00000003 is passed over" in caplog.text
    assert_same(fingerprint(other), good)

    harm(first / file)
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints") as caught:
        Checkpoints(tmp_path).load(other, position)
    assert str(caught.value).count(file) == 2


def test_files_that_do_not_belong_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An extra file is not read; it is said that it is there."""
    engine, _, path = saved(tmp_path)
    (path / "notes.txt").write_text("mine")
    assert Checkpoints(tmp_path).load(engine) is not None
    assert "were not saved with it: notes.txt" in caplog.text


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"content": {}}', b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "number", "bytes", "hollow", "deep"],
)
def test_a_garbage_manifest(tmp_path: Path, text: bytes) -> None:
    """Whatever is in it, the answer is one clear line."""
    engine, _, path = saved(tmp_path)
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        Checkpoints(tmp_path).load(engine, path=path)
    assert Checkpoints(tmp_path).latest() is None


def _forge(path: Path, **changes: Any) -> None:
    """A manifest with a right hash of its own."""
    content = json.loads((path / "manifest.json").read_text())["content"] | changes
    whole = {"content": content, "sha256": storage._digest(content)}
    (path / "manifest.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", "..", "", "a\\b", "C:x"])
def test_a_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    """Names that leave the folder are refused before anything is read."""
    engine, _, path = saved(tmp_path)
    _forge(path, files={name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(CheckpointError, match="names a file outside the folder"):
        Checkpoints(tmp_path).load(engine, path=path)


def test_forged_contents(tmp_path: Path) -> None:
    """A newer format, no state, a state that points at files the manifest has not."""
    engine, _, path = saved(tmp_path)
    manifest = (path / "manifest.json").read_text()
    _forge(path, version=2)
    with pytest.raises(CheckpointError, match="written by a newer Oarlock"):
        Checkpoints(tmp_path).load(engine, path=path)
    _forge(path, version=1, files={})
    with pytest.raises(CheckpointError, match=r"state\.json cannot be understood"):
        Checkpoints(tmp_path).load(engine, path=path)
    (path / "manifest.json").write_text(manifest)
    state = (path / "state.json").read_text()
    for text in (state.replace('"model.safetensors"', '"../x.safetensors"'), "{}", "[1]"):
        (path / "state.json").write_text(text)
        seal = storage._seal(path / "state.json")
        files = json.loads(manifest)["content"]["files"] | {"state.json": seal}
        _forge(path, files=files)
        with pytest.raises(CheckpointError, match=r"state\.json cannot be understood"):
            Checkpoints(tmp_path).load(engine, path=path)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    """A missing path, a file, an empty folder, the folder above."""
    engine, _, path = saved(tmp_path)
    (tmp_path / "empty").mkdir()
    checkpoints = Checkpoints(tmp_path)
    for wrong, message in (
        (tmp_path / "gone", "does not exist"),
        (path / "state.json", "is a file; a checkpoint is a folder"),
        (tmp_path / "empty", "has no manifest.json"),
        (tmp_path, r"give one of them \(step-00000002\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoints.load(engine, path=wrong)
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        Checkpoints(tmp_path / "empty").load(engine)


# -- rotation ----------------------------------------------------------------------------------


def test_the_newest_are_kept_and_none_goes_before_the_next_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every change of the folder the last good one is whole."""
    engine, loader = build()
    checkpoints = Checkpoints(tmp_path, keep=1)
    order: list[tuple[str, str]] = []
    rename = os.rename

    def watched(source: Any, target: Any) -> None:
        whole = [c.path.name for c in storage.scan(tmp_path) if not storage.find_damage(c.path)]
        assert whole or not order, "no whole checkpoint left"
        order.append((Path(source).name, Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    for _ in range(4):
        run(engine, loader, 1)
        checkpoints.save(engine, loader)
        checkpoints.save(engine, loader)  # the same step again
        assert [c.step for c in checkpoints.list()] == [engine.steps_done]
        assert len(list(tmp_path.iterdir())) == 1
    targets = [t for _, t in order]
    put = [t for s, t in order if ".partial-" in s]
    assert put == [f"step-{n:08d}" for n in (1, 2, 3, 4)]  # the second of each is exchanged
    for n in (1, 2, 3):
        removal = next(i for i, t in enumerate(targets) if f".step-{n:08d}.removed" in t)
        assert removal > targets.index(f"step-{n + 1:08d}")


def test_a_run_taken_back_continues_from_its_own_saves(tmp_path: Path) -> None:
    """After going back from step 4 to step 2, what is saved next is the newest, and is kept."""
    engine, loader = build()
    checkpoints = Checkpoints(tmp_path, keep=2)
    for _ in range(3):
        run(engine, loader, 2)
        checkpoints.save(engine, loader)
    assert [c.step for c in checkpoints.list()] == [6, 4]
    checkpoints.load(engine, loader, tmp_path / "step-00000004")
    run(engine, loader, 1)
    checkpoints.save(engine, loader)
    assert [c.step for c in checkpoints.list()] == [5, 6]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 5
    assert checkpoints.load(engine, loader).step == 5  # type: ignore[union-attr]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """Only what is a checkpoint is rotated away."""
    mine = [tmp_path / "step-00000000", tmp_path / "step-best", tmp_path / "notes"]
    for folder in mine:
        folder.mkdir()
        (folder / "file").write_text("keep me")
    engine, loader = build()
    for _ in range(3):
        run(engine, loader, 1)
        Checkpoints(tmp_path, keep=1).save(engine, loader)
    assert all((f / "file").read_text() == "keep me" for f in mine)
    assert [c.step for c in Checkpoints(tmp_path).list() if not c.problem] == [3]


# -- kills -------------------------------------------------------------------------------------


def _killed(folder: str, call: str, count: int, exchange: bool) -> None:
    """Save twice a step; at the ``count``-th call (from 0) of ``call`` this process is gone."""
    torch.set_num_threads(1)
    engine, loader = build()
    checkpoints = Checkpoints(folder, keep=1)
    run(engine, loader, 2)
    assert checkpoints.save(engine, loader)
    home: Any = shutil if call == "rmtree" else os
    original, left = getattr(home, call), count

    def deadly(*a: Any, **k: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*a, **k)

    setattr(home, call, deadly)
    if not exchange:
        storage._exchange = lambda *_: False
    for _ in range(4):
        run(engine, loader, 1)
        checkpoints.save(engine, loader)
        checkpoints.save(engine, loader)  # the same step again: replaced
    os._exit(0)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "rename"])
@pytest.mark.parametrize(
    ("call", "counts"), [("fsync", (0, 2, 4, 5, 6, 9)), ("rename", range(6)), ("rmtree", range(4))]
)
def test_a_kill_in_the_middle_of_a_save(
    tmp_path: Path, call: str, counts: Any, exchange: bool
) -> None:
    """SIGKILL at many points: a whole checkpoint is there, and the next save clears up."""
    for count in counts:
        folder = tmp_path / f"{count}"
        child = multiprocessing.get_context("fork").Process(
            target=_killed, args=(str(folder), call, count, exchange)
        )
        child.start()
        child.join(timeout=60)
        assert child.exitcode == -signal.SIGKILL
        engine, loader = build(seed=3)
        checkpoints = Checkpoints(folder, keep=1)
        info = checkpoints.load(engine, loader)
        assert info is not None
        assert info.step in (2, 3, 4, 5)
        assert info.skipped == []
        run(engine, loader, 1)
        assert checkpoints.save(engine, loader) is not None
        assert [p.name for p in folder.iterdir()] == [f"step-{info.step + 1:08d}"]


def test_whose_leftovers_are_cleared(tmp_path: Path) -> None:
    """A dead process's, another machine's after a day; never those of one that may be saving."""
    here, dead = socket.gethostname(), 2**22 + 1
    parent = os.getppid()
    stale = [
        f".step-00000009.partial-{dead}-{here}",
        f".step-00000009.removed-{dead}-{here}",
        f".step-00000007.partial-{parent}-{here}",
        ".step-00000008.partial-5-elsewhere.example",
    ]
    alive = [
        f".step-00000009.partial-{parent}-{here}",
        ".step-00000009.partial-5-elsewhere.example",
        ".step-9.partial",
    ]
    for name in stale + alive:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    for name in stale[2:]:
        for path in (tmp_path / name / "file", tmp_path / name):
            os.utime(path, (0, time.time() - 90_000))
    engine, loader = build()
    Checkpoints(tmp_path).save(engine, loader)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*alive, "step-00000000"])


# -- the disk says no --------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 256 KiB. Skipped where this user may not mount one."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.name != "posix" or shutil.which("mount") is None:
        pytest.skip("needs mount")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_is_said_survived_and_tried_again(
    small_disk: Path, foreseen: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A real full disk, seen before writing or met while writing."""
    monkeypatch.setattr("oarlock.checkpoint.checkpoints._SPARE", 32 * 1024)
    if not foreseen:
        monkeypatch.setattr(storage, "check_space", lambda *_: None)
    engine, loader = build()
    checkpoints = Checkpoints(small_disk)
    run(engine, loader, 1)
    first = checkpoints.save(engine, loader)
    assert first is not None
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    run(engine, loader, 1)
    assert checkpoints.save(engine, loader) is None
    assert "Step 2: no checkpoint saved: No space left on device" in caplog.text
    assert "A checkpoint needs about" in caplog.text
    assert f"free in {small_disk}: 8.0 KiB" in caplog.text
    assert f"The last good one stays: {first}. Training goes on" in caplog.text
    assert checkpoints.last_problem is not None
    assert sorted(p.name for p in small_disk.iterdir()) == ["ballast", first.name]
    with pytest.raises(CheckpointError, match=r"cannot be saved: No space left[\s\S]*Free space"):
        Checkpoints(small_disk).check(engine) if foreseen else _raise_full(engine, small_disk)
    ballast.unlink()
    run(engine, loader, 1)
    assert checkpoints.save(engine, loader) == small_disk / "step-00000003"
    assert checkpoints.last_problem is None
    other, position = build(seed=2)
    checkpoints.load(other, position)
    assert_same(fingerprint(other), fingerprint(engine))


def _raise_full(engine: Any, place: Path) -> None:
    """The probe itself meets the full disk."""
    left = shutil.disk_usage(place).free
    (place / "more").write_bytes(bytes(left))
    try:
        Checkpoints(place).check(engine)
    finally:
        (place / "more").unlink()


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (errno.EACCES, "mkdir"),
        (errno.EROFS, "mkdir"),
        (errno.EDQUOT, "fsync"),
        (errno.EIO, "fsync"),
        (errno.EPERM, "rename"),
        (errno.ENOSPC, "save_file"),
    ],
)
def test_no_permission_read_only_quota_and_broken_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, number: int, where: str
) -> None:
    """Each is named in the words of the system; the run goes on, and nothing is left behind."""
    engine, loader, first = saved(tmp_path / "run")
    before = fingerprint(engine)
    original = getattr(os, where, None)

    def refuse(path: Any, *a: Any, **k: Any) -> Any:
        if isinstance(path, int) or str(tmp_path) in str(path):
            raise OSError(number, os.strerror(number), str(path))
        assert original is not None
        return original(path, *a, **k)

    checkpoints = Checkpoints(tmp_path / "run")
    run(engine, loader, 1)
    with monkeypatch.context() as patch:
        if where == "save_file":  # while the weights are written: safetensors' own words
            patch.setattr("oarlock.checkpoint.tensorfiles.save_file", _rust_error)
        else:
            patch.setattr(os, where, refuse)
        assert checkpoints.save(engine, loader) is None
    assert os.strerror(number) in caplog.text
    assert f"The last good one stays: {first}" in caplog.text
    assert [p.name for p in (tmp_path / "run").iterdir()] == [first.name]
    checkpoints.load(engine, loader)
    assert_same(fingerprint(engine), before)


def _rust_error(*_: Any, **__: Any) -> None:
    from safetensors import SafetensorError

    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


def test_the_first_save_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no last good one yet: that is said too. check() finds it before any training."""
    engine, loader = build()
    original = os.mkdir

    def refuse(path: Any, *a: Any, **k: Any) -> None:
        if str(tmp_path) in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        original(path, *a, **k)

    monkeypatch.setattr(os, "mkdir", refuse)
    checkpoints = Checkpoints(tmp_path / "new")
    with caplog.at_level(logging.ERROR):
        assert checkpoints.save(engine, loader) is None
    assert f"Permission denied ({tmp_path / 'new'})" in caplog.text
    assert "There is none yet." in caplog.text
    with pytest.raises(CheckpointError, match=r"Permission denied[\s\S]*give another folder"):
        checkpoints.check(engine)


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle: the partial folder goes, the last good one stays."""
    engine, loader, first = saved(tmp_path)
    run(engine, loader, 1)

    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).save(engine, loader, extra_files=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == [first.name]
