"""From a source of rows to the data sets that are trained and evaluated on, with a full account."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oarlock.errors import ConfigError, DataError, ModelError
from oarlock.finetune.encoder import Encoder, show
from oarlock.finetune.examples import Example, Examples
from oarlock.finetune.findings import FUNNEL_COLUMNS, Findings, funnel_lines, write_rejects
from oarlock.finetune.packing import Packed
from oarlock.finetune.rows import read_rows

if TYPE_CHECKING:
    from oarlock.finetune.collate import Collator


@dataclass
class Report:
    """What became of the rows, for the terminal and for the results' folder."""

    findings: dict[str, Findings]
    funnels: dict[str, dict[str, int]]
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def end_supervised_share(self) -> float:
        """The share of training rows whose end token is trained."""
        return float(self.numbers["end_supervised_share"])

    def lines(self) -> list[str]:
        """The funnel, the findings, the counts and every choice that was made."""
        out = funnel_lines(self.funnels)
        for name, findings in self.findings.items():
            found = findings.lines()
            if found:
                out += [f"{name}:", *(f"  {line}" for line in found)]
        return out + self.notes

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "funnels": self.funnels,
            "findings": {name: found.to_dict() for name, found in self.findings.items()},
            "notes": self.notes,
            **self.numbers,
        }


@dataclass
class Prepared:
    """Everything that training needs of the data."""

    train: Examples | Packed
    eval: Examples | Packed | None
    lengths: np.ndarray  # tokens of each item of ``train``
    eval_lengths: np.ndarray | None
    collate: Collator
    encoder: Encoder
    report: Report
    max_token_id: int
    digest: str  # of the training rows' tokens and targets, in order

    def show(self, n: int = 3, *, color: bool = False) -> list[str]:
        """The first ``n`` training rows as text, trained tokens marked."""
        examples = self.train.examples if isinstance(self.train, Packed) else self.train
        return [
            show(examples[i], self.encoder.tokenizer, color=color)
            for i in range(min(n, len(examples)))
        ]


@dataclass
class _Source:
    """The usable rows of one source."""

    examples: Examples
    digests: list[bytes]
    findings: Findings

    def drop(self, rows: Iterable[int]) -> None:
        gone = set(rows)
        stay = [i for i in range(len(self.digests)) if i not in gone]
        self.examples = self.examples.select(np.array(stay, dtype=np.int64))
        self.digests = [self.digests[i] for i in stay]


