"""Local launching: output, first cause, signals, and that nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oarlock.errors import OutOfStepError, PeerLostError, UserError, WorldError
from oarlock.launch.failure import Exit, Outcome
from oarlock.launch.local import launch
from oarlock.launch.output import Folder, Output, Screen, Tail, last_state, name_ranks
from oarlock.launch.worker import is_follow_on

WORKER = [sys.executable, "-P", "-m", "oarlock.launch.worker"]


HEAD = """
import os, signal, sys, time
rank = int(os.environ.get("RANK", "0"))

def meet():  # the ranks start at different moments on a busy machine
    name = os.path.join(os.path.dirname(__file__), "met-" + os.environ["TORCHELASTIC_RUN_ID"])
    open(f"{name}-{rank}", "w").close()
    for other in range(int(os.environ["WORLD_SIZE"])):
        while not os.path.exists(f"{name}-{other}"):
            time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script, with RANK at hand, and returns its path."""

    def write(body: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _temporary_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs of failed runs are kept; here among the test's own files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def run(target: list[str], n: int, **options: object) -> tuple[int, str, float]:
    """Launch in this process; the exit status, all that was shown, and the seconds it took."""
    shown = io.StringIO()
    begin = time.monotonic()
    status = launch(target, n=n, stream=shown, **options)  # type: ignore[arg-type]
    return status, shown.getvalue(), time.monotonic() - begin


# -- output ------------------------------------------------------------------------------------


def test_ranks_are_named_in_runs() -> None:
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([3, 0, 1, 2]) == "ranks 0-3"
    assert name_ranks([0, 1, 5]) == "ranks 0-1,5"


def test_same_lines_are_folded_and_each_rank_keeps_its_order() -> None:
    folder = Folder(3, window=0.5)
    for text in ("a", "b", "a"):
        folder.add(0, text, False, 0.0)
    for text in ("a", "b"):
        folder.add(1, text, False, 0.1)
    folder.add(2, "b", False, 0.2)
    folder.add(2, "a", False, 0.2)  # after its b: belongs to rank 0's second a
    assert folder.due(0.3) == []
    shown = [text for text, _ in folder.due(0.6)]
    assert shown == ["[ranks 0-1] a", "[ranks 0-2] b", "[ranks 0,2] a"]


def test_a_common_line_is_folded_though_each_rank_said_something_of_its_own() -> None:
    folder = Folder(3)
    for rank in (1, 0, 2):
        folder.add(rank, f"I am {rank}", False, 0.0)
        folder.add(rank, "ready", False, 0.0)
    shown = [text for text, _ in folder.due(1.0)]
    assert sorted(shown[:3]) == ["[rank 0] I am 0", "[rank 1] I am 1", "[rank 2] I am 2"]
    assert shown[3:] == ["[ranks 0-2] ready"]


def test_a_talkative_rank_does_not_hold_up_the_others() -> None:
    folder = Folder(2, window=0.5)
    folder.add(1, "important", False, 0.0)
    for i in range(10):
        folder.add(0, f"line {i}", False, 0.1 * i)
    shown = [text for text, _ in folder.due(0.55)]
    assert "[rank 1] important" in shown
    for i in range(5000):  # and the lines held back do not grow without end
        folder.add(0, f"much {i}", False, 1.0)
    assert len(folder.due(1.0)) > 4000


def test_a_line_of_all_ranks_is_shown_at_once_and_streams_stay_apart() -> None:
    folder = Folder(2)
    folder.add(0, "x", False, 0.0)
    folder.add(1, "x", True, 0.0)
    assert folder.due(0.0) == []
    assert sorted(folder.due(1.0)) == [("[rank 0] x", False), ("[rank 1] x", True)]
    for rank in (0, 1):
        folder.add(rank, "y", False, 2.0)
    assert folder.due(2.0) == [("[ranks 0-1] y", False)]


def test_lines_that_differ_are_shown_in_the_order_in_which_they_came() -> None:
    folder = Folder(3)
    for rank in (0, 2, 1):
        folder.add(rank, f"I am {rank}", False, 0.0)
    shown = [text for text, _ in folder.due(9.0)]
    assert shown == ["[rank 0] I am 0", "[rank 2] I am 2", "[rank 1] I am 1"]


def test_one_rank_has_no_prefix() -> None:
    folder = Folder(1)
    folder.add(0, "plain", False, 0.0)
    assert folder.due(0.0) == [("plain", False)]


def test_rank_0_can_speak_for_all() -> None:
    folder = Folder(2, prefix_main=False)
    for rank, text in ((0, "loss"), (1, "mine"), (0, "both"), (1, "both")):
        folder.add(rank, text, False, 0.0)
    shown = [text for text, _ in folder.due(9.0)]
    assert shown == ["loss", "[rank 1] mine", "[ranks 0-1] both"]


def test_a_bar_is_reduced_to_its_last_state(tmp_path: Path) -> None:
    assert last_state("\r 10%\r 50%\r\x1b[K100%") == "100%"
    log = tmp_path / "log"
    log.write_bytes(b"start\n\r 10%\r 20%")
    tail = Tail(log)
    assert tail.lines(tail.fetch()) == ["start"]
    assert tail.bar == " 20%"
    with open(log, "ab") as file:
        file.write("\r 30% \u2588".encode()[:-1])  # cut inside a character
    assert tail.lines(tail.fetch()) == []
    with open(log, "ab") as file:
        file.write("\u2588".encode()[-1:] + b"\nend")
    assert tail.lines(tail.fetch()) == [" 30% \u2588"]
    assert tail.bar == "end"
    assert tail.close() == ["end"]


def test_a_long_bar_is_not_piled_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"\r{i:6d} of 100000 steps" for i in range(100000)))
    tail = Tail(log)
    while chunk := tail.fetch():
        assert tail.lines(chunk) == []
        assert len(tail._rest) < 100
    assert tail.bar.strip() == "99999 of 100000 steps"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_rank_0s_bar_stays_under_the_lines(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "stderr.log").write_text(f"\r{rank}: 40%")
    shown = Terminal()
    output = Output([tmp_path / "0", tmp_path / "1"], Screen(shown, shown), window=0.0)
    output.pump()
    assert shown.getvalue().endswith("\x1b[K0: 40%")
    (tmp_path / "1" / "stdout.log").write_text("a line\n")
    output.pump()
    assert shown.getvalue().endswith("\r\x1b[K[rank 1] a line\n\r\x1b[K0: 40%")
    output.close()
    assert "[rank 0] 0: 40%" in shown.getvalue()


def test_a_stream_that_is_gone_or_narrow_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Screen(Gone(), Gone()).say("nobody hears it")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Screen(narrow, narrow).say("50 % \u2588")
    assert narrow.buffer.getvalue() == b"50 % ?\n"  # type: ignore[attr-defined]


# -- which failure is the first cause ----------------------------------------------------------


def failed(
    folder: Path, rank: int, code: int, at: float, error: str | None = None, follow: bool = False
) -> Exit:
    home = folder / f"rank-{rank}"
    home.mkdir()
    if error is not None:
        extra = {"py_callstack": error, "timestamp": str(int(at))}
        ours = {"time": at, "follow_on": follow, "stderr_offset": 0}
        record = {"message": {"message": error, "extraInfo": extra}, "oarlock": ours}
        (home / "error.json").write_text(json.dumps(record))
    return Exit(rank, code, at, stopped=False, folder=home)


def test_the_cause_comes_before_what_follows_from_it(tmp_path: Path) -> None:
    exits = [
        failed(tmp_path, 0, 1, 10.0, "RuntimeError: Connection closed by peer", follow=True),
        failed(tmp_path, 1, 1, 10.2, "Traceback\nKeyError: 'x'"),
        failed(tmp_path, 2, 3, 10.4, "ValueError: later"),
        failed(tmp_path, 3, -signal.SIGTERM, 10.5),
    ]
    exits[3].stopped = True
    outcome = Outcome(exits, 4, 12.0, tmp_path)
    assert outcome.cause is exits[1]
    assert outcome.status == 1
    lines = outcome.summary().splitlines()
    assert lines[-1] == "KeyError: 'x'"
    assert "  2 other ranks stopped because of it." in lines
    assert "  Rank 2 failed too: ValueError: later" in lines
    assert "Connection closed" not in outcome.summary()


def test_all_ranks_with_one_error_are_one_line(tmp_path: Path) -> None:
    exits = [failed(tmp_path, r, 2, 10.0 + r, "UserError: no file x") for r in range(4)]
    outcome = Outcome(exits, 4, 1.0, tmp_path)
    assert outcome.status == 2
    assert "3 other ranks failed in the same way." in outcome.summary()
    assert outcome.summary().count("no file x") == 1


def test_an_error_without_a_file_is_taken_from_stderr(tmp_path: Path) -> None:
    exits = [failed(tmp_path, 0, -signal.SIGABRT, 1.0), failed(tmp_path, 1, 1, 0.5)]
    (tmp_path / "rank-0" / "stderr.log").write_text("loading\nterminate called\n  what(): 4 vs 8\n")
    (tmp_path / "rank-1" / "stderr.log").write_text("RuntimeError: Connection reset by peer\n")
    outcome = Outcome(exits, 2, 1.0, tmp_path)
    assert outcome.cause is exits[0]
    assert outcome.status == 134
    assert outcome.summary().endswith("  what(): 4 vs 8")
    assert "SIGABRT" in outcome.summary()


def test_a_long_traceback_fits_on_a_screen(tmp_path: Path) -> None:
    error = "\n".join(["Traceback", *(f"  frame {i}" for i in range(500)), "ValueError: deep"])
    outcome = Outcome([failed(tmp_path, 0, 1, 1.0, error)], 2, 1.0, tmp_path)
    assert len(outcome.summary().splitlines()) <= 34
    assert outcome.summary().endswith("ValueError: deep")


def test_after_a_stop_that_was_asked_for_the_signal_is_no_failure(tmp_path: Path) -> None:
    exits = [failed(tmp_path, r, -signal.SIGTERM, 1.0) for r in range(2)]
    outcome = Outcome(exits, 2, 1.0, tmp_path, asked=signal.SIGINT)
    assert outcome.cause is None
    assert outcome.status == 130
    assert Outcome(exits, 2, 1.0, tmp_path).status == 143


def test_follow_on_errors_are_known() -> None:
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]")
    assert is_follow_on(gone)
    assert is_follow_on(PeerLostError("lost"))
    wrapped = ValueError("in the loop")
    wrapped.__cause__ = gone
    assert is_follow_on(wrapped)
    for own in (
        OutOfStepError("ranks differ"),
        WorldError("port in use"),
        ConnectionResetError("the file server: Connection reset by peer"),
        RuntimeError("shapes differ"),
    ):
        assert not is_follow_on(own)


# -- end to end --------------------------------------------------------------------------------


def test_a_good_run(script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(
        """
        meet()
        print("argv", sys.argv[1:], __name__)
        print("path", sys.path[0] == os.path.dirname(os.path.realpath(__file__)))
        print("own", rank, os.environ["OMP_NUM_THREADS"], "torch" in sys.modules)
        print("to stderr", file=sys.stderr)
        for i in range(3):
            print(f"\\rbar {i}", end="", flush=True)
        """
    )
    # What follows the script is the script's, untouched
    status, shown, _ = run([path, "-n", "--x", "--", "y z"], 3, log_dir=tmp_path / "logs")
    assert status == 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", max(1, (cores or 1) // 3))
    assert "[ranks 0-2] argv ['-n', '--x', '--', 'y z'] __main__\n" in shown
    assert "[ranks 0-2] path True\n" in shown
    assert f"[rank 1] own 1 {threads} False\n" in shown
    assert "[ranks 0-2] to stderr\n" in shown
    assert "[ranks 0-2] bar 2\n" in shown
    logs = sorted((tmp_path / "logs").glob("*/rank-*/stdout.log"))
    assert len(logs) == 3
    assert logs[2].read_bytes().endswith(b"\rbar 0\rbar 1\rbar 2")


def test_a_module_runs_as_with_plain_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "train.py").write_text(
        "import sys\nfrom pack import __name__ as p\nprint(p, __name__, sys.argv[1:])\n"
    )
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')\n")  # not the bootstrap's
    monkeypatch.chdir(tmp_path)
    status, shown, _ = run(["-m", "pack.train", "--lr", "1"], 1)
    assert (status, shown) == (0, "pack __main__ ['--lr', '1']\n")


def test_the_failing_ranks_own_error_is_last(script: Callable[[str], str]) -> None:
    path = script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a sibling that will not listen
        meet()
        print("working")
        if rank == 1:
            time.sleep(0.3)
            raise ValueError("boom on rank 1")
        time.sleep(60)
        """
    )
    status, shown, seconds = run([path], 3)
    assert status == 1
    assert seconds < 15  # they would sleep for 60 s; the start of Python counts too
    assert shown.startswith("[ranks 0-2] working\n")
    assert shown.count("boom on rank 1") == 2  # the source line and the message
    assert shown.endswith('raise ValueError("boom on rank 1")\nValueError: boom on rank 1\n')
    assert "2 other ranks stopped because of it." in shown
    assert "Rank 1 of 3" in shown
    assert "worker.py" not in shown


