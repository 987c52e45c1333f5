"""webdataset: a loader as the first stage of a pipeline, and training on texts that are tokenised as
they come, with the batches and the exact resume of a StreamLoader.

    pipeline = wds.DataPipeline(loader_stage(loader), wds.map(to_device))

    stream = TextStream(
        ["s3://bucket/texts-000.tar", "s3://bucket/texts-001.tar"],
        lambda text: tokenizer.encode(text).ids,
        sm.FieldsConfig(sequence_length=4096, eod_id=0),
        micro_batch_size=4,
        global_batch_size=64,
    )

For more than one pass convert the texts once, by `streammega convert`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from streammega.config import FieldsConfig
from streammega.config.columns import refuse_columns
from streammega.config.validate import parse_json, whole_number
from streammega.dataset.labels import list_names
from streammega.errors import ConfigError, FormatError, StateError
from streammega.errors.logs import get_logger
from streammega.integrations.text_samples import Ids, TextPosition, TextSamples, webdataset_texts
from streammega.loading import StreamLoader
from streammega.loading.iterate import Iteration
from streammega.loading.ranks import check_alone, data_parallel
from streammega.order.schedule import TrainingSchedule
from streammega.order.state import canonical_json, make_state, parse_state
from streammega.samples.fields import Batch, batch_fields
from streammega.storage.thread_pool import ordered_map

__all__ = ["TextStream", "join_states", "loader_stage", "webdataset_texts"]

log = get_logger(__name__)

POSITIONS = "positions"
"""The entry of a state that has the positions of lanes; the others are those of every loader's state."""
OF_DATASETS = ("exclude_documents", "exclude_samples", "phases", "inter_document_masking")
"""Settings of a DataConfig, which has the fields of a FieldsConfig too, that texts have no use for
but that change what is trained on.
"""


def loader_stage(loader: StreamLoader) -> Callable[[], Iterator[Batch]]:
    """The first stage of a `wds.DataPipeline`: it iterates the micro-batches of a loader.

    The loader keeps the position: save its state together with the model. The position does not
    account for later stages that read ahead or reorder batches.
    """

    def batches() -> Iterator[Batch]:
        """An iteration of the loader, for webdataset, which calls its first stage."""
        return iter(loader)

    return batches


