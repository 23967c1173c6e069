"""What the ranks print: followed live in their log files, prefixed, and folded where it repeats."""

from __future__ import annotations

import codecs
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhln]")  # moves and erasures; colours stay
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CHUNK = 1 << 20
_MOST_WAITING = 500  # lines held back to be folded


def last_state(text: str) -> str:
    """What a terminal shows of a line whose parts overwrite each other with carriage returns."""
    parts = [_CURSOR.sub("", part).rstrip() for part in text.split("\r")]
    return next((part for part in reversed(parts) if part), "")


def name_ranks(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 0-3' or 'ranks 0-1,5'."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' * (len(numbers) > 1)} {text}"


class Tail:
    """Reads what is added to one log file, as whole lines and a bar in progress.

    Attributes:
        bar: the unfinished last line in its newest state: a progress bar, or a prompt.
        limit: the offset to stop at, where the rest is shown elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bar = ""
        self.limit: int | None = None
        self._file: IO[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._offset = 0

    def fetch(self) -> bytes:
        """The next bytes of the file; hand them to :meth:`lines`."""
        if self._file is None:
            try:
                self._file = open(self.path, "rb")  # noqa: SIM115
            except OSError:
                return b""
        return self._file.read(_CHUNK)

    def lines(self, chunk: bytes) -> list[str]:
        """The lines that ``chunk`` completes."""
        begin, self._offset = self._offset, self._offset + len(chunk)
        if self.limit is not None:
            chunk = chunk[: max(0, self.limit - begin)]
        if not chunk:
            return []
        *whole, self._rest = (self._rest + self._decoder.decode(chunk)).split("\n")
        # Keep the newest state of a bar only, however long it runs without a newline.
        before, cr, after = self._rest.rpartition("\r")
        if cr and not after:
            before, cr, after = before.rpartition("\r")
            self._rest = cr + after + "\r"
        elif cr:
            self._rest = cr + after
        self.bar = last_state(self._rest)
        shown = []
        for line in whole:
            text = last_state(line)
            if text or not line.strip("\r"):  # a line of mere cursor moves says nothing
                shown.append(text)
        return shown

    def close(self) -> list[str]:
        """The unfinished last line, if any."""
        if self._file is not None:
            self._file.close()
            self._file = None
        text, self._rest, self.bar = last_state(self._rest), "", ""
        return [text] if text else []


@dataclass(eq=False)
class _Entry:
    text: str
    to_errors: bool
    since: float
    ranks: set[int] = field(default_factory=set)


class Folder:
    """Folds a line that several ranks print within a short time into one.

    Each rank's own lines keep their order. Where a rank said something of its own before a line
    that others had said already, its own lines move up in front of that one.
    """

    def __init__(self, size: int, window: float = 0.5, prefix_main: bool = True) -> None:
        self.size, self.window, self.prefix_main = size, window, prefix_main
        self._waiting: list[_Entry] = []
        self._last: dict[int, _Entry] = {}
        self._first_line: float | None = None

    def add(self, rank: int, text: str, to_errors: bool, now: float) -> None:
        """Take a line of a rank."""
        if self._first_line is None:
            self._first_line = now
        entry = self._place(rank, text, to_errors)
        if entry is None:
            entry = _Entry(text, to_errors, now)
            self._waiting.append(entry)
        entry.ranks.add(rank)
        self._last[rank] = entry

    def _place(self, rank: int, text: str, to_errors: bool) -> _Entry | None:
        """The waiting line that this one can join."""
        last = self._last.get(rank)
        begin = self._waiting.index(last) + 1 if last in self._waiting else 0
        for entry in self._waiting[begin:]:
            if entry.text == text and entry.to_errors == to_errors:
                return entry
        own: list[_Entry] = []
        for at in range(begin - 1, -1, -1):
            entry = self._waiting[at]
            if entry.ranks == {rank}:
                own.insert(0, entry)
            elif rank in entry.ranks:
                return None  # shared with others: it cannot move
            elif entry.text == text and entry.to_errors == to_errors:
                rest = [e for e in self._waiting[at:] if e not in own]
                self._waiting[at:] = own + rest
                return entry
        return None

    def due(self, now: float, everything: bool = False) -> list[tuple[str, bool]]:
        """The lines to show now, prefixed, each with whether it goes to the error stream."""
        count = len(self._waiting)
        if not everything:
            oldest = now - self._window(now)
            while count > 0:
                entry = self._waiting[count - 1]
                if entry.since <= oldest or count > _MOST_WAITING:
                    break
                count -= 1
            while count < len(self._waiting) and len(self._waiting[count].ranks) == self.size:
                count += 1
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return [(self._prefixed(entry), entry.to_errors) for entry in ready]

    def _window(self, now: float) -> float:
        """Longer while the ranks start, since they don't all start in the same moment."""
        starting = len(self._last) < self.size and now - (self._first_line or now) < 10
        return 4 * self.window if starting else self.window

    def _prefixed(self, entry: _Entry) -> str:
        alone = self.size == 1 or (entry.ranks == {0} and not self.prefix_main)
        prefix = "" if alone else f"[{name_ranks(entry.ranks)}] "
        return (prefix + entry.text).rstrip()


