"""Reading rows: every kind of damage is named by file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oarlock.errors import ConfigError, DataError
from oarlock.finetune.findings import Findings
from oarlock.finetune.rows import Row, read_rows

GOOD = {"prompt": "a question", "completion": "an answer"}


def write(path: Path, *lines: Any) -> Path:
    """Lines as they are where they are bytes, as JSON otherwise."""
    raw = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def read(source: Any, **options: Any) -> tuple[list[Row], Findings]:
    findings = Findings()
    return list(read_rows(source, findings, **options)), findings


def only(findings: Findings, kind: str) -> str:
    """The one finding's line, after making sure that it is the only one."""
    assert dict(findings.counts) == {kind: 1}
    return findings.examples[kind][0].line()


def chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"says {role}"} for role in roles]}


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        (b'{"prompt": "x", "completion": ', "json", "Expecting value at column 31"),
        (b'{"prompt": "x" "completion": "y"}', "json", "Expecting ',' delimiter"),
        (b"[" * 100_000, "json", "nested too deeply"),
        (b'{"prompt": 1' + b"0" * 5000 + b"}", "json", ""),
        (["a", "list"], "object", "a list, not an object"),
        (b"null", "object", "null, not an object"),
        (b'{"prompt": "x\0", "completion": "y"}', "nul", "NUL byte at column 14"),
        ('{"prompt": "caf\xe9", "completion": "y"}'.encode("latin-1"), "encoding", "'é'"),
        (b'{"prompt": "\\ud83d", "completion": "y"}', "encoding", "surrogate"),
        ({"prompt": "x"}, "field", "'completion' is missing; the fields are 'prompt'"),
        ({"prompt": "x", "completion": None}, "field", "'completion' is null"),
        ({"prompt": "x", "completion": ""}, "empty", "'completion' is empty"),
        ({"prompt": " \n", "completion": "y"}, "empty", "'prompt' is empty"),
        ({"prompt": "x", "completion": 42}, "type", "'completion' is a number, not a string"),
        ({"prompt": ["x"], "completion": "y"}, "type", "'prompt' is a list, not a string"),
        ({"text": "another layout"}, "layout", "'text' in a file of 'prompt' (see "),
        ({"question": "x", "answer": "y"}, "layout", "the fields are 'question', 'answer'"),
        (b"{}", "layout", "the fields are none"),
    ],
)
def test_a_bad_row_is_named_by_line_and_the_others_are_read(
    tmp_path: Path, line: Any, kind: str, reason: str
) -> None:
    file = write(tmp_path / "rows.jsonl", *[GOOD] * 6, line, GOOD)
    rows, findings = read(file)
    shown = only(findings, kind)
    assert shown.startswith(f"{file}:7: ")
    assert reason in shown
    assert [row.source for row in rows] == [f"{file}:{n}" for n in (1, 2, 3, 4, 5, 6, 8)]
    assert (findings.read, findings.lost) == (8, 1)
    problem = findings.problem(str(file))
    assert problem is not None
    assert re.match(rf"{file}: 1 of 8 rows cannot be used: 1 .* \({file}:7\)\.\n", problem)


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (chat("user", "system", "assistant"), "role", "turn 2 is 'system': allowed only first"),
        (chat("user", "bot"), "role", "turn 2 has the unknown role 'bot'"),
        (chat("system", "user"), "no target", "no assistant turn"),
        ({"messages": []}, "empty", "empty list"),
        ({"messages": "hello"}, "type", "'messages' is a string"),
        ({"messages": {"role": "user"}}, "type", "'messages' is an object"),
        ({"messages": ["hello"]}, "type", "turn 1 is a string"),
        ({"messages": [{"role": "user"}]}, "field", "turn 1 has no 'content'"),
        ({"messages": [{"content": "x"}]}, "field", "turn 1 has no 'role'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role", "unknown role ['user']"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
            "empty",
            "content of turn 2 (assistant) is empty",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            "type",
            "content of turn 1 (user) is a list, not a string",
        ),
    ],
)
def test_bad_chats(tmp_path: Path, row: Any, kind: str, reason: str) -> None:
    file = write(tmp_path / "rows.jsonl", chat("user", "assistant"), row)
    rows, findings = read(file)
    shown = only(findings, kind)
    assert shown.startswith(f"{file}:2: ")
    assert reason in shown
    assert len(rows) == 1


