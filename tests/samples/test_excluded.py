"""Documents that are excluded are not seen from their sample on, in any order and by any reader."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    IndexedDatasetWriter,
    PhaseConfig,
    SFTDataset,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    build_datasets,
)
from streammega.convert import convert
from streammega.dataset.names import shard_name
from streammega.dataset.provenance import (
    ENDING,
    LINE,
    DocumentOrigin,
    ProvenanceWriter,
    collect_origins,
)
from streammega.errors import ConfigError, FormatError, StateError
from streammega.kernels.fields import FILE_STRIDE
from streammega.order.state import differing_values
from streammega.parallel.broadcast import samples_of
from streammega.parallel.fields import rank_fields
from streammega.samples import excluded
from streammega.samples.excluded import (
    MAX_FILES,
    ExcludedRanges,
    ExcludedTokens,
    check_limits,
)
from streammega.samples.provenance import Provenance
from streammega.samples.source import SampleSource
from streammega.samples.token_file import Runs, TokenFile
from streammega.storage import open_store
from streammega.train.config import load_run
from tests.support.examples import examples

LENGTH = 32
GLOBAL = 12
EOD = 7
SAMPLES = 240
ORDERS = ("megatron", "stream", "sequential")
MASKS: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}

Documents = dict[str, list[np.ndarray]]
"""The tokens of the documents of each shard, by its prefix."""


def write_shard(prefix: str, rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Documents that end with EOD, the last sequence of each, and where they came from."""
    documents = []
    origins = ProvenanceWriter()
    name = Path(prefix).name
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(count):
            tokens = rng.integers(100, 60_000, int(rng.integers(1, 90))).astype(np.uint16)
            tokens[-1] = EOD
            cut = int(rng.integers(0, len(tokens)))
            writer.add_item(tokens[:cut])
            writer.add_item(tokens[cut:])
            writer.end_document()
            documents.append(tokens)
            # every second id is in both datasets
            known = f"id-{number}" if number % 2 else f"{name}-{number}"
            origin = DocumentOrigin(path=f"{name}.jsonl", kind=LINE, place=number + 1, id=known)
            origins.add(collect_origins([origin]))
    Path(prefix + ENDING).write_bytes(origins.finish())
    return documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    """Two datasets, one of two shards."""
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(3)
    documents = {}
    for name in ["code", *(f"web/{shard_name('web', number, 2)}" for number in range(2))]:
        documents[str(root / name)] = write_shard(str(root / name), rng, 60)
    return root, documents


def config_of(root: Path, order: str = "stream", **options: Any) -> DataConfig:
    options = {"blend": [(f"{root}/web/", 0.7), (f"{root}/code", 0.3)]} | options
    settings: dict[str, Any] = {
        "shuffle_lanes": 24,
        "shuffle_block_bytes": 512,
        "num_samples": (SAMPLES, 0, 0),
        "storage": StorageConfig(cache_dir=root / "cache"),
        "eod_id": EOD,
    }
    return DataConfig(sequence_length=LENGTH, order=order, **(settings | options))  # type: ignore[arg-type]


class Oracle:
    """What batches must be: by the documents themselves, one token after the other.

    since: {(shard, document): the first sample that does not see it}.
    """

    def __init__(self, config: DataConfig, corpus: Documents, since: dict[tuple[str, int], int]):
        self.source: SampleSource = StreamingDataset(
            replace(
                config,
                exclude_documents=(),
                phases=[replace(p, exclude_documents=()) for p in config.phases],
            ),
            micro_batch_size=1,
            global_batch_size=GLOBAL,
        ).samples
        self.files: list[list[np.ndarray]] = []
        self.sinces: list[list[np.ndarray]] = []
        self.config = config
        for prefix in Provenance(config, global_batch_size=GLOBAL).datasets:
            own = [shard for shard in sorted(corpus) if shard.startswith(prefix)]
            tokens = [np.concatenate(corpus[shard]) for shard in own]
            firsts = []
            for shard in own:
                of_document = [since.get((shard, n), 1 << 60) for n in range(len(corpus[shard]))]
                sizes = [len(document) for document in corpus[shard]]
                firsts.append(np.repeat(of_document, sizes))
            if config.order != "stream":  # all shards end to end
                tokens = [np.concatenate(tokens)]
                firsts = [np.concatenate(firsts)]
            self.files.append(tokens)
            self.sinces.append(firsts)

    def sample(self, number: int) -> dict[str, np.ndarray]:
        """The fields of one sample."""
        found = self.source.locate(np.array([number]))
        ids = []
        gone = []
        for row in range(len(found.start)):
            place = (int(found.dataset[row]), int(found.file[row]))
            run = slice(int(found.start[row]), int(found.stop[row]))
            ids.append(self.files[place[0]][place[1]][run].astype(np.int64))
            gone.append(self.sinces[place[0]][place[1]][run] <= number)
        seen = np.where(np.concatenate(gone), EOD, np.concatenate(ids))
        excluded = np.concatenate(gone)
        length = len(seen) - 1
        position = np.zeros(length, np.int64)
        for column in range(1, length):
            position[column] = 0 if seen[column - 1] == EOD else position[column - 1] + 1
        return {
            "tokens": seen[:length],
            "labels": seen[1:],
            "loss_mask": (~(excluded[:length] | excluded[1:])).astype(np.float32),
            "position_ids": position if self.config.reset_position_ids else np.arange(length),
        }

    def check(self, sample: int, row: dict[str, torch.Tensor]) -> None:
        for name, wanted in self.sample(sample).items():
            np.testing.assert_array_equal(row[name].numpy(), wanted, f"{name} of sample {sample}")


