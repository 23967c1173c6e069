"""Files and hub data sets as plain values with their places, every line checked on the way.

``datasets`` reports a broken line without its file or number, so text formats are read here, line
by line; Parquet and the hub go through ``datasets``.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oarlock.errors import DataError
from oarlock.finetune.findings import Findings

Value = tuple[str, Any]  # the place ("file:line") and what stands there

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")


def read_values(source: str | Path, findings: Findings, split: str) -> Iterator[tuple[str, Value]]:
    """Every value of a file, a folder or a hub data set, with the file that it belongs to."""
    path = Path(source).expanduser()
    if path.exists():
        for file in data_files(path):
            before = findings.read
            for value in _read_file(file, findings):
                yield str(file), value
            if findings.read == before:
                raise DataError(f"{file}: the file is empty: it holds no rows.")
    else:
        name = str(source)
        if path.suffix.lower() in SUFFIXES or not _HUB_ID.fullmatch(name):
            raise DataError(f"{name}: no such file or folder.")
        for value in _hub(name, split, findings):
            yield name, value


def data_files(path: Path) -> list[Path]:
    """The data files of a folder in sorted order, or the file itself."""
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: unknown kind of file. Known: {', '.join(SUFFIXES)}.")
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: neither a file nor a folder.")
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    files = [p for p in files if not any(x.startswith(".") for x in p.relative_to(path).parts)]
    if any(path.rglob("*.arrow")):
        raise DataError(
            f"{path}: a data set saved with save_to_disk.\nWrite it as Parquet with to_parquet()."
        )
    if not files:
        raise DataError(f"{path}: the folder holds no data. Known: {', '.join(SUFFIXES)}.")
    return files


def _read_file(file: Path, findings: Findings) -> Iterator[Value]:
    suffix = file.suffix.lower()
    try:
        with file.open("rb") as handle:
            start = handle.read(4)
        if start.startswith(_UTF16):
            raise DataError(
                f"{file}: the file is UTF-16.\n"
                f"Convert it: iconv -f UTF-16 -t UTF-8 {file.name} > new{suffix}"
            )
        if start.startswith(codecs.BOM_UTF8):
            findings.add("bom", f"{file}:1", "the file starts with a byte order mark")
        if suffix == ".parquet":
            yield from _parquet(file, findings)
        elif suffix in (".csv", ".tsv"):
            yield from _csv(file, findings)
        elif suffix == ".json":
            yield from _json(file, findings)
        else:
            yield from _json_lines(file, findings)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}.") from error


def _text(raw: bytes, where: str, findings: Findings) -> str | None:
    """A line as text; None, and a finding, where it is not clean UTF-8."""
    at = raw.find(b"\0")
    if at >= 0:
        shown = raw.decode("utf-8", "replace")
        findings.add("nul", where, f"NUL byte at column {at + 1}", shown, at)
        return None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        reason = f"byte 0x{byte:02X} at column {error.start + 1} is not UTF-8"
        if byte >= 0xA0:
            reason += f"; as latin-1 it would be {chr(byte)!r}"
        elif byte in range(0x80, 0xA0):
            reason += "; it may be cp1252 (Windows)"
        findings.add("encoding", where, reason, raw.decode("latin-1"), error.start)
        return None


def _parse(text: str, where: str, findings: Findings) -> tuple[bool, Any]:
    try:
        return True, json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.pos + 1}"
        if text.startswith("[") and where.endswith(":1"):
            reason += "; if the file is one JSON list, name it .json"
        findings.add("json", where, reason, text, error.pos)
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        findings.add("json", where, reason, text)
    return False, None


def _json_lines(file: Path, findings: Findings) -> Iterator[Value]:
    with file.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            where = f"{file}:{number}"
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            raw = raw.rstrip(b"\r\n")
            if not raw.strip():
                # A file of nothing but an empty line has no rows and says so elsewhere.
                findings.add("blank", where, "blank line")
                continue
            findings.read += 1
            text = _text(raw, where, findings)
            if text is None:
                continue
            good, value = _parse(text, where, findings)
            if good:
                yield where, value


def _json(file: Path, findings: Findings) -> Iterator[Value]:
    """One list of rows, one row, or JSON lines under the wrong name."""
    raw = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    start = raw.lstrip()[:1]
    if start == b"{":
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            yield from _json_lines(file, findings)
        else:
            findings.read += 1
            yield f"{file}:1", value
        return
    if start != b"[":
        yield from _json_lines(file, findings)
        return
    lines = raw.split(b"\n")
    texts = [_text(line, f"{file}:{number}", findings) for number, line in enumerate(lines, 1)]
    if any(text is None for text in texts):
        findings.read += sum(text is None for text in texts)
        return  # a list cannot be read around a damaged line
    yield from _json_list(raw.decode("utf-8"), file, findings)


def _json_list(text: str, file: Path, findings: Findings) -> Iterator[Value]:
    decoder = json.JSONDecoder()
    space = re.compile(r"\s*")
    line, counted = 1, 0
    at = text.index("[") + 1
    first = True
    while True:
        at = space.match(text, at).end()  # type: ignore[union-attr]
        try:
            if text[at : at + 1] == "]":
                at = space.match(text, at + 1).end()  # type: ignore[union-attr]
                if at < len(text):
                    raise json.JSONDecodeError("text after the end of the list", text, at)
                return
            if not first:
                if text[at : at + 1] != ",":
                    raise json.JSONDecodeError("expected ',' or ']' after a row", text, at)
                at = space.match(text, at + 1).end()  # type: ignore[union-attr]
            line, counted = line + text.count("\n", counted, at), at
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            pos = error.pos if isinstance(error, json.JSONDecodeError) else at
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "cannot be read"
            where = f"{file}:{text.count(chr(10), 0, pos) + 1}"
            findings.read += 1
            begin = text.rfind("\n", 0, pos) + 1
            rest = text[begin:].split("\n", 1)[0]
            reason += "; the rest of the file cannot be read"
            findings.add("json", where, reason, rest or text[-40:], pos - begin)
            return
        first = False
        findings.read += 1
        yield f"{file}:{line}", value


def _csv(file: Path, findings: Findings) -> Iterator[Value]:
    damaged = Findings()  # by line; a row may span several
    bad: dict[int, tuple[str, str, str]] = {}
    header = b""
    with file.open("rb") as binary:
        for number, raw in enumerate(binary, 1):
            header = raw if number == 1 else header
            where = f"{file}:{number}"
            if _text(raw, where, damaged) is None:
                found = damaged.rejects[-1]
                bad[number] = (found.kind, found.reason, found.snippet)
    if not header.strip():
        return
    delimiter = "\t" if file.suffix.lower() == ".tsv" else _delimiter(header)
    csv.field_size_limit(2**31 - 1)
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as handle:
        reader = csv.reader(handle, delimiter=delimiter, strict=True)
        try:
            names = [name.strip() for name in next(reader)]
        except csv.Error as error:
            raise DataError(f"{file}:1: the header cannot be read: {error}.") from error
        if 1 in bad:
            raise DataError(f"{file}:1: the header cannot be read: {bad[1][1]}.")
        if len(set(names)) < len(names):
            raise DataError(f"{file}:1: a column's name stands twice in the header: {names}.")
        start = reader.line_num + 1
        while True:
            where = f"{file}:{start}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                findings.read += 1
                reason = f"{error}; is a quote left open? The rest of the file cannot be read"
                findings.add("table", where, reason)
                return
            hit = next((n for n in range(start, reader.line_num + 1) if n in bad), None)
            start = reader.line_num + 1
            if not cells:
                findings.add("blank", where, "blank line")
                continue
            findings.read += 1
            if hit is not None:
                kind, reason, shown = bad[hit]
                findings.add(kind, f"{file}:{hit}", reason, shown)
            elif len(cells) != len(names):
                reason = f"{len(cells)} columns, the header has {len(names)}"
                findings.add("table", where, reason, delimiter.join(cells))
            else:
                yield where, dict(zip(names, cells, strict=True))


def _delimiter(header: bytes) -> str:
    """The comma, unless only another usual delimiter gives names that are known."""
    text = header.decode("utf-8-sig", "replace")
    known = {"messages", "prompt", "completion", "text"}
    for delimiter in ",;\t":
        if known & {name.strip().strip('"') for name in text.split(delimiter)}:
            return delimiter
    return ","


def _parquet(file: Path, findings: Findings) -> Iterator[Value]:
    import datasets
    import pyarrow.parquet

    try:
        pyarrow.parquet.read_schema(file)  # datasets prints a line of its own before it raises
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            findings.read += 1
            yield f"{file}:{number}", row
    except (pyarrow.ArrowException, datasets.exceptions.DatasetsError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{file}: not a readable Parquet file: {reason}") from error


def _hub(name: str, split: str, findings: Findings) -> Iterator[Value]:
    import datasets

    repo, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(repo, config or None, split=split)
    except Exception as error:  # the hub's client raises many kinds; all mean "not available"
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"{name}: no such file or folder here, and not available as a hub data set "
            f"(split {split!r}): {reason}"
        ) from error
    for number, row in enumerate(rows, 1):
        findings.read += 1
        yield f"{name}[{split}]:{number}", row
