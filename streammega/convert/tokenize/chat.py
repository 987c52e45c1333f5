"""Conversations by a chat template as tokens: each text is tokenized as a whole, and every token is
an answer's or is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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

    Args: tokenizer: a tokenizer.json, a name on the hub, a .tiktoken file, tiktoken:NAME, or
        `bytes`; or one that is loaded. template: `tokenizer` (its own; `tokenizer:NAME` for one of
        several), `chatml`, `llama3`, or a file. special_tokens: what a special token that a message
        spells becomes: `text`, or `parse`, its id.

    Raises ConvertError, ObjectNotFoundError, ConfigError.
    """

    def __init__(
        self,
        tokenizer: str | TextTokenizer,
        template: str | ChatTemplate = "tokenizer",
        *,
        special_tokens: str = "text",
        pattern: str | None = None,
    ) -> None:
        if special_tokens not in ("parse", "text"):
            raise ConfigError(f"special_tokens is {special_tokens!r}; it must be 'parse' or 'text'")
        name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
        self.template = (
            template if isinstance(template, ChatTemplate) else find_template(template, name)
        )
        loaded = (
            load_tokenizer(tokenizer, pattern=pattern) if isinstance(tokenizer, str) else tokenizer
        )
        self._tokenizer = placing(loaded, name)
        names = tuple(self._tokenizer.special_tokens)
        _check_needed(self.template, names, name)
        self._special = SpecialTokens.of(names, parse=special_tokens == "parse")
        self._always_stands_in = self._tokenizer.folds_letters and special_tokens == "text"

    def conversation(self, record: Any, where: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A record's token ids int32 [tokens], and bool [tokens]: what the assistant says.

        Raises FormatError.
        """
        return self.encode([self.render(record, where)])[0]

    def render(self, record: Any, where: str) -> Rendered:
        """A record as text. Raises FormatError that names where it came from."""
        return self.template.render(record, where, self._special)

    def encode(
        self, chats: Sequence[Rendered]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Ids and answers of each; the tokenizer works on several at once."""
        as_it_is = [not chat.breaks and not self._always_stands_in for chat in chats]
        plain = iter(
            self._tokenizer.place(
                [chat.text for chat, its in zip(chats, as_it_is, strict=True) if its]
            )
        )
        found = []
        for chat, its in zip(chats, as_it_is, strict=True):
            if its:
                placed = next(plain)
                tokenizer = self._tokenizer
            else:
                chat = self._with_stand_ins(chat)
                tokenizer = self._by_stand_ins
                placed = tokenizer.place([chat.text])[0]
            answers = (
                _in_bytes(chat)
                if tokenizer.in_bytes
                else np.array(chat.answers, np.int64).reshape(-1, 2)
            )
            found.append((placed.ids, _covered(placed, answers)))
        return found

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
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
        if found := re.search(f"[{chr(STAND_IN)}-{last}]", chat.text):
            raise FormatError(
                f"{chat.where}: spells a special token, and holds the private character U+{ord(found[0]):X}, which is "
                f"needed to keep it text; leave out one of the two"
            )
        longest_first = sorted(self._stand_ins, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        text: list[str] = []
        # characters of the new text by which each of the old moves what is behind
        kept = np.ones(len(chat.text) + 1, np.int64)
        start = 0
        for stop in [*chat.breaks, len(chat.text)]:
            for found in pattern.finditer(chat.text, start, stop):
                kept[found.start() + 1 : found.end()] = 0
            text.append(pattern.sub(lambda token: self._stand_ins[token[0]], chat.text[start:stop]))
            start = stop
        moved = np.cumsum(kept) - kept
        answers = [(int(moved[low]), int(moved[high])) for low, high in chat.answers]
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
        f"{name}: a SentencePiece model does not say what a chat template's special tokens are; use its tokenizer.json"
    )


def _check_needed(template: ChatTemplate, names: Sequence[str], tokenizer: str) -> None:
    """Raise ConvertError where a built-in template would write letters in place of
    special tokens.
    """
    missing = [token for token in NEEDED.get(template.name, ()) if token not in names]
    if missing and tokenizer != "bytes":
        raise ConvertError(
            f"{tokenizer}: has no special token {', '.join(missing)}, which chat template {template.name} writes; use the "
            f"template that the tokenizer was made for, or add them to it"
        )


def _covered(placed: Placed, answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tokens that hold something of an answer, as transformers counts them."""
    first = np.searchsorted(placed.stops, answers[:, 0], "right")
    last = np.searchsorted(placed.starts, answers[:, 1], "left")
    steps = np.zeros(len(placed.ids) + 1, np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, np.maximum(first, last), -1)
    return np.asarray(np.cumsum(steps)[:-1] > 0)


def _in_bytes(chat: Rendered) -> NDArray[np.int64]:
    """Answers by bytes of UTF-8."""
    bounds = [0, *(bound for answer in chat.answers for bound in answer)]
    sizes = [
        len(chat.text[low:high].encode()) for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return np.cumsum(np.array(sizes, np.int64)).reshape(-1, 2)


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
        found = []
        for first in range(0, len(texts), AT_ONCE):
            for encoding in self._model.encode_batch(
                texts[first : first + AT_ONCE], add_special_tokens=False
            ):
                offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                found.append(
                    Placed(
                        ids=np.array(encoding.ids, np.int32),
                        starts=offsets[:, 0],
                        stops=offsets[:, 1],
                    )
                )
        return found

    def respelt(self, spellings: dict[str, str]) -> PlacingTokenizer:
        """By other names in all of its lists, with the same ids."""
        described = dict(self._described)
        described["added_tokens"] = [
            item | {"content": spellings[item["content"]], "normalized": False}
            if item["content"] in spellings
            else item
            for item in described["added_tokens"]
        ]
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
        found = []
        for text in texts:
            ids = self._model.encode(text, allowed_special="all")
            stops = np.cumsum(
                [len(token) for token in self._model.decode_tokens_bytes(ids)], dtype=np.int64
            )
            starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if len(stops) else stops
            found.append(Placed(ids=np.array(ids, np.int32), starts=starts, stops=stops))
        return found

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
        found = []
        ((token, number),) = self.special_tokens.items()
        for text in texts:
            ids: list[NDArray[np.int32]] = []
            sizes: list[NDArray[np.int64]] = []
            for part, piece in enumerate(text.split(token)):
                if part:
                    ids.append(np.array([number], np.int32))
                    sizes.append(np.array([len(token.encode())], np.int64))
                ids.append(np.frombuffer(piece.encode(), np.uint8).astype(np.int32))
                sizes.append(np.ones(len(ids[-1]), np.int64))
            stops = np.cumsum(np.concatenate(sizes))
            found.append(
                Placed(ids=np.concatenate(ids), starts=stops - np.concatenate(sizes), stops=stops)
            )
        return found

    def respelt(self, spellings: dict[str, str]) -> PlacingTokenizer:
        """With another spelling of the end."""
        return _Bytes({spellings[token]: number for token, number in self.special_tokens.items()})