SKIPPED = {"web-00000-of-00002": [0, 1, 2, 17, 59], "web-00001-of-00002": [0, 30], "code": [5, 6]}
"""By shard. Neighbours, and the first and last of a shard."""


def named(root: Path) -> list[str]:
    """Those documents, by all kinds of names."""
    return [
        f"{root}/web/web-00000-of-00002#0",
        "web-00000-of-00002:1",
        "web-00000-of-00002-2",  # an id
        "web-00000-of-00002.jsonl:18",  # a line
        "web#59",
        "web-00001-of-00002#0",
        f"{root}/web/#90",
        f"{root}/code.idx#5",
        "code:6",
    ]


def since_of(root: Path, first: int) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for name, numbers in SKIPPED.items():
        folder = root if name == "code" else root / "web"
        found |= {(str(folder / name), number): first for number in numbers}
    return found


def read(
    config: DataConfig, ranks: int, micro: int, stop: int, state: dict[str, Any] | None = None
) -> tuple[dict[int, dict[str, torch.Tensor]], dict[str, Any]]:
    """({sample: its fields} up to `stop` over all ranks, the state there)."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    after: dict[str, Any] = {}
    for rank in range(ranks):
        with StreamLoader(
            config, micro_batch_size=micro, global_batch_size=GLOBAL, dp_rank=rank, dp_size=ranks
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while loader.consumed_samples < stop:
                ids = loader.dataset.sample_ids(loader.consumed_samples)
                batch = loader.take()
                for row, sample in enumerate(ids.tolist()):
                    found[sample] = {name: batch[name][row] for name in batch}
            after = loader.state_dict()
    return found, after


# --- the kernel and the table ---------------------------------------------------------------------


@st.composite
def lists_of_stretches(draw: st.DrawFn) -> list[ExcludedRanges]:
    """Stretches of two files of 60 tokens, in lists that overlap."""
    lists = []
    for first in draw(st.lists(st.integers(0, 9), unique=True, max_size=4)):
        ends = st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 60))
        chosen = draw(st.lists(ends, max_size=6))
        starts = [file * FILE_STRIDE + min(a, b) for file, a, b in chosen]
        stops = [file * FILE_STRIDE + max(a, b) for file, a, b in chosen]
        starts_array = np.array(starts, np.int64)
        stops_array = np.array(stops, np.int64)
        lists.append(ExcludedRanges(first, starts_array, stops_array, {}))
    return lists


def scan(lists: list[ExcludedRanges], token: int) -> int:
    """The first list that has a token; 100: none."""
    having = [
        excluded.first_sample
        for excluded in lists
        if ((excluded.starts <= token) & (token < excluded.stops)).any()
    ]
    return min(having, default=100)


@pytest.mark.many_examples
@pytest.mark.guarantee("excluded-documents-columns")
@settings(max_examples=examples(20))
@given(lists=lists_of_stretches(), data=st.data())
def test_columns_that_are_excluded_are_those_of_a_scan(
    lists: list[ExcludedRanges], data: st.DataObject
) -> None:
    table = ExcludedTokens(lists)
    starts, stops, since = table.starts, table.stops, table.since
    assert (starts < stops).all()
    assert (stops[:-1] <= starts[1:]).all()
    touching = stops[:-1] == starts[1:]
    assert (since[:-1] != since[1:])[touching].all(), "as few as there can be"
    rows = data.draw(st.integers(1, 3))
    sample_ids = np.array(data.draw(st.lists(st.integers(0, 12), min_size=rows, max_size=rows)))
    file, start, size, sample, column = [], [], [], [], []
    wanted = np.zeros((rows, 200), bool)
    for row in range(rows):
        filled = 0
        for _ in range(data.draw(st.integers(0, 3))):
            file.append(data.draw(st.integers(0, 1)))
            start.append(data.draw(st.integers(0, 60)))
            size.append(data.draw(st.integers(0, 60 - start[-1])))
            sample.append(row)
            column.append(filled)
            for at in range(size[-1]):
                token = file[-1] * FILE_STRIDE + start[-1] + at
                wanted[row, filled + at] = scan(lists, token) <= sample_ids[row]
                first = table.excluded_from(file[-1], start[-1] + at)
                assert (100 if first is None else first) == scan(lists, token)
            filled += size[-1]
    columns = [np.array(values, np.int64) for values in (file, start, size, sample, column)]
    runs = Runs(
        **dict(zip(("file", "start", "size", "sample", "sample_start"), columns, strict=True))
    )
    found = table.mask(runs, sample_ids)
    ids = np.zeros((rows, 200), np.uint16)
    if found is not None:
        found.overwrite(ids, 1)
    np.testing.assert_array_equal(ids.astype(bool), wanted)
    assert (found is not None) == wanted.any()


def tokens_of_files(count: int, num_tokens: int) -> list[TokenFile]:
    """Files that are told of and not there."""
    store, key = open_store("/nowhere/web.bin", StorageConfig())
    file = TokenFile(store=store, key=key, dtype=np.dtype(np.uint16), num_tokens=num_tokens)
    return [file] * count


@pytest.mark.guarantee("more-files-longer")
def test_files_that_numbers_of_tokens_cannot_tell_apart_are_refused() -> None:
    """Tokens of all files have one number each, below 2**63."""
    check_limits([tokens_of_files(MAX_FILES - 1, 1), tokens_of_files(1, FILE_STRIDE - 1)])
    assert np.iinfo(np.int64).max == MAX_FILES * FILE_STRIDE - 1
    with pytest.raises(ConfigError, match=r"has 524,289 files.*at most 524,288; merge .*convert"):
        check_limits([tokens_of_files(MAX_FILES, 1), tokens_of_files(1, 1)])
    with pytest.raises(ConfigError, match=r"web.bin: has 17,592,186,044,416 tokens.*convert"):
        check_limits([tokens_of_files(1, 1), tokens_of_files(1, FILE_STRIDE)])


@pytest.mark.guarantee("more-files-longer")
def test_skipping_documents_asks_whether_there_is_room(
    corpus: tuple[Path, Documents], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = corpus
    monkeypatch.setattr(excluded, "MAX_FILES", 2)
    config = config_of(root, exclude_documents=[f"{root}/code#0"])
    with pytest.raises(ConfigError, match="has 3 files"):
        StreamingDataset(config, micro_batch_size=1, global_batch_size=GLOBAL)
    # without any, files are as many as they like
    StreamingDataset(config_of(root), micro_batch_size=1, global_batch_size=GLOBAL)


def test_a_run_without_tokens_has_none_that_are_excluded() -> None:
    within = {"file": 0, "start": 5, "size": 0, "sample": 0, "sample_start": 3}
    run = Runs(**{name: np.array([value]) for name, value in within.items()})
    excluded_tokens = ExcludedTokens([ExcludedRanges(0, np.array([0]), np.array([10]), {})])
    assert excluded_tokens.mask(run, np.array([1])) is None


# --- what readers hand out ------------------------------------------------------------------------


@pytest.mark.guarantee("must-learned-seen")
@pytest.mark.parametrize("masks", [{}, MASKS])
@pytest.mark.parametrize("order", ORDERS)
def test_documents_are_excluded_from_a_sample_on_in_every_order(
    corpus: tuple[Path, Documents], order: str, masks: dict[str, Any]
) -> None:
    root, documents = corpus
    first = 100  # in the middle of a global batch
    config = config_of(root, order, exclude_documents=[(first, named(root))], **masks)
    oracle = Oracle(config, documents, since_of(root, first))
    found, _ = read(config, 2, 3, SAMPLES)
    assert len(found) == SAMPLES
    some = 0
    for sample, row in found.items():
        oracle.check(sample, row)
        some += int((row["loss_mask"] == 0).sum())
        if masks:
            check_bounds(row)
    assert some > 100
    # the function of a position alone says the same
    dataset = StreamingDataset(config, micro_batch_size=6, global_batch_size=GLOBAL)
    batch = dataset.batch(108)
    for row_number, sample in enumerate(dataset.sample_ids(108).tolist()):
        oracle.check(sample, {name: field[row_number] for name, field in batch.items()})


@pytest.mark.guarantee("excluded-documents-columns")
def test_sequences_without_tokens_take_no_loss_from_their_neighbours(tmp_path: Path) -> None:
    """With inter_document_masking samples have them, wherever the shuffle puts them."""
    prefix = f"{tmp_path}/a"
    rng = np.random.default_rng(5)
    documents = []
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(60):
            tokens = rng.integers(100, 60_000, 12).astype(np.uint16)
            for sequence in (tokens[:5], tokens[:0], tokens[5:]):
                writer.add_item(sequence)
            writer.end_document()
            documents.append(tokens)
    gone = range(0, 60, 2)
    config = config_of(
        tmp_path,
        "megatron",
        blend=[prefix],
        inter_document_masking=True,
        exclude_documents=[f"a#{number}" for number in gone],
    )
    oracle = Oracle(config, {prefix: documents}, {(prefix, number): 0 for number in gone})
    found, _ = read(config, 1, 4, 96)
    batch = StreamingDataset(config, micro_batch_size=12, global_batch_size=12).batch(0)
    for sample, row in found.items():
        wanted = oracle.sample(sample)["loss_mask"]
        np.testing.assert_array_equal(row["loss_mask"].numpy(), wanted)
        if sample < 12:
            np.testing.assert_array_equal(batch["loss_mask"][sample].numpy(), wanted)


def check_bounds(row: dict[str, torch.Tensor]) -> None:
    """Documents begin where positions do."""
    bounds = row["cu_seqlens"].unique().tolist()
    assert bounds == [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), LENGTH]


@pytest.mark.guarantee("must-learned-seen")
@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_another_where_nothing_is_excluded(
    corpus: tuple[Path, Documents], order: str
) -> None:
    root, _ = corpus
    plain, plain_state = read(config_of(root, order), 1, 4, 96)
    # a list that has not begun, and one of documents that are not read
    for names in ([(96, named(root))], []):
        found, state = read(config_of(root, order, exclude_documents=names), 1, 4, 96)
        assert state == plain_state
        for sample, row in plain.items():
            for name, field in row.items():
                assert torch.equal(found[sample][name], field)


@pytest.mark.many_examples
@pytest.mark.guarantee("must-learned-seen")
@given(
    resumes=st.lists(
        st.tuples(st.integers(1, 7), st.sampled_from([(1, 12), (2, 3), (4, 1), (12, 1)])),
        min_size=1,
        max_size=3,
    ),
    chosen=st.lists(
        st.tuples(
            st.sampled_from(sorted(SKIPPED)), st.integers(0, 59), st.sampled_from([0, 60, 96])
        ),
        max_size=30,
    ),
)
@settings(max_examples=examples(3))
def test_any_lists_over_phases_are_a_function_of_the_sample_through_resumes(
    corpus: tuple[Path, Documents],
    resumes: list[tuple[int, tuple[int, int]]],
    chosen: list[tuple[str, int, int]],
) -> None:
    root, documents = corpus
    lists: dict[int, list[str]] = {0: [], 60: [], 96: []}
    since: dict[tuple[str, int], int] = {}
    for shard, number, first in chosen:
        lists[first].append(f"{shard}#{number}")
        prefix = str(root / shard) if shard == "code" else str(root / "web" / shard)
        since[prefix, number] = min(first, since.get((prefix, number), first))
    phases = [
        PhaseConfig(
            first_sample=60, blend=[f"{root}/code", f"{root}/web/"], exclude_documents=lists[60]
        ),
        PhaseConfig(first_sample=96, sequence_length=24, exclude_documents=lists[96]),
    ]
    fields = ["tokens", "labels", "loss_mask", "position_ids"]
    config = config_of(root, phases=phases, exclude_documents=lists[0], fields=fields)
    oracle = Oracle(config, documents, since)
    state = None
    at = 0
    for steps, (ranks, micro) in resumes:
        at += steps * GLOBAL
        found, state = read(config, ranks, micro, at, state)
        for sample, row in found.items():
            oracle.check(sample, row)


@pytest.mark.guarantee("excluded-documents-columns")
def test_documents_are_excluded_while_a_phase_brings_their_dataset_in(
    corpus: tuple[Path, Documents], tmp_path: Path
) -> None:
    """By the names that stood in a file of them when the run was begun."""
    root, documents = corpus
    listed = tmp_path / "names.txt"
    listed.write_text("\n".join(named(root)))
    joins = PhaseConfig(first_sample=60, blend=[f"{root}/code", f"{root}/web/"])
    config = config_of(
        root, blend=[f"{root}/code"], phases=[joins], exclude_documents=[(24, str(listed))]
    )
    oracle = Oracle(config, documents, since_of(root, 24))
    sizes: dict[str, Any] = {"micro_batch_size": 6, "global_batch_size": GLOBAL}
    with (
        StreamLoader(config, dp_rank=0, dp_size=2, **sizes) as first,
        StreamLoader(config, dp_rank=1, dp_size=2, **sizes) as second,
    ):
        listed.write_text("\n".join([*named(root), "code#9", "web#9"]))
        for loader in (first, second):
            while loader.consumed_samples < 120:
                ids = loader.dataset.sample_ids(loader.consumed_samples)
                batch = loader.take()
                for row, sample in enumerate(ids.tolist()):
                    oracle.check(sample, {name: batch[name][row] for name in batch})
        state = first.state_dict()
        assert second.state_dict() == state
    with (
        StreamLoader(config, **sizes) as edited,
        pytest.raises(StateError, match="exclude_documents"),
    ):
        edited.load_state_dict(state)
    listed.write_text("\n".join(named(root)))
    with StreamLoader(config, **sizes) as resumed:
        resumed.load_state_dict(state)


@pytest.mark.guarantee("excluded-documents-columns")
def test_workers_and_a_blend_by_index_see_the_same(corpus: tuple[Path, Documents]) -> None:
    root, documents = corpus
    config = config_of(root, "megatron", exclude_documents=[(24, named(root))])
    oracle = Oracle(config, documents, since_of(root, 24))
    train, _, _ = build_datasets(config)
    assert train is not None
    assert not isinstance(train, list)
    for sample in (0, 23, 24, 60, 119):
        oracle.check(sample, train[sample])
    dataset = StreamingDataset(config, micro_batch_size=3, global_batch_size=GLOBAL)
    workers = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    at = 0
    for batch in workers:
        for row in range(3):
            oracle.check(at + row, {name: field[row] for name, field in batch.items()})
        at += 3
    assert at == SAMPLES


@pytest.mark.guarantee("excluded-documents-columns")
def test_lists_of_phases_go_by_the_samples_of_the_whole_stream(
    corpus: tuple[Path, Documents],
) -> None:
    root, documents = corpus
    phases = [
        PhaseConfig(first_sample=48, blend=[f"{root}/code"], exclude_documents=["code#7"]),
        PhaseConfig(first_sample=96, blend=[f"{root}/web/"], exclude_documents=named(root)),
    ]
    config = config_of(root, phases=phases, num_samples=(180, 0, 0))
    since = since_of(root, 96) | {(f"{root}/code", 7): 48}
    oracle = Oracle(config, documents, since)
    found, _ = read(config, 2, 3, 180)
    assert len(found) == 180
    for sample, row in found.items():
        oracle.check(sample, row)
    dataset = StreamingDataset(config, micro_batch_size=12, global_batch_size=GLOBAL)
    for row_number, sample in enumerate(dataset.sample_ids(132).tolist()):
        batch = dataset.batch(132)
        oracle.check(sample, {name: field[row_number] for name, field in batch.items()})
    begun = [dataset.samples.identity(at).get("exclude_documents", []) for at in (48, 96, 108)]
    assert [[first for first, _ in lists] for lists in begun] == [[], [48], [48, 96]]


@pytest.mark.guarantee("excluded-documents-columns")
@pytest.mark.parametrize("cp", [1, 2])
def test_ranks_that_are_sent_ids_derive_the_same(corpus: tuple[Path, Documents], cp: int) -> None:
    root, documents = corpus
    config = config_of(root, exclude_documents=[(50, named(root))])
    oracle = Oracle(config, documents, since_of(root, 50))
    for rank in range(cp):
        options: dict[str, Any] = {"cp_rank": rank, "cp_size": cp} if cp > 1 else {}
        with StreamLoader(
            config, micro_batch_size=4, global_batch_size=GLOBAL, ids_only=True, **options
        ) as loader:
            assert [*loader.columns] == ["has_loss"]
            bounds = [(0, LENGTH)]
            if cp > 1:
                quarter = LENGTH // 4
                bounds = [(n * quarter, (n + 1) * quarter) for n in (rank, 3 - rank)]
            for first in range(0, 96, 4):
                raw = loader.take()
                batch = rank_fields(samples_of(raw), config, bounds)
                for row in range(4):
                    wanted = oracle.sample(first + row)
                    for name, field in wanted.items():
                        kept = np.concatenate([field[low:high] for low, high in bounds])
                        np.testing.assert_array_equal(batch[name][row].numpy(), kept, name)


def by_trace(config: DataConfig, gone: set[int]) -> dict[int, np.ndarray]:
    """For each of some samples which of its tokens are of documents that are gone, as a trace tells."""
    provenance = Provenance(config, global_batch_size=GLOBAL)
    found = {}
    for sample in provenance.trace(np.arange(48)):
        found[sample.sample] = np.zeros(LENGTH + 1, bool)
        for run in sample.runs:
            columns = slice(run.column, run.column + run.stop - run.start)
            found[sample.sample][columns] = run.name.document in gone
    return found


@pytest.mark.guarantee("excluded-documents-columns")
@pytest.mark.parametrize("kind", ["pack", "chat"])
def test_bins_and_conversations_keep_their_form(tmp_path: Path, kind: str) -> None:
    """Of packed datasets, whose samples end in padding, and of those whose modes make the mask."""
    lines = []
    for number in range(80):
        text = "x" * (1 + number % 20)
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        lines.append(json.dumps({"text": text, "messages": chat}))
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {"pack_length": LENGTH} if kind == "pack" else {"chat": True}
    convert(
        [str(tmp_path / "in.jsonl")], str(tmp_path / "out"),
        tokenizer="bytes", workers=1, **options,
    )  # fmt: skip
    order = "megatron" if kind == "chat" else "stream"
    config = config_of(tmp_path, order, blend=[f"{tmp_path}/out"], eod_id=256, **MASKS)
    gone = {3, 4, 40, 79}
    names = [f"out#{number}" for number in gone]  # bins are in another order than lines
    plain, _ = read(config, 1, 4, 48)
    found, _ = read(replace(config, exclude_documents=names), 1, 4, 48)
    some = 0
    for sample, hidden in by_trace(config, gone).items():
        row = found[sample]
        before = plain[sample]
        some += int(hidden.sum())
        tokens = np.where(hidden[:-1], 256, before["tokens"].numpy())
        np.testing.assert_array_equal(row["tokens"].numpy(), tokens)
        labels = np.where(hidden[1:], 256, before["labels"].numpy())
        np.testing.assert_array_equal(row["labels"].numpy(), labels)
        unlearned = hidden[1:] | hidden[:-1]
        mask = np.where(unlearned, 0, before["loss_mask"].numpy())
        np.testing.assert_array_equal(row["loss_mask"].numpy(), mask)
        check_bounds(row)
    assert some > 20


@pytest.mark.guarantee("excluded-documents-columns")
def test_validation_stays_the_same(corpus: tuple[Path, Documents]) -> None:
    root, _ = corpus
    config = config_of(root, split="0.7,0.3,0", num_samples=None, blend=[f"{root}/web/"])
    skipping = replace(config, exclude_documents=["web#59", "web#119", "web#118"])
    sizes: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 4, "split": "valid"}
    one = StreamingDataset(config, **sizes)
    other = StreamingDataset(skipping, **sizes)
    assert other.state_dict() == one.state_dict()
    for consumed in (0, 4, 8):
        for name, field in one.batch(consumed).items():
            assert torch.equal(other.batch(consumed)[name], field)


# --- names ----------------------------------------------------------------------------------------


def excluded_of(config: DataConfig) -> set[tuple[str, int]]:
    """The documents that are excluded in some sample."""
    provenance = Provenance(config, global_batch_size=GLOBAL)
    excluded = provenance.source.excluded
    assert excluded is not None
    found = set()
    for dataset in range(len(provenance.datasets)):
        for number, shard in enumerate(provenance.shards(dataset)):
            file = number + sum(len(provenance.shards(before)) for before in range(dataset))
            for document in range(shard.num_documents):
                (run,) = shard.tokens_of(document)
                if excluded.excluded_from(file, run.file_start) is not None:
                    found.add((Path(shard.name).name, document))
    return found


@pytest.mark.guarantee("excluded-documents-go")
def test_documents_go_by_many_names(corpus: tuple[Path, Documents], tmp_path: Path) -> None:
    root, _ = corpus
    wanted = {(name, number) for name, numbers in SKIPPED.items() for number in numbers}
    assert excluded_of(config_of(root, exclude_documents=named(root))) == wanted
    listed = tmp_path / "names.txt"
    listed.write_text("\n".join(named(root)) + "\n\n")
    assert excluded_of(config_of(root, exclude_documents=str(listed))) == wanted
    # an id that several documents have is that of all of them, unless a dataset is named
    everywhere = {(name, 3) for name in SKIPPED}
    assert excluded_of(config_of(root, exclude_documents=["id-3"])) == everywhere
    assert excluded_of(config_of(root, exclude_documents={"code": ["id-3"]})) == {("code", 3)}
    of_web = {f"{root}/web/": ["id-3"], "code": str(listed)}
    with pytest.raises(ConfigError, match="exclude_documents: no document is called"):
        excluded_of(config_of(root, exclude_documents=of_web))


@pytest.mark.guarantee("excluded-documents-go")
def test_names_of_a_file_end_at_newlines_alone_and_begin_after_its_byte_order_mark(
    corpus: tuple[Path, Documents], tmp_path: Path
) -> None:
    root, _ = corpus
    names = ["id-1", "id\u2028two", "id\x0cthree"]
    listed = tmp_path / "names.txt"
    listed.write_bytes(("\ufeff" + "\r\n".join(names)).encode())
    with pytest.raises(ConfigError, match="no document is called") as caught:
        excluded_of(config_of(root, exclude_documents=str(listed)))
    missing = ", ".join(map(repr, names[1:]))
    assert f"no document is called {missing};" in str(caught.value), "id-1 is one"


MISTAKES: list[tuple[Any, str]] = [
    (["id-1", "nobody", "code#60"], "is called 'nobody', 'code#60'; .*code has 60 documents"),
    ("nowhere.txt", r"there is no file nowhere.txt; write one name a line"),
    ({3: ["id-1"]}, r"exclude_documents is \{3: \['id-1'\]\}; it takes the path of a file"),
    ({"wep": ["id-1"]}, r"exclude_documents: wep is no dataset here; there are .*/web/"),
    ([(0, "names.txt"), "id-1"], r"exclude_documents holds 'id-1'; it takes names"),
    ([(-1, ["id-1"])], r"exclude_documents holds \(-1, \['id-1'\]\)"),
    ([3], r"exclude_documents holds 3"),
    (7, r"exclude_documents is 7; it must be text or a list or a mapping"),
]


@pytest.mark.guarantee("excluded-documents-go")
@pytest.mark.parametrize(("given_names", "message"), MISTAKES)
def test_mistaken_names_are_told(
    corpus: tuple[Path, Documents], given_names: Any, message: str
) -> None:
    root, _ = corpus
    with pytest.raises(ConfigError, match=message):
        StreamingDataset(
            config_of(root, exclude_documents=given_names), micro_batch_size=1, global_batch_size=1
        )


@pytest.mark.guarantee("excluded-documents-go")
def test_a_number_that_is_also_a_place_is_refused(
    corpus: tuple[Path, Documents], tmp_path: Path
) -> None:
    write_shard(str(tmp_path / "a"), np.random.default_rng(0), 4)
    origins = ProvenanceWriter()
    for number in range(4):  # where another name of the same kind leads to another document
        origins.add(collect_origins([DocumentOrigin(path="a", kind=LINE, place=3 - number, id="")]))
    (tmp_path / "a.origins").write_bytes(origins.finish())
    config = config_of(tmp_path, blend=[f"{tmp_path}/a"], exclude_documents=["a:1"])
    with pytest.raises(
        ConfigError, match="'a:1' is the number of one document, and the origin of another"
    ):
        StreamingDataset(config, micro_batch_size=1, global_batch_size=1)


@pytest.mark.guarantee("excluded-documents-go")
def test_a_number_and_a_place_of_one_stored_document_are_no_contradiction(tmp_path: Path) -> None:
    write_shard(str(tmp_path / "a"), np.random.default_rng(0), 4)
    origins = ProvenanceWriter()
    for number in range(4):
        place = DocumentOrigin(path=f"{tmp_path}/a", kind=LINE, place=number, id="")
        origins.add(collect_origins([place]))
    (tmp_path / "a.origins").write_bytes(origins.finish())
    # its shard is in the blend twice: the number is of one dataset, the place of both
    config = config_of(tmp_path, blend=[f"{tmp_path}/a", f"{tmp_path}/./a"])
    provenance = Provenance(config, global_batch_size=GLOBAL)
    assert provenance.find(f"{tmp_path}/a:1") == [(0, 0, 1), (1, 0, 1)]


@pytest.mark.guarantee("excluded-documents-go")
def test_numbers_of_datasets_named_in_full_need_no_origins(tmp_path: Path) -> None:
    write_shard(str(tmp_path / "a"), np.random.default_rng(0), 4)
    (tmp_path / "a.origins").write_bytes(b"damaged")  # so that it is told who reads it
    config = config_of(tmp_path, blend=[f"{tmp_path}/a"], exclude_documents=[f"{tmp_path}/a#3"])
    assert excluded_of(config) == {("a", 3)}
    with pytest.raises(FormatError, match=r"a\.origins"):
        excluded_of(replace(config, exclude_documents=["id-3"]))


@pytest.mark.guarantee("document-excluded-excluded")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", [0, 1])
def test_a_document_is_excluded_in_every_dataset_that_holds_its_shard(
    tmp_path: Path, order: str, first: int
) -> None:
    write_shard(f"{tmp_path}/web/web", np.random.default_rng(0), 20)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(tmp_path / "web" / f"web{suffix}")
    blend = [
        f"{tmp_path}/web/web",
        f"{tmp_path}/web/",
        f"{tmp_path}/web/../web/web",
        f"{tmp_path}/link",
    ]
    config = config_of(
        tmp_path,
        order,
        blend=[(name, 0.25) for name in blend],
        exclude_documents={blend[first]: [f"{blend[first].rstrip('/')}#5"]},
    )
    source = Provenance(config, global_batch_size=GLOBAL).source
    assert source.excluded is not None
    per_file: dict[int, list[tuple[int, int]]] = {}
    for file, start, stop, _ in source.excluded.ranges():
        per_file.setdefault(file, []).append((start, stop))
    assert sorted(per_file) == [0, 1, 2, 3]
    assert all(stretches == per_file[0] for stretches in per_file.values())


def write_pair_without_ids_of_b(folder: Path) -> None:
    """Shards a and b, of which b has lost its origins."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        write_shard(f"{folder}/{name}", rng, 20)
    (folder / "b.origins").unlink()


