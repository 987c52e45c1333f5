"""Texts of shards, tokenised as they come and cut into samples, from any place on: what a TextStream
gives, without its ranks and batches.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import FieldsConfig, StorageConfig
from streammega.errors import ConfigError, FormatError, StateError
from streammega.kernels.stream import GOLDEN, mix
from streammega.storage.open import open_file

Ids = NDArray[np.int64]


def webdataset_texts(
    field: str = "txt", *, key: str = "text", storage: StorageConfig | None = None
) -> Callable[[str], Iterator[str]]:
    """A function that gives the texts of a tar shard of webdataset, by its path or URL, in order.

    field: the suffix of the members that are texts; "json" ones are objects with the text under
    `key`. Compressed tars are read too. It raises FormatError for what is no such shard, and what
    storage raises.
    """
    from_json = field.endswith("json")

    def texts(url: str) -> Iterator[str]:
        """The texts of one shard. Raises FormatError, and what storage raises."""
        with open_file(url, storage or StorageConfig()) as file:
            try:
                for data in _members(file, f".{field}"):
                    yield json.loads(data)[key] if from_json else data.decode()
            except (tarfile.TarError, EOFError, KeyError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{url}: no texts in .{field} members of a tar: {type(error).__name__}: {error}"
                ) from None

    return texts


def _members(file: Any, suffix: str) -> Iterator[bytes]:
    """The contents of the regular members of this suffix; webdataset's own notes are left out."""
    # as a stream: nothing is sought, so that objects are read once and ahead
    with tarfile.open(fileobj=file, mode="r|*", tarinfo=StrictHeader) as tar:
        for member in tar:
            if (
                not member.isreg()
                or member.name.startswith("__")
                or not member.name.endswith(suffix)
            ):
                continue
            content = tar.extractfile(member)
            assert content is not None  # it is a regular file
            yield content.read()
            vars(tar)["members"].clear()  # or the headers of a whole shard stay


class StrictHeader(tarfile.TarInfo):
    """A header of a tar that ends with a block of zeros, as every whole one does.

    tarfile takes any other block that is no header for the end of the archive too: of one that was
    cut, or is damaged, the rest would be left out without a word.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> StrictHeader:
        """Raises ReadError for what is neither a header nor zeros."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise tarfile.ReadError(f"it was cut or is damaged: {error}") from None


@dataclass(frozen=True, kw_only=True)
class TextPlace:
    """A token of the stream: of shard number `shard`, counted on through all passes, token `token`
    of text `text`.

    digest: of the ids of that text, which must be the same when a run goes on.
    """

    shard: int = 0
    text: int = 0
    token: int = 0
    digest: str = ""


class TokenizedText:
    """The ids of one text, and where it stands."""

    def __init__(self, place: TextPlace, ids: Ids) -> None:
        self.ids = ids
        self._place = place

    def place(self, token: int) -> TextPlace:
        """The place of one of its tokens."""
        return replace(self._place, token=token, digest=self.digest)

    @cached_property
    def digest(self) -> str:
        """Of all its ids. Of texts in which no sample begins nobody asks."""
        return hashlib.blake2b(self.ids.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TextSamples:
    """Samples of S + 1 ids, a pure function of the shards, from any place on. The last id of a
    sample is the first of the next one.

    passes: how often all shards are gone through; None: without an end.
    """

    shards: tuple[str, ...]
    texts: Callable[[str], Iterable[str]]
    encode: Callable[[str], Sequence[int]]
    fields: FieldsConfig
    seed: int | None
    passes: int | None

    def global_batches(
        self, place: TextPlace, first_rows: int, rows: int
    ) -> Iterator[tuple[Ids, list[TextPlace]]]:
        """(ids [rows, S + 1], the place after each row): whole global batches, of which the first
        lacks what was handed out before.
        """
        samples = self.samples(place)
        for size in itertools.chain([first_rows], itertools.repeat(rows)):
            taken = list(itertools.islice(samples, size))
            if len(taken) < size:
                return
            yield np.stack([ids for ids, _ in taken]), [after for _, after in taken]

    def samples(self, place: TextPlace) -> Iterator[tuple[Ids, TextPlace]]:
        """(ids [S + 1], where the next sample begins), from a place on."""
        length = self.fields.sequence_length
        open_texts: deque[TokenizedText] = deque()
        token = place.token  # of the first open text, at which the next sample begins
        held = -token
        for text in self._tokenized(place):
            open_texts.append(text)
            held += len(text.ids)
            while held > length:
                ids = _join(open_texts, token, length + 1)
                token += length
                held -= length
                while token >= len(open_texts[0].ids):
                    token -= len(open_texts.popleft().ids)
                yield ids, open_texts[0].place(token)

    def _tokenized(self, place: TextPlace) -> Iterator[TokenizedText]:
        """All texts from that of a place on. Raises StateError where that one is another now."""
        to_be_checked = bool(place.digest)
        without_ids = 0  # shards since the last id
        for number, name in self._named_shards(place.shard):
            without_ids += 1
            skipped = place.text if number == place.shard else 0
            for position, text in enumerate(self.texts(name)):
                if position < skipped:
                    continue
                tokenized = TokenizedText(TextPlace(shard=number, text=position), self._ids(text))
                if to_be_checked:
                    _check_text(tokenized, place, name)
                    to_be_checked = False
                if len(tokenized.ids):
                    without_ids = 0
                    yield tokenized
            if to_be_checked:
                raise StateError(
                    f"{name} has no text number {place.text}, at which the state stops; "
                    "the shard is another than when the state was saved"
                )
            # of the shard that it began in, a part was passed over
            if without_ids > len(self.shards):
                raise FormatError(
                    f"there is no text with an id in any of {len(self.shards)} shards, of which "
                    f"the first is {self.shards[0]}"
                )

    def _named_shards(self, start: int) -> Iterator[tuple[int, str]]:
        """Numbers and names of the shards from number `start` on."""
        count = len(self.shards)
        for pass_number in itertools.count(start // count):
            if self.passes is not None and pass_number >= self.passes:
                return
            for position, shard in enumerate(self._order(pass_number)):
                number = pass_number * count + position
                if number >= start:
                    yield number, self.shards[shard]

    def _order(self, pass_number: int) -> Sequence[int]:
        """The shards in the order of a pass."""
        count = len(self.shards)
        if self.seed is None:
            return range(count)
        key = mix(mix(np.array([self.seed], np.uint64)) + np.uint64(pass_number))
        draws = mix(key + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
        order: list[int] = np.argsort(draws, kind="stable").tolist()
        return order

    def _ids(self, text: str) -> Ids:
        ids = np.asarray(self.encode(text))
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ConfigError(
                f"encode gave {ids.dtype} of shape {ids.shape}; it makes a text a list of ids"
            )
        ids = ids.astype(np.int64)
        if self.fields.eod_id is None or not len(ids):
            return ids
        return np.append(ids, self.fields.eod_id)


def _join(texts: deque[TokenizedText], token: int, count: int) -> Ids:
    """`count` ids from a token of the first text on."""
    joined = np.empty(count, np.int64)
    filled = 0
    for text in texts:
        part = text.ids[token : token + count - filled]
        joined[filled : filled + len(part)] = part
        filled += len(part)
        token = 0
        if filled == count:
            break
    return joined


def _check_text(text: TokenizedText, place: TextPlace, name: str) -> None:
    if text.digest != place.digest:
        raise StateError(
            f"text {place.text} of {name} has other ids than when the state was saved; "
            "go on with the same shards and tokenizer, or begin without the state"
        )
