"""Fine-tuning and conversion read conversations in one way: what one takes, the other takes, and
means the same by it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streammega import DataConfig, SFTDataset, StorageConfig
from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.tokenize.encode import BatchEncoder
from streammega.convert.tokenize.tokenizers import load_tokenizer
from streammega.errors import FormatError, StreammegaError

ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
TWO = [("user", "q"), ("assistant", "a")]

GOOD: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "messages": ({"messages": [ASKED, ANSWERED]}, TWO),
    "conversations": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        TWO,
    ),
    "messages of the other spelling": (
        {"messages": [{"from": "user", "value": "q"}, ANSWERED]},
        TWO,
    ),
    "conversations of the other spelling": ({"conversations": [ASKED, ANSWERED]}, TWO),
    "messages that are null": ({"messages": None, "conversations": [ASKED, ANSWERED]}, TWO),
    "conversations that are null": ({"messages": [ASKED, ANSWERED], "conversations": None}, TWO),
    "both": ({"messages": [ASKED, ANSWERED], "conversations": [ANSWERED]}, TWO),
    "a spelling that is null": (
        {"messages": [{"role": None, "content": None, "from": "human", "value": "q"}, ANSWERED]},
        TWO,
    ),
    "other keys": ({"id": 7, "messages": [ASKED | {"weight": 0}, ANSWERED]}, TWO),
    "empty texts": (
        {"messages": [{"role": "system", "content": ""}, ANSWERED]},
        [("system", ""), ("assistant", "a")],
    ),
    "roles of every kind": (
        {
            "messages": [
                {"role": role, "content": "x"}
                for role in ("developer", "tool", "function", "model")
            ]
        },
        [("developer", "x"), ("tool", "x"), ("function", "x"), ("assistant", "x")],
    ),
    "texts in parts": (
        {
            "messages": [
                ASKED | {"content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]},
                ANSWERED,
            ]
        },
        [("user", "qr"), ("assistant", "a")],
    ),
    "letters of every kind": (
        {"messages": [ASKED, ANSWERED | {"content": "é 😀"}]},
        [("user", "q"), ("assistant", "é 😀")],
    ),
}


def turns(*fields: str) -> bytes:
    """A record of messages, of which the fields are given as JSON spells them."""
    return b'{"messages": [' + ", ".join(f"{{{turn}}}" for turn in fields).encode() + b"]}"


NO_TEXT = "message 1, of role .assistant., needs a text.*not None"
BAD: dict[str, tuple[bytes, str]] = {
    "broken JSON": (b'{"messages": [', "broken JSON"),
    "deep JSON": (b"[" * 100_000, "broken JSON"),
    "not UTF-8": (b'{"messages": "\xff"}', "is not UTF-8"),
    "a list": (b"[1]", "has neither"),
    "text": (b'"text"', "has neither"),
    "nothing": (b"null", "has neither"),
    "no list": (b'{"text": "x"}', "has neither"),
    "messages that are text": (b'{"messages": "q", "conversations": [1]}', "has neither"),
    "messages that are a mapping": (b'{"messages": {"role": "assistant"}}', "has neither"),
    "both null": (b'{"messages": null, "conversations": null}', "has neither"),
    "a turn that is text": (b'{"messages": ["q"]}', "needs a role"),
    "a turn that is null": (b'{"messages": [null]}', "needs a role"),
    "no role": (turns('"content": "a"'), "needs a role"),
    "an unknown role": (turns('"role": "robot", "content": "a"'), "needs a role.*'robot'"),
    "a role that is a list": (turns('"role": ["user"], "content": "a"'), "needs a role"),
    "no text": (turns('"role": "assistant"'), NO_TEXT),
    "text that is null": (turns('"role": "assistant", "content": null'), NO_TEXT),
    "two spellings in a turn": (turns('"role": "assistant", "value": "a"'), NO_TEXT),
    "text of several parts": (
        turns('"role": "assistant", "content": [{"text": "a"}]'),
        "a part that is not a text",
    ),
    "a picture": (
        turns('"role": "user", "content": [{"type": "image_url", "image_url": "x"}]'),
        "message 1, of role .user., has a part that is not a text: .*image_url",
    ),
    "tool calls": (
        turns('"role": "assistant", "content": null, "tool_calls": [1]'),
        "tool calls.*--chat-template",
    ),
    "a wrong text behind a right one": (
        turns('"role": "user", "content": "q"', '"role": "gpt"'),
        "message 2, of role",
    ),
    "the other two": (b'{"conversations": [{"from": "gpt", "content": "a"}]}', "needs a role"),
    "half a character": (
        turns('"role": "assistant", "content": "\\ud800"'),
        "half of a character",
    ),
}


def by_fine_tuning(data: bytes, folder: Path) -> list[tuple[str, str]]:
    (folder / "a.jsonl").write_bytes(data)
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        text.encode()  # a tokenizer takes whole characters only
        seen.append(text)
        return [1]

    SFTDataset(
        [str(folder / "a.jsonl")], encode, DataConfig(blend="unused", sequence_length=64, eod_id=0)
    )
    return [(header[2:-3], text) for header, text in zip(seen[::2], seen[1::2], strict=True)]


def by_conversion(data: bytes) -> list[tuple[str, str]]:
    encoder = BatchEncoder(
        load_tokenizer("bytes"), ConvertOptions(tokenizer="bytes", chat=True), StorageConfig()
    )
    parts = encoder.parts(RawDocument(data=data, path="a.jsonl", line=1, is_record=True))
    turns = []
    for (header, _, _), (text, _, _) in zip(parts[::2], parts[1::2], strict=True):
        assert isinstance(header, str)
        assert isinstance(text, str)
        turns.append((header[2:-3], text))
    assert [mode for _, mode, _ in parts[1::2]] == [int(role == "assistant") for role, _ in turns]
    return turns


@pytest.mark.guarantee("documents-format-modes")
@pytest.mark.parametrize("name", GOOD)
def test_conversations_are_read_alike(name: str, tmp_path: Path) -> None:
    record, turns = GOOD[name]
    data = json.dumps(record).encode()
    assert by_fine_tuning(data, tmp_path) == turns
    assert by_conversion(data) == turns


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_conversation_is_refused_alike(name: str, tmp_path: Path) -> None:
    data, message = BAD[name]
    with pytest.raises(FormatError, match=message) as tuned:
        by_fine_tuning(data, tmp_path)
    with pytest.raises(StreammegaError, match=message) as converted:
        by_conversion(data)
    assert str(tuned.value).replace(str(tmp_path) + "/", "") == str(converted.value)


def test_only_fine_tuning_needs_an_answer(tmp_path: Path) -> None:
    """What holds none is text like any other, but there is nothing in it to learn answers from."""
    data = json.dumps({"messages": [ASKED]}).encode()
    assert by_conversion(data) == [("user", "q")]
    with pytest.raises(FormatError, match="nothing to learn"):
        by_fine_tuning(data, tmp_path)
