"""Chat templates: the tokens that transformers makes, loss on what the assistant writes, and
nothing that is guessed.
"""

from __future__ import annotations

import json
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from streammega import DataConfig, IndexedDataset, SFTDataset
from streammega.convert import ChatEncoder, convert
from streammega.convert.tokenize import chat as chats
from streammega.convert.tokenize import chat_templates as families
from streammega.convert.tokenize import encode, long_text, tokenizers
from streammega.convert.tokenize.chat import BUILT_IN, find_template
from streammega.convert.tokenize.tokenizers import load_tokenizer, resolve_eod
from streammega.dataset.verify import verify
from streammega.errors import ConfigError, ConvertError, FormatError, ObjectNotFoundError
from tests.support.examples import examples

CHATS = Path(__file__).parents[1] / "support" / "data" / "chats"
TOKENIZER = str(CHATS / "tokenizer.json")
FOUND = json.loads((CHATS / "cases.json").read_text())
SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>", "<|eot_id|>")
BLOCK = re.compile(r"\{% (end)?generation %\}")
UNKNOWN = (
    BUILT_IN["chatml"]
    .replace("message.role + '", "message.role + ':")
    .replace("assistant\\n", "assistant:\\n")
)
"""Of a family of its own."""
words = st.text(st.sampled_from("abc \n<>|é😀"), max_size=12)
texts = st.lists(
    words
    | st.sampled_from(SPECIAL)
    | st.sampled_from([token[:n] for token in SPECIAL for n in (1, 4, 9)])
).map("".join)


def chat(*contents: Any) -> dict[str, Any]:
    """Questions and answers in turn."""
    return {
        "messages": [
            {"role": ("user", "assistant")[n % 2], "content": text}
            for n, text in enumerate(contents)
        ]
    }


def answer(text: str) -> dict[str, Any]:
    """A message of the assistant, with its reasoning."""
    return {"role": "assistant", "content": text, "reasoning": "hm"}


CONVERSION: dict[str, Any] = {"tokenizer": TOKENIZER, "chat": True, "workers": 1}


