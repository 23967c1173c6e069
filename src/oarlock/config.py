"""The run file: one TOML file that says what to fine-tune, on what, and how.

Every number is about the whole run, not about a rank: the same file gives the same run on one
device or eight. All mistakes are reported at once, each with its place and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oarlock.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]
CountOrNever = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Strict: no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ModelSection(Section):
    """[model]: what is trained.

    Attributes:
        path: a local folder, a hub id, or a GGUF file.
        trust_remote_code: run the Python code that comes with the model.
        attention: transformers' attention implementation ('sdpa', 'eager', 'flash_attention_2').
    """

    path: Annotated[str, Field(min_length=1)]
    trust_remote_code: bool = False
    attention: str | None = None


class DataSection(Section):
    """[data]: what it is trained on. ``eval`` is a file of its own, ``eval_fraction`` a split."""

    train: Annotated[str, Field(min_length=1)]
    eval: Annotated[str, Field(min_length=1)] | None = None
    eval_fraction: Fraction = 0.0
    train_split: str = "train"
    eval_split: str = "validation"
    layout: Literal["auto", "messages", "prompt", "text"] = "auto"
    columns: dict[str, str] | None = None
    chat_template: str | None = None
    max_length: Annotated[int, Field(ge=2)] = 1024
    truncate: Literal["stop", "cut", "drop"] = "stop"
    packing: bool = False
    on_bad: Literal["stop", "skip"] = "stop"
    drop_duplicates: bool = False
    workers: CountOrNever = 0

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if self.eval is not None and self.eval_fraction > 0:
            raise ValueError("give data.eval or data.eval_fraction, not both")
        return self


class TrainSection(Section):
    """[train]: how it is trained, and where results go. ``batch_size`` is the global batch."""

    output: Annotated[str, Field(min_length=1)] = "output"
    method: Literal["full", "lora"] = "lora"
    epochs: PositiveFloat | None = None
    steps: PositiveInt | None = None
    batch_size: PositiveInt = 16
    micro_batch_size: PositiveInt = 4
    lr: PositiveFloat | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: CountOrNever | Fraction = 0.03
    weight_decay: Decay = 0.0
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    clip_norm: Decay = 1.0  # 0: no clipping
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    ranks: PositiveInt | None = None
    gradient_checkpointing: bool = False
    dropout: Fraction | None = None
    save_every: CountOrNever = 100
    keep: PositiveInt = 3
    eval_every: CountOrNever = 0
    log_every: PositiveInt = 1
    tensorboard: bool = False
    nonfinite: Literal["stop", "skip", "continue"] = "stop"
    guard_every: CountOrNever = 100
    merge: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TrainSection:
        wrong = []
        if self.epochs is not None and self.steps is not None:
            wrong.append("give train.epochs or train.steps, not both")
        if isinstance(self.warmup, int) and self.steps is not None and self.warmup > self.steps:
            wrong.append(
                f"train.warmup is {self.warmup} steps, more than train.steps = {self.steps}"
            )
        if self.merge and self.method == "full":
            wrong.append("train.merge merges an adapter; with train.method = 'full' there is none")
        if wrong:
            raise ValueError("\n".join(wrong))
        if self.epochs is None and self.steps is None:
            self.epochs = 1.0
        if self.lr is None:
            self.lr = 2e-4 if self.method == "lora" else 2e-5
        return self


class LoraSection(Section):
    """[lora]: the adapter. ``targets``: names of modules; by default all linear layers but the
    head."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0
    targets: Annotated[list[str], Field(min_length=1)] | None = None


class SamplesSection(Section):
    """[samples]: answers shown before and after. Without prompts, held-out rows are asked."""

    prompts: list[Annotated[str, Field(min_length=1)]] | None = None
    count: CountOrNever = 2
    max_tokens: PositiveInt = 64


class RunConfig(Section):
    """The whole run file."""

    model: ModelSection
    data: DataSection
    train: TrainSection = Field(default_factory=TrainSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    samples: SamplesSection = Field(default_factory=SamplesSection)

    @property
    def output(self) -> Path:
        """Where everything of this run is written."""
        return Path(self.train.output)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "lora": LoraSection,
    "samples": SamplesSection,
}
KEYS = [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields]
# Keys that hold a path: absolute afterwards, so that it does not matter where ranks start.
_PATHS = {"model.path", "data.train", "data.eval", "data.chat_template", "train.output"}