def test_the_warning_of_names_comes_once_however_often_a_run_opens_its_datasets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pair_without_ids_of_b(tmp_path)
    config = config_of(
        tmp_path, blend=[f"{tmp_path}/a", f"{tmp_path}/b"], exclude_documents=["id-1"]
    )
    for _ in range(3):
        excluded_of(config)
    assert caplog.text.count("no document of") == 1


def test_shards_in_which_ids_are_not_looked_for_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pair_without_ids_of_b(tmp_path)
    config = config_of(tmp_path, blend=[f"{tmp_path}/a", f"{tmp_path}/b"])
    for names, warns in (
        (["b#1", "a:3"], False),
        (["id-1", "b#1"], True),
        ({"a": ["id-1"]}, False),
    ):
        caplog.clear()
        excluded_of(replace(config, exclude_documents=names))
        assert (f"no document of {tmp_path}/b, since 1 shards" in caplog.text) == warns


TOML = """
[data]
blend = "web"
sequence_length = 16
order = "stream"
eod_id = 3
exclude_documents = {first}
[[data.phases]]
first_sample = 64
exclude_documents = {later}
[model]
vocab_size = 384
[train]
out_dir = "runs"
train_iters = 100
micro_batch_size = 1
global_batch_size = 4
"""


@pytest.mark.guarantee("excluded-documents-go")
def test_lists_are_written_in_the_file_of_a_run(tmp_path: Path) -> None:
    forms: list[tuple[str, list[tuple[int, Any, str | None]]]] = [
        ('"a.txt"', [(0, "a.txt", None)]),
        ('["a#1", "b"]', [(0, ("a#1", "b"), None)]),
        (
            '{web = "a.txt", "s3://b/code" = ["b"]}',
            [(0, "a.txt", "web"), (0, ("b",), "s3://b/code")],
        ),
    ]
    schedule = '[[0, "a.txt"], [8, ["a#1", "b"]]]'
    path = tmp_path / "run.toml"
    for text, wanted in forms:
        path.write_text(TOML.format(first=schedule, later=text))
        later = [(64, names, dataset) for _, names, dataset in wanted]
        first = [(0, "a.txt", None), (8, ("a#1", "b"), None)]
        data = load_run(str(path)).data
        assert data.exclusions_of("train") == [*first, *later]
        assert not data.exclusions_of("valid")
        path.write_text(TOML.format(first=text, later="[]"))
        assert load_run(str(path)).data.exclusions_of("train") == wanted


