"""Ties between processes: a worker never outlives the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """End this process (SIGKILL) when its parent ends, however that ends.

    On Linux the kernel does it; elsewhere a thread looks four times a second.
    ``parent`` is the process id that is expected: where it is already gone, this one ends at once,
    which closes the gap between the start and this call.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != expected:
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(0.25)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="oarlock-parent", daemon=True).start()


def port_owner(port: int) -> str:
    """Say who listens on a local TCP ``port``: 'pid 4711 (python train.py)', or '' if unknown."""
    try:
        import psutil

        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if address and address.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return ""
                command = " ".join(psutil.Process(connection.pid).cmdline())[:80]
                return f"pid {connection.pid} ({command})"
    except Exception:  # only a courtesy: without the right to look there is no name
        return ""
    return ""
