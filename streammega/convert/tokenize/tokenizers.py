"""Tokenizers of every kind behind one interface: Hugging Face, SentencePiece, tiktoken, bytes.

Another kind is a subclass of Tokenizer here, and its line in TOKENIZERS below.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import itertools
import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config.validate import parse_json
from streammega.convert.options import digest_of_bytes
from streammega.convert.tokenize.tokenizer_files import (
    find_gpt2_files,
    find_pattern,
    is_tiktoken_file,
    load_gpt2_files,
    quiet_hub,
    read_settings,
    special_token_names,
)
from streammega.errors import ConfigError, ConvertError, ObjectNotFoundError
from streammega.errors.cached_property import cached_property
from streammega.errors.extras import import_extra
from streammega.errors.process import panics_as_errors
from streammega.kernels import num_threads

FILE_SUFFIX = re.compile(r"\.[a-zA-Z]{2,9}$")
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
"""Usual names of the end-of-document token, by which it is looked for in this order: a name of its
own goes before those that end a sentence or a turn.
"""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>")
"""An eos_token that ends a turn: it ends a document only where no other token does."""
PROBE_ID = (1 << 32) - 1
"""An id that no vocabulary has."""
NO_TOKEN = "<|no unk_token|>"
"""A name that no token has. A BPE model without an unk_token leaves out what it has no token for; with
one that is not in its vocabulary it fails, as models of other kinds do.
"""
RANDOM_SETTINGS = ("dropout", "alpha", "nbest_size")
"""Settings of BPE and unigram models by which a text has other tokens each time."""
TIKTOKEN = "tiktoken"
"""The only key of what is stored of a tiktoken encoding."""
Ids = Sequence[int]
AT_ONCE = 16
"""Texts that one thread of the tokenizers library encodes together."""
CHARS_AT_ONCE = 1 << 20
"""Characters of these texts: the library takes about 110 bytes of memory for each."""


class TokenSpans(NamedTuple):
    """The tokens of a text, and where each is in it: [start, stop), in characters or in bytes."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class TokenizerSettings(NamedTuple):
    """How a tokenizer treats text: settings of ConvertOptions, by their names there."""

    special_tokens_in_text: str | None = None
    add_special_tokens: bool = False
    pattern: str | None = None


