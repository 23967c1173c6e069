"""Random numbers as functions of (seed, epoch, step, micro-batch), never of rank or history."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from numpy.random import mtrand

_MASK = (1 << 64) - 1
_spare_generators: list[np.random.BitGenerator] = []


def mix(value: int) -> int:
    """Scramble a 64-bit integer (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """One 64-bit key from several integers; the order matters."""
    state = 0
    for part in parts:
        state = mix(state ^ (part & _MASK))
    return state


class Permutation:
    """A keyed permutation of range(n) with random access and no table.

    A balanced Feistel network over the next even number of bits; values that fall outside are
    walked on until they fall inside (Black and Rogaway, 2002). Memory does not grow with n.
    """

    ROUNDS = 6

    def __init__(self, n: int, key_: int) -> None:
        self.n = n
        bits = max(2, (max(n, 1) - 1).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(key(key_, i)) for i in range(self.ROUNDS)]

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for k in self._keys:
            f = (right ^ k) * np.uint64(0x9E3779B97F4A7C15)
            f = (f ^ (f >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            f = f ^ (f >> np.uint64(32))
            left, right = right, left ^ (f & self._mask)
        return (left << self._half) | right

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Where each position goes. ``positions``: integers in range(n), [k]. Returns int64 [k]."""
        x = self._encrypt(positions.astype(np.uint64))
        outside = x >= self.n
        while outside.any():
            x[outside] = self._encrypt(x[outside])
            outside = x >= self.n
        return x.astype(np.int64)


def seed_everything(key_: int, device: torch.device | None = None) -> None:
    """Seed torch on the host and on ``device``, ``random`` and NumPy's global generator.

    Not ``torch.manual_seed``: it seeds every kind of accelerator, also those that this machine has
    not, and notes a whole stack trace for each: 0.6 ms a micro-batch.
    """
    torch.default_generator.manual_seed(key_ >> 1)  # torch takes 63 bits
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(key_ >> 1)  # the current device, as joined
    random.seed(key_)
    np.random.seed(key_ & 0xFFFFFFFF)


@contextlib.contextmanager
def own_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Put all generators back afterwards: what runs inside leaves the caller's streams alone.

    Seed inside before drawing.
    """
    python_state = random.getstate()
    # NumPy's generator is exchanged whole, since copying it (or making one) is slow.
    numpy_generator = mtrand.get_bit_generator()
    spare = _spare_generators.pop() if _spare_generators else np.random.MT19937(0)
    mtrand.set_bit_generator(spare)
    accelerated = device is not None and device.type != "cpu"
    with torch.random.fork_rng(
        devices=[device.index or 0] if accelerated and device is not None else [],
        device_type=device.type if accelerated and device is not None else "cuda",
    ):
        try:
            yield
        finally:
            random.setstate(python_state)
            mtrand.set_bit_generator(numpy_generator)
            _spare_generators.append(spare)
