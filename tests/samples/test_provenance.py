"""What samples are made of, and where documents go: what a loader's ranks really read, both ways."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.dataset.document_lookup import open_documents
from streammega.dataset.names import shard_name
from streammega.errors import ConfigError
from streammega.order.schedule import TrainingSchedule
from streammega.order.sharding import rank_of, rank_samples
from streammega.samples.document_names import DocumentName
from streammega.samples.provenance import Provenance, TracedSample, documents_with
from streammega.storage.progress import ProgressObserver

Documents = dict[str, list[np.ndarray]]
"""The tokens of the documents of each shard, by its prefix."""
GLOBAL_BATCH = 8
MICRO_BATCH = 2
RANKS = 2
SAMPLES = 1000


def write_shard(prefix: str, rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Documents of several sequences, some of them empty."""
    documents = []
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(count):
            sequences = []
            for _ in range(int(rng.integers(1, 4))):
                size = int(rng.integers(0, 90))
                sequences.append(rng.integers(0, 60_000, size).astype(np.uint16))
                writer.add_item(sequences[-1])
            writer.end_document()
            documents.append(np.concatenate(sequences))
    return documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    """Two datasets, one of three shards."""
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(7)
    documents = {}
    for name in ["code", *(f"web/{shard_name('web', number, 3)}" for number in range(3))]:
        prefix = str(root / name)
        documents[prefix] = write_shard(prefix, rng, 60)
    return root, documents


def config_of(root: Path, order: str, blend: Any = None) -> DataConfig:
    return DataConfig(
        blend=blend or [(f"{root}/web/", 0.7), (f"{root}/code", 0.3)],
        sequence_length=64,
        split="90,10,0",
        order=order,  # type: ignore[arg-type]
        num_samples=(SAMPLES, 200, 0),
        shuffle_block_bytes=512,
        storage=StorageConfig(cache_dir=root / "cache"),
    )


def tokens_of(sample: TracedSample, documents: Documents) -> np.ndarray:
    """What the documents hold where a sample was traced to."""
    parts = []
    column = 0
    for run in sample.runs:
        assert run.column == column
        whole = documents[run.shard.removesuffix(".bin")][run.name.document]
        assert run.document_tokens == len(whole)
        parts.append(whole[run.start : run.stop])
        column += run.stop - run.start
    return np.concatenate(parts).astype(np.int64)


def rows_of_ranks(config: DataConfig, split: str) -> dict[int, np.ndarray]:
    """Tokens and the last label of every sample, as ranks of a loader get them, by its number."""
    rows = {}
    for rank in range(RANKS):
        with StreamLoader(
            config,
            split=split,
            dp_rank=rank,
            dp_size=RANKS,
            micro_batch_size=MICRO_BATCH,
            global_batch_size=GLOBAL_BATCH,
        ) as loader:
            for number, batch in enumerate(loader):
                consumed = number * MICRO_BATCH * RANKS
                ids = rank_samples(
                    consumed, MICRO_BATCH, rank, RANKS, contiguous=config.order == "megatron"
                )
                for row, sample in enumerate(ids.tolist()):
                    last = batch["labels"][row, -1:]
                    rows[sample] = np.concatenate([batch["tokens"][row].numpy(), last.numpy()])
    return rows


@pytest.mark.guarantee("step-can-explained")
@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
def test_a_trace_names_the_tokens_that_ranks_read(
    corpus: tuple[Path, Documents], order: str, split: str
) -> None:
    root, documents = corpus
    config = config_of(root, order)
    rows = rows_of_ranks(config, split)
    provenance = Provenance(config, split, GLOBAL_BATCH)
    samples = np.random.default_rng(1).permutation(sorted(rows))[:SAMPLES]
    assert len(samples) >= 200
    for sample in provenance.trace(samples):
        expected = hashlib.blake2b(rows[sample.sample].tobytes()).digest()
        traced = tokens_of(sample, documents).tobytes()
        assert hashlib.blake2b(traced).digest() == expected


@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
def test_tokens_are_those_of_samples_that_there_are(
    corpus: tuple[Path, Documents], order: str
) -> None:
    root, documents = corpus
    provenance = Provenance(config_of(root, order), "valid")
    end = provenance.source.num_samples
    assert end is not None
    (last,) = provenance.trace([end - 1])
    ids, valid = provenance.tokens([end - 1])
    assert ids[0, : valid[0]].tolist() == tokens_of(last, documents).tolist()
    for sample in (-1, end):
        with pytest.raises(IndexError, match=f"valid has those from 0 to {end - 1}"):
            provenance.tokens([0, sample])


