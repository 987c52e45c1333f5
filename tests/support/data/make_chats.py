"""Writes chats/: conversations as transformers tokenizes them by chat templates, with its masks of
the assistant's tokens.

    pip install transformers==5.23.0 && python -m tests.support.data.make_chats

The tests compare our ids and masks with them, where transformers is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "chats"
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
SPECIAL += ["<|eot_id|>", "<s>", "</s>", "<|assistant|>", "<|user|>"]
TEMPLATES = {
    "blocks": (
        "{{ bos_token }}{% for message in messages %}\n"
        "  {% if message['role'] == 'assistant' %}\n"
        "<|assistant|>{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
        "  {% else %}\n<|{{ message['role'] }}|>{{ message['content'] | trim }}\n  {% endif %}\n{% endfor %}\n"
    ),
    "tools": (
        "{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}\n"
        "{%- for message in messages %}\n"
        "{{- '<|im_start|>' + message.role + '\\n' }}\n"
        "{%- if message.role == 'assistant' %}{% generation %}\n"
        "{%- if message.content is defined %}{{ message.content }}{% endif %}\n"
        "{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}\n"
        "{{- '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}\n"
        "{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "parts": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        "{% if message.role == 'assistant' %}{% generation %}"
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>"
        "{% endgeneration %}{% else %}"
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>"
        "{% endif %}{{ '\\n' }}{% endfor %}"
    ),
}
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich <&>", "days": [1, None]}},
}
TEXTS = ["", "hi", "  two  blanks ", "\n\nlines\n", "être 😀 日本", "12345 don't", "<b>&amp;</b>"]


def parts(text: str) -> list[dict[str, str]]:
    """A text in two parts."""
    return [
        {"type": "text", "text": text[: len(text) // 2]},
        {"type": "text", "text": text[len(text) // 2 :]},
    ]


def conversations() -> list[tuple[str, dict[str, Any]]]:
    """(template, record)."""
    found: list[tuple[str, dict[str, Any]]] = []
    for first, text in enumerate(TEXTS):
        other = TEXTS[(first + 3) % len(TEXTS)]
        turns = [
            ("system", other),
            ("user", text),
            ("assistant", other),
            ("user", other),
            ("assistant", text),
        ]
        plain = {"messages": [{"role": role, "content": content} for role, content in turns]}
        found += [(name, plain) for name in ("blocks", "tools", "chatml", "llama3")]
        found.append(
            (
                "parts",
                {
                    "messages": [
                        {"role": role, "content": parts(content)} for role, content in turns
                    ]
                },
            )
        )
        asked = {"role": "user", "content": text}
        called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        answered = {"role": "tool", "content": other}
        found.append(
            (
                "tools",
                {"messages": [asked, called, answered, plain["messages"][4]], "tools": [CALL]},
            )
        )
    return found


def main() -> None:
    """Train a tokenizer, and let transformers tokenize all conversations by it."""
    from transformers import PreTrainedTokenizerFast

    from streammega.convert.tokenize.chat import BUILT_IN

    FOLDER.mkdir(exist_ok=True)
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL),
    )
    model.save(str(FOLDER / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    cases = []
    for name, record in conversations():
        source = BUILT_IN.get(name) or TEMPLATES[name]
        made = theirs.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            chat_template=source,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        cases.append(
            {
                "template": name,
                "record": record,
                "ids": made["input_ids"],
                "mask": made["assistant_masks"],
            }
        )
    (FOLDER / "cases.json").write_text(
        json.dumps({"templates": TEMPLATES, "cases": cases}, ensure_ascii=False)
    )
    (FOLDER / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )


if __name__ == "__main__":
    main()
