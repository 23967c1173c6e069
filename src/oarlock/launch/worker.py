"""The process of one rank: ``python -m oarlock.launch.worker script.py args…`` (or ``-m module``).

It runs the script as plain Python would and adds three things: it never outlives its launcher, it
reports an uncaught error in a file as well as on the screen, and after an error it ends at once,
since an orderly teardown would wait for peers that no longer answer.

Nothing here imports torch.
"""

from __future__ import annotations

import faulthandler
import importlib.machinery
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from typing import NoReturn

from oarlock.errors import OarlockError, PeerLostError
from oarlock.processes import die_with_parent

# What a backend says when another rank is gone. Looked for in RuntimeErrors only: a script's own
# lost connection (to a file server, say) is an OSError and a cause of its own.
_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "timed out waiting",
    "failed to recv",
    "failed to send",
    "sendbytes failed",
    "recvvalue failed",
    "remote process exited",
    "ncclremoteerror",
    "wait timeout after",
)


def main(argv: list[str]) -> None:
    """Run the script that ``argv`` names, in this process."""
    if not argv or argv == ["-m"]:
        print("usage: python -m oarlock.launch.worker [-m] TARGET args…", file=sys.stderr)
        raise SystemExit(2)
    _tie_to_launcher()
    try:
        _run(argv)
    except SystemExit as leaving:
        status = _status_of(leaving)
        if status:
            _end(status)
    except BaseException as error:
        _report(error)
    # Success: leave as any Python program does, with its exit handlers.


def _tie_to_launcher() -> None:
    launcher = os.environ.get("OARLOCK_LAUNCHER_PID", "")
    if launcher.isdigit():
        die_with_parent(int(launcher))
        if sys.platform == "linux":
            _tie_children()
    # A pipe or file would hold lines back; the launcher shows them as they come.
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)
    try:
        faulthandler.enable()  # a crash in compiled code then names the line of Python
        # The launcher asks a rank that others waited for in vain where it is.
        faulthandler.register(signal.SIGUSR2, all_threads=False)
    except (OSError, ValueError, RuntimeError, AttributeError):
        pass


def _tie_children() -> None:
    """Forked children (a data loader's workers) go down with this process, however it ends.

    Only children forked by the main thread: the kernel watches the thread that forked, and another
    thread may end long before the process does. And only direct ones: a child's own children are
    its affair.
    """
    rank = os.getpid()
    by_main_thread = False

    def before() -> None:
        nonlocal by_main_thread
        by_main_thread = (
            os.getpid() == rank and threading.current_thread() is threading.main_thread()
        )

    def in_child() -> None:
        if by_main_thread:
            die_with_parent(rank)

    os.register_at_fork(before=before, after_in_child=in_child)


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        module, sys.argv = argv[1], [argv[1], *argv[2:]]
        _set_first_path(os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script, sys.argv = argv[0], list(argv)
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    # Not runpy.run_path: its __main__ is gone before exit handlers and late threads look for it.
    module_ = types.ModuleType("__main__")
    module_.__dict__.update(
        __file__=script,
        __builtins__=__builtins__,
        __loader__=importlib.machinery.SourceFileLoader("__main__", script),
        __spec__=None,
        __cached__=None,
    )
    sys.modules["__main__"] = module_
    exec(code, module_.__dict__)


def _set_first_path(folder: str) -> None:
    """Put ``folder`` first in sys.path, as plain Python does.

    The launcher starts us with -P, so that a `json.py` in the current folder cannot get in the way
    of this module; the user's own wish for a safe path is in the environment.
    """
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)


def _status_of(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def is_follow_on(error: BaseException) -> bool:
    """Whether ``error`` only follows from the loss of another rank, which has its own error."""
    if isinstance(error, PeerLostError):
        return True
    if isinstance(error, OarlockError):
        return "lost rank 0" in str(error)
    if isinstance(error, RuntimeError) and mentions_lost_peer(str(error)):
        return True
    return error.__cause__ is not None and is_follow_on(error.__cause__)


def mentions_lost_peer(text: str) -> bool:
    """Whether a backend's ``text`` says that another rank is gone."""
    lower = text.lower()
    return any(sign in lower for sign in _PEER_LOST)


def _report(error: BaseException) -> NoReturn:
    """Write down an uncaught error, show it, and end this process at once."""
    at = time.time()
    if threading.current_thread() is threading.main_thread():
        # The launcher asks the others to end once one has failed; this one is ending already.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if isinstance(error, OarlockError):
        status = error.exit_status
    else:
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    text = _text(error)
    _flush()
    _write_error_file(error, at, status, text)
    try:
        sys.stderr.write(text)
    except (OSError, ValueError):
        pass
    _end(status)


def _text(error: BaseException) -> str:
    """The error as a person should see it: Oarlock's own ones without a stack trace."""
    if isinstance(error, OarlockError) and os.environ.get("OARLOCK_TRACEBACK", "0") in ("", "0"):
        return f"{type(error).__name__}: {error}\n"
    stack = error.__traceback__
    while stack is not None and _is_bootstrap(stack.tb_frame.f_code.co_filename):
        stack = stack.tb_next
    return "".join(traceback.format_exception(type(error), error, stack))


def _is_bootstrap(file: str) -> bool:
    return file == __file__ or file in ("<frozen runpy>", runpy.__file__)


def _write_error_file(error: BaseException, at: float, status: int, text: str) -> None:
    """The error in torch.distributed.elastic's format, with what the launcher needs beside it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        shown_from = os.lseek(2, 0, os.SEEK_CUR)  # where in the rank's stderr the report begins
    except OSError:
        shown_from = -1
    record = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(at))},
        },
        "oarlock": {
            "time": at,
            "exit_status": status,
            "follow_on": is_follow_on(error),
            "stderr_offset": shown_from,
        },
    }
    try:
        with open(f"{path}.part", "w", encoding="utf-8", errors="replace") as file:
            json.dump(record, file)
        os.replace(f"{path}.part", path)  # whole or not there: the launcher may look at any time
    except OSError:
        pass  # the screen still gets it


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def _end(status: int) -> NoReturn:
    _flush()
    os._exit(status)


if __name__ == "__main__":
    # As the module that others import, so that there is one copy of it, and __main__ is free.
    from oarlock.launch.worker import main as run_rank

    run_rank(sys.argv[1:])
