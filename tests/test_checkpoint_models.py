"""Checkpoints of transformers and PEFT models: exact, and folders that those libraries read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import assert_same, fingerprint
from torch import nn

import oarlock
from oarlock.checkpoint import Checkpoints
from oarlock.errors import CheckpointError


def _llama(tie: bool = True, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=32, tie_word_embeddings=tie,
        )
    )  # fmt: skip


def _text_loss(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    logits = model(input_ids=ids).logits
    targets = ids[:, 1:]
    return (
        nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum"
        ),
        targets.numel(),
    )


def _train_text(model: Any, steps: int = 2) -> oarlock.DataParallel:
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine = oarlock.DataParallel(
        model, torch.optim.AdamW(trainable, lr=1e-2), oarlock.World("cpu")
    )
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        engine.step([torch.randint(0, 40, (2, 9), generator=g)], _text_loss)
    return engine


@pytest.mark.parametrize("tie", [True, False])
def test_a_transformers_checkpoint_is_a_model_folder(tmp_path: Path, tie: bool) -> None:
    """from_pretrained reads it; loading is exact, buffers that are not saved included."""
    from transformers import AutoModelForCausalLM

    engine = _train_text(_llama(tie))
    path = Checkpoints(tmp_path).save(engine)
    assert path is not None
    again = AutoModelForCausalLM.from_pretrained(path)
    for name, value in engine.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    other = _train_text(_llama(tie, seed=7), steps=1)
    Checkpoints(tmp_path).load(other)
    assert_same(fingerprint(other), fingerprint(engine))
    tensors = json.loads((path / "state.json").read_text())["model"]["tensors"]
    stored = {n: t["file"] for n, t in tensors.items()}
    assert stored["model.embed_tokens.weight"] == "model.safetensors"
    assert stored["model.rotary_emb.inv_freq"] == "extra.safetensors"
    size = sum(p.stat().st_size for p in path.glob("*.safetensors"))
    weights = sum(p.numel() * 4 for p in engine.model.parameters())
    assert size < 3.6 * weights  # the weights once, AdamW's two, and the names


def test_layers_compiled_one_by_one(tmp_path: Path) -> None:
    """The folder still has the names that from_pretrained knows."""
    from transformers import AutoModelForCausalLM

    model = _llama()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    engine = oarlock.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    path = Checkpoints(tmp_path).save(engine)
    again = AutoModelForCausalLM.from_pretrained(path)
    expected = _llama().state_dict()
    assert set(again.state_dict()) == set(expected)
    assert all(torch.equal(again.state_dict()[n], v) for n, v in expected.items())


def test_a_model_that_saves_badly_is_still_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """save_pretrained that fails or changes bits: our own exact copy is there."""
    engine = _train_text(_llama())

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("not serializable")

    monkeypatch.setattr(engine.model, "save_pretrained", refuse)
    Checkpoints(tmp_path / "a").save(engine)
    assert "save_pretrained failed (ValueError: not serializable)" in caplog.text

    def alter(folder: str, **_: Any) -> None:
        from safetensors.torch import save_file

        state = {k: v + 1 for k, v in engine.model.state_dict().items() if k != "lm_head.weight"}
        save_file(state, Path(folder) / "model.safetensors")

    monkeypatch.setattr(engine.model, "save_pretrained", alter)
    Checkpoints(tmp_path / "b").save(engine)
    for folder in ("a", "b"):
        other = _train_text(_llama(seed=3), steps=1)
        Checkpoints(tmp_path / folder).load(other)
        assert_same(fingerprint(other), fingerprint(engine))


def _adapted(base_seed: int = 0, seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    base = _llama(seed=base_seed)
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def test_an_adapter_is_stored_without_its_base(tmp_path: Path) -> None:
    """The folder is a PEFT adapter; loading is exact; another base model is refused by name."""
    from peft import PeftModel

    engine = _train_text(_adapted())
    path = Checkpoints(tmp_path).save(engine)
    assert path is not None
    base = sum(p.numel() * 4 for p in _llama().parameters())
    weights = (path / "trainable.safetensors").stat().st_size
    assert weights < base / 2
    assert not (path / "model.safetensors").exists()
    again = PeftModel.from_pretrained(_llama(), path)
    ids = torch.arange(8)[None]
    engine.model.eval()
    assert torch.equal(again(input_ids=ids).logits, engine.model(input_ids=ids).logits)

    other = _train_text(_adapted(seed=5), steps=1)
    Checkpoints(tmp_path).load(other)
    assert_same(fingerprint(other), fingerprint(engine))
    stranger = _train_text(_adapted(base_seed=9), steps=1)
    before = fingerprint(stranger)
    with pytest.raises(CheckpointError, match=r"another base model: .*embed_tokens\.weight"):
        Checkpoints(tmp_path).load(stranger)
    assert_same(fingerprint(stranger), before)
