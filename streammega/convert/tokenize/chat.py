"""Conversations by a chat template as tokens: each text is tokenized as a whole, and every token is
an answer's or is not.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streammega.convert.tokenize.chat_sources import NEEDED, find_template
from streammega.convert.tokenize.chat_templates import ChatTemplate, Rendered, SpecialTokens
from streammega.convert.tokenize.tokenizers import (
    AT_ONCE,
    BytesTokenizer,
    HuggingFaceTokenizer,
    TextTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
)  # fmt: skip
from streammega.errors import ConfigError, ConvertError, FormatError

STAND_IN = 0x100000
"""The first of the private characters that stand for a template's special tokens where messages
spell some too.
"""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A text as tokens, and where each lies in it: bytes or characters [start, stop), int64."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class PlacingTokenizer(Protocol):
    """A tokenizer that parses special tokens and says where tokens lie: in bytes of UTF-8, or in
    characters.
    """

    special_tokens: dict[str, int]
    in_bytes: bool
    folds_letters: bool
    """Whether other spellings of a special token may be it too."""

    def place(self, texts: list[str]) -> list[Placed]:
        """Tokens of texts."""

    def respelt(self, spellings: dict[str, str]) -> PlacingTokenizer:
        """The same, but for special tokens, which it knows by other spellings; by their own they
        are text.
        """


class ChatEncoder:
    """Conversations to token ids, with what is to be learned of them, by a chat template.

    Args:
        tokenizer: a tokenizer.json, a name on the hub, a .tiktoken file, tiktoken:NAME, or `bytes`;
            or one that is loaded.
        template: `tokenizer` (its own; `tokenizer:NAME` for one of several), `chatml`, `llama3`, or
            a file.
        variables: what the template may look at besides the conversation, as the keyword arguments
            of transformers' apply_chat_template: `{"enable_thinking": False}`. `strftime_now` is a
            day, "2026-01-31".
        special_tokens: what a special token that a message spells becomes: `text`, or `parse`, its
            id.
        pattern: how a .tiktoken file cuts text.

    Raises ConvertError, ObjectNotFoundError, ConfigError.
    """

    def __init__(
        self,
        tokenizer: str | TextTokenizer,
        template: str | ChatTemplate = "tokenizer",
        *,
        variables: Mapping[str, Any] | None = None,
        special_tokens: str = "text",
        pattern: str | None = None,
    ) -> None:
        if special_tokens not in ("parse", "text"):
            raise ConfigError(f"special_tokens is {special_tokens!r}; it must be 'parse' or 'text'")
        name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
        if isinstance(template, str):
            template = find_template(template, name, variables)
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, pattern=pattern)
        self.template = template
        self._tokenizer = placing(tokenizer, name)
        names = tuple(self._tokenizer.special_tokens)
        _check_needed(self.template, names, name)
        self._special = SpecialTokens.of(names, parse=special_tokens == "parse")
        # Where letters are folded, no search in a text tells which spellings would become tokens.
        self._always_stands_in = self._tokenizer.folds_letters and special_tokens == "text"

    def conversation(self, record: Any, where: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A record's token ids int32 [tokens], and bool [tokens]: what the assistant says.

        Raises FormatError.
        """
        (encoded,) = self.encode([self.render(record, where)])
        return encoded

    def render(self, record: Any, where: str) -> Rendered:
        """A record as text. Raises FormatError that names where it came from."""
        return self.template.render(record, where, self._special)

    def encode(
        self, chats: Sequence[Rendered]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Ids and answers of each; the tokenizer works on several at once."""
        plain_texts = [chat.text for chat in chats if not self._needs_stand_ins(chat)]
        plain = iter(self._tokenizer.place(plain_texts))
        encoded: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
        for chat in chats:
            if self._needs_stand_ins(chat):
                chat = self._with_stand_ins(chat)
                (placed,) = self._by_stand_ins.place([chat.text])
            else:
                placed = next(plain)
            answers = np.array(chat.answers, np.int64).reshape(-1, 2)
            if self._tokenizer.in_bytes:
                answers = _in_bytes(chat)
            encoded.append((placed.ids, _covered(placed, answers)))
        return encoded

    def _needs_stand_ins(self, chat: Rendered) -> bool:
        """Whether special tokens of the template must be told from those that messages spell."""
        return bool(chat.breaks) or self._always_stands_in

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        """A private character for each special token."""
        return {
            token: chr(STAND_IN + number)
            for number, token in enumerate(self._tokenizer.special_tokens)
        }

    @cached_property
    def _by_stand_ins(self) -> PlacingTokenizer:
        return self._tokenizer.respelt(self._stand_ins)

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
        # longest first: an expression takes the first of its alternatives that fits
        longest_first = sorted(self._stand_ins, key=len, reverse=True)
        any_token = re.compile("|".join(map(re.escape, longest_first)))
        text: list[str] = []
        # 1 for each character that the new text has too: of a token one stands for all of its own
        kept = np.ones(len(chat.text) + 1, np.int64)
        start = 0
        # A token that a break goes through is a message's: between breaks it is not found whole.
        for stop in [*chat.breaks, len(chat.text)]:
            for token in any_token.finditer(chat.text, start, stop):
                kept[token.start() + 1 : token.end()] = 0
            part = chat.text[start:stop]
            text.append(any_token.sub(lambda token: self._stand_ins[token[0]], part))
            start = stop
        place_in_new = np.cumsum(kept) - kept
        answers = [(int(place_in_new[low]), int(place_in_new[high])) for low, high in chat.answers]
        return replace(chat, text="".join(text), answers=answers)


def placing(tokenizer: TextTokenizer, name: str) -> PlacingTokenizer:
    """A tokenizer that can place tokens. Raises ConfigError for one that cannot."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _HuggingFace(json.loads(tokenizer.model.to_str()))
    if isinstance(tokenizer, TiktokenTokenizer):
        return _Tiktoken(tokenizer.model, dict(tokenizer.model._special_tokens))
    if isinstance(tokenizer, BytesTokenizer):
        return _Bytes({"<|endoftext|>": 256})
    raise ConfigError(
        f"{name}: a SentencePiece model does not say what a chat template's special tokens are; "
        f"use its tokenizer.json"
    )


def _check_needed(template: ChatTemplate, names: Sequence[str], tokenizer: str) -> None:
    """Raise ConvertError where a built-in template would write letters in place of special
    tokens.
    """
    missing = [token for token in NEEDED.get(template.name, ()) if token not in names]
    if missing and tokenizer != "bytes":
        raise ConvertError(
            f"{tokenizer}: has no special token {', '.join(missing)}, which chat template "
            f"{template.name} writes; use the template that the tokenizer was made for, or add "
            f"them to it"
        )


def _covered(placed: Placed, answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tokens that hold something of an answer, as transformers counts them."""
    # a token that stops where an answer starts, or starts where it stops, holds nothing of it
    first_token = np.searchsorted(placed.stops, answers[:, 0], "right")
    token_behind = np.searchsorted(placed.starts, answers[:, 1], "left")
    # answers that begin, less those that have ended, token by token: above 0 within one
    steps = np.zeros(len(placed.ids) + 1, np.int64)
    np.add.at(steps, first_token, 1)
    np.add.at(steps, np.maximum(first_token, token_behind), -1)
    answers_around = np.cumsum(steps)[:-1]
    return np.asarray(answers_around > 0)


def _in_bytes(chat: Rendered) -> NDArray[np.int64]:
    """Answers by bytes of UTF-8, int64 [answers, 2]."""
    # answers rise and do not overlap, so every character is encoded once
    bounds = [0, *itertools.chain.from_iterable(chat.answers)]
    sizes = [len(chat.text[low:high].encode()) for low, high in itertools.pairwise(bounds)]
    return np.cumsum(np.array(sizes, np.int64)).reshape(-1, 2)


def _end_to_end(ids: NDArray[np.int32], sizes: NDArray[np.int64]) -> Placed:
    """Tokens of so many bytes each, one behind the other."""
    stops = np.cumsum(sizes)
    return Placed(ids=ids, starts=stops - sizes, stops=stops)


class _HuggingFace:
    """A tokenizer.json without its post-processor, which would add tokens of its own and narrow the
    places of others.
    """

    in_bytes = False

    def __init__(self, described: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self._described = described | {"post_processor": None, "truncation": None, "padding": None}
        self._model = Tokenizer.from_str(json.dumps(self._described))
        added = described.get("added_tokens") or []
        special = [item for item in added if item["special"] and not item["single_word"]]
        self.special_tokens: dict[str, int] = {item["content"]: item["id"] for item in special}
        self.folds_letters = bool(described.get("normalizer")) and any(
            item["normalized"] for item in special
        )

    def place(self, texts: list[str]) -> list[Placed]:
        """By the offsets of the library."""
        placed: list[Placed] = []
        # a few at a time: encodings of many are so large that making them waits for memory
        for first in range(0, len(texts), AT_ONCE):
            some = texts[first : first + AT_ONCE]
            for encoding in self._model.encode_batch(some, add_special_tokens=False):
                ids = np.array(encoding.ids, np.int32)
                offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                placed.append(Placed(ids=ids, starts=offsets[:, 0], stops=offsets[:, 1]))
        return placed

    def respelt(self, spellings: dict[str, str]) -> PlacingTokenizer:
        """By other names in all of its lists, with the same ids."""
        described = dict(self._described)
        added: list[dict[str, Any]] = []
        for item in described["added_tokens"]:
            if item["content"] in spellings:
                item = item | {"content": spellings[item["content"]], "normalized": False}
            added.append(item)
        described["added_tokens"] = added
        model = dict(described["model"])
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {
                spellings.get(token, token): number for token, number in vocabulary.items()
            }
        else:  # of a unigram model: pairs of a token and its score
            model["vocab"] = [[spellings.get(token, token), score] for token, score in vocabulary]
        if model.get("unk_token"):
            model["unk_token"] = spellings.get(model["unk_token"], model["unk_token"])
        return _HuggingFace(described | {"model": model})


class _Tiktoken:
    """An encoding of tiktoken, whose tokens lie end to end."""

    in_bytes = True
    folds_letters = False

    def __init__(self, model: Any, special_tokens: dict[str, int]) -> None:
        self._model = model
        self.special_tokens = special_tokens

    def place(self, texts: list[str]) -> list[Placed]:
        """By the bytes of the tokens."""
        placed: list[Placed] = []
        for text in texts:
            ids = self._model.encode(text, allowed_special="all")
            sizes = np.array(list(map(len, self._model.decode_tokens_bytes(ids))), np.int64)
            placed.append(_end_to_end(np.array(ids, np.int32), sizes))
        return placed

    def respelt(self, spellings: dict[str, str]) -> PlacingTokenizer:
        """The same pairs and pattern with other special tokens."""
        import tiktoken

        special = {spellings[token]: number for token, number in self.special_tokens.items()}
        pairs = self._model._mergeable_ranks
        model = tiktoken.Encoding(
            "respelt", pat_str=self._model._pat_str, mergeable_ranks=pairs, special_tokens=special
        )
        return _Tiktoken(model, special)


class _Bytes:
    """Bytes, and the end of a document."""

    in_bytes = True
    folds_letters = False

    def __init__(self, special_tokens: dict[str, int]) -> None:
        self.special_tokens = special_tokens

    def place(self, texts: list[str]) -> list[Placed]:
        """A token for each byte, and for each special token."""
        placed: list[Placed] = []
        ((token, number),) = self.special_tokens.items()
        token_id = np.array([number], np.int32)
        token_size = np.array([len(token.encode())], np.int64)
        for text in texts:
            ids: list[NDArray[np.int32]] = []
            sizes: list[NDArray[np.int64]] = []
            for part, piece in enumerate(text.split(token)):
                if part > 0:
                    ids.append(token_id)
                    sizes.append(token_size)
                its_bytes = np.frombuffer(piece.encode(), np.uint8)
                ids.append(its_bytes.astype(np.int32))
                sizes.append(np.ones(len(its_bytes), np.int64))
            placed.append(_end_to_end(np.concatenate(ids), np.concatenate(sizes)))
        return placed

    def respelt(self, spellings: dict[str, str]) -> PlacingTokenizer:
        """With another spelling of the end."""
        return _Bytes({spellings[token]: number for token, number in self.special_tokens.items()})
