"""Chat templates: a conversation as the text a model is trained on, and where in it the assistant's
answers are.

Templates are written in jinja, as `transformers` has them: they get `messages`, `tools`,
`documents`, `add_generation_prompt` and the names of special tokens. They are foreign code:
they run in jinja's sandbox, on plain data, and learn nothing of the machine or the day.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config.validate import parse_json
from streammega.convert.options import digest_of_json
from streammega.dataset.conversations import encodable, joined_content, turns_of
from streammega.errors import ConfigError, ConvertError, FormatError
from streammega.errors.cached_property import cached_property

BEGIN = "\U0010fffe"
END = "\U0010ffff"
BREAK = "\U000ffffe"
"""Noncharacters, which no text holds: around an answer while it is rendered, and within what must
not be a special token.
"""
MARKS = re.compile(f"[{BEGIN}{END}{BREAK}]")
_BLANKS = re.compile(r"\s*")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""How the reasoning of an answer is called, as transformers knows it."""
PROBE = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
]
"""A conversation by which a template's family is found."""
MAX_RENDERED = 1 << 20
"""Messages that are rendered for one conversation to find its answers by prefixes, at most: some
ten seconds.
"""


MAX_STEPS = 10_000_000
"""Steps of loops, and calls, of a template for one text, at most: some seconds."""
STEPS = "steps that are left"
"""What a render counts them by: not a name that a template could set or look at."""


class Family:
    """Templates that write an answer between a header and an end.

    headers: what stands before an answer. One that begins with an end is written by the model
    itself, where an answer is open: it goes on to its next channel.
    ends: what ends an answer, which is learned too.
    """

    def __init__(self, name: str, headers: Sequence[str], ends: Sequence[str]) -> None:
        self.name = name
        self.headers = tuple(headers)
        self.ends = tuple(ends)

    @cached_property
    def in_messages(self) -> re.Pattern[str]:
        """Finds headers and ends that a message spells."""
        return spelling_pattern((*self.headers, *self.ends))

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        return re.compile(any_of((*self.headers, *self.ends)))

    def answers(self, text: str, breaks: Sequence[int]) -> list[tuple[int, int]]:
        """[start, stop) characters of each answer, with its end.

        breaks: places within the headers and ends that messages spell, which count for nothing.
        """
        answers: list[tuple[int, int]] = []
        start: int | None = None
        for piece_start, piece_stop in itertools.pairwise((0, *breaks, len(text))):
            for marker in self._markers.finditer(text, piece_start, piece_stop):
                if marker[0] not in self.headers:
                    if start is not None:
                        answers.append((start, marker.end()))
                    start = None
                elif start is None or not marker[0].startswith(self.ends):
                    # The last header counts: a question may stand behind an unanswered one.
                    start = marker.end()
        return answers


FAMILIES = (
    Family("ChatML, Qwen", ["<|im_start|>assistant\n"], ["<|im_end|>"]),
    Family(
        "Llama 3",
        ["<|start_header_id|>assistant<|end_header_id|>\n\n"],
        ["<|eot_id|>", "<|eom_id|>"],
    ),
    Family("Mistral, Llama 2", ["[/INST]", "[/TOOL_RESULTS]"], ["</s>"]),
    Family("Gemma", ["<start_of_turn>model\n"], ["<end_of_turn>"]),
    Family("Gemma 4", ["<|turn>model\n"], ["<turn|>"]),
    Family("Phi-3", ["<|assistant|>\n"], ["<|end|>", "<|end|>\n<|endoftext|>"]),
    Family("Phi-4-mini", ["<|assistant|>"], ["<|end|>", "<|end|><|endoftext|>"]),
    Family("Phi-4", ["<|im_start|>assistant<|im_sep|>"], ["<|im_end|>"]),
    Family(
        "DeepSeek",
        ["<｜Assistant｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"],
        ["<｜end▁of▁sentence｜>"],
    ),
    Family(
        "gpt-oss",
        ["<|start|>assistant", "<|end|><|start|>assistant"],
        ["<|end|>", "<|call|>", "<|return|>"],
    ),
)


