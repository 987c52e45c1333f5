"""Records of conversations: `{"messages": [{"role", "content"}, ...]}` or `{"conversations":
[{"from", "value"}, ...]}`.

Fine-tuning and conversion read them in the same way. Either list may have turns of either spelling.
Where one of them is null (as in columns of a table), the other is used. Anything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streammega.config.validate import parse_json
from streammega.errors import FormatError

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "function",
}
"""The role of each spelling."""
LISTS = ("messages", "conversations")
"""The keys of the list of turns, in this order: OpenAI's, and ShareGPT's."""
SPELLINGS = (("role", "content"), ("from", "value"))
"""The keys of role and content of a turn: OpenAI's, and ShareGPT's."""
MAX_SHOWN = 80
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class Message:
    """One turn: its role (a value of ROLES) and its text."""

    role: str
    text: str

    @property
    def header(self) -> str:
        """`<|role|>` and a newline, which come before the text."""
        return f"<|{self.role}|>\n"

    @property
    def is_answer(self) -> bool:
        """Whether it is learned."""
        return self.role == "assistant"


def load_record(data: bytes, where: str) -> Any:
    """A JSON record. Raises FormatError that names where it came from."""
    try:
        # of bytes the json module would guess the encoding, which for one line is a guess too many
        text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogatepass")
        return parse_json(text)
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from None
    except ValueError as error:
        raise FormatError(
            f"{where}: broken JSON ({error}); mend the line, or leave it out"
        ) from None


def not_utf8(where: str, error: UnicodeDecodeError, mend: str = "leave it out") -> FormatError:
    """An error for text in another encoding. mend: what else the user can do."""
    return FormatError(
        f"{where}: is not UTF-8 text (byte {error.start}); convert it with iconv, or {mend}"
    )


def messages_of(record: Any, where: str) -> list[Message]:
    """The turns of a record, in order; none for an empty list.

    Raises FormatError that names where it came from.
    """
    messages = []
    for number, turn in enumerate(_turns(record, where), 1):
        role, content, _ = _role_and_content(turn, number, where)
        if turn.get("tool_calls"):
            raise FormatError(
                f"{where}: message {number}, of role {role!r}, has tool calls, which are written by "
                "a chat template only: give one by --chat-template"
            )
        text = _text_of(content, role, number, where)
        messages.append(Message(role, encodable(text, where)))
    return messages


def turns_of(record: Any, where: str) -> list[dict[str, Any]]:
    """The turns of a record as a chat template takes them: `role` (a value of ROLES), `content` and
    all else that is not null.

    The content is text or a list of parts; it may be missing where there are tool calls. Raises
    FormatError.
    """
    turns = []
    for number, turn in enumerate(_turns(record, where), 1):
        role, content, spelling = _role_and_content(turn, number, where)
        if content is not None or not turn.get("tool_calls"):
            # To check it only: a template takes parts as they are.
            _text_of(content, role, number, where)
        turn_of_template: dict[str, Any] = {"role": role}
        if content is not None:
            turn_of_template["content"] = content
        for name, value in turn.items():
            if value is not None and name not in spelling:
                turn_of_template[name] = value
        turns.append(turn_of_template)
    return turns


def joined_content(content: Any) -> Any:
    """The text of a list of parts; anything else as it is."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content


def _turns(record: Any, where: str) -> list[Any]:
    turns = None
    if isinstance(record, dict):
        turns = next((record[name] for name in LISTS if record.get(name) is not None), None)
    if not isinstance(turns, list):
        raise FormatError(f"{where}: has neither a list of 'messages' nor of 'conversations'")
    return turns


def _role_and_content(turn: Any, number: int, where: str) -> tuple[str, Any, tuple[str, str]]:
    """(role, content, the keys of the two)."""
    role = None
    content = None
    spelling = SPELLINGS[0]
    if isinstance(turn, dict):
        for spelling in SPELLINGS:
            role_name, content_name = spelling
            role = turn.get(role_name)
            content = turn.get(content_name)
            if role is not None or content is not None:
                break
    if not isinstance(role, str) or role not in ROLES:
        raise FormatError(
            f"{where}: message {number} needs a role of {', '.join(ROLES)}, not {_short(role)}"
        )
    return ROLES[role], content, spelling


def _text_of(content: Any, role: str, number: int, where: str) -> str:
    """The text of a content. Raises FormatError for anything else."""
    place = f"{where}: message {number}, of role {role!r},"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FormatError(
            f"{place} needs a text, or a list of parts of type 'text', not {_short(content)}"
        )
    for part in content:
        if not _is_text_part(part):
            raise FormatError(
                f"{place} has a part that is not a text: {_short(part)}; a part is "
                "{'type': 'text', 'text': ...}"
            )
    return str(joined_content(content))


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def encodable(text: str, where: str) -> str:
    """The text itself. Raises FormatError for half a character: JSON can spell one, and no
    tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{where}: holds half of a character (a lone surrogate, character "
            f"{error.start}); leave it out"
        ) from None
    return text
