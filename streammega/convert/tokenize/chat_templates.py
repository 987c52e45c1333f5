"""Chat templates: a conversation as the text a model is trained on, and where in it the assistant's
answers are.

Templates are written in jinja, as `transformers` has them: they get `messages`, `tools`,
`documents`, `add_generation_prompt` and the names of special tokens. They are foreign code: they
run in jinja's sandbox, on plain data, and learn nothing of the machine or the day.

What a message says may look like what a template writes. To tell them apart a conversation is
written twice, the second time with marks: within what messages spell of special tokens and headers,
and around generation blocks. Without its marks that text must be the first one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
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
"""The marks: noncharacters, which no text holds."""
MARKS = re.compile(f"[{BEGIN}{END}{BREAK}]")
MARKS_ANSWERS = "marks around generation blocks"
"""The variable of a template that asks for them: not a name that a template could set or look at."""
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
Span = tuple[int, int]
"""[start, stop) characters of a text."""


class Family(NamedTuple):
    """Templates that write an answer between a header and an end."""

    name: str
    headers: Sequence[str]
    """What stands before an answer. One that begins with an end is written by the model itself, where
    an answer is open: it goes on to its next channel.
    """
    ends: Sequence[str]
    """What ends an answer, which is learned too."""

    def answers(self, text: str, breaks: Sequence[int] = ()) -> list[Span]:
        """Each answer, with its end.

        breaks: places within the headers and ends that messages spell, which count for nothing.
        """
        markers = re.compile(any_of([*self.headers, *self.ends]))
        answers: list[Span] = []
        start: int | None = None
        for piece_start, piece_stop in itertools.pairwise((0, *breaks, len(text))):
            for marker in markers.finditer(text, piece_start, piece_stop):
                if marker[0] not in self.headers:
                    if start is not None:
                        answers.append((start, marker.end()))
                    start = None
                elif start is None or not marker[0].startswith(tuple(self.ends)):
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
    def compiled(self) -> Any:
        """The compiled template. Raises ConvertError if it is broken."""
        try:
            return _environment().from_string(self.source)
        except Exception as error:  # it becomes Python, whose errors pass through
            raise ConvertError(
                f"chat template {self.name}: is not a jinja template ({error})"
            ) from None

    def text(self, chat: Conversation, *, prompt: bool = False, marks: bool = False) -> str:
        """A conversation as text. prompt: with the prompt for an answer. marks: with BEGIN and END
        around what generation blocks hold.

        Raises FormatError that names where it came from; ConfigError for today's date.
        """
        names = {
            "messages": chat.turns,
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": prompt,
            MARKS_ANSWERS: marks,
        }
        try:
            text = self.compiled.render(names | self.tokens)
        except ConfigError as error:
            raise ConfigError(f"chat template {self.name} {error}") from None
        except ConvertError:
            raise
        except Exception as error:  # it is foreign code, which may raise anything
            raise FormatError(
                f"{chat.where}: chat template {self.name} cannot write it ({error})"
            ) from None
        return encodable(text, chat.where)

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

    @cached_property
    def family(self) -> Family | None:
        """The family that writes two answers as this template does; None: it is of another."""
        try:
            text = self.text(Conversation(PROBE, None, ""))
        except FormatError:
            return None
        for family in FAMILIES:
            answers = [text[start:stop] for start, stop in family.answers(text)]
            if len(answers) != 2 or any("question" in answer for answer in answers):
                continue
            if "first answer" in answers[0] and "second answer" in answers[1]:
                return family
        return None

    def read(self, record: Any, where: str) -> Conversation:
        """The messages of a record, as the template takes their contents and transformers their
        reasoning.

        Raises FormatError for no conversation, and for tools and their calls that the template would
        leave out without a word.
        """
        turns: list[dict[str, Any]] = []
        for number, turn in enumerate(turns_of(record, where), 1):
            if turn.get("tool_calls") and "tool_calls" not in self.source:
                raise FormatError(
                    f"{where}: message {number} has tool calls, which chat template {self.name} "
                    f"does not write"
                )
            reasoning = next((turn[name] for name in REASONING if name in turn), None)
            if reasoning is not None:
                turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
            if "content" in turn and not self.takes_parts:
                turn = turn | {"content": joined_content(turn["content"])}
            turns.append(turn)
        tools = _tools(record, where)
        if tools and not re.search(r"\btools\b", self.source):
            raise FormatError(
                f"{where}: names tools, which chat template {self.name} does not write; "
                f"leave them out"
            )
        return Conversation(turns, tools, where)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: Sequence[Span]
    """What is learned, in order."""
    where: str
    """Where the record came from, for messages."""
    breaks: Sequence[int] = ()
    """Places within special tokens that messages spell: these are text, and no tokens of the
    template.
    """
    encoded: tuple[NDArray[np.int32], NDArray[np.bool_]] | None = None
    """Its ids, and which of them are answers; None: it is encoded together with others."""


class Renderer:
    """Records as text by a template, with the places of what is learned.

    special_tokens: the spellings of the tokenizer's. parse: whether they are tokens where messages
    spell them too.
    """

    def __init__(
        self, template: ChatTemplate, special_tokens: Collection[str], *, parse: bool
    ) -> None:
        self.template = template
        self._special_tokens = tuple(special_tokens)
        self._parses = parse
        self._family = None if template.marks_answers else template.family
        spelled = [] if parse else [*special_tokens]
        if self._family is not None:
            spelled += [*self._family.headers, *self._family.ends]
        # At the end of a message what could become one together with the text behind it, too. Some
        # tokenizers fold letters.
        begins = {name[:size] for name in spelled for size in range(1, len(name))}
        expression = f"{any_of(spelled)}|{any_of(begins)}\\Z"
        self._spelled = re.compile(expression, re.IGNORECASE)

    def render(self, record: Any, where: str) -> Rendered:
        """A record as text, with its answers. Raises FormatError that names where it came from."""
        chat = self.template.read(record, where)
        text = self.template.text(chat)
        held = MARKS.search(text)
        if held:
            raise FormatError(
                f"{where}: holds the noncharacter U+{ord(held[0]):X}, which no text has; "
                f"leave it out"
            )
        places = self._places_of_marks(chat, text)
        breaks = [place for mark, place in places if mark == BREAK]
        bounds = [place for mark, place in places if mark != BREAK]
        if self.template.marks_answers:
            spans = zip(bounds[0::2], bounds[1::2], strict=True)
            answers = [(start, stop) for start, stop in spans if start < stop]
        else:
            answers = self._answers(chat, text, breaks)
        return Rendered(
            text=text, answers=answers, where=where, breaks=() if self._parses else breaks
        )

    def _places_of_marks(self, chat: Conversation, text: str) -> list[tuple[str, int]]:
        """(mark, its place in the text) of each mark, in order; they are followed through the
        template.
        """
        turns, tools, where = chat
        try:
            broken = Conversation(
                _broken(turns, self._spelled), _broken(tools, self._spelled), where
            )
        except RecursionError:
            raise FormatError(f"{where}: is nested too deeply") from None
        is_broken = broken != chat
        if not is_broken and not self.template.marks_answers:
            return []
        marked = self.template.text(broken, marks=True)
        places = [(mark[0], mark.start() - n) for n, mark in enumerate(MARKS.finditer(marked))]
        signs = [mark for mark, _ in places if mark != BREAK]
        if MARKS.sub("", marked) == text and signs == [BEGIN, END] * (len(signs) // 2):
            return places
        if is_broken:
            raise FormatError(
                f"{where}: a message spells a special token, and chat template {self.template.name} "
                f"changes it, so it cannot be kept from being one; leave it out"
            )
        raise FormatError(
            f"{where}: chat template {self.template.name} changes what its generation blocks hold, "
            f"so the places of answers are not known"
        )

    def _answers(self, chat: Conversation, text: str, breaks: Sequence[int]) -> list[Span]:
        """Find what no generation blocks mark: between the headers and ends of the template's family,
        if there is one for each message of the assistant; else by prefixes.
        """
        numbers = [n for n, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
        if self._family is not None:
            answers = self._family.answers(text, breaks)
            if len(answers) == len(numbers):
                return answers
        # of each answer the messages before it twice, and itself
        if sum(2 * number + 1 for number in numbers) > MAX_RENDERED:
            raise FormatError(
                f"{chat.where}: has {len(numbers):,} answers in {len(chat.turns):,} messages; to find "
                f"so many, chat template {self.template.name} needs generation blocks around what the "
                f"assistant writes"
            )
        return [self._answer_by_prefixes(chat, text, number) for number in numbers]

    def _answer_by_prefixes(self, chat: Conversation, text: str, number: int) -> Span:
        """What a message adds to the prompt that asks for it, if the text up to the prompt, and up to
        the end of the message, begins the text of the whole; else it is an error.
        """
        turn = chat.turns[number]
        earlier = chat._replace(turns=chat.turns[:number])
        before = self.template.text(earlier) if number else ""
        prompted = self.template.text(earlier, prompt=True)
        ended, next_role = text, ""
        if number + 1 < len(chat.turns):
            ended = self.template.text(chat._replace(turns=chat.turns[: number + 1]))
            next_role = chat.turns[number + 1]["role"]
        content = (joined_content(turn.get("content")) or "").strip()
        added = ended[len(prompted) :].lstrip()
        fault = None
        if not text.startswith(ended):
            fault = "it writes a message in another way when more of them follow"
        elif not ended.startswith(prompted):
            fault = "an answer does not begin as the generation prompt does"
        # no prompt, or none for it: then nothing but the answer itself may stand there
        elif prompted == before and not (content and added.startswith(content)):
            fault = "it has no generation prompt that tells headers from answers"
        if fault:
            raise FormatError(
                f"{chat.where}: the places of answers cannot be found by chat template "
                f"{self.template.name} (message {number + 1}: {fault}); put {{% generation %}} and "
                f"{{% endgeneration %}} around what the assistant writes"
            )
        return len(prompted), self._turn_stop(text, len(prompted), len(ended), next_role)

    def _turn_stop(self, text: str, start: int, stop: int, next_role: str) -> int:
        """Where a turn of the assistant ends that has text[start:stop].

        Blanks behind the token that ends it (a newline) are the template's. Where there is none, as
        in GLM-4, it is the token of the next role.
        """
        bare = text[start:stop].rstrip()
        if bare.endswith(self._special_tokens):
            return start + len(bare)
        following = re.compile(rf"\s*{any_of(self._special_tokens)}").match(text, stop)
        return following.end() if following and next_role not in ("", "assistant") else stop


def _broken(value: Any, spelled: re.Pattern[str], *, is_name: bool = False) -> Any:
    """Plain data with a mark behind each character of what a text in it spells: a token may be
    within another, or reach out of it.

    is_name: templates look for it; a plain word only looks like the beginning of a token there.
    """
    if isinstance(value, str) and not (is_name and value.isidentifier()):
        return spelled.sub(lambda token: BREAK.join(token[0]) + BREAK, value)
    if isinstance(value, list):
        return [_broken(item, spelled) for item in value]
    if isinstance(value, dict):
        return {
            # templates compare roles and types
            _broken(name, spelled, is_name=True): _broken(
                item, spelled, is_name=name in ("role", "type")
            )
            for name, item in value.items()
        }
    return value


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


def _environment() -> Any:
    """jinja's sandbox as chat templates expect it: blocks take their newline and indent along,
    `tojson` keeps letters as they are.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012  # as jinja wants it

        def parse(self, parser: Any) -> Any:
            """A call of `_marked` with what the block holds."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marked = self.call_method("_marked", [nodes.ContextReference()])
            return nodes.CallBlock(marked, [], [], body).set_lineno(line)

        def _marked(self, context: Any, caller: Any) -> str:
            held: str = caller()
            return f"{BEGIN}{held}{END}" if context.parent.get(MARKS_ANSWERS) else held

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    # jinja's own filter would spell <, > and & for web pages
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    # what they write is another text each time
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _refuse_date}
    return environment


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(str(message))


def _refuse_date(*args: Any) -> None:
    raise ConfigError(
        "writes today's date, and tokens must not depend on the day; let a copy of it begin with "
        "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
    )
