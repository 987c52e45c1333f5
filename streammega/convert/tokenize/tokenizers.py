"""Tokenizers of every kind behind one small interface: Hugging Face, SentencePiece, tiktoken,
bytes.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from streammega.convert.tokenize.gpt2_files import load_pair, pair_of
from streammega.convert.tokenize.tiktoken_files import is_tiktoken_file, pattern_of
from streammega.errors import ConvertError, ObjectNotFoundError
from streammega.kernels.parallel import num_threads

EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eod>",
    "<EOD>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "[SEP]",
)
Ids = Sequence[int]
AT_ONCE = 16
"""Texts that one thread of the tokenizers library encodes together."""


class TextTokenizer(Protocol):
    """Text to token ids. `digest` changes with what it makes of texts; ids run below vocab_size."""

    name: str
    digest: str
    vocab_size: int

    def encode(self, texts: list[str]) -> Sequence[Ids]:
        """Token ids of each text, no special tokens added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    def find(self, token: str) -> int | None:
        """The id of a special token, if there is one of that name."""

    def usual_eod(self) -> int | None:
        """The end-of-document token that the tokenizer itself knows of."""


def load_tokenizer(
    name: str,
    *,
    special_tokens: str | None = None,
    add_special_tokens: bool = False,
    pattern: str | None = None,
) -> TextTokenizer:
    """A tokenizer by what its name looks like: a .json, .model or .tiktoken file, a folder,
    `vocab.json,merges.txt`, tiktoken:NAME, `bytes`, or a hub's name.

    A .model that is a list of byte pairs (Llama-3's) is a tiktoken file. Settings are those of
    ConvertOptions. Raises ObjectNotFoundError, ConvertError.
    """
    if add_special_tokens and (
        name == "bytes" or name.startswith("tiktoken:") or name.endswith((".tiktoken", ".model"))
    ):
        raise ConvertError(
            f"{name}: has no post-processor, so add_special_tokens adds nothing; see --bos"
        )
    if name == "bytes":
        return BytesTokenizer()
    if (
        name.startswith("tiktoken:")
        or name.endswith(".tiktoken")
        or (name.endswith(".model") and is_tiktoken_file(name))
    ):
        return TiktokenTokenizer(name, pattern, parse=special_tokens == "parse")
    if name.endswith(".model"):
        return SentencePieceTokenizer(name)
    return HuggingFaceTokenizer(
        name, add_special_tokens=add_special_tokens, parse=special_tokens != "text"
    )


def find_eod(tokenizer: TextTokenizer, name: str | None) -> int:
    """The id of the end-of-document token: the one named, the tokenizer's own, or the first
    well-known name it has.
    """
    if name is None and (own := tokenizer.usual_eod()) is not None:
        return own
    for candidate in [name] if name else EOD_NAMES:
        if (found := tokenizer.find(candidate)) is not None:
            return found
    known = name or ", ".join(EOD_NAMES)
    raise ConvertError(
        f"the tokenizer has no end-of-document token ({known}); name it with --eod, or pass --no-append-eod"
    )


