"""Rank 0 works, all ranks know: the outcome, good or bad, is the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from oarlock.errors import CheckpointError, OarlockError, OutOfStepError, SaveError
from oarlock.world import World

T = TypeVar("T")


def announce(engine: Any, kind: str) -> None:
    steps = [r[0] for r in engine.world.announce(kind, engine.steps_done).wait()]
    if kind == "save" and len(set(steps)) > 1:
        raise OutOfStepError(
            "The ranks save after different steps: "
            + ", ".join(f"rank {i} after {s}" for i, s in enumerate(steps))
            + ".\nDecide on one rank when to save, and world.broadcast the decision."
        )


def on_main(world: World, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0; its result on all ranks, or its error.

    A long write must not run into the other ranks' timeout, so they hear "not yet" meanwhile.
    """
    if world.size == 1:
        return work()
    if not world.is_main:
        while (verdict := world.broadcast(None)) is None:
            pass
        value, error = verdict
        if error is not None:
            raise error
        return value
    with ThreadPoolExecutor(1, thread_name_prefix="oarlock-checkpoint") as pool:
        future = pool.submit(work)
        while not wait_for([future], timeout=min(30.0, world.timeout / 4)).done:
            world.broadcast(None)
    error = future.exception()
    if error is None:
        world.broadcast((future.result(), None))
    elif isinstance(error, OarlockError):
        world.broadcast((None, type(error)(str(error))))
    else:
        text = f"Rank 0 ({world.host}) failed: {type(error).__name__}: {error}"
        world.broadcast((None, SaveError(text)))
    return future.result()


def agree(world: World, check: Callable[[], None]) -> None:
    """Run ``check`` on all ranks; where it fails on any, raise on all."""
    mine: OarlockError | None = None
    try:
        check()
    except OarlockError as error:
        mine = error
    for rank, text in enumerate(world.gather(None if mine is None else str(mine))):
        if text is not None:
            if mine is not None:
                raise mine
            raise CheckpointError(text if rank == 0 else f"On rank {rank}: {text}")
