"""Texts of shards, tokenised as they come and cut into samples, from any position on: a lane of a
TextStream.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import FieldsConfig, StorageConfig
from streammega.config.validate import parse_json
from streammega.errors import ConfigError, FormatError, StateError
from streammega.errors.cached_property import cached_property
from streammega.kernels.keyed import GOLDEN, mix
from streammega.storage.file_system import open_file
from streammega.storage.open import is_hidden_member
from streammega.storage.tar_members import open_tar, read_members

Ids = NDArray[np.int64]

MAX_TEXT_BYTES = 1 << 30
"""The largest member of a tar that is read, as of `convert`: a few packed bytes may become very many."""


class TextPosition(NamedTuple):
    """A token of a lane: number `token` of text `text` of shard `shard`. Shards are numbered on through
    all passes.

    digest: of the ids of that text, which must be the same when a run goes on; empty at the start.
    """

    shard: int = 0
    text: int = 0
    token: int = 0
    digest: str = ""


class TokenizedText:
    """The ids of one text, and which one it is."""

    def __init__(self, ids: Ids, shard: int, text: int) -> None:
        self.ids = ids
        self._shard = shard
        self._text = text

    def position(self, token: int) -> TextPosition:
        """The position of one of its tokens."""
        return TextPosition(shard=self._shard, text=self._text, token=token, digest=self.digest)

    @cached_property
    def digest(self) -> str:
        """A digest of all ids. A text in which no sample begins does not need it."""
        return hashlib.blake2b(self.ids.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TextSamples:
    """Samples of S + 1 ids of a lane, a pure function of its shards, from any position on. The last
    id of a sample is the first of the next one.

    passes: how often all shards are gone through; None: without an end.
    """

    shards: tuple[str, ...]
    texts: Callable[[str], Iterable[str]]
    encode: Callable[[str], Sequence[int]]
    fields: FieldsConfig
    seed: int | None
    passes: int | None

    def samples(self, start: TextPosition) -> Iterator[tuple[Ids, TextPosition]]:
        """(ids [S + 1], where the next sample begins), from a position on."""
        length = self.fields.sequence_length
        open_texts: deque[TokenizedText] = deque()
        token = start.token  # of the first open text, at which the next sample begins
        num_ids = -token
        for text in self._tokenized(start):
            open_texts.append(text)
            num_ids += len(text.ids)
            while num_ids > length:
                ids = _join(open_texts, token, length + 1)
                token += length
                num_ids -= length
                while token >= len(open_texts[0].ids):
                    token -= len(open_texts.popleft().ids)
                yield ids, open_texts[0].position(token)

    def _tokenized(self, start: TextPosition) -> Iterator[TokenizedText]:
        """All texts from that of a position on. Raises StateError where that one has changed."""
        must_check = bool(start.digest)
        shards_without_ids = 0  # since the last id
        for shard, name in self._named_shards(start.shard):
            shards_without_ids += 1
            skipped = start.text if shard == start.shard else 0
            for number, text in enumerate(self.texts(name)):
                if number < skipped:
                    continue
                tokenized = TokenizedText(self._encode(text), shard, number)
                if must_check and tokenized.digest != start.digest:
                    raise StateError(
                        f"text {number} of {name} has other ids than when the state was saved; "
                        "go on with the same shards and tokenizer, or begin without the state"
                    )
                must_check = False
                if len(tokenized.ids):
                    shards_without_ids = 0
                    yield tokenized
            if must_check:
                raise StateError(
                    f"{name} has no text number {start.text}, at which the state stops; "
                    "the shard is another than when the state was saved"
                )
            # `>`, because reading began within a shard and skipped the texts before that point
            if shards_without_ids > len(self.shards):
                raise FormatError(
                    f"none of the {len(self.shards)} shards has a text with an id; the first shard "
                    f"is {self.shards[0]}"
                )

    def _named_shards(self, start: int) -> Iterator[tuple[int, str]]:
        """(number, name) of the shards from number `start` on. Numbers go on through all passes, and each
        pass has an order of its own.
        """
        count = len(self.shards)
        passes = sys.maxsize if self.passes is None else self.passes
        for pass_number in range(start // count, passes):
            for number, shard in enumerate(self._order(pass_number), pass_number * count):
                if number >= start:
                    yield number, self.shards[shard]

    def _order(self, pass_number: int) -> Sequence[int]:
        """The indices of the shards in the order of a pass."""
        count = len(self.shards)
        if self.seed is None:
            return range(count)
        key = mix(mix(np.array([self.seed], np.uint64)) + np.uint64(pass_number))
        draws = mix(key + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
        order: list[int] = np.argsort(draws, kind="stable").tolist()
        return order

    def _encode(self, text: str) -> Ids:
        """The ids of a text, with eod_id after them unless there are none."""
        ids = np.asarray(self.encode(text))
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ConfigError(
                f"encode returned {ids.dtype} of shape {ids.shape}; it must return a flat list of ids"
            )
        ids = ids.astype(np.int64)
        if self.fields.eod_id is None or not len(ids):
            return ids
        return np.append(ids, self.fields.eod_id)


def _join(texts: Iterable[TokenizedText], token: int, count: int) -> Ids:
    """`count` ids from a token of the first text on."""
    parts: list[Ids] = []
    for text in texts:
        parts.append(text.ids[token : token + count])
        count -= len(parts[-1])
        token = 0
        if not count:
            break
    return np.concatenate(parts)


def webdataset_texts(
    field: str = "txt", *, key: str = "text", storage: StorageConfig | None = None
) -> Callable[[str], Iterator[str]]:
    """A function that gives the texts of a tar shard of webdataset, by its path or URL, in order.

    field: the suffix of the members that are texts; "json" ones are objects with the text under
    `key`. Hidden members are left out: of macOS, with a dot, notes of webdataset. Compressed tars
    are read too. It raises FormatError for what is no such shard, and what storage raises.
    """
    from_json = field.endswith("json")

    def texts(url: str) -> Iterator[str]:
        """The texts of one shard. Raises FormatError, and what storage raises."""
        with open_file(url, storage or StorageConfig()) as file:
            try:
                for data in _members(file, f".{field}"):
                    yield parse_json(data)[key] if from_json else data.decode()
            except (tarfile.TarError, EOFError, KeyError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{url}: no texts in .{field} members of a tar: {type(error).__name__}: {error}"
                ) from None

    return texts


def _members(file: Any, suffix: str) -> Iterator[bytes]:
    """The contents of the regular members of this suffix; hidden ones are left out."""
    # as a stream: nothing is sought, so that objects are read once and ahead
    with open_tar(file) as tar:
        for member in read_members(tar):
            name = member.name
            if not member.isreg() or not name.endswith(suffix) or is_hidden_member(name):
                continue
            if member.issparse() or member.size > MAX_TEXT_BYTES:
                raise tarfile.ReadError(f"{member.name} claims {member.size:,} bytes")
            content = tar.extractfile(member)
            assert content is not None  # it is a regular file
            yield content.read()
