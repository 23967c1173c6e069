"""Rows to tokens, with an exact mark on every token that is trained."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from oarlock.errors import ConfigError, ModelError
from oarlock.finetune.chat import Chat, Messages, RefusedError, Span
from oarlock.finetune.examples import IGNORED, Example
from oarlock.finetune.findings import Findings
from oarlock.finetune.rows import Row

TRUNCATE = ("stop", "cut", "drop")


@dataclass(frozen=True)
class PadChoice:
    """The token that fills batches. Masks come from lengths, so it may be any token at all."""

    id: int
    token: str
    how: str


def choose_pad(tokenizer: Any) -> PadChoice:
    """The tokenizer's pad token, else an unused special token, else the end token."""
    if tokenizer.pad_token_id is not None:
        return PadChoice(tokenizer.pad_token_id, tokenizer.pad_token, "the tokenizer's own")
    in_use = set(tokenizer.all_special_ids)
    unused = re.compile(r"pad|reserved|unused", re.IGNORECASE)
    spare = [
        (id_, token.content)
        for id_, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and id_ not in in_use and unused.search(token.content)
    ]
    spare.sort(key=lambda pair: "pad" not in pair[1].lower())
    if spare:
        return PadChoice(*spare[0], "the tokenizer has none; an unused special token")
    if tokenizer.eos_token_id is None:
        return PadChoice(0, str(tokenizer.convert_ids_to_tokens(0)), "the tokenizer has none")
    return PadChoice(
        tokenizer.eos_token_id, tokenizer.eos_token, "the tokenizer has none; the end token"
    )


