"""Columns that are written while samples are read: every token's value is its own, whatever is killed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from streammega import (
    Column,
    ColumnWriter,
    DataConfig,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
)
from streammega.config.columns import DTYPES
from streammega.convert import convert
from streammega.dataset import IndexedDatasetWriter
from streammega.dataset.columns import ALIGNED
from streammega.dataset.idx import encode_index
from streammega.dataset.names import Kind
from streammega.dataset.opening import open_manifests
from streammega.errors import ConfigError, ObjectChangedError, StateError, StorageError
from streammega.parallel import column_pieces, column_publish
from streammega.parallel.column_pieces import Piece, check_tiling
from streammega.storage import ObjectInfo, ObjectWriter, open_store
from streammega.storage.store import Buffer, Span, Store, WrapperStore
from tests.support.builders import write_lengths, write_manifest
from tests.support.column_runs import (
    Run,
    check_published,
    starts_of,
    values_of,
    write_alone,
    write_on_ranks,
    write_on_some,
    write_other_columns,
)
from tests.support.columns import add_column, hashed
from tests.support.examples import examples
from tests.support.gang import Gang
from tests.support.servers import S3

Result = TypeVar("Result")
LENGTH = 8
EOD = 3
SHARDS = [f"web-{number:05d}-of-00003" for number in range(3)]
KINDS: tuple[Kind, ...] = ("bin", "zst", "tar")
COLUMNS = {
    "logprobs": Column("float16", 2, fill=-math.inf),
    "weight": Column("uint8", align="tokens", fill=7),
}


def write_shards(folder: Path, kind: Kind = "bin") -> None:
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in SHARDS:
        with IndexedDatasetWriter(str(folder / shard), np.uint16, kind=kind) as writer:
            for length in rng.integers(1, 15, 12).tolist():
                ids = np.append(rng.integers(4, 500, length), EOD)
                writer.add_document(ids, [length, 1])
    write_manifest(folder / "web", SHARDS, kind)


def config_of(name: str | Path, **options: Any) -> DataConfig:
    storage = StorageConfig(cache_dir=Path(name).parent / "cache")
    defaults: dict[str, Any] = {"sequence_length": LENGTH, "storage": storage, "eod_id": EOD}
    return DataConfig(blend=[str(name)], order="sequential", split="1,0,0", **(defaults | options))


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Three shards of pairs."""
    write_shards(tmp_path / "data")
    return config_of(tmp_path / "data" / "web")


def folder_of(config: DataConfig) -> Path:
    return Path(str(config.blend[0])).parent  # type: ignore[index]


