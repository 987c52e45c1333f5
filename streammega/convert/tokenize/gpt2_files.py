"""Megatron's GPT2BPETokenizer: a `vocab.json` with the ids of tokens, and a `merges.txt` with the
pairs they are made of.
"""

from __future__ import annotations

import os
from typing import Any

from streammega.errors import ConvertError, ObjectNotFoundError

END = "<|endoftext|>"
IN_FOLDERS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
"""Names of the two files in a folder: the hub's, and those of Megatron's own downloads."""


def pair_of(name: str) -> tuple[str, str] | None:
    """The two files of `VOCAB,MERGES`, or of a folder that holds them; None for anything else.

    Raises ObjectNotFoundError.
    """
    if os.path.isdir(name):
        for names in IN_FOLDERS:
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


def load_pair(vocab: str, merges: str) -> Any:
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
    if tokenizer.token_to_id(END) is None:
        raise ConvertError(f"{vocab}: has no {END}, which ends documents of GPT-2's kind")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer
