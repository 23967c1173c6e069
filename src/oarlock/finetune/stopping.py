"""Ctrl-C and SIGTERM: finish the step, save, leave; a second one stops at once."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

_APART = 0.5  # a terminal and a launcher may both pass on one key press


class Stop:
    """Notes that a stop was asked for, and passes it to the engine once there is one.

    Attributes:
        asked: this rank was asked to stop. Ranks agree in the engine's step, or by a gather.
    """

    def __init__(self) -> None:
        self.asked = False
        self._first = 0.0
        self._engine: Any = None
        self._speaks = False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take over both signals of this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, engine: Any, speaks: bool) -> None:
        """From now on the engine is told. ``speaks``: this rank says so on the screen."""
        self._engine, self._speaks = engine, speaks
        if self.asked:
            engine.request_stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._first = True, time.monotonic()
            if self._engine is not None:
                self._engine.request_stop()
            if self._speaks:
                text = "\nStopping: this step is finished and saved first. Again: stops at once.\n"
                os.write(2, text.encode())
        elif time.monotonic() - self._first >= _APART:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