def test_exit_statuses_and_errors_of_our_own(script: Callable[[str], str]) -> None:
    path = script(
        """
        from oarlock.errors import NonFiniteError, PeerLostError
        if sys.argv[1] == "exit":
            sys.exit(7 if rank == 0 else 0)
        meet()
        if rank == 1:
            raise PeerLostError("rank 1 lost a peer")
        time.sleep(0.3)  # the follow-on error comes first; it is still not the cause
        raise NonFiniteError("loss is nan on rank 0\\nLook at row 3.")
        """
    )
    assert run([path, "exit"], 2)[0] == 7
    status, shown, _ = run([path, "ours"], 2)
    assert status == 5
    assert shown.endswith("NonFiniteError: loss is nan on rank 0\nLook at row 3.\n")
    assert "Traceback" not in shown
    assert "lost a peer" not in shown
    _, shown, _ = run([path, "ours"], 2, env={"OARLOCK_TRACEBACK": "1"})
    assert "Traceback" in shown


def test_a_killed_rank_and_a_crash_in_compiled_code(script: Callable[[str], str]) -> None:
    path = script(
        """
        if rank == 1 and sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            os.write(2, b"terminate called after throwing\\n  what():  size 4 vs 8\\n")
            os.abort()
        time.sleep(60)
        """
    )
    status, shown, seconds = run([path, "kill"], 2)
    assert (status, seconds < 15) == (137, True)
    assert "Rank 1 of 2" in shown.splitlines()[-1]
    assert "was killed by SIGKILL" in shown.splitlines()[-1]
    status, shown, _ = run([path, "abort"], 2)
    assert status == 134
    assert shown.endswith("terminate called after throwing\n  what():  size 4 vs 8\n")
    assert "killed by SIGABRT" in shown


