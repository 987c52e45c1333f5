"""Chat templates by name (the tokenizer's own, ChatML, Llama-3, or a file), and conversations by them
as tokens: each text is tokenized as a whole, and every token is an answer's or is not.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config.validate import parse_json
from streammega.convert.tokenize.chat_templates import (
    PROBE,
    ChatTemplate,
    Rendered,
    Renderer,
    any_of,
)
from streammega.convert.tokenize.long_text import LONG, encode_long_with_spans
from streammega.convert.tokenize.tokenizer_files import (
    CONFIG,
    read_settings,
    read_text,
    special_token_names,
)
from streammega.convert.tokenize.tokenizers import Tokenizer, TokenSpans, load_tokenizer
from streammega.errors import ConfigError, ConvertError, FormatError, ObjectNotFoundError
from streammega.errors.cached_property import cached_property
from streammega.errors.logs import get_logger

log = get_logger(__name__)

_CHATML = """\
{% for message in messages %}
{% if message.tool_calls is defined %}{{ raise_exception('ChatML has no spelling of tool calls') }}{% endif %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{{- '\\n' }}
{%- else %}
{{ message.content + '<|im_end|>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_LLAMA3 = """\
{{ '<|begin_of_text|>' }}
{%- for message in messages %}
{% if message.tool_calls is defined %}{{ raise_exception('Llama-3 has no spelling of tool calls') }}{% endif %}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{ message.content | trim + '<|eot_id|>' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
BUILT_IN = {"chatml": _CHATML, "llama3": _LLAMA3}
OWN = "tokenizer"
"""The name of a tokenizer's own template."""
TEMPLATE = "chat_template.jinja"
STAND_IN = 0x100000
"""The first of the private characters that replace a template's special tokens where messages
spell some too.
"""


class ChatEncoder:
    """Conversations to token ids, with what is to be learned of them, by a chat template.

    Args:
        tokenizer: as `load_tokenizer` takes it, by name or loaded; not of SentencePiece.
        template: `tokenizer` (its own; `tokenizer:NAME` for one of several), `chatml`, `llama3`, or
            a file.
        special_tokens_in_text: what a special token that a message spells becomes: `text`, or
            `parse`, its id.

    Raises ConvertError, ObjectNotFoundError, ConfigError.
    """

    def __init__(
        self,
        tokenizer: str | Tokenizer,
        template: str | ChatTemplate = "tokenizer",
        *,
        special_tokens_in_text: str = "text",
    ) -> None:
        if special_tokens_in_text not in ("parse", "text"):
            raise ConfigError(
                f"special_tokens_in_text is {special_tokens_in_text!r}; it must be 'parse' or "
                f"'text'"
            )
        name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
        if isinstance(template, str):
            template = find_template(template, name)
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        self.template = template
        self._tokenizer = tokenizer.parsing_special_tokens()
        special_tokens = self._tokenizer.special_tokens
        _check_built_in(template, special_tokens, name)
        parse = special_tokens_in_text == "parse"
        self._renderer = Renderer(template, special_tokens, parse=parse)
        # Where letters are folded, no search in a text tells which spellings would become tokens.
        self._always_stands_in = self._tokenizer.folds_letters and not parse
        self._stand_ins = {
            token: chr(STAND_IN + number) for number, token in enumerate(special_tokens)
        }

    def conversation(self, record: Any, where: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A record's token ids int32 [tokens], and bool [tokens]: what the assistant says.

        Raises FormatError, ConvertError.
        """
        (encoded,) = self.encode([self.render(record, where)])
        return encoded

    def render(self, record: Any, where: str) -> Rendered:
        """A record as text. Raises FormatError, ConvertError that name where it came from.

        One that cannot be encoded with others is encoded here: it may be refused, alone.
        """
        chat = self._renderer.render(record, where)
        tokenizer = self._tokenizer
        encoded_chat = chat
        # Special tokens of the template must be kept apart from those that messages spell.
        if chat.breaks or self._always_stands_in:
            tokenizer = self._by_stand_ins
            encoded_chat = self._with_stand_ins(chat)
        elif len(chat.text) < LONG:
            return chat
        if len(chat.text) < LONG:
            (spans,) = tokenizer.encode_with_spans([encoded_chat.text])
        else:
            spans = encode_long_with_spans(tokenizer, encoded_chat.text, where)
        return replace(chat, encoded=self._with_answers(encoded_chat, spans))

    def encode(
        self, chats: Sequence[Rendered]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Ids and answers of each; the tokenizer works on several at once."""
        texts = [chat.text for chat in chats if chat.encoded is None]
        spans_of_texts = iter(self._tokenizer.encode_with_spans(texts))
        return [chat.encoded or self._with_answers(chat, next(spans_of_texts)) for chat in chats]

    def _with_answers(
        self, chat: Rendered, spans: TokenSpans
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        answers = np.array(chat.answers, np.int64).reshape(-1, 2)
        if self._tokenizer.spans_in_bytes:
            # answers rise and do not overlap, so every character is encoded once
            bounds = [0, *itertools.chain.from_iterable(chat.answers)]
            sizes = [len(chat.text[low:high].encode()) for low, high in itertools.pairwise(bounds)]
            answers = np.cumsum(np.array(sizes, np.int64)).reshape(-1, 2)
        return spans.ids, _covered(spans, answers)

    @cached_property
    def _by_stand_ins(self) -> Tokenizer:
        return self._tokenizer.parsing_special_tokens(self._stand_ins)

    def _with_stand_ins(self, chat: Rendered) -> Rendered:
        """The text with one character for each special token of the template's; those that messages
        spell are text.
        """
        last = chr(STAND_IN + len(self._stand_ins))
        held = re.search(f"[{chr(STAND_IN)}-{last}]", chat.text)
        if held:
            raise FormatError(
                f"{chat.where}: spells a special token, and holds the private character "
                f"U+{ord(held[0]):X}, which is needed to keep it text; leave out one of the two"
            )
        any_token = re.compile(any_of(self._stand_ins))
        text: list[str] = []
        # 1 for each character that the new text has too: one character replaces all of a token's
        kept = np.ones(len(chat.text) + 1, np.int64)
        # A token that a break goes through is a message's: between breaks it is not found whole.
        for start, stop in itertools.pairwise([0, *chat.breaks, len(chat.text)]):
            for token in any_token.finditer(chat.text, start, stop):
                kept[token.start() + 1 : token.end()] = 0
            part = chat.text[start:stop]
            text.append(any_token.sub(lambda token: self._stand_ins[token[0]], part))
        place_in_new = np.cumsum(kept) - kept
        answers = [(int(place_in_new[low]), int(place_in_new[high])) for low, high in chat.answers]
        return replace(chat, text="".join(text), answers=answers)


def warn_of_endless_answers(template: ChatTemplate, special_tokens: Collection[str]) -> None:
    """Warn where the last answer of a conversation has no token at its end that is learned."""
    names = tuple(special_tokens)
    try:
        chat = Renderer(template, names, parse=True).render({"messages": PROBE[:2]}, "")
    except (ConvertError, FormatError):  # of other conversations, as with a system message
        return
    last = "".join(chat.text[start:stop] for start, stop in chat.answers[-1:])
    if not last.rstrip().endswith(names):
        log.warning(
            "chat template %s: the last answer of a conversation ends without a special token that is "
            "learned, so a model may not learn to stop; write one behind answers, within the generation "
            "block if there is one",
            template.name,
        )


def _check_built_in(
    template: ChatTemplate, special_tokens: Collection[str], tokenizer: str
) -> None:
    """Raise ConvertError where a built-in template would write letters in place of special
    tokens.
    """
    written = dict.fromkeys(re.findall(r"<\|\w+\|>", BUILT_IN.get(template.name, "")))
    missing = [token for token in written if token not in special_tokens]
    if missing and tokenizer != "bytes":
        raise ConvertError(
            f"{tokenizer}: has no special token {', '.join(missing)}, which chat template "
            f"{template.name} writes; use the template that the tokenizer was made for, or add "
            f"them to it"
        )


def _covered(spans: TokenSpans, answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tokens that hold something of an answer, as transformers counts them."""
    # a token that stops where an answer starts, or starts where it stops, holds nothing of it
    first_token = np.searchsorted(spans.stops, answers[:, 0], "right")
    token_behind = np.searchsorted(spans.starts, answers[:, 1], "left")
    # answers that begin, less those that have ended, token by token: above 0 within one
    steps = np.zeros(len(spans.ids) + 1, np.int64)
    np.add.at(steps, first_token, 1)
    np.add.at(steps, np.maximum(first_token, token_behind), -1)
    answers_around = np.cumsum(steps)[:-1]
    return np.asarray(answers_around > 0)


def find_template(name: str, tokenizer: str | None) -> ChatTemplate:
    """A template by its name: `chatml`, `llama3`, `tokenizer` (or `tokenizer:NAME`, one of
    several), a file, or as it is written.

    tokenizer: as `load_tokenizer` takes it; its template and the names of its special tokens are
    in the folder of its tokenizer.json. Raises ConvertError, ObjectNotFoundError.
    """
    with suppress(ValueError, TypeError):  # other text than that of `as_option`
        return ChatTemplate(**parse_json(name))
    settings = read_settings(tokenizer)
    shown, source = _find(name, tokenizer, settings)
    return ChatTemplate(name=shown, source=source, tokens=special_token_names(settings))


def _find(name: str, tokenizer: str | None, settings: dict[str, Any]) -> tuple[str, str]:
    """(name for messages, source) of a template."""
    if name in BUILT_IN:
        return name, BUILT_IN[name]
    kind, _, name_of_several = name.partition(":")
    if kind == OWN:
        return name, _own(name_of_several, settings, tokenizer)
    if "{{" in name or "{%" in name:
        return "as given", name
    try:
        with open(name, encoding="utf-8") as file:
            return os.path.basename(name), file.read()
    except UnicodeDecodeError:
        raise ConvertError(
            f"{name}: a chat template is a text file in UTF-8; this file is not"
        ) from None
    except OSError as error:
        known = ", ".join((*BUILT_IN, OWN))
        raise ObjectNotFoundError(
            f"chat template {name!r} is neither {known} nor a readable file ({error.strerror})"
        ) from None


def as_option(template: ChatTemplate) -> str:
    """A template as a setting that any machine can use and that changes with all of it:
    `find_template` reads it back.
    """
    # sorted: it is part of a conversion's fingerprint
    return json.dumps(asdict(template), sort_keys=True)


def _own(name: str, config: dict[str, Any], tokenizer: str | None) -> str:
    """The tokenizer's own: the file in its folder goes before what its settings say, as in
    transformers.
    """
    templates = config.get("chat_template") or {}
    if isinstance(templates, list):
        templates = {item["name"]: item["template"] for item in templates}
    elif isinstance(templates, str):
        templates = {"default": templates}
    file = TEMPLATE if name in ("", "default") else f"chat_templates/{name}.jinja"
    source = read_text(tokenizer, file)
    if source is None:
        source = templates.get(name or "default")
    if source is None:
        is_missing = f"is named {name}" if name else "is there"
        has = f"; it has: {', '.join(sorted(templates))}" if templates else ""
        raise ConvertError(
            f"{tokenizer}: no chat template of its own ({TEMPLATE}, or chat_template of {CONFIG}, "
            f"next to its tokenizer.json) {is_missing}{has}; give --chat-template "
            f"{', '.join(BUILT_IN)} or a file"
        )
    return str(source)
