"""What a conversion made, as figures, text and JSON; warnings and errors that count documents."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

import streammega
from streammega.config import StorageConfig
from streammega.convert.job import HISTOGRAM_BINS, UnitRecord
from streammega.convert.options import ConvertOptions
from streammega.convert.read.megatron import dataset_name
from streammega.convert.read.source import Input
from streammega.dataset.manifest import ShardEntry
from streammega.dataset.names import strip_suffix
from streammega.dataset.provenance import ENDING, has_provenance
from streammega.dataset.resolve import find_pairs
from streammega.errors import ConvertError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize, without_controls

SHOWN_MESSAGES = 10
"""Faults that are shown on a terminal; the JSON has all that were kept."""
KEPT_MESSAGES = 10_000
"""Faults that are kept, of a corpus that may have millions."""
SHORTEST = 1e-9
"""Seconds, for speeds of what took none."""


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """Documents and tokens written; `dropped`: what happened to others, by reason; histogram: bin b
    has [2^b, 2^(b+1)) tokens.

    inputs: path, format and bytes of each. files_passed_over: what was found and is no input, by
    reason; names_passed_over: the first of each. members_left_out: of archives, by their suffix, or
    what they are. packing: of bins,
    how many there are, their padding in tokens, the documents in them (pieces) and the most of one,
    the documents that were split or dropped because they are longer than a bin; {} without bins.
    tokens counts the padding too, and one token behind each shard.
    """

    prefix: str
    kind: str
    shards: int
    documents: int
    sequences: int
    tokens: int
    dtype: str
    vocab_size: int | None
    eod_id: int | None
    text_bytes: int
    stored_bytes: int
    seconds: float
    dropped: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    files_passed_over: dict[str, int] = field(default_factory=dict)
    names_passed_over: dict[str, list[str]] = field(default_factory=dict)
    members_left_out: dict[str, int] = field(default_factory=dict)
    packing: dict[str, int] = field(default_factory=dict)

    @property
    def empty_documents(self) -> int:
        """Documents left out since they had no text."""
        return self.dropped.get("empty", 0)

    @property
    def compression(self) -> float:
        """Bytes of tokens for each stored byte."""
        token_bytes = self.tokens * np.dtype(self.dtype).itemsize
        return token_bytes / max(1, self.stored_bytes)

    def as_text(self) -> str:
        """For a terminal."""
        lines = [self._line_of_output(), self._line_of_speed()]
        if self.packing:
            lines.append(self._line_of_packing())
        if self.files_passed_over:
            reasons = sorted(self.files_passed_over.items())
            files = "; ".join(f"{reason}: {count:,}" for reason, count in reasons)
            lines.append(f"files not read, by reason: {files}")
        if self.members_left_out:
            kinds = sorted(self.members_left_out.items())
            members = "; ".join(f"{kind}: {count:,}" for kind, count in kinds)
            lines.append(f"members of archives not read, by kind: {members}")
        shown = self.messages[:SHOWN_MESSAGES]
        lines += [f"  left out: {message}" for message in shown]
        more = len(self.messages) - len(shown)
        if more:
            lines.append(f"  and {more} more; --report FILE.json has them")
        return without_controls("\n".join(lines))

    def as_json(self, command: Sequence[str] = ()) -> str:
        """Everything; command: the words that asked for it, without secrets."""
        values = {"streammega": streammega.__version__, "command": list(command)} | asdict(self)
        values["compression"] = self.compression
        histogram = np.trim_zeros(np.array(values.pop("histogram")), "b").tolist()
        values["document_lengths"] = [
            {"from_tokens": 2**number, "to_tokens": 2 ** (number + 1) - 1, "documents": documents}
            for number, documents in enumerate(histogram)
        ]
        return json.dumps(values, indent=1)

    def _line_of_output(self) -> str:
        empty = ""
        if self.empty_documents:
            empty = f" ({pluralize(self.empty_documents, 'empty one')} left out)"
        megabytes = self.stored_bytes / 1e6
        ratio = f" ({self.compression:.2f}x smaller than .bin)" if self.kind == "zst" else ""
        return (
            f"{self.prefix}: {pluralize(self.documents, 'document')}{empty}, "
            f"{pluralize(self.tokens, 'token')} of "
            f"{self.dtype}, eod_id {self.eod_id}, vocab_size {self.vocab_size}, "
            f"{megabytes:,.1f} MB in {pluralize(self.shards, f'{self.kind} shard')}{ratio}"
        )

    def _line_of_packing(self) -> str:
        packing = self.packing
        bins = max(1, packing["bins"])
        share = packing["padding"] / max(1, self.tokens)
        text = (
            f"{pluralize(packing['bins'], 'bin')}, {share:.3%} padding; {packing['pieces'] / bins:.1f} "
            f"documents a bin, {packing['most_pieces']:,} at most"
        )
        for happened in ("split", "dropped"):
            if packing[happened]:
                text += f"; {packing[happened]:,} longer than a bin were {happened}"
        return text

    def _line_of_speed(self) -> str:
        mean_tokens = self.tokens / max(1, self.documents)
        seconds = max(self.seconds, SHORTEST)
        tokens_per_second = self.tokens / seconds
        megabytes_per_second = self.text_bytes / 1e6 / seconds
        dropped = ""
        for reason, count in sorted(self.dropped.items()):
            # Empty documents are counted in the first line.
            if reason != "empty":
                dropped += f"; {count_of(reason, count)}"
        return (
            f"{pluralize(round(mean_tokens), 'token')} per document; "
            f"{tokens_per_second:,.0f} tokens/s, "
            f"{megabytes_per_second:,.1f} MB/s{dropped}"
        )


def sum_records(records: Sequence[UnitRecord]) -> UnitRecord:
    """What happened in all units: counts, the first messages, and the histogram."""
    total = UnitRecord(digest="")
    histogram = np.zeros(HISTOGRAM_BINS, np.int64)
    for record in records:
        for reason, count in record.counts.items():
            total.count(reason, count)
        for kind, count in record.members.items():
            total.members[kind] = total.members.get(kind, 0) + count
        room = KEPT_MESSAGES - len(total.messages)
        total.messages += record.messages[:room]
        histogram += np.array(record.histogram)
    total.histogram = histogram.tolist()
    return total


log = logging.getLogger(__name__)

SHOWN_ERRORS = 5
"""Skipped records that are shown, where there are too many."""
NOUNS = {
    "broken record": ("broken record", "broken records"),
    "duplicates": ("duplicate", "duplicates"),
    "hostile path": ("hostile path", "hostile paths"),
    "samples without the member": ("sample without the member", "samples without the member"),
    "sequences of other modes": ("sequence of another mode", "sequences of other modes"),
    "tokens cut off": ("token cut off", "tokens cut off"),
    "unreadable file": ("unreadable file", "unreadable files"),
    "unreadable row": ("unreadable row", "unreadable rows"),
}
"""Reasons that are nouns."""
TOLD = 20
"""Units that are named, where some are not done."""


def check_all_units_done(numbers: Sequence[int], done: Collection[int]) -> None:
    """Raise ConvertError for units that tasks have not done."""
    left = [number for number in numbers if number not in done]
    if left:
        named = ", ".join(map(str, left[:TOLD])) + (", ..." if len(left) > TOLD else "")
        raise ConvertError(
            f"{len(left)} of {len(numbers)} units are not done, or were of other inputs or options: "
            f"{named}; start the tasks again that have not ended (task i of N does the units i, "
            f"i + N, ...), with the same inputs and options as here"
        )


def count_of(reason: str, documents: int) -> str:
    """How many documents were left out for a reason."""
    singular, plural = NOUNS.get(reason, (reason, reason))
    return pluralize(documents, singular, plural)


def check_errors(
    records: Collection[UnitRecord], options: ConvertOptions, *, all_done: bool = False
) -> None:
    """Raise ConvertError if more records were skipped than `max_errors` allows.

    A part of all records is known when all units are done, a number at once.
    """
    if options.max_errors is None or ("%" in str(options.max_errors) and not all_done):
        return
    read = sum(record.read for record in records)
    most = options.most_errors(read)
    errors = sum(record.errors for record in records)
    if most is None or errors <= most:
        return
    first = list(chain.from_iterable(record.messages for record in records))[:SHOWN_ERRORS]
    raise ConvertError(
        f"{pluralize(errors, 'record')} of {read:,} that were read "
        f"{'was' if errors == 1 else 'were'} skipped, more than max_errors (--max-errors) "
        f"{options.max_errors}; mend them, or raise the limit: what is done is kept. The first are:"
        + "".join(f"\n  {message}" for message in first)
    )


def reasons_of(records: Sequence[UnitRecord]) -> str:
    """Why nothing is left, for a message: counts by reason, and the first faults with their
    places.
    """
    total = sum_records(records)
    parts = [f"; {count_of(reason, count)}" for reason, count in sorted(total.counts.items())]
    parts += [f"\n  {message}" for message in total.messages[:3]]
    return "".join(parts)


def warn_missing_provenance(inputs: Sequence[Input], storage: StorageConfig) -> None:
    """Say that origins of inputs are left out: who did not ask for them may not know of them."""
    datasets = [item for item in inputs if item.format == "megatron"]
    if not datasets:
        return
    # Of the first alone: shards of one dataset all have them, or none has.
    name = dataset_name(datasets[0].path)
    first_shard = strip_suffix(find_pairs(name, storage)[0])
    if has_provenance(first_shard, storage):
        log.warning(
            "%s: tells where its documents came from (%s), which this conversion leaves out; "
            "--origins carries it over",
            redact_urls(name),
            ENDING,
        )


def warn_missing_ids(id_field: str, shards: Sequence[ShardEntry]) -> None:
    """Say that no document has the id that was asked for: a record may lack it, not all."""
    if any(shard.documents for shard in shards):
        log.warning(
            "no record has a text or number in %r (--id-field), so no document can be found or "
            "skipped by its id; is the field mistyped?",
            id_field,
        )
