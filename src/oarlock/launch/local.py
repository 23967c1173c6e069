"""Start a script on all devices of this machine, one process a rank, and see it through."""

from __future__ import annotations

import importlib.machinery
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from oarlock import words
from oarlock.errors import UserError, WorldError, whole_number
from oarlock.launch.failure import Outcome, read_report
from oarlock.launch.output import Output, Screen, default_screen

if TYPE_CHECKING:
    from oarlock.launch.agent import LocalRanks

_MOST_RANKS = 1024


def launch(
    target_argv: Sequence[str],
    n: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    prefix_main: bool = True,
) -> int:
    """Run a script on ``n`` ranks of this machine and return the exit status.

    The ranks' output is shown as it comes, prefixed with the rank; lines that several ranks print
    alike are folded into one. When a rank fails, the others are ended within seconds, and the
    first failing rank's own error is the last thing shown; its exit status is the result.
    Ctrl-C or SIGTERM is passed on to the ranks once (a training run then saves and ends in
    order); a second one ends them at once.

    Args:
        target_argv: the script and its arguments, or ``["-m", module, …]``.
        n: how many ranks; by default one per device, or one on a machine without any.
        log_dir: keep the ranks' complete logs in a new folder in here. Without it they are kept
            in a temporary folder, after a failure only.
        env: variables for the ranks, over this process's own.
        stream: where to show everything; standard output and standard error by default.
        prefix_main: False shows rank 0's lines without a prefix, where it speaks for all.

    Raises:
        UserError: a script, a number of ranks or a log folder that cannot be used.
        WorldError: the ranks could not be started.
    """
    target = [os.fspath(part) for part in target_argv]
    check_target(target)
    if n is not None:
        n = whole_number("The number of ranks", n, 1, f" and at most {_MOST_RANKS}")
        if n > _MOST_RANKS:
            raise UserError(f"The number of ranks is {n}; it must be from 1 to {_MOST_RANKS}.")
    root = _log_root(log_dir)
    try:
        ranks = _ranks(n)
        variables = {**os.environ, **(env or {})}
        if "OMP_NUM_THREADS" not in variables:
            variables["OMP_NUM_THREADS"] = str(max(1, _cores() // ranks))
        screen = default_screen(stream)
        if screen.is_terminal:  # a bar of rank 0 is shown as it is drawn
            variables.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
        outcome = _run(target, ranks, root, variables, screen, prefix_main)
    except BaseException:
        _tidy(root)
        raise
    _tell(outcome, screen)
    if log_dir is None and (outcome.status == 0 or outcome.cause is None or ranks == 1):
        shutil.rmtree(root, ignore_errors=True)
    return outcome.status


def check_target(target: Sequence[str]) -> None:
    """Refuse what Python could not run, before anything is started."""
    if not target or target[0] == "" or list(target) == ["-m"]:
        raise UserError("No script given. Usage: oarlock launch [-n N] script.py args…")
    if target[0] == "-m":
        top = target[1].split(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UserError(f"No module named {top!r} here or in {sys.prefix}.")
        return
    script = target[0]
    if os.path.isdir(script):
        raise UserError(f"{script} is a directory; give a Python script, or `-m module`.")
    try:
        source = Path(script).read_bytes()
    except FileNotFoundError:
        raise UserError(f"No script {script} (looked in {os.getcwd()}).") from None
    except OSError as error:
        raise UserError(f"Cannot read {script}: {error.strerror or error}.") from None
    except ValueError:
        raise UserError(f"{script!r} is not a file name.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"{script}, line {error.lineno}" if error.lineno else script
        raise UserError(f"Not a Python script that can run: {where}: {error.msg}.") from None
    except (ValueError, RecursionError, MemoryError) as error:  # NUL bytes, for one
        raise UserError(f"Not a Python script that can run: {script}: {error}.") from None


def _log_root(log_dir: str | os.PathLike[str] | None) -> Path:
    """A new folder for this run's logs."""
    try:
        if log_dir is None:
            return Path(tempfile.mkdtemp(prefix="oarlock-"))
        parent = Path(log_dir).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
    except OSError as error:
        where = log_dir if log_dir is not None else tempfile.gettempdir()
        raise UserError(f"Cannot write logs to {where}: {error.strerror or error}.") from None
    except ValueError as error:
        raise UserError(f"Cannot write logs to {log_dir!r}: {error}.") from None


def _tidy(root: Path) -> None:
    """Take away a log folder in which nothing was logged."""
    if not any(file.stat().st_size for file in root.glob("*/*")):
        shutil.rmtree(root, ignore_errors=True)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ranks(n: int | None) -> int:
    """The number of ranks to start, checked against this machine's devices."""
    import torch

    if not torch.accelerator.is_available():
        return n or 1
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if n is not None and n > count:
        name = kind.type if kind is not None else "accelerator"
        hide = " (or hide them with CUDA_VISIBLE_DEVICES= to use the CPU)" * (name == "cuda")
        raise UserError(
            f"{n} ranks, but this machine has {words.many(count, f'{name} device')}: "
            f"give -n {count} or less{hide}."
        )
    return n or count


class _Signals:
    """Counts SIGINT, SIGTERM and SIGHUP while the ranks run."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)
                # An ignored one stays ignored: nohup, or a shell's background job
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._count)
        return self

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _run(
    target: list[str],
    ranks: int,
    root: Path,
    env: dict[str, str],
    screen: Screen,
    prefix_main: bool,
) -> Outcome:
    _quiet_elastic()
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from oarlock.launch.agent import LocalRanks, local_spec, worker_command

    folders = [root / f"rank-{rank}" for rank in range(ranks)]
    for folder in folders:
        folder.mkdir()

    offsets: dict[int, int] = {}

    def report_offset(rank: int) -> int | None:
        """Where a rank's report of its error begins; a rank alone shows it as it comes."""
        if ranks > 1 and rank not in offsets:
            report = read_report(folders[rank])
            if report is not None:
                offset = (report.get("oarlock") or {}).get("stderr_offset", -1)
                offsets[rank] = offset if isinstance(offset, int) and offset >= 0 else 1 << 62
        return offsets.get(rank)

    output = Output(folders, screen, report_offset, prefix_main=prefix_main)
    begin = time.monotonic()
    with _Signals() as signals:
        passed_on = 0

        def tick() -> None:
            nonlocal passed_on
            output.pump()
            if signals.count > passed_on:
                _pass_on(signals, passed_on, agent, screen)
                passed_on = signals.count

        try:
            spec = local_spec(worker_command(target), ranks)
            agent = LocalRanks(spec, folders, env, tick)
            try:
                agent.run()
            finally:
                spec.rdzv_handler.shutdown()
        except (RendezvousError, OSError) as error:
            raise WorldError(f"The ranks could not be started: {error}") from error
        finally:
            output.close()
    asked = signals.first if passed_on else None
    return Outcome(agent.exits, ranks, time.monotonic() - begin, root, asked, agent.still_running)


def _pass_on(signals: _Signals, before: int, agent: LocalRanks, screen: Screen) -> None:
    name = signals.first.name if signals.first else "a signal"
    if before == 0:
        screen.say(
            f"oarlock: {name} received; asked the ranks to end after this step. "
            "Once more ends them at once."
        )
        agent.send(signal.SIGTERM)
    if signals.count > 1:
        screen.say("oarlock: a second signal received; ending all ranks at once.")
        agent.kill()


def _quiet_elastic() -> None:
    """The elastic agent's own remarks would bury the ranks' output."""
    for name in ("torch.distributed.elastic", "torchelastic-events-null"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.elastic")


def _tell(outcome: Outcome, screen: Screen) -> None:
    """The last words on the screen."""
    cause = outcome.cause
    if cause is None:
        if outcome.asked is not None:
            done = "All ranks ended in order" if outcome.status == 0 else "The ranks were ended"
            screen.say(f"oarlock: {done}.")
        return
    if outcome.size > 1:
        screen.say("\n" + outcome.summary())
    elif cause.code < 0:
        screen.say(f"oarlock: the script {cause.words}.")  # its own words are just above
