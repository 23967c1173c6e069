"""Numbers for people, and numbers from people."""

from __future__ import annotations

import re

import numpy as np
import pytest

from oarlock import words
from oarlock.errors import ConfigError, whole_number


def test_sizes_and_counts() -> None:
    assert [words.size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30, 2048 << 40)] == [
        "0 bytes",
        "1,023 bytes",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "2,048.0 TiB",
    ]
    assert [words.count(n) for n in (512, 1500, 134_515_008, 7_200_000_000)] == [
        "512",
        "1.5 k",
        "134.5 M",
        "7.2 G",
    ]
    assert [words.many(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_any_kind(value: object) -> None:
    number = whole_number("batch_size", value, 1)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3", None, np.float32(3), [3]])
def test_what_is_no_whole_number(value: object) -> None:
    said = f"batch_size is {value!r}; it must be a whole number, at least 1."
    with pytest.raises(ConfigError, match=re.escape(said)):
        whole_number("batch_size", value, 1)
