"""PyTorch's own DDP tests, run against Oarlock's engine; docs/peers.md tells about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from applies import APPLIES, DOES_NOT
from harness import Runner, ddp_tests

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)

# The tests come with the installed PyTorch, and change with it.
pytestmark = pytest.mark.skipif(
    PINNED is None or torch.__version__.split("+")[0] != PINNED[1],
    reason="PyTorch is not the version that constraints.txt pins",
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", APPLIES)
def test_passes(runner: Runner, name: str, ranks: int) -> None:
    failure = runner(name, ranks=ranks)
    assert failure is None, failure


@pytest.mark.parametrize("name", APPLIES)
def test_fails_with_a_broken_adapter(runner: Runner, name: str) -> None:
    failure = runner(name, APPLIES[name], timeout=5)
    assert failure is not None, f"{name} passes although {APPLIES[name].__doc__}"
    # in a rank, by an error or by waiting for the others; not skipped
    assert re.search("exited with error code|timed out", failure), failure


def test_the_table_names_each_ddp_test_once() -> None:
    listed = [*APPLIES, *(name for names in DOES_NOT.values() for name in names)]
    assert len(listed) == len(set(listed))
    assert set(listed) == ddp_tests()


def test_the_page_says_what_the_table_says() -> None:
    page = (ROOT / "docs" / "peers.md").read_text("utf-8")
    applying, others = page.split("## What does not apply")
    assert re.findall(r"`(test_\w+)`", applying) == list(APPLIES)
    said = re.findall(r"^\*\*(.+)\*\*\n\n((?:- `test_\w+`\n)+)", others, re.M)
    assert [(reason, tuple(re.findall(r"test_\w+", names))) for reason, names in said] == list(
        DOES_NOT.items()
    )
    assert f"{len(APPLIES)} of {len(ddp_tests())}" in page
