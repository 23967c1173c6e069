"""Each example, as a person would run it: the loss falls, on rank 0's screen alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LAUNCH = [str(Path(sys.executable).with_name("oarlock")), "launch", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(command: list[str], name: str, *arguments: str) -> str:
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> dict[int, float]:
    """Step -> loss; fails where a step is printed twice, as by two ranks."""
    found = re.findall(r"step (\d+): loss (\d+\.\d+)", output)
    assert len({step for step, _ in found}) == len(found), output
    return {int(step): float(loss) for step, loss in found}


def test_the_digits_are_told() -> None:
    pytest.importorskip("sklearn")
    output = run(LAUNCH, "digits.py", "--steps=60")
    found = re.search(r"told right: (\d+\.\d)% of 359", output)
    assert found, output
    assert float(found[1]) > 90
    assert losses(output)[60] < 0.3 * losses(output)[1]


def test_the_characters_are_learnt_alike_by_one_rank_and_by_two(tmp_path: Path) -> None:
    alone = losses(run([sys.executable], "characters.py", "--steps=20"))
    together = losses(run([*TORCHRUN, f"--log-dir={tmp_path}"], "characters.py", "--steps=20"))
    assert list(alone) == list(together) == [1, 10, 20]
    assert together[20] < 0.75 * together[1]
    assert together[1] == pytest.approx(alone[1], abs=2e-4)
    assert together[20] == pytest.approx(alone[20], rel=0.01)


def test_the_own_loop_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = f"--folder={tmp_path}"
    first = run(LAUNCH, "own_loop.py", "--steps=30", folder)
    second = run([sys.executable], "own_loop.py", "--steps=60", folder)
    assert list(losses(first)) == [1, 10, 20, 30]
    assert "going on after step 30" in second
    assert list(losses(second)) == [40, 50, 60]
    assert losses(second)[60] < 0.1 * losses(first)[1]
    evaluated = re.findall(r"step (\d+): test loss (\d+\.\d+) over 100 rows", first + second)
    assert [step for step, _ in evaluated] == ["30", "50", "60"]
    assert float(evaluated[2][1]) < float(evaluated[0][1])
