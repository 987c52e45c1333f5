"""Which documents are kept of those that were read, and how much of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import Tokens, bounds_of
from streammega.convert.job import Job, UnitRecord
from streammega.convert.write.encoders import eod_of


class Selection:
    """Leaves out, and cuts, what the options ask; the record counts what happened to documents."""

    def __init__(self, job: Job, record: UnitRecord) -> None:
        self._job = job
        self._options = job.options
        self._record = record

    def choose(self, batch: Tokens) -> tuple[Tokens, NDArray[np.bool_]]:
        """(what is kept of documents, which of them are kept)."""
        options = self._options
        kept = self._answered(batch)
        if options.modes is not None:
            batch = self._sequences_of_modes(batch, options.modes)
        sizes = batch.document_tokens
        self._count("empty", sizes == 0)
        kept &= sizes > 0
        is_short = kept & (sizes < options.min_tokens)
        self._count("too short", is_short)
        kept &= ~is_short
        if options.max_tokens is None:
            return batch.take(kept), kept
        is_long = kept & (sizes > options.max_tokens)
        if options.long == "drop":
            self._count("too long", is_long)
            kept &= ~is_long
            return batch.take(kept), kept
        self._count("cut", is_long)
        batch = batch.take(kept)
        if is_long.any():
            batch = self._cut(batch, options.max_tokens)
        return batch, kept

    def _answered(self, batch: Tokens) -> NDArray[np.bool_]:
        """Which documents have something to learn; all that are not conversations."""
        learned = self._options.learned_modes
        if not self._options.chat or batch.modes is None or learned is None:
            return np.ones(len(batch.documents), np.bool_)
        is_learned = np.isin(batch.modes, learned) & (batch.lengths > 0)
        answered = np.diff(bounds_of(is_learned)[bounds_of(batch.documents)]) > 0
        self._count("without an answer", ~answered & (batch.document_tokens > 0))
        return answered

    def _sequences_of_modes(self, batch: Tokens, wanted: tuple[int, ...]) -> Tokens:
        modes = batch.modes
        if modes is None:
            modes = np.zeros(len(batch.lengths), np.int8)
        kept = np.isin(modes, wanted)
        self._count("sequences of other modes", ~kept)
        return batch if kept.all() else batch.take_sequences(kept)

    def _cut(self, batch: Tokens, most: int) -> Tokens:
        tokens_before = len(batch.tokens)
        batch = batch.cut(most, eod_of(self._job))
        self._record.count("tokens cut off", tokens_before - len(batch.tokens))
        return batch

    def _count(self, reason: str, which: NDArray[np.bool_]) -> None:
        self._record.count(reason, int(np.count_nonzero(which)))
