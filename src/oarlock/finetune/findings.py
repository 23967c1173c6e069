"""What was found while reading training data: counted by kind, with file and line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oarlock.errors import DataError

EXAMPLES_PER_KIND = 5
SNIPPET_LENGTH = 80


class Kind(NamedTuple):
    """How findings of one kind are shown, and the funnel's column that counts them."""

    title: str
    column: str  # "" where the row stays
    remedy: str
    asked: bool = False  # the row goes because the user asked for it: not counted as lost


KINDS: dict[str, Kind] = {
    "json": Kind("broken JSON", "broken", "Correct these lines."),
    "object": Kind("not a JSON object", "broken", "Each row must be an object: {...}."),
    "nul": Kind("NUL bytes", "broken", "The file was damaged or is not text; write it again."),
    "encoding": Kind("not UTF-8", "broken", "Convert the file: iconv -f ENCODING -t UTF-8."),
    "table": Kind("wrong number of columns", "broken", "Quote fields that hold commas."),
    "field": Kind("missing field", "broken", "Add the field, or map it with `columns`."),
    "type": Kind("wrong type", "broken", "Fields and contents must be strings."),
    "role": Kind("wrong or misplaced role", "broken", "Correct the order of the turns."),
    "layout": Kind("unknown or mixed layout", "broken", "One layout per file."),
    "template": Kind("refused by the chat template", "broken", "Change the rows or the template."),
    "empty": Kind("empty field", "empty", "Fill or remove these rows."),
    "no target": Kind(
        "no target tokens", "no target", "Each row needs an answer that fits into max_length."
    ),
    "too long": Kind(
        "longer than max_length",
        "too long",
        "Raise max_length, or choose truncate = 'cut' or 'drop'.",
    ),
    "dropped long": Kind("longer than max_length, dropped as asked", "too long", "", True),
    "dropped duplicate": Kind("duplicate row, dropped as asked", "duplicate", "", True),
    "duplicate": Kind("duplicate row, kept", "", "drop_duplicates removes them."),
    "shared": Kind("also in the evaluation data", "", "drop_duplicates removes them."),
    "cut": Kind("cut to max_length", "", "Raise max_length to keep the whole row."),
    "bom": Kind("byte order mark, ignored", "", ""),
    "blank": Kind("blank line, ignored", "", ""),
    "last turn": Kind("does not end with an assistant turn", "", "What follows is not used."),
    "empty system": Kind("empty system turn", "", ""),
    "border": Kind(
        "a token lies across the start of the answer and is not trained",
        "",
        "Often the prompt ends with a space that belongs to the answer.",
    ),
    "special": Kind("text spells a special token", "", "It is read as that token, not as text."),
}


@dataclass(frozen=True)
class Finding:
    """One thing found in one row."""

    kind: str
    source: str  # "file:line"
    reason: str
    snippet: str = ""
    row: Any = None  # what stands there, kept for lost rows

    @property
    def lost(self) -> bool:
        """Whether the row cannot be used because of it."""
        return _lost(self.kind)

    def line(self) -> str:
        """As shown: where, why, and the start of the row."""
        tail = f"  | {self.snippet}" if self.snippet else ""
        return f"{self.source}: {self.reason}{tail}"


def snippet(value: Any, around: int | None = None) -> str:
    """The start of a row, or the part around a column, on one line and safe to print."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    start = 0 if around is None else max(0, around - SNIPPET_LENGTH // 2)
    piece = text[start : start + SNIPPET_LENGTH]
    piece = "".join(c if c.isprintable() else repr(c)[1:-1] for c in piece)
    end = "…" if start + SNIPPET_LENGTH < len(text) else ""
    return ("…" if start else "") + piece + end


def _lost(kind: str) -> bool:
    return bool(KINDS[kind].column) and not KINDS[kind].asked


class Findings:
    """Counts of every kind, the first few examples of each, and all lost rows' places."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[Finding]] = {}
        self.rejects: list[Finding] = []
        self.read = 0  # rows seen, sound or not

    def add(
        self, kind: str, source: str, reason: str, row: Any = "", at: int | None = None
    ) -> None:
        """Count a finding; ``row`` is shown in part, around column ``at`` where that is known."""
        finding = Finding(
            kind,
            source,
            reason,
            snippet(row, at) if row != "" else "",
            row if _lost(kind) else None,
        )
        self.counts[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < EXAMPLES_PER_KIND:
            examples.append(finding)
        if finding.lost:
            self.rejects.append(finding)

    @property
    def lost(self) -> int:
        """How many rows cannot be used."""
        return len(self.rejects)

    def column(self, name: str) -> int:
        """How many rows ended in one column of the funnel."""
        return sum(n for kind, n in self.counts.items() if KINDS[kind].column == name)

    def lines(self, *, lost_only: bool = False) -> list[str]:
        """Every kind with its examples, lost rows first."""
        out: list[str] = []
        order = list(KINDS)
        for kind in sorted(self.counts, key=lambda k: (not _lost(k), order.index(k))):
            known = KINDS[kind]
            if lost_only and not _lost(kind):
                continue
            out.append(f"{'lost' if _lost(kind) else 'note'}: {self.counts[kind]} × {known.title}")
            out.extend(f"    {example.line()}" for example in self.examples[kind])
            more = self.counts[kind] - len(self.examples[kind])
            if more:
                out.append(f"    … and {more} more")
            if known.remedy:
                out.append(f"    {known.remedy}")
        return out

    def problem(self, source: str) -> str | None:
        """What to tell when rows would be lost: how many, which, and what to do. None otherwise."""
        if not self.lost:
            return None
        kinds = ", ".join(
            f"{n} {KINDS[kind].title}" for kind, n in self.counts.items() if _lost(kind)
        )
        first = self.rejects[0].source
        where = f" (first at {first})" if self.lost > 1 else f" ({first})"
        message = [
            f"{source}: {self.lost} of {self.read} rows cannot be used: {kinds}{where}.",
            *self.lines(lost_only=True),
            "Correct the rows, or train without them with on_bad = 'skip'.",
        ]
        return "\n".join(message)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: per kind its count, whether rows were lost, and the examples."""
        return {
            kind: {
                "count": n,
                "lost": _lost(kind),
                "examples": [example.line() for example in self.examples[kind]],
            }
            for kind, n in self.counts.items()
        }


FUNNEL_COLUMNS = (
    "read",
    "broken",
    "empty",
    "no target",
    "too long",
    "duplicate",
    "held out",
    "used",
)


def funnel_lines(funnels: dict[str, dict[str, int]]) -> list[str]:
    """The table from rows read to rows used, one line for each source of rows."""
    rows = [["", *FUNNEL_COLUMNS]]
    rows += [[name, *(str(funnel[c]) for c in FUNNEL_COLUMNS)] for name, funnel in funnels.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def write_rejects(findings: Iterable[Findings], folder: Path) -> None:
    """Write the lost rows, with place and reason, to ``rejects.jsonl``; no file without any."""
    path = folder / "rejects.jsonl"
    rejects = [found for one in findings for found in one.rejects]
    try:
        path.unlink(missing_ok=True)
        if not rejects:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as handle:
            for found in rejects:
                entry = {"source": found.source, "kind": found.kind, "reason": found.reason}
                # ASCII escapes: what was lost may be no valid text.
                handle.write(json.dumps({**entry, "row": found.row}, default=repr) + "\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}.") from error
