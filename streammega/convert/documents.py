"""Documents while they are converted: raw, as readers give them, and as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import MAX_TOKENS
from streammega.dataset.provenance import FILE, DocumentOrigins, concat_origins, origins_of
from streammega.errors import ConvertError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import in_one_line


@dataclass(frozen=True, kw_only=True)
class RawDocument:
    """A document before parsing: its bytes, and where they came from (line 0: the whole file).

    offset: the byte of the file at which it begins, where its line is not known, else -1. is_record:
    whether the bytes are a JSON record; else they are text. fields: a record that was parsed
    already. size: about how many bytes it takes.
    """

    data: bytes
    path: str
    line: int = 0
    offset: int = -1
    is_record: bool = False
    fields: dict[str, Any] | None = None
    size: int = 0

    @property
    def where(self) -> str:
        """The place, as messages name it."""
        path = in_one_line(self.path)
        if self.offset >= 0:
            return f"{path}@{self.offset}"
        return f"{path}:{self.line}" if self.line else path


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Some documents: tokens end to end, tokens of each sequence, sequences of each document, modes
    of sequences or None.

    origins: where the documents came from, if that is to be kept. columns: what is stored for each
    token, by the names of columns: as bytes of np.void, [tokens].
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None
    columns: Mapping[str, NDArray[np.void]] = field(default_factory=dict)
    source_bytes: int = 0
    origins: DocumentOrigins | None = None

    @property
    def document_tokens(self) -> NDArray[np.int64]:
        """Tokens of each document, int64."""
        token_bounds = offsets_of(self.lengths)
        sequence_bounds = offsets_of(self.documents)
        tokens: NDArray[np.int64] = np.diff(token_bounds[sequence_bounds])
        return tokens

    def with_origins(self, path: str, kind: int = FILE, first: int = 0) -> Tokens:
        """The documents with where they come from: the file, or its rows from number `first` on."""
        return replace(self, origins=origins_in(path, kind, first, len(self.documents)))

    def take(self, documents: NDArray[np.int64]) -> Tokens:
        """Some of the documents, in the order of these numbers."""
        sizes = self.document_tokens
        starts = offsets_of(sizes)
        if int(starts[-1]) != len(self.tokens):
            raise ConvertError(
                f"a batch of {len(self.tokens)} tokens has documents of {starts[-1]}; please report this"
            )
        taken_sizes = sizes[documents]
        taken_starts = offsets_of(taken_sizes)
        sources = np.zeros(len(documents), np.int64)

        def taken(values: NDArray[Any]) -> NDArray[Any]:
            """The values of the tokens of these documents."""
            values = np.ascontiguousarray(values)
            out = np.empty(int(taken_starts[-1]), values.dtype)
            begin, size = starts[documents] * values.itemsize, taken_sizes * values.itemsize
            gather([values.view(np.uint8)], sources, begin, size, out, taken_starts[:-1])
            return out

        counts = self.documents[documents]
        sequences = concat_ranges(offsets_of(self.documents)[documents], counts)
        return replace(
            self,
            tokens=taken(self.tokens),
            lengths=self.lengths[sequences],
            documents=counts,
            modes=None if self.modes is None else self.modes[sequences],
            columns={name: taken(values) for name, values in self.columns.items()},
            origins=None if self.origins is None else self.origins.take(documents),
        )

    def select(self, keep: NDArray[np.bool_]) -> Tokens:
        """Some of the documents, in their order. Unlike `take`, it needs no kernel, which a machine
        would compile first.
        """
        if keep.all():
            return self
        kept = self.take_sequences(np.repeat(keep, self.documents))
        origins = None if self.origins is None else self.origins.take(np.flatnonzero(keep))
        return replace(kept, documents=self.documents[keep], origins=origins)

    def take_sequences(self, keep: NDArray[np.bool_]) -> Tokens:
        """Some of the sequences; documents may become empty."""
        num_documents = len(self.documents)
        document_of_sequence = np.repeat(np.arange(num_documents), self.documents)
        kept_of_document = np.bincount(document_of_sequence[keep], minlength=num_documents)
        return replace(
            self._take_tokens(np.repeat(keep, self.lengths)),
            lengths=self.lengths[keep],
            documents=kept_of_document.astype(np.int64),
            modes=None if self.modes is None else self.modes[keep],
        )

    def _take_tokens(self, keep: NDArray[np.bool_]) -> Tokens:
        """Some of the tokens, with their columns; the caller sets the lengths that follow."""
        columns = {name: values[keep] for name, values in self.columns.items()}
        return replace(self, tokens=self.tokens[keep], columns=columns)

    def cut(self, max_tokens: int, end: int | None) -> Tokens:
        """Documents cut to at most `max_tokens`; one that ended with `end` still does."""
        is_kept = self._first_tokens(max_tokens, end)
        tokens_kept_before = offsets_of(is_kept)
        token_bounds = offsets_of(self.lengths)
        lengths = np.diff(tokens_kept_before[token_bounds]).astype(np.int32)
        shortened = replace(self._take_tokens(is_kept), lengths=lengths)
        # A sequence goes if the cut took all of it; one that was empty before stays.
        return shortened.take_sequences((lengths > 0) | (self.lengths == 0))

    def _first_tokens(self, max_tokens: int, end: int | None) -> NDArray[np.bool_]:
        """Which tokens `cut` keeps."""
        sizes = self.document_tokens
        ends = np.cumsum(sizes)
        starts = ends - sizes
        is_kept = np.ones(len(self.tokens), np.bool_)
        # Few documents are longer; all others stay as they are.
        for number in np.flatnonzero(sizes > max_tokens):
            cut_from = int(starts[number]) + max_tokens
            cut_to = int(ends[number])
            if end is not None and int(self.tokens[cut_to - 1]) == end:
                # The end takes the place of the last token that would be kept.
                cut_from -= 1
                cut_to -= 1
            is_kept[cut_from:cut_to] = False
        return is_kept


def origins_in(path: str, kind: int, first: int, count: int) -> DocumentOrigins:
    """Origins of documents in one file, numbered from `first` on unless `kind` is FILE."""
    places = np.zeros(count, np.int64) if kind == FILE else np.arange(first, first + count)
    kinds = np.full(count, kind, np.uint8)
    return origins_of([redact_urls(path)] * count, kinds, places, [""] * count)


def offsets_of(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Where each of some stretches begins, and where the last one ends: [len(counts) + 1]."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=bounds[1:])
    return bounds


def concat_ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ... (counts[0] of them), then those of starts[1], and so on."""
    bounds = offsets_of(counts)
    # What a number of the result is more than its place in it.
    shifts = starts - bounds[:-1]
    return np.repeat(shifts, counts) + np.arange(int(bounds[-1]))


