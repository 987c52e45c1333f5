"""Raw documents to tokens, a batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import LongString, LongText, RawDocument, Tokens, check_lengths
from streammega.convert.options import ConvertOptions
from streammega.convert.read.keys import texts_at
from streammega.convert.read.readers import with_line
from streammega.convert.read.slices import Skipped
from streammega.convert.read.whole_files import no_text
from streammega.convert.tokenize.chat import ChatEncoder
from streammega.convert.tokenize.chat_sources import find_template
from streammega.convert.tokenize.chat_templates import Rendered
from streammega.convert.tokenize.long_texts import LONG, LongTextEncoder, decoded, text_in_pieces
from streammega.convert.tokenize.tokenizers import TextTokenizer, find_eod
from streammega.dataset.conversations import load_record, messages_of, turns_of
from streammega.dataset.idx import smallest_dtype
from streammega.errors import ConfigError, ConvertError, FormatError

Text: TypeAlias = "str | NDArray[np.int32]"
"""Of a sequence; if it is long, its ids."""
Part = tuple[Text, int, bool]
"""Text of a sequence, its mode, and whether it ends with the end-of-document token."""


@dataclass(frozen=True, kw_only=True)
class LongPart:
    """A sequence of a document that is not held: its text in pieces, and its mode."""

    pieces: Iterator[str]
    mode: int = 0


class BatchEncoder:
    """Encodes batches of raw documents; made once per process."""

    def __init__(
        self, tokenizer: TextTokenizer, options: ConvertOptions, storage: StorageConfig
    ) -> None:
        self.tokenizer = tokenizer
        self._options = options
        self._storage = storage
        self.eod = find_eod(tokenizer, options.eod) if options.append_eod else None
        self.bos = None if options.bos is None else tokenizer.find(options.bos)
        if options.bos is not None and self.bos is None:
            raise ConvertError(f"the tokenizer has no token {options.bos!r}, which --bos names")
        self._chat = None
        if options.chat_template is not None:
            template = find_template(options.chat_template, options.tokenizer)
            self._chat = ChatEncoder(
                tokenizer, template, special_tokens=options.special_tokens or "text"
            )
        elif options.chat and self.eod is None:
            raise ConfigError(
                "chat ends every message with the end-of-document token; leave append_eod on"
            )
        self.dtype: np.dtype[Any] = (
            np.dtype(options.dtype) if options.dtype else smallest_dtype(tokenizer.vocab_size)
        )
        if tokenizer.vocab_size - 1 > np.iinfo(self.dtype).max:
            raise ConfigError(
                f"dtype {self.dtype} cannot hold the {tokenizer.vocab_size} ids of {tokenizer.name}; use int32"
            )
        self._long = LongTextEncoder(tokenizer)
        self._split: Any = (
            _sentence_splitter(options.split_sentences) if options.split_sentences else None
        )

    def __call__(self, documents: Sequence[RawDocument], skipped: Skipped) -> Tokens:
        """Encode.

        Empty documents are counted and left out. Raises ConvertError that names file and line.
        """
        size = sum(len(document.data) or document.size for document in documents)
        if self._chat is not None:
            return self._pack_chats(self._read(documents, self._rendered, skipped), size, skipped)
        parts = self._read(documents, self.parts, skipped)
        flat = [part for own in parts for part in own]
        ids = self._encode([text for text, _, _ in flat]) if flat else []
        if not self._options.keep_empty and not all(map(len, ids)):
            parts, ids = self._without_empty(parts, ids, skipped)
            flat = [part for own in parts for part in own]
        return self._pack(parts, flat, ids, size)

    def _encode(self, texts: list[Text]) -> Sequence[Sequence[int]]:
        """Ids of texts; those of long ones are there already."""
        plain = [text for text in texts if isinstance(text, str)]
        ids = self.tokenizer.encode(plain)
        if len(plain) == len(texts):
            return ids
        encoded = iter(ids)
        return [next(encoded) if isinstance(text, str) else text for text in texts]  # type: ignore[misc]

    def long_document(
        self, texts: Sequence[LongPart], where: str
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """(number of the sequence, ids) of a document that is not held, a piece at a time; none if
        it has no token.

        What `_without_empty` leaves out has no ids. Raises ConvertError, FormatError.
        """
        opening = [] if self.bos is None else [(0, np.array([self.bos], self.dtype))]
        if self._options.keep_empty:
            yield from opening
            opening = []
        closed = -1  # the last sequence with a token
        for number, text in enumerate(texts):
            for ids in self._long.encode(text.pieces, where):
                if not len(ids):
                    continue
                yield from ((number, bos) for _, bos in opening)
                opening = []
                closed = number
                yield number, ids.astype(self.dtype)
        if closed < 0 and not self._options.keep_empty:
            return
        if self._options.keep_empty or self._options.makes_modes:
            closed = len(texts) - 1
        if self.eod is not None:
            yield closed, np.array([self.eod], self.dtype)

    def long_parts(self, item: LongText | RawDocument) -> list[LongPart]:
        """The sequences of a document that is not held; none if it has no text.

        Raises ConvertError, FormatError.
        """
        if isinstance(item, LongText):
            return [LongPart(pieces=decoded(item.pieces, item.path))]
        texts = self._texts(item)
        return [
            LongPart(
                pieces=text.pieces() if isinstance(text, LongString) else text_in_pieces(text),
                mode=mode,
            )
            for text, mode in texts
        ]

    def _read(
        self, documents: Sequence[RawDocument], read: Callable[[RawDocument], Any], skipped: Skipped
    ) -> list[Any]:
        """What `read` makes of documents, without those that are empty or passed over."""
        found = []
        for document in documents:
            try:
                made = read(document)
            except (ConvertError, FormatError) as error:
                self._refuse(document, read, error, skipped)
                continue
            if made:
                found.append(made)
            else:
                _count_empty(skipped)
        return found

    def _refuse(
        self,
        document: RawDocument,
        read: Callable[[RawDocument], Any],
        error: Exception,
        skipped: Skipped,
    ) -> None:
        """Raise what is wrong with a document as a ConvertError that names its line, or note it
        where faults are passed over.

        Those that are passed over keep their byte (`path@byte`): to count the lines before would
        read the file again for each.
        """
        if self._options.on_error == "skip":
            skipped.add("broken record", str(error))
            return
        try:
            read(with_line(document, self._storage))
        except (ConvertError, FormatError) as named:
            raise ConvertError(str(named)) from None

    def _without_empty(
        self, parts: list[list[Part]], ids: Sequence[Sequence[int]], skipped: Skipped
    ) -> tuple[list[list[Part]], list[Sequence[int]]]:
        """Leave out, as Megatron does, documents without a token, and sequences, whose end goes to
        the one before them.

        Where sequences have modes, one that ends its document (or a message) stays, as an end
        alone.
        """
        kept: list[list[Part]] = []
        kept_ids: list[Sequence[int]] = []
        encoded = iter(ids)
        for document in parts:
            own = list(zip(document, itertools.islice(encoded, len(document)), strict=True))
            if not any(len(found) for _, found in own):
                _count_empty(skipped)
                continue
            if self._options.makes_modes:
                own = [(part, found) for part, found in own if len(found) or part[2]]
            else:
                own = [(part, found) for part, found in own if len(found)]
                (text, mode, _), last = own[-1]
                own[-1] = (text, mode, True), last
            kept.append([part for part, _ in own])
            kept_ids += [found for _, found in own]
        return kept, kept_ids

    def _pack(
        self, parts: list[list[Part]], flat: list[Part], ids: Sequence[Sequence[int]], size: int
    ) -> Tokens:
        ends = np.fromiter(
            (closed and self.eod is not None for _, _, closed in flat), np.int64, len(flat)
        )
        own = np.fromiter(map(len, ids), np.int64, len(ids))
        lengths = own + ends
        documents = np.fromiter(map(len, parts), np.int64, len(parts))
        firsts = np.cumsum(documents) - documents
        if self.bos is not None:
            lengths[firsts] += 1
        check_lengths(lengths)
        tokens = np.empty(int(lengths.sum()), self.dtype)
        where = np.ones(len(tokens), np.bool_)
        if self.bos is not None:
            opening = (np.cumsum(lengths) - lengths)[firsts]
            where[opening] = False
            tokens[opening] = self.bos
        if self.eod is not None:
            closing = np.cumsum(lengths)[ends > 0] - 1
            where[closing] = False
            tokens[closing] = self.eod
        if any(isinstance(own_ids, np.ndarray) for own_ids in ids):
            tokens[where] = np.concatenate([np.asarray(own_ids) for own_ids in ids] or [tokens[:0]])
        else:
            tokens[where] = np.fromiter(
                itertools.chain.from_iterable(ids), self.dtype, int(own.sum())
            )
        modes = (
            np.fromiter((mode for _, mode, _ in flat), np.int8, len(flat))
            if self._options.makes_modes
            else None
        )
        return Tokens(
            tokens=tokens,
            lengths=lengths.astype(np.int32),
            documents=documents,
            modes=modes,
            source_bytes=size,
        )

    def _rendered(self, document: RawDocument) -> Rendered | None:
        """A conversation by its template; None: it has no messages."""
        record = _record(document)
        if self._chat is None or not turns_of(record, document.where):
            return None
        return self._chat.render(record, document.where)

    def _pack_chats(self, chats: list[Rendered], size: int, skipped: Skipped) -> Tokens:
        """A sequence of each stretch of tokens that is an answer (mode 1) or none (mode 0); the end
        is no answer's.
        """
        tokens = [np.empty(0, self.dtype)]
        lengths = [np.empty(0, np.int64)]
        modes = [np.empty(0, np.int8)]
        documents = []
        for ids, answers in self._chat.encode(chats) if self._chat is not None else ():
            if not len(ids):
                _count_empty(skipped)
                continue
            if self.eod is not None and ids[-1] != self.eod:
                ids = np.append(ids, self.eod)
                answers = np.append(answers, False)
            bounds = np.flatnonzero(
                np.diff(answers, prepend=not answers[0], append=not answers[-1])
            )
            tokens.append(ids.astype(self.dtype))
            lengths.append(np.diff(bounds))
            modes.append(answers[bounds[:-1]].astype(np.int8))
            documents.append(len(bounds) - 1)
        check_lengths(np.concatenate(lengths))
        return Tokens(
            tokens=np.concatenate(tokens),
            lengths=np.concatenate(lengths).astype(np.int32),
            documents=np.array(documents, np.int64),
            modes=np.concatenate(modes),
            source_bytes=size,
        )

    def parts(self, document: RawDocument) -> list[Part]:
        """The sequences of a document; none if it has no text. Raises ConvertError, FormatError."""
        where = document.where
        if self._options.chat and document.record:
            return _conversation(_record(document), where)
        texts = self._texts(document)
        return [
            (self._shortened(text, where), mode, number == len(texts))
            for number, (text, mode) in enumerate(texts, 1)
        ]

    def _texts(self, document: RawDocument) -> list[tuple[Any, int]]:
        """(text, mode) of each sequence of a document that is no conversation: str,
        or LongString.
        """
        texts: list[tuple[Any, int]]
        if not document.record:
            texts = [(_decode(document), 0)]
        else:
            record = _record(document)
            keys = self._options.key_modes
            texts = [
                (text, mode) for key, mode in keys for text in texts_at(record, key, document.where)
            ]
        if self._split is not None:
            texts = [
                (sentence, mode)
                for text, mode in texts
                for sentence in self._split(text)
                if sentence
            ]
        if not any(text for text, _ in texts):
            return []
        # an empty answer is a sequence, with the end of its document
        last = texts[-1] if self._options.makes_modes else None
        return [part for part in texts if part[0] or part is last]

    def _shortened(self, text: str, where: str) -> Text:
        """A text, or if it is long its ids: they take less than what a tokenizer needs for all of
        it at once.
        """
        if len(text) < LONG:
            return text
        return np.concatenate(
            [np.empty(0, np.int32), *self._long.encode(text_in_pieces(text), where)]
        )


def _count_empty(skipped: Skipped) -> None:
    skipped.counts["empty"] = skipped.counts.get("empty", 0) + 1


def _record(document: RawDocument) -> Any:
    return (
        document.fields
        if document.fields is not None
        else load_record(document.data, document.where)
    )


def _decode(document: RawDocument) -> str:
    try:
        return document.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise no_text(document.where, error) from None


def _conversation(record: Any, where: str) -> list[Part]:
    """Headers and questions of mode 0, answers of mode 1; every text ends with the end-of-document
    token.
    """
    parts: list[Part] = []
    for message in messages_of(record, where):
        parts.append((message.header, 0, False))
        parts.append((message.text, int(message.is_answer), True))
    return parts


def _sentence_splitter(language: str) -> Any:
    try:
        import pysbd
    except ImportError:
        raise ConfigError(
            "splitting into sentences needs the pysbd package: pip install 'streammega[sentences]'"
        ) from None
    try:
        return pysbd.Segmenter(language=language, clean=False).segment
    except ValueError as error:
        raise ConfigError(f"split_sentences {language!r}: {error}") from None
