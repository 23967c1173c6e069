"""Open a causal language model to train: from a folder, the hub or a GGUF file.

Weights are fp32 whatever the file holds: updates smaller than a 16-bit step would be lost, and
bf16 or fp16 are a matter of autocast. Whatever is wrong with a model is one ModelError.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oarlock import words
from oarlock.config import LoraSection, ModelSection
from oarlock.errors import ModelError
from oarlock.finetune.modelfiles import check_folder, check_gguf, resolve

_DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
)


@dataclass
class LoadedModel:
    """A model that is ready to train.

    Attributes:
        model: the module; for LoRA the peft model around it.
        tokenizer: as it came with the model.
        base: what the adapter's base is called: the hub id or the folder.
        base_description: one line for the terminal.
    """

    model: Any
    tokenizer: Any
    base: str
    base_description: str


def load_config(folder: Path, section: ModelSection) -> Any:
    """The model's configuration, checked to be of a causal language model.

    ``folder`` may be a GGUF file.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if folder.is_dir():
        check_folder(folder)
        raw = json.loads((folder / "config.json").read_text("utf-8"))
        own_code = raw.get("auto_map") or {}
        kind = raw.get("model_type")
        if own_code and kind not in CONFIG_MAPPING and not section.trust_remote_code:
            raise ModelError(
                f"{section.path} (model type {kind!r}) brings Python code of its own, which "
                "would be run here.\n"
                "If you trust it, set model.trust_remote_code = true."
            )
        if not own_code and kind not in CONFIG_MAPPING:
            close = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), 1)
            hint = f" (nearest: {close[0]!r})" if close else ""
            raise ModelError(
                f"{section.path}: model type {kind!r} is unknown to the installed "
                f"transformers{hint}."
            )
    with _as_model_error(section.path, "its configuration"):
        config = AutoConfig.from_pretrained(**_where(folder, section))
    remote = getattr(config, "auto_map", None) or {}
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known and not (section.trust_remote_code and "AutoModelForCausalLM" in remote):
        raise ModelError(
            f"{section.path} is a {getattr(config, 'model_type', '?')!r} model"
            f"{_architecture(config)}, not a causal language model.\n"
            "Fine-tuning here is for models that transformers opens with AutoModelForCausalLM."
        )
    return config


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None) or []
    return f" ({names[0]})" if names else ""


def _where(folder: Path, section: ModelSection) -> dict[str, Any]:
    """from_pretrained's arguments for a folder or a GGUF file."""
    if folder.suffix == ".gguf" and folder.is_file():
        return {"pretrained_model_name_or_path": str(folder.parent), "gguf_file": folder.name}
    return {
        "pretrained_model_name_or_path": str(folder),
        "trust_remote_code": section.trust_remote_code,
        "local_files_only": True,
    }


