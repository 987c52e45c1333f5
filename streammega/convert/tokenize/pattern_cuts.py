"""Where a regular expression that cuts text into words is sure to cut: read from the expression
itself.

A match can only go over the place between two characters if some part of the expression takes the
first and a part that may follow it takes the second. Where no such parts are, no match and no
attempt at one crosses the place: what is before it is cut as if the text ended there, and what is
behind it as if the text began there. What is not understood is refused.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

Takes = Callable[[str], bool]
"""Whether a part of an expression may take a character."""


class NotUnderstood(Exception):
    """For expressions with more in them than is read here: then no cut is sure."""


@dataclass
class _Node:
    """A piece of an expression: the parts it may begin and end with, and whether it may take
    nothing; `once`: a single part that takes one character or more.
    """

    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    empty: bool = True
    once: bool = False


Item = tuple[range, bool, bool]
"""Of an alternative: the parts of a piece of it, whether it may take nothing,
whether it is `once`.
"""


class PatternCuts:
    """An expression of the dialects of tiktoken and tokenizers, read. Raises NotUnderstood."""

    def __init__(self, expression: str) -> None:
        self._text = expression
        self._at = 0
        self._parts: list[Takes] = []
        self._follow: set[tuple[int, int]] = set()
        self._looks_ahead: set[int] = set()
        self._whole: list[list[Item]] = []
        self._ignore_case = False
        self._alternatives(top=True)
        if self._at < len(expression):
            raise NotUnderstood(expression)

    def never_joins(self, left: str, right: str) -> bool:
        """Whether no match has `right` directly behind `left`, nor depends on what
        follows `left`.
        """
        if any(self._parts[part](left) for part in self._looks_ahead):
            return False
        return not any(self._parts[a](left) and self._parts[b](right) for a, b in self._follow)

    def takes_alone(self, character: str) -> bool:
        """Whether a match begins at this character wherever one may begin: some alternative takes
        it and needs nothing else.
        """
        return any(self._alone(items, character) for items in self._whole)

    def _alone(self, items: list[Item], character: str) -> bool:
        takers = [
            (empty, once)
            for parts, empty, once in items
            if any(self._parts[part](character) for part in parts)
        ]
        return takers == [(False, True)] and sum(not empty for _, empty, _ in items) == 1

    def _alternatives(self, *, top: bool = False) -> _Node:
        whole = _Node(empty=False)
        while True:
            node, items = self._sequence()
            whole.first |= node.first
            whole.last |= node.last
            whole.empty |= node.empty
            if top and items is not None:
                self._whole.append(items)
            if not self._accept("|"):
                return whole

    def _sequence(self) -> tuple[_Node, list[Item] | None]:
        """One alternative, and its pieces if nothing in it looks ahead."""
        whole = _Node()
        items: list[Item] = []
        looks_ahead = False
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            before = self._at
            known = len(self._parts)
            node = self._quantified()
            # a look at the next character, which decides over what was taken before it
            if node is None:
                self._looks_ahead |= whole.last
                looks_ahead = True
                if whole.empty:
                    raise NotUnderstood(self._text[before:])
                continue
            items.append((range(known, len(self._parts)), node.empty, node.once))
            self._join(whole.last, node.first)
            whole.first |= node.first if whole.empty else set()
            whole.last = node.last | (whole.last if node.empty else set())
            whole.empty &= node.empty
        return whole, None if looks_ahead else items

    def _join(self, lasts: set[int], firsts: set[int]) -> None:
        self._follow |= {(a, b) for a in lasts for b in firsts}

    def _quantified(self) -> _Node | None:
        node = self._atom()
        if node is None:
            return None
        start = self._at
        if self._accept("{"):
            stop = self._text.index("}", self._at)
            low, comma, high = self._text[self._at : stop].partition(",")
            self._at = stop + 1
            if not low.isdigit() or (high and not high.isdigit()):
                raise NotUnderstood(self._text[start:])
            node.empty |= low == "0"
            repeats = bool(comma) or int(low) > 1
            node.once &= low == "1"
        elif self._at < len(self._text) and self._text[self._at] in "?*+":
            sign = self._text[self._at]
            self._at += 1
            node.empty |= sign in "?*"
            repeats = sign in "*+"
        else:
            return node
        if repeats:
            self._join(node.last, node.first)
        if not self._accept("+"):  # possessive, or lazy: it takes less than it could, never more
            self._accept("?")
        return node

    def _atom(self) -> _Node | None:
        sign = self._text[self._at]
        self._at += 1
        if sign == "(":
            return self._group()
        if sign == "$":
            return None
        if sign == "[":
            return self._part(self._class())
        if sign == "\\":
            return self._part(self._escape())
        if sign == ".":
            return self._part(lambda character: True)
        if sign in "^*+?{}":
            raise NotUnderstood(self._text)
        return self._part(self._literal(sign))

    def _group(self) -> _Node | None:
        if self._accept("?!") or self._accept("?="):
            self._look()
            return None
        before = self._ignore_case
        if self._accept("?i:"):
            self._ignore_case = True
        elif not self._accept("?:") and not self._accept("?>") and self._text[self._at] == "?":
            raise NotUnderstood(self._text)
        node = self._alternatives()
        self._ignore_case = before
        looked = self._looks_ahead & node.last
        if looked:  # what follows the group is looked at from within it: too much to follow here
            raise NotUnderstood(self._text)
        if not self._accept(")"):
            raise NotUnderstood(self._text)
        return node

    def _look(self) -> None:
        """A look at a single character."""
        known = len(self._parts)
        follow = set(self._follow)
        looks = set(self._looks_ahead)
        self._alternatives()
        if not self._accept(")") or self._follow != follow or self._looks_ahead != looks:
            raise NotUnderstood(self._text)
        del self._parts[known:]  # it takes nothing

    def _part(self, takes: Takes) -> _Node:
        self._parts.append(takes)
        number = len(self._parts) - 1
        return _Node(first={number}, last={number}, empty=False, once=True)

    def _literal(self, sign: str) -> Takes:
        if self._ignore_case:
            folded = sign.casefold()
            return lambda character: character.casefold() == folded
        return lambda character: character == sign

    def _class(self) -> Takes:
        negated = self._accept("^")
        members: list[Takes] = []
        while not self._accept("]"):
            if self._at >= len(self._text) or self._text.startswith(("[", "&&"), self._at):
                raise NotUnderstood(self._text)
            members.append(self._member())
        return lambda character: any(takes(character) for takes in members) != negated

    def _member(self) -> Takes:
        sign = self._text[self._at]
        self._at += 1
        if sign == "\\":
            named = self._text[self._at]
            takes = self._escape()
            if named in "pPsSdDwWhH":
                return takes
            sign = {"r": "\r", "n": "\n", "t": "\t"}.get(named, named)
        if not (
            self._text.startswith("-", self._at)
            and self._text[self._at + 1 : self._at + 2] not in ("]", "")
        ):
            return self._literal(sign)
        last = self._text[self._at + 1]
        if last == "\\" or self._ignore_case:
            raise NotUnderstood(self._text)
        self._at += 2
        return lambda character: sign <= character <= last

    def _escape(self) -> Takes:
        sign = self._text[self._at]
        self._at += 1
        if sign in "pP":
            return self._property(negated=sign == "P")
        if sign in "sS":
            return lambda character: is_space(character) == (sign == "s")
        if sign in "dD":
            return lambda character: (unicodedata.category(character) == "Nd") == (sign == "d")
        if sign in "rnt":
            return self._literal({"r": "\r", "n": "\n", "t": "\t"}[sign])
        if sign.isalnum():
            raise NotUnderstood(self._text)
        return self._literal(sign)

    def _property(self, *, negated: bool) -> Takes:
        if self._accept("{"):
            stop = self._text.index("}", self._at)
            name = self._text[self._at : stop]
            self._at = stop + 1
        else:
            name = self._text[self._at]
            self._at += 1
        if name not in CATEGORIES and name not in {category[0] for category in CATEGORIES}:
            raise NotUnderstood(self._text)
        return lambda character: unicodedata.category(character).startswith(name) != negated

    def _accept(self, sign: str) -> bool:
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        return True


CATEGORIES = (
    *(
        "Lu",
        "Ll",
        "Lt",
        "Lm",
        "Lo",
        "Mn",
        "Mc",
        "Me",
        "Nd",
        "Nl",
        "No",
        "Pc",
        "Pd",
        "Ps",
        "Pe",
        "Pi",
        "Pf",
        "Po",
    ),
    *("Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co"),
)


def is_space(character: str) -> bool:
    """White space as expressions count it; Python also counts the separators U+1C to U+1F."""
    return character.isspace() and not "\x1c" <= character <= "\x1f"