class Encoder:
    """Turns rows into examples. The tokenizer is read, never changed."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        max_length: int = 1024,
        truncate: str = "stop",
    ) -> None:
        """``truncate``: what happens to rows over ``max_length``: lost, cut, or left out."""
        if max_length < 2:
            raise ConfigError(f"max_length = {max_length}: at least 2 tokens are needed.")
        if truncate not in TRUNCATE:
            raise ConfigError(f"truncate = {truncate!r}: known are {', '.join(TRUNCATE)}.")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.truncate = truncate
        self.chat = Chat(tokenizer, chat_template)
        self.pad = choose_pad(tokenizer)
        added = tokenizer.added_tokens_decoder
        special = {id_: token.content for id_, token in added.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self._special_ids = set(special)
        self._spelled = re.compile("|".join(map(re.escape, special.values())) or r"(?!)")
        self.end_token_ids: set[int] = set()  # tokens that were seen to end what is trained

    @property
    def chat_template(self) -> str | None:
        """The template in use: None where the tokenizer has none and none was chosen."""
        return self.chat.template

    def prompt_text(self, messages: Messages) -> str:
        """The text that asks the model for the next assistant turn."""
        return self.chat.render(messages, prompt=True)

    def encode_messages(self, messages: Messages, source: str = "") -> Example | None:
        """A chat as an example; None where it has no target or is too long."""
        return self.encode(Row("messages", {"messages": messages}, source), Findings())

    def encode(self, row: Row, findings: Findings) -> Example | None:
        """The row as an example, or None and a finding that says why it is lost."""
        plain = row.layout != "messages"
        try:
            text, spans = self._text(row)
            ids, parts, crossed = self._tokens(text, spans, special=plain)
        except RefusedError as error:
            findings.add("template", row.source, str(error), row.data)
            return None
        if row.layout != "text" and (hit := self._spelled.search(_contents(row))):
            findings.add("special", row.source, f"the text spells {hit[0]}", _contents(row))
        if crossed:
            start = next(iter(spans))[0]
            findings.add("border", row.source, "at the start of the answer", text, start)
        trained = np.zeros(len(ids), dtype=bool)
        for first, last in parts:
            trained[first : self._turn_end(ids, first, last, text, plain)] = True
        if plain:
            ids, trained = self._with_end(ids, trained)
        trained[:1] = False
        return self._fit(ids, trained, row, findings)

    def _text(self, row: Row) -> tuple[str, list[Span]]:
        if row.layout == "messages":
            return self.chat.spans(row.data["messages"])
        if row.layout == "prompt":
            prompt = row.data["prompt"]
            text = prompt + row.data["completion"]
            return text, [(len(prompt), len(text))]
        return row.data["text"], [(0, len(row.data["text"]))]

    def _tokens(
        self, text: str, spans: list[Span], *, special: bool
    ) -> tuple[np.ndarray, list[Span], bool]:
        """Tokens of the whole text, each span as a range of them, and whether one crosses a start.

        A token belongs to a span when it begins inside. One that begins before the span would never
        follow the bare prompt at generation, so it is not trained.
        """
        if not self.tokenizer.is_fast:
            return self._tokens_by_prefix(text, spans, special=special)
        encoded = self.tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        starts, ends = offsets[:, 0].copy(), offsets[:, 1]
        real = ends > starts  # added tokens stand for no text
        # Some tokenizers leave the space before a word out of its offsets; it is part of the token.
        before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
        for i in np.flatnonzero(real & (before < starts)):
            if text[before[i] : starts[i]].isspace():
                starts[i] = before[i]
        parts, crossed = [], False
        for start, end in spans:
            inside = np.flatnonzero(real & (starts >= start) & (starts < end))
            crossed |= bool((real & (starts < start) & (ends > start)).any())
            if len(inside):
                parts.append((int(inside[0]), int(inside[-1]) + 1))
        return ids, parts, crossed

    def _tokens_by_prefix(
        self, text: str, spans: list[Span], *, special: bool
    ) -> tuple[np.ndarray, list[Span], bool]:
        """The same for tokenizers without offsets: the tokens of the text before each border."""

        def encode(part: str) -> list[int]:
            return list(
                self.tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"]
            )

        ids = encode(text)

        def border(at: int) -> int:
            if at == len(text):
                return len(ids)
            head = encode(text[:at]) if at else []
            while head and special and head[-1] == self.tokenizer.eos_token_id:
                head.pop()
            if ids[: len(head)] != head:
                raise RefusedError(
                    "the tokenizer gives no offsets, "
                    "and a token lies across the start of the answer"
                )
            return len(head)

        return (
            np.array(ids, dtype=np.int32),
            [(border(start), border(end)) for start, end in spans],
            False,
        )

    def _turn_end(self, ids: np.ndarray, first: int, last: int, text: str, plain: bool) -> int:
        """Where training stops in a turn: after the end token, not the line break behind it."""
        if plain:
            return last
        stop = last
        while stop > first and not self.tokenizer.decode([int(ids[stop - 1])]).strip():
            stop -= 1
        return stop if stop > first and int(ids[stop - 1]) in self._special_ids else last

    def _with_end(self, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ModelError(
                "The tokenizer has no end token, so the model could never learn to stop.\n"
                "Set eos_token in the model's tokenizer_config.json."
            )
        if not len(ids) or ids[-1] != eos:
            ids, trained = np.append(ids, np.int32(eos)), np.append(trained, True)
        trained[-1] = True
        return ids, trained

    def _fit(
        self, ids: np.ndarray, trained: np.ndarray, row: Row, findings: Findings
    ) -> Example | None:
        over = len(ids) - self.max_length
        if not trained.any():
            findings.add("no target", row.source, "no token is trained", row.data)
            return None
        if over > 0:
            size = f"{len(ids)} tokens, {over} over max_length {self.max_length}"
            if self.truncate != "cut":
                kind = "too long" if self.truncate == "stop" else "dropped long"
                findings.add(kind, row.source, size, row.data)
                return None
            if not trained[: self.max_length].any():
                reason = f"the trained part starts after max_length ({size})"
                findings.add("no target", row.source, reason, row.data)
                return None
            findings.add("cut", row.source, size, row.data)
            ids, trained = ids[: self.max_length], trained[: self.max_length]
        last = int(ids[np.flatnonzero(trained)[-1]])
        ended = last in self._special_ids
        if ended:
            self.end_token_ids.add(last)
        labels = np.where(trained, ids, np.int32(IGNORED))
        return Example(ids, labels, row.source, over > 0, ended)


def _contents(row: Row) -> str:
    if row.layout == "messages":
        return "\n".join(message["content"] for message in row.data["messages"])
    return "\n".join(row.data.values())


def show(example: Example, tokenizer: Any, *, color: bool = False) -> str:
    """The example as text with the trained tokens marked: green, or between « and ».

    Line breaks stay; other control characters are spelled out, so data cannot steer the terminal.
    """
    opening, closing = ("\x1b[32m", "\x1b[0m") if color else ("«", "»")
    ids = [int(i) for i in example.input_ids]
    trained = example.labels != IGNORED
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1), len(ids)]

    def decode(end: int) -> str:
        return str(
            tokenizer.decode(
                ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    out, before = [], ""
    for start, end in itertools.pairwise(borders):
        # Tokenizers may drop a space at the start of a text: decode from the start each time.
        whole = decode(int(end))
        piece = whole[len(before) :] if whole.startswith(before) else whole
        before = whole
        piece = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in piece)
        out.append(f"{opening}{piece}{closing}" if trained[start] else piece)
    head = f"{example.source}: {len(ids)} tokens, {example.n_targets} trained"
    if example.truncated:
        head += ", cut"
    if not example.end_supervised:
        head += ", END NOT TRAINED"
    return f"{head}\n{''.join(out)}"