@pytest.mark.guarantee("steps-document-seen")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
@pytest.mark.parametrize("alone", [False, True], ids=["blend", "alone"])
def test_the_readings_of_a_document_are_those_of_a_scan(
    corpus: tuple[Path, Documents], order: str, alone: bool
) -> None:
    root, _ = corpus
    config = config_of(root, order, f"{root}/web/" if alone else None)
    provenance = Provenance(config, "train", GLOBAL_BATCH)
    scanned: dict[DocumentName, list[tuple[int, int, int]]] = {}
    for sample in provenance.trace(np.arange(SAMPLES)):
        for run in sample.runs:
            readings = scanned.setdefault(run.name, [])
            readings.append((sample.sample, run.start, run.stop))
    documents: list[DocumentName] = []
    for dataset in range(1 if alone else 2):
        for shard, shard_documents in enumerate(provenance.shards(dataset)):
            for document in range(0, shard_documents.num_documents, 7):
                name = DocumentName(dataset=dataset, shard=shard, document=document)
                documents.append(name)
    found: dict[DocumentName, list[tuple[int, int, int]]] = {name: [] for name in documents}
    for use in provenance.uses(documents, end=SAMPLES):
        found[use.document].append((use.sample, use.start, use.stop))
    for name in documents:
        assert joined(found[name]) == joined(sorted(scanned.get(name, [])))