def jobs_of(config: DataConfig) -> list[Path]:
    """The folders of pieces."""
    return [*folder_of(config).glob("*.col-job-*")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of every kind, and packed ones."""
    folder = tmp_path_factory.mktemp("data")
    for kind in KINDS:
        write_shards(folder / kind, kind)
    source = str(folder / "bin" / "web.manifest.json")
    convert(
        [source], str(folder / "packed" / "web"), pack_length=LENGTH, eod_id=EOD,
        shard_bytes=400, workers=1,
    )  # fmt: skip
    return folder


@pytest.mark.guarantee("columns-written-once")
@pytest.mark.many_examples
@settings(max_examples=examples(10))
@given(
    kind=st.sampled_from([*KINDS, "packed"]),
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from([None, 1, 3]),
    aligns=st.lists(st.sampled_from([*ALIGNED, None]), min_size=1, max_size=2),
    fill=st.sampled_from([None, 0, 5]),
    add_extra_token=st.booleans(),
    by_documents=st.booleans(),
    ranks=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4),
    steps=st.integers(1, 15),
    save_every=st.integers(1, 2),
    read_bytes=st.sampled_from([1, 300, 1 << 20]),
    held_bytes=st.sampled_from([50, 1 << 20]),
)
def test_every_value_is_that_of_its_token(
    data: Path, kind: str, dtype: str, width: int | None, aligns: list[Any], fill: int | None,
    add_extra_token: bool, by_documents: bool, ranks: list[int], steps: int, save_every: int,
    read_bytes: int, held_bytes: int,
) -> None:  # fmt: skip
    config = config_of(
        data / kind / "web", add_extra_token=add_extra_token, inter_document_masking=by_documents
    )
    columns = {
        f"c{number}": Column(dtype, width, fill=fill, align=align)
        for number, align in enumerate(aligns)
    }
    event(kind)
    run = Run(config, columns, 12, save_every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_publish, "READ_BYTES", read_bytes)
        patch.setattr(column_publish, "FILL_BYTES", read_bytes)
        patch.setattr("streammega.parallel.column_writer.HELD_BYTES", held_bytes)
        # Each is ended after some steps. Without a state nothing says whose the pieces are.
        if not any(run.go(size, steps, restart=run.state is None) for size in ranks):
            run.go(2, restart=run.state is None)
    check_published(config, columns)
    assert not jobs_of(config), "pieces are removed"


def test_a_state_is_small_and_goes_on_on_any_ranks(config: DataConfig) -> None:
    run = Run(config, COLUMNS, 12)
    for ranks in (2, 3, 4):
        assert not run.go(ranks, 12 // ranks)
        assert len(str(run.state)) < 1500
    run.go(2)
    check_published(config, COLUMNS)


# --- kills ------------------------------------------------------------------------------------------


class Killed(Exception):
    """The process has ended here."""


class Fatal(WrapperStore):
    """Ends the process at an operation, before it or after it."""

    def __init__(self, inner: Store, step: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._step = step

    def _do(self, operation: Callable[[], Result]) -> Result:
        is_last = self._step()
        try:
            return operation()
        finally:
            if is_last:
                raise Killed

    def local_path(self, key: str) -> str | None:
        return self.inner.local_path(key)

    def info(self, key: str) -> ObjectInfo:
        return self._do(lambda: self.inner.info(key))

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        return self._do(lambda: self.inner.read(key, spans, etag))

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        return self._do(lambda: self.inner.list(prefix, recursive))

    def open_writer(self, key: str) -> ObjectWriter:
        self._do(lambda: None)
        writer = self.inner.open_writer(key)
        commit = writer.commit
        writer.commit = lambda: self._do(commit)  # type: ignore[method-assign]
        return writer

    def put(self, key: str, data: Any, *, if_absent: bool = False, if_match: str = "") -> bool:
        return self._do(lambda: self.inner.put(key, data, if_absent=if_absent, if_match=if_match))

    def delete(self, key: str) -> None:
        self._do(lambda: self.inner.delete(key))


class Fate:
    """Says at which operation of the writers' stores the process ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations = 0
        self.last: int | None = None
        self.before = False
        for module in (column_pieces, column_publish):
            monkeypatch.setattr(module, "open_store", self._open)

    def _open(self, url: str, storage: StorageConfig) -> tuple[Store, str]:
        store, key = open_store(url, storage)
        return Fatal(store, self._step), key

    def _step(self) -> bool:
        self.operations += 1
        is_last = self.operations == self.last
        if is_last and self.before:
            raise Killed
        return is_last

    def sentence(self, last: int | None, before: bool) -> None:
        self.operations, self.last, self.before = 0, last, before


@pytest.mark.guarantee("columns-written-once")
@pytest.mark.parametrize("before", [True, False])
def test_a_kill_at_every_operation_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    fate = Fate(monkeypatch)
    sizes = itertools.cycle([1, 2, 3])
    for last in itertools.count(1):
        name = tmp_path / f"d{last}" / "web"
        write_lengths(str(name), [50, 30, 25])
        config = config_of(name)
        run = Run(config, COLUMNS, 6)
        fate.sentence(last, before)
        try:
            run.go(2)
        except Killed:
            was_killed = True
        else:
            was_killed = False
        fate.sentence(None, before)
        if was_killed:
            # Without a state nothing says that the pieces are this run's.
            run.go(next(sizes), restart=run.state is None)
        check_published(config, COLUMNS)
        assert not jobs_of(config)
        if not was_killed:
            break
    assert last > 40


def test_a_rank_that_stored_and_died_before_the_state_leaves_nothing(config: DataConfig) -> None:
    run = Run(config, {"x": Column("int32")}, 12)
    run.go(2, 6)
    before = {path.name for path in jobs_of(config)[0].iterdir()}
    with run.open(2) as opened:
        for one in opened:
            run.write_step(*one)
        opened[1][1].state_dict()  # and rank 0 has none
    assert {path.name for path in jobs_of(config)[0].iterdir()} > before
    with run.open(3):
        assert {path.name for path in jobs_of(config)[0].iterdir()} == before
    run.go(3)
    check_published(config, run.columns)


def test_a_writer_without_a_state_refuses_what_is_stored(config: DataConfig) -> None:
    run = Run(config, COLUMNS, 12)
    run.go(2, 7)
    state, run.state = run.state, None
    with pytest.raises(StateError, match="restart=True"):
        run.go(2, 7)
    with pytest.raises(StateError, match="restart=True"):
        run.go(3, 7)
    run.go(1, 13, restart=True)
    run.state = state
    with pytest.raises(StateError, match="another writer"):
        run.go(2)
    run.state = None
    run.go(2, restart=True)
    check_published(config, COLUMNS)
    # the earlier run's state has no pieces any more
    run.state = state
    with pytest.raises(StateError, match=r"samples \[0, "):
        run.go(2)


def test_publishing_again_changes_nothing(config: DataConfig) -> None:
    run = Run(config, COLUMNS, 12, save_every=1)
    run.go(2)
    manifest = folder_of(config) / "web.manifest.json"
    before = manifest.read_bytes()
    run.go(3)  # from the last state
    assert manifest.read_bytes() == before
    check_published(config, COLUMNS)
    assert not jobs_of(config)


def test_a_job_that_was_killed_at_its_end_publishes_by_the_same_program(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"x": Column("int32")}
    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 8}
    starts = starts_of(config)

    def program(state: Any) -> Any:
        with StreamLoader(config, **sizes, last="pad") as loader:
            writer = ColumnWriter(loader, columns)
            if state is not None:
                writer.load_state_dict(state)
            position = loader.consumed_samples
            for _ in loader:
                samples = loader.dataset.sample_ids(position)
                writer.write({"x": values_of(columns["x"], samples, starts, LENGTH)})
                position = loader.consumed_samples
                state = writer.state_dict()
            with suppress(Killed):
                writer.publish()
        return state

    with monkeypatch.context() as patch:
        fate = Fate(patch)
        state = program(None)
        steps = fate.operations
    add_column(str(config.blend[0]), "x", Column("int32"))  # type: ignore[index]
    with monkeypatch.context() as patch:
        fate = Fate(patch)
        fate.sentence(steps - 12, before=True)
        state = program(None)
    assert jobs_of(config)
    program(state)
    check_published(config, columns)


