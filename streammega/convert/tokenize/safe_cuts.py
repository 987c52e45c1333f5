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
from itertools import pairwise
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
"""Characters before which a text may be cut."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Of the pre-tokenizer ByteLevel."""
Sure = Callable[[str, str], bool]
"""Whether a text may be cut between two characters."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Where texts may be cut."""

    sure: Sure
    rights: str = RIGHTS
    """Characters before which they are."""
    anywhere: bool = False
    drops_blank: bool = False
    """The tokenizer puts a blank before what it is given, in place of the one at the cut: what is
    behind the cut is given without it.
    """
    next_ones: frozenset[str] = frozenset()
    """Characters that must not follow such a blank."""

    def find(self, text: str, low: int, high: int) -> int | None:
        """The last place in (low, high] where the text may be cut, if there is one."""
        if self.anywhere:
            return high if high > low else None
        # the last of each character is searched once, and again only where a cut was refused there
        last_place_of = {right: text.rfind(right, low + 1, high) for right in self.rights}
        place = max(last_place_of.values())
        while place > 0:
            if self._holds(text, place):
                return place
            right = text[place]
            last_place_of[right] = text.rfind(right, low + 1, place)
            place = max(last_place_of.values())
        return None

    def _holds(self, text: str, place: int) -> bool:
        """Whether a cut at a place is sure."""
        if place + 1 >= len(text):
            return False  # what follows is not known yet
        left = text[place - 1]
        right = text[place]
        following = text[place + 1]
        if not is_plain(left) or not self.sure(left, right):
            return False
        if not self.drops_blank:
            return True
        return is_plain(following) and following not in self.next_ones


@lru_cache(maxsize=65536)
def is_plain(character: str) -> bool:
    """A letter or digit that is so in every version of Unicode, and no part of one (as the letters
    of Hangul are).
    """
    category = unicodedata.category(character)
    if not category.startswith(("L", "N")):
        return False
    # tokenizers bring tables of their own version of Unicode
    if unicodedata.ucd_3_2_0.category(character) != category:
        return False
    is_part_of_hangul = "\u1100" <= character <= "\u11ff"
    return len(character.lower()) == 1 and not is_part_of_hangul


def cuts_of(tokenizer: TextTokenizer) -> Cuts | None:
    """Where texts of a tokenizer may be cut; None: nowhere that could be proven."""
    try:
        if isinstance(tokenizer, BytesTokenizer):
            return Cuts(sure=lambda left, right: True, anywhere=True)
        if isinstance(tokenizer, TiktokenTokenizer):
            pattern = PatternCuts(tokenizer.model._pat_str)
            pairs = _inner_pairs(list(tokenizer.model._special_tokens))
            return _cuts(pattern.never_joins, pairs, RIGHTS, folds=False)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return _of_huggingface(json.loads(tokenizer.model.to_str()))
        if isinstance(tokenizer, SentencePieceTokenizer):
            return _of_sentencepiece(tokenizer.model)
    except NotUnderstood:
        return None
    return None


def _cuts(
    sure: Sure, pairs: set[tuple[str, str]], rights: str, *, folds: bool, **others: Any
) -> Cuts:
    """pairs: characters side by side in added tokens. folds: whether a normalizer may have made the
    first another one.
    """

    # remembered: texts have few pairs of characters, and each takes a walk over the expressions
    @lru_cache(maxsize=65536)
    def however_spelt(left: str, right: str) -> bool:
        """Whether a cut between two characters is sure, as whatever a normalizer may make of the
        first.
        """
        spellings = {left, left.lower()}
        if any((spelling, right) in pairs for spelling in spellings):
            return False
        if not folds:
            return sure(left, right)
        for spelling in (left, left.lower()):
            spellings.update(unicodedata.normalize("NFKD", spelling))
        return all(sure(spelling, right) for spelling in spellings)

    return Cuts(sure=however_spelt, rights=rights, **others)


def _inner_pairs(tokens: Sequence[str]) -> set[tuple[str, str]]:
    """Characters that stand side by side in tokens, in their letters and in small ones."""
    pairs: set[tuple[str, str]] = set()
    for token in tokens:
        pairs.update(pairwise(token))
        pairs.update(pairwise(token.lower()))
    return pairs


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
        self.prepended = ""
        """What is put before a text, where `drops_blank`."""
        self.in_bytes = False
        """Whether the model sees bytes, spelt as letters."""
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
            self.prepended = step["prepend"]
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
        elif kind in ("Digits", "Punctuation"):
            self._keep(BLANKS)
        else:
            raise NotUnderstood(kind)

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
        # expressions are read as they meet the text itself
        sees_text = self.blank == " " and not self.in_bytes
        behavior = step["behavior"]
        expression = step["pattern"].get("Regex")
        if not sees_text or behavior not in ("Isolated", "Removed") or expression is None:
            raise NotUnderstood(str(step))
        self._pattern(expression)
        if not step["invert"]:
            self.enders.append(self.patterns[-1])
        elif behavior == "Removed":  # the matches are the words, and none goes over the cut
            self.enders.append(None)

    def _pattern(self, expression: str) -> None:
        self.patterns.append(PatternCuts(expression))

    def _keep(self, rights: str) -> None:
        """Cut before these only: others may be changed, or joined with what is before them."""
        self.rights = "".join(right for right in self.rights if right in rights)


