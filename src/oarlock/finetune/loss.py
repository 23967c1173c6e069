"""The sum of token losses, with logits only where a token is trained."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from oarlock.finetune.examples import IGNORED

CHUNK = 1024  # positions whose logits are widened to fp32 at a time


def causal_lm_loss(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """``(loss_sum, weight)``: cross-entropy summed over the targets, and how many there are.

    ``batch`` as made by :class:`oarlock.finetune.collate.Collator`; ``keep`` and ``n_targets`` are
    worked out here where they are missing. Without any target the sum is zero and backward works.
    """
    labels = batch["labels"]
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # what each position predicts
    wanted = targets != IGNORED
    keep = batch.get("keep")
    if keep is None:
        keep = wanted.any(dim=0).nonzero().flatten()
    weight = batch.get("n_targets")
    if weight is None:
        weight = int(wanted.sum())
    if keep.numel() == 0:
        keep = torch.zeros(1, dtype=torch.long)  # a model has to return something
    keep = keep.to(labels.device)

    inputs = {
        name: batch[name]
        for name in ("input_ids", "attention_mask", "position_ids")
        if batch.get(name) is not None
    }
    if _accepts_logits_to_keep(model):
        inputs["logits_to_keep"] = keep
    # A cache would cost memory and hide from transformers that rows are packed.
    logits = model(**inputs, use_cache=False).logits
    if logits.shape[1] == labels.shape[1] != keep.numel():
        logits = logits[:, keep]
    wanted, targets = wanted[:, keep], targets[:, keep]
    return _summed(logits[wanted], targets[wanted]), int(weight)


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in fp32, recomputed by chunks in backward so that few fp32 copies are alive."""
    if len(targets) <= CHUNK:
        return _cross_entropy(logits, targets)
    parts = [
        checkpoint(_cross_entropy, x, y, use_reentrant=False, preserve_rng_state=False)
        for x, y in zip(logits.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.stack(parts).sum()


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _accepts_logits_to_keep(model: torch.nn.Module) -> bool:
    """Whether the model's own forward, below PEFT and compile, takes ``logits_to_keep``."""
    model = getattr(model, "_orig_mod", model)
    get_base = getattr(model, "get_base_model", None)
    base = get_base() if callable(get_base) else model
    return _has_argument(type(base).forward, "logits_to_keep")


@functools.cache
def _has_argument(forward: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(forward).parameters