def test_notes_do_not_cost_the_row(tmp_path: Path) -> None:
    empty_system = chat("system", "user", "assistant")
    empty_system["messages"][0]["content"] = ""
    file = write(
        tmp_path / "rows.jsonl",
        b"\xef\xbb\xbf" + json.dumps(chat("user", "assistant")).encode(),
        b"   ",
        chat("user", "assistant", "user"),
        empty_system,
    )
    rows, findings = read(file)
    assert findings.counts == {"bom": 1, "blank": 1, "last turn": 1, "empty system": 1}
    assert findings.lost == 0
    assert findings.read == len(rows) == 3
    # What follows the last answer cannot be trained and is left out.
    assert [m["role"] for m in rows[1].data["messages"]] == ["user", "assistant"]
    assert findings.problem(str(file)) is None


def test_json_list_names_lines_and_stops_where_it_breaks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[\n  {"text": "one"},\n  {"text": "two"},\n\n  {"text": 3}\n]\n')
    rows, findings = read(file)
    assert [row.source for row in rows] == [f"{file}:2", f"{file}:3"]
    assert only(findings, "type").startswith(f"{file}:5: ")

    file.write_text('[\n {"text": "one"},\n {"text": "two"}\n {"text": "three"}]')
    rows, findings = read(file)
    assert len(rows) == 2
    shown = only(findings, "json")
    assert shown.startswith(f"{file}:4: expected ',' or ']'")
    assert "rest of the file" in shown

    file.write_text('[{"text": "one"}, {"text": "tw')
    rows, findings = read(file)
    assert len(rows) == 1
    assert findings.counts == {"json": 1}


def test_json_that_holds_one_row_or_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('{\n "text": "one"\n}')
    assert [row.data for row in read(file)[0]] == [{"text": "one"}]
    write(file, {"text": "one"}, {"text": "two"})
    assert [row.source for row in read(file)[0]] == [f"{file}:1", f"{file}:2"]


def test_a_list_in_a_jsonl_file_gets_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('[\n{"text": "one"}\n]\n')
    _, findings = read(file)
    assert "name it .json" in findings.examples["json"][0].reason


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(
        b"\xef\xbb\xbfprompt,completion\r\n"
        b'"a, b","two\nlines"\r\n'  # lines 2 and 3
        b"42,007\r\n"  # stays text
        b"\r\n"
        b"only one\r\n"  # line 6
        b"x,caf\xe9\r\n"
        b"x,\r\n"
        b"x,y\r\n"
    )
    rows, findings = read(file)
    assert [row.data["completion"] for row in rows] == ["two\nlines", "007", "y"]
    assert [row.source for row in rows] == [f"{file}:{n}" for n in (2, 4, 9)]
    assert findings.counts == {"bom": 1, "blank": 1, "table": 1, "encoding": 1, "empty": 1}
    assert findings.examples["table"][0].line().startswith(f"{file}:6: 1 columns, the header has 2")
    assert findings.examples["encoding"][0].source == f"{file}:7"
    assert findings.read == 6


def test_csv_with_an_open_quote_does_not_swallow_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('text\none\n"two\nthree\nfour\n')
    rows, findings = read(file)
    assert len(rows) == 1
    assert only(findings, "table").startswith(f"{file}:3: ")