def _steps(described: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """One step or several in turn; `inner`: where those of a sequence are."""
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
    for item in added:
        if item["rstrip"]:  # it takes the blanks behind it along
            last = item["content"][-1:].lower()
            pairs |= {(last, blank) for blank in BLANKS}
    # a token that must be a word of its own looks at what is before it
    begin_words = {item["content"][:1] for item in added if item["single_word"]}
    rights = "".join(right for right in steps.rights if right not in begin_words)
    firsts = frozenset(item["content"][:1] for item in added)
    joins_blank = _joins_blank(model, steps)

    def sure(left: str, right: str) -> bool:
        """Whether nothing looks over a cut between two characters."""
        if steps.looks_over(left, right):
            return False
        return steps.ends_words(left, right) or (right == " " and not joins_blank(left))

    if steps.drops_blank and steps.prepended != steps.blank:
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
    before_blanks = _before(blank, list(model["vocab"]))
    # A letter of several bytes is none in a vocabulary of bytes.
    return lambda left: left in before_blanks or (steps.in_bytes and not left.isascii())


def _before(blank: str, tokens: Sequence[str]) -> frozenset[str]:
    """Characters that stand before a blank in some token."""
    lefts: set[str] = set()
    for token in tokens:
        lefts.update(left for left, right in pairwise(token) if right == blank)
    return frozenset(lefts)


def _of_sentencepiece(model: Any) -> Cuts:
    trainer, normalizer = _specifications(model.serialized_model_proto())
    normalization = normalizer.get(NORMALIZER_NAME, b"").decode("utf-8", "replace")
    is_understood = (
        trainer.get(TRAINER_MODEL_TYPE, UNIGRAM) == BPE
        and not trainer.get(TRAINER_BLANK_AT_END, 0)
        and normalization in KNOWN_NORMALIZATIONS
    )
    if not is_understood:
        raise NotUnderstood(
            "of these, only models of pairs, without blanks at the end of words, are cut"
        )
    puts_blank_before = bool(normalizer.get(NORMALIZER_ADDS_BLANK, 1))
    removes_extra_blanks = normalizer.get(NORMALIZER_REMOVES_BLANKS, 1)
    if not normalizer.get(NORMALIZER_ESCAPES_BLANKS, 1):
        raise NotUnderstood("blanks")
    if removes_extra_blanks and not puts_blank_before:
        raise NotUnderstood("blanks")
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    if ESCAPED_BLANK not in pieces:
        raise NotUnderstood("blanks")
    before_blanks = _before(ESCAPED_BLANK, pieces)

    def sure(left: str, right: str) -> bool:
        """Whether no piece holds a blank behind the character on the left."""
        return left not in before_blanks

    return _cuts(sure, set(), " ", folds=True, drops_blank=puts_blank_before)


# Of sentencepiece_model.proto: numbers of fields, and a value.
MODEL_TRAINER = 2
MODEL_NORMALIZER = 3
TRAINER_MODEL_TYPE = 3
TRAINER_BLANK_AT_END = 24
UNIGRAM = 1
BPE = 2
NORMALIZER_NAME = 1
NORMALIZER_ADDS_BLANK = 3
NORMALIZER_REMOVES_BLANKS = 4
NORMALIZER_ESCAPES_BLANKS = 5

ESCAPED_BLANK = "▁"
KNOWN_NORMALIZATIONS = ("identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
"""Those that SentencePiece comes with: others are tables that nothing is known of."""

# Of protobuf's encoding: how the value of a field is written.
WIRE_VARINT = 0
WIRE_EIGHT_BYTES = 1
WIRE_SIZED = 2
WIRE_FOUR_BYTES = 5


def _specifications(data: bytes) -> tuple[dict[int, Any], dict[int, Any]]:
    """Fields of the trainer's and of the normalizer's part of a model, by their numbers
    (sentencepiece_model.proto).
    """
    model = dict(_fields(data))
    trainer = dict(_fields(model.get(MODEL_TRAINER, b"")))
    normalizer = dict(_fields(model.get(MODEL_NORMALIZER, b"")))
    return trainer, normalizer


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """(number, value) of a protobuf message: integers, or bytes."""
    fields: list[tuple[int, Any]] = []
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number = key >> 3
        wire_type = key & 7
        if wire_type == WIRE_VARINT:
            value, position = _varint(data, position)
            fields.append((number, value))
            continue
        size = {WIRE_EIGHT_BYTES: 8, WIRE_FOUR_BYTES: 4}.get(wire_type, 0)
        if wire_type == WIRE_SIZED:
            size, position = _varint(data, position)
        fields.append((number, data[position : position + size]))
        position += size
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(number, position behind it): seven bits a byte, the lowest first, until one has no high
    bit.
    """
    value = 0
    shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