def prepare(
    train: str | Path,
    *,
    tokenizer: Any,
    eval_source: str | Path | None = None,
    eval_fraction: float = 0.0,
    train_split: str = "train",
    eval_split: str = "validation",
    layout: str = "auto",
    columns: Mapping[str, str] | None = None,
    chat_template: str | None = None,
    max_length: int = 1024,
    truncate: str = "stop",
    packing: bool = False,
    on_bad: str = "stop",
    drop_duplicates: bool = False,
    seed: int = 0,
    rejects: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Read, check, encode and split the data; raise when rows would be lost and none may be.

    The result depends on the arguments alone, so every rank may call it. ``rejects`` is the folder
    for lost rows when ``on_bad`` is "skip"; give it on one rank only.
    """
    from oarlock.finetune.collate import Collator

    if on_bad not in ("stop", "skip"):
        raise ConfigError(f"on_bad = {on_bad!r}: known are stop, skip.")
    if not 0.0 <= eval_fraction < 1.0:
        raise ConfigError(f"eval_fraction = {eval_fraction}: must be at least 0 and below 1.")
    if eval_source is not None and eval_fraction:
        raise ConfigError("eval_fraction and a source of evaluation rows exclude each other.")
    encoder = Encoder(
        tokenizer, chat_template=chat_template, max_length=max_length, truncate=truncate
    )
    sources: dict[str, _Source] = {}
    wanted = [("train", train, train_split)]
    if eval_source is not None:
        wanted.append(("eval", eval_source, eval_split))
    for name, place, split in wanted:
        findings = Findings()
        rows = read_rows(place, findings, split=split, layout=layout, columns=columns)
        sources[name] = _encode(rows, findings, encoder, drop_duplicates, progress)
    _apply_policy(dict(zip(sources, (w[1] for w in wanted), strict=True)), sources, on_bad, rejects)

    notes = list(encoder.chat.notes)
    held_out = 0
    training = sources["train"]
    if eval_source is not None:
        evaluation: Examples | None = sources["eval"].examples
        _report_shared(training, sources["eval"], drop_duplicates, str(train))
    else:
        training, evaluation, note = _hold_out(training, eval_fraction, seed)
        held_out = len(evaluation) if evaluation is not None else 0
        notes += [note] if note else []

    funnels = {"train": _funnel(training, held_out)}
    if eval_source is not None:
        funnels["eval"] = _funnel(sources["eval"], 0)
    train_set: Examples | Packed = training.examples
    eval_set: Examples | Packed | None = evaluation
    if packing:
        train_set = Packed(training.examples, max_length)
        eval_set = Packed(evaluation, max_length) if evaluation is not None else None
    report = Report({name: s.findings for name, s in sources.items()}, funnels, notes)
    _account(report, training.examples, train_set, encoder)
    return Prepared(
        train=train_set,
        eval=eval_set,
        lengths=train_set.lengths,
        eval_lengths=eval_set.lengths if eval_set is not None else None,
        collate=Collator(encoder.pad.id),
        encoder=encoder,
        report=report,
        max_token_id=max(source.examples.max_token_id for source in sources.values()),
        digest=training.examples.digest(),
    )


def _encode(
    rows: Iterable[Any],
    findings: Findings,
    encoder: Encoder,
    drop_duplicates: bool,
    progress: Callable[[int], None] | None,
) -> _Source:
    examples, digests = Examples(), []
    seen: dict[bytes, str] = {}
    for row in rows:
        if progress is not None and findings.read % 500 == 0:
            progress(findings.read)
        example: Example | None = encoder.encode(row, findings)
        if example is None:
            continue
        digest = row.digest
        if digest in seen:
            kind = "dropped duplicate" if drop_duplicates else "duplicate"
            findings.add(kind, row.source, f"the same as {seen[digest]}", row.data)
            if drop_duplicates:
                continue
        seen.setdefault(digest, row.source)
        examples.append(example)
        digests.append(digest)
    return _Source(examples.freeze(), digests, findings)


def _apply_policy(
    places: dict[str, str | Path], sources: dict[str, _Source], on_bad: str, rejects: Path | None
) -> None:
    if on_bad == "stop":
        problems = [source.findings.problem(str(places[name])) for name, source in sources.items()]
        if any(problems):
            raise DataError("\n".join(filter(None, problems)))
    elif rejects is not None:
        write_rejects([source.findings for source in sources.values()], rejects)
    for name, source in sources.items():
        if not len(source.examples):
            found = "\n".join(source.findings.lines())
            read = source.findings.read
            raise DataError(f"{places[name]}: none of the {read} rows can be used.\n{found}")


def _report_shared(training: _Source, evaluation: _Source, drop: bool, place: str) -> None:
    """Rows to be evaluated on must not be trained on; where they are, say so or drop them."""
    known = dict(zip(evaluation.digests, evaluation.examples, strict=True))
    shared = [i for i, digest in enumerate(training.digests) if digest in known]
    for i in shared:
        reason = f"the same as {known[training.digests[i]].source}"
        kind = "dropped duplicate" if drop else "shared"
        training.findings.add(kind, training.examples[i].source, reason)
    if drop and shared:
        training.drop(shared)
        if not training.digests:
            raise DataError(f"{place}: every row is also in the evaluation data; none is left.")


def _hold_out(
    source: _Source, fraction: float, seed: int
) -> tuple[_Source, Examples | None, str | None]:
    """Part the rows by content, so copies of a held-out row never remain in training."""
    from oarlock.randomness import Permutation, key

    if not fraction:
        return source, None, None
    contents = list(dict.fromkeys(source.digests))
    count = min(round(fraction * len(contents)), len(contents) - 1)
    if count == 0:
        return (
            source,
            None,
            f"evaluation: {fraction:g} of {len(contents)} different rows is none; "
            "nothing is held out, nothing is evaluated",
        )
    chosen = Permutation(len(contents), key(seed, 0x6865_6C64))(np.arange(count))
    held = {contents[int(i)] for i in chosen}
    inside = [i for i, digest in enumerate(source.digests) if digest in held]
    evaluation = source.examples.select(np.array(inside, dtype=np.int64))
    training = _Source(source.examples, source.digests, source.findings)
    training.drop(inside)
    return training, evaluation, None


def _funnel(source: _Source, held_out: int) -> dict[str, int]:
    findings = source.findings
    counts = {name: findings.column(name) for name in FUNNEL_COLUMNS}
    counts.update(read=findings.read, used=len(source.examples))
    counts["held out"] = held_out
    return counts


def _account(
    report: Report, examples: Examples, items: Examples | Packed, encoder: Encoder
) -> None:
    """Counts and choices; an error where the model could never learn to stop."""
    tokens, targets = int(examples.lengths.sum()), int(examples.targets.sum())
    share = examples.end_supervised_share
    if share == 0.0:
        if examples.truncated == len(examples):
            raise DataError(
                f"All {len(examples)} rows were cut to max_length {encoder.max_length}: "
                "no row teaches the model to stop.\nRaise max_length, or split the rows."
            )
        raise ModelError(
            "No row's end token is trained (0 %): the model would never learn to stop.\n"
            "The chat template closes the assistant's turn with no special token. "
            "Choose another: chat_template = 'chatml', or the path of a jinja file."
        )
    report.numbers = {
        "rows": len(examples),
        "tokens": tokens,
        "targets": targets,
        "longest": int(examples.lengths.max()),
        "truncated": examples.truncated,
        "end_supervised_share": share,
        "max_length": encoder.max_length,
        "pad_token": encoder.pad.token,
        "end_tokens": encoder.tokenizer.convert_ids_to_tokens(sorted(encoder.end_token_ids)),
        "sequences": len(items),
    }
    report.notes += [
        f"{len(examples)} rows, {tokens} tokens (longest row {examples.lengths.max()}), "
        f"{targets} trained ({targets / tokens:.0%})",
        f"end token trained in {share:.1%} of the rows",
    ]
    if examples.truncated:
        report.notes.append(f"{examples.truncated} rows cut to max_length {encoder.max_length}")
    if isinstance(items, Packed):
        full = tokens / (len(items) * encoder.max_length)
        report.notes.append(f"packed into {len(items)} sequences, {full:.0%} full")
    report.notes.append(f"pad token {encoder.pad.token!r}: {encoder.pad.how}")
    eos = encoder.tokenizer.eos_token_id
    others = encoder.end_token_ids - {eos}
    if others:
        names = ", ".join(map(repr, encoder.tokenizer.convert_ids_to_tokens(sorted(others))))
        report.notes.append(
            f"turns end with {names}, "
            f"the tokenizer's end token is {encoder.tokenizer.eos_token!r}: "
            "generation has to stop at both"
        )
