"""Records of conversations: `{"messages": [{"role", "content"}, ...]}` or `{"conversations": [{"from", "value"}, ...]}`.

Read in one way by fine-tuning and by conversion. Either list may hold turns of either spelling, and a list or a turn that is null
in one of them (as columns of a table are) is looked for in the other. Anything else is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from streammega.errors import FormatError

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool"}
"""How roles are spelt, and what they are."""
LISTS = ("messages", "conversations")
SPELLINGS = (("role", "content"), ("from", "value"))


@dataclass(frozen=True)
class Message:
    """One turn: its role (a value of ROLES) and its text."""

    role: str
    text: str

    @property
    def header(self) -> str:
        """What stands before the text: `<|role|>` and a newline."""
        return f"<|{self.role}|>\n"

    @property
    def is_answer(self) -> bool:
        """Whether there is something to learn in it."""
        return self.role == "assistant"


def load_record(data: bytes, where: str) -> Any:
    """A JSON record. Raises FormatError that names where it came from."""
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: broken JSON ({error}); mend the line, or leave it out") from None


def not_utf8(where: str, error: UnicodeDecodeError) -> FormatError:
    """For text in another encoding."""
    return FormatError(f"{where}: is not UTF-8 text (byte {error.start}); convert it with iconv, or leave it out")


def messages_of(record: Any, where: str) -> list[Message]:
    """The turns of a record, in order; none for an empty list. Raises FormatError that names where it came from."""
    turns = None
    if isinstance(record, dict):
        turns = next((record[name] for name in LISTS if record.get(name) is not None), None)
    if not isinstance(turns, list):
        raise FormatError(f"{where}: has neither a list of 'messages' nor of 'conversations'")
    return [_message(turn, where) for turn in turns]


def _message(turn: Any, where: str) -> Message:
    role = text = None
    if isinstance(turn, dict):
        for role_name, text_name in SPELLINGS:
            role, text = turn.get(role_name), turn.get(text_name)
            if role is not None or text is not None:
                break
    if not isinstance(role, str) or role not in ROLES or not isinstance(text, str):
        raise FormatError(f"{where}: a message needs a role of {', '.join(ROLES)} and a text, not {role!r}")
    return Message(ROLES[role], encodable(text, where))


def encodable(text: str, where: str) -> str:
    """The text itself. JSON can spell half a character, which no tokenizer takes: that is a FormatError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{where}: holds half of a character (a lone surrogate, character {error.start}); leave it out"
        ) from None
    return text
