"""Where a regular expression that cuts text into words is sure to cut: read from the expression
itself.

A match can only go over the place between two characters if some part of the expression takes the
first and a part that may follow it takes the second. Where no such parts are, no match and no
attempt at one crosses the place: what is before it is cut as if the text ended there, and what is
behind it as if the text began there. What is not understood is refused.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

Takes = Callable[[str], bool]
"""Whether a part of an expression may take a character."""

SPELT_ESCAPES = {"r": "\r", "n": "\n", "t": "\t"}
CLASSES_BY_LETTER = "pPsSdDwWhH"
"""Letters that stand for many characters behind a backslash."""


class NotUnderstood(Exception):
    """For expressions with more in them than is read here: then no cut is sure."""


@dataclass
class _Node:
    """A piece of an expression."""

    first: set[int] = field(default_factory=set)
    """The parts it may begin with, by their numbers."""
    last: set[int] = field(default_factory=set)
    """The parts it may end with."""
    empty: bool = True
    """Whether it may take nothing."""
    once: bool = False
    """Whether it is a single part that takes one character or more."""


@dataclass(frozen=True)
class _Step:
    """A piece of an alternative: its parts, and as of a node."""

    parts: range
    empty: bool
    once: bool


class PatternCuts:
    """An expression of the dialects of tiktoken and tokenizers, read. Raises NotUnderstood."""

    def __init__(self, expression: str) -> None:
        self._text = expression
        self._position = 0
        """Of what is read next."""
        self._parts: list[Takes] = []
        self._follow: set[tuple[int, int]] = set()
        """Parts of which the second may take what is directly behind what the first took."""
        self._looks_ahead: set[int] = set()
        """Parts behind which the expression looks at the next character."""
        self._whole: list[list[_Step]] = []
        """The alternatives of the whole, but for those that look ahead."""
        self._ignore_case = False
        self._alternatives(top=True)
        if self._position < len(expression):
            raise NotUnderstood(expression)

    def never_joins(self, left: str, right: str) -> bool:
        """Whether no match has `right` directly behind `left`, nor depends on what follows
        `left`.
        """
        if any(self._parts[part](left) for part in self._looks_ahead):
            return False
        return not any(
            self._parts[before](left) and self._parts[behind](right)
            for before, behind in self._follow
        )

    def takes_alone(self, character: str) -> bool:
        """Whether a match begins at this character wherever one may begin: some alternative takes
        it and needs nothing else.
        """
        return any(self._alone(steps, character) for steps in self._whole)

    def _alone(self, steps: list[_Step], character: str) -> bool:
        """Whether of an alternative one step takes the character, and no other has to take any."""
        needed = [step for step in steps if not step.empty]
        takers = [
            step for step in steps if any(self._parts[part](character) for part in step.parts)
        ]
        return len(needed) == 1 and takers == needed and needed[0].once

    def _alternatives(self, *, top: bool = False) -> _Node:
        whole = _Node(empty=False)
        while True:
            node, steps = self._sequence()
            whole.first |= node.first
            whole.last |= node.last
            whole.empty |= node.empty
            if top and steps is not None:
                self._whole.append(steps)
            if not self._accept("|"):
                return whole

    def _sequence(self) -> tuple[_Node, list[_Step] | None]:
        """One alternative, and its steps if nothing in it looks ahead."""
        whole = _Node()
        steps: list[_Step] = []
        looks_ahead = False
        while self._position < len(self._text) and self._text[self._position] not in "|)":
            start = self._position
            first_part = len(self._parts)
            node = self._quantified()
            if node is None:
                # a look at the next character, which decides over what was taken before it
                self._looks_ahead |= whole.last
                looks_ahead = True
                if whole.empty:
                    raise NotUnderstood(self._text[start:])
                continue
            parts = range(first_part, len(self._parts))
            steps.append(_Step(parts, node.empty, node.once))
            self._join(whole.last, node.first)
            if whole.empty:
                whole.first |= node.first
            if node.empty:
                whole.last |= node.last
            else:
                whole.last = node.last
            whole.empty &= node.empty
        return whole, None if looks_ahead else steps

    def _join(self, lasts: set[int], firsts: set[int]) -> None:
        """Note that each of the second may follow each of the first."""
        self._follow.update(itertools.product(lasts, firsts))

    def _quantified(self) -> _Node | None:
        """An atom with what is said of how often it is taken; None: it takes nothing, and looks."""
        node = self._atom()
        if node is None:
            return None
        start = self._position
        if self._accept("{"):
            low, comma, high = self._until("}").partition(",")
            if not low.isdigit() or (high and not high.isdigit()):
                raise NotUnderstood(self._text[start:])
            node.empty |= low == "0"
            repeats = bool(comma) or int(low) > 1
            node.once &= low == "1"
        elif self._position < len(self._text) and self._text[self._position] in "?*+":
            sign = self._next()
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
        """A character, class or group; None: a look ahead."""
        sign = self._next()
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
        ignored_case = self._ignore_case
        if self._accept("?i:"):
            self._ignore_case = True
        elif not self._accept("?:") and not self._accept("?>") and self._accept("?"):
            raise NotUnderstood(self._text)
        node = self._alternatives()
        self._ignore_case = ignored_case
        if self._looks_ahead & node.last:
            # what follows the group is looked at from within it: too much to follow here
            raise NotUnderstood(self._text)
        if not self._accept(")"):
            raise NotUnderstood(self._text)
        return node

    def _look(self) -> None:
        """A look at a single character."""
        parts_before = len(self._parts)
        follow_before = set(self._follow)
        looks_before = set(self._looks_ahead)
        self._alternatives()
        is_single = self._follow == follow_before and self._looks_ahead == looks_before
        if not self._accept(")") or not is_single:
            raise NotUnderstood(self._text)
        del self._parts[parts_before:]  # it takes nothing

    def _part(self, takes: Takes) -> _Node:
        number = len(self._parts)
        self._parts.append(takes)
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
            # classes within classes, and what is in two of them
            nested = self._text.startswith(("[", "&&"), self._position)
            if nested or self._position >= len(self._text):
                raise NotUnderstood(self._text)
            members.append(self._member())
        return lambda character: any(takes(character) for takes in members) != negated

    def _member(self) -> Takes:
        """A character of a class, a range, or a class by its letter."""
        sign = self._next()
        if sign == "\\":
            letter = self._text[self._position]
            takes = self._escape()
            if letter in CLASSES_BY_LETTER:
                return takes
            sign = SPELT_ESCAPES.get(letter, letter)
        # a hyphen at the end of a class is one itself
        two_next = self._text[self._position : self._position + 2]
        is_range = len(two_next) == 2 and two_next.startswith("-") and not two_next.endswith("]")
        if not is_range:
            return self._literal(sign)
        self._accept("-")
        last = self._next()
        if last == "\\" or self._ignore_case:
            raise NotUnderstood(self._text)
        return lambda character: sign <= character <= last

    def _escape(self) -> Takes:
        """What is behind a backslash."""
        sign = self._next()
        if sign in "pP":
            return self._property(negated=sign == "P")
        if sign in "sS":
            return lambda character: is_space(character) == (sign == "s")
        if sign in "dD":
            return lambda character: (unicodedata.category(character) == "Nd") == (sign == "d")
        if sign in SPELT_ESCAPES:
            return self._literal(SPELT_ESCAPES[sign])
        if sign.isalnum():
            raise NotUnderstood(self._text)
        return self._literal(sign)

    def _property(self, *, negated: bool) -> Takes:
        """Characters of a category of Unicode, `{Lu}`, or of all that begin with a letter, `L`."""
        name = self._until("}") if self._accept("{") else self._next()
        if name not in CATEGORIES and name not in CATEGORY_LETTERS:
            raise NotUnderstood(self._text)
        return lambda character: unicodedata.category(character).startswith(name) != negated

    def _accept(self, sign: str) -> bool:
        """Read a sign if it is next; whether it was."""
        if not self._text.startswith(sign, self._position):
            return False
        self._position += len(sign)
        return True

    def _next(self) -> str:
        """Read a character."""
        sign = self._text[self._position]
        self._position += 1
        return sign

    def _until(self, end: str) -> str:
        """Read what is before a sign, and the sign."""
        stop = self._text.index(end, self._position)
        text = self._text[self._position : stop]
        self._position = stop + len(end)
        return text


CATEGORIES = frozenset(
    (
        *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No"),
        *("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"),
        *("Zs", "Zl", "Zp", "Cc", "Cf", "Co"),
    )
)
CATEGORY_LETTERS = frozenset(category[0] for category in CATEGORIES)


def is_space(character: str) -> bool:
    """White space as expressions count it; Python also counts the separators U+1C to U+1F."""
    return character.isspace() and not "\x1c" <= character <= "\x1f"
