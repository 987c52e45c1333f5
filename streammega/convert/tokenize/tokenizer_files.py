"""The files of tokenizers: GPT-2's `vocab.json` with its `merges.txt`, byte pairs in tiktoken's form, and
what a tokenizer's folder, or its page on the hub, holds besides the tokenizer.json.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from streammega.config.validate import parse_json
from streammega.errors import ConvertError, ObjectNotFoundError

GPT2_END = "<|endoftext|>"
GPT2_FILES = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
"""Names of the two files in a folder: the hub's, and those of Megatron's own downloads."""
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASELESS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASELESS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN = rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_END = (GPT2_END,)
MAX_LINE = 4096
"""Bytes of a file that are looked at for its first line: other files may have none."""
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


def find_gpt2_files(name: str) -> tuple[str, str] | None:
    """The two files of `VOCAB,MERGES`, or of a folder that holds them; None for anything else.

    Raises ObjectNotFoundError.
    """
    if os.path.isdir(name):
        for names in GPT2_FILES:
            vocab, merges = (os.path.join(name, file) for file in names)
            if os.path.isfile(vocab) and os.path.isfile(merges):
                return vocab, merges
        return None
    vocab, comma, merges = name.partition(",")
    if not comma or os.path.exists(name):
        return None
    for path in (vocab, merges):
        if not os.path.isfile(path):
            raise ObjectNotFoundError(
                f"{path}: no such tokenizer file; "
                f"give a vocab.json and its merges.txt as VOCAB,MERGES"
            )
    return vocab, merges


def load_gpt2_files(vocab: str, merges: str) -> Any:
    """Their tokenizer, which cuts text as GPT-2 does.

    Raises ConvertError for files that do not belong together.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        model = models.BPE.from_file(vocab, merges)
    except Exception as error:  # the library raises bare Exception
        raise ConvertError(
            f"{vocab}, {merges}: are no vocabulary with its merges ({error})"
        ) from None
    tokenizer = Tokenizer(model)
    bytes_as_letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    missing = [letter for letter in bytes_as_letters if tokenizer.token_to_id(letter) is None]
    if missing:  # which the library would leave out of texts without a word
        raise ConvertError(
            f"{vocab}: has no token for {len(missing)} of the 256 bytes ({missing[0]!r}): "
            f"is it of GPT-2's kind?"
        )
    if tokenizer.token_to_id(GPT2_END) is None:
        raise ConvertError(f"{vocab}: has no {GPT2_END}, which ends documents of GPT-2's kind")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([GPT2_END])
    return tokenizer


_LLAMA3_NAMES = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
_LLAMA31_NAMES = {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
"""What Llama 3.1 to 3.3 name too."""


def _llama3_tokens(named: dict[int, str]) -> tuple[str, ...]:
    """The 256 special tokens behind Llama-3's 128,000."""
    # numbered by themselves: those with names leave no gap
    reserved = (f"<|reserved_special_token_{number}|>" for number in itertools.count())
    return tuple(named.get(number) or next(reserved) for number in range(256))


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How a vocabulary cuts text, and its special tokens."""

    name: str
    expression: str
    size: int = 0
    """Its own tokens."""
    first: int | None = None
    """The id of its first special token, if that is not the first free one."""
    special_tokens: tuple[str, ...] = _END


PATTERNS = (
    Pattern(name="gpt2", expression=_GPT2, size=50256),
    Pattern(name="p50k_base", expression=_GPT2, size=50280),
    Pattern(name="cl100k_base", expression=_CL100K, size=100256, first=100257),
    Pattern(name="o200k_base", expression=_O200K, size=199998, first=199999),
    Pattern(
        name="llama3",
        expression=_LLAMA3,
        size=128000,
        special_tokens=_llama3_tokens(_LLAMA3_NAMES),
    ),
    # Its byte pairs are those of llama3, which is found by the size.
    Pattern(
        name="llama3.1",
        expression=_LLAMA3,
        size=128000,
        special_tokens=_llama3_tokens(_LLAMA3_NAMES | _LLAMA31_NAMES),
    ),
    Pattern(
        name="qwen",
        expression=_QWEN,
        size=151643,
        special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
)


def find_pattern(path: str, size: int, wanted: str | None) -> Pattern:
    """The pattern of a file of `size` byte pairs: the one that is wanted, by name or written out,
    else by the size.

    Raises ConvertError where nothing tells it.
    """
    by_name = {pattern.name: pattern for pattern in PATTERNS}
    by_size = {pattern.size: pattern for pattern in reversed(PATTERNS)}  # the first of a size
    if wanted is None and size in by_size:
        return by_size[size]
    if wanted in by_name:
        pattern = by_name[wanted]
        # another vocabulary has the expression, and special tokens of its own
        is_its_own = pattern.size == size
        return (
            pattern if is_its_own else replace(pattern, size=size, first=None, special_tokens=_END)
        )
    if wanted is not None and "\\" in wanted:
        return Pattern(name="own", expression=wanted, size=size)
    reason = (
        f"no pattern is called {wanted!r}"
        if wanted
        else f"its {size} tokens are those of no known vocabulary"
    )
    raise ConvertError(
        f"{os.path.basename(path)}: how it cuts text is not in the file, and {reason}; "
        f"give --tiktoken-pattern, one of {', '.join(by_name)}, or a regular expression"
    )


def is_tiktoken_file(path: str) -> bool:
    """Whether a file is a list of byte pairs, a line each: base64 and a number."""
    try:
        with open(path, "rb") as file:
            words = file.readline(MAX_LINE).split()
        if len(words) != 2 or not words[1].isdigit():
            return False
        token = base64.b64decode(words[0], validate=True)
    except (OSError, binascii.Error):
        return False
    return bool(token)


def read_settings(tokenizer: str | None) -> dict[str, Any]:
    """The settings of a tokenizer, by its name; empty without any. Raises ConvertError."""
    return _read_json(tokenizer, TOKEN_MAP) | _read_json(tokenizer, CONFIG)


def special_token_names(settings: dict[str, Any]) -> dict[str, str]:
    """How settings spell `bos_token`, `eos_token` and the like."""
    spellings = {name: _spelling(settings.get(name)) for name in TOKEN_NAMES}
    return {name: token for name, token in spellings.items() if token is not None}


def _spelling(token: Any) -> str | None:
    """The content of a special token, which is text, or a mapping that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(tokenizer: str | None, name: str) -> dict[str, Any]:
    """The mapping in a file of a tokenizer's folder; empty without one."""
    text = read_text(tokenizer, name)
    if text is None:
        return {}
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConvertError(f"{tokenizer}: {name} in its folder is broken JSON ({error})") from None
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


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Without the warnings of the hub's package, one for each of its tries: they say what the error
    after them does.
    """
    # It sets the level of its log when it makes the first logger: that must be before.
    from huggingface_hub.utils.logging import get_logger

    log = get_logger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _from_hub(repository: str, name: str) -> str | None:
    """The path of a file of the hub's, here; None: the hub has none of that name."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        with quiet_hub():
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
