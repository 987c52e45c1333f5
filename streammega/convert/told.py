"""What people are told of a conversion beside its report: what it leaves out, and what is missing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from itertools import chain

from streammega.config import StorageConfig
from streammega.convert.job import UnitRecord
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import Input
from streammega.convert.read.pairs import dataset_name
from streammega.dataset.find import find_pairs
from streammega.dataset.manifest import Shard
from streammega.dataset.provenance import ENDING, has_provenance
from streammega.dataset.shards import strip_suffix
from streammega.errors import ConvertError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize

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


def check_all_done(numbers: Sequence[int], done: Collection[int]) -> None:
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
    counts: dict[str, int] = {}
    messages: list[str] = []
    for record in records:
        messages += record.messages
        for reason, count in record.counts.items():
            counts[reason] = counts.get(reason, 0) + count
    told = [f"; {count_of(reason, count)}" for reason, count in sorted(counts.items())]
    told += [f"\n  {message}" for message in messages[:3]]
    return "".join(told)


def tell_of_origins(inputs: Sequence[Input], storage: StorageConfig) -> None:
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


def tell_of_ids(id_field: str, shards: Sequence[Shard]) -> None:
    """Say that no document has the id that was asked for: a record may lack it, not all."""
    if any(shard.documents for shard in shards):
        log.warning(
            "no record has a text or number in %r (--id-field), so no document can be found or "
            "skipped by its id; is the field mistyped?",
            id_field,
        )