def test_a_column_written_again_has_other_objects(config: DataConfig) -> None:
    columns = {"weight": Column("uint8")}
    Run(config, columns, 12).go(2)
    first = check_published(config, columns).columns
    Run(config, columns, 12).go(1)
    second = check_published(config, columns).columns
    assert len(first) == len(second) == 1
    assert {file.name for file in first[0].files if file}.isdisjoint(
        {file.name for file in second[0].files if file}
    )


@pytest.mark.guarantee("columns-written-once")
@pytest.mark.parametrize("kill", ["pieces", "state", "manifest", "never"])
def test_ranks_that_are_killed_go_on_on_others(
    gang: Gang, config: DataConfig, tmp_path: Path, kill: str
) -> None:
    checkpoint = tmp_path / "state.json"
    folder = folder_of(config)

    def is_due() -> bool:
        pieces = [*folder.glob("*.col-job-*/0*")]
        return {
            "pieces": len(pieces) >= 3,
            "state": checkpoint.exists(),
            "manifest": "columns" in (folder / "web.manifest.json").read_text(),
            "never": False,
        }[kill]

    sizes = {"micro_batch_size": 1, "global_batch_size": 12}
    arguments = config, COLUMNS, sizes, str(checkpoint)
    gang.run_until(is_due, 2, write_on_ranks, *arguments)
    if not checkpoint.exists():  # nothing was saved, and what was stored is refused
        for path in folder.glob("*.col-job-*/*"):
            path.unlink()
    gang.run(3, write_on_ranks, *arguments)
    check_published(config, COLUMNS)
    assert not jobs_of(config)


def test_a_refusal_of_one_rank_is_that_of_all(
    gang: Gang, config: DataConfig, tmp_path: Path
) -> None:
    Run(config, COLUMNS, 12).go(1, 12)
    sizes = {"micro_batch_size": 1, "global_batch_size": 12}
    with pytest.raises(Exception, match="restart=True"):
        gang.run(2, write_on_ranks, config, COLUMNS, sizes, str(tmp_path / "none"))


def test_ranks_with_other_columns_are_told_at_their_first_batch(
    gang: Gang, config: DataConfig
) -> None:
    for error in gang.run(2, write_other_columns, config):
        assert "same settings" in error
    assert not jobs_of(config)


