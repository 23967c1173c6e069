"""A home lab in one computer: hosts that are network namespaces, joined by links of a chosen speed.

    python benchmarks/lab.py --check [--hosts 2] [--rate 1gbit]   build one, measure it, remove it
    python benchmarks/lab.py [--hosts 2] [--rate 1gbit] [--slow 1=3] [--cores 0=0] -- CMD...
    python benchmarks/lab.py --clean                  remove what killed labs have left behind

Each host has a hostname, an interface and an address of its own, and may be slowed down. The switch
between them lives in a namespace too, so the network of the computer itself is never touched. It
needs Linux, root, ``ip``, ``tc`` and ``unshare``. A lab whose creator is killed is removed by a
process that watches over it. docs/lab.md tells the rest.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Env = Mapping[str, str] | None
Seconds = float | None

NAMESPACES = Path("/var/run/netns")  # where `ip netns` keeps their names
CABLES = ("lan", "wire", "net", "port")  # no two interfaces are called alike, as in many homes
PERIOD = 10_000  # µs; a slow host stops for less than that at a time
PRIVILEGED = "run it on the machine itself or in a container with --privileged"
PIPE = subprocess.PIPE
PIPES: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "text": True, "errors": "replace"}

# Counts once 0.3 s and the shaper's burst are over, so that neither adds to the rate.
RECEIVER = """
import socket, sys, time
server, seconds = socket.create_server((sys.argv[1], 5201)), float(sys.argv[2])
server.settimeout(10)
peer, buffer = server.accept()[0], bytearray(1 << 20)
peer.settimeout(10)
for least, most in (320 << 10, 5), (1 << 60, seconds):
    begin, got, passed = time.perf_counter(), 0, 0
    while (passed < 0.3 or got < least) and passed < most:
        got += peer.recv_into(buffer) or sys.exit("the sender ended")
        passed = time.perf_counter() - begin
print(got * 8 / 1e6 / passed)
"""
SENDER = """
import socket, sys, time
while True:
    try:
        peer = socket.create_connection((sys.argv[1], 5201), timeout=10)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)  # the receiver is about to start
while True:
    peer.sendall(bytes(1 << 18))
"""


class LabError(Exception):
    """The lab cannot be built, or cannot do what was asked; the first line says all of it."""


class RankFailed(LabError):
    """A rank of :meth:`Lab.ranks` failed; below its first line, the end of the rank's output."""


@dataclass(frozen=True)
class Link:
    """How a host hangs on the network."""

    namespace: str
    hostname: str
    interface: str
    address: str