def load(path: str | Path | None, overrides: dict[str, object] | None = None) -> RunConfig:
    """Read and check a run file.

    Args:
        path: the TOML file; None takes everything from ``overrides``.
        overrides: 'section.key' to value, as from the command line. A string is read as the key's
            type wants it: '1e-4' is a number for train.lr. None values are left out.

    Raises:
        ConfigError: with every mistake in it.
    """
    table: dict[str, Any] = {}
    text, name = "", "The command line"
    if path is not None:
        name = str(path)
        text, table = _read(Path(path))
    mistakes: list[str] = []
    for section, values in list(table.items()):
        if section not in SECTIONS:
            mistakes.append(_at(text, "", section) + _unknown("", section))
            del table[section]
        elif not isinstance(values, dict):
            mistakes.append(
                f"{_at(text, '', section)}{section} must be a section, written as [{section}]"
            )
            del table[section]
    base = Path(path).resolve().parent if path is not None else Path.cwd()
    _absolute(table, base)
    given: dict[str, dict[str, object]] = {}
    for key, value in (overrides or {}).items():
        if value is None:
            continue
        section, _, leaf = key.partition(".")
        if key not in KEYS:
            mistakes.append(_unknown(section if leaf else "", leaf or section))
            continue
        given.setdefault(section, {})[leaf] = _typed(key, value)
    _absolute(given, Path.cwd())
    for section, values in given.items():
        table.setdefault(section, {}).update(values)
        _drop_rivals(table[section], values)
    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(table)
    except ValidationError as error:
        mistakes += _explain(error, text, given)
    if config is not None and config.train.method == "full" and table.get("lora"):
        mistakes.append(
            _at(text, "", "lora") + "[lora] has no effect with train.method = 'full'; remove it, "
            "or set train.method = 'lora'"
        )
    if config is not None:
        config.train.output = str((base / Path(config.train.output).expanduser()).resolve())
    if mistakes:
        if len(mistakes) == 1:
            raise ConfigError(f"{name}: {mistakes[0]}" + "." * (not mistakes[0].endswith("?")))
        lines = "\n".join(f"  {m}" for m in mistakes)
        raise ConfigError(f"{name} has {len(mistakes)} mistakes:\n{lines}")
    assert config is not None
    return config


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, near, 1)
        hint = f" Did you mean {path.parent / close[0]}?" if close else ""
        raise ConfigError(f"{path}: no such run file.{hint}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder; a run file (TOML) is expected.\n"
            f"To go on with a run in that folder: oarlock resume {path}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); a run file is TOML."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise ConfigError(
            f"{path} is empty; it needs at least [model] with path and [data] with train."
        )
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _typed(key: str, value: object) -> object:
    """A command line's string as the key's type wants it."""
    section, _, leaf = key.partition(".")
    if not isinstance(value, str):
        return str(value) if isinstance(value, Path) else value
    annotation = str(SECTIONS[section].model_fields[leaf].annotation)
    if "list[" in annotation or "dict[" in annotation:
        if not value.lstrip().startswith(("[", "{")):
            return [v.strip() for v in value.split(",") if v.strip()]
    elif "str" in annotation or "Literal" in annotation:
        return value
    try:
        return tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return value


def _drop_rivals(section: dict[str, Any], given: dict[str, object]) -> None:
    """A flag wins over the file's rival key: --steps 10 replaces the file's epochs."""
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in given and other not in given:
            section.pop(other, None)


def _absolute(table: dict[str, Any], base: Path) -> None:
    for key in _PATHS:
        section, _, leaf = key.partition(".")
        value = table.get(section, {}).get(leaf)
        if not isinstance(value, str) or not value or value == "chatml":
            continue
        local = base / Path(value).expanduser()
        looks_local = value.startswith((".", "/", "~")) or value.endswith((".gguf", ".jinja"))
        # 'org/name' that is no local path is a hub id; a file's name has an ending.
        data_file = key.startswith("data.") and Path(value).suffix in _DATA_ENDINGS
        if key == "train.output" or local.exists() or looks_local or data_file:
            table[section][leaf] = str(local.resolve())


_DATA_ENDINGS = {".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".ndjson"}


def _unknown(section: str, key: str) -> str:
    """'unknown key' with the nearest known one, also in other sections."""
    full = f"{section}.{key}" if section else key
    flat = {k.replace(".", "_"): k for k in KEYS} | {k: k for k in KEYS}
    leaves: dict[str, list[str]] = {}
    for k in KEYS:
        leaves.setdefault(k.partition(".")[2], []).append(k)
    own = (
        {}
        if section not in SECTIONS
        else {k: f"{section}.{k}" for k in SECTIONS[section].model_fields}
    )
    sections = {} if section else {s: f"[{s}]" for s in SECTIONS}
    if key in flat or key in leaves:
        right = [flat[key]] if key in flat else leaves[key]
        return f"{full} is unknown; did you mean {' or '.join(right)}?"
    for names, cutoff in (
        (own | sections, 0.7),
        (flat, 0.75),
        ({k: v[0] for k, v in leaves.items()}, 0.6),
    ):
        close = difflib.get_close_matches(key, list(names), 1, cutoff)
        if close:
            return f"{full} is unknown; did you mean {names[close[0]]}?"
    known = ", ".join(SECTIONS[section].model_fields if section in SECTIONS else SECTIONS)
    return f"{full} is unknown; known are: {known}"


def _at(text: str, section: str, key: str) -> str:
    """'line N: ' of a key (or of a section, with ``section`` empty), '' where it is not found."""
    here = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        if header:
            here = header[1]
            if not section and here.split(".")[0] == key:
                return f"line {number}: "
        elif re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line) and here == section:
            return f"line {number}: "
    return ""


def _explain(error: ValidationError, text: str, given: dict[str, dict[str, object]]) -> list[str]:
    """Pydantic's errors in our words, one a key."""
    lines: dict[str, str] = {}
    for e in error.errors():
        where = [str(p) for p in e["loc"] if isinstance(p, int) or p in SECTIONS or "[" not in p]
        section, key = where[0], where[1] if len(where) > 1 else ""
        name = f"{section}.{key}" if key else section
        place = "" if key in given.get(section, {}) else _at(text, section, key)
        if e["type"] == "extra_forbidden":
            lines.setdefault(name, place + _unknown(section, key))
        elif e["type"] == "missing":
            missing = name if key else ", ".join(_required(section))
            lines.setdefault(name, f"{missing} is missing; {_HELP.get(missing, 'it is needed')}")
        elif e["type"] == "value_error":
            for message in str(e["ctx"]["error"]).split("\n"):
                lines.setdefault(message, message)
        else:
            value = e["input"]
            allowed = _allowed(section, key, e)
            lines.setdefault(name, f"{place}{name} is {value!r}; it must be {allowed}")
    return list(lines.values())


def _required(section: str) -> list[str]:
    fields = SECTIONS[section].model_fields
    return [f"{section}.{k}" for k, field in fields.items() if field.is_required()]


_HELP = {
    "model.path": "a folder, a hub id or a GGUF file",
    "data.train": "a file (JSONL, JSON, CSV, Parquet), a folder of these, or a hub id",
}
# What is allowed, where pydantic's own words would be about its machinery.
_ALLOWED = {
    "train.warmup": "a whole number of steps (0 or more) or a fraction of all steps (0 to below 1)",
    "train.betas": "two numbers, each 0 to below 1, such as [0.9, 0.999]",
    "train.seed": "a whole number, 0 to 2**63 - 1",
    "lora.targets": "a list of module names, such as ['q_proj', 'v_proj']",
    "samples.prompts": "a list of texts that are not empty",
    "data.columns": "a table of names, such as {prompt = 'question', completion = 'answer'}",
}


def _allowed(section: str, key: str, error: Any) -> str:
    name = f"{section}.{key}"
    if name in _ALLOWED:
        return _ALLOWED[name]
    if not key:
        return f"a section, written as [{section}]"
    annotation = str(SECTIONS[section].model_fields[key].rebuild_annotation())
    choices = re.search(r"Literal\[([^\]]*)\]", annotation)
    if choices:
        return f"one of {choices[1]}"
    if "bool" in annotation:
        return "true or false"
    bounds = [
        f"{word} {value.group(1)}"
        for mark, word in (("ge", "at least"), ("gt", "above"), ("lt", "below"), ("le", "at most"))
        if (value := re.search(rf"\b{mark}=([\w.+-]+?)[,)]", annotation))
    ]
    kind = "a whole number" if "int" in annotation else "a number" if "float" in annotation else ""
    if kind:
        return " ".join([kind + ("," if bounds else ""), " and ".join(bounds)]).strip()
    return "a text that is not empty"


def dump(config: RunConfig) -> str:
    """The configuration as TOML: everything that was used, defaults included."""
    out = ["# Written by Oarlock: the settings that this run used.\n"]
    for section in SECTIONS:
        if section == "lora" and config.train.method == "full":
            continue
        out.append(f"[{section}]\n")
        for key, value in getattr(config, section):
            if value is not None:
                out.append(f"{key} = {_toml(value)}\n")
        out.append("\n")
    return "".join(out)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"no TOML for {type(value).__name__}")