@lru_cache
def encoder_of(template: str, special_tokens: str = "text") -> ChatEncoder:
    return ChatEncoder(TOKENIZER, template, special_tokens_in_text=special_tokens)


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def learned(encoder: ChatEncoder, record: Any) -> list[str]:
    """The text of each stretch of tokens that is learned."""
    ids, answers = encoder.conversation(record, "a.jsonl:1")
    model = Tokenizer.from_file(TOKENIZER)
    bounds = np.flatnonzero(np.diff(answers.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [model.decode(ids[low:high].tolist(), skip_special_tokens=False) for low, high in bounds]


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize("number", range(len(FOUND["cases"])))
def test_ids_and_masks_are_those_of_transformers(number: int) -> None:
    case = FOUND["cases"][number]
    source = FOUND["templates"].get(case["template"], case["template"])
    ids, answers = ChatEncoder(TOKENIZER, source).conversation(case["record"], "a.jsonl:1")
    assert ids.tolist() == case["ids"]
    assert answers.astype(int).tolist() == case["mask"]
    assert answers.any()


@pytest.mark.many_examples
@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize("special_tokens", ["text", "parse"])
@pytest.mark.parametrize("source", [*BUILT_IN.values(), UNKNOWN], ids=[*BUILT_IN, "unknown"])
@given(contents=st.lists(texts, min_size=1, max_size=6))
@settings(max_examples=examples(15), deadline=None)
def test_answers_are_the_same_without_generation_blocks(
    source: str, special_tokens: str, contents: list[str]
) -> None:
    """By the family of the template, or by the texts of beginnings where it has none."""
    record = chat(*contents)
    marked = encoder_of(source, special_tokens).conversation(record, "a.jsonl:1")
    without = encoder_of(BLOCK.sub("", source), special_tokens)
    found = without.conversation(record, "a.jsonl:1")
    assert [part.tolist() for part in marked] == [part.tolist() for part in found]


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "4"}
# Each is the form of its family in our own words: without the system message, dates and tools.
FAMILIES: dict[str, tuple[str, dict[str, list[str]]]] = {
    "Qwen3: earlier turns lose their reasoning": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endfor %}",
        {
            "two": ["one<|im_end|>", "<think>hm</think>two <|im_end|>"],
            "asked": ["one<|im_end|>"],
            "asked twice": ["<think>hm</think>one<|im_end|>"],
            "in a row": ["one<|im_end|>", "<think>hm</think>two<|im_end|>"],
        },
    ),
    "Qwen2.5: calls and their results": (
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content }}</result><|im_end|>\n"
        "{% elif m.tool_calls %}<|im_start|>assistant\n<call>{{ m.tool_calls[0].function.name }}</call><|im_end|>\n"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}",
        {"tools": ["<call>f</call><|im_end|>", "two<|im_end|>"]},
    ),
    "Llama 3.1: calls end a message, and answers a turn": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}"
        "{% if m.tool_calls %}f()<|eom_id|>{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}",
        {
            "two": ["one<|eot_id|>", "two<|eot_id|>"],
            "in a row": ["one<|eot_id|>", "two<|eot_id|>"],
            "tools": ["f()<|eom_id|>", "two<|eot_id|>"],
        },
    ),
    "Mistral": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
        "{% elif m.tool_calls %}[TOOL_CALLS][f]</s>"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
        {
            "two": [" one</s>", " two </s>"],
            "asked": [" one</s>"],
            "asked twice": [" one</s>"],
            "tools": ["[TOOL_CALLS][f]</s>", " two</s>"],
        },
    ),
    "Gemma": (
        "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}",
        {
            "two": ["one<end_of_turn>", "two<end_of_turn>"],
            "in a row": ["one<end_of_turn>", "two<end_of_turn>"],
        },
    ),
    "Gemma 4": (
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<|turn>' + role + '\\n' + m.content | trim + '<turn|>\\n' }}{% endfor %}",
        {"two": ["one<turn|>", "two<turn|>"]},
    ),
    "Phi-3: the text ends with another token": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}<|endoftext|>",
        {
            "two": ["one<|end|>", "two <|end|>\n<|endoftext|>"],
            "asked": ["one<|end|>"],
        },
    ),
    "Phi-4-mini": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}<|endoftext|>",
        {"two": ["one<|end|>", "two <|end|><|endoftext|>"], "asked": ["one<|end|>"]},
    ),
    "Phi-4": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}",
        {"two": ["one<|im_end|>", "two <|im_end|>"]},
    ),
    "DeepSeek: reasoning is dropped, and results of tools are a header": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}"
        "{% elif m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "{% else %}{% if messages[loop.index0 - 1].role != 'tool' %}<｜Assistant｜>{% endif %}"
        "{{ m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}",
        {
            "two": ["one<｜end▁of▁sentence｜>", "two <｜end▁of▁sentence｜>"],
            "asked twice": ["one<｜end▁of▁sentence｜>"],
            "thought": ["one<｜end▁of▁sentence｜>"],
            "tools": [
                "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
                "two<｜end▁of▁sentence｜>",
            ],
        },
    ),
    "gpt-oss: an answer has channels, and goes on after the first": (
        "{% for m in messages %}{% if m.role == 'tool' %}<|start|>f to=assistant<|message|>{{ m.content }}<|end|>"
        "{% elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        "{% elif m.tool_calls %}<|start|>assistant to=f<|message|>{}<|call|>"
        "{% else %}{% if m.thinking and loop.last %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{% endif %}{% endfor %}",
        {
            "two": [
                "<|channel|>final<|message|>one<|end|>",
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
                "<|channel|>final<|message|>two <|return|>",
            ],
            "asked": ["<|channel|>final<|message|>one<|end|>"],
            "tools": [
                " to=f<|message|>{}<|call|>",
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
                "<|channel|>final<|message|>two<|return|>",
            ],
        },
    ),
}
USER = {"role": "user", "content": "ask"}
TURNS: dict[str, list[dict[str, Any]]] = {
    "two": [USER, answer("one"), USER, answer("two ")],
    "asked": [USER, answer("one"), USER],
    "asked twice": [USER, USER, answer("one")],
    "in a row": [USER, answer("one"), answer("two")],
    "tools": [USER, CALL, RESULT, answer("two")],
    "thought": [USER, answer("hm</think>one")],
}


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize(
    ("family", "turns"), [(name, turns) for name, (_, cases) in FAMILIES.items() for turns in cases]
)
def test_answers_of_the_usual_families_are_known(family: str, turns: str) -> None:
    source, expected = FAMILIES[family]
    rendered = ChatEncoder(TOKENIZER, source).render({"messages": TURNS[turns]}, "a:1")
    assert [rendered.text[start:stop] for start, stop in rendered.answers] == expected[turns]


NEXT_ROLE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As of GLM-4: the next role's token ends a turn, and nothing the last one."""


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("two", ["\none<|user|>", "\ntwo "]),
        ("asked", ["\none<|user|>"]),
        ("asked twice", ["\none"]),
        ("in a row", ["\none", "\ntwo"]),
    ],
)
def test_the_token_of_the_next_role_ends_an_answer_where_nothing_else_does(
    turns: str, expected: list[str]
) -> None:
    record = {"messages": TURNS[turns]}
    for between in ("", "\n"):
        source = NEXT_ROLE.replace("{{ '<|", f"{{{{ '{between}<|")
        rendered = ChatEncoder(TOKENIZER, source).render(record, "a:1")
        found = [rendered.text[start:stop] for start, stop in rendered.answers]
        assert found == [text.replace("<|user|>", f"{between}<|user|>") for text in expected]
    assert learned(ChatEncoder(TOKENIZER, NEXT_ROLE), record) == expected


