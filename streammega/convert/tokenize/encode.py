"""Raw documents to tokens, a batch at a time; each process loads the tokenizer once."""

from __future__ import annotations

import socket
from collections.abc import Sequence
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
Ids: TypeAlias = NDArray[Any]
Part = tuple[str | Ids, int, bool]
"""Text of a sequence (if it is long, or by a chat template, its ids), its mode, and whether it ends
with the end-of-document token.
"""
EncodedPart = tuple[Ids, int, bool]


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
        contents = self._read(documents, skipped)
        parts = [content for _, content in contents]
        if self._chat is not None:
            parts = [self._parts_of_chat(*encoded) for encoded in self._chat.encode(parts)]
        encoded_documents = self._encode(parts)
        for _ in range(encoded_documents.count([])):
            skipped.leave_out("empty")
        tokens = self._pack(list(filter(None, encoded_documents)), source_bytes, skipped)
        if not self.options.provenance:
            return tokens
        origins = collect_origins(
            origin_of(document, self.options)
            for (document, _), sequences in zip(contents, encoded_documents, strict=True)
            if sequences
        )
        return replace(tokens, origins=origins)

    def _read(
        self, documents: Sequence[RawDocument], skipped: Skipped
    ) -> list[tuple[RawDocument, Any]]:
        """Documents, each with its parts or, by a chat template, its text; without those that are
        empty or skipped.
        """
        contents: list[tuple[RawDocument, Any]] = []
        for document in documents:
            try:
                if self.options.provenance and document.is_record:
                    # parsed once, for its texts and its id
                    document = replace(document, fields=_record(document))
                content = self._content(document)
            except (ConvertError, FormatError) as error:
                # A skipped one keeps its byte (`path@byte`): to count the lines before it would read
                # the file again for each.
                if self.options.on_error == "stop":
                    raise ConvertError(self._message_with_line(document, error)) from None
                skipped.add("broken record", str(error))
                continue
            if content:
                contents.append((document, content))
            else:
                skipped.leave_out("empty")
        return contents

    def _message_with_line(self, document: RawDocument, error: Exception) -> str:
        try:
            self._content(with_line(document, self._storage))
        except (ConvertError, FormatError) as named:
            return str(named)
        return str(error)

    def _encode(self, documents: list[list[Part]]) -> list[list[EncodedPart]]:
        """The ids of all parts, without documents' parts that have no token, as Megatron does.

        The last sequence that is kept gets the end of its document. Where sequences have modes, an
        empty one that ends its document (or a message) stays, as an end alone.
        """
        # of all documents at once: the library encodes several texts in parallel
        texts = [text for parts in documents for text, _, _ in parts if isinstance(text, str)]
        ids_of_texts = iter(self.tokenizer.encode(texts))
        encoded: list[list[EncodedPart]] = []
        for parts in documents:
            sequences: list[EncodedPart] = []
            for text, mode, is_end in parts:
                ids = next(ids_of_texts) if isinstance(text, str) else text
                if len(ids) or (is_end and self.options.makes_modes):
                    sequences.append((ids, mode, is_end))
            if not any(len(ids) for ids, _, _ in sequences):
                sequences = []
            elif not self.options.makes_modes:
                ids, mode, _ = sequences[-1]
                sequences[-1] = (ids, mode, True)
            encoded.append(sequences)
        return encoded

    def _pack(
        self, documents: list[list[EncodedPart]], source_bytes: int, skipped: Skipped
    ) -> Tokens:
        """Sequences end to end, with the ids that begin documents and that end them."""
        begin = [] if self.bos is None else [np.array([self.bos])]
        end = [] if self.eod is None else [np.array([self.eod])]
        pieces: list[Ids] = [np.empty(0, self.dtype)]
        lengths: list[int] = []
        modes: list[int] = []
        for document in documents:
            for number, (ids, mode, is_end) in enumerate(document):
                sequence = [*(begin if number == 0 else ()), ids, *(end if is_end else ())]
                pieces += sequence
                lengths.append(sum(map(len, sequence)))
                modes.append(mode)
                # A template writes ends itself, and so may a tokenizer that adds special tokens.
                if end and self._chat is None and not self.options.add_special_tokens:
                    skipped.eod_in_texts += int(np.count_nonzero(ids == self.eod))
        check_lengths(np.array(lengths, np.int64))
        return Tokens(
            tokens=np.concatenate(pieces, dtype=self.dtype, casting="unsafe"),
            lengths=np.array(lengths, np.int32),
            documents=np.array(list(map(len, documents)), np.int64),
            modes=np.array(modes, np.int8) if self.options.makes_modes else None,
            source_bytes=source_bytes,
        )

    def _content(self, document: RawDocument) -> list[Part] | Rendered | None:
        """The parts of a document or, by a chat template, its text; nothing for an empty one."""
        if self._chat is None:
            return self.parts(document)
        record = _record(document)
        if not turns_of(record, document.where):
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
        if self.options.chat and document.is_record:
            # Headers and questions have mode 0, answers mode 1. Every text has an end of its own.
            parts: list[tuple[str, int, bool]] = []
            for message in messages_of(_record(document), document.where):
                parts.append((message.header, 0, False))
                parts.append((message.text, int(message.is_answer), True))
        else:
            texts = self._texts(document)
            parts = [(text, mode, n == len(texts)) for n, (text, mode) in enumerate(texts, 1)]
            # Where there are modes, an empty answer is a sequence with the end of its document.
            parts = [part for part in parts if part[0] or (part[2] and self.options.makes_modes)]
        if not any(text for text, _, _ in parts):
            return []
        return [
            (self._ids_if_long(text, document.where), mode, is_end) for text, mode, is_end in parts
        ]

    def _texts(self, document: RawDocument) -> list[tuple[str, int]]:
        """(text, mode) of each sequence of a document without messages."""
        if not document.is_record:
            return [(_decode(document), 0)]
        record = _record(document)
        return [
            (text, mode)
            for key, mode in self.options.key_modes
            for text in texts_at(record, key, document.where)
        ]

    def _ids_if_long(self, text: str, where: str) -> str | Ids:
        """A long text is encoded alone: it takes much memory, and may be refused."""
        if len(text) < LONG:
            return text
        return encode_long(self.tokenizer, text, where).astype(self.dtype)


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
