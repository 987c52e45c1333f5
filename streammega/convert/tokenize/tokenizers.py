"""Tokenizers of every kind behind one interface: Hugging Face, SentencePiece, tiktoken, bytes.

Another kind is a subclass of Tokenizer here, and its names in `load_tokenizer`.
"""

from __future__ import annotations

import base64
import difflib
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
    load_gpt2_files,
    load_tiktoken_file,
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
Ids = NDArray[Any]
AT_ONCE = 16
"""Texts that one thread of the tokenizers library encodes together."""
CHARS_AT_ONCE = 1 << 20
"""Characters of these texts: the library takes about 110 bytes of memory for each."""


class TokenSpans(NamedTuple):
    """The tokens of a text, and where each is in it: [start, stop), in characters or in bytes."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def part(self, first: int, stop: int) -> TokenSpans:
        """Tokens [first, stop)."""
        return TokenSpans(self.ids[first:stop], self.starts[first:stop], self.stops[first:stop])

    def moved(self, distance: int) -> TokenSpans:
        """The same tokens so much farther in a text."""
        return TokenSpans(self.ids, self.starts + distance, self.stops + distance)


class Tokenizer(ABC):
    """Text to token ids. `digest` changes with what it makes of texts; ids run below vocab_size."""

    name: str
    vocab_size: int
    special_tokens: dict[str, int]
    """The ids of those that a chat template may write."""
    spans_in_bytes = False
    """Whether spans are in bytes of UTF-8; else in characters."""
    encodes_any_length = False
    """Whether `encode` takes little memory, so that a text of any length is encoded as a whole."""
    folds_letters = False
    """Whether other spellings of a special token may become that token too."""

    @cached_property
    def digest(self) -> str:
        """Changes with what it makes of texts."""
        return digest_of_bytes(self.stored(), 16)

    def stored(self) -> bytes:
        """All that it is, for `load_stored`; empty where its name says it."""
        return b""

    @abstractmethod
    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """Token ids of each text; bare: without what a post-processor adds.

        Raises ConvertError for a text that the library cannot encode.
        """

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
    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """Tokens of each text with their places, without what a post-processor adds; of a tokenizer
        that `parsing_special_tokens` made.
        """

    @abstractmethod
    def parsing_special_tokens(self, stand_ins: dict[str, str] | None = None) -> Tokenizer:
        """The same tokenizer, which parses special tokens and adds nothing to texts.

        stand_ins: what is parsed in place of each special token; by their own spellings they are
        text then. Raises ConfigError for a tokenizer whose special tokens are not known.
        """


def load_tokenizer(
    name: str,
    *,
    special_tokens_in_text: str | None = None,
    add_special_tokens: bool = False,
    pattern: str | None = None,
) -> Tokenizer:
    """A tokenizer by its name: a tokenizer.json or a folder with one, `vocab.json,merges.txt`, a
    SentencePiece .model, tiktoken:NAME, `bytes`, or a name on the hub.

    A file of byte pairs (.tiktoken, or a .model as Llama 3's) needs a pattern, here or behind a
    comma: `tokenizer.model,llama3`. Settings are those of ConvertOptions. Raises
    ObjectNotFoundError, ConvertError.
    """
    file, comma, own_pattern = name.partition(",")
    if comma and file.endswith((".tiktoken", ".model")):
        name, pattern = file, own_pattern
    is_encoding = name.startswith("tiktoken:")
    is_pairs = name.endswith(".tiktoken") or (name.endswith(".model") and pattern is not None)
    is_huggingface = not (name == "bytes" or is_encoding or is_pairs or name.endswith(".model"))
    if add_special_tokens and not is_huggingface:
        raise ConvertError(
            f"{name}: has no post-processor, so add_special_tokens adds nothing; see --bos"
        )
    if pattern is not None and not is_pairs:
        raise ConvertError(
            f"{name}: says itself how it cuts text; leave out --tiktoken-pattern, which is for "
            f"files of byte pairs"
        )
    if is_huggingface:
        # Where nothing is said, special tokens are parsed as the library does by itself.
        parse = special_tokens_in_text != "text"
        return HuggingFaceTokenizer(
            name, _load_huggingface(name), add=add_special_tokens, parse=parse
        )
    parse = special_tokens_in_text == "parse"
    if name == "bytes":
        return BytesTokenizer(BytesTokenizer.END_NAME if parse else None)
    if is_encoding or is_pairs:
        return TiktokenTokenizer(name, _load_tiktoken(name, pattern), parse=parse)
    if parse:
        raise ConvertError(
            f"{name}: a SentencePiece model parses no special tokens in a text; use its "
            f"tokenizer.json, or leave out --special-tokens-in-text"
        )
    return SentencePieceTokenizer(name, _load_sentencepiece(name))


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

    def __init__(self, name: str, model: Any, *, add: bool = False, parse: bool = True) -> None:
        self._add = add
        self._source = name
        self.name = name
        if os.path.exists(name.partition(",")[0]):
            # without folders: it stands in manifests, which are read on other machines
            self.name = ",".join(map(os.path.basename, name.rstrip("/").split(",")))
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
        # A vocabulary may leave numbers out, and then has higher ids than tokens.
        ids = self.model.get_vocab(with_added_tokens=True).values()
        self.vocab_size = int(max(ids, default=-1)) + 1

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
            ids += [np.array(array("I", encoding.ids)) for encoding in encodings]
        return ids

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """By the offsets of the library, in characters."""
        spans_of_texts: list[TokenSpans] = []
        for some in _batches(texts, 1):
            for encoding in self._call(self.model.encode_batch, some, add_special_tokens=False):
                bounds = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                ids = np.array(encoding.ids, np.int32)
                spans_of_texts.append(TokenSpans(ids, bounds[:, 0], bounds[:, 1]))
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
    def _special(self) -> dict[int, Any]:
        added = self.model.get_added_tokens_decoder()
        return {n: token for n, token in added.items() if token.special and not token.single_word}

    @cached_property
    def special_tokens(self) -> dict[str, int]:  # type: ignore[override]
        """The special tokens of its own description."""
        return {token.content: number for number, token in self._special.items()}

    @property
    def folds_letters(self) -> bool:  # type: ignore[override]
        """Whether a normalizer may make a special token of another spelling."""
        has_normalizer = self.model.normalizer is not None
        return has_normalizer and any(token.normalized for token in self._special.values())

    def parsing_special_tokens(self, stand_ins: dict[str, str] | None = None) -> Tokenizer:
        """Without its post-processor, which would add tokens of its own and narrow the spans of
        others.
        """
        from tokenizers import Tokenizer as Model

        described = json.loads(self.model.to_str())  # noqa: TID251
        described["post_processor"] = None
        _rename_tokens(described, stand_ins or {})
        return HuggingFaceTokenizer(self._source, Model.from_str(json.dumps(described)))

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
        self.name = os.path.basename(name)
        self.vocab_size = int(self.model.vocab_size())
        # Unigram models alone have several encodings of a text. They add up the scores of all tokens
        # before a place in float32, so that windows would choose others of nearly the same score. A
        # whole takes about 22 bytes of memory for each letter (of BPE models 41).
        try:
            self.model.nbest_encode_as_ids("", 1)
            self.encodes_any_length = True
        except RuntimeError:
            pass

    def stored(self) -> bytes:
        """The model's file."""
        model: bytes = self.model.serialized_model_proto()
        return model

    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """One thread: the processes are the parallelism. Without lists, an eighth of the size."""
        ids: Sequence[Ids] = self.model.encode(texts, num_threads=1, return_type="numpy")
        return ids

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """Raises ConfigError, as none of its kind parses special tokens."""
        return self.parsing_special_tokens().encode_with_spans(texts)

    def parsing_special_tokens(self, stand_ins: dict[str, str] | None = None) -> Tokenizer:
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
    """An encoding of tiktoken by name, or a file of byte pairs and how it cuts text."""

    spans_in_bytes = True
    encodes_any_length = True

    def __init__(self, name: str, model: Any, *, parse: bool) -> None:
        self._parse = parse
        self.model = model
        self.name = os.path.basename(name)
        self.vocab_size = int(self.model.n_vocab)
        self.special_tokens = dict(self.model._special_tokens)

    def stored(self) -> bytes:
        """Its ranks, pattern and special tokens, as JSON."""
        ranks = self.model._mergeable_ranks.items()
        described = {
            "pattern": self.model._pat_str,
            "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks},
            "special_tokens": self.special_tokens,
        }
        return json.dumps({TIKTOKEN: described}, sort_keys=True).encode()

    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """One thread: the processes are the parallelism."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        options: dict[str, Any] = {
            "allowed_special": "all" if self._parse else frozenset(),
            "disallowed_special": (),
        }
        ids: Ids
        try:
            with panics_as_errors():
                # Without a list, an eighth of the size.
                ids = self.model.encode_to_numpy(text, **options)
        except UnicodeEncodeError:
            # Half a surrogate pair is not text: only this call replaces it.
            ids = np.array(self.model.encode(text, **options), np.int32)
        except (ValueError, RuntimeError) as error:  # its expression, on a million blanks in a row
            raise ConvertError(f"{self.name}: cannot encode a text ({error})") from None
        return ids

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """By the bytes of the tokens, which are end to end."""
        spans_of_texts: list[TokenSpans] = []
        for text in texts:
            ids = np.array(self._encode(text), np.int32)
            sizes = np.array(list(map(len, self.model.decode_tokens_bytes(ids.tolist()))), np.int64)
            spans_of_texts.append(_end_to_end(ids, sizes))
        return spans_of_texts

    def parsing_special_tokens(self, stand_ins: dict[str, str] | None = None) -> Tokenizer:
        """The same pairs and pattern, with other spellings of special tokens."""
        import tiktoken

        renamed = stand_ins or {}
        model = tiktoken.Encoding(
            self.name,
            pat_str=self.model._pat_str,
            mergeable_ranks=self.model._mergeable_ranks,
            special_tokens={
                renamed.get(token, token): n for token, n in self.special_tokens.items()
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

    def encode(self, texts: list[str], *, bare: bool = False) -> Sequence[Ids]:
        """The bytes."""
        if self._parsed is not None:
            return [spans.ids for spans in self.encode_with_spans(texts)]
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_with_spans(self, texts: list[str]) -> list[TokenSpans]:
        """A token for each byte, and for each end that is parsed."""
        spans_of_texts: list[TokenSpans] = []
        for text in texts:
            parts = [text] if self._parsed is None else text.split(self._parsed)
            stored = [np.frombuffer(part.encode(), np.uint8) for part in parts]
            ends = np.cumsum([len(part) for part in stored[:-1]], dtype=np.int64)
            ids = np.insert(np.concatenate(stored).astype(np.int32), ends, self.end)
            sizes = np.ones(len(ids), np.int64)
            sizes[ids == self.end] = len((self._parsed or "").encode())
            spans_of_texts.append(_end_to_end(ids, sizes))
        return spans_of_texts

    def parsing_special_tokens(self, stand_ins: dict[str, str] | None = None) -> Tokenizer:
        """One that parses the end of a document, by its own spelling or another."""
        (token,) = self.special_tokens
        return BytesTokenizer(parsed=(stand_ins or {}).get(token, token))

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


def _end_to_end(ids: NDArray[np.int32], sizes: NDArray[np.int64]) -> TokenSpans:
    """Tokens of so many bytes each, one after the other."""
    stops = np.cumsum(sizes)
    return TokenSpans(ids, stops - sizes, stops)


def _rename_tokens(described: dict[str, Any], names: dict[str, str]) -> None:
    """Give some tokens other names in all lists of a tokenizer.json; their ids stay."""
    for item in described["added_tokens"]:
        if item["content"] in names:
            item |= {"content": names[item["content"]], "normalized": False}
    model = described["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            names.get(token, token): number for token, number in model["vocab"].items()
        }
    else:  # of a unigram model: pairs of a token and its score
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _load_tiktoken(name: str, pattern: str | None) -> Any:
    """The library's encoding of tiktoken:NAME, or of a file of byte pairs.

    Raises ObjectNotFoundError, ConvertError.
    """
    tiktoken = import_extra("tiktoken", "convert", f"{name}: needs tiktoken")
    is_file = not name.startswith("tiktoken:")
    if is_file:
        _check_is_file(name)
    try:
        with panics_as_errors():
            if is_file:
                return load_tiktoken_file(name, pattern)
            return tiktoken.get_encoding(name.removeprefix("tiktoken:"))
    except ConvertError:
        raise
    except Exception as error:  # downloads, files and names fail in their own ways
        raise ConvertError(
            f"{name}: cannot be loaded ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _load_sentencepiece(name: str) -> Any:
    """The library's processor of a .model file. Raises ObjectNotFoundError, ConvertError."""
    sentencepiece = import_extra("sentencepiece", "convert", f"{name}: needs sentencepiece")
    _check_is_file(name)
    try:
        return sentencepiece.SentencePieceProcessor(model_file=name)
    except Exception as error:  # RuntimeError, OSError
        raise ConvertError(
            f"{name}: is not a SentencePiece model ({error}); a file of byte pairs, as Llama 3's, "
            f"needs its --tiktoken-pattern"
        ) from None


def _load_huggingface(name: str) -> Any:
    """The library's tokenizer of a file, a folder, a pair of files or a name on the hub.

    Raises ObjectNotFoundError, ConvertError.
    """
    Model = import_extra("tokenizers", "convert", f"{name}: needs tokenizers").Tokenizer
    in_folder = os.path.join(name, "tokenizer.json")
    if os.path.isfile(in_folder):
        name = in_folder
    elif pair := find_gpt2_files(name):
        return load_gpt2_files(*pair)
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


def _check_is_file(name: str) -> None:
    if not os.path.isfile(name):
        raise ObjectNotFoundError(f"{name}: no such tokenizer file; check its path")


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
