"""How processes end: in order, after an error, by a signal, with the one that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import free_port

from oarlock.errors import WorldError

# Imports torch once, then forks `ranks` processes that run the script to the interpreter's end.
NURSERY = """
import gc, os, sys, torch, oarlock
script, ranks, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
source = compile(open(script).read(), script, "exec")
from ranks import free_port
gc.freeze()
for round in range(rounds):
    port, children = free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                              MASTER_PORT=str(port), ROUND=str(round))
            os.dup2(os.open(f"{script}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            break
        children.append(child)
    else:
        codes = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
        print(*codes, flush=True)
        continue
    exec(source, {"__name__": "__main__"})
    break
"""


RUNNING: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    while RUNNING:
        process = RUNNING.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Run:
    """A script on two ranks, ended as a real script ends."""

    def __init__(self, folder: Path, source: str, rounds: int = 1) -> None:
        self.script, self.folder = folder / "script.py", folder
        self.script.write_text("import os, sys, time\nimport oarlock\n" + source)
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(self.script), "2", str(rounds)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "FOLDER": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        RUNNING.append(self.process)

    def codes(self) -> list[list[int]]:
        out, _ = self.process.communicate(timeout=200)
        return [[int(c) for c in line.split()] for line in out.splitlines()]

    def stderr(self, rank: int) -> str:
        return (self.folder / f"script.py.{rank}").read_text()

    def ready(self, count: int = 2) -> list[psutil.Process]:
        """The ranks and their children, once ``count`` files named ready* are there."""

        def there() -> bool:
            assert self.process.poll() is None, self.stderr(0) + self.stderr(1)
            return len(list(self.folder.glob("ready*"))) == count

        wait_for(there, 60)
        return psutil.Process(self.process.pid).children(recursive=True)


def signal_all(processes: list[psutil.Process], number: int) -> None:
    """As a terminal does: to the whole group."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_an_orderly_end_is_orderly_every_time(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
import torch, torch.distributed as dist
world = oarlock.join(timeout=30)
dist.all_reduce(torch.ones(1000))
if int(os.environ["ROUND"]) % 2:
    world.close()
""",
        rounds=20,
    )
    assert run.codes() == [[0, 0]] * 20
    assert run.stderr(0) + run.stderr(1) == ""


def test_an_uncaught_error_ends_all_ranks_hard(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
from oarlock.errors import DataError
def main():
    world = oarlock.join(timeout=300)
    world.barrier()
    if world.rank == 1:
        raise [DataError("Row 7 is broken."), ValueError("boom")][int(os.environ["ROUND"])]
    world.barrier()
if os.environ["ROUND"] == "2":  # the same through `with`, whose exit comes before the hook
    with oarlock.join(timeout=300) as world:
        if world.rank == 1:
            raise DataError("Row 8 is broken.")
        world.barrier()
main()
""",
        rounds=3,
    )
    assert run.codes() == [[4, 2], [4, 1], [4, 2]]
    assert time.monotonic() - run.started < 60
    survivor, culprit = run.stderr(0), run.stderr(1)
    assert "PeerLostError: Rank 0 (" in survivor
    assert "Traceback" not in survivor
    assert culprit.startswith("DataError: Row 7 is broken.\n")
    assert culprit.count("Traceback") == culprit.count("ValueError: boom\n") == 1
    assert culprit.endswith("DataError: Row 8 is broken.\n")


def test_an_error_in_join_has_no_stack_trace(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import oarlock\nworld = oarlock.join()\n")
    env = {**os.environ, "RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert run.returncode == WorldError.exit_status
    assert run.stderr.startswith("WorldError: Rank 3 is out of range")
    assert "Traceback" not in run.stderr


LOADING = """
world = oarlock.join(timeout=300)
class Rows:
    def __len__(self): return 1000
    def __getitem__(self, i): return i
for batch in oarlock.Loader(Rows(), 4, 2, workers=1):
    if batch.step == 2:
        open(f"{os.environ['FOLDER']}/ready{world.rank}", "w")
    if batch.step >= 2:
        time.sleep(0.2)
    world.barrier()
"""


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, {130}), (signal.SIGTERM, {-signal.SIGTERM})]
)
def test_ctrl_c_and_sigterm_leave_no_orphan(
    tmp_path: Path, number: int, expected: set[int]
) -> None:
    run = Run(tmp_path, LOADING)
    family = run.ready()
    assert len(family) == 4  # two ranks, each with a process that loads data
    ranks = psutil.Process(run.process.pid).children()
    signal_all(family, number)
    [codes] = run.codes()
    assert len(ranks) == 2
    assert expected <= set(codes) <= expected | {4}  # 4: the peer's end was noticed first
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert len(gone) == 4


def test_ctrl_c_and_sigterm_do_not_end_the_processes_that_load_data(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a run that first finishes its step
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
        + LOADING.replace("range(1000)", "range(60)").replace("return 1000", "return 60")
        + """
assert batch.step == 14
loader = oarlock.Loader(Rows(), 4, 2, workers=1)
unfinished = iter(loader)  # still open at the end of the script, which must not wait for it
next(unfinished)
""",
    )
    family = run.ready()
    signal_all(family, signal.SIGINT)
    signal_all(family, signal.SIGTERM)
    assert run.codes() == [[0, 0]], run.stderr(0) + run.stderr(1)


def torchrun(folder: Path, source: str, ranks: int = 2) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text("import os, time\nimport oarlock\n" + source)
    options = [f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    options.append(f"--log-dir={folder / 'logs'}")  # torchrun's own choice is left behind in /tmp
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "FOLDER": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    RUNNING.append(process)
    return process


def test_plain_torchrun(tmp_path: Path) -> None:
    run = torchrun(
        tmp_path,
        """
with oarlock.join(timeout=60) as world:
    assert world.gather(world.local_rank) == [0, 1]
    if world.is_main:
        print(world, world.local_size)
""",
    )
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0, out
    assert "World(rank 0 of 2, " in out


def test_no_worker_outlives_a_killed_torchrun(tmp_path: Path) -> None:
    run = torchrun(
        tmp_path,
        """
world = oarlock.join(timeout=60)
open(f"{os.environ['FOLDER']}/ready{world.rank}", "w")
time.sleep(60)
""",
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2, 40)
        workers = psutil.Process(run.pid).children(recursive=True)
        assert len(workers) == 2
    finally:
        run.kill()
        run.wait()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []
