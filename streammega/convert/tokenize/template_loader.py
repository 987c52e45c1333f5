"""Where chat templates come from: the tokenizer's own, ChatML, Llama-3, or a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from streammega.convert.tokenize.chat_templates import DATE, ChatTemplate
from streammega.convert.tokenize.tokenizer_files import (
    CONFIG,
    read_settings,
    read_text,
    special_token_names,
)
from streammega.errors import ConfigError, ConvertError, ObjectNotFoundError

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
TEMPLATE = "chat_template.jinja"
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that are of the record, or of how it is rendered."""
DATES = {DATE: f"{DATE}=YYYY-MM-DD", "date_string": "'date_string=26 Jul 2024'"}
"""Variables by which templates write a date, and how they are given."""


def find_template(
    name: str, tokenizer: str | None, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """A template by its name: `chatml`, `llama3`, `tokenizer` (or `tokenizer:NAME`, one of
    several), a file, or as it is written.

    tokenizer: as `load_tokenizer` takes it; its template and the names of its special tokens lie
    beside its tokenizer.json. variables: what the template may look at besides, as transformers
    passes them. Raises ConfigError, ConvertError, ObjectNotFoundError.
    """
    if name.startswith("{"):
        resolved = _resolved(name)
        if resolved is not None:
            return resolved
    settings = read_settings(tokenizer)
    tokens = special_token_names(settings)
    template = _find(name, tokenizer, settings)
    _check_variables(template, variables or {})
    return replace(template, variables=tokens | dict(variables or {}))


def _find(name: str, tokenizer: str | None, settings: dict[str, Any]) -> ChatTemplate:
    """A template by its name, without variables."""
    if name in BUILT_IN:
        return ChatTemplate(name=name, source=BUILT_IN[name], variables={})
    kind, _, name_of_several = name.partition(":")
    if kind == OWN:
        source = _own(name_of_several, settings, tokenizer)
        return ChatTemplate(name=name, source=source, variables={})
    if "{{" in name or "{%" in name:
        return ChatTemplate(name="as given", source=name, variables={})
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
    return ChatTemplate(name=os.path.basename(name), source=source, variables={})


def _check_variables(template: ChatTemplate, variables: Mapping[str, Any]) -> None:
    """Raise ConfigError for variables that the template does not look at, and for a date that it
    writes and nobody names.
    """
    names = set(re.findall(r"\w+", template.source))
    for name in variables:
        if name in RESERVED:
            raise ConfigError(
                f"template_vars (--template-var) sets {name!r}, which comes with each conversation; "
                f"leave it out"
            )
        if name not in names:
            raise ConfigError(
                f"template_vars (--template-var) sets {name!r}, which chat template "
                f"{template.name} does not look at; leave it out, or correct its name"
            )
    dates = [name for name in DATES if name in names]
    if dates and not any(name in variables for name in dates):
        raise ConfigError(
            f"chat template {template.name} writes a date ({', '.join(dates)}); say which by "
            f"--template-var {DATES[dates[0]]} (template_vars), so that the tokens do not depend on "
            f"the day or on a default of the template"
        )
    if DATE in variables:
        try:
            datetime.fromisoformat(variables[DATE])
        except (TypeError, ValueError):
            raise ConfigError(
                f"template_vars (--template-var) sets {DATE} to {variables[DATE]!r}; write the day "
                f"as YYYY-MM-DD"
            ) from None


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
    source = read_text(tokenizer, file)
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
