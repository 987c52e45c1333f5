"""What `view` shows: documents of a dataset, a search in them, and the samples of a run's steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega import DataConfig, IndexedDataset, StorageConfig
from streammega.config import ORDERS
from streammega.convert import tokenizer_of
from streammega.errors.cached_property import cached_property
from streammega.errors.redaction import redact_urls

if TYPE_CHECKING:  # a dataset alone is shown without torch, which takes seconds to import
    from streammega import DocumentName, StreamingDataset
    from streammega.train.config import RunConfig

WINDOW = 2048
"""Tokens of a document or a sample that a page shows."""
HEAD = 64
"""Tokens of a document that a list shows."""
PIECE = 1 << 18
"""Tokens that a search reads at once."""
PORTION = 1 << 22
"""Tokens after which a search stops. The next portion is another request."""
PORTION_SECONDS = 3.0
"""Seconds after which a search stops too."""
MAX_HITS = 50
"""Places after which a search stops too."""
AROUND = 80
"""Characters shown on both sides of a text that was searched."""
MAX_OPEN = 64
"""Datasets of a run, and ranks, that are kept open."""

Ids = NDArray[Any]


class Part(NamedTuple):
    """Tokens of a document that are of one sequence. mode, is_learned: None where it has no mode."""

    start: int
    stop: int
    mode: int | None
    is_learned: bool | None
    text: str


class Hit(NamedTuple):
    """A place of a text: a document, the token at which its page begins, and the text around."""

    document: int
    token: int
    before: str
    match: str
    after: str


class SearchResult(NamedTuple):
    """What a portion of a search found. rest: (document, token) from which to go on; None: the end."""

    hits: list[Hit]
    tokens: int
    rest: tuple[int, int] | None


class Decoder:
    """Ids to text, by the tokenizer of a dataset.

    chosen: the name of another tokenizer. name: of what decodes, or of those that the manifest names.
    note: why ids are shown, or why the text may be wrong.
    """

    def __init__(self, manifest: Any, storage: StorageConfig, chosen: str | None) -> None:
        labels = manifest.tokenizers
        self.name = redact_urls(chosen or ", ".join(sorted(label.name for label in labels)))
        self.model, problem = tokenizer_of(manifest, storage, chosen)
        sentence = problem[:1].upper() + problem[1:]
        self.note = f"{sentence}; ids are shown." if self.model is None else sentence

    def text(self, ids: Ids) -> str:
        """The text of ids; the ids where no tokenizer decodes them."""
        if self.model is None or not len(ids) or int(ids.max()) >= self.model.vocab_size:
            return f" {' '.join(map(str, ids.tolist()))} "
        decoded: str = self.model.decode(ids.tolist())
        return decoded


class Dataset:
    """A dataset by itself. Raises what IndexedDataset raises. tokenizer: as `chosen` of Decoder."""

    def __init__(
        self,
        prefix: str,
        storage: StorageConfig,
        tokenizer: str | None,
    ) -> None:
        self.name = redact_urls(prefix)
        self.indexed = IndexedDataset(prefix, storage=storage)
        self.decoder = Decoder(self.indexed.manifest, storage, tokenizer)

    @property
    def num_documents(self) -> int:
        """How many documents it has."""
        return len(self.indexed.document_indices) - 1

    @cached_property
    def num_tokens(self) -> int:
        """How many tokens its documents have."""
        return int(self.indexed.sequence_lengths.sum(dtype=np.int64))

    @property
    def columns(self) -> list[str]:
        """Its columns, such as "weight (float16)"."""
        return [
            f"{column.name} ({column.dtype}{f' x {column.width}' if column.width > 1 else ''})"
            for column in self.indexed.columns
        ]

    def sequences(self, document: int) -> range:
        """The numbers of a document's sequences."""
        bounds = self.indexed.document_indices
        return range(int(bounds[document]), int(bounds[document + 1]))

    def length(self, document: int) -> int:
        """Tokens of a document."""
        place = self.sequences(document)
        return int(self.indexed.sequence_lengths[place.start : place.stop].sum(dtype=np.int64))

    def modes(self, document: int) -> list[int]:
        """The modes of a document's sequences, each once."""
        modes = self.indexed.sequence_modes
        place = self.sequences(document)
        return [] if modes is None else np.unique(modes[place.start : place.stop]).tolist()

    def parts(self, document: int, start: int, stop: int) -> list[Part]:
        """Tokens [start, stop) of a document, by sequence; without modes they are one part."""
        modes = self.indexed.sequence_modes
        if modes is None:
            ids = self._read(document, start, stop)
            return (
                [Part(start, start + len(ids), None, None, self.decoder.text(ids))]
                if len(ids)
                else []
            )
        learned = self.indexed.loss_modes
        parts = []
        for sequence, first, ids in self._ranges(document, start, stop):
            mode = int(modes[sequence])
            is_learned = None if learned is None else mode in learned
            parts.append(Part(first, first + len(ids), mode, is_learned, self.decoder.text(ids)))
        return parts

    def head(self, document: int) -> str:
        """How a document begins."""
        parts = self.parts(document, 0, min(HEAD, self.length(document)))
        return "".join(part.text for part in parts)

    def search(self, wanted: str, document: int, token: int) -> SearchResult:
        """Places of a text from a token of a document on, in one portion of the dataset.

        Without a tokenizer the text is ids. Decodes all that it reads, so no place is missed.
        """
        if self.decoder.model is None:
            wanted = f" {' '.join(wanted.split())} "
        overlap = len(wanted.encode())  # no token is shorter than a byte
        deadline = time.monotonic() + PORTION_SECONDS
        hits = []
        tokens = 0
        for number, first, ids in self._pieces(document, token, overlap):
            length = self.length(number)
            for begin in range(0, min(len(ids), PIECE), WINDOW):
                window = ids[begin : begin + WINDOW + overlap]
                count = min(WINDOW, length - first - begin)
                text = self.decoder.text(window)
                place = text.find(wanted)
                # one that begins after those ids is found with the next ones
                if place >= 0 and place < len(self.decoder.text(window[:count])):
                    stop = place + len(wanted)
                    before = text[max(0, place - AROUND) : place]
                    after = text[stop : stop + AROUND]
                    hits.append(Hit(number, first + begin, before, wanted, after))
                tokens += count
                is_late = time.monotonic() > deadline
                if tokens >= PORTION or is_late or len(hits) >= MAX_HITS:
                    stop = first + begin + count
                    rest = (number, stop) if stop < length else (number + 1, 0)
                    return SearchResult(
                        hits, tokens, rest if rest[0] < self.num_documents else None
                    )
        return SearchResult(hits, tokens, None)

    def _pieces(self, document: int, token: int, overlap: int) -> Iterator[tuple[int, int, Ids]]:
        """(document, its token, ids from there on) from a place on. Short documents are read
        together. A long one has several pieces, and each has `overlap` ids of the next one.
        """
        while document < self.num_documents:
            size = self.length(document)
            if token or size > PIECE:
                for begin in range(token, size, PIECE):
                    yield document, begin, self._read(document, begin, begin + PIECE + overlap)
                document += 1
                token = 0
                continue
            last = document
            while last + 1 < self.num_documents and size + self.length(last + 1) <= PIECE:
                last += 1
                size += self.length(last)
            yield from self._short_documents(document, last)
            document = last + 1

    def _short_documents(self, first: int, last: int) -> Iterator[tuple[int, int, Ids]]:
        """All ids of documents, read by one range where they are end to end."""
        start = self.sequences(first).start
        items = self.indexed[start : self.sequences(last).stop]
        for document in range(first, last + 1):
            place = self.sequences(document)
            sequences = items[place.start - start : place.stop - start]
            ids = [item[0] if isinstance(item, tuple) else item for item in sequences]
            yield document, 0, np.concatenate([np.empty(0, self.indexed.dtype), *ids])

    def _read(self, document: int, start: int, stop: int) -> Ids:
        """Tokens [start, stop) of a document, as far as it has them."""
        ids = [ids for _, _, ids in self._ranges(document, start, stop)]
        return np.concatenate([np.empty(0, self.indexed.dtype), *ids])

    def _ranges(self, document: int, start: int, stop: int) -> Iterator[tuple[int, int, Ids]]:
        """(sequence, token of the document, ids from there on) of tokens [start, stop)."""
        before = 0
        for sequence in self.sequences(document):
            size = int(self.indexed.sequence_lengths[sequence])
            low = max(start - before, 0)
            high = min(stop - before, size)
            if low < high:
                yield sequence, before + low, self.indexed.get(sequence, low, high - low)
            before += size


