"""Which rank failed first, why, and how to say so on one screen."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from oarlock import words
from oarlock.launch.output import last_state, name_ranks
from oarlock.launch.worker import mentions_lost_peer

_LINES = 25  # of an error; a screen has room for them and the few lines above
# Of a crash's output: frames of C++, lists of modules, and our own and runpy's frames
_FRAME = re.compile(
    r"^\s*(frame #\d+:|#\d+ |Extension modules: |"
    r'File "(.*oarlock.launch.worker\.py|<frozen runpy>)")'
)
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def read_report(folder: Path) -> dict[str, Any] | None:
    """The error file of a rank: torch.distributed.elastic's format, ours or another's."""
    try:
        data = json.loads((folder / "error.json").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


@dataclass
class Exit:
    """How a rank ended.

    Attributes:
        code: the exit status, or minus the number of the signal that killed it.
        seen: when the launcher noticed (seconds since the epoch).
        stopped: it ended because the launcher told it to.
    """

    rank: int
    code: int
    seen: float
    stopped: bool
    folder: Path
    out_of_memory: bool = False

    @cached_property
    def report(self) -> dict[str, Any]:
        """The error file's contents; empty without one."""
        return read_report(self.folder) or {}

    @property
    def ours(self) -> dict[str, Any]:
        """What our worker process put beside the elastic format."""
        ours = self.report.get("oarlock")
        return ours if isinstance(ours, dict) else {}

    @property
    def time(self) -> float:
        """When the error happened."""
        return float(self.ours.get("time", self.seen))

    @property
    def failed(self) -> bool:
        """It ended badly, by itself."""
        return self.code != 0 and not (self.stopped and not self.report)

    @cached_property
    def follow_on(self) -> bool:
        """Its error only follows from the loss of another rank."""
        if "follow_on" in self.ours:
            return bool(self.ours["follow_on"])
        if self.stopped:
            return True
        if self.code > 0 or self.code == -signal.SIGABRT:
            return mentions_lost_peer("\n".join(self.error[-6:]))
        return False

    @property
    def status(self) -> int:
        """The exit status as a shell gives it."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def words(self) -> str:
        """The end in words."""
        if self.code >= 0:
            return f"ended with exit status {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        if self.code == -signal.SIGKILL:
            if self.out_of_memory:
                return f"was killed by {name}: the machine ran out of memory (the OOM killer)"
            return f"was killed by {name}, from outside the program"
        if -self.code in _CRASHES:
            return f"was killed by {name}, a crash in compiled code"
        return f"was killed by {name}"

    @cached_property
    def error(self) -> list[str]:
        """The rank's own last words, at most :data:`_LINES` lines; the reason comes last."""
        info = self.report.get("message")
        if isinstance(info, dict):
            extra = info.get("extraInfo") or {}
            text = str(extra.get("py_callstack") or info.get("message") or "")
            return _shorten(text.splitlines())
        if isinstance(info, str):
            return _shorten(info.splitlines())
        if self.code < 0 and -self.code not in _CRASHES:
            return []  # killed from outside: what it printed before is no reason
        lines = [last_state(line) for line in _end_of(self.folder / "stderr.log").splitlines()]
        lines = [line for line in lines if line and not _FRAME.match(line)]
        return _shorten(_reason_last(lines))

    @property
    def same_as(self) -> str:
        """What two ranks with the same error have in common: its last line."""
        return self.error[-1] if self.error else self.words


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= _LINES:
        return lines
    return [*lines[:2], f"  … {len(lines) - _LINES} lines left out …", *lines[2 - _LINES :]]


def _end_of(path: Path, size: int = 16_384) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _reason_last(lines: list[str]) -> list[str]:
    """After an abort: C++'s own words come last, the Python stacks of the crash before them."""
    start = next((i for i, s in enumerate(lines) if s.startswith("Fatal Python error")), None)
    if start is None:
        return lines[-_LINES:]
    words = lines[max(0, start - 10) : start]
    begin = next((i for i, s in enumerate(words) if s.startswith("terminate called")), None)
    words = words[begin:] if begin is not None else words
    return [*lines[start : start + _LINES - len(words)], *words]


@dataclass
class Outcome:
    """How the whole run ended."""

    exits: Sequence[Exit]
    size: int
    seconds: float
    folder: Path
    asked: int | None = None  # the signal with which the user stopped it
    still_running: Sequence[int] = ()  # ranks that the others waited for in vain
    host: str = field(default_factory=socket.gethostname)

    @cached_property
    def cause(self) -> Exit | None:
        """The rank that failed first: one with a cause of its own, then the earliest."""
        failed = [e for e in self.exits if e.failed]
        if self.asked is not None:
            # Ending by the signal sent is what was asked, and what follows from that is no cause.
            failed = [
                e
                for e in failed
                if e.code not in (-signal.SIGTERM, -signal.SIGKILL) and not e.follow_on
            ]
        return min(failed, key=lambda e: (e.follow_on, e.time), default=None)

    @property
    def status(self) -> int:
        """The exit status of the launcher."""
        if self.cause is not None:
            return self.cause.status
        if all(e.code == 0 for e in self.exits):
            return 0
        return 128 + (self.asked or signal.SIGTERM)

    def summary(self) -> str:
        """One screen; its last lines are the failing rank's own error."""
        cause = self.cause
        if cause is None:
            return ""
        others = [e for e in self.exits if e is not cause and e.code != 0]
        same = [e for e in others if not e.follow_on and e.same_as == cause.same_as]
        own = [e for e in others if not e.follow_on and e not in same]
        rest = [e for e in others if e.follow_on]
        lines = [f"oarlock: the run failed after {self.seconds:.0f} s, on rank {cause.rank} first."]
        if rest:
            lines.append(f"  {_others(len(rest))} stopped because of it.")
        if same:
            lines.append(f"  {_others(len(same))} failed in the same way.")
        for other in own[:3]:
            lines.append(f"  Rank {other.rank} failed too: {other.same_as[:150]}")
        if len(own) > 3:
            lines.append(f"  {_others(len(own) - 3)} failed too.")
        if cause.follow_on:
            lines += self._waited_for()
        lines.append(f"  Logs of all ranks: {self.folder}")
        colon = ":" if cause.error else "."
        lines += ["", f"Rank {cause.rank} of {self.size} on {self.host} {cause.words}{colon}"]
        return "\n".join(lines + cause.error)

    def _waited_for(self) -> list[str]:
        """No rank had a cause of its own: who was it that the others waited for?"""
        lines = []
        left = [e.rank for e in self.exits if e.code == 0]
        if left:
            lines.append(f"  {_named(left)} had ended already, with exit status 0.")
        for rank in self.still_running:
            entry = next((e for e in self.exits if e.rank == rank), None)
            where = _stack_of(entry.folder) if entry is not None and entry.stopped else []
            lines.append(f"  Rank {rank} was still running{', at:' if where else '.'}")
            lines += [f"  {line}" for line in where]
        return lines


def _stack_of(folder: Path, most: int = 4) -> list[str]:
    """The innermost frames of the stack that a rank was asked for."""
    lines = _end_of(folder / "stderr.log").splitlines()
    starts = [i for i, s in enumerate(lines) if "(most recent call first):" in s]
    if not starts:
        return []
    frames = [s for s in lines[starts[-1] + 1 :] if s.startswith("  File ")]
    return [s for s in frames if not _FRAME.match(s)][:most]


def _named(ranks: list[int]) -> str:
    return name_ranks(ranks).capitalize()


def _others(count: int) -> str:
    return words.many(count, "other rank")
