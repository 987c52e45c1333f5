"""What a conversion made, as figures, text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import streammega
from streammega.convert.job import UnitRecord
from streammega.convert.read.source import Skipped
from streammega.errors.words import without_controls

SHOWN_MESSAGES = 10
"""Faults that are shown on a terminal; the JSON has all that were kept."""
KEPT_MESSAGES = 10_000
"""Faults that are kept, of a corpus that may have millions."""
MIN_SECONDS = 1e-9
"""Seconds, for speeds of what took none."""


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """Documents and tokens written; `dropped`: what happened to others, by reason; histogram: bin b
    has [2^b, 2^(b+1)) tokens.

    inputs: path, format and bytes of each. files_passed_over: files that were found and not read,
    by reason; names_passed_over: the first of each. members_left_out: of archives, by their suffix,
    or what they are. eod_in_texts: end-of-document tokens that texts spell. packing: the fields of
    PackingStats; {} without bins. tokens counts padding too, and one token behind each shard.
    shard_prefixes: of the files of each shard, which Megatron's own reader takes where they are
    pairs.
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
    eod_in_texts: int = 0
    packing: dict[str, int] = field(default_factory=dict)
    shard_prefixes: list[str] = field(default_factory=list)

    @property
    def megatron_prefix(self) -> str | None:
        """What Megatron's own reader takes, the first and the last of several; None where it is the
        prefix of the dataset, or it reads no such shards.
        """
        if self.format != "bin" or self.shard_prefixes == [self.prefix]:
            return None
        ends = dict.fromkeys([*self.shard_prefixes[:1], *self.shard_prefixes[-1:]])
        return " ... ".join(ends) or None

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
        seconds = max(self.seconds, MIN_SECONDS)
        shown = self.messages[:SHOWN_MESSAGES]
        return {
            "dataset": self.prefix,
            "megatron_prefix": self.megatron_prefix,
            **{name: getattr(self, name) for name in names},
            "stored_bytes": self.stored_bytes,
            "compression": self.compression if self.format == "zst" else None,
            "mean_tokens": round(self.tokens / max(1, self.documents)),
            "tokens_per_second": round(self.tokens / seconds),
            "text_bytes_per_second": round(self.text_bytes / seconds),
            "left_out": [without_controls(message) for message in shown],
            "left_out_too": len(self.messages) - len(shown) or None,
            "dropped": self.dropped,
            "eod_in_texts": self.eod_in_texts or None,
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
        total.eod_in_texts += record.skipped.eod_in_texts
        total.messages += record.skipped.messages[:room]
    return total
