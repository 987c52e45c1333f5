"""What a tokenizer's folder, or its page on the hub, holds besides the tokenizer.json: the names of
special tokens, and chat templates.
"""

from __future__ import annotations

import json
import os
from typing import Any

from streammega.errors import ConvertError

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


def read_settings(tokenizer: str | None) -> dict[str, Any]:
    """The settings of a tokenizer, by its name; empty without any. Raises ConvertError."""
    return _read_json(tokenizer, TOKEN_MAP) | _read_json(tokenizer, CONFIG)


def special_token_names(settings: dict[str, Any]) -> dict[str, str]:
    """How settings spell `bos_token`, `eos_token` and the like."""
    spellings = {name: _spelling(settings.get(name)) for name in TOKEN_NAMES}
    return {name: token for name, token in spellings.items() if token is not None}


def _spelling(token: Any) -> str | None:
    """Of a special token: text, or a mapping with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(tokenizer: str | None, name: str) -> dict[str, Any]:
    """The mapping in a file of a tokenizer's folder; empty without one."""
    text = read_text(tokenizer, name)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConvertError(f"{tokenizer}: {name} beside it is broken JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def read_text(tokenizer: str | None, name: str) -> str | None:
    """The text of a file in a tokenizer's folder, or on its page of the hub; None without one."""
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
