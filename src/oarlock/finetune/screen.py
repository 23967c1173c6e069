"""What a run shows and writes while it trains: one bar or plain lines, metrics, TensorBoard."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from oarlock import words
from oarlock.errors import ConfigError

TERMINAL = "OARLOCK_TERMINAL"  # for ranks: the launcher has a terminal and shows rank 0's bar


def for_ranks() -> dict[str, str]:
    """The variable that tells ranks to draw a bar, where this process has a terminal."""
    return {TERMINAL: "1"} if sys.stderr.isatty() else {}


class Screen:
    """One progress bar on a terminal, plain lines elsewhere. Only rank 0 has one that speaks."""

    def __init__(self, speaks: bool, total: int = 0, done: int = 0) -> None:
        self.speaks, self.total = speaks, total
        self._bar: Any = None
        self._task: Any = None
        self._done, self._began = done, time.monotonic()
        self._first = done

    def start_bar(self, total: int, done: int) -> None:
        """Show the bar from here on, where there is a terminal."""
        self.total, self._done, self._first = total, done, done
        self._began = time.monotonic()
        shown = sys.stdout.isatty() or bool(os.environ.get(TERMINAL))
        if not self.speaks or not shown or os.environ.get("TERM") == "dumb":
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(force_terminal=True, width=shutil.get_terminal_size().columns - 1),
        )
        self._task = self._bar.add_task("step", total=total, completed=done, numbers="")
        self._bar.start()

    def say(self, *lines: str) -> None:
        """Print lines; above the bar, where there is one."""
        if not self.speaks:
            return
        for line in lines:
            if self._bar is not None:
                self._bar.console.print(line, markup=False, highlight=False)
            else:
                print(line, flush=True)

    def step(self, step: int, numbers: dict[str, Any], log: bool) -> None:
        """Show a finished step."""
        if not self.speaks:
            return
        text = (
            f"loss {numbers['loss']:.4f}  {numbers['tokens_per_second']:,.0f} tokens/s  "
            f"{words.size(numbers['memory_bytes'])}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text)
        elif log:
            pace = (time.monotonic() - self._began) / max(1, step - self._first)
            left = pace * (self.total - step)
            skipped = "  skipped" * bool(numbers["skipped"])
            print(
                f"step {step}/{self.total}  {text}  lr {numbers['lr']:.3g}  "
                f"left {clock(left)}{skipped}",
                flush=True,
            )

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def memory_bytes(device: torch.device) -> int:
    """The most memory used so far on the device; on CPU, what this process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)


class Metrics:
    """metrics.jsonl: one object a line; a resumed run continues where its checkpoint stood."""

    def __init__(self, output: Path, resumed_at: int, tensorboard: bool, active: bool) -> None:
        self._file: Any = None
        self._board: Any = None
        if not active:
            return
        path = output / "metrics.jsonl"
        kept: list[str] = []
        if resumed_at and path.exists():
            kept = [
                line for line in path.read_text("utf-8").splitlines() if _until(line, resumed_at)
            ]
        fresh = path.with_name(".metrics.jsonl.partial")
        fresh.write_text("".join(line + "\n" for line in kept), "utf-8")
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(
                str(output / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None
            )

    def write(self, step: int, **numbers: Any) -> None:
        """One line, on disk before the next step begins."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _until(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False  # a line that a kill cut short


def check_tensorboard() -> None:
    """Is the package there?

    Raises:
        ConfigError: before any training.
    """
    import importlib.util

    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "train.tensorboard = true, but the package tensorboard is not installed.\n"
            "Install it (pip install 'oarlock[tensorboard]'), or set it to false; metrics.jsonl "
            "is written either way."
        )
