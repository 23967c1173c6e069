"""Answers of the model to a few prompts, greedily, as a user would ask them."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def answer(
    model: Any,
    encoder: Any,
    messages: list[dict[str, str]],
    *,
    max_tokens: int = 64,
    device: torch.device | str = "cpu",
) -> str:
    """The model's answer to a conversation, without randomness.

    Args:
        model: a transformers or peft causal LM; its mode is put back afterwards.
        encoder: gives the prompt's text by the chat template, and the tokens that end an answer.
        messages: the conversation so far, ending with the user's turn.
        max_tokens: at most so many new tokens.
    """
    text = encoder.prompt_text(messages)
    tokenizer = encoder.tokenizer
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"].to(device)
    return _generate(model, tokenizer, ids, _ends(model, encoder), max_tokens, encoder.pad.id)


@torch.no_grad()
def continue_text(
    model: Any,
    encoder: Any,
    text: str,
    *,
    max_tokens: int = 64,
    device: torch.device | str = "cpu",
) -> str:
    """What the model writes after plain ``text`` (for models trained without a chat template)."""
    ids = encoder.tokenizer(text, return_tensors="pt")["input_ids"].to(device)
    ends = _ends(model, encoder)
    return _generate(model, encoder.tokenizer, ids, ends, max_tokens, encoder.pad.id)


def _ends(model: Any, encoder: Any) -> list[int]:
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(encoder.end_token_ids)
    ids |= set(own) if isinstance(own, list) else set() if own is None else {own}
    if encoder.tokenizer.eos_token_id is not None:
        ids.add(encoder.tokenizer.eos_token_id)
    return sorted(ids)


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