def test_some_of_the_ranks_may_write(gang: Gang, config: DataConfig) -> None:
    assert gang.run(3, partial(write_on_some, early=False), config, COLUMNS) == [""] * 3
    check_published(config, COLUMNS)
    assert not jobs_of(config)
    errors = gang.run(3, partial(write_on_some, early=True), config, COLUMNS)
    assert ["end of the data" in error for error in errors] == [False, True, True]


def test_one_of_several_ranks_may_write(gang: Gang, config: DataConfig) -> None:
    gang.run(2, write_alone, config, COLUMNS)
    check_published(config, COLUMNS)


# --- other writers ----------------------------------------------------------------------------------


def test_columns_of_two_writers_are_both_kept(config: DataConfig) -> None:
    one, other = {"one": Column("uint8")}, {"other": Column("float32", 2)}
    runs = [Run(config, one, 12), Run(config, other, 12, save_every=2)]
    for _ in range(2):
        assert not any(run.go(2, 7) for run in runs)
    for run in runs:
        run.go(1)
    check_published(config, one | other)


def test_a_manifest_that_another_writer_puts_meanwhile_is_kept(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, other = {"one": Column("uint8")}, {"other": Column("float32", 2)}

    puts = 0

    def put_late(*arguments: Any) -> bool:
        nonlocal puts
        puts += 1
        monkeypatch.undo()
        Run(config, other, 12).go(1)
        assert arguments[1].endswith("web.manifest.json")
        return False  # as a bucket answers

    monkeypatch.setattr(column_publish, "replace_object", put_late)
    monkeypatch.setattr(column_publish, "locked_folder", lambda url: nullcontext())
    Run(config, columns, 12).go(2)
    assert puts == 1
    check_published(config, columns | other)


def test_two_writers_of_one_column_are_told(config: DataConfig) -> None:
    columns = {"one": Column("uint8")}
    first, second = Run(config, columns, 12), Run(config, columns, 12)
    first.go(2, 7)
    with pytest.raises(StateError, match="earlier writer"):
        second.go(2, 7)
    second.go(2, 9, restart=True)
    with pytest.raises(StateError, match="another writer"):
        first.go(2)
    second.go(3)
    check_published(config, columns)


def test_of_two_writers_that_begin_together_the_first_is_told(config: DataConfig) -> None:
    columns = {"one": Column("uint8")}
    first, second = Run(config, columns, 12), Run(config, columns, 12)
    with first.open(1) as opened, second.open(2) as others:
        first.write_step(*opened[0])
        for one in others:
            second.write_step(*one)
        with pytest.raises(StateError, match="another writer"):
            opened[0][1].state_dict()
        for _, writer in others:
            writer.state_dict()


def test_ranks_of_a_killed_start_that_go_on_store_nothing(config: DataConfig) -> None:
    run = Run(config, {"one": Column("uint8")}, 12)
    run.go(2, 6)
    with run.open(2) as opened:
        for one in opened:
            run.write_step(*one)
        assert not run.go(3, 5)
        before = {path.name for path in jobs_of(config)[0].iterdir()}
        for _, writer in opened:
            with pytest.raises(StateError, match="another writer"):
                writer.state_dict()
        assert {path.name for path in jobs_of(config)[0].iterdir()} == before
    run.go(3)
    check_published(config, run.columns)


@pytest.mark.guarantee("columns-written-once")
def test_a_late_rank_of_an_earlier_run_replaces_nothing(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"one": Column("uint8")}
    first, second = Run(config, columns, 12), Run(config, columns, 12)
    put = column_pieces.PieceFolder.put

    def put_late(folder: Any, piece: Piece, parts: Any) -> None:
        monkeypatch.undo()  # the other one begins and stores while this one uploads
        assert not second.go(1, 12, restart=True)
        put(folder, piece, [255 - part for part in parts])

    monkeypatch.setattr(column_pieces.PieceFolder, "put", put_late)
    assert not first.go(1, 12)
    second.go(2)
    check_published(config, columns)


def test_a_run_publishes_no_values_of_a_later_one(config: DataConfig) -> None:
    columns = {"one": Column("uint8")}
    first, second = Run(config, columns, 12), Run(config, columns, 12)
    with first.open(1) as opened, second.open(2, restart=True) as others:
        while first.write_step(*opened[0]):
            pass
        opened[0][1].state_dict()
        for one in others:
            while second.write_step(*one):
                pass
            one[1].state_dict()
        with pytest.raises(StateError, match="another writer"):
            opened[0][1].publish()
        for _, writer in reversed(others):
            writer.publish()
    check_published(config, columns)


def test_ranks_that_know_nothing_of_each_other_begin_with_the_first(config: DataConfig) -> None:
    run = Run(config, {"one": Column("uint8")}, 12)
    with run.open(2) as opened, pytest.raises(StateError, match="rank 0 has not begun"):
        run.write_step(*opened[1])


def test_a_rank_begins_no_run_that_has_its_values(config: DataConfig) -> None:
    for ranks in (2, 3):
        run = Run(config, {"one": Column("uint8")}, 12)
        run.go(ranks, 12, restart=True)
        run.state = None
        with run.open(2, restart=True) as opened:
            with pytest.raises(StateError, match="rank 0 first"):
                run.write_step(*opened[1])
            opened[1][0].seek(0)
            for one in opened:
                while run.write_step(*one):
                    pass
            for _, writer in reversed(opened):
                writer.publish()
        check_published(config, run.columns)


def test_a_dataset_that_was_replaced_is_refused(config: DataConfig) -> None:
    run = Run(config, {"one": Column("uint8")}, 12)
    with run.open(1) as opened:
        while run.write_step(*opened[0]):
            pass
        folder = folder_of(config)
        write_manifest(folder / "web", SHARDS[:2])
        with pytest.raises(ObjectChangedError, match="other shards"):
            opened[0][1].publish()


def test_other_columns_of_a_dataset_stay(config: DataConfig) -> None:
    add_column(str(config.blend[0]), "old", Column("int8", fill=1))  # type: ignore[index]
    Run(config, COLUMNS, 12).go(2)
    manifest = check_published(config, COLUMNS)
    assert [column.name for column in manifest.columns] == ["old", "logprobs", "weight"]


def test_a_pair_gets_a_manifest_and_keeps_its_order(tmp_path: Path) -> None:
    write_lengths(str(tmp_path / "web"), [40, 30, 25])
    config = config_of(tmp_path / "web")
    sizes: Any = {"micro_batch_size": 1, "global_batch_size": 4}
    before = StreamLoader(config, **sizes).state_dict()
    Run(config, COLUMNS, 4).go(2)
    check_published(config, COLUMNS)
    assert StreamLoader(config, **sizes).state_dict() == before


def write_sequences(prefix: Path, tokens: int, sequences: Sequence[tuple[int, int]]) -> None:
    """A pair whose `.idx` lists sequences (first token, last token + 1) of so many tokens."""
    prefix.with_suffix(".bin").write_bytes(np.arange(tokens, dtype="<u2").tobytes())
    starts, stops = np.array(sequences).T
    bounds = np.arange(len(sequences) + 1)
    index = encode_index(
        np.dtype("<u2"), (stops - starts).astype(np.int32), bounds, None, 2 * starts
    )
    prefix.with_suffix(".idx").write_bytes(b"".join(index))


def test_tokens_that_no_sequence_has_get_the_fill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sequences = [(3, 20), (22, 22), (23, 40), (90, 91), (91, 130)]
    write_sequences(tmp_path / "web", 140, sequences)
    config = config_of(tmp_path / "web")
    place = np.concatenate([np.arange(*bounds) for bounds in sequences])
    for align, first in (("labels", 1), ("tokens", 0)):
        column = {"x": Column("uint16", fill=999, align=align)}  # type: ignore[arg-type]
        with StreamLoader(config, micro_batch_size=2, global_batch_size=6, last="pad") as loader:
            writer = ColumnWriter(loader, column)
            for position in loader.dataset.positions():
                next(loader)
                numbers = loader.dataset.sample_ids(position)[:, None] * LENGTH + np.arange(LENGTH)
                numbers = np.minimum(numbers + first, len(place) - 1)
                writer.write({"x": place[numbers].astype(np.uint16)})
            caplog.set_level("INFO", "streammega")
            writer.publish()
        samples = (len(place) - 1) // LENGTH
        written = place[first : first + samples * LENGTH]
        wanted = np.full(140, 999)
        wanted[written] = written
        (manifest,) = open_manifests([str(tmp_path / "web")], config.storage)
        (file,) = manifest.columns[0].files
        assert file is not None
        assert np.fromfile(file.name, "<u2").tolist() == wanted.tolist()
        assert f"{140 - len(written)} of 140 tokens" in caplog.text


@pytest.mark.parametrize("sequences", [[(20, 60), (0, 20)], [(0, 40), (30, 60)]])
def test_sequences_in_another_order_than_they_are_stored_in_are_refused(
    tmp_path: Path, sequences: list[tuple[int, int]]
) -> None:
    write_sequences(tmp_path / "web", 60, sequences)
    loader = StreamLoader(
        config_of(tmp_path / "web"), micro_batch_size=1, global_batch_size=1, last="pad"
    )
    with pytest.raises(ConfigError, match="another order"):
        ColumnWriter(loader, COLUMNS)


def test_a_tail_of_one_sample(tmp_path: Path) -> None:
    write_lengths(str(tmp_path / "web"), [13 * LENGTH + 1 + 3])
    config = config_of(tmp_path / "web")
    for ranks in (1, 4, 12):
        Run(config, COLUMNS, 12).go(ranks)
        check_published(config, COLUMNS)


# --- buckets ----------------------------------------------------------------------------------------


@pytest.mark.guarantee("columns-written-once")
def test_columns_in_a_bucket(s3: S3, tmp_path: Path) -> None:
    bucket = s3.new_bucket()
    write_lengths(str(tmp_path / "web"), [90, 45, 70])
    for ending in (".bin", ".idx"):
        s3.objects(bucket)[f"data/web{ending}"] = (tmp_path / f"web{ending}").read_bytes()
    storage = s3.storage.changed(cache_dir=tmp_path / "cache")
    config = replace(config_of(f"s3://{bucket}/data/web"), storage=storage)
    run = Run(config, COLUMNS, 12)
    run.go(2, 7)
    run.go(4)
    manifest = check_published(config, COLUMNS)
    assert manifest.seen_at
    assert all(file and file.etag for column in manifest.columns for file in column.files)
    # the second one finds a manifest, and ETags that count
    Run(config, {"other": Column("bfloat16")}, 12).go(1)
    check_published(config, COLUMNS | {"other": Column("bfloat16")})
    assert not [key for key in s3.objects(bucket) if ".col-job-" in key]


# --- what is refused --------------------------------------------------------------------------------


@pytest.fixture
def opened(config: DataConfig) -> Iterator[tuple[Run, StreamLoader, ColumnWriter]]:
    run = Run(config, {"x": Column("float16", 2), "y": Column("uint8")}, 12)
    with run.open(1) as opened:
        yield (run, *opened[0])


GOOD: Any = {
    "x": torch.zeros(1, LENGTH, 2, dtype=torch.float16),
    "y": torch.zeros(1, LENGTH, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"x": torch.zeros(1, LENGTH, 2)}, r"values of float32, and its Column float16.*\.to\("),
        ({"x": np.zeros((1, LENGTH, 2))}, "values of float64"),
        ({"x": torch.zeros(1, LENGTH, dtype=torch.float16)}, "must be"),
        ({"x": torch.zeros(1, LENGTH + 1, 2, dtype=torch.float16)}, "must be"),
        ({"y": torch.zeros(2, LENGTH, 1, dtype=torch.uint8)}, "must be"),
        ({"z": GOOD["y"]}, "give those of x, y"),
        ({"y": [[0] * LENGTH]}, "values of int64"),
        ({"y": None}, "values of object"),
        ({"y": GOOD["y"].to("meta")}, "give a dense one"),
        ({"y": GOOD["y"].to_sparse()}, "give a dense one"),
        ({1: GOOD["y"]}, "those of 1, x, y; give those of x, y"),
        (None, "no column; give those of x, y"),
    ],
)
def test_values_of_another_kind_are_refused_and_change_nothing(
    opened: tuple[Run, StreamLoader, ColumnWriter], values: Any, words: str
) -> None:
    _, loader, writer = opened
    next(loader)
    with pytest.raises(ConfigError, match=words):
        writer.write(values and GOOD | values)
    writer.write(GOOD)
    writer.state_dict()


