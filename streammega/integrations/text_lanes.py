"""Texts that are tokenised as they come, by lanes of shards: each rank reads and tokenises its own.

stream = LanedTextStream(shards, encode, fields, lanes=64, **sizes)
state = join_states(json.loads(path.read_text()) for path in folder.glob("rank-*.json"))
stream.load_state_dict(state)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from streammega.config import FieldsConfig
from streammega.errors import ConfigError, StateError
from streammega.integrations.read_ahead import ReadAhead
from streammega.integrations.text_samples import Ids, TextPlace, TextSamples
from streammega.integrations.webdataset import STATE_VERSION, TextStream
from streammega.order.state import canonical_json
from streammega.samples.fields import Batch, batch_fields

COUNTS = ("consumed_samples", "batch_offset")


class LanedTextStream(TextStream):
    """A TextStream without an end, of which every rank reads and tokenises only its part.

    Lane l has the shards l, l + lanes, ..., again and again, and a sequence of samples of its own;
    sample n of the stream is the next one of lane n modulo `lanes`. So global batches are the same
    on any number of ranks that divides `lanes`, and rank r reads the lanes r, r + dp_size, ...
    alone. A lane of less text comes around sooner: use shards of about the same size.

    A rank knows where its own lanes are: its state has these. To go on with other ranks, or at all,
    give each the states of all by `join_states`.

    Args:
        lanes: a multiple of dp_size, no more than there are shards. Part of the order: it stays
            when a run goes on.
        The others are those of TextStream; `passes` is none.
    """

    def __init__(
        self,
        shards: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        fields: FieldsConfig,
        *,
        lanes: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        texts: Callable[[str], Iterable[str]] | None = None,
        seed: int | None = None,
    ) -> None:
        if lanes < 1 or lanes % dp_size or lanes > len(shards):
            raise ConfigError(
                f"lanes is {lanes}; it must be a multiple of dp_size, which is {dp_size}, and at "
                f"most the number of shards, {len(shards)}"
            )
        self._lanes = lanes
        self._own = range(dp_rank, lanes, dp_size)
        super().__init__(
            shards,
            encode,
            fields,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            texts=texts,
            seed=seed,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the lanes of this rank go on, flat and JSON-able, some 50 bytes a lane;
        `join_states` makes one of those of all ranks.
        """
        return {
            "version": STATE_VERSION,
            "consumed_samples": self._consumed,
            "batch_offset": self._offset,
            "places": write_places(self._places),
            "identity": canonical_json(self._identity()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what was handed out when the states were taken that `state` was joined of.

        Raises StateError as TextStream does, and for one that lacks lanes of this rank; changes
        nothing then.
        """
        consumed, offset = self._read(state, COUNTS, {"places"})
        places = read_places(state["places"])
        missing = [lane for lane in self._own if lane not in places]
        if missing:
            raise StateError(
                f"the state lacks {len(missing)} of {len(self._own)} lanes of this rank, the first "
                f"of them {missing[0]}: it is that of other ranks; give join_states those of all"
            )
        self._consumed = consumed
        self._offset = offset
        self._places = {lane: places[lane] for lane in self._own}
        self._stop("load_state_dict moved its stream elsewhere")

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"lanes": self._lanes}

    def _go_to_the_start(self) -> None:
        super()._go_to_the_start()
        self._places = dict.fromkeys(self._own, TextPlace())

    def _batches(self) -> Generator[Batch, None, None]:
        # a global batch ahead, as the stream that reads all lanes
        count = self._global_batch_size // self._step_samples
        ahead = ReadAhead(self._micro_batches(self._consumed, dict(self._places)), count)
        try:
            for ids, places in ahead:
                batch = batch_fields(ids, None, self._samples.fields, bounds=True)
                self._count_a_step()
                self._places |= places
                yield batch
        finally:
            ahead.stop()

    def _micro_batches(
        self, consumed: int, places: Mapping[int, TextPlace]
    ) -> Iterator[tuple[Ids, dict[int, TextPlace]]]:
        """(ids [micro_batch_size, S + 1], where the lanes that they are of go on), without an
        end.
        """
        lanes = {lane: self._lane(lane).samples(place) for lane, place in places.items()}
        while True:
            rows = []
            after: dict[int, TextPlace] = {}
            for number in range(
                consumed + self._dp_rank, consumed + self._step_samples, self._dp_size
            ):
                lane = number % self._lanes
                ids, after[lane] = next(lanes[lane])
                rows.append(ids)
            yield np.stack(rows), after
            consumed += self._step_samples

    def _lane(self, lane: int) -> TextSamples:
        return replace(self._samples, shards=self._samples.shards[lane :: self._lanes])


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of those of all ranks, taken after the same batch: what any number of ranks loads.

    Raises StateError where they were not, or are of other streams.
    """
    joined: dict[str, Any] = {}
    places: dict[int, TextPlace] = {}
    for state in states:
        if "places" not in state:
            raise StateError("join_states takes what state_dict() of a LanedTextStream returned")
        others = {name: value for name, value in state.items() if name != "places"}
        if joined and others != joined:
            differing = sorted(name for name in joined if joined[name] != others.get(name))
            raise StateError(
                f"the states that are joined differ in {', '.join(differing)}: they were not taken "
                "of one run after the same batch"
            )
        joined = others
        places |= read_places(state["places"])
    if not joined:
        raise StateError("there is no state to join")
    return joined | {"places": write_places(places)}


def write_places(places: Mapping[int, TextPlace]) -> str:
    """The places of lanes, by their numbers, as a short text of JSON."""
    fields = {lane: astuple(place) for lane, place in sorted(places.items())}
    return json.dumps(fields, separators=(",", ":"))


def read_places(text: Any) -> dict[int, TextPlace]:
    """What `write_places` wrote. Raises StateError for a damaged text."""
    try:
        read = json.loads(text)
        return {int(lane): _read_place(*fields) for lane, fields in read.items()}
    except (AttributeError, TypeError, ValueError):
        raise StateError("places of the state are no places of lanes; it is damaged") from None


def _read_place(shard: Any, text: Any, token: Any, digest: Any) -> TextPlace:
    """The place of these fields. Raises ValueError for what is none."""
    if any(type(count) is not int or count < 0 for count in (shard, text, token)):
        raise ValueError("no counts")
    if type(digest) is not str:
        raise ValueError("no digest")
    return TextPlace(shard=shard, text=text, token=token, digest=digest)