def test_a_rank_that_the_others_waited_for_is_named(script: Callable[[str], str]) -> None:
    path = script(
        """
        from oarlock.errors import PeerLostError
        def stuck():
            time.sleep(60)
        meet()
        if rank == 1:
            stuck()
        raise PeerLostError(f"rank {rank} waited in vain")
        """
    )
    status, shown, seconds = run([path], 2)
    assert status == 4
    assert seconds < 15
    assert "  Rank 1 was still running, at:\n" in shown
    assert "in stuck\n" in shown
    assert shown.endswith("PeerLostError: rank 0 waited in vain\n")


def test_one_rank_alone_reads_like_plain_python(script: Callable[[str], str]) -> None:
    path = script("raise ValueError('alone')\n")
    status, shown, _ = run([path], 1)
    assert status == 1
    assert shown.startswith("Traceback")
    assert shown.endswith("ValueError: alone\n")
    assert shown.count("ValueError: alone") == 1


def test_with_gloo_the_peers_error_is_folded_away(script: Callable[[str], str]) -> None:
    path = script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(4)
        dist.all_reduce(total)
        print("sum", total[0].item(), flush=True)
        if rank == 1:
            raise ValueError("boom on rank 1")
        dist.all_reduce(total)
        """
    )
    status, shown, _ = run([path], 2)
    assert status == 1
    assert "[ranks 0-1] sum 2.0\n" in shown
    assert shown.endswith("ValueError: boom on rank 1\n")
    assert "onnection" not in shown
    assert "1 other rank stopped because of it." in shown


@pytest.mark.parametrize("n", [0, -1, 5000, "two", True])
def test_an_impossible_number_of_ranks(script: Callable[[str], str], n: int) -> None:
    with pytest.raises(UserError, match="number of ranks"):
        launch([script("")], n=n)


def test_targets_that_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x00")
    (tmp_path / "broken.py").write_text("def f(:\n")
    for target, words in (
        ([], "No script given"),
        (["-m"], "No script given"),
        (["-m", "no_such_module"], "No module named"),
        ([str(tmp_path)], "is a directory"),
        ([str(tmp_path / "none.py")], "No script"),
        ([str(tmp_path / "picture.png")], "Not a Python script"),
        ([str(tmp_path / "broken.py")], "broken.py, line 1"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            launch(target, n=1)
        assert "\n" not in str(caught.value)


def test_a_log_folder_that_cannot_be_written(tmp_path: Path, script: Callable[[str], str]) -> None:
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(UserError, match="Cannot write logs"):
        launch([script("")], n=1, log_dir=tmp_path / "file" / "logs")
    assert (tmp_path / "file").read_text() == "keep me"


# -- processes and signals ---------------------------------------------------------------------

CODE = (
    "import sys; from oarlock.launch.local import launch;"
    "sys.exit(launch(sys.argv[2:], n=int(sys.argv[1])))"
)


@pytest.fixture
def launcher() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts launchers as processes of their own, and ends them."""
    started: list[subprocess.Popen[str]] = []

    def start(n: int, *target: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(n), *target],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_first_signal_is_passed_on_once_and_the_ranks_end_in_order(
    launcher: Callable[..., subprocess.Popen[str]], script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script(
        """
        count = 0
        def note(*_):
            global count
            count += 1
        signal.signal(signal.SIGTERM, note)
        open(f"{sys.argv[1]}/ready-{rank}", "w").close()
        while not count:
            time.sleep(0.02)
        time.sleep(0.5)
        meet()
        print(f"saved after {count} signal")
        """
    )
    process = launcher(2, path, str(tmp_path))
    assert wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 60)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 0, shown
    assert "SIGINT received; asked the ranks to end" in shown
    assert "[ranks 0-1] saved after 1 signal" in shown
    assert shown.endswith("oarlock: All ranks ended in order.\n")


