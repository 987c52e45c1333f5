"""The files of tokenizers: GPT-2's `vocab.json` with its `merges.txt`, byte pairs in tiktoken's form, and
what a tokenizer's folder, or its page on the hub, holds besides the tokenizer.json.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from streammega.config.validate import parse_json
from streammega.errors import ConvertError, ObjectNotFoundError

GPT2_END = "<|endoftext|>"
CONFIG = "tokenizer_config.json"
TOKEN_MAP = "special_tokens_map.json"


def find_gpt2_files(name: str) -> tuple[str, str] | None:
    """The two files of `VOCAB,MERGES`, or of a folder that holds them; None for a name on the hub,
    or of one file.

    Raises ObjectNotFoundError.
    """
    if os.path.isdir(name):
        vocab, merges = (os.path.join(name, file) for file in ("vocab.json", "merges.txt"))
        if not (os.path.isfile(vocab) and os.path.isfile(merges)):
            raise ObjectNotFoundError(
                f"{name}: a folder without a tokenizer.json, and without a vocab.json and its "
                f"merges.txt"
            )
        return vocab, merges
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
    # What the library has no token for it would leave out of texts without a word.
    needed = [*sorted(pre_tokenizers.ByteLevel.alphabet()), GPT2_END]
    missing = [token for token in needed if tokenizer.token_to_id(token) is None]
    if missing:
        raise ConvertError(
            f"{vocab}: has no token for {len(missing)} of the 256 bytes and {GPT2_END} "
            f"({missing[0]!r} for one), so it is not of GPT-2's kind; give a tokenizer.json"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([GPT2_END])
    return tokenizer


class Pattern(NamedTuple):
    """How a kind of vocabulary cuts text, and its special tokens."""

    expression: str
    special_tokens: dict[str, int]
    """Their ids, counted from the end of the vocabulary."""


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
_LLAMA3_NAMES = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
_LLAMA31_NAMES = {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
"""What Llama 3.1 to 3.3 name too."""


def _llama3_tokens(named: dict[int, str]) -> dict[str, int]:
    """The 256 special tokens of Llama 3."""
    # numbered by themselves: those with names leave no gap
    reserved = (f"<|reserved_special_token_{number}|>" for number in itertools.count())
    return {named.get(number) or next(reserved): number for number in range(256)}


PATTERNS = {
    "gpt2": Pattern(_GPT2, {GPT2_END: 0}),
    # These two leave one number out.
    "cl100k_base": Pattern(
        _CL100K,
        {
            GPT2_END: 1,
            "<|fim_prefix|>": 2,
            "<|fim_middle|>": 3,
            "<|fim_suffix|>": 4,
            "<|endofprompt|>": 20,
        },
    ),
    "o200k_base": Pattern(_O200K, {GPT2_END: 1, "<|endofprompt|>": 20}),
    "llama3": Pattern(_LLAMA3, _llama3_tokens(_LLAMA3_NAMES)),
    "llama3.1": Pattern(_LLAMA3, _llama3_tokens(_LLAMA3_NAMES | _LLAMA31_NAMES)),
    "qwen": Pattern(_QWEN, {GPT2_END: 0, "<|im_start|>": 1, "<|im_end|>": 2}),
}
"""Those of vocabularies that are given as files. tiktoken's own registry has them only together with
a download of the vocabulary.
"""


def load_tiktoken_file(path: str, pattern: str | None) -> Any:
    """The encoding of a file of byte pairs. pattern: a name of PATTERNS, or a regular expression.

    Raises ConvertError where it is neither, and what the library raises.
    """
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    name = os.path.basename(path)
    chosen = PATTERNS.get(pattern or "")
    if chosen is None:
        if pattern is None or "\\" not in pattern:
            reason = f" is not {pattern!r}" if pattern else " is not in the file"
            raise ConvertError(
                f"{name}: how it cuts text{reason}; give --tiktoken-pattern, one of "
                f"{', '.join(PATTERNS)}, or a regular expression"
            )
        chosen = Pattern(pattern, {GPT2_END: 0})
    ranks = load_tiktoken_bpe(path)
    end = max(ranks.values(), default=-1) + 1
    return tiktoken.Encoding(
        name,
        pat_str=chosen.expression,
        mergeable_ranks=ranks,
        special_tokens={token: end + number for token, number in chosen.special_tokens.items()},
    )


def read_settings(tokenizer: str | None) -> dict[str, Any]:
    """The settings of a tokenizer, by its name; empty without any. Raises ConvertError."""
    return _read_json(tokenizer, TOKEN_MAP) | _read_json(tokenizer, CONFIG)


def special_token_names(settings: dict[str, Any]) -> dict[str, str]:
    """How settings spell `bos_token`, `eos_token` and the like: as text, or a mapping that holds it."""
    tokens: dict[str, str] = {}
    for name, token in settings.items():
        spelling = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(spelling, str):
            tokens[name] = spelling
    return tokens


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