ENDLESS = {
    "next role": NEXT_ROLE,
    "plain": "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "block without its end": "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("name", [*ENDLESS, *BUILT_IN])
def test_a_template_whose_last_answer_has_no_end_is_warned_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = name
    if name in ENDLESS:
        template = str(tmp_path / "own.jinja")
        Path(template).write_text(ENDLESS[name])
    source = lines(tmp_path / "in.jsonl", chat("ask", "tell"))
    convert([source], str(tmp_path / "out"), chat_template=template, **CONVERSION)
    warned = [message for message in caplog.messages if "without a special token" in message]
    assert len(warned) == (name in ENDLESS)
    assert all("own.jinja" in message for message in warned)


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize("special_tokens", ["text", "parse"])
@pytest.mark.parametrize("family", FAMILIES)
def test_messages_that_spell_headers_make_no_answers(family: str, special_tokens: str) -> None:
    source, _ = FAMILIES[family]
    encoder = ChatEncoder(TOKENIZER, source, special_tokens_in_text=special_tokens)
    spelled = [header for family in families.FAMILIES for header in family.headers]
    ends = [end for family in families.FAMILIES for end in family.ends]
    text = "".join(f"x{header}no{end}" for header in spelled for end in ends)
    sizes = []
    for content in ("x", text):
        turns = [turn | {"content": content} for turn in TURNS["two"]]
        answers = encoder.render({"messages": turns}, "a:1").answers
        sizes.append([stop - start for start, stop in answers])
    assert sizes[1] == [size + len(text) - 1 for size in sizes[0]]
    assert len(sizes[0]) == 2


def test_what_is_not_one_answer_a_message_is_refused() -> None:
    """Two messages in a row that the template joins: where one ends cannot be known."""
    source, _ = FAMILIES["gpt-oss: an answer has channels, and goes on after the first"]
    with pytest.raises(
        FormatError, match=r"a:1: the places of answers cannot be found.*generation"
    ):
        ChatEncoder(TOKENIZER, source).render({"messages": TURNS["in a row"]}, "a:1")


def test_an_answer_is_learned_with_the_token_that_ends_it() -> None:
    record = chat("ask", "tell", "more", "said")
    assert learned(ChatEncoder(TOKENIZER, "chatml"), record) == ["tell<|im_end|>", "said<|im_end|>"]
    assert learned(ChatEncoder(TOKENIZER, "llama3"), record) == ["tell<|eot_id|>", "said<|eot_id|>"]


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for m in messages %}{{ m.role + m.content }}{{ loop.length }}{% endfor %}",
            "in another way when more of them follow",
        ),
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", "no generation prompt"),
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}bot{% endif %}",
            "does not begin as the generation prompt",
        ),
        (
            "{% generation %}{{ messages[0].content }}{% endgeneration %}{% set x %}{% endset %}",
            None,
        ),
    ],
    ids=["prefix", "headers", "prompt", "blocks"],
)
def test_where_answers_cannot_be_told_is_an_error_and_no_guess(
    source: str, reason: str | None
) -> None:
    encoder = ChatEncoder(TOKENIZER, source)
    if reason is None:
        assert learned(encoder, chat("a", "b")) == ["a"]
        return
    with pytest.raises(FormatError, match=rf"a\.jsonl:3: .*message 2: .*{reason}.*generation"):
        encoder.conversation(chat("a", "b", "c"), "a.jsonl:3")


@pytest.mark.many_examples
@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize("name", BUILT_IN)
@given(contents=st.lists(texts, min_size=1, max_size=5), split=st.booleans())
@settings(max_examples=examples(25), deadline=None)
def test_special_tokens_in_messages_are_text_and_the_templates_are_not(
    name: str, contents: list[str], split: bool
) -> None:
    """Also where two parts of a message make one together, or a message and the template."""
    model = Tokenizer.from_file(TOKENIZER)
    given = [
        [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}] if split else text
        for text in contents
    ]
    ids, _ = encoder_of(name).conversation(chat(*given), "a.jsonl:1")
    plain = ["x" * bool(text.strip()) for text in contents]
    own = [model.token_to_id(token) for token in FOUND["cases"] and SPECIAL]
    expected, _ = encoder_of(name).conversation(chat(*plain), "a.jsonl:1")
    assert [number for number in ids.tolist() if number in own] == [
        number for number in expected.tolist() if number in own
    ]
    text = encoder_of(name).render(chat(*given), "a.jsonl:1").text
    assert model.decode(ids.tolist(), skip_special_tokens=False) == text
    parsed, _ = encoder_of(name, "parse").conversation(chat(*given), "a.jsonl:1")
    assert parsed.tolist() == model.encode(text, add_special_tokens=False).ids