def load_tokenizer(folder: Path, section: ModelSection) -> Any:
    """The model's tokenizer. ``folder`` may be a GGUF file."""
    from transformers import AutoTokenizer

    with _as_model_error(section.path, "its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**_where(folder, section))
    if tokenizer is None or len(tokenizer) == 0:
        raise ModelError(f"{section.path}: it has no tokenizer (tokenizer.json is missing).")
    return tokenizer


@contextlib.contextmanager
def _as_model_error(path: str, what: str) -> Iterator[None]:
    """Whatever a library raises while opening a model is, to the user, one thing."""
    try:
        with quiet():
            yield
    except ModelError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{path}: not enough memory to load it: {error}") from None
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(
            f"{path}: {what} cannot be opened; is the model whole, and of a kind that the "
            f"installed transformers knows?\n({type(error).__name__}: {' '.join(lines[:2])[:300]})"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and notices of the libraries: a rank's output is ours."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # GGUF's bar knows no setting; it goes to stderr, where nothing else of use is said.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# -- loading ------------------------------------------------------------------------------------


def convert_gguf(file: Path, folder: Path, config: Any = None, tokenizer: Any = None) -> None:
    """Write a GGUF file's model as an ordinary folder, dequantised to fp32.

    ``config`` and ``tokenizer``, where they were read already, save half of the time.

    Ranks then load it in a second instead of half a minute each, and an adapter has a base that
    peft can open.
    """
    from oarlock.finetune.export import replace_folder

    section = ModelSection(path=str(file))
    check_gguf(file)
    config = config or load_config(file, section)
    tokenizer = tokenizer or load_tokenizer(file, section)
    model = _pretrained(file, section, config)
    # transformers refuses to save a model that still carries the quantiser it was read with.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with replace_folder(folder) as fresh, quiet():
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)


def _pretrained(folder: Path, section: ModelSection, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    extra = {"attn_implementation": section.attention} if section.attention else {}
    with _as_model_error(section.path, "its weights"):
        opened: Any = AutoModelForCausalLM.from_pretrained(
            **_where(folder, section),
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
            **extra,
        )
    model, info = opened
    for kind, what in (("missing_keys", "not in the file"), ("mismatched_keys", "of another size")):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in info[kind])
        if names:
            raise ModelError(
                f"{section.path}: {len(names)} of the model's weights are {what}, first: "
                f"{names[0]}.\nThe folder does not belong to this kind of model"
                f"{_architecture(config)}, or is damaged."
            )
    return model


def load_model(
    section: ModelSection,
    method: str = "full",
    lora: LoraSection | None = None,
    *,
    dropout: float | None = None,
    gradient_checkpointing: bool = False,
    seed: int = 0,
    converted: Path | None = None,
) -> LoadedModel:
    """Open the model and make it ready for training.

    Args:
        section: the run file's [model].
        method: 'full' trains all weights, 'lora' a peft adapter.
        lora: the adapter's settings.
        dropout: sets the model's own dropout; None leaves it.
        gradient_checkpointing: recompute activations in backward (non-reentrant always).
        seed: of the adapter's first weights.
        converted: see :func:`resolve`.

    Raises:
        ModelError: anything that is wrong with the model or the adapter's targets.
    """
    folder = resolve(section.path, converted)
    config = load_config(folder, section)
    if dropout is not None:
        set_dropout(config, dropout, section.path)
    tokenizer = load_tokenizer(folder, section)
    model = _pretrained(folder, section, config)
    if folder.suffix == ".gguf":
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    model.config.use_cache = False
    if gradient_checkpointing:
        with _as_model_error(section.path, "gradient checkpointing"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
    total = sum(p.numel() for p in model.parameters())
    base = str(folder) if Path(section.path).exists() else section.path
    if method == "lora":
        model = add_adapter(model, lora or LoraSection(), base, seed)
        # peft hides it; without this the embeddings' output carries no gradient to recompute from.
        if gradient_checkpointing:
            model.enable_input_require_grads()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kind = type(model.get_base_model() if method == "lora" else model).__name__
    description = (
        f"{section.path}: {kind}, {words.count(total)} parameters, "
        f"{words.count(trained)} of them trained"
        if method == "full"
        else f"{section.path}: {kind}, {words.count(total)} parameters + a LoRA adapter of "
        f"{words.count(trained)}"
    )
    return LoadedModel(model, tokenizer, base, description)


def set_dropout(config: Any, dropout: float, path: str) -> None:
    """Set every dropout that the model's configuration has."""
    names = [n for n in _DROPOUTS if isinstance(getattr(config, n, None), int | float)]
    if not names:
        raise ModelError(
            f"{path}: a {config.model_type!r} model has no dropout to set; remove train.dropout "
            "(lora.dropout is the adapter's own)."
        )
    for name in names:
        setattr(config, name, dropout)


def add_adapter(model: Any, lora: LoraSection, base: str, seed: int) -> Any:
    """Wrap the model with a LoRA adapter of peft; its first weights depend on ``seed`` alone."""
    from peft import LoraConfig, get_peft_model

    if lora.targets is not None:
        check_targets(model, lora.targets)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.targets or "all-linear",
    )
    model.name_or_path = base
    with torch.random.fork_rng(), _as_model_error(base, "a LoRA adapter on it"):
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, settings)
    wrapped.peft_config["default"].base_model_name_or_path = base
    return wrapped


def check_targets(model: Any, targets: list[str]) -> None:
    """Does each of lora.targets name at least one module?

    Raises:
        ModelError: with the nearest names that the model has.
    """
    names = [n for n, _ in model.named_modules() if n]
    leaves = sorted({n.rpartition(".")[2] for n in names if not n.rpartition(".")[2].isdigit()})
    for target in targets:
        if any(n == target or n.endswith("." + target) for n in names):
            continue
        near = difflib.get_close_matches(target, leaves, 3, 0.5)
        linear = sorted(
            {
                n.rpartition(".")[2]
                for n, m in model.named_modules()
                if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D"
            }
        )
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ModelError(
            f"lora.targets names {target!r}, but the model has no module of that name; {hint}\n"
            f"Its linear layers are: {', '.join(linear)}."
        )


def skeleton(config: Any, section: ModelSection) -> Any:
    """The model without weights (on the meta device): names and shapes, at no cost."""
    from transformers import AutoModelForCausalLM

    with _as_model_error(section.path, "its architecture"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, trust_remote_code=section.trust_remote_code, dtype=torch.float32
        )


def memory_of(model: Any) -> int:
    """Bytes of the parameters, tied ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def quiet_environment() -> None:
    """Libraries' bars and notices off, also in processes that are started from here."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
