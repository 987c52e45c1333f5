"""What a conversion made, as figures, text and JSON; warnings and errors that count documents."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

import streammega
from streammega.config import StorageConfig
from streammega.convert.job import UnitRecord
from streammega.convert.options import ConvertOptions
from streammega.convert.read.megatron import dataset_name
from streammega.convert.read.source import Input, Skipped
from streammega.dataset.names import MANIFEST, set_name, strip_suffix
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
    format: str
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
    def compression(self) -> float:
        """Bytes of tokens for each stored byte."""
        token_bytes = self.tokens * np.dtype(self.dtype).itemsize
        return token_bytes / max(1, self.stored_bytes)

    def as_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """Everything; command: the words of the command line, without secrets."""
        values = {"streammega": streammega.__version__, "command": list(command)} | asdict(self)
        values["compression"] = self.compression
        histogram = np.trim_zeros(np.array(values.pop("histogram")), "b").tolist()
        values["document_lengths"] = [
            {"from_tokens": 2**number, "to_tokens": 2 ** (number + 1) - 1, "documents": documents}
            for number, documents in enumerate(histogram)
        ]
        return values

    def summary(self) -> dict[str, Any]:
        """What a terminal shows: figures, rates, and the first faults."""
        names = ("documents", "tokens", "dtype", "eod_id", "vocab_size", "format", "shards")
        seconds = max(self.seconds, SHORTEST)
        shown = self.messages[:SHOWN_MESSAGES]
        return {
            "dataset": self.prefix,
            **{name: getattr(self, name) for name in names},
            "stored_bytes": self.stored_bytes,
            "compression": self.compression if self.format == "zst" else None,
            "mean_tokens": round(self.tokens / max(1, self.documents)),
            "tokens_per_second": round(self.tokens / seconds),
            "text_bytes_per_second": round(self.text_bytes / seconds),
            "left_out": [without_controls(message) for message in shown],
            "left_out_too": len(self.messages) - len(shown) or None,
            "dropped": self.dropped,
            "packing": self.packing,
            "files_passed_over": self.files_passed_over,
            "members_left_out": self.members_left_out,
        }


def sum_skipped(records: Sequence[UnitRecord]) -> Skipped:
    """What was skipped in all units: counts, and the first messages."""
    total = Skipped()
    for record in records:
        for reason, count in record.skipped.counts.items():
            total.leave_out(reason, count)
        for kind, count in record.skipped.members.items():
            total.members[kind] = total.members.get(kind, 0) + count
        room = KEPT_MESSAGES - len(total.messages)
        total.messages += record.skipped.messages[:room]
    return total


log = logging.getLogger(__name__)

SHOWN_ERRORS = 5
"""Skipped records that are shown, where there are too many."""
SHOWN_UNITS = 20
"""Units that are named, where some are not done."""


def check_all_units_done(numbers: Sequence[int], done: Collection[int]) -> None:
    """Raise ConvertError for units that tasks have not done."""
    left = [number for number in numbers if number not in done]
    if left:
        named = ", ".join(map(str, left[:SHOWN_UNITS])) + (
            ", ..." if len(left) > SHOWN_UNITS else ""
        )
        raise ConvertError(
            f"{len(left)} of {len(numbers)} units are not done, or were of other inputs or options: "
            f"{named}; start the tasks again that have not ended (task i of N does the units i, "
            f"i + N, ...), with the same inputs and options as here"
        )


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
    errors = sum(record.skipped.errors for record in records)
    if most is None or errors <= most:
        return
    first = list(chain.from_iterable(record.skipped.messages for record in records))[:SHOWN_ERRORS]
    raise ConvertError(
        f"{pluralize(errors, 'record')} of {read:,} that were read "
        f"{'was' if errors == 1 else 'were'} skipped, more than max_errors (--max-errors) "
        f"{options.max_errors}; mend them, or raise the limit: what is done is kept. The first are:"
        + "".join(f"\n  {message}" for message in first)
    )


def warn_of_earlier_merge(inputs: Sequence[Input]) -> None:
    """Warn of a dataset as large as all others together: every document would be there twice."""
    sizes: dict[str, int] = {}
    for item in inputs:
        if item.format == "megatron":
            name = set_name(strip_suffix(item.path.removesuffix(MANIFEST)))
            sizes[name] = sizes.get(name, 0) + item.size
    for name, size in sizes.items():
        if len(sizes) > 2 and 2 * size == sum(sizes.values()):
            log.warning(
                "%s: has as many bytes of tokens as the %d other datasets of the inputs together. Is "
                "it made of them? Then leave it out by --exclude",
                redact_urls(name),
                len(sizes) - 1,
            )


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
            "--provenance carries it over",
            redact_urls(name),
            ENDING,
        )