class Tokenizer(ABC):
    """Text to token ids. `digest` changes with what it makes of texts; ids run below vocab_size."""

    has_post_processor = False
    """Whether it may add tokens to every text."""

    name: str
    digest: str
    vocab_size: int
    special_tokens: dict[str, int]
    """The ids of those that a chat template may write."""
    spans_in_bytes = False
    """Whether spans are in bytes of UTF-8; else in characters."""
    encodes_any_length = False
    """Whether `encode` takes little memory, so that a text of any length is encoded as a whole."""
    folds_letters = False
    """Whether other spellings of a special token may become that token too."""

    @classmethod
    @abstractmethod
    def reads(cls, name: str) -> bool:
        """Whether a tokenizer of this name is of this kind."""

    @classmethod
    @abstractmethod
    def load(cls, name: str, settings: TokenizerSettings) -> Tokenizer:
        """The tokenizer of a name. Raises ObjectNotFoundError, ConvertError."""

    def stored(self) -> bytes:
        """All that it is, for `load_stored`; empty where its name says it."""
        return b""

    @abstractmethod
    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """Token ids of each text; bare: without what a post-processor adds."""

    @abstractmethod
    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """Tokens of each text with their places, without what a post-processor adds."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""

    def find(self, token: str) -> int | None:
        """The id of a special token, if there is one of that name."""
        return self.special_tokens.get(token)

    def default_eod(self) -> str | None:
        """The end-of-document token that its own files name; None: they name none."""
        return None

    def added_ids(self) -> tuple[list[int], list[int]]:
        """What a post-processor adds before and after every text."""
        return [], []

    @abstractmethod
    def parsing_special_tokens(self, spellings: dict[str, str] | None = None) -> Tokenizer:
        """The same tokenizer, which parses special tokens and adds nothing to texts.

        spellings: other spellings of special tokens; by their own they are text then. Raises
        ConfigError for a tokenizer whose special tokens are not known.
        """


def load_tokenizer(
    name: str,
    *,
    special_tokens_in_text: str | None = None,
    add_special_tokens: bool = False,
    pattern: str | None = None,
) -> Tokenizer:
    """A tokenizer by what its name looks like: a .json, .model or .tiktoken file, a folder,
    `vocab.json,merges.txt`, tiktoken:NAME, `bytes`, or a hub's name.

    Settings are those of ConvertOptions. Raises ObjectNotFoundError, ConvertError.
    """
    kind = next(kind for kind in TOKENIZERS if kind.reads(name))
    if add_special_tokens and not kind.has_post_processor:
        raise ConvertError(
            f"{name}: has no post-processor, so add_special_tokens adds nothing; see --bos"
        )
    if pattern is not None and (kind is not TiktokenTokenizer or name.startswith("tiktoken:")):
        raise ConvertError(
            f"{name}: says itself how it cuts text; leave out --tiktoken-pattern, which is for "
            f".tiktoken files"
        )
    return kind.load(name, TokenizerSettings(special_tokens_in_text, add_special_tokens, pattern))


def load_stored(name: str, data: bytes) -> Tokenizer:
    """The tokenizer of what `stored` gave. name: for messages. Raises ConvertError."""
    try:
        if not data.startswith(b"{"):
            sentencepiece = import_extra("sentencepiece", "convert", f"{name}: needs sentencepiece")
            model = sentencepiece.SentencePieceProcessor(model_proto=data)
            return SentencePieceTokenizer(name, model)
        if not data.startswith(b'{"%s"' % TIKTOKEN.encode()):
            tokenizers = import_extra("tokenizers", "convert", f"{name}: needs tokenizers")
            return HuggingFaceTokenizer(name, tokenizers.Tokenizer.from_str(data.decode()))
        described = parse_json(data)[TIKTOKEN]
        ranks = {base64.b64decode(token): rank for token, rank in described["ranks"].items()}
        encoding = import_extra("tiktoken", "convert", f"{name}: needs tiktoken").Encoding(
            name,
            pat_str=described["pattern"],
            mergeable_ranks=ranks,
            special_tokens=described["special_tokens"],
        )
        return TiktokenTokenizer(name, encoding, parse=False)
    except ConfigError:  # a package is missing
        raise
    except Exception as error:  # each library raises its own
        raise ConvertError(
            f"{name}: the copy of this tokenizer is damaged ({str(error)[:200]})"
        ) from None


def resolve_eod(tokenizer: Tokenizer, name: str | None) -> tuple[str, int]:
    """The end-of-document token and its id: the one named, the tokenizer's own, or the first
    well-known name it has.

    Raises ConvertError where it has none of them.
    """
    token = tokenizer.default_eod() if name is None else name
    names = [token] if token else []
    if not name:
        names += EOD_NAMES
    for candidate in names:
        number = tokenizer.find(candidate)
        if number is not None:
            return candidate, number
    raise ConvertError(
        f"the tokenizer has no end-of-document token ({', '.join(names)}); name it with --eod, "
        f"or pass --no-append-eod"
    )


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, a folder with one, a vocab.json with its merges.txt, or a tokenizer of the
    Hugging Face hub by name.
    """

    has_post_processor = True

    def __init__(self, name: str, model: Any, *, add: bool = False, parse: bool = True) -> None:
        self._add = add
        self._source = name
        self.name = name
        if os.path.exists(name) or find_gpt2_files(name) is not None:
            # without folders: it stands in manifests, which are read on other machines
            files = name.rstrip("/").split(",")
            self.name = ",".join(map(os.path.basename, files))
        self.model = model
        # as a tokenizer.json may ask for: documents are of any length, and have the same tokens again
        self.model.no_truncation()
        self.model.no_padding()
        for setting in RANDOM_SETTINGS:
            if getattr(self.model.model, setting, None) is not None:
                setattr(self.model.model, setting, None)
        if getattr(self.model.model, "unk_token", NO_TOKEN) is None:
            self.model.model.unk_token = NO_TOKEN
        self.model.encode_special_tokens = not parse
        tokens = int(self.model.get_vocab_size(with_added_tokens=True))
        # a vocabulary may leave numbers out, and then has higher ids than tokens
        ids = self.model.get_vocab(with_added_tokens=True).values()
        highest = max(ids, default=-1)
        self.vocab_size = max(tokens, int(highest) + 1)

    @classmethod
    def reads(cls, name: str) -> bool:
        """Every name that is of no other kind: of a file, a folder, or on the hub."""
        return True

    @classmethod
    def load(cls, name: str, settings: TokenizerSettings) -> Tokenizer:
        """As the library does by itself, it parses special tokens where nothing is said."""
        parse = settings.special_tokens_in_text != "text"
        return cls(name, _load_huggingface(name), add=settings.add_special_tokens, parse=parse)

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """A digest of all that the library knows of it."""
        return digest_of_bytes(self.stored(), 16)

    def stored(self) -> bytes:
        """A tokenizer.json."""
        described: str = self.model.to_str().replace(json.dumps(NO_TOKEN), "null")
        return described.encode()

    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """A few texts at a time: the encodings of many are so large that making them waits for
        memory.
        """
        add = self._add and not bare
        ids: list[Ids] = []
        for some in _batches(texts, max(1, _library_threads())):
            encodings = self._call(self.model.encode_batch_fast, some, add_special_tokens=add)
            # The library gives lists alone. Each goes into an array, in a ninth of its memory, while
            # the processor's cache still has it: numpy reads a list in three times the time.
            ids += [np.array(array("I", encoding.ids)) for encoding in encodings]  # type: ignore[misc]
        return ids

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """By the offsets of the library, in characters."""
        spans_of_texts: list[TokenSpans] = []
        for some in _batches(texts, 1):
            for encoding in self._call(self.model.encode_batch, some, add_special_tokens=False):
                spans_of_texts.append(_with_offsets(encoding.ids, encoding.offsets))
        return spans_of_texts

    def _call(self, encode: Callable[..., Any], texts: list[str], **options: bool) -> Any:
        try:
            with panics_as_errors():
                return encode(texts, **options)
        except Exception as error:  # the library has no class for its errors
            raise ConvertError(
                f"{self.name}: cannot encode a text ({error}); does the tokenizer have a token for "
                f"what it does not know (unk_token)?"
            ) from None

    def added_ids(self) -> tuple[list[int], list[int]]:
        """What the post-processor adds around every text, with add_special_tokens.

        Raises ConvertError for one that gives a text twice, or not at all.
        """
        from tokenizers import Tokenizer as Model
        from tokenizers import models

        # Of this vocabulary a text may have no token, so the post-processor gets one of its own.
        probe = Model(models.WordLevel({"a": PROBE_ID}, unk_token="a"))
        if self.model.post_processor is not None:
            probe.post_processor = self.model.post_processor
        ids: list[int] = probe.encode("a", add_special_tokens=self._add).ids
        if ids.count(PROBE_ID) != 1:
            raise ConvertError(
                f"{self.name}: its post-processor gives a text {ids.count(PROBE_ID)} times, which is "
                f"not done with long ones; mend its tokenizer.json, or leave such texts out"
            )
        place = ids.index(PROBE_ID)
        return ids[:place], ids[place + 1 :]

    @cached_property
    def _described(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(self.model.to_str())  # noqa: TID251
        return described

    @property
    def _special(self) -> list[dict[str, Any]]:
        added = self._described.get("added_tokens") or []
        return [item for item in added if item["special"] and not item["single_word"]]

    @property
    def special_tokens(self) -> dict[str, int]:  # type: ignore[override]
        """The special tokens of its own description."""
        return {item["content"]: item["id"] for item in self._special}

    @property
    def folds_letters(self) -> bool:  # type: ignore[override]
        """Whether a normalizer may make a special token of another spelling."""
        has_normalizer = bool(self._described.get("normalizer"))
        return has_normalizer and any(item["normalized"] for item in self._special)

    def parsing_special_tokens(self, spellings: dict[str, str] | None = None) -> Tokenizer:
        """Without its post-processor, which would add tokens of its own and narrow the spans of
        others.
        """
        from tokenizers import Tokenizer as Model

        described = self._described | {"post_processor": None}
        if spellings:
            described = _with_spellings(described, spellings)
        model = Model.from_str(json.dumps(described))
        return HuggingFaceTokenizer(self._source, model)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        return str(self.model.decode(list(ids), skip_special_tokens=False))

    def find(self, token: str) -> int | None:
        """By the vocabulary."""
        number = self.model.token_to_id(token)
        return None if number is None else int(number)

    def default_eod(self) -> str | None:
        """The eos_token of its tokenizer_config.json, as Megatron takes it."""
        eos = special_token_names(read_settings(self._source)).get("eos_token")
        has_other = any(self.find(name) is not None for name in EOD_NAMES if name not in TURN_ENDS)
        if eos is None or (eos in TURN_ENDS and has_other):
            return None
        return eos


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file."""

    def __init__(self, name: str, model: Any) -> None:
        self.model = model
        # Since 0.2.2 or so the package gives ids without a list, an eighth of the size.
        self._options: dict[str, Any] = {}
        if hasattr(self.model, "encode_as_numpy"):
            self._options["return_type"] = "numpy"
        self.name = os.path.basename(name)
        self.vocab_size = int(self.model.vocab_size())
        self.digest = digest_of_bytes(self.stored(), 16)

    @classmethod
    def reads(cls, name: str) -> bool:
        """A .model file, but for one that is a list of byte pairs (Llama-3's)."""
        return name.endswith(".model") and not is_tiktoken_file(name)

    @classmethod
    def load(cls, name: str, settings: TokenizerSettings) -> Tokenizer:
        """By the library, which never parses special tokens."""
        if settings.special_tokens_in_text == "parse":
            raise ConvertError(
                f"{name}: a SentencePiece model parses no special tokens in a text; use its "
                f"tokenizer.json, or leave out --special-tokens-in-text"
            )
        sentencepiece = import_extra("sentencepiece", "convert", f"{name}: needs sentencepiece")
        _check_is_file(name)
        try:
            return cls(name, sentencepiece.SentencePieceProcessor(model_file=name))
        except Exception as error:  # RuntimeError, OSError
            raise ConvertError(f"{name}: is not a SentencePiece model ({error})") from None

    def stored(self) -> bytes:
        """The model's file."""
        model: bytes = self.model.serialized_model_proto()
        return model

    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """One thread: the processes are the parallelism."""
        ids: Sequence[Ids] = self.model.encode(texts, num_threads=1, **self._options)
        return ids

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """By the places of the pieces, in characters."""
        spans_of_texts: list[TokenSpans] = []
        for text in texts:
            if self._options:
                encoded = self.model.encode(text, return_type="offset_mapping")
                ids, spans = encoded["ids"], encoded["offsets"]
            else:  # a version before 0.2.2
                pieces = self.model.encode(text, out_type="immutable_proto").pieces
                ids = [piece.id for piece in pieces]
                spans = [(piece.begin, piece.end) for piece in pieces]
            spans_of_texts.append(_with_offsets(ids, spans))
        return spans_of_texts

    def parsing_special_tokens(self, spellings: dict[str, str] | None = None) -> Tokenizer:
        """Raises ConfigError."""
        raise ConfigError(
            f"{self.name}: a SentencePiece model does not say what a chat template's special tokens "
            f"are; use its tokenizer.json"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text."""
        return str(self.model.decode(list(map(int, ids))))

    def find(self, token: str) -> int | None:
        """Look it up in the vocabulary; the unknown piece does not count."""
        number = int(self.model.piece_to_id(token))
        return None if number == self.model.unk_id() else number

    def default_eod(self) -> str | None:
        """Its end-of-sentence piece."""
        number = int(self.model.eos_id())
        return str(self.model.id_to_piece(number)) if number >= 0 else None


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken by name, or a .tiktoken file with the pattern that `find_pattern` finds."""

    spans_in_bytes = True

    def __init__(self, name: str, model: Any, *, parse: bool) -> None:
        self._parse = parse
        self.model = model
        self.name = os.path.basename(name)
        self.vocab_size = int(self.model.n_vocab)
        self.special_tokens = dict(self.model._special_tokens)
        hasher = hashlib.blake2b(digest_size=16)
        for token, rank in sorted(self.model._mergeable_ranks.items(), key=lambda pair: pair[1]):
            hasher.update(b"%d %d " % (rank, len(token)) + token)
        hasher.update(self.model._pat_str.encode())
        self.digest = hasher.hexdigest()

    @classmethod
    def reads(cls, name: str) -> bool:
        """A list of byte pairs, or tiktoken:NAME."""
        is_list = name.endswith(".model") and is_tiktoken_file(name)
        return name.startswith("tiktoken:") or name.endswith(".tiktoken") or is_list

    @classmethod
    def load(cls, name: str, settings: TokenizerSettings) -> Tokenizer:
        """As the library does by itself, it takes special tokens for text where nothing is said."""
        tiktoken = import_extra("tiktoken", "convert", f"{name}: needs tiktoken")
        parse = settings.special_tokens_in_text == "parse"
        encoding = name.removeprefix("tiktoken:")
        try:
            if encoding != name:
                return cls(name, tiktoken.get_encoding(encoding), parse=parse)
            _check_is_file(name)
            return cls(name, _load_tiktoken_file(name, settings.pattern), parse=parse)
        except (ConvertError, ObjectNotFoundError):
            raise
        except Exception as error:  # downloads, files and names fail in their own ways
            raise ConvertError(
                f"{name}: cannot be loaded ({type(error).__name__}: {str(error)[:200]})"
            ) from None

    def stored(self) -> bytes:
        """Its ranks, pattern and special tokens, as JSON."""
        ranks = self.model._mergeable_ranks.items()
        described = {
            "pattern": self.model._pat_str,
            "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks},
            "special_tokens": self.special_tokens,
        }
        return json.dumps({TIKTOKEN: described}).encode()

    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """One thread: the processes are the parallelism."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        allowed: Any = "all" if self._parse else frozenset()
        ids: Ids
        try:
            # Without a list, an eighth of the size.
            ids = self.model.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())
        except UnicodeEncodeError:
            # Half a surrogate pair is not text: only this call replaces it.
            ids = self.model.encode(text, allowed_special=allowed, disallowed_special=())
        return ids

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """By the bytes of the tokens, which are end to end."""
        spans_of_texts: list[TokenSpans] = []
        for text in texts:
            ids = np.array(self._encode(text), np.int32)
            sizes = np.array(list(map(len, self.model.decode_tokens_bytes(ids.tolist()))), np.int64)
            spans_of_texts.append(end_to_end(ids, sizes))
        return spans_of_texts

    def parsing_special_tokens(self, spellings: dict[str, str] | None = None) -> Tokenizer:
        """The same pairs and pattern, with other spellings of special tokens."""
        import tiktoken

        model = self.model
        if spellings:
            model = tiktoken.Encoding(
                "respelled",
                pat_str=model._pat_str,
                mergeable_ranks=model._mergeable_ranks,
                special_tokens={
                    spellings[token]: number for token, number in self.special_tokens.items()
                },
            )
        return TiktokenTokenizer(self.name, model, parse=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text."""
        return str(self.model.decode(list(map(int, ids))))


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255; 256 ends documents."""

    name = "bytes"
    digest = "utf-8+256"
    end = 256
    END_NAME = "<|endoftext|>"
    vocab_size = 257
    spans_in_bytes = True
    encodes_any_length = True

    def __init__(self, parsed: str | None = None) -> None:
        self._parsed = parsed
        """The spelling of the end that is parsed, if it is."""
        self.special_tokens = {self.END_NAME if parsed is None else parsed: self.end}

    @classmethod
    def reads(cls, name: str) -> bool:
        """`bytes`."""
        return name == "bytes"

    @classmethod
    def load(cls, name: str, settings: TokenizerSettings) -> Tokenizer:
        """Special tokens are text where nothing is said."""
        return cls(cls.END_NAME if settings.special_tokens_in_text == "parse" else None)

    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """The bytes."""
        if self._parsed is not None:
            return [spans.ids for spans in self.encode_with_spans(texts)]  # type: ignore[misc]
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]  # type: ignore[misc]

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """A token for each byte, and for each end that is parsed."""
        spans_of_texts: list[TokenSpans] = []
        for text in texts:
            ids: list[NDArray[np.int32]] = []
            sizes: list[NDArray[np.int64]] = []
            parts = [text] if self._parsed is None else text.split(self._parsed)
            for number, part in enumerate(parts):
                if number > 0:
                    ids.append(np.array([self.end], np.int32))
                    sizes.append(np.array([len((self._parsed or "").encode())], np.int64))
                stored = np.frombuffer(part.encode(), np.uint8)
                ids.append(stored.astype(np.int32))
                sizes.append(np.ones(len(stored), np.int64))
            spans_of_texts.append(end_to_end(np.concatenate(ids), np.concatenate(sizes)))
        return spans_of_texts

    def parsing_special_tokens(self, spellings: dict[str, str] | None = None) -> Tokenizer:
        """One that parses the end of a document, by its own spelling or another."""
        (token,) = self.special_tokens
        return BytesTokenizer(parsed=(spellings or {}).get(token, token))

    def decode(self, ids: Sequence[int]) -> str:
        """The text; the end of a document is written out."""
        text = ""
        document = bytearray()
        for token in ids:
            if token < self.end:
                document.append(token)
            else:
                text += document.decode(errors="replace") + self.END_NAME
                document.clear()
        return text + document.decode(errors="replace")


TOKENIZERS: tuple[type[Tokenizer], ...] = (
    BytesTokenizer,
    TiktokenTokenizer,
    SentencePieceTokenizer,
    HuggingFaceTokenizer,
)
"""All kinds. The first that reads a name loads it."""


def _check_is_file(name: str) -> None:
    if not os.path.isfile(name):
        raise ObjectNotFoundError(f"{name}: no such tokenizer file; check its path")


def _with_offsets(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> TokenSpans:
    bounds = np.array(offsets, np.int64).reshape(-1, 2)
    return TokenSpans(np.array(ids, np.int32), bounds[:, 0], bounds[:, 1])


def end_to_end(ids: NDArray[np.int32], sizes: NDArray[np.int64]) -> TokenSpans:
    """Tokens of so many bytes each, one after the other."""
    stops = np.cumsum(sizes)
    return TokenSpans(ids, stops - sizes, stops)


def _with_spellings(described: dict[str, Any], spellings: dict[str, str]) -> dict[str, Any]:
    """A tokenizer.json with other names for some tokens in all of its lists, and the same ids."""
    added: list[dict[str, Any]] = []
    for item in described["added_tokens"]:
        if item["content"] in spellings:
            item = item | {"content": spellings[item["content"]], "normalized": False}
        added.append(item)
    model = dict(described["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {
            spellings.get(token, token): number for token, number in vocabulary.items()
        }
    else:  # of a unigram model: pairs of a token and its score
        model["vocab"] = [[spellings.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = spellings.get(model["unk_token"], model["unk_token"])
    return described | {"added_tokens": added, "model": model}


def _load_tiktoken_file(path: str, expression: str | None) -> Any:
    """The encoding of a file of byte pairs."""
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(path)
    pattern = find_pattern(path, len(ranks), expression)
    taken = set(ranks.values())
    first_free = next(number for number in itertools.count() if number not in taken)
    special_tokens = enumerate(pattern.special_tokens, pattern.first or first_free)
    return tiktoken.Encoding(
        os.path.basename(path),
        pat_str=pattern.expression,
        mergeable_ranks=ranks,
        special_tokens={token: number for number, token in special_tokens},
    )


def _load_huggingface(name: str) -> Any:
    """The library's tokenizer of a file, a folder, a pair of files or a name on the hub.

    Raises ConfigError, ConvertError.
    """
    Model = import_extra("tokenizers", "convert", f"{name}: needs tokenizers").Tokenizer
    pair = find_gpt2_files(name)
    in_folder = os.path.join(name, "tokenizer.json")
    if pair is not None and not os.path.isfile(in_folder):
        return load_gpt2_files(*pair)
    if os.path.isdir(name):
        if not os.path.isfile(in_folder):
            raise ObjectNotFoundError(
                f"{name}: a folder without a tokenizer.json, and without a vocab.json and its "
                f"merges.txt"
            )
        name = in_folder
    if not os.path.isfile(name):
        _check_is_no_path(name)
        try:
            with quiet_hub():
                return Model.from_pretrained(name)
        except Exception as error:  # the library raises bare Exception
            first_line, *_ = str(error).splitlines() or [type(error).__name__]
            raise ConvertError(
                f"{name}: neither a file nor a tokenizer that the hub could give "
                f"({first_line[:200]}); give the path of a tokenizer.json"
            ) from None
    try:
        with panics_as_errors():
            return Model.from_file(name)
    except Exception as error:
        raise ConvertError(
            f"{name}: is not a tokenizer.json that the tokenizers library reads ({error}); "
            f"a vocab.json is given with its merges, as vocab.json,merges.txt"
        ) from None


def _check_is_no_path(name: str) -> None:
    """Raise ObjectNotFoundError for what can be no name on the hub, or looks like one of a file
    here: the answer of the hub would say nothing of the mistake.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    # The hub's names without an owner have no file suffix (`gpt2`, `opt-1.3b`).
    has_suffix = bool(FILE_SUFFIX.search(name)) and "/" not in name
    folder, _, file = name.rpartition("/")
    similar: list[str] = []
    with suppress(OSError):  # no such folder
        known = [*os.listdir(folder or "."), "bytes"]
        similar = difflib.get_close_matches(file, known, n=1, cutoff=0.8)
    if name.endswith(".json") or is_path or has_suffix or (similar and not folder):
        hint = "give the path of a tokenizer.json"
        if similar:
            hint = f"is {os.path.join(folder, similar[0])} meant?"
        raise ObjectNotFoundError(f"{name}: no such tokenizer file; {hint}")


def _batches(texts: Sequence[str], threads: int) -> Iterator[list[str]]:
    """Texts that the tokenizers library encodes together."""
    batch: list[str] = []
    chars = 0
    for text in texts:
        chars += len(text)
        if batch and (len(batch) == AT_ONCE * threads or chars > CHARS_AT_ONCE * threads):
            yield batch
            batch = []
            chars = len(text)
        batch.append(text)
    if batch:
        yield batch


def _library_threads() -> int:
    """How many threads the tokenizers library uses: see `convert/workers.py`."""
    is_parallel = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower()
    if is_parallel in ("false", "0", "off"):
        return 1
    return int(os.environ.get("RAYON_NUM_THREADS") or num_threads())
