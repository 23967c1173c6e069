"""The run file: what is allowed, what is said about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from oarlock.config import dump, load
from oarlock.errors import ConfigError

GOOD = """\
[model]
path = "org/name"
[data]
train = "data.jsonl"
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text, "utf-8")
    return file


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text))
    return str(caught.value)


def test_defaults_and_paths_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    config = load(write(tmp_path, GOOD.replace("org/name", "llama")))
    assert config.model.path == str(tmp_path / "llama")
    assert config.data.train == str(tmp_path / "data.jsonl")
    assert config.output == tmp_path / "output"
    assert (config.train.method, config.train.lr, config.train.epochs) == ("lora", 2e-4, 1)
    assert load(write(tmp_path, GOOD)).model.path == "org/name"  # no such folder: a hub id


def test_dump_reads_back_as_the_same_run(tmp_path: Path) -> None:
    text = GOOD + (
        'columns = {prompt = "ask me", completion = "a\\"b\\\\"}\n'
        "[train]\nsteps = 7\nwarmup = 3\nlr = 1e-5\nclip_norm = 0\n"
        '[samples]\nprompts = ["tab\\t and ü \\u007f"]\n'
    )
    config = load(write(tmp_path, text))
    (tmp_path / "elsewhere").mkdir()
    again = write(tmp_path / "elsewhere", dump(config))
    assert load(again) == config
    full = load(write(tmp_path, GOOD + "[train]\nmethod = 'full'\n"))
    assert load(write(tmp_path, dump(full))) == full


def test_every_mistake_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    text = GOOD + (
        "eval_fraction = 1.0\n"
        "[train]\nlr = -1\nbatch_size = 0\nmicro_batch_size = 2.5\nwarmup = -1\n"
        'precision = "int8"\nkeep = "3"\nweight_decay = nan\nmerge = 1\n'
        "[lora]\ntargets = []\n"
    )
    message = refusal(tmp_path, text)
    assert message.splitlines()[0] == f"{tmp_path / 'run.toml'} has 10 mistakes:"
    for expected in (
        "line 5: data.eval_fraction is 1.0; it must be a number, at least 0 and below 1",
        "line 7: train.lr is -1; it must be a number, above 0",
        "line 8: train.batch_size is 0; it must be a whole number, at least 1",
        "line 9: train.micro_batch_size is 2.5; it must be a whole number, at least 1",
        "line 10: train.warmup is -1; it must be a whole number of steps",
        "line 11: train.precision is 'int8'; it must be one of 'fp32', 'bf16', 'fp16'",
        "line 12: train.keep is '3'; it must be a whole number, at least 1",
        "line 13: train.weight_decay is nan",
        "line 14: train.merge is 1; it must be true or false",
        "line 16: lora.targets is []; it must be a list of module names",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("[lora]\nranl = 4\n", "line 6: lora.ranl is unknown; did you mean lora.rank?"),
        ("[train]\nlora_rank = 4\n", "train.lora_rank is unknown; did you mean lora.rank?"),
        ("[lora]\nlr = 1.0\n", "lora.lr is unknown; did you mean train.lr?"),
        ("[trian]\nlr = 1.0\n", "trian is unknown; did you mean [train]?"),
        ("[train]\nzzzzzz = 1\n", "train.zzzzzz is unknown; known are: output, method"),
        ("[train.lr]\nx = 1\n", "train.lr is {'x': 1}; it must be a number"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, text: str, nearest: str) -> None:
    assert nearest in refusal(tmp_path, GOOD + text)


def test_a_misspelt_top_level_key_names_its_section(tmp_path: Path) -> None:
    assert "lora_ranl is unknown; did you mean lora.rank?" in refusal(
        tmp_path, "lora_ranl = 4\n" + GOOD
    )
    assert "line 1: train must be a section" in refusal(tmp_path, "train = 4\n" + GOOD)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nsteps = 5\nwarmup = 6\n", "warmup is 6 steps, more than train.steps = 5"),
        ("[train]\nsteps = 5\nepochs = 2\n", "give train.epochs or train.steps, not both"),
        ("[train]\nmethod = 'full'\nmerge = true\n", "merges an adapter"),
        ("[train]\nmethod = 'full'\n[lora]\nrank = 4\n", "[lora] has no effect"),
        ("eval = 'e.jsonl'\neval_fraction = 0.1\n", "data.eval or data.eval_fraction, not both"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, GOOD + text)


def test_files_that_are_no_run_file(tmp_path: Path) -> None:
    assert "is empty; it needs" in refusal(tmp_path, " \n")
    assert "not valid TOML" in refusal(tmp_path, "[model]\npath = \n")
    assert "line 2" in refusal(tmp_path, "[model]\npath = \n")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe[\x00m\x00")
    for path, said in (
        (tmp_path / "run.toml", "not a text file in UTF-8"),
        (tmp_path / "rum.toml", f"Did you mean {tmp_path / 'run.toml'}?"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert said in str(caught.value)
        assert caught.value.exit_status == 2


def test_missing_keys_say_what_they_are() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {})
    message = str(caught.value)
    assert "model.path is missing; a folder, a hub id or a GGUF file" in message
    assert "data.train is missing" in message


def test_overrides_are_typed_and_win(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD + "[train]\nepochs = 3\nlr = 0.5\n")
    config = load(
        file,
        {
            "train.lr": "1e-4",
            "train.steps": 10,
            "train.warmup": "0.1",
            "lora.targets": "q_proj, v_proj",
            "train.output": "5",
            "train.merge": "true",
            "train.seed": None,
        },
    )
    assert (config.train.lr, config.train.steps, config.train.epochs) == (1e-4, 10, None)
    assert config.lora.targets == ["q_proj", "v_proj"]
    assert config.output == Path.cwd() / "5"
    assert config.train.merge
    with pytest.raises(ConfigError, match=r"train.lr is 'fast'; it must be a number, above 0"):
        load(file, {"train.lr": "fast"})
    with pytest.raises(ConfigError, match=r"lora_ranl is unknown; did you mean lora.rank\?"):
        load(file, {"lora_ranl": 4})


def test_a_micro_batch_larger_than_the_batch_is_fine(tmp_path: Path) -> None:
    text = GOOD + "[train]\nbatch_size = 2\nmicro_batch_size = 8\n"
    assert load(write(tmp_path, text)).train.micro_batch_size == 8