class Lab:
    """Hosts joined by a switch, for as long as its ``with`` block lasts; one lab a process at once.

    ``hosts``: how many. ``rate``: of each link, either way, such as ``"1gbit"`` or ``"100mbit"``;
    None leaves the links as fast as the kernel is. ``slow``: host to factor, 1 to 10; a host with
    factor 3 gets a third of one core. ``cores``: host to the one core that it is pinned to.

    Raises LabError for arguments that make no sense, and on entry if this computer lacks something.
    """

    _open = 0  # the process with an open lab: a forked child has a copy of it, but no lab

    def __init__(
        self,
        hosts: int = 2,
        rate: str | None = "1gbit",
        slow: Mapping[int, float] | None = None,
        cores: Mapping[int, int] | None = None,
    ) -> None:
        if not 1 <= hosts <= 250:
            raise LabError(f"hosts={hosts}: a lab has 1 to 250 hosts")
        if rate and not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[kmg]?bit", rate, re.I):
            raise LabError(f"rate={rate!r} is no rate: write it as '100mbit' or '1gbit'")
        self.hosts, self.rate, self._pid = hosts, rate, os.getpid()
        self.slow, self.cores = dict(slow or {}), dict(cores or {})
        self._switch = f"oarlock-{self._pid}-switch"
        self._links = [
            Link(f"oarlock-{self._pid}-{n}", f"host{n}", f"{CABLES[n % 4]}{n}", f"10.77.0.{n + 1}")
            for n in range(hosts)
        ]
        self._cgroups: dict[int, Path] = {}
        self._processes: list[subprocess.Popen[Any]] = []
        self._watcher: subprocess.Popen[Any] | None = None
        self._master_port = 29500
        for host, factor in self.slow.items():
            self._check_host("slow", host)
            if not 1 <= factor <= 10:
                raise LabError(f"slow={{{host}: {factor}}}: a host is 1 to 10 times slower")
        usable = os.sched_getaffinity(0)
        for host, core in self.cores.items():
            self._check_host("cores", host)
            if core not in usable:
                raise LabError(f"cores={{{host}: {core}}}: the cores here are {sorted(usable)}")

    def _check_host(self, what: str, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise LabError(f"{what}: there is no host {host}, the last is {self.hosts - 1}")

    def link(self, host: int) -> Link:
        """Names and address of a host. Raises LabError if there is no such host."""
        self._check_host("link", host)
        return self._links[host]

    def __enter__(self) -> Lab:
        if Lab._open == os.getpid() or os.getpid() != self._pid:
            raise LabError("one lab a process, made by that process: leave the other one first")
        _check_tools()
        clean()
        Lab._open = self._pid
        try:
            watch = [sys.executable, __file__, "--watch", str(self._pid)]
            self._watcher = subprocess.Popen(watch, start_new_session=True)
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _build(self) -> None:
        switch = f"ip -n {self._switch}"
        _tool(f"ip netns add {self._switch}", "the kernel gives no network namespace", PRIVILEGED)
        commands = [f"{switch} link add switch0 type bridge", f"{switch} link set switch0 up"]
        for n, link in enumerate(self._links):
            inside, name = f"ip -n {link.namespace}", link.interface
            commands += [f"ip netns add {link.namespace}", f"{inside} link set lo up"]
            commands += [f"{inside} link add {name} type veth peer end{n} netns {self._switch}"]
            commands += [f"{inside} link set {name} up"]
            commands += [f"{inside} addr add {link.address}/24 dev {name}"]
            commands += [f"{switch} link set end{n} master switch0 up"]
        for command in commands:
            _tool(command, "the kernel makes no bridge or veth", "try `modprobe -a bridge veth`")
        ends = [(k.namespace, k.interface) for k in self._links]  # what a host sends, and receives
        ends += [(self._switch, f"end{n}") for n in range(self.hosts)]
        for namespace, end in ends if self.rate else []:
            shape = f"root tbf rate {self.rate} burst 256kb latency 50ms"
            command = f"tc -n {namespace} qdisc add dev {end} {shape}"
            _tool(command, "the kernel does not shape links", "try `modprobe sch_tbf`")
        for host, factor in self.slow.items():
            self._cgroups[host] = _slow_group(self._links[host].namespace, factor)
        for host in range(self.hosts):
            tried = self.run(host, ["true"])
            if tried.returncode:
                why = " ".join(tried.stderr.split())
                raise LabError(f"no command starts on a host ({why}): {PRIVILEGED}")

    def popen(
        self, host: int, argv: Sequence[str], env: Env = None, **kw: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, in a session of its own; the lab's end kills it.

        ``env`` is added to this process's environment; ``kw`` goes to ``subprocess.Popen``; stdin
        is empty if not among them. A command that is not found ends with exit code 127. Raises
        LabError if there is no such host or the lab is not open.
        """
        self._check_host("popen", host)
        if Lab._open != os.getpid():
            raise LabError("the lab is not open: use it inside its `with` block")
        link = self._links[host]
        command: list[str] = []
        if host in self._cgroups:  # before `ip netns exec`, which hides the cgroups
            enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
            command += ["sh", "-c", enter, str(self._cgroups[host])]
        if host in self.cores:
            command += ["taskset", "-c", str(self.cores[host])]
        command += ["ip", "netns", "exec", link.namespace, "unshare", "--uts"]
        command += ["sh", "-c", 'hostname "$0" && exec "$@"', link.hostname, *argv]
        environment = os.environ | dict(env or {})
        kw.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(command, env=environment, start_new_session=True, **kw)
        self._processes = [p for p in self._processes if p.poll() is None] + [process]
        return process

    def run(
        self, host: int, argv: Sequence[str], env: Env = None, timeout: Seconds = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; the result has ``stdout`` and ``stderr`` as text.

        Raises LabError, after killing it, if it takes more than ``timeout`` seconds.
        """
        process = self.popen(host, argv, env, **PIPES)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise LabError(f"{argv[0]} on host{host} took more than {timeout:g} s") from None
        finally:
            if process.returncode is None:
                _kill_group(process)
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def ranks(
        self,
        argv: Sequence[str],
        per_host: int = 1,
        env: Env = None,
        timeout: Seconds = None,
        echo: bool = False,
    ) -> list[str]:
        """Run a command as ``per_host`` ranks on each host; what each wrote to stdout, by rank.

        Sets what ``torch.distributed`` reads, the interface for gloo and one thread a rank; ``env``
        is added last. ``echo`` also prints each line as it comes, after its hostname.

        Raises RankFailed, a LabError, when the first rank fails, and LabError after ``timeout``
        seconds; no rank is left running then.
        """
        self._master_port += 1  # the last one may still be in use
        size, ranks = per_host * self.hosts, []
        try:
            for rank in range(size):
                host, local = divmod(rank, per_host)
                names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT OMP_NUM_THREADS"
                numbers = (rank, size, local, per_host, self._master_port, 1)
                settings = dict(zip(names.split(), map(str, numbers), strict=True))
                settings["MASTER_ADDR"] = self._links[0].address
                settings["GLOO_SOCKET_IFNAME"] = self._links[host].interface
                ranks.append(_Rank(self, host, rank, argv, settings | dict(env or {}), echo))
            _wait(ranks, timeout)
        finally:
            for r in ranks:
                _kill_group(r.process)
        return ["".join(r.read_all().stdout) for r in ranks]

    def measure(self, a: int = 0, b: int = 1, seconds: float = 2.0) -> float:
        """Megabits a second that one TCP connection from ``a`` to ``b`` carries, headers apart.

        Raises LabError if nothing gets through.
        """
        if a == b:
            raise LabError("measure needs two hosts: one alone does not use its link")
        python, address = [sys.executable, "-I", "-c"], self.link(b).address
        sender = self.popen(a, [*python, SENDER, address], stderr=subprocess.DEVNULL)
        try:
            receiver = [*python, RECEIVER, address, str(seconds)]
            received = self.run(b, receiver, timeout=seconds + 30)
        finally:
            _kill_group(sender)
        if received.returncode:
            raise LabError(f"no rate from host{a} to host{b}: {received.stderr.split(chr(10))[-2]}")
        return float(received.stdout)

    def close(self) -> None:
        """Kill everything that runs on the hosts and remove them; harmless when called again."""
        if Lab._open != os.getpid() or os.getpid() != self._pid:
            return  # a forked child has no lab to close
        for process in [p for p in self._processes if p.poll() is None]:
            _kill_group(process)
        _remove(lambda pid: pid == self._pid)
        Lab._open = 0
        if self._watcher is not None:
            _kill_group(self._watcher)


class _Rank:
    """A started rank, and what it has written so far."""

    def __init__(
        self, lab: Lab, host: int, rank: int, argv: Sequence[str], env: dict[str, str], echo: bool
    ) -> None:
        self.rank, self.hostname, self.echo = rank, lab.link(host).hostname, echo
        self.stdout: list[str] = []
        self.output: list[str] = []  # stderr too, in about the order of writing
        self.process = lab.popen(host, argv, env, **PIPES)
        streams = (self.process.stdout, self.process.stderr)
        self.readers = [threading.Thread(target=self._read, args=[s], daemon=True) for s in streams]
        for reader in self.readers:
            reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.output.append(line)
            if stream is self.process.stdout:
                self.stdout.append(line)
            if self.echo:
                sys.stdout.write(f"{self.hostname}: {line.rstrip()}\n")
                sys.stdout.flush()

    def read_all(self) -> _Rank:
        """Wait until all that it wrote is read, but not for a grandchild that keeps writing."""
        for reader in self.readers:
            reader.join(timeout=2)
        return self


def _wait(ranks: list[_Rank], timeout: Seconds) -> None:
    end = time.monotonic() + (float("inf") if timeout is None else timeout)
    while running := [r for r in ranks if r.process.poll() is None]:
        if any(r.process.returncode for r in ranks):
            break
        if time.monotonic() > end:
            names = ", ".join(f"{r.rank} on {r.hostname}" for r in running)
            raise LabError(f"not ended within {timeout:g} s: rank {names}")
        time.sleep(0.01)
    for r in ranks:
        if code := r.process.returncode:
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
            _kill_group(r.process)  # its children hold its output open
            text = "".join(r.read_all().output)[-2000:].strip()
            raise RankFailed(f"rank {r.rank} on {r.hostname} {how}\n{text}")


def _check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise LabError("a lab needs Linux")
    if os.geteuid() != 0:
        raise LabError("a lab needs root, to make network namespaces: run it with sudo")
    for tool in ("ip", "tc", "unshare", "hostname", "taskset"):
        if shutil.which(tool) is None:
            raise LabError(f"`{tool}` is missing: apt install iproute2 util-linux hostname")


def _tool(command: str, lacks: str = "failed", fix: str = "") -> str:
    # in its own session, as Ctrl-C would otherwise stop it halfway
    done = subprocess.run(command.split(), capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise LabError(f"{lacks} (`{command}`: {' '.join(done.stderr.split())}): {fix}")
    return done.stdout


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a command of :meth:`Lab.popen` and its children, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def _cpu_controller() -> Path | None:
    """Where cgroup v1's cpu controller is mounted."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [Path(m[1]) for m in mounts if m[2] == "cgroup" and "cpu" in m[3].split(",")]
    return found[0] if found else None


def _slow_group(name: str, factor: float) -> Path:
    """A new cgroup whose processes together get 1 / ``factor`` of one core."""
    mount = _cpu_controller()
    if mount is None:
        raise LabError("slow needs the cpu controller of cgroup v1, not mounted here: leave it out")
    try:
        (mount / name).mkdir()
        (mount / name / "cpu.cfs_period_us").write_text(str(PERIOD))
        (mount / name / "cpu.cfs_quota_us").write_text(str(round(PERIOD / factor)))
    except OSError as error:
        raise LabError(f"slow needs a cpu cgroup ({error}): leave it out") from None
    return mount / name


def _alive(pid: int) -> bool:
    """Whether a process runs that may have a lab: a zombie has none, nor have we if it is shut."""
    if pid == os.getpid():
        return Lab._open == pid
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _processes_in(path: Path) -> list[int]:
    """The processes in a namespace or cgroup; none if another process has just removed it."""
    with suppress(LabError, OSError):
        if path.parent == NAMESPACES:
            return [int(p) for p in _tool(f"ip netns pids {path.name}").split()]
        return [int(p) for p in (path / "cgroup.procs").read_text().split()]
    return []


def _remove(of: Callable[[int], bool]) -> list[str]:
    """Remove the namespaces and cgroups of some creators' labs; what was removed."""
    removed = []
    for folder in filter(None, (NAMESPACES, _cpu_controller())):
        for path in sorted(folder.glob("oarlock-*")):
            match = re.fullmatch(r"oarlock-(\d+)-(\d+|switch)", path.name)
            if match and of(int(match[1])):
                killed = _remove_one(path)
                kind = "namespace" if folder == NAMESPACES else "cgroup"
                removed.append(f"{kind} {path.name}, {killed} processes in it")
    return removed


def _remove_one(path: Path) -> int:
    """Remove a namespace or cgroup once all in it are killed; how many there were."""
    killed: set[int] = set()
    end = time.monotonic() + 5
    while path.exists():
        pids = _processes_in(path)  # asked again until none is left: they may be forking
        killed.update(pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(LabError, OSError):  # a cgroup is busy until the kernel is done with them
            if not pids and path.parent == NAMESPACES:
                _tool(f"ip netns delete {path.name}")
            elif not pids:
                path.rmdir()
        if time.monotonic() > end:
            raise LabError(f"cannot remove {path}, in which these run: {pids}")
        time.sleep(0.01 if pids else 0)
    return len(killed)


def clean() -> list[str]:
    """Remove what labs have left whose creator was killed; says what. Raises LabError."""
    _check_tools()
    return _remove(lambda pid: not _alive(pid))


def watch(pid: int) -> None:
    """Wait until a lab's creator ends, and remove what it left; a closed lab has killed us."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    _remove(lambda creator: creator == pid)


def check(lab: Lab) -> None:
    """Print what the lab is made of, and the rate of each link."""
    for host in range(lab.hosts):
        link, hostname = lab.link(host), lab.run(host, ["hostname"]).stdout.strip()
        print(f"{hostname}: {link.interface} {link.address}, namespace {link.namespace}")
    for host in range(1, lab.hosts):
        there, back = lab.measure(0, host, 1.0), lab.measure(host, 0, 1.0)
        print(f"host0 to host{host}: {there:.0f} Mbit/s, back: {back:.0f} Mbit/s")


def pair(text: str) -> tuple[int, float]:
    """The host and the number of ``1=3``. Raises ValueError."""
    host, number = text.split("=")
    return int(host), float(number)


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 1 if a rank failed, 2 for any other LabError."""
    own, command = argv, []
    if "--" in argv:
        own, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description="A home lab in one computer, for one command on each host: -- CMD..."
    )
    parser.add_argument("--check", action="store_true", help="build a lab, measure it, remove it")
    parser.add_argument("--clean", action="store_true", help="remove what killed labs have left")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link; 'none': not limited")
    parser.add_argument("--slow", type=pair, action="append", default=[], metavar="HOST=FACTOR")
    parser.add_argument("--cores", type=pair, action="append", default=[], metavar="HOST=CORE")
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(own)
    if args.watch:
        watch(args.watch)
        return 0
    if args.check + args.clean + bool(command) != 1:
        parser.error("one of --check, --clean and -- CMD is needed")
    try:
        if args.clean:
            print("\n".join(f"removed {what}" for what in clean()) or "nothing to remove")
            return 0
        rate = None if args.rate == "none" else args.rate
        cores = {host: int(core) for host, core in args.cores}
        with Lab(args.hosts, rate, dict(args.slow), cores) as lab:
            if args.check:
                check(lab)
            else:
                lab.ranks(command, env={"PYTHONUNBUFFERED": "1"}, echo=True)
    except LabError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 1 if isinstance(error, RankFailed) else 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