def test_values_of_numpy_may_be_big_endian_and_are_copied(config: DataConfig) -> None:
    run = Run(config, {"x": Column("int32", fill=0)}, 12)
    with run.open(1) as opened:
        loader, writer = opened[0]
        buffer = np.zeros((1, LENGTH), ">i4")
        for position in loader.dataset.positions():
            next(loader)
            place = loader.dataset.sample_ids(position)[:, None] * LENGTH + np.arange(LENGTH) + 1
            buffer[:] = hashed(place, run.columns["x"]).view("<i4")[..., 0]
            writer.write({"x": buffer})
        writer.publish()
    check_published(config, run.columns)


def test_a_loader_that_moved_otherwise_is_refused(
    opened: tuple[Run, StreamLoader, ColumnWriter],
) -> None:
    run, loader, writer = opened
    with pytest.raises(StateError, match="each batch"):
        writer.write(GOOD)  # none was taken
    next(loader)
    with pytest.raises(StateError, match="each batch"):
        writer.state_dict()  # it was not written
    writer.write(GOOD)
    with pytest.raises(StateError, match="each batch"):
        writer.write(GOOD)  # twice
    state = writer.state_dict()
    next(loader)
    next(loader)
    with pytest.raises(StateError, match="each batch"):
        writer.write(GOOD)  # one was left out
    loader.seek(5)
    with pytest.raises(StateError, match="each batch"):
        writer.state_dict()
    writer.load_state_dict(state)
    assert loader.consumed_samples == 1
    with pytest.raises(StateError, match="end of the data"):
        writer.publish()
    while run.write_step(loader, writer):
        pass
    writer.publish()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"job": "0"}, "other columns"),
        ({"loader": {}}, "state"),
        (None, "no state of a ColumnWriter"),
    ],
)
def test_states_of_others_are_refused(
    opened: tuple[Run, StreamLoader, ColumnWriter], change: Any, words: str
) -> None:
    _, loader, writer = opened
    state = writer.state_dict()
    with pytest.raises(StateError, match=words):
        writer.load_state_dict(loader.state_dict() if change is None else state | change)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "needs columns"),
        (["x"], "needs columns"),
        (None, "needs columns"),
        ({1: Column("uint8"), "x": Column("uint8")}, "small letters"),
        ({"Big": Column("uint8")}, "small letters"),
        ({"tokens": Column("uint8")}, "field of batches"),
        ({"x": Column()}, "needs its dtype"),
        ({"x": Column("uint8", missing=1)}, "missing and stage"),
        ({"x": "uint8"}, "needs its dtype"),
    ],
)
def test_columns_that_no_writer_has_are_refused(
    config: DataConfig, columns: Any, words: str
) -> None:
    with (
        StreamLoader(config, micro_batch_size=1, global_batch_size=4, last="pad") as loader,
        pytest.raises(ConfigError, match=words),
    ):
        ColumnWriter(loader, columns)


