"""Raw documents to tokens, a batch at a time; each process loads the tokenizer once."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens, check_lengths
from streammega.convert.job import Job
from streammega.convert.options import ConvertOptions
from streammega.convert.read.fields import origin_of, texts_at
from streammega.convert.read.formats import format_of
from streammega.convert.read.source import Skipped, with_line
from streammega.convert.read.text import why_no_text
from streammega.convert.tokenize.chat import ChatEncoder, find_template, warn_of_endless_answers
from streammega.convert.tokenize.chat_templates import Rendered
from streammega.convert.tokenize.long_text import LONG, encode_long
from streammega.convert.tokenize.tokenizers import Tokenizer, load_tokenizer, resolve_eod
from streammega.dataset.conversations import load_record, messages_of, not_utf8, turns_of
from streammega.dataset.idx import smallest_dtype
from streammega.dataset.provenance import collect_origins
from streammega.errors import ConfigError, ConvertError, FormatError
from streammega.storage.fork_lock import process_lock

NO_TOKENIZER = (
    "the inputs hold text, so a tokenizer is needed: --tokenizer tokenizer.json (or `bytes`)"
)
Text: TypeAlias = "str | NDArray[Any]"
"""The text of a sequence; if it is long, its ids."""
Part = tuple[Text, int, bool]
"""Text of a sequence, its mode, and whether it ends with the end-of-document token."""


class BatchEncoder:
    """Encodes batches of raw documents; made once per process."""

    def __init__(
        self, tokenizer: Tokenizer, options: ConvertOptions, storage: StorageConfig
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self._storage = storage
        self.eod = None
        if options.append_eod:
            _, self.eod = resolve_eod(tokenizer, options.eod)
        self.bos = None if options.bos is None else tokenizer.find(options.bos)
        if options.bos is not None and self.bos is None:
            raise ConvertError(f"the tokenizer has no token {options.bos!r}, which --bos names")
        self._chat = None
        if options.chat_template is not None:
            template = find_template(options.chat_template, options.tokenizer)
            self._chat = ChatEncoder(
                tokenizer, template, special_tokens_in_text=options.special_tokens_in_text or "text"
            )
        elif options.chat and self.eod is None:
            raise ConfigError(
                "chat ends every message with the end-of-document token; leave append_eod on"
            )
        self.dtype: np.dtype[Any] = smallest_dtype(tokenizer.vocab_size)
        if options.dtype:
            self.dtype = np.dtype(options.dtype)
        if tokenizer.vocab_size - 1 > np.iinfo(self.dtype).max:
            raise ConfigError(
                f"dtype {self.dtype} cannot hold the {tokenizer.vocab_size} ids of "
                f"{tokenizer.name}; use {smallest_dtype(tokenizer.vocab_size)}"
            )

    def warn(self) -> None:
        """Warn of what the options make of documents, once for a conversion."""
        if self._chat is not None:
            warn_of_endless_answers(self._chat.template, self.tokenizer.special_tokens)

    def __call__(self, documents: Sequence[RawDocument], skipped: Skipped) -> Tokens:
        """Encode.

        Empty documents are counted and left out. Raises ConvertError that names file and line.
        """
        source_bytes = sum(len(document.data) or document.size for document in documents)
        if self.options.provenance:
            documents = [_with_fields(document) for document in documents]
        if self._chat is None:
            parts, numbers = self._read(documents, self.parts, skipped)
        else:
            chats, numbers = self._read(documents, self._rendered, skipped)
            parts = [self._parts_of_chat(*encoded) for encoded in self._chat.encode(chats)]
        # of all documents at once: the library encodes several texts in parallel
        texts = [text for document in parts for text, _, _ in document]
        ids = self._encode(texts) if texts else []
        if not all(map(len, ids)):
            parts, ids, kept = self._without_empty(parts, ids, skipped)
            numbers = [numbers[row] for row in kept]
        tokens = self._pack(parts, ids, source_bytes, skipped)
        if not self.options.provenance:
            return tokens
        origins = collect_origins(origin_of(documents[number], self.options) for number in numbers)
        return replace(tokens, origins=origins)

    def _encode(self, texts: list[Text]) -> Sequence[Sequence[int]]:
        """Ids of texts; those of long ones are there already."""
        plain = [text for text in texts if isinstance(text, str)]
        ids = self.tokenizer.encode(plain)
        if len(plain) == len(texts):
            return ids
        encoded = iter(ids)
        return [next(encoded) if isinstance(text, str) else text for text in texts]  # type: ignore[misc]

    def _read(
        self, documents: Sequence[RawDocument], read: Callable[[RawDocument], Any], skipped: Skipped
    ) -> tuple[list[Any], list[int]]:
        """(what `read` makes of documents, their numbers), without those that are empty or skipped."""
        contents = []
        numbers = []
        for number, document in enumerate(documents):
            try:
                content = read(document)
            except (ConvertError, FormatError) as error:
                # A skipped one keeps its byte (`path@byte`): to count the lines before it would read
                # the file again for each.
                if self.options.on_error == "stop":
                    raise ConvertError(self._message_with_line(document, read, error)) from None
                skipped.add("broken record", str(error))
                continue
            if content:
                contents.append(content)
                numbers.append(number)
            else:
                skipped.leave_out("empty")
        return contents, numbers

    def _message_with_line(
        self, document: RawDocument, read: Callable[[RawDocument], Any], error: Exception
    ) -> str:
        try:
            read(with_line(document, self._storage))
        except (ConvertError, FormatError) as named:
            return str(named)
        return str(error)

    def _without_empty(
        self, parts: list[list[Part]], ids: Sequence[Sequence[int]], skipped: Skipped
    ) -> tuple[list[list[Part]], list[Sequence[int]], list[int]]:
        """Leave out documents and sequences without a token, as Megatron does. The last sequence
        that is kept gets the end of the document.

        Where sequences have modes, an empty one that ends its document (or a message) stays, as an
        end alone. Returns (parts, ids, rows of the documents that are kept).
        """
        kept: list[list[Part]] = []
        kept_ids: list[Sequence[int]] = []
        rows: list[int] = []
        encoded = iter(ids)
        for row, document in enumerate(parts):
            kept_parts: list[Part] = []
            ids_of_parts: list[Sequence[int]] = []
            for part in document:
                ids_of_part = next(encoded)
                _, _, is_end = part
                if len(ids_of_part) or (is_end and self.options.makes_modes):
                    kept_parts.append(part)
                    ids_of_parts.append(ids_of_part)
            if not any(map(len, ids_of_parts)):
                skipped.leave_out("empty")
                continue
            if not self.options.makes_modes:
                text, mode, _ = kept_parts[-1]
                kept_parts[-1] = (text, mode, True)
            kept.append(kept_parts)
            kept_ids += ids_of_parts
            rows.append(row)
        return kept, kept_ids, rows

    def _pack(
        self,
        parts: list[list[Part]],
        ids: Sequence[Sequence[int]],
        source_bytes: int,
        skipped: Skipped,
    ) -> Tokens:
        """Sequences end to end, with the ids that begin documents and that end them."""
        sequences = [part for document in parts for part in document]
        text_lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        lengths = text_lengths.copy()
        sequences_of = np.fromiter(map(len, parts), np.int64, len(parts))
        first_sequence_of = np.cumsum(sequences_of) - sequences_of
        ended = np.fromiter((is_end for _, _, is_end in sequences), np.bool_, len(sequences))
        if self.eod is not None:
            lengths[ended] += 1
        if self.bos is not None:
            lengths[first_sequence_of] += 1
        check_lengths(lengths)
        stops = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), self.dtype)
        is_text = np.ones(len(tokens), np.bool_)
        if self.bos is not None:
            begins = (stops - lengths)[first_sequence_of]
            is_text[begins] = False
            tokens[begins] = self.bos
        if self.eod is not None:
            ends = stops[ended] - 1
            is_text[ends] = False
            tokens[ends] = self.eod
        if any(isinstance(ids_of_text, np.ndarray) for ids_of_text in ids):
            arrays = [np.asarray(ids_of_text) for ids_of_text in ids]
            tokens[is_text] = np.concatenate(arrays, dtype=self.dtype, casting="unsafe")
        else:
            # lists are read into their place, without an array of each
            all_ids = itertools.chain.from_iterable(ids)
            tokens[is_text] = np.fromiter(all_ids, self.dtype, int(text_lengths.sum()))
        # A template writes ends itself, and so may a tokenizer that adds special tokens.
        if self.eod is not None and self._chat is None and not self.options.add_special_tokens:
            skipped.eod_in_texts += int(np.count_nonzero(tokens[is_text] == self.eod))
        modes = None
        if self.options.makes_modes:
            modes = np.fromiter((mode for _, mode, _ in sequences), np.int8, len(sequences))
        return Tokens(
            tokens=tokens,
            lengths=lengths.astype(np.int32),
            documents=sequences_of,
            modes=modes,
            source_bytes=source_bytes,
        )

    def _rendered(self, document: RawDocument) -> Rendered | None:
        """A conversation by its template; None: it has no messages."""
        record = _record(document)
        if self._chat is None or not turns_of(record, document.where):
            return None
        return self._chat.render(record, document.where)

    def _parts_of_chat(self, ids: NDArray[np.int32], answers: NDArray[np.bool_]) -> list[Part]:
        """A sequence of each stretch of tokens that is an answer (mode 1) or not (mode 0); the end
        belongs to no answer.
        """
        starts = np.flatnonzero(np.diff(answers)) + 1
        stretches = zip(np.split(ids, starts), np.split(answers, starts), strict=True)
        parts: list[Part] = [(part, int(answer.any()), False) for part, answer in stretches]
        if len(ids) and self.eod is not None and ids[-1] != self.eod:
            last, mode, _ = parts[-1]
            if mode:
                parts.append((ids[:0], 0, True))
            else:
                parts[-1] = (last, mode, True)
        return parts

    def parts(self, document: RawDocument) -> list[Part]:
        """The sequences of a document; none if it has no text. Raises ConvertError, FormatError."""
        parts: list[Part] = []
        if self.options.chat and document.is_record:
            # Headers and questions have mode 0, answers mode 1. Every text has an end of its own.
            for message in messages_of(_record(document), document.where):
                parts.append((message.header, 0, False))
                parts.append((message.text, int(message.is_answer), True))
        else:
            texts = self._texts(document)
            parts = [(text, mode, n == len(texts)) for n, (text, mode) in enumerate(texts, 1)]
        return [
            (self._ids_if_long(text, document.where), mode, is_end) for text, mode, is_end in parts
        ]

    def _ids_if_long(self, text: Text, where: str) -> Text:
        """The ids take less memory than what a tokenizer needs for all of a long text at once."""
        if not isinstance(text, str) or len(text) < LONG or self.tokenizer.encodes_any_length:
            return text
        windows = encode_long(self.tokenizer, text, where)
        return np.concatenate([ids.astype(self.dtype) for ids in windows])

    def _texts(self, document: RawDocument) -> list[tuple[str, int]]:
        """(text, mode) of each sequence of a document without messages."""
        texts: list[tuple[str, int]] = []
        if not document.is_record:
            texts.append((_decode(document), 0))
        else:
            record = _record(document)
            for key, mode in self.options.key_modes:
                texts += [(text, mode) for text in texts_at(record, key, document.where)]
        if not any(text for text, _ in texts):
            return []
        kept = [(text, mode) for text, mode in texts if text]
        last_text, last_mode = texts[-1]
        if self.options.makes_modes and not last_text:
            # an empty answer is a sequence, with the end of its document
            kept.append((last_text, last_mode))
        return kept


def _with_fields(document: RawDocument) -> RawDocument:
    """A record, parsed once for its texts and its id; a broken one as it was: its reader says what
    is wrong.
    """
    if not document.is_record or document.fields is not None:
        return document
    try:
        return replace(document, fields=_record(document))
    except (ConvertError, FormatError):
        return document


def _record(document: RawDocument) -> Any:
    """Its fields: read already, as columns are, or from its JSON."""
    if document.fields is not None:
        return document.fields
    try:
        return load_record(document.data, document.where)
    except FormatError:
        if reason := why_no_text(document.data):
            raise ConvertError(f"{document.where}: {reason}") from None
        raise


def _decode(document: RawDocument) -> str:
    try:
        return document.data.decode("utf-8")
    except UnicodeDecodeError as error:
        if reason := why_no_text(document.data):
            raise ConvertError(f"{document.where}: {reason}") from None
        # It is read as one text, and may be an image for instance.
        archive, _, member = document.where.partition("!")
        name = document.where.rpartition("/")[2]
        remedy = f"leave it out: --exclude {name!r} of a folder or glob, or --on-error skip"
        if member and format_of(archive) == "tar":
            remedy = "name another member by --tar-member, or skip it by --on-error skip"
        raise not_utf8(document.where, error, remedy) from None


_encoders: dict[tuple[str, str], BatchEncoder] = {}
"""Those that were made last: a large vocabulary takes a second to load, and 100 MB."""
MAX_ENCODERS = 2
# Held while a tokenizer is loaded: threads that begin together wait for it, rather than load four.
_encoders_lock = process_lock()


def keep_encoder(encoder: BatchEncoder) -> None:
    """Use this encoder for its conversion, here and in forked workers."""
    for key in list(_encoders)[: 1 - MAX_ENCODERS]:
        _encoders.pop(key, None)
    _encoders[encoder.tokenizer.digest, encoder.options.digest()] = encoder


def encoder_of(job: Job) -> BatchEncoder:
    """The encoder of this process.

    Raises ConvertError when the inputs have text and no tokenizer was given.
    """
    name = job.options.tokenizer
    if name is None:
        raise ConvertError(NO_TOKENIZER)
    key = (job.tokenizer_digest, job.options.digest())
    with _encoders_lock:
        encoder = _encoders.get(key)
        if encoder is None:
            tokenizer = load_tokenizer(name, **job.options.tokenizer_settings)
            # Its tokens would be stored under the name of the other.
            if tokenizer.digest != job.tokenizer_digest:
                raise ConvertError(
                    f"{name}: is another tokenizer on {socket.gethostname()} than where the "
                    f"conversion was started, or was changed meanwhile; put the same one on all "
                    f"machines, and run the same command again"
                )
            encoder = BatchEncoder(tokenizer, job.options, job.input_storage)
            keep_encoder(encoder)
        return encoder


def eod_of(job: Job) -> int | None:
    """The id that ends documents; None where nothing does."""
    if job.options.tokenizer is None:
        return job.options.eod_id
    return encoder_of(job).eod
