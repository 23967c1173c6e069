"""The 2-norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# torch's CPU norm adds float32 squares one after the other: over 14 million elements it is off by
# 5e-4. Dot products of pieces this long, added in float64, are right to 1e-8 and no slower.
_PIECE = 1 << 16


def global_norm(tensors: Sequence[Tensor]) -> float:
    """The 2-norm over all elements of ``tensors`` (any shapes and floating dtypes)."""
    if not tensors:
        return 0.0
    squares: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if flat.device.type != "cpu":  # accelerators reduce in a tree
            wide = torch.float32 if flat.dtype != torch.float64 else torch.float64
            squares.append(torch.linalg.vector_norm(flat, dtype=wide).square())
            continue
        if flat.dtype in (torch.float16, torch.bfloat16):
            flat = flat.float()
        squares.extend(torch.dot(piece, piece) for piece in flat.split(_PIECE))
    stacked = torch.stack([s.to(squares[0].dtype) for s in squares])
    if stacked.device.type != "mps":
        stacked = stacked.double()
    return math.sqrt(float(stacked.sum())) if stacked.numel() else 0.0
