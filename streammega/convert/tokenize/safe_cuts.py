"""Where a text can be cut so that its pieces have the ids of the whole: proven for each tokenizer
from what it is made of.

A cut lies between a letter or digit and a blank or a comma behind it. It is sure if nothing that a
tokenizer does looks over it: added tokens, normalizers, and words that end there, or, where text is
not cut into words, a vocabulary without a token across it. What is not known here is never sure.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from streammega.convert.tokenize.pattern_cuts import NotUnderstood, PatternCuts
from streammega.convert.tokenize.tokenizers import (
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TextTokenizer,
    TiktokenTokenizer,
)  # fmt: skip

BLANKS = " \n"
RIGHTS = " \n，。、,."
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Of the pre-tokenizer ByteLevel."""
Sure = Callable[[str, str], bool]
"""Whether a text may be cut between two characters."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Where texts may be cut. drops_blank: the tokenizer puts a blank before what it is given, in
    place of the one at the cut.

    next_ones: characters that must not follow such a blank.
    """

    sure: Sure
    rights: str = RIGHTS
    anywhere: bool = False
    drops_blank: bool = False
    next_ones: frozenset[str] = frozenset()

    def find(self, text: str, low: int, high: int) -> int | None:
        """The last place in (low, high] where the text may be cut, if there is one."""
        if self.anywhere:
            return high if high > low else None
        places = {right: text.rfind(right, low + 1, high) for right in self.rights}
        while (place := max(places.values())) > 0:
            if self._holds(text, place):
                return place
            places[text[place]] = text.rfind(text[place], low + 1, place)
        return None

    def _holds(self, text: str, place: int) -> bool:
        if (
            place + 1 >= len(text)
            or not is_plain(text[place - 1])
            or not self.sure(text[place - 1], text[place])
        ):
            return False
        following = text[place + 1]
        return not self.drops_blank or (is_plain(following) and following not in self.next_ones)

    def behind(self, text: str, place: int) -> int:
        """Where what is behind a cut begins, as the tokenizer is to be given it."""
        return place + 1 if self.drops_blank and place else place


@lru_cache(maxsize=65536)
def is_plain(character: str) -> bool:
    """A letter or digit that is so in every version of Unicode, and no part of one (as the letters
    of Hangul are).
    """
    category = unicodedata.category(character)
    if category[0] not in "LN" or unicodedata.ucd_3_2_0.category(character) != category:
        return False
    return len(character.lower()) == 1 and not "\u1100" <= character <= "\u11ff"


def cuts_of(tokenizer: TextTokenizer) -> Cuts | None:
    """Where texts of a tokenizer may be cut; None: nowhere that could be proven."""
    try:
        if isinstance(tokenizer, BytesTokenizer):
            return Cuts(sure=lambda left, right: True, anywhere=True)
        if isinstance(tokenizer, TiktokenTokenizer):
            pattern = PatternCuts(tokenizer.model._pat_str)
            return _cuts(
                pattern.never_joins,
                _inner_pairs(list(tokenizer.model._special_tokens)),
                RIGHTS,
                folds=False,
            )
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return _of_huggingface(json.loads(tokenizer.model.to_str()))
        if isinstance(tokenizer, SentencePieceTokenizer):
            return _of_sentencepiece(tokenizer.model)
    except NotUnderstood:
        pass
    return None


def _cuts(
    sure: Sure, pairs: set[tuple[str, str]], rights: str, *, folds: bool, **others: Any
) -> Cuts:
    """pairs: characters side by side in added tokens. folds: whether a normalizer may have made the
    first another one.
    """

    @lru_cache(maxsize=65536)
    def however_spelt(left: str, right: str) -> bool:
        spellings = {left, left.lower()}
        if any((one, right) in pairs for one in spellings):
            return False
        if folds:
            spellings |= {part for one in spellings for part in unicodedata.normalize("NFKD", one)}
        else:
            spellings = {left}
        return all(sure(one, right) for one in spellings)

    return Cuts(sure=however_spelt, rights=rights, **others)


def _inner_pairs(tokens: Sequence[str]) -> set[tuple[str, str]]:
    """Characters that stand side by side in tokens."""
    return {
        pair
        for token in tokens
        for own in (token, token.lower())
        for pair in zip(own, own[1:], strict=False)
    }


