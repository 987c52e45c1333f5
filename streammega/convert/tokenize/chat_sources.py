"""Where chat templates come from: the tokenizer's own, ChatML, Llama-3, or a file."""

from __future__ import annotations

import json
import os
from typing import Any

from streammega.convert.tokenize.chat_templates import ChatTemplate
from streammega.errors import ConvertError, ObjectNotFoundError

_CHATML = """\
{% for message in messages %}
{% if message.tool_calls is defined %}{{ raise_exception('ChatML has no spelling of tool calls') }}{% endif %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{{- '\\n' }}
{%- else %}
{{ message.content + '<|im_end|>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_LLAMA3 = """\
{{ '<|begin_of_text|>' }}
{%- for message in messages %}
{% if message.tool_calls is defined %}{{ raise_exception('Llama-3 has no spelling of tool calls') }}{% endif %}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{ message.content | trim + '<|eot_id|>' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
BUILT_IN = {"chatml": _CHATML, "llama3": _LLAMA3}
NEEDED = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>"),
}
"""Tokens without which a built-in template would be letters."""
OWN = "tokenizer"
"""The name of a tokenizer's own template."""
TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
CONFIG = "tokenizer_config.json"
TOKEN_MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"


def find_template(name: str, tokenizer: str | None) -> ChatTemplate:
    """A template by its name: `chatml`, `llama3`, `tokenizer` (or `tokenizer:NAME`, one of
    several), a file, or as it is written.

    tokenizer: as `load_tokenizer` takes it; its template and the names of its special tokens lie
    beside its tokenizer.json. Raises ConvertError, ObjectNotFoundError.
    """
    if name.startswith("{"):
        resolved = _resolved(name)
        if resolved is not None:
            return resolved
    config = _json_beside(tokenizer, TOKEN_MAP) | _json_beside(tokenizer, CONFIG)
    tokens = {key: _spelling(config.get(key)) for key in TOKEN_NAMES}
    variables = {key: token for key, token in tokens.items() if token is not None}
    if name in BUILT_IN:
        return ChatTemplate(name=name, source=BUILT_IN[name], variables=variables)
    kind, _, name_of_several = name.partition(":")
    if kind == OWN:
        source = _own(name_of_several, config, tokenizer)
        return ChatTemplate(name=name, source=source, variables=variables)
    if "{{" in name or "{%" in name:
        return ChatTemplate(name="as given", source=name, variables=variables)
    try:
        with open(name, encoding="utf-8") as file:
            source = file.read()
    except UnicodeDecodeError:
        raise ConvertError(
            f"{name}: a chat template is a text file in UTF-8; this is none"
        ) from None
    except OSError as error:
        known = ", ".join((*BUILT_IN, OWN))
        raise ObjectNotFoundError(
            f"chat template {name!r} is none of {known}, and no file ({error.strerror})"
        ) from None
    return ChatTemplate(name=os.path.basename(name), source=source, variables=variables)


def as_option(template: ChatTemplate) -> str:
    """A template as a setting that any machine can use and that changes with all of it:
    `find_template` reads it back.
    """
    fields = {"name": template.name, "source": template.source, "variables": template.variables}
    # sorted: it is part of a conversion's fingerprint
    return json.dumps(fields, sort_keys=True)


def _resolved(text: str) -> ChatTemplate | None:
    """A template that `as_option` made text of; None for other text, a template itself perhaps."""
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    if isinstance(fields, dict) and set(fields) == {"name", "source", "variables"}:
        return ChatTemplate(**fields)
    return None


def _own(name: str, config: dict[str, Any], tokenizer: str | None) -> str:
    """The tokenizer's own: the file beside it goes before what its settings say, as in
    transformers.
    """
    templates = config.get("chat_template") or {}
    if isinstance(templates, list):
        templates = {item["name"]: item["template"] for item in templates}
    elif isinstance(templates, str):
        templates = {"default": templates}
    file = TEMPLATE if name in ("", "default") else f"chat_templates/{name}.jinja"
    source = _beside(tokenizer, file)
    if source is None:
        source = templates.get(name or "default")
    if source is None:
        is_missing = f"is named {name}" if name else "is there"
        has = f"; it has: {', '.join(sorted(templates))}" if templates else ""
        raise ConvertError(
            f"{tokenizer}: no chat template of its own ({TEMPLATE}, or chat_template of {CONFIG}, "
            f"beside its tokenizer.json) {is_missing}{has}; give --chat-template "
            f"{', '.join(BUILT_IN)} or a file"
        )
    return str(source)


def _spelling(token: Any) -> str | None:
    """Of a special token: text, or a mapping with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _json_beside(tokenizer: str | None, name: str) -> dict[str, Any]:
    """The mapping in a file beside a tokenizer's; empty without one."""
    text = _beside(tokenizer, name)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConvertError(f"{tokenizer}: {name} beside it is broken JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def _beside(tokenizer: str | None, name: str) -> str | None:
    """The text of a file beside a tokenizer's, or in its place on the hub; None: there is none."""
    if tokenizer is None or tokenizer == "bytes" or tokenizer.startswith("tiktoken:"):
        return None
    tokenizer, _, _ = tokenizer.partition(",")  # of a vocabulary and its merges, the first
    path: str | None = None
    if os.path.exists(tokenizer):
        folder = tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer)
        path = os.path.join(folder, name)
    elif not tokenizer.endswith((".json", ".model", ".tiktoken")):
        path = _from_hub(tokenizer, name)
    if path is None or not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


def _from_hub(repository: str, name: str) -> str | None:
    """The path of a file of the hub's, here; None: the hub has none of that name."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return str(hf_hub_download(repository, name))
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:  # who works without the hub has what there is
            return None
        raise ConvertError(
            f"{repository}: the hub could not give its {name} ({error}); "
            f"give the path of a tokenizer.json"
        ) from None
    except EntryNotFoundError:
        return None