@pytest.mark.parametrize(
    ("header", "reason"),
    [(b'te"xt', "expected after"), (b"te\xffxt", "0xFF at column 3"), (b"text,text", "twice")],
)
def test_csv_with_a_bad_header(tmp_path: Path, header: bytes, reason: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes((b'"' if b'"' in header else b"") + header + b"\none\n")
    with pytest.raises(DataError, match=f"rows.csv:1: .*{reason}"):
        read(file)


@pytest.mark.parametrize(("name", "delimiter"), [("rows.csv", ";"), ("rows.tsv", "\t")])
def test_other_delimiters(tmp_path: Path, name: str, delimiter: str) -> None:
    file = tmp_path / name
    file.write_text(f"prompt{delimiter}completion\nq{delimiter}a\n")
    assert [row.data for row in read(file)[0]] == [{"prompt": "q", "completion": "a"}]


def test_csv_holds_chats_as_json(tmp_path: Path) -> None:
    import csv

    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as handle:
        csv.writer(handle).writerows(
            [["messages"], [json.dumps(chat("user", "assistant")["messages"])]]
        )
    assert read(file)[0][0].data == chat("user", "assistant")


def test_parquet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import datasets

    file = tmp_path / "rows.parquet"
    turns = [*chat("user", "assistant")["messages"]]
    turns[1]["name"] = "extra"  # null in the other turn's struct, and gone again after reading
    datasets.Dataset.from_list([{"messages": turns}, {"messages": []}]).to_parquet(file)
    rows, findings = read(file)
    assert rows[0].data["messages"] == turns
    assert rows[0].source == f"{file}:1"
    assert only(findings, "empty").startswith(f"{file}:2: ")

    file.write_bytes(file.read_bytes()[:-20])
    capfd.readouterr()
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(file)
    assert capfd.readouterr() == ("", "")  # no line of a library's own beside ours


def test_folder_in_sorted_order_with_a_layout_for_each_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "2.jsonl", {"text": "third"})
    write(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "a2.csv").write_text("text\nsecond\n")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.jsonl").write_text("not data")
    rows, findings = read(tmp_path)
    assert [row.layout for row in rows] == ["prompt", "text", "text"]
    assert [Path(row.source).name for row in rows] == ["a.jsonl:1", "a2.csv:2", "2.jsonl:1"]
    assert not findings.counts


def test_what_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="the folder holds no data"):
        read(tmp_path)
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(DataError, match=r"unknown kind of file.*\.jsonl"):
        read(tmp_path / "rows.txt")
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.tsv"):
        for content in ("", "\n\n"):
            (tmp_path / name).write_text(content)
            with pytest.raises(DataError, match=f"{name}: the file is empty"):
                read(tmp_path / name)
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD), encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        read(tmp_path / "rows.jsonl")


def test_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        if name == "some/missing":
            raise ConnectionError("no network\nmore")
        return datasets.Dataset.from_list([{"text": "one"}, {"text": ""}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows, findings = read("some/set:small", split="test")
    assert asked == [("some/set", "small", "test")]
    assert [row.source for row in rows] == ["some/set:small[test]:1"]
    assert only(findings, "empty").startswith("some/set:small[test]:2: ")
    with pytest.raises(DataError, match=r"some/missing: no such file.*hub.*: no network$"):
        read("some/missing")


def test_columns_and_layout_options(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"question": "q", "answer": "a", "text": "t", "id": 1})
    assert read(file)[0][0].data == {"text": "t"}
    names = {"prompt": "question", "completion": "answer"}
    assert read(file, columns=names)[0][0].data == {"prompt": "q", "completion": "a"}
    assert read(file, columns=names, layout="text")[0][0].data == {"text": "t"}
    with pytest.raises(ConfigError, match="'prmpt' is no field"):
        read(file, columns={"prmpt": "question"})
    with pytest.raises(ConfigError, match="layout = 'chat'"):
        read(file, layout="chat")


def test_only_the_first_examples_of_a_kind_are_shown(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", *[b"{"] * 9, GOOD)
    _, findings = read(file)
    lines = findings.lines()
    assert lines[0] == "lost: 9 × broken JSON"
    assert sum(line.startswith(f"    {file}:") for line in lines) == 5
    assert "    … and 4 more" in lines


def test_snippets_cannot_steer_the_terminal(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD, b'{"prompt": "\x1b[2J')
    _, findings = read(file)
    assert "\x1b" not in "\n".join(findings.lines())
    assert "\\x1b[2J" in only(findings, "json")