@pytest.mark.guarantee("steps-document-seen")
def test_a_search_tells_uses_in_the_order_of_samples_while_it_goes(
    corpus: tuple[Path, Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = corpus
    monkeypatch.setattr("streammega.samples.provenance.SCANNED_AT_ONCE", 16)
    config = replace(config_of(root, "stream"), num_samples=None)
    provenance = Provenance(config, "train", GLOBAL_BATCH)
    documents = [DocumentName(dataset=0, shard=0, document=number) for number in range(9)]
    whole = list(provenance.uses([*documents, documents[0]], end=1_000))
    assert [use.sample for use in whole] == sorted(use.sample for use in whole)
    assert {use.document for use in whole} == set(documents)
    for portions in ([0, 1_000], [0, 16, 17, 999, 1_000]):
        parts = [provenance.uses(documents, start=a, end=b) for a, b in pairwise(portions)]
        assert [use for part in parts for use in part] == whole
    assert list(provenance.uses(documents, start=7, end=7)) == []
    assert list(provenance.uses([], end=100)) == []
    counted = Counted()
    endless = provenance.uses(documents, end=1 << 40, progress=counted)
    assert list(islice(endless, len(whole))) == whole
    endless.close()
    assert counted.total == 1 << 40
    assert 16 <= counted.done < 10_000
    with pytest.raises(ConfigError, match="give `end`"):
        next(provenance.uses(documents))


class Counted(ProgressObserver):
    def __init__(self) -> None:
        self.total = self.done = 0

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        self.total = total or 0

    def advance(self, size: int, tokens: int = 0) -> None:
        self.done += size


def joined(readings: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """A sample may read two sequences of a document, which a trace tells as one run."""
    runs: list[tuple[int, int, int]] = []
    for sample, start, stop in readings:
        if runs and runs[-1][0] == sample and runs[-1][2] == start:
            runs[-1] = (sample, runs[-1][1], stop)
        else:
            runs.append((sample, start, stop))
    return runs


def test_columns_of_a_sample_are_traced_alone(corpus: tuple[Path, Documents]) -> None:
    root, documents = corpus
    provenance = Provenance(config_of(root, "megatron"))
    (whole,) = provenance.trace([5])
    (part,) = provenance.trace([5], (10, 30))
    column = 10
    parts = []
    for run in part.runs:
        assert run.column == column
        column += run.stop - run.start
        parts.append(
            documents[run.shard.removesuffix(".bin")][run.name.document][run.start : run.stop]
        )
    assert column == 30
    assert np.array_equal(np.concatenate(parts), tokens_of(whole, documents)[10:30])
    with pytest.raises(ConfigError, match="30:30 are no range"):
        provenance.trace([5], (30, 30))
    with pytest.raises(IndexError, match="sample ids run from"):
        provenance.trace([10**6])


@pytest.mark.guarantee("documents-named-dataset")
def test_documents_are_named_by_dataset_or_by_shard(corpus: tuple[Path, Documents]) -> None:
    root, _ = corpus
    provenance = Provenance(config_of(root, "stream"))
    expected = [DocumentName(dataset=0, shard=1, document=5)]
    assert provenance.find(f"{root}/web/#65") == expected
    assert provenance.find(f"{root}/web/{shard_name('web', 1, 3)}.bin#5") == expected
    with pytest.raises(
        ConfigError, match=r"no document is called '.+#180'; .+web has 180 documents"
    ):
        provenance.find(f"{root}/web/#180")
    with pytest.raises(ConfigError, match=r"'s3://elsewhere/web#0'.* keep no origins"):
        provenance.find("s3://elsewhere/web#0")


def test_every_match_of_a_search_has_the_ids_around_it(
    corpus: tuple[Path, Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first and the last match of a stretch."""
    monkeypatch.setattr("streammega.samples.provenance.SEARCH_BYTES", 2 * 7)
    root, _ = corpus
    provenance = Provenance(config_of(root, "stream", f"{root}/code"), "train", GLOBAL_BATCH)
    stored = np.fromfile(root / "code.bin", np.uint16)
    for first in range(100):
        pattern = stored[first : first + 3].tolist()
        expected = stored[max(0, first - 3) : first + 6].tolist()
        matches = documents_with(provenance, [pattern, [60_001] * 2])
        assert [(start, ids.tolist()) for _, start, ids in matches] == [(first, expected)]


@pytest.mark.guarantee("documents-named-dataset")
def test_a_pair_whose_sequences_lie_in_any_order_is_searched_too(tmp_path: Path) -> None:
    """As other writers may leave them: a binary search finds nothing there, and does not guess."""
    prefix = str(tmp_path / "shuffled")
    documents = write_shard(prefix, np.random.default_rng(0), 30)
    (shard,) = open_documents(prefix, config_of(tmp_path, "stream", prefix).storage)
    arrays = shard._arrays
    order = np.random.default_rng(1).permutation(arrays.num_sequences)
    shuffled = replace(
        arrays,
        sequence_lengths=arrays.sequence_lengths[order],
        sequence_offsets=arrays.sequence_offsets[order],
        document_indices=np.arange(len(order) + 1),
    )
    stored = np.concatenate(documents)
    shard.__dict__["_arrays"] = shuffled
    tokens = len(stored)
    found = shard.runs(3, tokens - 3)
    assert [run.file_start for run in found] == sorted(run.file_start for run in found)
    assert sum(run.stop - run.start for run in found) == tokens - 6
    for run in found:
        begin = int(shuffled.sequence_offsets[run.document]) // 2
        assert run.file_start == begin + run.start


@pytest.mark.guarantee("documents-named-dataset")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_documents_are_named_by_the_end_of_a_name(
    corpus: tuple[Path, Documents], tmp_path: Path, order: str
) -> None:
    root, _ = corpus
    provenance = Provenance(config_of(root, order))
    for name, full in (
        ("web", f"{root}/web/"),
        ("code.idx", f"{root}/code"),
        (f"{root.name}/code", f"{root}/code"),
        ("web-00001-of-00003", f"{root}/web/web-00001-of-00003"),
    ):
        assert provenance.find(f"{name}#3") == provenance.find(f"{full}#3")
    assert provenance.find("web#61") == [DocumentName(dataset=0, shard=1, document=1)]
    with pytest.raises(ConfigError, match=r"code has 60 documents, numbered from 0"):
        provenance.find("code#60")
    with pytest.raises(ConfigError, match=r"web-00001-of-00003 has 60 documents"):
        provenance.find("web-00001-of-00003#60")
    with pytest.raises(ConfigError, match="no document is called 'eb#3'"):
        provenance.find("eb#3")
    write_shard(str(tmp_path / "code"), np.random.default_rng(1), 60)
    two = Provenance(config_of(root, order, [(f"{root}/code", 0.5), (f"{tmp_path}/code", 0.5)]))
    with pytest.raises(ConfigError, match=r"code may be .*/code or .*/code; name it in full"):
        two.find("code#3")


@pytest.mark.guarantee("steps-samples-ranks")
@pytest.mark.parametrize("rampup_batch_size", [None, (8, 8, 300)])
@pytest.mark.parametrize("excluded_steps", [(), ((3, 5),), ((0, 1), (10, 12))])
def test_steps_and_samples_lead_to_each_other(
    rampup_batch_size: tuple[int, int, int] | None, excluded_steps: tuple[tuple[int, int], ...]
) -> None:
    schedule = TrainingSchedule(global_batch_size=32, rampup_batch_size=rampup_batch_size)
    skips = [(schedule.samples_after(a), schedule.samples_after(b)) for a, b in excluded_steps]
    schedule = replace(schedule, excluded_ranges=skips)
    consumed = 0
    step = 1
    while consumed < 1000:
        excluded = [stop for start, stop in skips if start <= consumed < stop]
        if excluded:
            assert schedule.step_of(consumed) is None
            consumed = excluded[0]
            continue
        size = schedule.size_at(consumed)
        assert schedule.samples_of_step(step) == range(consumed, consumed + size)
        assert {schedule.step_of(sample) for sample in schedule.samples_of_step(step)} == {step}
        consumed += size
        step += 1
    with pytest.raises(ConfigError, match="counted from 1"):
        schedule.samples_of_step(0)


@pytest.mark.guarantee("steps-samples-ranks")
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_rank_of_a_sample_is_the_one_that_reads_it(contiguous: bool) -> None:
    start = 96
    for rank in range(4):
        for consumed in range(start, start + 48, 8):
            for sample in rank_samples(consumed, 2, rank, 4, contiguous=contiguous).tolist():
                assert rank_of(sample, start, 2, 4, contiguous=contiguous) == rank