def gather(
    sources: Sequence[NDArray[np.uint8]],
    numbers: NDArray[np.int64],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    out: NDArray[Any],
    targets: NDArray[np.int64],
) -> None:
    """Copy stretches of sources to elements of `out`. numbers: of their sources. starts, sizes: in
    bytes.
    """
    # imported here: the commands that only list inputs do without kernels
    from streammega.kernels.addresses import copy_stretches

    copy_stretches(sources, numbers, starts, sizes, out, targets * out.itemsize)


def concatenate(parts: list[Tokens], dtype: np.dtype[Any]) -> Tokens:
    """All documents of the parts, in order."""
    if len(parts) == 1 and parts[0].tokens.dtype == dtype:
        return parts[0]
    # An empty array first, since there may be no parts.
    tokens = [np.empty(0, dtype)]
    lengths = [np.empty(0, np.int32)]
    documents = [np.empty(0, np.int64)]
    modes = []
    origins = [part.origins for part in parts if part.origins is not None]
    for part in parts:
        tokens.append(part.tokens.astype(dtype, copy=False))
        lengths.append(part.lengths)
        documents.append(part.documents)
        if part.modes is not None:
            modes.append(part.modes)
    return Tokens(
        tokens=np.concatenate(tokens),
        lengths=np.concatenate(lengths),
        documents=np.concatenate(documents),
        modes=np.concatenate(modes) if modes else None,
        columns={
            name: np.concatenate([part.columns[name] for part in parts])
            for name in (parts[0].columns if parts else ())
        },
        source_bytes=sum(part.source_bytes for part in parts),
        origins=concat_origins(origins) if origins else None,
    )


def one_per_document(tokens: NDArray[Any], lengths: NDArray[Any], size: int, where: str) -> Tokens:
    """Every document is one sequence.

    Raises ConvertError, naming `where`, for values that cannot be token ids.
    """
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ConvertError(f"{where}: token arrays hold integers, not {tokens.dtype}")
    # Unsigned ones are not looked through.
    if tokens.dtype.kind == "i" and len(tokens):
        lowest = int(tokens.min())
        if lowest < 0:
            raise ConvertError(
                f"{where}: holds the id {lowest}; ids are not below zero: was it padded or masked?"
            )
    check_lengths(lengths)
    return Tokens(
        tokens=tokens,
        lengths=lengths.astype(np.int32),
        documents=np.ones(len(lengths), np.int64),
        source_bytes=size,
    )


def check_lengths(lengths: NDArray[Any]) -> None:
    """Raise ConvertError for a sequence that has more tokens than the `.idx` can say."""
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > MAX_TOKENS:
        raise ConvertError(
            f"a sequence has {longest:,} tokens, and an .idx can hold {MAX_TOKENS:,}; divide its "
            f"document"
        )
