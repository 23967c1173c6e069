"""The ranks of this machine, as processes under torch.distributed's elastic agent.

The agent brings the rendezvous, the store and the ranks' numbers; here is how the processes are
started, watched and ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from oarlock.launch.failure import Exit

HOLD = 1.5  # s to wait for the cause, when all failures so far only follow from something else
GRACE = 2.0  # s between asking the others to end and ending them


def local_spec(command: list[str], ranks: int) -> WorkerSpec:
    """A group of ``ranks`` workers on this machine, with a store on a port of its own."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",  # any free port, bound at once: two launches never meet
        run_id=uuid.uuid4().hex[:12],
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        is_host=True,
    )
    return WorkerSpec(
        role="oarlock",
        local_world_size=ranks,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=0.05,
        local_addr="127.0.0.1",
    )


class LocalRanks(SimpleElasticAgent):
    """Starts one process per rank, and ends all of them soon after one has failed.

    Args:
        spec: what to run, and how many.
        folders: the log folder of each rank.
        env: the environment of the ranks, without what the agent adds.
        tick: called some twenty times a second while ranks run.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        folders: list[Path],
        env: Mapping[str, str],
        tick: Callable[[], None],
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=30)
        self.folders, self.env, self.tick = folders, dict(env), tick
        self.exits: list[Exit] = []
        self.still_running: list[int] = []  # ranks that others waited for in vain
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._all: list[subprocess.Popen[bytes]] = []
        self._asked_at: float | None = None
        self._stacks_asked = False
        self._killed = False
        self._oom_kills = _oom_kills()

    # -- for the launcher ----------------------------------------------------------------------

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each rank, but not to its children: data workers must go on."""
        for process in self._running.values():
            process.send_signal(number)

    def kill(self) -> None:
        """End all ranks and their children at once."""
        self._killed = True
        for process in self._running.values():
            _kill_group(process)

    # -- for the agent -------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        for worker in worker_group.workers:
            env = {
                **self.env,
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "GROUP_RANK": str(worker_group.group_rank),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_NAME": spec.role,
                "WORLD_SIZE": str(worker.world_size),
                "LOCAL_WORLD_SIZE": str(spec.local_world_size),
                "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                "MASTER_ADDR": str(worker_group.master_addr),
                "MASTER_PORT": str(worker_group.master_port),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
                "TORCHELASTIC_ERROR_FILE": str(self.folders[worker.local_rank] / "error.json"),
                "OARLOCK_LAUNCHER_PID": str(os.getpid()),
            }
            folder = self.folders[worker.local_rank]
            with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
                process = subprocess.Popen(
                    [str(spec.entrypoint), *spec.args],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,  # the terminal's Ctrl-C reaches the launcher only
                )
            self._running[worker.local_rank] = process
            self._all.append(process)
        return {rank: process.pid for rank, process in self._running.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._collect()
        self.tick()
        if self._running:
            self._end_if_failed()
            return RunResult(WorkerState.HEALTHY)
        if any(e.code for e in self.exits):
            return RunResult(WorkerState.FAILED)
        done = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(WorkerState.SUCCEEDED, return_values=done)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 5) -> None:
        self.kill()
        end = time.monotonic() + 5
        while self._running and time.monotonic() < end:
            self._collect()
            time.sleep(0.02)
        if any(e.code for e in self.exits):
            for process in self._all:  # what a failed rank left behind in its group
                _kill_group(process)

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # Nobody reads the events, and the original asks the name service for this machine.
        return Event(state, source)

    # -- inside --------------------------------------------------------------------------------

    def _collect(self) -> None:
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[rank]
            stopped = self._killed or self._asked_at is not None
            # Asked for its stack before it could listen, a rank dies of the question
            stopped |= self._stacks_asked and code == -signal.SIGUSR2
            ended = Exit(rank, code, time.time(), stopped, self.folders[rank])
            if code == -signal.SIGKILL and not stopped:
                ended.out_of_memory = _oom_kills() > self._oom_kills
            self.exits.append(ended)
            if code:
                _kill_group(process)

    def _end_if_failed(self) -> None:
        """Once a rank has failed, ask the others to end, and then end them."""
        failed = [e for e in self.exits if e.code]
        if not failed:
            return
        now = time.time()
        if self._asked_at is None:
            waited = now - min(e.seen for e in failed)
            caused = any(not e.follow_on for e in failed)
            if waited >= HOLD / 2 and not caused and not self._stacks_asked:
                # They waited for a rank that still runs: have it say where it is.
                self._stacks_asked = True
                self.still_running = sorted(self._running)
                self.send(signal.SIGUSR2)
            if waited >= HOLD or caused:
                self.send(signal.SIGTERM)
                self._asked_at = now
        elif now - self._asked_at >= GRACE and not self._killed:
            self.kill()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _oom_kills() -> int:
    """How often this machine's kernel has killed for want of memory; 0 where it can't be read."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def worker_command(target: list[str]) -> list[str]:
    """The command line of a rank. ``-P``: files in the current folder can't shadow modules."""
    return [sys.executable, "-P", "-m", "oarlock.launch.worker", *target]
