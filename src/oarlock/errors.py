"""Every error that Oarlock raises for a person to read.

A message's first line says what happened and where; the lines under it say what to do. Each class
carries the exit status that the command line ends with.
"""

from __future__ import annotations

import operator
from typing import Any


class OarlockError(Exception):
    """Base class. ``exit_status`` is what a command ends with when this error reaches the top."""

    exit_status = 1


class UserError(OarlockError):
    """Something that the user gave is wrong: an argument, a run file, data, a path."""

    exit_status = 2


class ConfigError(UserError):
    """A run file or an argument is wrong. Names the file, the key and what is allowed."""


class DataError(UserError):
    """Training data is wrong. Names file and line."""


class ModelError(UserError):
    """A model folder, file or id cannot be used."""


class SetupError(UserError):
    """Model, optimizer and engine do not fit together; found at the latest in the first step."""


class WorldError(OarlockError):
    """The ranks could not be brought together: environment, ports, devices, missing peers."""

    exit_status = 3


class OutOfStepError(OarlockError):
    """Ranks are not doing the same thing: other step, other batch, one of them left."""

    exit_status = 4


class NonFiniteError(OarlockError):
    """A loss or gradient is not finite. Names rank, micro-batch, rows, the first bad tensor."""

    exit_status = 5


class DivergedError(OarlockError):
    """Replicas no longer hold the same bits. Names the first tensor, the odd rank and the step."""

    exit_status = 6


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to something else. Names the file."""


class SaveError(OarlockError):
    """A checkpoint could not be written; the last good one is untouched."""

    exit_status = 7


class PeerLostError(OutOfStepError):
    """Another rank is gone. Its own error is the cause; this one only follows from it."""


def whole_number(name: str, value: Any, least: int, hint: str = "") -> int:
    """``value`` as an int; NumPy's integers are whole numbers too, booleans are not.

    Raises:
        ConfigError: not a whole number, or below ``least``. ``hint`` ends the sentence.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ConfigError(
            f"{name} is {value!r}; it must be a whole number, at least {least}{hint}."
        )
    return number