class Screen:
    """The launcher's own two streams, with at most one progress bar under the lines."""

    def __init__(self, out: TextIO, errors: TextIO) -> None:
        self.out, self.errors = out, errors
        self.is_terminal = _is_terminal(errors)
        self._bar = ""

    def lines(self, lines: Iterable[tuple[str, bool]]) -> None:
        """Show lines, each with whether it goes to the error stream."""
        bar, used = self._bar, set[bool]()
        for text, to_errors in lines:
            self.bar("")
            self._write(self.errors if to_errors else self.out, text + "\n")
            used.add(to_errors)
        for to_errors in used:
            self._flush(self.errors if to_errors else self.out)
        if used and bar:
            self.bar(bar)

    def say(self, text: str) -> None:
        """A message of the launcher itself."""
        self.lines((line, True) for line in text.splitlines())

    def bar(self, text: str) -> None:
        """Show a progress bar, or take it away; on a terminal only."""
        if not self.is_terminal or text == self._bar:
            return
        width = shutil.get_terminal_size().columns
        if len(_ANSI.sub("", text)) >= width:
            text = _ANSI.sub("", text)[: width - 1]
        self._bar = text
        self._write(self.errors, "\r\x1b[K" + text)
        self._flush(self.errors)

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            pass  # the reader is gone (`| head`); the ranks go on and their logs are whole

    def _flush(self, stream: TextIO) -> None:
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


class Output:
    """All ranks' logs, followed onto one screen.

    Args:
        folders: the log folder of each rank, with ``stdout.log`` and ``stderr.log``.
        screen: where to show them.
        report_offset: for a rank, where in its stderr the report of its last error begins, or
            None; what follows is not shown here, because the summary shows it once. Asked after
            reading, since a rank writes its error file before its report.
        prefix_main: False leaves rank 0's own lines bare, where it speaks for all.
    """

    def __init__(
        self,
        folders: list[Path],
        screen: Screen,
        report_offset: Callable[[int], int | None] = lambda rank: None,
        window: float = 0.5,
        prefix_main: bool = True,
    ) -> None:
        self.screen = screen
        self.folder = Folder(len(folders), window if len(folders) > 1 else 0.0, prefix_main)
        self._tails = [
            (rank, to_errors, Tail(folder / name))
            for rank, folder in enumerate(folders)
            for name, to_errors in (("stdout.log", False), ("stderr.log", True))
        ]
        self._report_offset = report_offset

    def pump(self) -> None:
        """Show what has been added since the last call."""
        now = time.monotonic()
        for rank, to_errors, tail in self._tails:
            self._read(rank, to_errors, tail, now)
        self.screen.lines(self.folder.due(now))
        bars = [tail.bar for rank, _, tail in self._tails if rank == 0 and tail.bar]
        self.screen.bar(bars[-1] if bars else "")

    def _read(self, rank: int, to_errors: bool, tail: Tail, now: float) -> bool:
        chunk = tail.fetch()
        if to_errors and tail.limit is None:
            tail.limit = self._report_offset(rank)
        for line in tail.lines(chunk):
            self.folder.add(rank, line, to_errors, now)
        return bool(chunk)

    def close(self) -> None:
        """Show the rest, to the last byte."""
        now = time.monotonic()
        for rank, to_errors, tail in self._tails:
            while self._read(rank, to_errors, tail, now):
                pass
            for line in tail.close():
                self.folder.add(rank, line, to_errors, now)
        self.screen.bar("")
        self.screen.lines(self.folder.due(now, everything=True))


def default_screen(stream: TextIO | None) -> Screen:
    """Standard output and error; with ``stream``, everything goes there."""
    return Screen(stream or sys.stdout, stream or sys.stderr)