def test_loaders_that_do_not_hand_out_everything_are_refused(config: DataConfig) -> None:
    sizes: Any = {"micro_batch_size": 1, "global_batch_size": 4}
    columns = {"x": Column("uint8")}
    dataset: Any = StreamingDataset(config, **sizes)
    with pytest.raises(ConfigError, match="not a StreamingDataset"):
        ColumnWriter(dataset, columns)
    for loader in (
        StreamLoader(config, **sizes),
        StreamLoader(config, **sizes, last="pad", ids_only=True, cp_rank=0, cp_size=2),
    ):
        with pytest.raises(ConfigError, match="last='pad'"):
            ColumnWriter(loader, columns)
    partly = replace(config, exclude_samples=[(0, 4)])
    with pytest.raises(ConfigError, match="every token"):
        ColumnWriter(StreamLoader(partly, **sizes, last="pad"), columns)
    write_lengths(f"{folder_of(config)}/one/pair", [100])
    for name in ("", "one/", "one", "one/p*"):
        in_folder = replace(config, blend=[f"{folder_of(config)}/{name}"])
        with pytest.raises(ConfigError, match="folder or pattern"):
            ColumnWriter(StreamLoader(in_folder, **sizes, last="pad"), columns)


def test_a_hole_and_a_second_value_are_named() -> None:
    whole = [Piece(0, 6, 0, 2), Piece(0, 6, 1, 2), Piece(6, 12, 0, 1)]
    for num_samples in (7, 12):
        check_tiling(whole, num_samples, "job")
    for pieces, words in (
        ([], r"nothing is stored of samples \[0, 12\)"),
        (whole[:2], r"nothing is stored of samples \[6, 12\)"),
        (whole[1:], r"rank 0 of 2 has nothing stored of samples \[0, 6\)"),
        (whole[2:], r"nothing is stored of samples \[0, 6\)"),
        ([*whole, Piece(3, 6, 0, 1)], r"stored twice of samples \[3, 6\)"),
        ([*whole, Piece(0, 6, 0, 1)], r"stored twice of samples \[0, 6\)"),
        ([*whole[:2], Piece(8, 12, 0, 1)], r"nothing is stored of samples \[6, 8\)"),
        ([*whole, Piece(0, 4, 1, 2)], r"stored twice of samples \[0, 4\)"),
        ([*whole[:2], Piece(6, 12, 1, 2)], r"rank 0 of 2 has nothing stored of samples \[6, 12\)"),
    ):
        with pytest.raises(StateError, match=words):
            check_tiling(pieces, 12, "job")