class HuggingFaceTokenizer:
    """A tokenizer.json, a folder with one, a vocab.json with its merges.txt, or a tokenizer of the
    Hugging Face hub by name.
    """

    def __init__(self, name: str, *, add_special_tokens: bool = False, parse: bool = True) -> None:
        self._add = add_special_tokens
        self.name = (
            ",".join(map(os.path.basename, name.rstrip("/").split(",")))
            if _is_local(name)
            else name
        )
        self.model: Any = _load_huggingface(name)
        self.model.no_truncation()
        self.model.no_padding()
        self.model.encode_special_tokens = not parse
        self.digest = _digest(self.model.to_str().encode())
        highest = max(self.model.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = max(
            int(self.model.get_vocab_size(with_added_tokens=True)), int(highest) + 1
        )

    def encode(self, texts: list[str]) -> Sequence[Ids]:
        """A few texts at a time: the encodings of many are so large that making them waits for
        memory.
        """
        return self._encode(texts, add=self._add)

    def encode_pieces(self, texts: list[str]) -> Sequence[Ids]:
        """The same without what the post-processor adds: for pieces of one text."""
        return self._encode(texts, add=False)

    def added_around(self) -> tuple[list[int], list[int]]:
        """What the post-processor adds before and behind every text, where it is asked to."""
        bare = self._encode(["a"], add=False)[0]
        whole = self._encode(["a"], add=self._add)[0]
        before = next(
            n
            for n in range(len(whole) - len(bare) + 1)
            if list(whole[n : n + len(bare)]) == list(bare)
        )
        return list(whole[:before]), list(whole[before + len(bare) :])

    def _encode(self, texts: list[str], *, add: bool) -> Sequence[Ids]:
        found: list[Ids] = []
        at_once = AT_ONCE * max(1, _library_threads())
        for first in range(0, len(texts), at_once):
            encodings = self.model.encode_batch_fast(
                texts[first : first + at_once], add_special_tokens=add
            )
            found += [encoding.ids for encoding in encodings]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        return str(self.model.decode(list(ids), skip_special_tokens=False))

    def find(self, token: str) -> int | None:
        """By the vocabulary."""
        found = self.model.token_to_id(token)
        return None if found is None else int(found)

    def usual_eod(self) -> int | None:
        """Not known; by name."""
        return None


class SentencePieceTokenizer:
    """A SentencePiece .model file."""

    def __init__(self, path: str) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise ConvertError(
                f"{path}: needs the sentencepiece package: pip install 'streammega[tokenizers]'"
            ) from None
        if not os.path.isfile(path):
            raise ObjectNotFoundError(f"{path}: no such tokenizer file")
        try:
            self.model: Any = sentencepiece.SentencePieceProcessor(model_file=path)
        except Exception as error:  # RuntimeError, OSError
            raise ConvertError(f"{path}: is not a SentencePiece model ({error})") from None
        self.name, self.vocab_size = os.path.basename(path), int(self.model.vocab_size())
        self.digest = _digest(self.model.serialized_model_proto())

    def encode(self, texts: list[str]) -> Sequence[Ids]:
        """One thread: the processes are the parallelism."""
        found: Sequence[Ids] = self.model.encode(texts, num_threads=1)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text."""
        return str(self.model.decode(list(map(int, ids))))

    def find(self, token: str) -> int | None:
        """By the vocabulary; the unknown piece is none."""
        found = int(self.model.piece_to_id(token))
        return None if found == self.model.unk_id() else found

    def usual_eod(self) -> int | None:
        """Its end-of-sentence piece."""
        found = int(self.model.eos_id())
        return found if found >= 0 else None


class TiktokenTokenizer:
    """An encoding of tiktoken by name, or a .tiktoken file with the pattern that belongs to it: see
    `tiktoken_files`.
    """

    def __init__(self, name: str, pattern: str | None = None, *, parse: bool = False) -> None:
        try:
            import tiktoken
            from tiktoken.load import load_tiktoken_bpe
        except ImportError:
            raise ConvertError(
                f"{name}: needs the tiktoken package: pip install 'streammega[tokenizers]'"
            ) from None
        self._parse = parse
        is_file = not name.startswith("tiktoken:")
        if is_file and not os.path.isfile(name):
            raise ObjectNotFoundError(f"{name}: no such tokenizer file")
        try:
            if is_file:
                ranks = load_tiktoken_bpe(name)
                known = pattern_of(name, len(ranks), pattern)
                taken = set(ranks.values())
                free = known.first or next(n for n in range(len(taken) + 1) if n not in taken)
                special = {token: free + n for n, token in enumerate(known.special_tokens)}
                self.model: Any = tiktoken.Encoding(
                    os.path.basename(name),
                    pat_str=known.expression,
                    mergeable_ranks=ranks,
                    special_tokens=special,
                )
            else:
                self.model = tiktoken.get_encoding(name.partition(":")[2])
        except ConvertError:
            raise
        except Exception as error:  # downloads, files and names fail in their own ways
            raise ConvertError(
                f"{name}: cannot be loaded ({type(error).__name__}: {str(error)[:200]})"
            ) from None
        self.name = os.path.basename(name)
        self.vocab_size = int(self.model.n_vocab)
        hasher = hashlib.blake2b(digest_size=16)
        for token, rank in sorted(self.model._mergeable_ranks.items(), key=lambda pair: pair[1]):
            hasher.update(b"%d %d " % (rank, len(token)) + token)
        # by which all files were cut once: their digests stay
        if is_file and known.name != "cl100k_base":
            hasher.update(known.expression.encode())
        self.digest = hasher.hexdigest()

    def encode(self, texts: list[str]) -> Sequence[Ids]:
        """One thread: the processes are the parallelism."""
        if self._parse:
            return [self.model.encode(text, allowed_special="all") for text in texts]
        return [self.model.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text."""
        return str(self.model.decode(list(map(int, ids))))

    def find(self, token: str) -> int | None:
        """By its special tokens."""
        found = self.model._special_tokens.get(token)
        return None if found is None else int(found)

    def usual_eod(self) -> int | None:
        """<|endoftext|> or Llama-3's <|end_of_text|>, where the encoding has it."""
        found = self.find("<|endoftext|>")
        return self.find("<|end_of_text|>") if found is None else found


class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends documents."""

    name = "bytes"
    digest = "utf-8+256"
    vocab_size = 257

    def encode(self, texts: list[str]) -> Sequence[Ids]:
        """The bytes."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]  # type: ignore[misc]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; the end of a document is written out."""
        parts = bytes(token for token in ids if token < 256)
        return parts.decode(errors="replace") if len(parts) == len(ids) else self._with_ends(ids)

    def _with_ends(self, ids: Sequence[int]) -> str:
        text = ""
        start = 0
        for at, token in enumerate([*ids, 256]):
            if token >= 256:
                text += bytes(ids[start:at]).decode(errors="replace") + (
                    "<|endoftext|>" if at < len(ids) else ""
                )
                start = at + 1
        return text

    def find(self, token: str) -> int | None:
        """Only <|endoftext|>."""
        return 256 if token == "<|endoftext|>" else None

    def usual_eod(self) -> int | None:
        """256."""
        return 256


def _is_local(name: str) -> bool:
    return os.path.exists(name) or pair_of(name) is not None


def _load_huggingface(name: str) -> Any:
    """The library's tokenizer of a file, a folder, a pair of files or a name on the hub.

    Raises ConvertError.
    """
    from tokenizers import Tokenizer

    pair = pair_of(name)
    in_folder = os.path.join(name, "tokenizer.json")
    if pair is not None and not os.path.isfile(in_folder):
        return load_pair(*pair)
    if os.path.isdir(name):
        if not os.path.isfile(in_folder):
            raise ObjectNotFoundError(
                f"{name}: a folder without a tokenizer.json, and without a vocab.json and its merges.txt"
            )
        name = in_folder
    if not os.path.isfile(name) and (
        name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1
    ):
        raise ObjectNotFoundError(
            f"{name}: no such tokenizer file; give the path of a tokenizer.json"
        )
    if (
        not os.path.isfile(name)
        and "/" not in name
        and (near := difflib.get_close_matches(name, os.listdir("."), 1, 0.8))
    ):
        raise ObjectNotFoundError(f"{name}: no such tokenizer file; is {near[0]} meant?")
    try:
        return (
            Tokenizer.from_file(name) if os.path.isfile(name) else Tokenizer.from_pretrained(name)
        )
    except Exception as error:  # the library raises bare Exception
        if os.path.isfile(name):
            raise ConvertError(
                f"{name}: is not a tokenizer.json that the tokenizers library reads ({error}); a vocab.json is given with its "
                f"merges, as vocab.json,merges.txt"
            ) from None
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ConvertError(
            f"{name}: neither a file nor a tokenizer that the hub could give ({reason}); give the path of a tokenizer.json"
        ) from None


def _library_threads() -> int:
    """How many threads the tokenizers library uses: see `engines`."""
    parallel = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() not in ("false", "0", "off")
    return int(os.environ.get("RAYON_NUM_THREADS") or num_threads()) if parallel else 1


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
