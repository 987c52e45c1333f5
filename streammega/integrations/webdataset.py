"""webdataset: a loader as the source of a pipeline, and training on texts that are tokenised as they
come.

    pipeline = wds.DataPipeline(loader_stage(loader), wds.map(to_device))

    stream = TextStream(
        ["s3://bucket/texts-000.tar", "s3://bucket/texts-001.tar"],
        lambda text: tokenizer.encode(text).ids,
        sm.FieldsConfig(sequence_length=4096, eod_id=0),
        micro_batch_size=4,
        global_batch_size=64,
    )

`TextStream` has the batches and the exact resume of a StreamLoader, and not its reads: every rank
reads and tokenises all texts, so that all of them know where every sample begins. `streammega
convert` does that once, and for all runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from streammega.config import FieldsConfig
from streammega.errors import ConfigError, FormatError, StateError
from streammega.integrations.read_ahead import ReadAhead
from streammega.integrations.text_samples import TextPlace, TextSamples, webdataset_texts
from streammega.loading import StreamLoader
from streammega.loading.iterate import Iteration
from streammega.order.schedule import TrainingSchedule
from streammega.order.state import canonical_json, describe_differences
from streammega.samples.fields import Batch, batch_fields

__all__ = ["TextStream", "loader_stage", "webdataset_texts"]

log = logging.getLogger(__name__)

STATE_VERSION = 1
COUNTS = ("consumed_samples", "batch_offset", "shard", "text", "token")
OF_DATASETS = (
    "skip_documents",
    "skip_samples",
    "phases",
    "follow",
    "blend_schedule",
    "inter_document_masking",
    "dataset_ids",
    "balance_batches",
)
"""Settings of a DataConfig, which has the fields of a FieldsConfig too, that texts have no use for
but that change what is trained on.
"""


def loader_stage(loader: StreamLoader) -> Callable[[], Iterator[Batch]]:
    """The first stage of a `wds.DataPipeline`: the micro-batches of a loader, from where iterating
    it begins.

    The position is the loader's: save its state beside the model. Stages that read ahead, or give
    batches in another order, are not in it.
    """

    def batches() -> Iterator[Batch]:
        """An iteration of the loader, for webdataset, which calls its first stage."""
        return iter(loader)

    return batches


class TextStream:
    """Micro-batches of this rank, of texts that are tokenised as they come: the fields that
    `batch_fields` makes, each [micro_batch_size, S].

    Texts follow each other, each with `fields.eod_id` behind it if there is one, and are cut into
    samples of S tokens. A global batch is the same on any number of ranks, of which rank r takes
    the samples r, r + dp_size, ... of each micro-step. The stream ends with the last whole global
    batch.

    Iterating goes on from the cursor; after the end of the data, at the first sample. `next` takes
    from the iteration that runs. One that is held while another begins, or while the stream is
    moved or closed, raises StateError.

    Args:
        shards: names of what texts are read from, the same on every rank.
        encode: a text as ids, without any special ones around them.
        fields: sequence length, the id that ends documents, and which fields are wanted.
        micro_batch_size, global_batch_size, dp_rank, dp_size: as in StreamLoader.
        texts: the texts of a shard, by its name, the same at every call; None: those of tar shards
            with .txt members, by `webdataset_texts()`.
        seed: shuffles the shards of every pass by itself; None: they stay in order.
        passes: how often the shards are gone through; None: without an end.

    Raises ConfigError for settings that do not fit; FormatError and what storage raises, for the
    shards, when a batch is asked for.
    """

    def __init__(
        self,
        shards: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        fields: FieldsConfig,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        texts: Callable[[str], Iterable[str]] | None = None,
        seed: int | None = None,
        passes: int | None = None,
    ) -> None:
        TrainingSchedule(global_batch_size=global_batch_size).check(
            micro_batch_size, dp_rank, dp_size
        )
        _check_fields(fields)
        if isinstance(shards, str) or not shards:
            raise ConfigError(f"shards is {shards!r}; it takes a list of names, at least one")
        if passes is not None and passes < 1:
            raise ConfigError(f"passes is {passes}; it must be at least 1, or None for no end")
        self._samples = TextSamples(
            shards=tuple(map(str, shards)),
            texts=texts or webdataset_texts(),
            encode=encode,
            fields=fields,
            seed=seed,
            passes=passes,
        )
        self._step_samples = micro_batch_size * dp_size
        self._global_batch_size = global_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._running: Iteration | None = None
        self._go_to_the_start()

    def __iter__(self) -> Iterator[Batch]:
        self._stop("another iteration of its stream began, and one stream has one cursor")
        if self._has_ended:
            self._go_to_the_start()
        return self._begin()

    def __next__(self) -> Batch:
        running = self._running
        if running is None or not running.goes_on:
            running = self._begin()
        return next(running)

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks."""
        return self._consumed

    def state_dict(self) -> dict[str, Any]:
        """Where to go on, the same on every rank, flat and JSON-able: shard, text and token, and
        what they count in. Counts what was handed out, never what was read ahead.
        """
        return {
            "version": STATE_VERSION,
            "consumed_samples": self._consumed,
            "batch_offset": self._offset,
            "shard": self._place.shard,
            "text": self._place.text,
            "token": self._place.token,
            "text_digest": self._place.digest,
            "identity": canonical_json(self._identity()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what was handed out when the state was taken, on any number of ranks.

        Raises StateError for a damaged state, one of other shards or settings, or one that these
        ranks cannot go on from, and changes nothing. Whether the text in which it stops is still
        the same shows when the first batch is asked for.
        """
        consumed, offset, place = self._parse(state)
        self._go_to(consumed, offset, place)
        self._stop("load_state_dict moved its stream elsewhere")

    def close(self) -> None:
        """End the running iteration and its thread. `next` and `iter` begin another."""
        self._stop("its stream was closed")

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        samples = self._samples
        names = "\n".join(samples.shards).encode()
        return {
            "order": "texts",
            "shards": hashlib.blake2b(names, digest_size=16).hexdigest(),
            "num_shards": len(samples.shards),
            "sequence_length": samples.fields.sequence_length,
            "eod_id": samples.fields.eod_id,
            "seed": samples.seed,
        }

    def _parse(self, state: Mapping[str, Any]) -> tuple[int, int, TextPlace]:
        consumed, offset, shard, text, token = self._read(state, COUNTS, {"text_digest"})
        digest = state["text_digest"]
        if type(digest) is not str:
            raise StateError("text_digest of the state is no text; it is damaged")
        place = TextPlace(shard=shard, text=text, token=token, digest=digest)
        return consumed, offset, place

    def _read(self, state: Mapping[str, Any], counts: Sequence[str], others: set[str]) -> list[int]:
        """The counts of a state, which also has `others`. Raises StateError for what is no state of
        this stream, or one that its ranks cannot go on from.
        """
        wanted = {"version", *counts, *others, "identity"}
        if not isinstance(state, Mapping) or not wanted <= set(state):
            raise StateError(
                f"this is no state of a {type(self).__name__}, which has "
                f"{', '.join(sorted(wanted))}; pass what its state_dict() returned"
            )
        if state["version"] != STATE_VERSION:
            raise StateError(
                f"the state has version {state['version']!r}, this release reads {STATE_VERSION}"
            )
        found = [state[name] for name in counts]
        if any(type(count) is not int or count < 0 for count in found):
            raise StateError(f"{', '.join(counts)} of the state are not counts; it is damaged")
        self._check_identity(state["identity"])
        self._check_offset(state["batch_offset"])
        return found

    def _check_identity(self, text: Any) -> None:
        try:
            saved = json.loads(text)
        except (TypeError, ValueError):
            raise StateError("identity of the state is no JSON; it is damaged") from None
        differences = describe_differences(saved, self._identity())
        if differences:
            raise StateError(
                "the state counts samples of other texts:\n  "
                + "\n  ".join(differences)
                + "\nrestore these settings, or begin without the state"
            )

    def _check_offset(self, offset: int) -> None:
        left = self._global_batch_size - offset
        if left <= 0 or left % self._step_samples:
            raise StateError(
                f"the state stops {offset} samples into a global batch, of which "
                f"{self._global_batch_size} are no whole micro-steps of {self._step_samples}; resume "
                "with the former sizes and ranks, or from a state between global batches"
            )

    def _go_to_the_start(self) -> None:
        self._go_to(0, 0, TextPlace())

    def _go_to(self, consumed: int, offset: int, place: TextPlace) -> None:
        self._consumed = consumed
        self._offset = offset  # into the global batch
        self._place = place
        self._has_ended = False

    def _stop(self, reason: str) -> None:
        running = self._running
        self._running = None
        if running is not None:
            running.stop(reason)

    def _begin(self) -> Iteration:
        self._running = Iteration(self._batches())
        return self._running

    def _batches(self) -> Generator[Batch, None, None]:
        first_rows = self._global_batch_size - self._offset
        was_put = self._consumed
        ahead = ReadAhead(
            self._samples.global_batches(self._place, first_rows, self._global_batch_size)
        )
        try:
            for ids, places in ahead:
                for start in range(0, len(ids), self._step_samples):
                    stop = start + self._step_samples
                    rows = ids[start + self._dp_rank : stop : self._dp_size]
                    batch = batch_fields(rows, None, self._samples.fields, bounds=True)
                    self._count_a_step()
                    self._place = places[stop - 1]
                    yield batch
        finally:
            ahead.stop()
        self._ended(was_put)

    def _count_a_step(self) -> None:
        """Note that a micro-step was handed out."""
        self._consumed += self._step_samples
        self._offset = (self._offset + self._step_samples) % self._global_batch_size

    def _ended(self, was_put: int) -> None:
        self._has_ended = True
        if self._consumed:
            if self._consumed == was_put:
                log.warning(
                    "the position that was set, sample %d, is the end of the texts, so this "
                    "iteration gives nothing; the next begins at the first sample",
                    was_put,
                )
            return
        raise FormatError(
            f"the texts of {len(self._samples.shards)} shards are less than one global batch of "
            f"{self._global_batch_size} samples of {self._samples.fields.sequence_length} tokens"
        )


def _check_fields(fields: FieldsConfig) -> None:
    """Raise ConfigError for settings of datasets, which would be passed over without a word."""
    for name in OF_DATASETS:
        if getattr(fields, name, None):
            raise ConfigError(
                f"{name} is of datasets, and a stream of texts that are tokenised as they come has "
                "none: give it a FieldsConfig, or convert the texts (streammega convert)"
            )