class _Pipeline:
    """The steps of a tokenizer.json before its model: what looks over a cut, what ends a word
    there, what a blank becomes.
    """

    def __init__(self, described: dict[str, Any]) -> None:
        self.rights = RIGHTS
        self.blank = " "
        """What a blank is when the model sees it."""
        self.patterns: list[PatternCuts] = []
        self.enders: list[PatternCuts | None] = []
        """What ends words: a pattern, where it takes what is behind the cut; None: something that
        ends them at every blank.
        """
        self.drops_blank = False
        self.in_bytes = False
        for step in _steps(described.get("normalizer"), "normalizers"):
            self._normalizer(step, described)
        for step in _steps(described.get("pre_tokenizer"), "pretokenizers"):
            self._pre_tokenizer(step)

    def looks_over(self, left: str, right: str) -> bool:
        """Whether some step may."""
        return not all(pattern.never_joins(left, right) for pattern in self.patterns)

    def ends_words(self, left: str, right: str) -> bool:
        """Whether some step surely ends a word between the two."""
        return any(pattern is None or pattern.takes_alone(right) for pattern in self.enders)

    def _normalizer(self, step: dict[str, Any], described: dict[str, Any]) -> None:
        kind = step["type"]
        if kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"):
            self._keep(BLANKS)
        elif kind == "BertNormalizer":
            if (described.get("pre_tokenizer") or {}).get("type") != "BertPreTokenizer":
                raise NotUnderstood(kind)
            self._keep(BLANKS)
        elif kind == "Prepend":
            self.drops_blank = True
            self._keep(" ")
            self._prepended = step["prepend"]
        elif kind == "Replace" and step["pattern"] == {"String": " "} and len(step["content"]) == 1:
            self.blank = step["content"]
            self._keep(" ")
        else:
            raise NotUnderstood(kind)

    def _pre_tokenizer(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level(step)
        elif kind == "Split":
            self._split(step)
        elif kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
            self._keep(BLANKS if self.blank == " " else "")
            self.enders.append(None)
        elif kind == "Metaspace":
            self.blank = step["replacement"]
            self._keep(" ")
            if step.get("split", True):
                self.enders.append(None)
        elif kind not in ("Digits", "Punctuation"):
            raise NotUnderstood(kind)
        else:
            self._keep(BLANKS)

    def _byte_level(self, step: dict[str, Any]) -> None:
        if self.blank != " ":
            raise NotUnderstood("ByteLevel behind another blank")
        self.in_bytes = True
        if step.get("add_prefix_space"):  # to what does not begin with a blank
            self._keep(" ")
        if step.get("use_regex", True):
            self._pattern(GPT2)
            self.enders.append(self.patterns[-1])

    def _split(self, step: dict[str, Any]) -> None:
        if self.blank != " " or self.in_bytes or step["behavior"] not in ("Isolated", "Removed"):
            raise NotUnderstood(str(step))
        if "Regex" not in step["pattern"]:
            raise NotUnderstood(str(step))
        self._pattern(step["pattern"]["Regex"])
        if not step["invert"]:
            self.enders.append(self.patterns[-1])
        elif step["behavior"] == "Removed":  # the matches are the words, and none goes over the cut
            self.enders.append(None)

    def _pattern(self, expression: str) -> None:
        self.patterns.append(PatternCuts(expression))

    def _keep(self, rights: str) -> None:
        self.rights = "".join(right for right in self.rights if right in rights)


def _steps(described: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if described is None:
        return []
    return described[inner] if described["type"] == "Sequence" else [described]


def _of_huggingface(described: dict[str, Any]) -> Cuts:
    steps = _Pipeline(described)
    model = described["model"]
    if model.get("dropout"):
        raise NotUnderstood("dropout")
    added = described.get("added_tokens") or []
    pairs = _inner_pairs([item["content"] for item in added])
    pairs |= {
        (item["content"][-1:].lower(), right)
        for item in added
        if item["rstrip"]
        for right in BLANKS
    }
    alone = {item["content"][:1] for item in added if item["single_word"]}
    rights = "".join(right for right in steps.rights if right not in alone)
    firsts = frozenset(item["content"][:1] for item in added)
    joins_blank = _joins_blank(model, steps)

    def sure(left: str, right: str) -> bool:
        if steps.looks_over(left, right):
            return False
        return steps.ends_words(left, right) or (right == " " and not joins_blank(left))

    if steps.drops_blank and steps._prepended != steps.blank:
        raise NotUnderstood("Prepend")
    folds = described.get("normalizer") is not None
    return _cuts(sure, pairs, rights, folds=folds, drops_blank=steps.drops_blank, next_ones=firsts)


def _joins_blank(model: dict[str, Any], steps: _Pipeline) -> Callable[[str], bool]:
    """Whether a token may hold a blank behind a character, where nothing ends words: of a model of
    pairs its vocabulary tells.
    """
    blank = "Ġ" if steps.in_bytes else steps.blank
    pairs_only = (
        model.get("type") == "BPE"
        and not model.get("end_of_word_suffix")
        and not model.get("continuing_subword_prefix")
    )
    if not pairs_only or blank not in model["vocab"]:
        return lambda left: True
    lefts = _before(blank, list(model["vocab"]))
    # A letter of several bytes is none in a vocabulary of bytes.
    return lambda left: left in lefts or (steps.in_bytes and not left.isascii())


def _before(blank: str, tokens: Sequence[str]) -> frozenset[str]:
    return frozenset(
        left
        for token in tokens
        for left, right in zip(token, token[1:], strict=False)
        if right == blank
    )


def _of_sentencepiece(model: Any) -> Cuts:
    trainer, normalizer = _specifications(model.serialized_model_proto())
    known = normalizer.get(1, b"").decode("utf-8", "replace")
    if (
        trainer.get(3, 1) != 2
        or trainer.get(24, 0)
        or known not in ("identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
    ):
        raise NotUnderstood(
            "of these, only models of pairs, without blanks at the end of words, are cut"
        )
    prefix = bool(normalizer.get(3, 1))
    if not normalizer.get(5, 1) or (not prefix and normalizer.get(4, 1)):
        raise NotUnderstood("blanks")
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    if "▁" not in pieces:
        raise NotUnderstood("blanks")
    across = _before("▁", pieces)
    return _cuts(lambda left, right: left not in across, set(), " ", folds=True, drops_blank=prefix)


def _specifications(data: bytes) -> tuple[dict[int, Any], dict[int, Any]]:
    """Fields of the trainer's and of the normalizer's part of a model, by their numbers
    (sentencepiece_model.proto).
    """
    found = dict(_fields(data))
    return dict(_fields(found.get(2, b""))), dict(_fields(found.get(3, b"")))


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """(number, value) of a protobuf message: integers, or bytes."""
    fields: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, 0)
            if kind == 2:
                size, at = _varint(data, at)
            value = data[at : at + size]
            at += size
        fields.append((key >> 3, value))
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
