"""Run a function on N ranks, as a launcher would: one process a rank, gloo, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _child(fn: Callable[..., Any], rank: int, size: int, port: int, args: tuple, box: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import oarlock

    try:
        with oarlock.join(timeout=60) as world:
            result = fn(world, *args)
        # plain pickle: tensors travel as bytes, not as shared memory of an ended process
        box.put((rank, True, pickle.dumps(result)))
    except BaseException as error:
        box.put((rank, False, (type(error).__name__, str(error), traceback.format_exc())))
    box.close()
    box.join_thread()
    os._exit(0)


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, timeout: float = 120.0, method: str = "fork"
) -> list[Any]:
    """``fn(world, *args)`` on ``size`` ranks; their results in order.

    Forked from this process, so that torch is imported once; ``method="spawn"`` for what cannot
    bear a fork of a process with threads (the compiler). Raises AssertionError with the first
    failing rank's traceback, where a rank raises; see :func:`run_failing` for expected errors.
    """
    outcomes = _outcomes(fn, size, args, timeout, method)
    failed = [o[1][2] for o in outcomes if not o[0]]
    assert not failed, "\n".join(failed)
    return [value for _, value in outcomes]


def run_failing(
    fn: Callable[..., Any], size: int, *args: Any, timeout: float = 120.0
) -> list[tuple[str, str] | None]:
    """As :func:`run_ranks`; for each rank (class name, message) of its error, or None."""
    outcomes = _outcomes(fn, size, args, timeout)
    return [None if ok else (value[0], value[1]) for ok, value in outcomes]


def _outcomes(
    fn: Callable[..., Any], size: int, args: tuple, timeout: float, method: str = "fork"
) -> list[Any]:
    # What every child would otherwise import anew, for seconds: an optimizer loads torch._dynamo.
    import torch._dynamo
    import torch.distributed.nn.functional  # noqa: F401

    import oarlock.batches
    import oarlock.engine.step  # noqa: F401

    context = multiprocessing.get_context(method)
    box = context.Queue()
    port = free_port()
    children = [
        context.Process(target=_child, args=(fn, r, size, port, args, box)) for r in range(size)
    ]
    for child in children:
        child.start()
    outcomes: dict[int, Any] = {}
    try:
        while len(outcomes) < size:
            rank, ok, value = box.get(timeout=timeout)
            outcomes[rank] = (ok, pickle.loads(value) if ok else value)
    except queue.Empty:
        missing = sorted(set(range(size)) - set(outcomes))
        raise AssertionError(f"no answer from ranks {missing}; have {outcomes}") from None
    finally:
        for child in children:
            child.join(timeout=5)
            if child.is_alive():
                child.kill()
                child.join()
    return [outcomes[r] for r in range(size)]