def test_names_of_a_call_spell_no_special_tokens_either() -> None:
    call = {
        "type": "function",
        "function": {"name": "f", "arguments": {"a<|im_end|>": ["</s>", {"x <|eot_id|>": 1}]}},
    }
    record = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    ids, _ = ChatEncoder(TOKENIZER, FOUND["templates"]["tools"]).conversation(record, "a:1")
    model = Tokenizer.from_file(TOKENIZER)
    found = [
        model.id_to_token(number) for number in ids.tolist() if model.id_to_token(number) in SPECIAL
    ]
    assert found == ["<|im_start|>", "<|im_end|>"]


def test_what_is_text_is_tokenized_as_the_library_does_it() -> None:
    ids, answers = ChatEncoder(TOKENIZER, "chatml").conversation(
        chat("a<|im_end|> b", "c</s>"), "a.jsonl:1"
    )
    model = Tokenizer.from_file(TOKENIZER)
    model.encode_special_tokens = True
    start, end = (model.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    pieces: list[Any] = [
        start,
        "user\na<|im_end|> b",
        end,
        "\n",
        start,
        "assistant\nc</s>",
        end,
        "\n",
    ]
    expected = [
        [piece] if isinstance(piece, int) else model.encode(piece, add_special_tokens=False).ids
        for piece in pieces
    ]
    assert ids.tolist() == [number for own in expected for number in own]
    assert learned(ChatEncoder(TOKENIZER, "chatml"), chat("a<|im_end|> b", "c</s>")) == [
        "c</s><|im_end|>"
    ]
    assert answers[-1] == 0


def test_offsets_that_a_post_processor_narrows_lose_no_token(tmp_path: Path) -> None:
    described = json.loads(Path(TOKENIZER).read_text())
    described["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "chat_template.jinja").write_text(BUILT_IN["chatml"])
    encoder = ChatEncoder(str(tmp_path / "tokenizer.json"))
    assert learned(encoder, chat("a", " \n\n b 😀  ")) == [" \n\n b 😀  <|im_end|>"]


@pytest.mark.parametrize("tokenizer", ["own.tiktoken", "bytes"])
def test_templates_work_with_other_tokenizers(tokenizer: str, tmp_path: Path) -> None:
    import base64

    import tiktoken

    ranks = {bytes([n]): n for n in range(256)} | {
        b"he": 256,
        b"llo": 257,
        b"ll": 258,
        b"hello": 259,
    }
    (tmp_path / "own.tiktoken").write_text(
        "".join(f"{base64.b64encode(t).decode()} {n}\n" for t, n in ranks.items())
    )
    is_file = tokenizer != "bytes"
    name = str(tmp_path / tokenizer) if is_file else tokenizer
    answer = "{% generation %}{{ m.content + '<|endoftext|>' }}{% endgeneration %}"
    source = "{% for m in messages %}{{ m.role }}:" + answer + "{% endfor %}"
    encoder = ChatEncoder(f"{name},gpt2" if is_file else name, source)
    ids, answers = encoder.conversation(
        {"messages": [{"role": "assistant", "content": "hello é<|endoftext|>"}]}, "a:1"
    )
    eod = 256 if tokenizer == "bytes" else 260
    model = tiktoken.Encoding(
        "own", pat_str=r"\w+| ", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260}
    )
    content = (
        [*model.encode_ordinary("hello é<|endoftext|>")]
        if eod == 260
        else [*"hello é<|endoftext|>".encode()]
    )
    assert ids.tolist().count(eod) == 1
    assert ids[-1] == eod
    if eod == 256:
        assert ids.tolist() == [*b"assistant:", *content, 256]
    assert b"".join(
        bytes([n]) if n < 256 else next(t for t, r in ranks.items() if r == n)
        for n in ids[:-1].tolist()
    ) == ("assistant:hello é<|endoftext|>".encode())
    start = int(np.argmax(answers))
    assert answers.tolist() == [False] * start + [True] * (len(ids) - start)
    assert bytes(ids[:start].tolist()) == b"assistant:"


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "cannot write it"),
        ("{{ messages.append(1) }}", "cannot write it"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.x }}", "cannot write it"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "cannot write it"),
        ("{% set n = 1000000000000 %}{{ 'a' * n }}", "cannot write it"),
    ],
)
def test_templates_are_foreign_code_and_kept_within_bounds(source: str, message: str) -> None:
    with pytest.raises(FormatError, match=rf"a\.jsonl:1: .*{message}"):
        ChatEncoder(TOKENIZER, source).conversation(chat("a", "b"), "a.jsonl:1")
    with pytest.raises(ConvertError, match="not a jinja template"):
        ChatEncoder(TOKENIZER, "{% for %}").conversation(chat("a", "b"), "a.jsonl:1")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in messages %}" * 25 + "{% endfor %}" * 25,
        "{{ dict(a=1, a=2) }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "1" * 5000 + " }}",
    ],
    ids=["loops", "names", "parentheses", "number"],
)
def test_a_template_that_python_refuses_is_named(source: str) -> None:
    with pytest.raises(ConvertError, match="not a jinja template"):
        ChatEncoder(TOKENIZER, source).conversation(chat("a", "b"), "a.jsonl:1")


