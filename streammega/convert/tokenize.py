"""Hugging Face `tokenizer.json` files: batches of documents to packed token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from streammega.convert.sources import RawDocument, text_of
from streammega.errors import ConvertError, ObjectNotFoundError
from streammega.index.format import smallest_dtype

EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<EOD>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True, kw_only=True)
class TokenizedBatch:
    """Token ids of some documents end to end, as bytes of the output dtype; `lengths` per document, in tokens."""

    data: bytes
    lengths: list[int]
    text_bytes: int


def load_tokenizer(path: str) -> Tokenizer:
    """A tokenizer from a `tokenizer.json`. Raises ObjectNotFoundError or ConvertError."""
    if not os.path.isfile(path):
        raise ObjectNotFoundError(f"{path}: no such tokenizer file; give the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ConvertError(f"{path}: is not a tokenizer.json that the tokenizers library reads ({error})") from None


def find_eod(tokenizer: Tokenizer, name: str | None) -> int:
    """The id of the end-of-document token: the one named, or the first well-known name the vocabulary has."""
    for candidate in [name] if name else EOD_NAMES:
        found = tokenizer.token_to_id(candidate)
        if found is not None:
            return int(found)
    known = name or ", ".join(EOD_NAMES)
    raise ConvertError(f"the tokenizer has no end-of-document token ({known}); name it with --eod, or pass --no-append-eod")


def vocab_size(tokenizer: Tokenizer) -> int:
    """Ids run below this number, added tokens included."""
    size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return max(size, highest + 1)


def output_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """uint16 for vocabularies under 65500, else int32."""
    return smallest_dtype(vocab_size(tokenizer))


class BatchEncoder:
    """Encodes batches in a worker process; made once per process."""

    def __init__(self, tokenizer_path: str, key: str, eod: int | None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._key, self._eod = key, eod
        self._dtype = output_dtype(self._tokenizer)

    def __call__(self, documents: Sequence[RawDocument]) -> TokenizedBatch:
        """Encode; empty texts are left out, as they hold no tokens to train on."""
        texts = [text for document in documents if (text := text_of(document, self._key))]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        end = [] if self._eod is None else [self._eod]
        ids = [encoding.ids + end for encoding in encodings]
        flat = np.fromiter((token for document in ids for token in document), self._dtype)
        sizes = sum(len(document.data) for document in documents)
        return TokenizedBatch(data=flat.tobytes(), lengths=[len(document) for document in ids], text_bytes=sizes)
