"""Columns of a dataset, written while its samples are read: exactly once, on any number of ranks, through
kills.

    write ─► values in memory ─► state_dict: pieces in a folder ─► publish: objects of shards, manifest

A state says which samples are stored. What was stored after it is removed when it is loaded. So every
sample is in one piece when the data ends, however often ranks were killed.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from streammega.config import Column
from streammega.config.columns import check_name
from streammega.dataset import IndexedDataset
from streammega.dataset.columns import JOB, StoredColumn
from streammega.dataset.manifest import manifest_url
from streammega.errors import ConfigError, StateError
from streammega.errors.logs import get_logger
from streammega.loading import StreamLoader
from streammega.parallel.column_pieces import Piece, PieceFolder, StoredPieces, check_tiling
from streammega.parallel.column_publish import ColumnJoiner, ColumnManifest, Joined
from streammega.parallel.groups import has_cpu_backend
from streammega.parallel.rank_sync import RankSync
from streammega.samples.gpt import GPTDataset
from streammega.storage.open import resolved

log = get_logger(__name__)

Result = TypeVar("Result")
STATE_VERSION = 1
STATE_KEYS = {"version", "job", "run", "loader"}
HELD_BYTES = 256 << 20
"""Bytes of values in memory after which a rank stores them, before the next state."""
ROWS_AT_ONCE = 1 << 20
"""Sequences whose places are compared at once."""


class ColumnWriter:
    """Writes columns of the dataset that a loader reads.

        loader = sm.StreamLoader(config, ..., last="pad")
        writer = sm.ColumnWriter(loader, {"teacher_ids": sm.Column("uint16", 16)})
        # writer.load_state_dict(state), where a checkpoint has one
        for batch in loader:
            writer.write({"teacher_ids": ids})
            # state = writer.state_dict(), now and then
        writer.publish()

    Save its state in place of the loader's, after a barrier, and load it on any number of ranks.
    All ranks call each method at the same place of their programs: the first call of a new run,
    `load_state_dict` and `publish` wait for the other ranks.

    Of ranks that read the same samples, as those of a tensor-parallel group, one writes: give `group` where
    the loader has several data-parallel ranks. Without torch.distributed, ranks are processes that know
    nothing of each other: then write the first batch, or load a state, on rank 0 first, and publish on it
    last.

    Args:
        loader: of the sequential order with `last="pad"`, of whole samples. `exclude_documents` and
            `exclude_samples` are refused: a column has a value for every token.
        columns: each with its dtype. Width is 1, fill 0 and align "labels" by default: value i of a
            sample then belongs to the token that is label i.
        restart: remove what an earlier writer of the same columns has stored, and begin again. Rank 0
            removes it, at its first batch.
        group: the ranks that write, one for each data-parallel rank; None: all ranks of
            torch.distributed, or this one if the loader has a single rank.

    Raises ConfigError.
    """

    def __init__(
        self,
        loader: StreamLoader,
        columns: Mapping[str, Column],
        *,
        restart: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(loader, StreamLoader):
            raise ConfigError(
                f"a ColumnWriter needs a StreamLoader(..., last='pad'), not a {type(loader).__name__}"
            )
        dataset = loader.dataset
        segment = dataset.samples.segments[0]
        if not dataset.steps.pads_last or loader.bounds:
            raise ConfigError(
                "a ColumnWriter needs a StreamLoader(..., last='pad') of whole samples (cp_size=1), which "
                "hands out every sample of its dataset once"
            )
        assert isinstance(segment, GPTDataset)
        config = loader.dataset.config
        if config.exclude_samples or config.exclude_documents:
            raise ConfigError(
                "a column has a value for every token: leave exclude_samples and exclude_documents out "
                "while it is written; batches that exclude them have its fill there"
            )
        indexed = segment.indexed
        check_dataset(indexed)
        self._loader = loader
        self._samples = segment
        if not isinstance(columns, Mapping) or not columns:
            raise ConfigError("a ColumnWriter needs columns, such as {'weight': Column('float16')}")
        self._columns = [stored_column(name, columns[name]) for name in sorted(columns, key=str)]
        self._restart = restart
        self._sync = RankSync(group_of(group, dataset.dp_size))
        self._job = digest_of(
            [
                indexed.content,
                segment.identity(),
                [column.stored() for column in self._columns],
            ]
        )
        url = manifest_url(indexed.name).removesuffix(".json").removesuffix(".manifest")
        self._folder = PieceFolder(f"{url}{JOB}{self._job}", config.storage)
        self._manifest = ColumnManifest(indexed.name, indexed.manifest, config.storage)
        self._claim = ""
        """The ids of this run and of its start, once it has begun."""
        self._position = 0
        """The sample before which all are written."""
        self._stored = 0
        """The sample before which all are stored."""
        self._held: list[list[NDArray[np.uint8]]] = [[] for _ in self._columns]
        """The values that are not stored, of each column."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Write the values of the batch that was taken last: torch tensors or arrays of numpy, on any
        device, of the column's dtype, [micro_batch_size, S, width]; or [micro_batch_size, S] for width 1.
        Those at padding are not stored. The caller may change them afterwards.

        Raises ConfigError for values of another name, dtype or shape, StateError if the loader has moved
        by anything but one batch. Neither changes anything. Raises StorageError where many values are
        stored: they are kept, and stored with the next ones.
        """
        self._begin()
        dataset = self._loader.dataset
        self._check_moved(dataset.step_samples)
        shape = dataset.micro_batch_size, self._samples.config.sequence_length
        names = list(values) if isinstance(values, Mapping) else []
        if set(names) != {column.name for column in self._columns}:
            raise ConfigError(
                f"the values are those of {', '.join(sorted(map(str, names))) or 'no column'}; give those "
                f"of {', '.join(column.name for column in self._columns)}"
            )
        taken = [bytes_of(values[column.name], column, shape) for column in self._columns]
        is_sample = dataset.sample_ids(self._position) < len(self._samples)
        for held, rows in zip(self._held, taken, strict=True):
            held.append(rows[is_sample])  # a copy
        self._position += dataset.step_samples
        token_bytes = sum(column.token_bytes for column in self._columns)
        samples = (self._position - self._stored) // dataset.dp_size
        if samples * shape[1] * token_bytes >= HELD_BYTES:
            self._store()

    def state_dict(self) -> dict[str, Any]:
        """Store what was written since the last state, and return the state of the loader and of what is
        stored: small, for JSON, the same on every rank. Save it after a barrier, when all have stored.

        Raises StateError if the last batch was not written, or if another writer of these columns has
        begun since; StorageError.
        """
        self._begin()
        self._check_moved(0)
        self._store()
        return {
            "version": STATE_VERSION,
            "job": self._job,
            "run": self._run,
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a state, and remove what was stored after it. The loader is moved too.

        The number of ranks may differ. Raises StateError for a state of another dataset, order or
        columns, where another writer of these columns has begun since, or where what the state counts is
        not stored; StorageError.
        """
        if not isinstance(state, Mapping) or not state.keys() >= STATE_KEYS:
            raise StateError(
                "this is no state of a ColumnWriter, which holds the loader's; load its state_dict()"
            )
        if state["version"] != STATE_VERSION:
            raise StateError(
                f"the state has version {state['version']}, and this program reads {STATE_VERSION}"
            )
        if state["job"] != self._job:
            raise StateError(
                f"the state is of a writer of other columns, or of another dataset or order "
                f"({state['job']}, not {self._job}); begin with its settings, or without it"
            )
        self._loader.load_state_dict(state["loader"])
        position = self._loader.consumed_samples
        run = state["run"]
        self._claim = self._claimed(lambda: self._go_on(position, run))
        if self._run != run:
            raise StateError(self._other_writer())
        self._position = self._stored = position
        self._held = [[] for _ in self._columns]

    def publish(self) -> None:
        """Join all pieces to an object for each shard, put the columns into the manifest of the dataset,
        and remove the pieces. A column of the same name is replaced.

        Call it on every rank at the end of the data, and again after a kill. Tokens that are in no
        sample have the column's fill.

        Raises StateError before the end of the data, or for samples that are not stored once;
        ObjectChangedError if the dataset was replaced, StorageError.
        """
        self._begin()
        self._sync.run_long(self._store_last)
        if self._is_alone_among_several:
            return
        if self._sync.run_on_first(self._is_published):
            log.info("%s: the columns of this run are in it already", self._samples.indexed.prefix)
        else:
            joined = self._gather(self._sync.run_long(self._join))
            self._sync.run_on_first(lambda: self._put(joined))
        self._sync.run_on_first(self._clear)

    # --- ranks ---

    @property
    def _is_alone_among_several(self) -> bool:
        """Whether rank 0 does for this one what needs one rank, and neither knows of the other."""
        return self._sync.group is None and self._loader.dataset.dp_rank > 0

    def _claimed(self, claim: Callable[[], str]) -> str:
        """What the first rank claims. Raises StateError if it has claimed nothing, ConfigError if it writes
        other columns.
        """
        if not self._is_alone_among_several:
            job = self._sync.run_on_first(lambda: self._job)
            self._sync.run(lambda: self._check_job(job))
            return self._sync.run_on_first(claim)
        claimed = self._folder.claim()
        if not claimed:
            raise StateError(
                f"{self._folder.url}: rank 0 has not begun; without torch.distributed it writes its first "
                "batch, or loads the state, before the other ranks do"
            )
        return claimed

    def _check_job(self, job: str) -> None:
        if job != self._job:
            raise ConfigError(
                "the first rank writes other columns, or columns of another dataset or order; give all "
                "ranks the same settings"
            )

    def _begin(self) -> None:
        """Begin a run, unless a state has begun it."""
        if self._claim:
            return
        claim = self._claimed(self._begin_run)
        if self._is_alone_among_several:
            self._check_new(claim.partition(" ")[0])
        self._claim = claim

    def _check_new(self, run: str) -> None:
        """Raise StateError if this rank has stored values of a run that rank 0 has begun, or if that was a
        run of another number of ranks.
        """
        rank, size = self._loader.dataset.dp_rank, self._loader.dataset.dp_size
        for piece in self._folder.pieces(run):
            if piece.rank == rank or piece.size != size:
                raise StateError(
                    f"{self._folder.url}: has values of an earlier start of this rank; write the first batch "
                    "on rank 0 first, or load the state"
                )

    def _begin_run(self) -> str:
        """Claim the folder for a new run. Raises StateError where values are stored."""
        self._manifest.check()
        pieces = self._folder.pieces()
        if pieces and not self._restart:
            first = min(pieces)
            raise StateError(
                f"{self._folder.url}: has values of samples [{first.first}, {first.stop}) of an earlier "
                "writer; load its state, or give restart=True to remove them"
            )
        if self._restart:
            self._folder.clear()
        return self._folder.put_claim(secrets.token_hex(8))

    def _go_on(self, position: int, run: str) -> str:
        """Claim the folder for a run that goes on, and remove pieces that were stored after its state.

        Raises StateError if another run has begun, or if values that the state counts are not stored.
        """
        if self._folder.claim().partition(" ")[0] not in ("", run):
            raise StateError(self._other_writer())
        if not self._manifest.lists(self._columns, self._digest_of(run)):
            counted = [piece for piece in self._folder.pieces(run) if piece.stop <= position]
            check_tiling(counted, min(position, len(self._samples)), self._folder.url)
        # First, so that a former start whose processes go on stores nothing after this.
        claim = self._folder.put_claim(run)
        pieces = self._folder.pieces(run)
        self._folder.remove([piece for piece in pieces if piece.stop > position])
        return claim

    def _other_writer(self) -> str:
        return (
            f"{self._folder.url}: another writer of these columns has begun since; end this one, or begin "
            "again with restart=True. Of ranks that read the same samples one writes"
        )

    def _gather(self, joined: dict[tuple[int, int], Joined]) -> dict[tuple[int, int], Joined]:
        """What all ranks have joined."""
        group = self._sync.group
        if group is None:
            return joined
        of_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_rank, joined, group=group)
        return {place: one for part in of_rank for place, one in part.items()}

    # --- steps ---

    def _check_moved(self, samples: int) -> None:
        """Raise StateError unless the loader is so many samples further than what is written."""
        consumed = self._loader.consumed_samples
        if consumed - samples != self._position:
            raise StateError(
                f"the loader is at sample {consumed}, and what is written ends at {self._position}: write "
                "each batch when it was taken, once, and go on elsewhere by the writer's load_state_dict"
            )

    def _store(self) -> None:
        """Store what is held."""
        if self._position == self._stored:
            return
        if self._folder.claim() != self._claim:
            raise StateError(self._other_writer())
        dataset = self._loader.dataset
        piece = Piece(self._stored, self._position, dataset.dp_rank, dataset.dp_size, self._run)
        self._folder.put(piece, [rows for held in self._held for rows in held])
        self._held = [[] for _ in self._columns]
        self._stored = self._position

    def _store_last(self) -> None:
        """Store what is held at the end of the data. Raises StateError before it."""
        self._check_moved(0)
        end = self._loader.dataset.num_samples
        assert end is not None
        if self._position < end:
            raise StateError(
                f"{self._position} of {end} samples are written; publish at the end of the data"
            )
        self._store()

    def _is_published(self) -> bool:
        """Whether the manifest has the columns of this run. Raises StateError if it has not, and another
        writer has begun.
        """
        if self._manifest.lists(self._columns, self._digest_of(self._run)):
            return True
        if self._folder.claim() != self._claim:
            raise StateError(self._other_writer())
        return False

    @property
    def _run(self) -> str:
        """The id of this run."""
        return self._claim.partition(" ")[0]

    def _clear(self) -> None:
        """Remove the pieces, unless another writer has begun, whose they are then."""
        if self._folder.claim() == self._claim:
            self._folder.clear()

    def _digest_of(self, run: str) -> str:
        """In the names of objects: each run has its own, so none changes under a reader."""
        return digest_of([self._job, run])

    def _join(self) -> dict[tuple[int, int], Joined]:
        """Join this rank's part of the shards of all columns, by numbers of column and shard."""
        samples = self._samples
        length = samples.config.sequence_length
        pieces = StoredPieces(self._folder, self._run, self._columns, len(samples), length)
        joiner = ColumnJoiner(samples, self._columns, pieces, self._digest_of(self._run))
        shards = range(len(samples.indexed.manifest.shards))
        places = [(column, shard) for column in range(len(self._columns)) for shard in shards]
        group = self._sync.group
        ranks = 1 if group is None else dist.get_world_size(group)
        return {place: joiner.join(*place) for place in places[self._sync.rank :: ranks]}

    def _put(self, joined: Mapping[tuple[int, int], Joined]) -> None:
        """Put the columns into the manifest."""
        shards = self._samples.indexed.manifest.shards
        columns = []
        for number, column in enumerate(self._columns):
            parts = [joined[number, shard] for shard in range(len(shards))]
            columns.append(column._replace(files=[part.file for part in parts]))
            log.info(
                "%s: column %s is written; %d of %d tokens are in no sample and have its fill",
                self._samples.indexed.prefix,
                column.name,
                sum(part.filled for part in parts),
                sum(shard.tokens for shard in shards),
            )
        self._manifest.add(columns, self._digest_of(self._run))


