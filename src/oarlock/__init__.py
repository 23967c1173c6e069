"""Oarlock: exact, fast and loud data-parallel training for PyTorch.

The public names; each is loaded when it is first used, so that `import oarlock` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oarlock.batches import Batch as Batch
    from oarlock.batches import Loader as Loader
    from oarlock.batches import MicroBatch as MicroBatch
    from oarlock.checkpoint import Checkpoints as Checkpoints
    from oarlock.engine.step import DataParallel as DataParallel
    from oarlock.engine.step import StepResult as StepResult
    from oarlock.world import World as World
    from oarlock.world import join as join

__version__ = "0.1.0"

_HOMES = {
    "join": "oarlock.world",
    "World": "oarlock.world",
    "Loader": "oarlock.batches",
    "Batch": "oarlock.batches",
    "MicroBatch": "oarlock.batches",
    "DataParallel": "oarlock.engine.step",
    "StepResult": "oarlock.engine.step",
    "Checkpoints": "oarlock.checkpoint",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'oarlock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