def test_a_piece_that_was_cut_is_named(config: DataConfig) -> None:
    run = Run(config, {"x": Column("int32")}, 12, save_every=1)
    with run.open(1) as opened:
        while run.write_step(*opened[0]):
            opened[0][1].state_dict()
        (job,) = jobs_of(config)
        piece = min(job.glob("0*"))
        piece.write_bytes(piece.read_bytes()[:-1])
        with pytest.raises(StateError, match=piece.name):
            opened[0][1].publish()


def test_values_are_kept_where_they_could_not_be_stored(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(config, COLUMNS, 12)
    with run.open(1) as opened:
        loader, writer = opened[0]
        run.write_step(loader, writer)

        def fail(*_: Any) -> None:
            raise StorageError("an outage")

        with monkeypatch.context() as patch:
            patch.setattr(column_pieces.PieceFolder, "put", fail)
            with pytest.raises(StorageError, match="an outage"):
                writer.state_dict()
        writer.state_dict()
        while run.write_step(loader, writer):
            pass
        writer.publish()
    check_published(config, COLUMNS)


@pytest.mark.parametrize("is_outage", [True, False])
def test_ranks_may_store_at_other_samples(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, is_outage: bool
) -> None:
    """After an outage of one of them, or where another one alone asks for its state."""
    run = Run(config, COLUMNS, 12)
    monkeypatch.setattr(column_publish, "READ_BYTES", 300)

    def fail(*_: Any) -> None:
        raise StorageError("an outage")

    with run.open(2) as opened:
        for number in range(12):
            for one in opened:
                assert run.write_step(*one)
            if number in (3, 7):
                opened[0][1].state_dict()
            if number in (3, 9) and is_outage:
                with monkeypatch.context() as patch, pytest.raises(StorageError):
                    patch.setattr(column_pieces.PieceFolder, "put", fail)
                    opened[1][1].state_dict()
            if number == 11:
                (run.state, _) = [writer.state_dict() for _, writer in opened]
    run.go(3)
    check_published(config, COLUMNS)


def test_a_few_pieces_are_mapped_at_once(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(config, {"x": Column("int32")}, 1)
    assert config.blend is not None
    folder = str(Path(str(config.blend[0])).parent)
    most = 0
    read = column_pieces.PieceFolder.read

    def count(*arguments: Any) -> Any:
        nonlocal most
        body = read(*arguments)
        maps = Path("/proc/self/maps").read_text().splitlines()
        # those of other tests in this process may not be collected yet
        most = max(most, sum(".col-job-" in line and folder in line for line in maps))
        return body

    monkeypatch.setattr(column_pieces.PieceFolder, "read", count)
    run.go(1)
    assert 0 < most < 3
    check_published(config, run.columns)


def test_a_state_whose_values_are_gone_is_refused_and_removes_nothing(config: DataConfig) -> None:
    run = Run(config, {"x": Column("int32")}, 12)
    run.go(2, 6)
    early = run.state
    run.go(2, 6)
    late = run.state
    run.state, run.save_every = early, 3
    run.go(1, 24)  # replaces what the late state counts
    before = {path.name for path in jobs_of(config)[0].iterdir()}
    run.state, latest = late, run.state
    with pytest.raises(StateError, match=r"nothing is stored of samples \[12, 24\)"):
        run.go(2)
    assert {path.name for path in jobs_of(config)[0].iterdir()} == before
    run.state = latest
    run.go(2)
    check_published(config, run.columns)


def test_publishing_again_removes_nothing_of_a_later_run(config: DataConfig) -> None:
    first, second = (Run(config, {"x": Column("int32")}, 12) for _ in range(2))
    with first.open(1) as opened:
        while first.write_step(*opened[0]):
            pass
        opened[0][1].publish()
        assert not second.go(2, 6)
        opened[0][1].publish()
    second.go(1)
    check_published(config, second.columns)


def test_a_fill_may_be_no_number(config: DataConfig) -> None:
    run = Run(config, {"x": Column("float32", 2, fill=math.nan)}, 12)
    for _ in range(2):  # the second time it is there already
        run.go(2)
        check_published(config, run.columns)