class TextStream:
    """Micro-batches of this rank, of texts that are tokenised as they come: the fields that
    `batch_fields` makes, each [micro_batch_size, S].

    Texts follow each other, each with `fields.eod_id` after it if there is one, and are cut into
    samples of S tokens. A global batch is the same on any number of ranks. Rank r takes the samples
    r, r + dp_size, ... of each micro-step.

    With one lane every rank reads and tokenises all texts, so that all of them know where every
    sample begins. With more, lane l has the shards l, l + lanes, ..., and samples of its own;
    sample n of the stream is the next one of lane n modulo `lanes`. A rank then reads the lanes r,
    r + dp_size, ... alone. A lane of less text begins its next pass sooner: use shards of about the
    same size.

    A stream of one lane and some passes ends with the last whole global batch. Iterating goes on
    from the cursor; after the end of the data, at the first sample. `next` takes from the iteration
    that runs. One that is held while another begins, or while the stream is moved or closed, raises
    StateError.

    Args:
        shards: names of what texts are read from, the same on every rank.
        encode: a text as ids, without any special ones around them.
        fields: sequence length, the id that ends documents, and which fields are wanted.
        micro_batch_size, global_batch_size, dp_rank, dp_size: as in StreamLoader.
        lanes: one, or a multiple of dp_size, and no more than there are shards. Part of the order:
            it stays when a run goes on.
        texts: the texts of a shard, by its name, the same at every call; None: those of tar shards
            with .txt members, by `webdataset_texts()`.
        seed: shuffles the shards of every pass by itself; None: they stay in order.
        passes: how often the shards are gone through, with one lane; None: without an end.

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
        dp_rank: int | None = None,
        dp_size: int | None = None,
        lanes: int = 1,
        texts: Callable[[str], Iterable[str]] | None = None,
        seed: int | None = None,
        passes: int | None = None,
    ) -> None:
        self._is_rank_said = (dp_rank, dp_size) != (None, None)
        dp_rank, dp_size = data_parallel(dp_rank, dp_size)
        micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1)
        global_batch_size = whole_number("global_batch_size", global_batch_size, 1)
        lanes = whole_number("lanes", lanes)
        seed = None if seed is None else whole_number("seed", seed)
        passes = None if passes is None else whole_number("passes", passes)
        TrainingSchedule(global_batch_size=global_batch_size).check(
            micro_batch_size, dp_rank, dp_size
        )
        of_datasets = [name for name in OF_DATASETS if getattr(fields, name, None)]
        refuse_columns(fields, "texts that are tokenised as they come have no columns")
        if "dataset_id" in fields.field_names:
            of_datasets.append("dataset_id")
        if of_datasets:
            raise ConfigError(
                f"{of_datasets[0]} is of datasets, and a stream of texts that are tokenised as they come "
                "has none: give it a FieldsConfig without it, or convert the texts (streammega convert)"
            )
        if isinstance(shards, str) or not shards:
            raise ConfigError(f"shards is {shards!r}; it takes a list of names, at least one")
        if lanes < 1 or lanes > len(shards) or (lanes > 1 and lanes % dp_size):
            raise ConfigError(
                f"lanes is {lanes}; it must be 1, or a multiple of dp_size, which is {dp_size}, and "
                f"at most the number of shards, {len(shards)}"
            )
        if passes is not None and (passes < 1 or lanes > 1):
            raise ConfigError(
                f"passes is {passes}, and lanes is {lanes}; passes must be at least 1, or None for no end. "
                f"With several lanes it must be None, since they end at different samples"
            )
        self._texts = TextSamples(
            shards=tuple(map(str, shards)),
            texts=texts or webdataset_texts(),
            encode=encode,
            fields=fields,
            seed=seed,
            passes=passes,
        )
        self._lanes = lanes
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
        """Where the lanes of this rank go on, flat and JSON-able, some 50 bytes a lane. Counts what
        was handed out, never what was read ahead.

        With one lane it is the same on every rank; of several `join_states` makes one state.
        """
        state = make_state(
            self._identity(),
            self._consumed,
            self._offset,
            global_batch_size=self._global_batch_size,
        )
        return state | {POSITIONS: canonical_json(self._positions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what was handed out when the state was taken, on any number of ranks.

        Raises StateError for a damaged state, one of other shards or settings, one that lacks lanes
        of this rank, or one that these ranks cannot go on from, and changes nothing. Whether the
        text in which it stops is still the same shows when the first batch is asked for.
        """
        saved = parse_state(state)
        saved.check(self._identity())
        remaining = self._global_batch_size - saved.offset
        if remaining <= 0 or remaining % self._step_samples:
            raise StateError(
                f"the state stops {saved.offset} samples into a global batch of "
                f"{self._global_batch_size}; the remaining {remaining} are no whole micro-steps of "
                f"{self._step_samples}. Resume with the former sizes and ranks, or from a state between "
                "global batches"
            )
        positions = parse_positions(state.get(POSITIONS))
        lanes = self._lanes_of_rank(saved.consumed)
        missing = [lane for lane in lanes if lane not in positions]
        if missing:
            raise StateError(
                f"the state lacks {len(missing)} of {len(lanes)} lanes of this rank, the first of "
                f"them {missing[0]}: it is that of other ranks; give join_states those of all"
            )
        self._stop("load_state_dict moved its stream elsewhere")
        self._go_to(saved.consumed, saved.offset, {lane: positions[lane] for lane in lanes})

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has. Raises StateError while the stream has an iteration."""
        if self._running is not None:
            raise StateError(
                "a stream of texts cannot be pickled or copied while it has an iteration, which reads "
                "ahead; call close() first: both then go on at the cursor"
            )
        return self.__dict__

    def __copy__(self) -> TextStream:
        """As deepcopy: with a cursor of its own."""
        return copy.deepcopy(self)

    def close(self) -> None:
        """End the running iteration and its thread. `next` and `iter` begin another."""
        self._stop("its stream was closed")

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lanes_of_rank(self, consumed: int) -> range:
        """The lanes that have samples of this rank, from sample `consumed` on."""
        apart = math.gcd(self._lanes, self._dp_size)
        return range((consumed + self._dp_rank) % apart, self._lanes, apart)

    def _identity(self) -> dict[str, Any]:
        texts = self._texts
        names = "\n".join(texts.shards).encode()
        return {
            "order": "texts",
            "shards": hashlib.blake2b(names, digest_size=16).hexdigest(),
            "num_shards": len(texts.shards),
            "sequence_length": texts.fields.sequence_length,
            "eod_id": texts.fields.eod_id,
            "seed": texts.seed,
            "lanes": self._lanes,
        }

    def _go_to_the_start(self) -> None:
        self._go_to(0, 0, dict.fromkeys(self._lanes_of_rank(0), TextPosition()))

    def _go_to(self, consumed: int, offset: int, positions: dict[int, TextPosition]) -> None:
        self._consumed = consumed
        self._offset = offset  # into the global batch
        self._positions = positions  # of the lanes of this rank
        self._has_ended = False

    def _stop(self, reason: str) -> None:
        if self._running is not None:
            self._running.stop(reason)
            self._running = None

    def _begin(self) -> Iteration:
        if not self._is_rank_said:  # a process group may have come since then
            check_alone()
        self._running = Iteration(self._batches())
        return self._running

    def _batches(self) -> Generator[Batch, None, None]:
        start = self._consumed
        steps = self._micro_steps(start, self._offset, dict(self._positions))
        # one thread makes them in turn, a global batch ahead
        ahead = ordered_map(
            lambda _: next(steps, None),
            itertools.repeat(None),
            max_threads=1,
            ahead_items=self._global_batch_size // self._step_samples,
        )
        with closing(ahead):
            for ids, positions in iter(ahead.__next__, None):
                try:
                    batch = batch_fields(ids, None, self._texts.fields, bounds=True)
                except FormatError as error:
                    names = list_names(self._texts.shards)
                    raise FormatError(f"texts of {names}: {error}") from None
                self._consumed += self._step_samples
                self._offset = (self._offset + self._step_samples) % self._global_batch_size
                self._positions |= positions
                yield batch
        self._has_ended = True
        if not self._consumed:
            raise FormatError(
                f"the texts of {len(self._texts.shards)} shards are less than one global batch of "
                f"{self._global_batch_size} samples of {self._texts.fields.sequence_length} tokens"
            )
        if self._consumed == start:
            log.warning(
                "the position that was set, sample %d, is the end of the texts, so this iteration "
                "gives nothing; the next begins at the first sample",
                start,
            )

    def _micro_steps(
        self, consumed: int, offset: int, positions: Mapping[int, TextPosition]
    ) -> Iterator[tuple[Ids, dict[int, TextPosition]]]:
        """(ids [micro_batch_size, S + 1] of this rank, where its lanes go on), of whole global
        batches.
        """
        lanes = {lane: self._lane(lane).samples(position) for lane, position in positions.items()}
        remaining = self._global_batch_size - offset
        while True:
            global_batch = []
            for start in range(consumed, consumed + remaining, self._step_samples):
                rows: list[Ids] = []
                after: dict[int, TextPosition] = {}
                for place in range(self._step_samples):
                    lane = (start + place) % self._lanes
                    if lane not in lanes:
                        continue
                    sample = next(lanes[lane], None)
                    if sample is None:
                        return
                    ids, after[lane] = sample
                    if place % self._dp_size == self._dp_rank:
                        rows.append(ids)
                step = np.stack(rows), after
                if self._texts.passes is None:
                    yield step
                else:  # the texts may end within this global batch
                    global_batch.append(step)
            yield from global_batch
            consumed += remaining
            remaining = self._global_batch_size

    def _lane(self, lane: int) -> TextSamples:
        return replace(self._texts, shards=self._texts.shards[lane :: self._lanes])


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of those of all ranks, taken after the same batch: what any number of ranks loads.

    Raises StateError where they were not, or are of other streams.
    """
    first: Mapping[str, Any] | None = None
    positions: dict[int, TextPosition] = {}
    for state in states:
        if POSITIONS not in state:
            raise StateError("join_states takes what state_dict() of a TextStream returned")
        first = first or state
        others = {*first, *state} - {POSITIONS}
        differing = sorted(name for name in others if first.get(name) != state.get(name))
        if differing:
            raise StateError(
                f"the states that are joined differ in {', '.join(differing)}: they were not taken "
                "of one run after the same batch"
            )
        positions |= parse_positions(state[POSITIONS])
    if first is None:
        raise StateError("there is no state to join")
    return {**first, POSITIONS: canonical_json(positions)}


def parse_positions(text: Any) -> dict[int, TextPosition]:
    """The positions of lanes in a state, by the numbers of the lanes. Raises StateError for a damaged
    text.
    """
    try:
        positions = {
            int(lane): TextPosition._make(fields) for lane, fields in parse_json(text).items()
        }
        for *counts, digest in positions.values():
            if type(digest) is not str or any(type(n) is not int or n < 0 for n in counts):
                raise ValueError("no position")
    except (AttributeError, TypeError, ValueError):
        raise StateError("the state has positions that no lane can have; it is damaged") from None
    return positions
