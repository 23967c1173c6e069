"""Answers of the model to a few prompts, greedily, as a user would ask them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oarlock.finetune.chat import RefusedError
from oarlock.finetune.examples import IGNORED

if TYPE_CHECKING:
    from oarlock.config import RunConfig
    from oarlock.finetune.prepare import Prepared


@dataclass(frozen=True)
class Prompt:
    """What the model is asked: the tokens, the text to show, and the answer it was taught."""

    ids: list[int]
    shown: str
    taught: str = ""


def prompts_of(config: RunConfig, prepared: Prepared) -> list[Prompt]:
    """The run file's prompts, or the first rows that were held out (else of the training rows)."""
    encoder, samples = prepared.encoder, config.samples
    tokenizer = encoder.tokenizer
    if samples.prompts is not None:
        out = []
        for text in samples.prompts:
            whole = text
            chat = encoder.chat_template is not None
            if chat:
                whole = encoder.prompt_text([{"role": "user", "content": text}])
            ids = tokenizer(whole, add_special_tokens=not chat)["input_ids"]
            out.append(Prompt(list(ids), text))
        return out
    rows: Any = prepared.eval if prepared.eval is not None else prepared.train
    rows = getattr(rows, "examples", rows)
    out = []
    for i in range(min(samples.count, len(rows))):
        row = rows[i]
        start = int(np.argmax(row.labels != IGNORED))
        if start < 2:
            continue  # plain text: there is no question in it
        end = start + int(np.argmin(np.append(row.labels[start:] != IGNORED, False)))
        ids = row.input_ids.tolist()
        shown = _question(encoder, ids[:start])
        taught = tokenizer.decode(ids[start:end], skip_special_tokens=True).strip()
        out.append(Prompt(ids[:start], shown, taught))
    return out


def _question(encoder: Any, ids: list[int]) -> str:
    """The words of a lone question to a chat model; any other prompt as it is."""
    text = str(encoder.tokenizer.decode(ids, skip_special_tokens=False))
    if encoder.chat_template is not None:
        mark = "oarlock-question"
        try:
            asked = encoder.prompt_text([{"role": "user", "content": mark}])
        except RefusedError:
            return text
        head, found, tail = asked.partition(mark)
        inside = text.removeprefix(head).removesuffix(tail)
        if found and len(inside) == len(text) - len(head) - len(tail):
            return inside.strip()
    return text.strip()


def answers(
    model: Any, encoder: Any, prompts: list[Prompt], max_tokens: int, device: torch.device | str
) -> list[str]:
    """The model's answer to each prompt, without randomness."""
    ends = _ends(model, encoder)
    return [
        _generate(
            model,
            encoder.tokenizer,
            torch.tensor([prompt.ids], device=device),
            ends,
            max_tokens,
            encoder.pad.id,
        )
        for prompt in prompts
    ]


def _ends(model: Any, encoder: Any) -> list[int]:
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(encoder.end_token_ids)
    ids |= set(own) if isinstance(own, list) else set() if own is None else {own}
    if encoder.tokenizer.eos_token_id is not None:
        ids.add(encoder.tokenizer.eos_token_id)
    return sorted(ids)


@torch.no_grad()
def _generate(
    model: Any, tokenizer: Any, ids: torch.Tensor, ends: list[int], max_tokens: int, pad: int
) -> str:
    was_training = model.training
    model.eval()
    try:
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            use_cache=True,
            eos_token_id=ends or None,
            pad_token_id=pad,
            temperature=None,
            top_p=None,
            top_k=None,
        )
    finally:
        model.train(was_training)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
