"""What provenance tells: documents by numbers, what samples are made of, and who reads a document."""

from __future__ import annotations

from dataclasses import dataclass

from streammega.dataset.provenance import DocumentOrigin


@dataclass(frozen=True, kw_only=True)
class DocumentName:
    """A document of a blend, by numbers: of the dataset within the blend, of the shard within the
    dataset, and its own in the shard's `.idx`.
    """

    dataset: int
    shard: int
    document: int


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Consecutive tokens of one document within a sample.

    dataset, shard: names, without secrets. name: the same in numbers. start, stop: tokens of the
    document, which has `document_tokens`. column: the token of the sample at which they begin.
    shard_start: the token of the shard at which they lie. origin: where the document came from, if
    the shard has it. skipped: training does not see them (skip_documents).
    """

    dataset: str
    shard: str
    name: DocumentName
    start: int
    stop: int
    document_tokens: int
    column: int
    shard_start: int
    origin: DocumentOrigin | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class TracedSample:
    """A sample of the global stream, and what its tokens are, in their order; with the extra one,
    which is a label alone.

    phase: the number of its phase. seams: the tokens of it, by their column, that do not follow
    those before them in their file: where lengths or lanes changed, samples join what was left.
    """

    sample: int
    runs: tuple[TracedRun, ...]
    phase: int = 0
    seams: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DocumentReading:
    """One sample that reads tokens [start, stop) of a document."""

    sample: int
    start: int
    stop: int