def test_a_second_signal_ends_all_ranks_at_once(
    launcher: Callable[..., subprocess.Popen[str]], script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{sys.argv[1]}/ready-{os.getpid()}", "w").close()
        time.sleep(60)
        """
    )
    process = launcher(2, path, str(tmp_path))
    assert wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 60)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=30)
    assert time.monotonic() - begin < 5
    assert process.returncode == 143, shown
    assert "second signal" in shown
    assert not any(alive(int(f.name[6:])) for f in tmp_path.glob("ready-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_launcher_leaves_no_orphan_not_even_a_data_worker(
    launcher: Callable[..., subprocess.Popen[str]], script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script(
        """
        import multiprocessing
        def work(folder):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(f"{folder}/pid-{os.getpid()}", "w").close()
            time.sleep(60)
        multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1],)).start()
        work(sys.argv[1])
        """
    )
    process = launcher(2, path, str(tmp_path))
    assert wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 4, 60)
    pids = [int(file.name[4:]) for file in tmp_path.glob("pid-*")]
    assert all(map(alive, pids))
    process.kill()
    assert wait_for(lambda: not any(map(alive, pids)), 5)


def test_two_launches_at_once(
    launcher: Callable[..., subprocess.Popen[str]], script: Callable[[str], str]
) -> None:
    path = script("time.sleep(1)\nprint('port', os.environ['MASTER_PORT'])\n")
    processes = [launcher(2, path), launcher(2, path)]
    shown = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], shown
    assert len(set(shown)) == 2  # each on a port of its own


def test_a_worker_whose_launcher_is_gone_does_not_begin(script: Callable[[str], str]) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    env = {**os.environ, "OARLOCK_LAUNCHER_PID": str(dead.pid)}
    done = subprocess.run([*WORKER, script("print('ran')")], env=env, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