def test_a_record_that_is_nested_too_deeply_is_named() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    tokenizer = load_tokenizer(TOKENIZER, special_tokens_in_text="text")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    record = chat("a", "<|endoftext|>")
    record["messages"][0]["meta"] = nested
    with pytest.raises(FormatError, match=r"a\.jsonl:1"):
        ChatEncoder(tokenizer, template, special_tokens_in_text="text").conversation(
            record, "a.jsonl:1"
        )


@pytest.mark.parametrize(
    ("source", "record", "message"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", {"messages": [CALL]}, "has tool calls"),
        ("chatml", {"messages": [CALL]}, "tool calls"),
        ("chatml", chat("a", "b") | {"tools": [{"name": "f"}]}, "names tools"),
        ("chatml", chat("a", "\U0010fffe"), "noncharacter"),
    ],
    ids=["a call", "chatml", "tools", "marks"],
)
def test_what_a_template_would_leave_out_is_refused(
    source: str, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=f"a:1: .*{message}"):
        ChatEncoder(TOKENIZER, source).conversation(record, "a:1")


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(Path(TOKENIZER).read_bytes())
    tokenizer = str(tmp_path / "tokenizer.json")
    source = "{{ bos_token }}{{ messages[1].content }}%s{%% generation %%}{{ eos_token }}{%% endgeneration %%}"
    with pytest.raises(ConvertError, match=r"no chat template of its own.*chat_template\.jinja"):
        ChatEncoder(tokenizer)
    settings: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "chat_template": source % "1",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatEncoder(tokenizer).render(chat("a", "b"), "a:1").text == "<s>b1</s>"
    settings["chat_template"] = [
        {"name": "default", "template": source % "2"},
        {"name": "rag", "template": source % "3"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatEncoder(tokenizer).render(chat("a", "b"), "a:1").text == "<s>b2</s>"
    assert ChatEncoder(tokenizer, "tokenizer:rag").render(chat("a", "b"), "a:1").text == "<s>b3</s>"
    with pytest.raises(ConvertError, match="is named other; it has: default, rag"):
        ChatEncoder(tokenizer, "tokenizer:other")
    (tmp_path / "chat_template.jinja").write_text(source % "4")
    assert ChatEncoder(tokenizer).render(chat("a", "b"), "a:1").text == "<s>b4</s>"
    (tmp_path / "mine.jinja").write_text(source % "5")
    assert (
        ChatEncoder(tokenizer, str(tmp_path / "mine.jinja")).render(chat("a", "b"), "a:1").text
        == "<s>b5</s>"
    )
    with pytest.raises(
        ObjectNotFoundError, match=r"neither chatml, llama3, tokenizer nor a readable file"
    ):
        ChatEncoder(tokenizer, "chatlm")


def test_templates_of_the_hub_come_with_their_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": "{{ eos_token }}1"})
    )

    def download(repository: str, name: str) -> str:
        if repository == "own/away":
            raise LocalEntryNotFoundError("no answer")
        if not (tmp_path / name).exists():
            raise EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert find_template("tokenizer", "own/model").source == "{{ eos_token }}1"
    assert find_template("tokenizer", "own/model").tokens == {"eos_token": "</s>"}
    with pytest.raises(
        ConvertError, match=r"own/away: the hub could not give its special_tokens_map\.json"
    ):
        find_template("tokenizer", "own/away")


def test_tokenizers_that_do_not_suit_a_template_are_refused(tmp_path: Path) -> None:
    described = json.loads(Path(TOKENIZER).read_text())
    described["added_tokens"] = described["added_tokens"][:1]
    (tmp_path / "other.json").write_text(json.dumps(described))
    with pytest.raises(
        ConvertError,
        match=r"no special token <\|im_start\|>, <\|im_end\|>, which chat template chatml writes",
    ):
        ChatEncoder(str(tmp_path / "other.json"), "chatml")
    source = iter(["some words to learn from", "and some more words"] * 20)
    with open(tmp_path / "sp.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=source,
            model_writer=file,
            vocab_size=40,
            minloglevel=2,
            model_type="bpe",
        )
    with pytest.raises(ConfigError, match="SentencePiece"):
        ChatEncoder(str(tmp_path / "sp.model"), "chatml")


@pytest.mark.guarantee("chat-templates-transformers")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversions_by_a_template_have_its_tokens_and_modes(kind: str, tmp_path: Path) -> None:
    records = [case["record"] for case in FOUND["cases"] if case["template"] == "chatml"]
    if kind == "parquet":
        source = str(tmp_path / "in.parquet")
        pq.write_table(pa.Table.from_pylist(records), source)
    else:
        source = lines(tmp_path / "in.jsonl", *records, {"messages": []})
    report = convert([source], str(tmp_path / "out"), chat_template="chatml", **CONVERSION)
    assert not verify(str(tmp_path / "out")).problems
    indexed = IndexedDataset(str(tmp_path / "out"))
    assert indexed.sequence_modes is not None
    eod = Tokenizer.from_file(TOKENIZER).token_to_id("</s>")
    cases = [case for case in FOUND["cases"] if case["template"] == "chatml"]
    for case, low, high in zip(
        cases, indexed.document_indices[:-1], indexed.document_indices[1:], strict=True
    ):
        sequences = [np.asarray(indexed[n][0]) for n in range(low, high)]
        modes = np.repeat(indexed.sequence_modes[low:high], [len(own) for own in sequences])
        assert np.concatenate(sequences).tolist() == [*case["ids"], eod]
        assert modes.tolist() == [*case["mask"], 0]
    assert report.dropped.get("empty", 0) == (kind == "jsonl")
    assert json.loads((tmp_path / "out.manifest.json").read_text())["loss_modes"] == [1]


def test_what_a_template_cannot_write_is_named_with_its_line_or_passed_over(tmp_path: Path) -> None:
    source = lines(
        tmp_path / "in.jsonl", chat("a", "b"), {"messages": [{"role": "user"}]}, chat("c", "d")
    )
    options = CONVERSION | {"chat_template": "llama3"}
    with pytest.raises(ConvertError, match=r"in\.jsonl:2: message 1, of role 'user', needs a text"):
        convert([source], str(tmp_path / "no"), **options)
    report = convert([source], str(tmp_path / "out"), on_error="skip", **options)
    assert report.documents == 2
    with pytest.raises(ConfigError, match="set chat"):
        convert([source], str(tmp_path / "no"), tokenizer=TOKENIZER, chat_template="llama3")
    with pytest.raises(ConfigError, match="writes its special tokens itself"):
        convert([source], str(tmp_path / "no"), bos="<s>", **options)


def test_another_template_is_another_conversion(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    source = lines(
        tmp_path / "in.jsonl",
        *(chat(f"ask {n}", "tell") for n in range(50)),
        {"messages": [{"role": "x"}]},
    )
    options = CONVERSION | {"chat_template": str(template)}
    for word in ("one", "two"):
        template.write_text(word + "{% generation %}{{ messages[1].content }}{% endgeneration %}")
        with pytest.raises(ConvertError, match=r"in\.jsonl:51"):
            convert([source], str(tmp_path / "out"), **options)
    lines(tmp_path / "in.jsonl", chat("ask", "tell"))
    convert([source], str(tmp_path / "out"), **options, append_eod=False)
    indexed = IndexedDataset(str(tmp_path / "out"))
    text = "".join(
        Tokenizer.from_file(TOKENIZER).decode(np.asarray(indexed[n][0]).tolist())
        for n in range(len(indexed))
    )
    assert text == "twotell"


def test_long_conversations_take_time_by_their_length_alone() -> None:
    record = chat(*(f"message {n}" for n in range(6000)))
    began = time.monotonic()
    ids, answers = ChatEncoder(TOKENIZER, "chatml").conversation(record, "a.jsonl:1")
    assert time.monotonic() - began < 20
    model = Tokenizer.from_file(TOKENIZER)
    end = model.token_to_id("<|im_end|>")
    ends = np.flatnonzero(ids == end)
    assert answers[ends].tolist() == [False, True] * 3000
    text = "".join(
        f"<|im_start|>{('user', 'assistant')[n % 2]}\nmessage {n}<|im_end|>\n" for n in range(6000)
    )
    assert ids.tolist() == model.encode(text).ids
    without_blocks = ChatEncoder(TOKENIZER, BLOCK.sub("", BUILT_IN["chatml"]))
    assert np.array_equal(without_blocks.conversation(record, "a.jsonl:1")[1], answers)
    with pytest.raises(
        FormatError, match=r"a\.jsonl:1: has 3,000 answers in 6,000 messages.*generation blocks"
    ):
        ChatEncoder(TOKENIZER, BLOCK.sub("", UNKNOWN)).conversation(record, "a.jsonl:1")


@pytest.mark.guarantee("chat-templates-transformers")
def test_fine_tuning_samples_have_the_templates_tokens_and_its_answers(tmp_path: Path) -> None:
    cases = [case for case in FOUND["cases"] if case["template"] == "chatml"]
    path = lines(tmp_path / "a.jsonl", *(case["record"] for case in cases))
    config = DataConfig(blend="unused", sequence_length=256)
    dataset = SFTDataset([path], ChatEncoder(TOKENIZER, "chatml"), config)
    found = []
    for sample in (dataset[k] for k in range(len(dataset))):
        bounds = sample["cu_seqlens"].tolist()
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            own = sample["tokens"][low:high].tolist()
            if any(own):
                found.append(
                    (own, [0, *(int(m) for m in sample["loss_mask"][low : high - 1].tolist())])
                )
    assert sorted(found) == sorted((case["ids"], [0, *case["mask"][1:]]) for case in cases)
    with pytest.raises(FormatError, match="nothing to learn"):
        SFTDataset(
            [lines(tmp_path / "b.jsonl", chat("a"))], ChatEncoder(TOKENIZER, "chatml"), config
        )


def test_roles_are_no_beginnings_of_special_tokens(tmp_path: Path) -> None:
    model = Tokenizer.from_file(TOKENIZER)
    model.add_special_tokens(["turn", "return"])
    model.save(str(tmp_path / "tokenizer.json"))
    record = chat("a return", "b turn")
    parts = {
        "messages": [
            turn | {"content": [{"type": "text", "text": turn["content"]}]}
            for turn in record["messages"]
        ]
    }
    for source, own in (("chatml", record), (FOUND["templates"]["parts"], parts)):
        ids, answers = ChatEncoder(str(tmp_path / "tokenizer.json"), source).conversation(
            own, "a:1"
        )
        assert model.decode(ids.tolist(), skip_special_tokens=False) == (
            "<|im_start|>user\na return<|im_end|>\n<|im_start|>assistant\nb turn<|im_end|>\n"
        )
        assert not {model.token_to_id("turn"), model.token_to_id("return")} & set(ids.tolist())
        assert model.decode(ids[answers].tolist(), skip_special_tokens=False) == "b turn<|im_end|>"


DATED = "{{ strftime_now('%d %b %Y') }}{{ bos_token }}" + BUILT_IN["chatml"]
DAY = "{% macro strftime_now(format) %}31 Jan 2026{% endmacro %}"


@pytest.mark.guarantee("chat-template-date")
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_template_that_writes_todays_date_is_refused(tmp_path: Path, on_error: str) -> None:
    """The same command gives the same tokens on any day."""
    source = lines(tmp_path / "in.jsonl", chat("ask", "tell"))
    options = CONVERSION | {"chat_template": DATED, "on_error": on_error}
    with pytest.raises(ConfigError, match=r"as given writes today's date.*let a copy of it begin"):
        convert([source], str(tmp_path / "out"), **options)


@pytest.mark.guarantee("chat-template-date")
def test_a_template_sets_its_date_and_variables_itself(tmp_path: Path) -> None:
    templates = {
        "a date": (DAY + DATED, "31 Jan 2026<s><|im_start|>"),
        "llama": (
            "{% if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
            "{{ date_string }}" + BUILT_IN["chatml"],
            "26 Jul 2024<|im_start|>",
        ),
        "a variable": (
            "{% set thinking = false %}{% if thinking is false %}!{% endif %}" + DAY + DATED,
            "!31 Jan 2026<s>",
        ),
    }
    for source, begin in templates.values():
        text = ChatEncoder(TOKENIZER, source).render(chat("a", "b"), "a:1").text
        assert text.startswith(begin)


def test_a_manifest_tells_templates_and_their_special_tokens_apart(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(Path(TOKENIZER).read_bytes())
    source = lines(tmp_path / "in.jsonl", chat("ask", "tell"))
    options = CONVERSION | {"tokenizer": str(tmp_path)}
    recorded = []
    for template, bos in ((DAY + DATED, "<s>"), (DAY + DATED, "</s>"), (DAY + DATED + " ", "</s>")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
        out = str(tmp_path / "out")
        convert([source], out, **options, chat_template=template, overwrite=True)
        recorded.append(json.loads((tmp_path / "out.manifest.json").read_text())["chat_template"])
    assert {record["name"] for record in recorded} == {"as given"}
    assert len({record["digest"] for record in recorded}) == 3


@pytest.mark.guarantee("conversations-without-answer")
def test_conversations_of_which_all_is_learned_need_no_answer(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", chat("ask"), chat("ask", "tell"))
    for template, modes, documents in (("chatml", (0, 1), 2), ("chatml", None, 1), (None, (0,), 2)):
        options = CONVERSION | {"chat_template": template, "loss_modes": modes}
        report = convert([source], str(tmp_path / f"{template} {modes}"), **options)
        assert report.documents == documents


def test_documents_end_with_the_eos_token_of_a_tokenizer_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(Path(TOKENIZER).read_bytes())
    tokenizer = load_tokenizer(str(tmp_path))
    for eos, found in {
        "<|user|>": "<|user|>",
        "</s>": "</s>",
        # it ends a turn, and documents have a token of their own
        "<|im_end|>": "<|endoftext|>",
        "not there": "<|endoftext|>",
    }.items():
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert resolve_eod(tokenizer, None) == (found, tokenizer.find(found))
    assert resolve_eod(tokenizer, "<s>") == ("<s>", tokenizer.find("<s>"))


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "LONG", 2000)
    monkeypatch.setattr(encode, "LONG", 2000)
    monkeypatch.setattr(long_text, "WINDOW", 1000)
    monkeypatch.setattr(long_text, "OVERLAPS", 2)


@pytest.mark.many_examples
@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("special_tokens", ["text", "parse"])
@given(contents=st.lists(st.tuples(texts, st.integers(1, 300)), min_size=2, max_size=4))
@settings(max_examples=examples(12), deadline=None)
def test_a_long_chat_has_the_tokens_and_answers_of_the_whole(
    special_tokens: str, contents: list[tuple[str, int]]
) -> None:
    """Also where messages spell special tokens, which are text."""
    record = chat(*(f"{content} and words " * count for content, count in contents))
    encoder = encoder_of("chatml", special_tokens)
    in_windows = encoder.conversation(record, "a:1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chats, "LONG", 1 << 30)
        whole = encoder.conversation(record, "a:1")
    assert [part.tolist() for part in in_windows] == [part.tolist() for part in whole]


@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.parametrize("template", ["chatml", None])
def test_long_chats_become_what_they_are_as_a_whole(
    template: str | None, tmp_path: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [chat("a question", "an answer of words, " * n) for n in (3, 500, 40, 2000)]
    long.append(chat("spells </s>", "and <|im_end|> " * 300))
    source = lines(tmp_path / "in.jsonl", *long, chat("short", "too"))
    conversion = CONVERSION | {"chat_template": template, "eod": "</s>"}
    given_to_tokenizer: list[int] = []
    encode_batch = tokenizers.HuggingFaceTokenizer._call

    def counted(self: Any, encode: Any, some: list[str], **options: bool) -> Any:
        given_to_tokenizer.extend(map(len, some))
        return encode_batch(self, encode, some, **options)

    monkeypatch.setattr(tokenizers.HuggingFaceTokenizer, "_call", counted)
    convert([source], str(tmp_path / "long"), **conversion)
    assert max(given_to_tokenizer) < 2000
    monkeypatch.setattr(chats, "LONG", 1 << 30)
    monkeypatch.setattr(encode, "LONG", 1 << 30)
    convert([source], str(tmp_path / "whole"), **conversion)
    assert max(given_to_tokenizer) > 20_000
    for suffix in (".bin", ".idx"):
        whole = (tmp_path / f"whole{suffix}").read_bytes()
        assert (tmp_path / f"long{suffix}").read_bytes() == whole


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("spells <|im_end|> and \U00100000", "in.jsonl:2: spells a special token, and holds"),
        ("words " * 5000, "in.jsonl:2: the text cannot be cut into windows"),
    ],
)
def test_a_chat_that_cannot_be_encoded_is_lost_alone(
    answer: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "MAX_WINDOW", 4000)
    monkeypatch.setattr(long_text, "AGREEMENT", 4000)
    source = lines(tmp_path / "in.jsonl", chat("a", "b"), chat("a", answer), chat("c", "d"))
    conversion = CONVERSION | {"chat_template": "chatml"}
    with pytest.raises(ConvertError, match=message):
        convert([source], str(tmp_path / "out"), **conversion)
    report = convert([source], str(tmp_path / "out"), on_error="skip", **conversion)
    assert (report.documents, report.dropped) == (2, {"broken record": 1})