@pytest.mark.guarantee("excluded-documents-go")
def test_without_origins_documents_go_by_number_and_it_needs_an_end_of_documents(
    tmp_path: Path,
) -> None:
    write_shard(str(tmp_path / "a"), np.random.default_rng(0), 4)
    (tmp_path / "a.origins").unlink()
    config = config_of(tmp_path, blend=[f"{tmp_path}/a"], exclude_documents=["id-1"])
    with pytest.raises(ConfigError, match=re.escape("keep no origins (convert --provenance), so")):
        StreamingDataset(config, micro_batch_size=1, global_batch_size=1)
    needing = replace(config, eod_id=None, exclude_documents=["a#1"])
    with pytest.raises(ConfigError, match=r"exclude_documents needs eod_id, .*no manifest of the"):
        StreamingDataset(needing, micro_batch_size=1, global_batch_size=1)
    config = replace(config, eod_id=70_000, exclude_documents=["a#1"])
    with pytest.raises(ConfigError, match=r"stores ids as uint16, and eod_id 70000 does not fit"):
        StreamingDataset(config, micro_batch_size=1, global_batch_size=1)


# --- provenance -----------------------------------------------------------------------------------


@pytest.mark.guarantee("trace-marks-seen")
@pytest.mark.parametrize("order", ORDERS)
def test_a_trace_tells_what_is_not_seen_and_what_was_seen_before(
    corpus: tuple[Path, Documents], order: str
) -> None:
    root, documents = corpus
    lists: list[tuple[int, Any]] = [(40, named(root)), (100, ["web#40", "code#5"])]
    config = config_of(root, order, exclude_documents=lists)
    since = since_of(root, 40) | {(f"{root}/web/web-00000-of-00002", 40): 100}
    oracle = Oracle(config, documents, since)
    provenance = Provenance(config, global_batch_size=GLOBAL)
    for sample in provenance.trace(np.arange(160)):
        seen = np.ones(LENGTH + 1, bool)
        for run in sample.runs:
            first = since.get((run.shard, run.name.document), 1 << 60)
            assert run.excluded == (first <= sample.sample)
            seen[run.column : run.column + run.stop - run.start] = not run.excluded
        wanted = oracle.sample(sample.sample)["loss_mask"]
        np.testing.assert_array_equal(seen[:-1] & seen[1:], wanted.astype(bool))
    told = provenance.excluded_documents()
    names = {
        (provenance.shard_name(name.dataset, name.shard), name.document): first
        for name, first in told.items()
    }
    assert names == since
    for name, first in told.items():
        assert provenance.excluded_from(name) == first
    other = next(iter(told))
    assert provenance.excluded_from(other._replace(document=33)) is None