def any_of(names: Collection[str]) -> str:
    """An expression for the longest of some texts. Without texts it fits nowhere."""
    if not names:
        return "(?!)"
    # an expression takes the first of its alternatives that fits
    longest_first = sorted(names, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, longest_first))})"


def spelling_pattern(names: Collection[str]) -> re.Pattern[str]:
    """Finds some tokens in a message, and at its end what could become one with the text behind."""
    begins = {name[:size] for name in names for size in range(1, len(name))}
    # some tokenizers fold letters
    return re.compile(f"{any_of(names)}|{any_of(begins)}\\Z", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: Sequence[tuple[int, int]]
    """[start, stop) characters of what is learned, in order."""
    where: str
    """Where the record came from, for messages."""
    breaks: Sequence[int] = ()
    """Places within special tokens that messages spell: these are text, and no tokens of the
    template.
    """
    encoded: tuple[NDArray[np.int32], NDArray[np.bool_]] | None = None
    """Its ids, and which of them are answers; None: it is encoded together with others."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """What templates have to know of a tokenizer's special tokens."""

    names: tuple[str, ...]
    """Their spellings."""
    in_messages: re.Pattern[str] | None = None
    """Finds those that are text where messages spell them; None: they are tokens there too."""

    @classmethod
    def of(cls, names: Sequence[str], *, parse: bool) -> SpecialTokens:
        """Finds tokens, and what could become one together with the text behind it."""
        if parse or not names:
            return cls(names=tuple(names))
        return cls(names=tuple(names), in_messages=spelling_pattern(names))

    def turn_stop(self, text: str, start: int, stop: int, next_role: str) -> int:
        """Where a turn of the assistant ends that has text[start:stop]. next_role: of the message
        after it, or "".

        Blanks behind the token that ends it (a newline) are the template's. Where there is none, as
        in GLM-4, it is the token of the next role.
        """
        bare = text[start:stop].rstrip()
        if bare.endswith(self.names):
            return start + len(bare)
        behind = _BLANKS.match(text, stop)
        place = behind.end() if behind else stop
        if next_role in ("", "assistant") or not text.startswith(self.names, place):
            return stop
        return place + max(len(name) for name in self.names if text.startswith(name, place))


class Conversation(NamedTuple):
    """Messages as a template takes them, the schemas of tools, and where they came from."""

    turns: list[dict[str, Any]]
    tools: Any
    where: str


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template."""

    name: str
    """For messages."""
    source: str
    tokens: dict[str, str]
    """Special tokens of the tokenizer by the names that templates have for them: `bos_token`."""

    @property
    def record(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {"name": self.name, "digest": digest_of_json([self.source, self.tokens])}

    @cached_property
    def family(self) -> Family | None:
        """The family that writes two answers as this template does; None: it is of another."""
        try:
            text = self._text(Conversation(PROBE, None, ""))
        except FormatError:
            return None
        for family in FAMILIES:
            answers = [text[start:stop] for start, stop in family.answers(text, ())]
            if len(answers) != 2 or any("question" in answer for answer in answers):
                continue
            if "first answer" in answers[0] and "second answer" in answers[1]:
                return family
        return None

    @cached_property
    def compiled(self) -> Any:
        """The compiled template. Raises ConvertError if it is broken."""
        return self._compile(marks=False)

    @cached_property
    def _compiled_with_marks(self) -> Any:
        return self._compile(marks=True)

    def _compile(self, *, marks: bool) -> Any:
        environment = _environment(marks=marks)
        try:
            return environment.from_string(self.source)
        except Exception as error:  # it becomes Python, whose errors pass through
            raise ConvertError(
                f"chat template {self.name}: is not a jinja template ({error})"
            ) from None

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it has `{% generation %}` blocks, which say what the assistant writes."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it looks into contents that are lists of parts, each with a `text`; others get
        the texts joined.
        """
        from jinja2 import nodes

        tree = self.compiled.environment.parse(self.source)
        # `part.text` and `part["text"]`
        by_attribute = {node.attr for node in tree.find_all(nodes.Getattr)}
        by_item = [getattr(node.arg, "value", None) for node in tree.find_all(nodes.Getitem)]
        return "text" in by_attribute or "text" in by_item

    def render(self, record: Any, where: str, tokens: SpecialTokens) -> Rendered:
        """A record as text, with its answers. Raises FormatError that names where it came from."""
        chat = Conversation(self._turns(record, where), _tools(record, where), where)
        self._check_written(chat)
        text = self._text(chat)
        mark = MARKS.search(text)
        if mark:
            raise FormatError(
                f"{where}: holds the noncharacter U+{ord(mark[0]):X}, which no text has; "
                f"leave it out"
            )
        find = self._marked_answers if self.marks_answers else self._answers_of_family
        answers = find(chat, text)
        if answers is None:
            roles = [turn["role"] for turn in chat.turns]
            next_roles = [
                after
                for role, after in zip(roles, [*roles[1:], ""], strict=True)
                if role == "assistant"
            ]
            answers = [
                (start, tokens.turn_stop(text, start, stop, after))
                for (start, stop), after in zip(self._prefixes(chat, text), next_roles, strict=True)
            ]
        breaks: Sequence[int] = ()
        if tokens.in_messages is not None:
            breaks = self._breaks(chat, text, tokens.in_messages)
        return Rendered(text=text, answers=answers, where=where, breaks=breaks)

    def _turns(self, record: Any, where: str) -> list[dict[str, Any]]:
        """The messages of a record, as the template takes their contents and transformers their
        reasoning.
        """
        turns = [_with_reasoning(turn) for turn in turns_of(record, where)]
        if self.takes_parts:
            return turns
        joined: list[dict[str, Any]] = []
        for turn in turns:
            if "content" in turn:
                turn = turn | {"content": joined_content(turn["content"])}
            joined.append(turn)
        return joined

    def _check_written(self, chat: Conversation) -> None:
        """Raise FormatError for tools and their calls that the template would leave out without a
        word.
        """
        where = chat.where
        for number, turn in enumerate(chat.turns, 1):
            if turn.get("tool_calls") and "tool_calls" not in self.source:
                raise FormatError(
                    f"{where}: message {number} has tool calls, which chat template {self.name} "
                    f"does not write"
                )
        if chat.tools and not re.search(r"\btools\b", self.source):
            raise FormatError(
                f"{where}: names tools, which chat template {self.name} does not write; "
                f"leave them out"
            )

    def _text(self, chat: Conversation, *, prompt: bool = False, marks: bool = False) -> str:
        import jinja2

        template = self._compiled_with_marks if marks else self.compiled
        names = {
            "messages": chat.turns,
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": prompt,
            STEPS: [MAX_STEPS],
        } | self.tokens
        try:
            text = template.render(names)
        except ConfigError as error:
            raise ConfigError(f"chat template {self.name} {error}") from None
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise FormatError(
                f"{chat.where}: chat template {self.name} cannot write it ({error})"
            ) from None
        return encodable(text, chat.where)

    def _marked_answers(self, chat: Conversation, text: str) -> list[tuple[int, int]]:
        """By `{% generation %}` blocks: marks around what they hold go wherever that goes."""
        marked = self._text(chat, marks=True)
        bare, places = without_marks(marked)
        signs = [sign for sign, _ in places]
        if bare != text or signs != [BEGIN, END] * (len(signs) // 2):
            raise FormatError(
                f"{chat.where}: chat template {self.name} changes what its generation blocks hold, "
                f"so the places of answers are not known"
            )
        bounds = [place for _, place in places]
        starts = bounds[0::2]
        stops = bounds[1::2]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _answers_of_family(self, chat: Conversation, text: str) -> list[tuple[int, int]] | None:
        """Between the headers and ends of the template's family; None: of no family, or it does not
        write one answer for each message of the assistant.
        """
        if self.family is None:
            return None
        breaks = self._breaks(chat, text, self.family.in_messages)
        answers = self.family.answers(text, breaks)
        num_messages = sum(turn["role"] == "assistant" for turn in chat.turns)
        return answers if len(answers) == num_messages else None

    def _prefixes(self, chat: Conversation, text: str) -> list[tuple[int, int]]:
        """For a template without such blocks: an answer is what its message adds to the prompt that
        asks for it.

        It is so if the text up to the prompt, and up to the end of the message, begins the text of
        the whole; else it is an error.
        """
        turns, where = chat.turns, chat.where
        numbers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        # of each answer the messages before it twice, and itself
        rendered_messages = sum(2 * number + 1 for number in numbers)
        if rendered_messages > MAX_RENDERED:
            raise FormatError(
                f"{where}: has {len(numbers):,} answers in {len(turns):,} messages; to find so "
                f"many, chat template {self.name} needs generation blocks around what the "
                f"assistant writes"
            )
        answers: list[tuple[int, int]] = []
        for number in numbers:
            earlier = chat._replace(turns=turns[:number])
            before = self._text(earlier) if number else ""
            prompted = self._text(earlier, prompt=True)
            ended = text
            if number + 1 < len(turns):
                ended = self._text(chat._replace(turns=turns[: number + 1]))
            fault = _fault_of_prefixes(turns[number], before, prompted, ended, text)
            if fault:
                raise FormatError(
                    f"{where}: the places of answers cannot be found by chat template {self.name} "
                    f"(message {number + 1}: {fault}); put {{% generation %}} and "
                    f"{{% endgeneration %}} around what the assistant writes"
                )
            answers.append((len(prompted), len(ended)))
        return answers

    def _breaks(self, chat: Conversation, text: str, special: re.Pattern[str]) -> Sequence[int]:
        """Where special tokens that messages spell are to be broken: they are followed through the
        template by marks.
        """
        turns, tools, where = chat
        try:
            broken = Conversation(_broken(turns, special), _broken(tools, special), where)
        except RecursionError:
            raise FormatError(f"{where}: is nested too deeply") from None
        if broken == chat:
            return ()
        bare, places = without_marks(self._text(broken))
        if bare != text:
            raise FormatError(
                f"{where}: a message spells a special token, and chat template {self.name} changes "
                f"it, so it cannot be kept from being one; leave it out"
            )
        return [place for _, place in places]


def without_marks(text: str) -> tuple[str, list[tuple[str, int]]]:
    """A text without its marks, and (mark, place in that text) of each."""
    places: list[tuple[str, int]] = []
    for marks_before, mark in enumerate(MARKS.finditer(text)):
        places.append((mark[0], mark.start() - marks_before))
    return MARKS.sub("", text), places


def _fault_of_prefixes(
    turn: dict[str, Any], before: str, prompted: str, ended: str, text: str
) -> str | None:
    """Why what a template adds for an answer may be more than that answer, or less; None: it is
    that answer.

    before: the text up to the answer; prompted: with the prompt for it; ended: with the answer; text:
    of the whole conversation.
    """
    if not text.startswith(ended):
        return "it writes a message in another way when more of them follow"
    if not ended.startswith(prompted):
        return "an answer does not begin as the generation prompt does"
    if prompted != before:
        return None
    # no prompt, or none for it: then nothing but the answer itself may stand there
    content = (joined_content(turn.get("content")) or "").strip()
    added = ended[len(prompted) :].lstrip()
    if not content or not added.startswith(content):
        return "it has no generation prompt that tells headers from answers"
    return None


def _broken(value: Any, special: re.Pattern[str]) -> Any:
    """Plain data with marks behind the characters of every special token, or beginning of one, that
    a text in it spells.

    Behind each of them: a token may be within another, or reach out of it.
    """
    if isinstance(value, str):
        return special.sub(lambda token: BREAK.join(token[0]) + BREAK, value)
    if isinstance(value, list):
        return [_broken(item, special) for item in value]
    if not isinstance(value, dict):
        return value
    broken: dict[Any, Any] = {}
    for name, item in value.items():
        # roles and types are compared by templates
        is_looked_for = name in ("role", "type")
        broken_item = _broken_name(item, special) if is_looked_for else _broken(item, special)
        broken[_broken_name(name, special)] = broken_item
    return broken


def _broken_name(name: Any, special: re.Pattern[str]) -> Any:
    """A plain word is a name that templates look for, and only looks like the beginning of a
    token.
    """
    return name if str(name).isidentifier() else _broken(name, special)


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning by the names that templates look for."""
    reasoning = next((turn[name] for name in REASONING if name in turn), None)
    if reasoning is None:
        return turn
    return {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _tools(record: Any, where: str) -> Any:
    """The schemas of a record's tools; None without any."""
    tools = record.get("tools") if isinstance(record, dict) else None
    if isinstance(tools, str):  # as tables hold them
        try:
            tools = parse_json(tools) if tools.strip() else None
        except ValueError:
            raise FormatError(
                f"{where}: 'tools' is text, and not JSON; give a list of schemas"
            ) from None
    if tools is not None and not isinstance(tools, list):
        raise FormatError(
            f"{where}: 'tools' is to be a list of schemas, not {type(tools).__name__}"
        )
    return tools or None


def _environment(*, marks: bool) -> Any:
    """jinja as chat templates expect it: blocks take their newline and indent along, `tojson` keeps
    letters as they are.

    marks: whether what generation blocks hold gets marks around it.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012  # as jinja wants it

        def parse(self, parser: Any) -> Any:
            """A call of `_marked` with what the block holds."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body)
            return call.set_lineno(line)

        def _marked(self, caller: Any) -> str:
            held: str = caller()
            return f"{BEGIN}{held}{END}" if marks else held

    class Namespace(jinja2.utils.Namespace):
        """Without names that Python gives a meaning to."""

        def __init__(*args: Any, **names: Any) -> None:  # so that `self` may be a name too
            namespace, *others = args
            values = dict(*others, **names)
            for name in values:
                _check_name(name)
            jinja2.utils.Namespace.__init__(namespace, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    class Environment(ImmutableSandboxedEnvironment):
        """Ends what loops, recurses or takes powers for ever."""

        intercepted_binops = frozenset({"**"})

        def _generate(self, source: Any, *args: Any, **options: Any) -> Any:
            for loop in list(source.find_all(jinja2.nodes.For)):
                loop.iter = jinja2.nodes.Filter(loop.iter, "counted", [], [], None, None)
            return super()._generate(source, *args, **options)

        def call(*args: Any, **names: Any) -> Any:  # so that `self` may be a name too
            _, context, *_ = args
            result = ImmutableSandboxedEnvironment.call(*args, **names)
            _take_steps(context, len(result) if isinstance(result, range) else 1)
            return result

        def call_binop(self, context: Any, operator: str, *operands: Any) -> Any:
            raise jinja2.exceptions.SecurityError(f"{operator} is not for templates")

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters |= {"tojson": _as_json, "counted": jinja2.pass_context(_counted)}
    # what they write is another text each time
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _refuse_date,
        "namespace": Namespace,
        "dict": _dictionary,
    }
    return environment


def _counted(context: Any, items: Any) -> Any:
    """What a loop goes through."""
    if hasattr(items, "__len__"):
        _take_steps(context, len(items))
        return items
    return _counted_one_by_one(context, items)


def _counted_one_by_one(context: Any, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _take_steps(context, 1)
        yield item


def _take_steps(context: Any, count: int) -> None:
    import jinja2

    steps = context.parent[STEPS]
    steps[0] -= count
    if steps[0] < 0:
        raise jinja2.exceptions.SecurityError(
            f"it takes more than {MAX_STEPS:,} steps of loops and calls"
        )


def _check_name(name: Any) -> None:
    import jinja2

    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter would spell <, > and & for web pages."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(str(message))


def _refuse_date(*args: Any) -> None:
    raise ConfigError(
        "writes today's date, and tokens must not depend on the day; let a copy of it begin with "
        "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
    )


def _dictionary(*args: Any, **names: Any) -> dict[Any, Any]:
    return dict(*args, **names)
