"""Chat templates of real models, which TRL ships, against transformers and TRL's own marks of answers.

`make integrations` installs transformers and TRL, and runs this.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from streammega.convert import ChatEncoder
from streammega.convert.tokenize.chat_templates import FAMILIES
from streammega.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore")

CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich <&>", "days": [1, None]}},
    "id": "abcdefghi",
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
}
ASK = {"role": "user", "content": "ask"}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "abcdefghi", "name": "weather"}


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [ASK, answer("hello")],
    "two": [ASK, answer("hello \n"), ASK, answer("  été 😀")],
    "system": [{"role": "system", "content": "be good"}, ASK, answer("hello"), ASK, answer("b")],
    "reasoning": [ASK, answer("hello", reasoning="well"), ASK, answer("b", reasoning="hm")],
    "thinking": [ASK, answer("<think>\nwell\n</think>\n\nhello"), ASK, answer("b")],
    "tools": [ASK, answer("", tool_calls=[CALL]), RESULT, answer("b"), ASK, answer("c")],
    "asked": [ASK, answer("hello"), ASK],
    "asked twice": [ASK, ASK, answer("hello")],
    "in a row": [ASK, answer("hello"), answer("again")],
}
KNOWN = {
    "deepseekv3": "DeepSeek",
    "gemma3": "Gemma",
    "gptoss": "gpt-oss",
    "llama3_2": "Llama 3",
    "phi3_5": "Phi-3",
    "qwen2_5": "ChatML, Qwen",
    "qwen3": "ChatML, Qwen",
}
REFUSED = {"tools": {"phi3_5"}, "in a row": {"gptoss"}}
"""What cannot be told, or would be left out, of these."""
HEADERS = re.compile("<\\|start\\|>assistant|<｜Assistant｜>|<｜tool▁outputs▁end｜>")


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    """By their names; not imported: TRL takes half a minute."""
    pytest.importorskip("transformers", reason="needs transformers: make integrations installs it")
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("needs trl: make integrations installs it")
    folder = Path(found.origin).parent / "chat_templates"
    return {file.stem: file.read_text("utf-8") for file in folder.glob("*.jinja")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tests' tokenizer, with the special tokens of all families."""
    chats = Path(__file__).parents[1] / "support" / "data" / "chats" / "tokenizer.json"
    model = Tokenizer.from_file(str(chats))
    names = [name for family in FAMILIES for name in (*family.headers, *family.ends)]
    special = {token for name in names for token in re.findall(r"<[^>]*>|\[/?[A-Z_]+\]", name)}
    model.add_special_tokens(sorted(special))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return str(path)


@pytest.mark.parametrize("name", KNOWN)
def test_templates_of_real_models_are_known(
    name: str, templates: dict[str, str], tokenizer: str
) -> None:
    encoder = ChatEncoder(tokenizer, with_variables(templates[name]))
    assert encoder.template.family is not None
    assert encoder.template.family.name == KNOWN[name]


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize("turns", CHATS)
def test_ids_are_those_of_transformers_and_masks_those_of_trl(
    turns: str, templates: dict[str, str], tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of all templates; masks of those of which TRL has one with marks that writes the same."""
    compared = 0
    refused: set[str] = set()
    record = {"messages": CHATS[turns], "tools": [TOOL] if turns == "tools" else None}
    theirs = Transformers(tokenizer, monkeypatch)
    for name, source in templates.items():
        if name.endswith("_training"):
            continue
        try:
            text, expected, _ = theirs.rendered(source, record)
        except Exception:  # what a template raises is its own
            continue
        try:
            encoder = ChatEncoder(tokenizer, with_variables(source))
            ids, answers = encoder.conversation(record, "a:1")
        except FormatError:
            refused.add(name)
            continue
        assert ids.tolist() == expected, name
        marked = templates.get(f"{name}_training")
        if marked is None or encoder.template.family is None or encoder.template.marks_answers:
            continue
        try:
            marked_text, _, mask = theirs.rendered(marked, record)
        except Exception:
            continue
        if marked_text != text:
            continue
        assert stretches(tokenizer, ids, answers) == stretches(tokenizer, ids, mask), name
        compared += 1
    assert compared >= 5
    assert refused & set(KNOWN) == REFUSED.get(turns, set())


class Transformers:
    """Its apply_chat_template, on a day of January."""

    def __init__(self, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from datetime import datetime

        from transformers import PreTrainedTokenizerFast
        from transformers.utils import chat_template_utils

        class Fixed(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls(2026, 1, 31)

        monkeypatch.setattr(chat_template_utils, "datetime", Fixed)
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer)

    def rendered(self, source: str, record: dict[str, Any]) -> tuple[str, list[int], list[bool]]:
        """(text, ids, which of them are marked)."""
        options = {"tools": record["tools"], "chat_template": source, **variables_of(source)}
        text = self._tokenizer.apply_chat_template(record["messages"], tokenize=False, **options)
        made = self._tokenizer.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True, **options
        )
        return text, made["input_ids"], [bool(mark) for mark in made["assistant_masks"]]


def with_variables(source: str) -> str:
    """A template that sets the variables of its model itself, and the day of `Transformers`."""
    written = {"%d %b %Y": "31 Jan 2026", "%Y-%m-%d": "2026-01-31"}
    day = f"{{% macro strftime_now(format) %}}{{{{ {written}[format] }}}}{{% endmacro %}}"
    variables = variables_of(source).items()
    return "".join(f"{{% set {name} = {value!r} %}}" for name, value in variables) + day + source


def variables_of(source: str) -> dict[str, str]:
    """Special tokens of the model, and a date for those that take one."""
    bos, eos = "<s>", "</s>"
    if "<｜Assistant｜>" in source:
        bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    elif "<|end|>" in source:
        eos = "<|endoftext|>"
    variables = {"bos_token": bos, "eos_token": eos}
    if "strftime_now" not in source and "date_string" in source:
        variables["date_string"] = "26 Jul 2024"
    return {name: value for name, value in variables.items() if name in source}


def stretches(tokenizer: str, ids: Any, answers: Any) -> list[str]:
    """The text of each answer, cut at headers, of which TRL marks some, without blanks around it."""
    model = Tokenizer.from_file(tokenizer)
    changes = [
        n for n, (one, other) in enumerate(pairwise([False, *answers, False])) if one != other
    ]
    texts = []
    for low, high in zip(changes[::2], changes[1::2], strict=True):
        text = model.decode(ids[low:high].tolist(), skip_special_tokens=False)
        texts += [part.strip() for part in HEADERS.split(text)]
    return [text for text in texts if text]
