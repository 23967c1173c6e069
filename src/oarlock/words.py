"""Numbers as a person reads them."""

from __future__ import annotations


def size(bytes_: float) -> str:
    """A size in binary units: '980 bytes', '1.5 MiB'."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if bytes_ >= 1 << power:
            return f"{bytes_ / (1 << power):,.1f} {unit}"
    return f"{bytes_:,.0f} bytes"


def count(number: float) -> str:
    """A large number in short: '512', '1.5 k', '134.5 M', '7.2 G'."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:,.1f} {unit}"
    return f"{number:,.0f}"


def many(number: int, noun: str, ending: str = "s") -> str:
    """'1 step', '2 steps', '3 batches'."""
    return f"{number:,} {noun}{ending * (number != 1)}"
