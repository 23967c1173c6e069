"""Write the result as folders that transformers and peft load, and prove that they do.

What was written is read back from disk and compared with the model in memory, tensor by tensor
and by its logits, before anyone says "done".
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oarlock.errors import SaveError
from oarlock.finetune.model import quiet


@dataclass
class Exported:
    """What was written: the folder, what it is, and how to load it in one line of Python."""

    folder: Path
    what: str
    how: str


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Write a folder under a temporary name; it gets its real one when the block ends well."""
    fresh = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(fresh, folder)
    except OSError as error:
        raise SaveError(
            f"{folder}: cannot be written: {error.strerror or error}.\n"
            "Make room or choose another output folder; checkpoints are untouched, and "
            "`oarlock resume` exports again."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def export(
    model: Any,
    tokenizer: Any,
    output: Path,
    *,
    method: str,
    merge: bool,
    sample: torch.Tensor,
    end_token_ids: set[int],
    trust_remote_code: bool = False,
) -> list[Exported]:
    """Write the trained model, read it back and compare.

    Args:
        model: the live model; for LoRA the peft model.
        tokenizer: saved beside it, with the chat template that was trained.
        output: the run's folder; gets ``model/`` (full), or ``adapter/`` and, with ``merge``,
            ``model/``.
        sample: token ids for the comparison of logits. int64 [1, n].
        end_token_ids: tokens that end an answer; generation must stop at them.

    Raises:
        SaveError: nothing could be written, or what was written is not the model.
    """
    was_training = model.training
    model.eval()
    base = model.get_base_model() if method == "lora" else model
    use_cache, base.config.use_cache = base.config.use_cache, True
    _stop_at(base, end_token_ids)
    done = []
    try:
        if method == "full":
            done.append(_whole(base, tokenizer, output / "model", sample, trust_remote_code))
        else:
            done.append(_adapter(model, tokenizer, output / "adapter", sample))
            if merge:
                done.append(_merged(model, tokenizer, output / "model", sample, trust_remote_code))
    finally:
        base.config.use_cache = use_cache
        model.train(was_training)
    return done


def _stop_at(model: Any, end_token_ids: set[int]) -> None:
    settings = getattr(model, "generation_config", None)
    if settings is None or not end_token_ids:
        return
    now = settings.eos_token_id
    ids = [] if now is None else list(now) if isinstance(now, list) else [now]
    fresh = ids + sorted(end_token_ids - set(ids))
    settings.eos_token_id = fresh if len(fresh) > 1 else fresh[0]


def _whole(
    model: Any, tokenizer: Any, folder: Path, sample: torch.Tensor, trust_remote_code: bool
) -> Exported:
    from transformers import AutoModelForCausalLM

    again: Any
    with replace_folder(folder) as fresh:
        with quiet():
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
            with _reading(folder):
                again = AutoModelForCausalLM.from_pretrained(
                    str(fresh),
                    dtype=torch.float32,
                    trust_remote_code=trust_remote_code,
                    attn_implementation=model.config._attn_implementation,
                )
        _same_tensors(folder, dict(model.state_dict()), dict(again.state_dict()))
        _same_logits(folder, _logits(model, sample), _logits(again.to(sample.device), sample))
        _same_tokenizer(folder, tokenizer, fresh)
    return Exported(folder, "the whole model", f'AutoModelForCausalLM.from_pretrained("{folder}")')


def _adapter(model: Any, tokenizer: Any, folder: Path, sample: torch.Tensor) -> Exported:
    from peft import get_peft_model_state_dict

    live = get_peft_model_state_dict(model)
    want = _logits(model, sample)
    with replace_folder(folder) as fresh, quiet():
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        name = "read_back"
        with _reading(folder):
            model.load_adapter(str(fresh), adapter_name=name, is_trainable=False)
        try:
            _same_tensors(folder, live, get_peft_model_state_dict(model, adapter_name=name))
            model.set_adapter(name)
            _same_logits(folder, want, _logits(model, sample))
        finally:
            model.set_adapter("default")
            with contextlib.suppress(Exception):
                model.delete_adapter(name)
        empty = [n for n, t in live.items() if "lora_B" in n and not t.any()]
        if len(empty) == sum("lora_B" in n for n in live):
            raise SaveError(f"{folder}: the adapter is all zero: nothing was learnt into it.")
        _same_tokenizer(folder, tokenizer, fresh)
    how = f'AutoPeftModelForCausalLM.from_pretrained("{folder}")'
    return Exported(folder, "the LoRA adapter", how)


def _merged(
    model: Any, tokenizer: Any, folder: Path, sample: torch.Tensor, trust_remote_code: bool
) -> Exported:
    want = _logits(model, sample)
    # Merging adds to the weights and unmerging subtracts: copies keep the live model exact.
    import copy

    whole = copy.deepcopy(model).merge_and_unload()
    whole.config.use_cache = True
    _same_logits(folder, want, _logits(whole, sample), tolerance=1e-3)
    done = _whole(whole, tokenizer, folder, sample, trust_remote_code)
    return Exported(done.folder, "base and adapter merged", done.how)


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise SaveError(
            f"{folder}: what was written cannot be read back.\n"
            f"({type(error).__name__}: {lines[0][:300]})"
        ) from error


def _same_tensors(folder: Path, live: dict[str, Any], disk: dict[str, Any]) -> None:
    """Names, shapes and bits."""
    missing = sorted(set(live) ^ set(disk))
    if missing:
        raise SaveError(
            f"{folder}: read back, {len(missing)} tensors are missing or new, first: {missing[0]}."
        )
    for name, tensor in live.items():
        other = disk[name]
        if tensor.shape != other.shape:
            raise SaveError(
                f"{folder}: read back, {name} has shape {tuple(other.shape)}, "
                f"the trained one {tuple(tensor.shape)}."
            )
        if not torch.equal(tensor.detach().cpu(), other.detach().cpu()):
            raise SaveError(f"{folder}: read back, {name} differs from the trained weights.")


@torch.no_grad()
def _logits(model: Any, sample: torch.Tensor) -> torch.Tensor:
    """Logits of the sample, in the model's own precision. float32 [1, n, vocabulary]"""
    model.eval()
    return model(input_ids=sample, use_cache=False).logits.float()


def _same_logits(
    folder: Path, want: torch.Tensor, got: torch.Tensor, tolerance: float = 1e-4
) -> None:
    worst = ((want - got).abs().max() / want.abs().max().clamp_min(1e-12)).item()
    if not worst <= tolerance:
        raise SaveError(
            f"{folder}: read back, it gives other logits than the trained model "
            f"(largest difference {worst:.2g} of the largest logit)."
        )


def _same_tokenizer(folder: Path, tokenizer: Any, fresh: Path) -> None:
    from transformers import AutoTokenizer

    with _reading(folder), quiet():
        again = AutoTokenizer.from_pretrained(str(fresh), local_files_only=True)
    text = "Oarlock: 1 + 1 = 2.\n  déjà vu"
    if again(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise SaveError(f"{folder}: read back, the tokenizer gives other tokens.")
    if again.chat_template != tokenizer.chat_template:
        raise SaveError(f"{folder}: read back, the tokenizer has another chat template.")


def estimate_bytes(
    weights: int, trained: int, *, method: str, merge: bool, keep: int, gguf: bool
) -> int:
    """Bytes that a run leaves on disk at most: checkpoints (with one being written), results."""
    checkpoint = trained * 3 if method == "lora" else weights + trained * 2
    result = trained if method == "lora" else weights
    return checkpoint * (keep + 1) + result + weights * (merge + gguf)


Progress = Callable[[str], None]
