"""A model folder, a tokenizer and data small enough to train in a second, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer(chat: bool = True) -> Any:
    """Bytes as tokens, <s>, </s>, <pad>, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """A Llama of 30 000 parameters with tied embeddings, saved with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_data(file: Path, rows: int = 20) -> Path:
    """Questions and answers of unequal length, as ``messages``."""
    lines = []
    for i in range(rows):
        question = f"What is {i} + {i}?" + " Please." * (i % 3)
        answer = f"It is {i + i}." + " Sure!" * (i % 4)
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": turns}))
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file