class Span(NamedTuple):
    """Tokens of a sample that are of one document and all learned, or all not.

    run: the number of its document among those of the sample; None: padding. begins, ends: whether
    the document's tokens in the sample begin here, and whether the document ends here.
    """

    run: int | None
    is_learned: bool
    begins: bool
    ends: bool
    tokens: int
    text: str


class Sample(NamedTuple):
    """A sample of a rank. number: in the global stream. micro_batch, row: where the rank reads it."""

    number: int
    micro_batch: int
    row: int
    tokens: int
    learned: int
    traced: Any
    spans: list[Span]


class Run:
    """The training split of a run, as its trainer reads it. Raises what Provenance raises."""

    def __init__(self, name: str, run: RunConfig, tokenizer: str | None) -> None:
        self.name = name
        from streammega import Provenance

        train = run.train
        self.config = replace(run, data=_data_of(run))
        self.provenance = Provenance(self.config.data, "train", train.global_batch_size)
        self.schedule = self.config.schedule
        self.last_step = train.train_iters
        self._tokenizer = tokenizer
        self.dataset = lru_cache(MAX_OPEN)(self._open)
        self._decoders: dict[frozenset[Any], Decoder] = {}
        self.first_documents = lru_cache(None)(self._first_documents)
        self.reader = lru_cache(MAX_OPEN)(self._reader)

    def short_name(self, dataset: str) -> str:
        """The last part of a dataset's name; all of it where several datasets end alike."""
        return self._short_names.get(dataset, dataset)

    @cached_property
    def _short_names(self) -> dict[str, str]:
        names = dict.fromkeys(self.provenance.dataset_names)
        ends = {name: name.rstrip("/").rpartition("/")[2] or name for name in names}
        times = Counter(ends.values())
        return {name: end if times[end] == 1 else name for name, end in ends.items()}

    def _open(self, number: int) -> Dataset:
        """One of its datasets."""
        data = self.config.data
        prefix = self.provenance.datasets[number]
        return Dataset(prefix, data.storage, self._tokenizer)

    def _reader(self, rank: int, ranks: int) -> StreamingDataset:
        """What a rank reads. Raises ConfigError where the ranks do not divide the batches."""
        from streammega import StreamingDataset

        train = self.config.train
        return StreamingDataset(
            self.config.data,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            rampup_batch_size=train.rampup_batch_size,
            dp_rank=rank,
            dp_size=ranks,
        )

    def decoder(self, number: int) -> Decoder:
        """What decodes one of its datasets. Datasets of one tokenizer share it."""
        manifest = self.provenance.manifest(number)
        key = frozenset(manifest.tokenizers)
        if key not in self._decoders:
            self._decoders[key] = Decoder(manifest, self.config.data.storage, self._tokenizer)
        return self._decoders[key]

    def _first_documents(self, dataset: int) -> NDArray[np.int64]:
        """The number in a dataset of the first document of each shard; last, how many it has."""
        sizes = [shard.num_documents for shard in self.provenance.shards(dataset)]
        return np.cumsum([0, *sizes], dtype=np.int64)

    def document_name(self, dataset: int, document: int) -> DocumentName:
        """A document of a dataset by its shard."""
        from streammega import DocumentName

        firsts = self.first_documents(dataset)
        shard = int(np.searchsorted(firsts, document, side="right")) - 1
        return DocumentName(dataset, shard, document - int(firsts[shard]))

    @cached_property
    def phases(self) -> Sequence[Any]:
        """What each phase takes from its datasets."""
        from streammega import sample_usage

        end = self.schedule.samples_of_step(self.last_step).stop
        return sample_usage(self.provenance, end, self.schedule.excluded)

    def steps(self, phase: Any) -> tuple[int, int] | None:
        """The first and the last step of a phase; None: all of its samples are excluded."""
        return self.schedule.steps_between(phase.first_sample, phase.stop)

    def count_samples(self, step: int, rank: int, ranks: int) -> int:
        """Samples that a rank reads in a step. Raises ConfigError where there is no such rank."""
        self.reader(rank, ranks)
        return len(self.schedule.samples_of_step(step)) // ranks

    def samples(
        self, step: int, rank: int, ranks: int, chosen: range, window: tuple[int, int]
    ) -> list[Sample]:
        """Some of the samples of a rank in a step, with tokens [start, stop) of each.

        chosen: by their numbers among those of the rank.
        """
        reader = self.reader(rank, ranks)
        ids_of_step = self.schedule.samples_of_step(step)
        size = self.config.train.micro_batch_size
        samples: list[Sample] = []
        for micro_batch in sorted({number // size for number in chosen}):
            consumed = ids_of_step.start + micro_batch * reader.step_samples
            fields = {name: value.numpy() for name, value in reader.batch(consumed).items()}
            numbers = reader.sample_ids(consumed)
            for row, traced in enumerate(self.provenance.trace(numbers)):
                if micro_batch * size + row not in chosen:
                    continue
                ids = fields["tokens"][row]
                if self.config.data.add_extra_token:  # it is never an input, only the last label
                    ids = np.concatenate([ids, fields["labels"][row][-1:]])
                learned = np.zeros(len(ids), np.bool_)  # nothing predicts the first one
                learned[1:] = fields["loss_mask"][row][: len(ids) - 1] > 0
                samples.append(
                    Sample(
                        number=int(numbers[row]),
                        micro_batch=micro_batch,
                        row=row,
                        tokens=len(ids),
                        learned=int(learned.sum()),
                        traced=traced,
                        spans=list(self._spans(traced, ids, learned, *window)),
                    )
                )
        return samples

    def _spans(
        self, traced: Any, ids: Ids, learned: NDArray[np.bool_], start: int, stop: int
    ) -> Iterator[Span]:
        """The spans of columns [start, stop) of a sample."""
        stop = min(stop, len(ids))
        bounds = [(run.column, run.column + run.stop - run.start) for run in traced.runs]
        padding_from = max((last for _, last in bounds), default=0)
        for number, (first, last) in enumerate(bounds):
            low = max(first, start)
            high = min(last, stop)
            if low >= high:
                continue
            run = traced.runs[number]
            text = self.decoder(run.name.dataset).text
            cuts = np.flatnonzero(np.diff(learned[low:high])) + low + 1
            edges = [low, *cuts.tolist(), high]
            for begin, end in zip(edges[:-1], edges[1:], strict=True):
                yield Span(
                    run=number,
                    is_learned=bool(learned[begin]),
                    begins=begin == low,
                    ends=end == last and run.stop == run.document_tokens,
                    tokens=end - begin,
                    text=text(ids[begin:end]),
                )
        if max(padding_from, start) < stop:
            yield Span(None, False, False, False, stop - max(padding_from, start), "")


def _data_of(run: RunConfig) -> DataConfig:
    """The data of training with the fields that a page shows."""
    # without a mask of attention, which is large, and follows from the documents
    data = replace(run.data, fields=None)
    data = replace(data, fields=list(data.field_names), columns=())
    if data.num_samples is None and not ORDERS[data.order].is_endless:
        data = replace(data, num_samples=run.num_samples())
    return data