@pytest.mark.guarantee("trace-marks-seen")
@pytest.mark.parametrize("order", ORDERS)
def test_two_runs_differ_from_the_first_sample_that_does_not_see_the_same(
    corpus: tuple[Path, Documents], order: str
) -> None:
    root, documents = corpus
    config = config_of(root, order, exclude_documents=[(48, named(root))])
    one = Oracle(config, documents, since_of(root, 48))
    # the same documents, each from another sample on
    others = [(number, [name]) for number, name in enumerate(named(root), 48)]
    other_config = replace(config, exclude_documents=others)
    everything, some, other = (
        Provenance(each, global_batch_size=GLOBAL)
        for each in (replace(config, exclude_documents=()), config, other_config)
    )
    ids = np.arange(200)

    def differing(two: Provenance) -> list[int]:
        settings = differing_values(some.source.identity(), two.source.identity())
        assert list(settings) == ["exclude_documents"]
        pairs = zip(some.trace(ids), two.trace(ids), strict=True)
        return [sample.sample for sample, same in pairs if sample.runs != same.runs]

    first = next(s for s in range(200) if not one.sample(s)["loss_mask"].all())
    assert differing(everything)[0] == first
    assert all(sample < 48 + len(others) for sample in differing(other))


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("lists-past-kept")
@pytest.mark.parametrize("order", ORDERS)
def test_lists_of_the_past_are_kept_and_those_of_the_future_are_free(
    corpus: tuple[Path, Documents], order: str
) -> None:
    root, _ = corpus
    lists: list[tuple[int, Any]] = [(0, ["id-1"]), (48, ["code#5", "code#6"])]
    config = config_of(root, order, exclude_documents=lists)

    def resume(state: dict[str, Any], excluded_ranges: Any) -> None:
        loader = StreamLoader(
            replace(config, exclude_documents=excluded_ranges),
            micro_batch_size=4,
            global_batch_size=GLOBAL,
        )
        loader.load_state_dict(state)

    _, before = read(config, 1, 4, 48)
    resume(before, lists[:1])
    resume(before, [*lists[:1], (60, ["id-3"])])
    _, after = read(config, 1, 4, 60)
    resume(after, [*lists, (60, ["id-3"])])
    # other names of the same documents
    resume(after, [(0, ["id-1"]), (48, {"code": ["code-6", "code.jsonl:6"]})])
    for excluded_ranges, differs in (
        (lists[:1], 'exclude_documents: the checkpoint has .*48, "2 documents'),
        ([(0, ["id-1"]), (48, ["code#5"])], r"exclude_documents\[1\]\[1\]: .*\"2 doc.*\"1 doc"),
        ([(0, ["id-1"]), (36, lists[1][1])], r"exclude_documents\[1\]\[0\]: the checkpoint has 48"),
        ((), "exclude_documents: the checkpoint has .*, this run null"),
    ):
        with pytest.raises(StateError, match=differs):
            resume(after, excluded_ranges)


