"""Precision: what a forward computes in, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from oarlock.errors import SetupError

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast around the loss function; weights and gradients keep their own dtype.

    In fp16 small gradients vanish, so the loss is multiplied by a dynamic scale: halved when the
    summed gradient overflows (that update is skipped), doubled after ``GROWTH_STEPS`` good ones
    (Micikevicius et al., 2018). It follows from the *global* gradient, which is the same on all
    ranks, so all ranks agree on it without a message.
    """

    GROWTH_STEPS = 2000
    SMALLEST_SCALE = 2.0**-14

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in PRECISIONS:
            raise SetupError(f"precision is {name!r}; it must be one of {', '.join(PRECISIONS)}.")
        self.name, self.device, self.dtype = name, device, PRECISIONS[name]
        self.scale = 65536.0 if name == "fp16" else 1.0
        self.good_steps = 0
        self.skipped = 0  # updates in a row

    def autocast(self) -> Any:
        """The context in which a forward runs."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""
        return loss if self.scale == 1.0 else loss.float() * self.scale

    def overflowed(self) -> bool:
        """The gradient was not finite. True: the scale was lowered, skip this update and go on.

        False where no scale helps: the numbers themselves are bad.
        """
        if self.name != "fp16" or self.scale <= self.SMALLEST_SCALE:
            return False
        self.scale /= 2
        self.good_steps = 0
        self.skipped += 1
        return True

    def succeeded(self) -> None:
        """An update was made."""
        if self.name != "fp16":
            return
        self.skipped = 0
        self.good_steps += 1
        if self.good_steps >= self.GROWTH_STEPS:
            self.scale *= 2
            self.good_steps = 0
