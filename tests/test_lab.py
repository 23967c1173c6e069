"""The home lab: what it promises, and that nothing of it is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab import Lab, LabError, RankFailed, _cpu_controller, clean

LAB = Path(__file__).parent.parent / "benchmarks" / "lab.py"


def possible() -> bool:
    """Does this machine let us make namespaces? (Linux, root, and not every container does.)"""
    if not sys.platform.startswith("linux") or os.geteuid() or not shutil.which("ip"):
        return False
    try:
        with Lab(1, rate="1gbit"):
            return True
    except LabError:
        return False


needs_lab = pytest.mark.skipif(not possible(), reason="needs root and network namespaces")


def leftovers(pid: int) -> list[str]:
    """Namespaces and cgroups of that process's labs."""
    folders = [Path("/var/run/netns"), _cpu_controller()]
    return [str(p) for f in folders if f and f.exists() for p in f.glob(f"oarlock-{pid}-*")]


@needs_lab
def test_hosts_have_names_links_and_a_rate_and_ranks_train_across_them() -> None:
    say = (
        "import torch, torch.distributed as dist, os, socket\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(3) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "print(socket.gethostname(), os.environ['GLOO_SOCKET_IFNAME'], int(x[0]))\n"
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    with Lab(2, rate="100mbit") as lab:
        assert 80 < lab.measure(0, 1, 0.5) < 105
        assert lab.ranks([sys.executable, "-c", say], timeout=60) == [
            "host0 lan0 3\n",
            "host1 wire1 3\n",
        ]
        alone = lab.run(1, ["ip", "-br", "addr"]).stdout
        assert "wire1" in alone
        assert "10.77.0.2/24" in alone
        assert "lan0" not in alone
    assert not leftovers(os.getpid())


@needs_lab
@pytest.mark.skipif(_cpu_controller() is None, reason="needs the cpu controller of cgroup v1")
def test_a_slow_host_is_slow() -> None:
    work = (
        "import time; t = time.perf_counter(); c = time.process_time()\n"
        "while time.process_time() - c < 0.2: pass\n"
        "print(time.perf_counter() - t)"
    )
    with Lab(2, rate=None, slow={1: 4}) as lab:
        seconds = [float(lab.run(h, [sys.executable, "-I", "-c", work]).stdout) for h in (0, 1)]
    assert seconds[1] > 2 * seconds[0], seconds
    assert seconds[1] > 0.6, seconds


@needs_lab
def test_a_failing_rank_is_named_and_the_others_end() -> None:
    script = (
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no disk')\ntime.sleep(60)"
    )
    started = time.monotonic()
    with Lab(2, rate=None) as lab:
        with pytest.raises(RankFailed, match=r"rank 1 on host1 ended with exit code 1\nno disk"):
            lab.ranks([sys.executable, "-c", script])
        with pytest.raises(LabError, match=r"not ended within 0\.3 s: rank 0 on host0, 1 on host1"):
            lab.ranks(["sleep", "60"], timeout=0.3)
        with pytest.raises(LabError, match="one lab a process"), Lab(1):
            pass
        with pytest.raises(LabError, match="no host 2, the last is 1"):
            lab.run(2, ["true"])
    assert time.monotonic() - started < 30
    assert not leftovers(os.getpid())


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_lab_leaves_nothing(number: int) -> None:
    command = [sys.executable, str(LAB), "--rate", "none", "--", "sh", "-c", "echo up; sleep 77"]
    creator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert creator.stdout is not None
    assert "up" in creator.stdout.readline()
    assert leftovers(creator.pid)
    creator.send_signal(number)
    creator.wait(timeout=20)
    end = time.monotonic() + 20
    while leftovers(creator.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not leftovers(creator.pid)
    assert not subprocess.run(["pgrep", "-f", "^sleep 77$"], capture_output=True).stdout
    assert not any(str(creator.pid) in what for what in clean())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"hosts": 0}, "a lab has 1 to 250 hosts"),
        ({"rate": "fast"}, "write it as '100mbit' or '1gbit'"),
        ({"slow": {5: 2}}, "there is no host 5"),
        ({"slow": {0: 50}}, "1 to 10 times slower"),
        ({"cores": {0: 4096}}, "the cores here are"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict, says: str) -> None:
    with pytest.raises(LabError, match=says):
        Lab(**arguments)


def test_the_command_line_names_what_it_needs() -> None:
    done = subprocess.run([sys.executable, str(LAB)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "one of --check, --clean and -- CMD is needed" in done.stderr
