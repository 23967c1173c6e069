"""Joining a world: what the launchers' variables mean, each error once, and how a world ends."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_failing, run_ranks

import oarlock
from oarlock import devices
from oarlock import world as world_module
from oarlock.environment import derived_port, first_host, read_environment, tasks_per_node
from oarlock.errors import OutOfStepError, SetupError, WorldError
from oarlock.world import World, join

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "job-1",
}


# -- the launchers' variables --------------------------------------------------------------------


def test_torchruns_variables() -> None:
    place = read_environment(TORCHRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (2, 4, 0, 2)
    assert (place.address, place.port) == ("10.0.0.1", 29400)


def test_slurms_variables() -> None:
    place = read_environment(SLURM)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 7, 1, 3)
    assert place.address == "gpu03"
    assert place.port == derived_port("77.0") != derived_port("78.0")
    own = read_environment({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"})
    assert own is not None
    assert (own.address, own.port) == ("10.0.0.9", 1234)


def test_slurms_node_lists() -> None:
    for nodes, first in (
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a,b", "a"),
        ("box-7", "box-7"),
        ("n[7]", "n7"),
        ("rack[1-2]node[03-4]x,b", "rack1node03x"),
    ):
        assert first_host(nodes) == first
    with pytest.raises(WorldError, match="cannot be read; set MASTER_ADDR"):
        first_host("[")
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("what") == []


def test_open_mpis_variables() -> None:
    place = read_environment(OPEN_MPI)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 2, 1, 2)
    assert (place.address, place.port) == ("127.0.0.1", derived_port("job-1"))


@pytest.mark.parametrize(
    ("env", "facts"),
    [
        ({"RANK": "0"}, "RANK of torchrun's variables set, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "but not RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "RANK": ""}, "but not RANK"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one'; it must be a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({**TORCHRUN, "RANK": "4"}, "Rank 4 is out of range: a world of 4 has ranks 0 to 3"),
        ({**TORCHRUN, "RANK": "-1"}, "Rank -1 is out of range"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "world size is 0; it must be at least 1"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank is 2; with 2 ranks on this machine"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "number of local ranks is 5"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "but not LOCAL_RANK"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "but not SLURM_LOCALID"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "but not OMPI_COMM_WORLD_SIZE"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_wrong_variables_are_named(env: dict[str, str], facts: str) -> None:
    with pytest.raises(WorldError) as caught:
        join(env=env)
    assert facts in str(caught.value)


# -- alone ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_joined() -> Iterator[None]:
    yield
    if world_module._current is not None:
        world_module._current.close()


def test_alone_is_a_world_of_one_without_a_process_group() -> None:
    world = join(env={})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.is_main
    assert world.backend == "none"
    assert not dist.is_initialized()
    assert world.gather({"a": 1}) == [{"a": 1}]
    assert world.broadcast("x") == "x"
    tensor = torch.ones(2)
    world.broadcast_tensor(tensor)
    world.barrier()
    assert tensor.tolist() == [1, 1]
    world.close()
    world.close()  # a second time changes nothing


def test_join_twice_and_a_closed_world_are_refused() -> None:
    world = join(env={})
    with pytest.raises(WorldError, match="already joined a world"):
        join(env={})
    world.close()
    for use in (world.barrier, lambda: world.gather(1), lambda: world.broadcast(1)):
        with pytest.raises(SetupError, match="closed"):
            use()
    again = join(env={"RANK": "0", "WORLD_SIZE": "1"})
    assert again.size == 1
    with pytest.raises(WorldError, match="timeout is 0"):
        join(env={}, timeout=0)


# -- devices and backends ------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_fewer_devices_than_local_ranks(two_gpus: list[int]) -> None:
    env = {**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}
    with pytest.raises(WorldError) as caught:
        join(env=env)
    assert "3 ranks on" in str(caught.value)
    assert "only 2 cuda devices" in str(caught.value)
    without = {k: v for k, v in TORCHRUN.items() if not k.startswith("LOCAL")}
    with pytest.raises(WorldError, match="not LOCAL_RANK, so this rank cannot know its device"):
        join(env=without)
    assert two_gpus == []


def test_each_local_rank_takes_its_own_device(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.device_for(1, 2) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_STEP_GPUS", "3")  # Slurm shows each rank its own device only
    assert devices.device_for(3, 4) == torch.device("cuda", 0)
    assert two_gpus == [1, 0]


def test_the_backend_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True)
    kinds = ("cuda", "xpu", "mps", "cpu")
    chosen = [devices.backend_for(torch.device(kind)) for kind in kinds]
    assert chosen == ["nccl", "xccl", "gloo", "gloo"]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert devices.backend_for(torch.device("cuda")) == "gloo"


def _facts(world: World) -> tuple[Any, ...]:
    return world.rank, world.size, world.local_rank, world.local_size, world.backend, world.staged


# -- several ranks come together, or say why not -------------------------------------------------


def _attempt(index: int, env: dict[str, str], options: dict[str, Any], box: Any) -> None:
    identity = options.pop("identity", None)
    if identity is not None:
        devices.device_identity = lambda _: identity
    started = time.monotonic()
    try:
        world = join(env=env, **options)
        answer: tuple[str, Any] = ("joined", _facts(world))
        world.close()
    except BaseException as error:
        answer = (type(error).__name__, str(error))
    box.put((index, *answer, time.monotonic() - started))
    box.close()
    box.join_thread()
    os._exit(0)


def attempts(
    envs: list[dict[str, str]], delay: float = 0.0, **options: Any
) -> list[tuple[str, Any, float]]:
    """join() in one forked process for each of ``envs``: (outcome, message or facts, seconds)."""
    context = multiprocessing.get_context("fork")
    box = context.Queue()
    options = {"timeout": 30.0, **options}
    children = []
    for i, env in enumerate(envs):
        children.append(context.Process(target=_attempt, args=(i, env, options, box)))
        children[-1].start()
        time.sleep(delay)
    outcomes: dict[int, tuple[str, Any, float]] = {}
    try:
        while len(outcomes) < len(envs):
            index, *outcome = box.get(timeout=60)
            outcomes[index] = tuple(outcome)
    except queue.Empty:
        raise AssertionError(f"only {outcomes} answered") from None
    finally:
        for child in children:
            child.join(timeout=5)
            child.kill()
    return [outcomes[i] for i in range(len(envs))]


def ranks_of(size: int, numbers: list[int], **more: str) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**common, "RANK": str(n), **more} for n in numbers]


def test_local_numbers_are_found_where_the_launcher_gives_none() -> None:
    outcomes = attempts(ranks_of(2, [0, 1]))
    assert [o[1] for o in outcomes] == [(0, 2, 0, 2, "gloo", False), (1, 2, 1, 2, "gloo", False)]


def test_slurm_ranks_meet_through_the_port_of_their_job() -> None:
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    common |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    envs = [{**common, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
    assert [o[0] for o in attempts(envs)] == ["joined", "joined"]


def test_a_device_without_a_backend_is_staged_through_host_memory() -> None:
    outcomes = attempts(ranks_of(2, [0, 1]), device="meta", identity="")
    assert [o[1][4:] for o in outcomes] == [("gloo", True)] * 2


def test_one_device_for_two_ranks_is_refused() -> None:
    outcomes = attempts(ranks_of(2, [0, 1]), device="meta", identity="GPU-1f2e")
    for kind, message, _ in outcomes:
        assert kind == "WorldError"
        assert "Ranks 0 and 1" in message
        assert "same device (GPU-1f2e)" in message


def test_two_processes_with_one_rank_number() -> None:
    outcomes = attempts(ranks_of(3, [0, 1, 1]))
    for kind, message, seconds in outcomes:
        assert kind == "WorldError"
        assert "Two processes call themselves rank 1: pid " in message
        assert seconds < 10


def test_peers_that_never_arrive_are_named_within_the_timeout() -> None:
    outcomes = attempts(ranks_of(4, [0, 2]), timeout=1.5)
    assert {o[0] for o in outcomes} == {"WorldError"}
    assert all("Ranks 1, 3 of 4 did not arrive within 1.5 s" in o[1] for o in outcomes)
    assert all(o[2] < 8 for o in outcomes)


def test_a_missing_rank_0_is_named_within_the_timeout() -> None:
    [(kind, message, seconds)] = attempts(ranks_of(2, [1]), timeout=1.5)
    assert kind == "WorldError"
    assert "Rank 1 of 2" in message
    assert "rank 0 has not arrived" in message
    assert seconds < 8


def _squat(box: Any) -> None:
    taken = socket.socket()
    taken.bind(("", 0))
    taken.listen()
    box.put(taken.getsockname()[1])
    time.sleep(60)


def test_a_port_in_use_names_its_owner() -> None:
    context = multiprocessing.get_context("fork")
    box = context.Queue()
    squatter = context.Process(target=_squat, args=(box,))
    squatter.start()
    try:
        port = box.get(timeout=20)
        [(kind, message, _)] = attempts(ranks_of(2, [0], MASTER_PORT=str(port)), timeout=5)
    finally:
        squatter.kill()
        squatter.join()
    assert kind == "WorldError"
    assert f"Port {port} on " in message
    assert f"in use by pid {squatter.pid} (" in message


# -- together ------------------------------------------------------------------------------------


def _talk(world: World) -> tuple[Any, ...]:
    tensor = torch.arange(6.0).view(2, 3).t() * (world.rank == 0)  # not contiguous
    world.broadcast_tensor(tensor)
    flags = torch.tensor([world.rank == 1, world.rank == 0])
    world.broadcast_tensor(flags, source=1)
    return (
        world.gather((world.rank, "x" * world.rank)),
        world.broadcast({"from": world.rank}),
        tensor.tolist(),
        flags.tolist(),
    )


def test_small_messages() -> None:
    for answer in run_ranks(_talk, 3):
        everyone, told, tensor, flags = answer
        assert everyone == [(0, ""), (1, "x"), (2, "xx")]
        assert told == {"from": 0}
        assert tensor == [[0, 3], [1, 4], [2, 5]]
        assert flags == [True, False]


def _close_and_join_again(world: World) -> tuple[int, bool]:
    world.close()
    os.environ["MASTER_PORT"] = str(int(os.environ["OTHER_PORT"]))
    with join(timeout=30) as again:
        total = sum(again.gather(again.rank + 1))
    return total, dist.is_initialized()


def test_a_closed_world_can_be_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_PORT", str(free_port()))
    assert run_ranks(_close_and_join_again, 2) == [(3, False), (3, False)]


def _announce(world: World, kinds: list[str]) -> None:
    world.steps = 7
    world.announce(kinds[world.rank]).wait()


def test_ranks_that_are_about_to_do_different_things_say_which() -> None:
    for outcome in run_failing(_announce, 3, ["save", "barrier", "barrier"]):
        assert outcome is not None
        kind, message = outcome
        assert kind == OutOfStepError.__name__
        assert "rank 0: save after 7 steps" in message
        assert "rank 2: barrier after 7 steps" in message


def _leave_early(world: World) -> None:
    if world.rank == 1:
        return
    world.barrier()


def test_a_rank_that_leaves_early_is_named() -> None:
    for outcome in run_failing(_leave_early, 2):
        assert outcome is not None
        assert outcome[0] == "OutOfStepError"
        assert "rank 1: leaving" in outcome[1]


def _vanish(world: World) -> None:
    world.steps = 3
    if world.rank == 1:
        raise ValueError("boom")
    world.barrier()


def test_a_lost_peer_is_noticed_at_once() -> None:
    started = time.monotonic()
    survivor, culprit = run_failing(_vanish, 2)
    assert culprit == ("ValueError", "boom")
    assert survivor is not None
    assert survivor[0] == "PeerLostError"
    assert "Rank 0 (" in survivor[1]
    assert "lost a peer at step 3, while announcing its barrier" in survivor[1]
    assert time.monotonic() - started < 10


def test_the_public_names() -> None:
    assert oarlock.join is join
    assert set(oarlock.__all__) >= {"join", "World", "Loader", "DataParallel", "Checkpoints"}
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        oarlock.Trainer  # noqa: B018
