"""One rank of the demo: the ordinary recipe, and a copy of the adapter after the third step."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from oarlock.config import load
from oarlock.engine.step import DataParallel, StepResult
from oarlock.finetune.recipe import run


def main(run_file: str, copy_to: str, copy_step: int, only: bool) -> int:
    """Run; after ``copy_step`` steps rank 0 writes the trained tensors. ``only``: end there."""

    def after_step(engine: DataParallel, result: StepResult) -> None:
        if result.step == copy_step and engine.world.is_main:
            tensors = {n: p.detach().cpu().clone() for n, p in engine.named_trainable.items()}
            save_file(tensors, Path(copy_to))

    return run(load(run_file), after_step=after_step, stop_after=copy_step if only else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), "--only" in sys.argv))