def stored_column(name: str, column: Column) -> StoredColumn:
    """What the manifest will say of a column. Raises ConfigError."""
    check_name(name, "ColumnWriter")
    if not isinstance(column, Column) or not column.dtype:
        raise ConfigError(
            f"column {name!r} is {column!r}; a writer needs its dtype: Column('float16', width)"
        )
    if column.missing is not None or column.stage != "last":
        raise ConfigError(
            f"column {name!r}: missing and stage are for those who read it; leave them out"
        )
    return StoredColumn(
        name=name,
        dtype=column.dtype,
        width=column.width or 1,
        align=column.align or "labels",
        fill=0 if column.fill is None else column.fill,
        files=(),
    )


def bytes_of(values: Any, column: StoredColumn, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The values of a batch as they are stored, uint8 [rows, bytes]; perhaps a view of them.

    shape: samples, and tokens of each. Raises ConfigError for another dtype or shape.
    """
    is_tensor = isinstance(values, torch.Tensor)
    if is_tensor and (values.is_meta or values.layout != torch.strided):
        raise ConfigError(
            f"column {column.name!r} has values of a meta or sparse tensor; give a dense one: "
            "values.to_dense()"
        )
    if not is_tensor:
        values = np.asarray(values)
    dtype = str(values.dtype).removeprefix("torch.") if is_tensor else values.dtype.name
    if dtype != column.dtype:
        raise ConfigError(
            f"column {column.name!r} has values of {dtype}, and its Column {column.dtype}; convert them: "
            f"values.to(torch.{column.dtype})"
        )
    wanted = [(*shape, column.width), shape] if column.width == 1 else [(*shape, column.width)]
    if tuple(values.shape) not in wanted:
        raise ConfigError(
            f"column {column.name!r} has values of shape {tuple(values.shape)}; it must be "
            f"{wanted[0]}: samples of the batch, tokens, width"
        )
    if is_tensor:
        rows = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    else:
        rows = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8)
    flat: NDArray[np.uint8] = rows.reshape(shape[0], -1)
    return flat


def check_dataset(indexed: IndexedDataset) -> None:
    """Raise ConfigError for what has no manifest of its own: a folder. Or if sequences are not one after
    the other in the order of their numbers: pieces are joined in the order of samples.
    """
    manifest = indexed.manifest
    # Without a manifest it is a pair, or a folder, perhaps of one.
    if manifest.folder_labels is not None and (
        len(manifest.shards) > 1 or resolved(manifest.shards[0].name) != resolved(indexed.prefix)
    ):
        raise ConfigError(
            f"{indexed.name}: is a folder or pattern, and columns belong to a manifest: name one of its "
            "datasets, or merge them by 'streammega convert'"
        )
    if indexed.bin_tokens is not None:
        return
    offsets, lengths = indexed.sequence_offsets, indexed.sequence_lengths
    end = 0
    for first in range(0, len(lengths), ROWS_AT_ONCE):
        is_filled = lengths[first : first + ROWS_AT_ONCE] > 0
        start = offsets[first : first + ROWS_AT_ONCE][is_filled]
        size = lengths[first : first + ROWS_AT_ONCE][is_filled].astype(np.int64)
        ends = np.append(end, start + size * indexed.dtype.itemsize)
        if (start < ends[:-1]).any():
            raise ConfigError(
                f"{indexed.prefix}: its .idx lists sequences in another order than they are stored in, or "
                "twice; 'streammega convert' writes them in order, and columns for that"
            )
        end = int(ends[-1])


def group_of(group: dist.ProcessGroup | None, dp_size: int) -> dist.ProcessGroup | None:
    """The ranks that write together; None for one alone. Raises ConfigError for as many as the loader has
    not.
    """
    if group is None and dp_size > 1 and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return None
    ranks = dist.get_world_size(group)
    if ranks != dp_size:
        raise ConfigError(
            f"the group of the ColumnWriter has {ranks} ranks, and its loader {dp_size}; give group=, of "
            "one rank for each data-parallel rank"
        )
    if not has_cpu_backend(group):
        raise ConfigError(
            "the group of the ColumnWriter has NCCL alone; give group=dist.new_group(backend='gloo')"
        )
    return group


def digest_of(described: Sequence[Any]) -> str:
    """12 hex digits."""
    return hashlib.blake2b(
        json.dumps(described, sort_keys=True).encode(), digest_size=6
    ).hexdigest()
