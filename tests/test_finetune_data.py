"""Packing, padding, the loss, and the whole way from a file to data sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_tokenizer

from oarlock.errors import ConfigError, DataError, ModelError
from oarlock.finetune import loss as loss_module
from oarlock.finetune.collate import Collator
from oarlock.finetune.examples import Example
from oarlock.finetune.loss import causal_lm_loss
from oarlock.finetune.packing import Packed, check_packing, pack
from oarlock.finetune.prepare import prepare

VOCABULARY = 200


def tiny_model(family: str, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.gpt2 import GPT2Config
    from transformers.models.llama import LlamaConfig
    from transformers.models.mistral import MistralConfig
    from transformers.models.qwen2 import Qwen2Config

    torch.manual_seed(0)
    if family == "gpt2":
        config: Any = GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    else:
        kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mistral": MistralConfig}[family]
        more = {"sliding_window": 4} if family == "mistral" else {}
        config = kind(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **more,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # larger weights, so that attention to a wrong row shows
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.train()


def example(length: int, seed: int, trained: float = 0.5) -> Example:
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCABULARY, length, dtype=np.int32)
    labels = np.where(random.random(length) < trained, ids, np.int32(-100))
    labels[0] = -100
    return Example(ids, labels.astype(np.int32), f"f:{seed}")


def plain_loss(model: Any, one: Example) -> torch.Tensor:
    """The sum of token losses the plainest way: one row, all logits."""
    ids = torch.from_numpy(one.input_ids).long()[None]
    labels = torch.from_numpy(one.labels).long()
    logits = model(input_ids=ids).logits[0]
    return torch.nn.functional.cross_entropy(
        logits[:-1].float(), labels[1:], ignore_index=-100, reduction="sum"
    )


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        scale = float(one[name].abs().max()) + 1e-3
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mistral"])
def test_packed_and_padded_rows_have_their_own_losses(family: str, attention: str) -> None:
    model = tiny_model(family, attention)
    rows = [example(n, n) for n in (9, 5, 7, 1, 12, 2)]
    expected = sum(plain_loss(model, row) for row in rows)
    assert isinstance(expected, torch.Tensor)
    wanted = gradients(model, expected)
    groups = [[rows[0], rows[1], rows[2]], [rows[3], rows[4]], [rows[5]]]
    for items in (rows, groups, [rows]):
        batch = Collator(pad_id=3)(items)  # type: ignore[arg-type]
        total, weight = causal_lm_loss(model, batch)
        assert weight == sum(row.n_targets for row in rows)
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)
        assert_same_gradients(wanted, gradients(model, total))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mistral"])
def test_the_packing_check_passes_models_that_keep_rows_apart(family: str) -> None:
    model = tiny_model(family)
    check_packing(model)
    assert model.training


def test_the_packing_check_refuses_a_model_that_mixes_rows() -> None:
    model = tiny_model("llama")
    forward = model.forward

    def deaf(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = deaf
    with pytest.raises(ModelError, match="packed rows see each other"):
        check_packing(model)


def test_no_row_is_predicted_from_the_one_before() -> None:
    rows = [example(4, 1, trained=1.0), example(3, 2, trained=1.0)]
    batch = Collator(pad_id=0)([rows, rows[:1]])
    assert batch["labels"][0].ne(-100).tolist() == [False, True, True, True, False, True, True]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2]]
    assert "attention_mask" not in batch
    assert batch["n_targets"] == 8
    assert batch["keep"].tolist() == [0, 1, 2, 4, 5]


@given(st.lists(st.integers(1, 50), max_size=200))
@settings(deadline=None, max_examples=100)
def test_packing_holds_every_row_once_and_wastes_little(lengths: list[int]) -> None:
    groups = pack(lengths, 50)
    assert Counter(row for group in groups for row in group) == Counter(range(len(lengths)))
    loads = [sum(lengths[row] for row in group) for group in groups]
    assert all(load <= 50 for load in loads)
    # Any two groups together are over the limit, or they would have been one.
    assert len(loads) < 2 or sum(sorted(loads)[:2]) > 50
    assert groups == pack(np.array(lengths, dtype=np.int64), 50)


def test_packing_a_row_that_cannot_fit() -> None:
    with pytest.raises(ValueError, match="51 tokens does not fit into 50"):
        pack([3, 51], 50)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("chunk", [1024, 4])
def test_the_loss_equals_the_one_from_all_logits(
    lora: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", chunk)
    model = tiny_model("llama")
    if lora:
        import peft

        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).train()
    rows = [example(n, n) for n in (9, 5, 12)]
    expected = sum(plain_loss(model, row) for row in rows)
    assert isinstance(expected, torch.Tensor)
    wanted = gradients(model, expected)
    asked: list[Any] = []
    base = model.get_base_model() if lora else model
    base.lm_head.register_forward_hook(lambda m, args, out: asked.append(out.shape[1]))
    batch = Collator(pad_id=0)(rows)
    total, _ = causal_lm_loss(model, batch)
    assert asked == [len(batch["keep"])]  # logits nowhere else
    assert len(batch["keep"]) < batch["labels"].shape[1]
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(wanted, gradients(model, total))
    # From labels alone, as somebody's own collate function would give them.
    total, weight = causal_lm_loss(model, {k: batch[k] for k in ("input_ids", "labels")})
    assert weight == batch["n_targets"]
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_that_gives_all_logits() -> None:
    inner = tiny_model("llama")

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any, attention_mask: Any, use_cache: bool = True) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)

    batch = Collator(pad_id=0)([example(9, 1), example(5, 2)])
    total, _ = causal_lm_loss(Plain(), batch)
    assert total.item() == pytest.approx(causal_lm_loss(inner, batch)[0].item(), rel=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_no_target_gives_zero_with_a_graph(packed: bool) -> None:
    model = tiny_model("llama")
    rows = [example(4, 1, trained=0.0), example(1, 2, trained=0.0)]
    total, weight = causal_lm_loss(model, Collator(pad_id=0)([rows] if packed else rows))  # type: ignore[arg-type]
    assert (total.item(), weight) == (0.0, 0)
    found = gradients(model, total)
    assert found
    assert all(bool((g == 0).all()) for g in found.values())


def write(path: Path, rows: list[Any]) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def pair(n: int) -> dict[str, str]:
    return {"prompt": f"question {n}:", "completion": f" answer {n}"}


FUNNEL = [
    *[pair(n) for n in range(10)],
    '{"broken',
    {"prompt": "x", "completion": 1},
    {"prompt": "x", "completion": " "},
    {"prompt": "p" * 100, "completion": "no room"},
    {"prompt": "p", "completion": "c" * 100},
    pair(3),
    pair(3),
]


def test_the_funnel_accounts_for_every_row(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", FUNNEL)
    prepared = prepare(
        file,
        tokenizer=byte_tokenizer(),
        max_length=40,
        on_bad="skip",
        drop_duplicates=True,
        eval_fraction=0.2,
        rejects=tmp_path / "out",
    )
    funnel = prepared.report.funnels["train"]
    assert funnel == {
        "read": 17, "broken": 2, "empty": 1, "no target": 0, "too long": 2, "duplicate": 2,
        "held out": 2, "used": 8,
    }  # fmt: skip
    assert funnel["read"] == sum(n for name, n in funnel.items() if name != "read")
    assert len(prepared.train) == 8
    assert prepared.eval is not None
    assert len(prepared.eval) == 2
    lines = prepared.report.lines()
    assert lines[0].split("  ")[-1].strip() == "used"
    assert lines[1].split() == ["train", "17", "2", "1", "0", "2", "2", "2", "8"]
    rejects = [json.loads(x) for x in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(r["source"], r["kind"]) for r in rejects] == [
        (f"{file}:11", "json"),
        (f"{file}:12", "type"),
        (f"{file}:13", "empty"),
        (f"{file}:14", "too long"),
        (f"{file}:15", "too long"),
    ]
    assert rejects[0]["row"] == '{"broken'
    assert json.loads(json.dumps(prepared.report.to_dict()))["funnels"]["train"] == funnel


def test_cutting_instead_of_losing(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", FUNNEL)
    prepared = prepare(
        file, tokenizer=byte_tokenizer(), max_length=40, truncate="cut", on_bad="skip"
    )
    funnel = prepared.report.funnels["train"]
    assert (funnel["no target"], funnel["too long"], funnel["duplicate"]) == (1, 0, 0)
    assert funnel["used"] == 13
    assert prepared.report.numbers["truncated"] == 1
    assert prepared.report.end_supervised_share == pytest.approx(12 / 13)
    text = "\n".join(prepared.report.lines())
    assert "1 rows cut to max_length 40" in text
    assert "note: 2 × duplicate row, kept" in text


def test_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", FUNNEL)
    with pytest.raises(DataError) as caught:
        prepare(file, tokenizer=byte_tokenizer(), max_length=40, rejects=tmp_path / "out")
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{file}: 5 of 17 rows cannot be used: 1 broken JSON, 1 wrong type, ")
    assert f"(first at {file}:11)" in first
    assert f"{file}:14: 108 tokens, 68 over max_length 40" in str(caught.value)
    assert "on_bad = 'skip'" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_both_sources_are_checked_before_stopping(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [pair(0), "{"])
    evaluation = write(tmp_path / "eval.jsonl", ["[]", pair(1)])
    with pytest.raises(DataError) as caught:
        prepare(train, eval_source=evaluation, tokenizer=byte_tokenizer())
    assert f"{train}:2: Expecting property name" in str(caught.value)
    assert f"{evaluation}:1: the row is a list" in str(caught.value)
    options = {"tokenizer": byte_tokenizer(), "on_bad": "skip", "rejects": tmp_path}
    for _ in range(2):  # a second run writes the file anew
        prepare(train, eval_source=evaluation, **options)  # type: ignore[arg-type]
        assert len((tmp_path / "rejects.jsonl").read_text().splitlines()) == 2


def test_rejects_that_cannot_be_written(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", FUNNEL)
    with pytest.raises(DataError, match=r"rejects\.jsonl: cannot be written: Not a directory"):
        prepare(file, tokenizer=byte_tokenizer(), on_bad="skip", rejects=file)


def test_all_answers_cut_off_is_an_error_in_any_case(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} is a long prompt", "completion": "x"} for n in range(3)]
    file = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"3 of 3 rows cannot be used: 3 no target tokens"):
        prepare(file, tokenizer=byte_tokenizer(), max_length=8, truncate="cut")
    with pytest.raises(DataError, match=r"none of the 3 rows can be used(.|\n)*rows.jsonl:1"):
        prepare(file, tokenizer=byte_tokenizer(), max_length=8, truncate="cut", on_bad="skip")


def test_no_end_token_trained_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b" * 20}])
    with pytest.raises(DataError, match="All 1 rows were cut to max_length 8"):
        prepare(file, tokenizer=byte_tokenizer(), max_length=8, truncate="cut")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write(tmp_path / "chats.jsonl", [{"messages": chat}])
    endless = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(ModelError, match=r"No row's end token is trained \(0 %\)"):
        prepare(file, tokenizer=byte_tokenizer(template=endless))


def test_pad_equal_to_end(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [pair(n) for n in range(4)])
    prepared = prepare(file, tokenizer=byte_tokenizer(pad="<|im_end|>"))
    assert prepared.report.end_supervised_share == 1.0
    assert "end token trained in 100.0% of the rows" in prepared.report.lines()
    end = prepared.encoder.tokenizer.eos_token_id
    batch = prepared.collate(list(prepared.train))  # type: ignore[arg-type]
    assert (batch["labels"] == end).sum(dim=1).tolist() == [1] * 4


def test_a_turn_that_ends_with_another_token_than_the_text_is_reported(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write(tmp_path / "rows.jsonl", [{"messages": chat}])
    prepared = prepare(file, tokenizer=byte_tokenizer(eos="<|endoftext|>"))
    assert any("generation has to stop at both" in line for line in prepared.report.lines())


def test_held_out_rows_depend_on_the_seed_and_never_overlap(tmp_path: Path) -> None:
    rows = [pair(n % 25) for n in range(50)]  # every row twice
    file = write(tmp_path / "rows.jsonl", rows)

    def parts(seed: int) -> tuple[list[str], list[str]]:
        prepared = prepare(file, tokenizer=byte_tokenizer(), eval_fraction=0.2, seed=seed)
        assert prepared.eval is not None
        return [e.source for e in prepared.train], [e.source for e in prepared.eval]  # type: ignore[union-attr]

    train, held = parts(0)
    assert len(held) == 10
    assert sorted(train + held) == sorted(f"{file}:{n}" for n in range(1, 51))
    numbers = [{int(s.rsplit(":", 1)[1]) % 25 for s in part} for part in (train, held)]
    assert not numbers[0] & numbers[1]
    assert parts(0) == (train, held)
    assert parts(1)[1] != held


def test_small_sets(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [pair(n) for n in range(3)])
    prepared = prepare(file, tokenizer=byte_tokenizer(), eval_fraction=0.05)
    assert prepared.eval is None
    assert prepared.eval_lengths is None
    assert any("0.05 of 3 different rows is none" in line for line in prepared.report.lines())
    prepared = prepare(file, tokenizer=byte_tokenizer(), eval_fraction=0.99)
    assert len(prepared.train) == 1  # one row always remains to be trained
    assert len(prepared.show(3)) == 1


def test_separate_evaluation_data(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [pair(n) for n in range(6)])
    evaluation = write(tmp_path / "eval.jsonl", [pair(5), pair(6)])
    options: dict[str, Any] = {"tokenizer": byte_tokenizer(), "eval_source": evaluation}
    prepared = prepare(train, **options)
    assert len(prepared.train) == 6
    assert prepared.eval is not None
    assert len(prepared.eval) == 2
    found = prepared.report.findings["train"]
    assert found.examples["shared"][0].line() == f"{train}:6: the same as {evaluation}:1"
    prepared = prepare(train, drop_duplicates=True, **options)
    assert len(prepared.train) == 5
    assert prepared.report.funnels["train"]["duplicate"] == 1
    assert prepared.report.funnels["eval"]["used"] == 2
    with pytest.raises(DataError, match="every row is also in the evaluation data"):
        prepare(evaluation, drop_duplicates=True, **options)


def test_packing_the_whole_way(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [pair(n) for n in range(30)])
    prepared = prepare(
        file, tokenizer=byte_tokenizer(), packing=True, max_length=64, eval_fraction=0.1
    )
    assert isinstance(prepared.train, Packed)
    assert isinstance(prepared.eval, Packed)
    sources = Counter(e.source for group in prepared.train for e in group)
    sources += Counter(e.source for group in prepared.eval for e in group)
    assert sources == Counter(f"{file}:{n}" for n in range(1, 31))
    assert prepared.lengths.max() <= 64
    assert prepared.lengths.tolist() == [sum(map(len, group)) for group in prepared.train]
    batch = prepared.collate([prepared.train[0], prepared.train[1]])
    assert batch["position_ids"].shape == batch["input_ids"].shape
    assert prepared.show(1)[0].startswith(f"{file}:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad": "ignore"}, "on_bad = 'ignore'"),
        ({"eval_fraction": 1.0}, "eval_fraction = 1.0"),
        ({"eval_fraction": -0.1}, "eval_fraction = -0.1"),
        ({"eval_fraction": 0.1, "eval_source": "x.jsonl"}, "exclude each other"),
        ({"max_length": 0}, "max_length = 0"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "rows.jsonl", [pair(0)])
    with pytest.raises(ConfigError, match=message):
        prepare(file, tokenizer=byte_tokenizer(), **options)