@pytest.mark.guarantee("lists-past-kept")
def test_a_dataset_that_joins_later_changes_no_list_of_the_past(
    corpus: tuple[Path, Documents],
) -> None:
    root, _ = corpus
    config = config_of(root, blend=[f"{root}/code"], exclude_documents=["id-3"])
    _, state = read(config, 1, 4, 48)
    joined = PhaseConfig(first_sample=48, blend=[f"{root}/web/"])
    loader = StreamLoader(
        replace(config, phases=[joined]), micro_batch_size=4, global_batch_size=GLOBAL
    )
    loader.load_state_dict(state)
    for _ in range(6):
        loader.take()
    assert '[0,"1 documents' in state["order"]
    assert '[0,"3 documents' in loader.state_dict()["order"]


@pytest.mark.guarantee("lists-past-kept")
def test_states_stay_small_with_many_lists(corpus: tuple[Path, Documents]) -> None:
    root, _ = corpus
    lists = [(first, [f"web#{first}", f"id-{2 * (first % 30) + 1}"]) for first in range(60)]
    config = config_of(root, exclude_documents=lists)
    _, state = read(config, 1, 4, 72)
    assert len(str(state)) < 1024
    other = [*lists[:-1], (59, ["web#1"])]
    loader = StreamLoader(
        replace(config, exclude_documents=other), micro_batch_size=4, global_batch_size=GLOBAL
    )
    with pytest.raises(
        StateError, match=r"exclude_documents: of 60 items, some of 52 to 59 differ"
    ):
        loader.load_state_dict(state)


def test_lines_of_conversations_have_no_documents_to_be_excluded(tmp_path: Path) -> None:
    config = config_of(tmp_path, exclude_documents=["id-1"])
    with pytest.raises(ConfigError, match="exclude_documents names documents of converted"):
        SFTDataset([str(tmp_path / "chat.jsonl")], lambda text: [1], config)
