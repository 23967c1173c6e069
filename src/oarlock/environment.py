"""Who am I, according to the launcher's variables: torchrun's, Slurm's or Open MPI's."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from oarlock.errors import WorldError


@dataclass(frozen=True)
class Place:
    """A rank's place, as read from the environment."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str
    port: int
    launcher: str


def read_environment(env: Mapping[str, str]) -> Place | None:
    """The place that ``env`` describes, or None for a process alone.

    Raises:
        WorldError: a half-set, non-numeric or out-of-range variable.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        place = _torchrun(env)
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        place = _slurm(env)
    elif "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        place = _openmpi(env)
    else:
        return None
    if place.size < 1:
        raise WorldError(
            f"The world size is {place.size}; it must be at least 1 ({place.launcher})."
        )
    if not 0 <= place.rank < place.size:
        raise WorldError(
            f"Rank {place.rank} is out of range: a world of {place.size} has ranks "
            f"0 to {place.size - 1} ({place.launcher}).\n"
            "Start as many processes as the world size says, each with a rank of its own."
        )
    local_size = place.size if place.local_size is None else place.local_size
    if not 1 <= local_size <= place.size:
        raise WorldError(
            f"The number of local ranks is {local_size}; it must be 1 to the world size, "
            f"{place.size} ({place.launcher})."
        )
    if place.local_rank is not None and not 0 <= place.local_rank < local_size:
        raise WorldError(
            f"The local rank is {place.local_rank}; with {local_size} ranks on this machine it "
            f"must be 0 to {local_size - 1} ({place.launcher})."
        )
    if place.size > 1 and not 0 < place.port < 65536:
        raise WorldError(f"MASTER_PORT is {place.port}; a port is a number from 1 to 65535.")
    return place


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise WorldError(f"{name} is {env[name]!r}; it must be a whole number.") from None


def _need(env: Mapping[str, str], names: tuple[str, ...], launcher: str) -> None:
    missing = [n for n in names if not env.get(n)]
    if missing:
        there = [n for n in names if env.get(n)]
        raise WorldError(
            f"{', '.join(there) or 'Part'} of {launcher}'s variables set, but not "
            f"{', '.join(missing)}.\n"
            "Start the script with `oarlock launch -n N script.py` or torchrun, which set all of "
            "them;\nor unset them all (`env -u RANK -u WORLD_SIZE …`) to run on one device."
        )


def _torchrun(env: Mapping[str, str]) -> Place:
    _need(env, ("RANK", "WORLD_SIZE"), "torchrun")
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if size > 1:
        _need(env, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "torchrun")
    if ("LOCAL_RANK" in env) != ("LOCAL_WORLD_SIZE" in env) and "LOCAL_WORLD_SIZE" in env:
        _need(env, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), "torchrun")
    return Place(
        rank,
        size,
        _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else None,
        _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _number(env, "MASTER_PORT") if "MASTER_PORT" in env else 0,
        "torchrun",
    )


def _slurm(env: Mapping[str, str]) -> Place:
    _need(env, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"), "Slurm")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "127.0.0.1")
    job = env.get("SLURM_JOB_ID", "0") + "." + env.get("SLURM_STEP_ID", "0")
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    alike = len(set(counts)) == 1 or "SLURM_NODEID" in env
    return Place(
        _number(env, "SLURM_PROCID"),
        _number(env, "SLURM_STEP_NUM_TASKS"),
        _number(env, "SLURM_LOCALID"),
        counts[node] if alike and 0 <= node < len(counts) else None,
        env.get("MASTER_ADDR") or first_host(nodes),
        _number(env, "MASTER_PORT") if "MASTER_PORT" in env else derived_port(job),
        "Slurm",
    )


def _openmpi(env: Mapping[str, str]) -> Place:
    names = tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    _need(env, names, "Open MPI")
    rank, size, local_rank, local_size = (_number(env, n) for n in names)
    if local_size < size and not env.get("MASTER_ADDR"):
        raise WorldError(
            "Open MPI started ranks on several machines, but MASTER_ADDR is not set.\n"
            "Add `-x MASTER_ADDR=<address of rank 0's machine>` to mpirun."
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "0")
    return Place(
        rank,
        size,
        local_rank,
        local_size,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _number(env, "MASTER_PORT") if "MASTER_PORT" in env else derived_port(job),
        "Open MPI",
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's counts, one a node: '4(x2),3' -> [4, 4, 3]; [] where it cannot be read."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: 'gpu[03-05,9],cpu1' -> 'gpu03'."""
    head = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+", nodes.strip())
    if not head:
        raise WorldError(f"Slurm's node list {nodes!r} cannot be read; set MASTER_ADDR.")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head[0])


def derived_port(job: str) -> int:
    """A port in 20000-29999 that all ranks of one job derive alike, other jobs rarely."""
    return 20000 + zlib.crc32(job.encode()) % 10000
