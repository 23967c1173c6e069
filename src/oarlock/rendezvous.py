"""The rendezvous: the ranks find each other over a key-value store, or the missing are named."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from oarlock.environment import Place
from oarlock.errors import OarlockError, WorldError
from oarlock.processes import port_owner


def open_store(place: Place, env: Mapping[str, str], timeout: float) -> dist.Store:
    """The key-value store of this run: the elastic agent's where there is one, else rank 0's."""
    serves = place.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{place.address}:{place.port}"
    try:
        return dist.TCPStore(
            place.address,
            place.port,
            place.size,
            serves,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except Exception as error:
        text = str(error)
        if serves and ("EADDRINUSE" in text or "in use" in text):
            owner = port_owner(place.port)
            raise WorldError(
                f"Port {place.port} on {socket.gethostname()} is in use"
                f"{' by ' + owner if owner else ''}.\n"
                "Is it a second process with rank 0? Otherwise end it, or choose another port "
                "with MASTER_PORT "
                "(`oarlock launch` picks a free one by itself)."
            ) from error
        raise WorldError(
            f"Rank {place.rank} of {place.size} on {socket.gethostname()} could not reach rank 0 "
            f"at {where} within {timeout:g} s: rank 0 has not arrived.\n"
            "Is rank 0 started, MASTER_ADDR its address as seen from here, and the port open?\n"
            f"(torch said: {text.splitlines()[0][:200]})"
        ) from error


@dataclass(frozen=True)
class Arrival:
    """A rank that has arrived, and how long it waits for the others."""

    rank: int
    size: int
    host: str
    device: str  # its identity, '' where ranks may share it
    timeout: float


def roll_call(me: Arrival, store: dist.Store, deadline: float) -> list[str]:
    """Wait for all ranks; name those that are missing, twice there, or sharing a device.

    Returns every rank's host, in the order of the ranks.
    """
    if store.add(f"count/{me.rank}", 1) > 1:
        other = store.get(f"host/{me.rank}").decode().split("\n")
        message = (
            f"Two processes call themselves rank {me.rank}: pid {other[1]} on {other[0]} and "
            f"pid {os.getpid()} on {me.host}.\nGive each process its own RANK, 0 to "
            f"{me.size - 1}."
        )
        _refuse(me, store, message)
    store.set(f"host/{me.rank}", f"{me.host}\n{os.getpid()}\n{me.device}")
    missing = list(range(me.size))
    try:
        while missing:
            if store.check(["refused"]):
                _refuse(me, store, store.get("refused").decode())
            missing = [r for r in missing if not store.check([f"host/{r}"])]
            if missing and time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                _refuse(
                    me,
                    store,
                    f"Rank{'s' * (len(missing) > 1)} {names} of {me.size} did not arrive within "
                    f"{me.timeout:g} s (waited for on rank {me.rank}, {me.host}).\n"
                    "Were they started? Do they have the same MASTER_ADDR and MASTER_PORT?",
                )
            if missing:
                time.sleep(0.02)
        return _unique_devices(me, store)
    except RuntimeError as error:
        if isinstance(error, OarlockError):
            raise
        raise WorldError(
            f"Rank {me.rank} on {me.host} lost rank 0 while the ranks gathered; still "
            f"missing: {', '.join(map(str, missing)) or 'none'}.\nLook at rank 0's own error."
        ) from error


def _unique_devices(me: Arrival, store: dist.Store) -> list[str]:
    hosts: list[str] = []
    seen: dict[tuple[str, str], int] = {}
    for rank in range(me.size):
        host, _, identity = store.get(f"host/{rank}").decode().split("\n")
        hosts.append(host)
        first = seen.setdefault((host, identity), rank)
        if identity and first != rank:
            _refuse(
                me,
                store,
                f"Ranks {first} and {rank} on {host} were given the same device ({identity}).\n"
                "Check LOCAL_RANK and CUDA_VISIBLE_DEVICES.",
            )
    return hosts


def _refuse(me: Arrival, store: dist.Store, message: str) -> NoReturn:
    """Raise, on all ranks: rank 0, which keeps the store, stays until the others have read it."""
    store.set("refused", message)
    if me.rank == 0:
        time.sleep(1.0)
    raise WorldError(message)
