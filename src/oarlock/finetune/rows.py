"""Rows of training data, each checked before anything is trained on it.

Three layouts: ``messages`` (a list of ``{"role", "content"}``), ``prompt`` and ``completion``, and
``text``. A file has one layout, taken from its first row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.errors import ConfigError
from oarlock.finetune.findings import Findings
from oarlock.finetune.readers import read_values

LAYOUTS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Row:
    """One sound row: its layout, only the layout's fields, and its place."""

    layout: str
    data: dict[str, Any]
    source: str

    @property
    def digest(self) -> bytes:
        """Equal for rows with the same content, wherever they stand."""
        text = json.dumps([self.layout, self.data], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def read_rows(
    source: str | Path,
    findings: Findings,
    *,
    split: str = "train",
    layout: str = "auto",
    columns: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """The sound rows of a file, a folder or a hub data set, in order; the others are findings.

    ``columns`` maps our field names to the file's, e.g. ``{"prompt": "question"}``.
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise ConfigError(f"layout = {layout!r}: known are auto, {', '.join(LAYOUTS)}.")
    fields = {name for names in LAYOUTS.values() for name in names}
    unknown = sorted(set(columns or {}) - fields)
    if unknown:
        raise ConfigError(
            f"columns: {unknown[0]!r} is no field. Known: {', '.join(sorted(fields))}."
        )
    chosen: dict[str, tuple[str, str]] = {}  # file -> (layout, where it was decided)
    for file, (where, value) in read_values(source, findings, split):
        if not isinstance(value, dict):
            findings.add("object", where, f"the row is {_kind(value)}, not an object", value)
            continue
        value = _renamed(value, columns or {})
        own = layout if layout != "auto" else _layout_of(value)
        if own is None:
            names = ", ".join(map(repr, value)) or "none"
            reason = (
                f"no known layout: the fields are {names}; "
                "known are 'messages', 'prompt' + 'completion', 'text'"
            )
            findings.add("layout", where, reason, value)
            continue
        file_layout, decided = chosen.setdefault(file, (own, where))
        if own != file_layout:
            reason = f"a row of layout {own!r} in a file of {file_layout!r} (see {decided})"
            findings.add("layout", where, reason, value)
            continue
        row = _check(value, own, where, findings)
        if row is not None:
            yield row


def _renamed(value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    return {
        **{k: v for k, v in value.items() if k not in columns.values()},
        **{ours: value[theirs] for ours, theirs in columns.items() if theirs in value},
    }


def _layout_of(value: dict[str, Any]) -> str | None:
    for layout, names in LAYOUTS.items():
        if any(value.get(name) is not None for name in names):
            return layout
    return next((k for k, names in LAYOUTS.items() if any(n in value for n in names)), None)


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _check(value: dict[str, Any], layout: str, where: str, findings: Findings) -> Row | None:
    """The row, or None and exactly one finding that says why it is lost."""
    for name in LAYOUTS[layout]:
        if value.get(name) is None:
            state = "is null" if name in value else "is missing"
            names = ", ".join(map(repr, value))
            findings.add("field", where, f"{name!r} {state}; the fields are {names}", value)
            return None
    if layout == "messages":
        messages = _check_messages(value["messages"], where, findings)
        return None if messages is None else Row(layout, {"messages": messages}, where)
    data = {name: value[name] for name in LAYOUTS[layout]}
    for name, content in data.items():
        if not _check_string(content, repr(name), where, findings, value):
            return None
    return Row(layout, data, where)


def _check_string(content: Any, name: str, where: str, findings: Findings, row: Any) -> bool:
    if not isinstance(content, str):
        findings.add("type", where, f"{name} is {_kind(content)}, not a string", row)
        return False
    if not content.strip():
        findings.add("empty", where, f"{name} is empty", row)
        return False
    try:
        content.encode()
    except UnicodeEncodeError as error:
        bad = content[error.start]
        reason = f"{name} holds half of a surrogate pair (\\u{ord(bad):04x}): no valid text"
        findings.add("encoding", where, reason, json.dumps(row))
        return False
    return True


def _check_messages(messages: Any, where: str, findings: Findings) -> list[dict[str, Any]] | None:
    if isinstance(messages, str):  # tables hold the list as JSON
        try:
            messages = json.loads(messages)
        except ValueError:
            findings.add("type", where, "'messages' is a string, not a list of turns", messages)
            return None
    if not isinstance(messages, list):
        findings.add("type", where, f"'messages' is {_kind(messages)}, not a list", messages)
        return None
    if not messages:
        findings.add("empty", where, "'messages' is an empty list")
        return None
    clean: list[dict[str, Any]] = []
    for number, turn in enumerate(messages, 1):
        if not isinstance(turn, dict):
            reason = f"turn {number} is {_kind(turn)}, not an object with role and content"
            findings.add("type", where, reason, messages)
            return None
        missing = next((n for n in ("role", "content") if turn.get(n) is None), None)
        if missing:
            findings.add("field", where, f"turn {number} has no {missing!r}", messages)
            return None
        role = turn["role"]
        if role not in ROLES:
            reason = f"turn {number} has the unknown role {role!r}; known are {', '.join(ROLES)}"
            findings.add("role", where, reason, messages)
            return None
        if role == "system" and number > 1:
            findings.add("role", where, f"turn {number} is 'system': allowed only first", messages)
            return None
        if role == "system" and turn["content"] == "":
            findings.add("empty system", where, "the system turn is empty")
        elif not _check_string(
            turn["content"], f"content of turn {number} ({role})", where, findings, messages
        ):
            return None
        # Tables fill absent keys with null; templates would take those for given.
        clean.append({key: item for key, item in turn.items() if item is not None})
    roles = [turn["role"] for turn in clean]
    if "assistant" not in roles:
        findings.add("no target", where, "no assistant turn: nothing to train on", messages)
        return None
    if roles[-1] != "assistant":
        findings.add("last turn", where, f"the last turn is {roles[-1]!r}", messages)
        while clean[-1]["role"] != "assistant":  # nothing after it can influence the loss
            clean.pop()
    return clean
