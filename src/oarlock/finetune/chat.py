"""A chat as text, and where in that text the assistant speaks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from oarlock.errors import ModelError

Messages = list[dict[str, Any]]
Span = tuple[int, int]

# {end} becomes the tokenizer's own end token where it has no <|im_end|>.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '{end}' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RefusedError(Exception):
    """The template cannot render these messages, or not so that the answers can be found."""


class Chat:
    """The tokenizer's chat template, or the one that the user chose."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        """``template``: None for the tokenizer's own, "chatml", or the path of a jinja file."""
        self.tokenizer = tokenizer
        self.notes: list[str] = []
        self.template = self._choose(template)

    def _choose(self, template: str | None) -> str | None:
        if template == "chatml":
            end = "<|im_end|>"
            if end not in self.tokenizer.get_vocab():
                end = self.tokenizer.eos_token or ""
                self.notes.append(
                    "chat template: ChatML, as asked; the tokenizer has no <|im_end|>, "
                    f"so turns end with {end!r}"
                )
            else:
                self.notes.append("chat template: ChatML, as asked")
            return CHATML.replace("{end}", end)
        if template is not None:
            path = Path(template).expanduser()
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ModelError(
                    f"chat_template = {template!r}: cannot be read: {reason}.\n"
                    "Give 'chatml' or the path of a jinja file."
                ) from error
            self.notes.append(f"chat template: {path}, as asked")
            return text
        if not self.tokenizer.chat_template:
            return None
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError as error:  # several named ones and no default
            raise ModelError(f"{_name(self.tokenizer)}: {error}") from error

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        """The chat as text; with ``prompt``, followed by the opening of the assistant's turn."""
        if self.template is None:
            raise ModelError(
                f"{_name(self.tokenizer)}: the tokenizer has no chat template, "
                "and the rows are 'messages'.\n"
                "Choose one: chat_template = 'chatml', or the path of a jinja file; "
                "or write the rows as prompt and completion."
            )
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"The chat template is broken at line {error.lineno}: {error}"
            ) from error
        except (jinja2.TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
            raise RefusedError(f"the chat template refuses the row: {error}") from error

    def spans(self, messages: Messages) -> tuple[str, list[Span]]:
        """The whole text and, for each assistant turn, what the model is to write.

        A turn starts where the text with the opening of the assistant's turn ends, and reaches as
        far as the text of the chat up to and with it. Both must be prefixes of the whole text.
        Templates that write earlier turns in another way (without their reasoning, say) are
        followed by content and closing text, or by their own {% generation %} marks.
        """
        text = self.render(messages)
        found = self._prefix_spans(messages, text)
        if found is None and self.template and _GENERATION.search(self.template):
            text, found = self._marked_spans(messages)
        if found is None:
            raise RefusedError(
                "the chat template writes earlier turns differently once others follow, "
                "so the trained part cannot be found; a template with {% generation %} marks can"
            )
        return text, found

    def _prefix_spans(self, messages: Messages, text: str) -> list[Span] | None:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if turns[0] == 0:
            raise RefusedError("the row starts with an assistant turn: there is nothing to answer")
        found: list[Span] = []
        for i in turns:
            head = self.render(messages[:i], prompt=True)
            if not text.startswith(head):
                return None
            start = len(head)
            end: int | None = len(text)
            if i < len(messages) - 1:
                upto = self.render(messages[: i + 1])
                stable = text.startswith(upto) and len(upto) > start
                end = len(upto) if stable else self._by_content(messages, i, text, start)
            if end is None:
                return None
            found.append((start, end))
        return found

    def _by_content(self, messages: Messages, turn: int, text: str, start: int) -> int | None:
        """Where a turn ends that stands as it was given, closed as the last turn is closed."""
        last = messages[-1]
        head = self.render(messages[:-1], prompt=True)
        at = text.find(last["content"].strip(), len(head))
        if last["role"] != "assistant" or not text.startswith(head) or at < 0:
            return None
        closing = text[at + len(last["content"].strip()) :]
        end = start + len(messages[turn]["content"].strip())
        as_given = text.startswith(messages[turn]["content"].strip(), start)
        return (
            end + len(closing) if as_given and closing and text.startswith(closing, end) else None
        )

    def _marked_spans(self, messages: Messages) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[messages],
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **self.tokenizer.special_tokens_map,
        )
        texts, marks = rendered
        return texts[0], [(start, end) for start, end in marks[0]]


def _name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or "the model")
