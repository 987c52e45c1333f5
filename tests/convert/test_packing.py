"""convert --pack-length: bins of whole documents, and how they are trained on."""

from __future__ import annotations

import json
import logging
import shutil
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from streammega import (
    DataConfig,
    IndexedDataset,
    IndexedDatasetWriter,
    ParallelLayout,
    StorageConfig,
    StreamLoader,
)
from streammega.cli.main import app
from streammega.config import Order, PhaseConfig
from streammega.convert import ConvertReport, convert
from streammega.convert.documents import gather
from streammega.convert.options import ConvertOptions
from streammega.convert.write import packing, shards
from streammega.convert.write.copy import LoadedDocuments, load_documents
from streammega.convert.write.packing import pack
from streammega.dataset.provenance import open_provenance
from streammega.dataset.verify import verify
from streammega.errors import ConfigError, FormatError, StateError
from streammega.kernels.documents import best_fit
from streammega.samples.provenance import Provenance
from tests.support.builders import convert_files
from tests.support.examples import examples
from tests.support.gang import Gang
from tests.support.oracle import IndexedDataset as MegatronDataset
from tests.support.rank_programs import read_batches
from tests.support.servers import S3

EOD = 0
PACK = 32


def write(prefix: str, documents: list[list[int]], *, multimodal: bool = False) -> None:
    with IndexedDatasetWriter(prefix, np.uint16, multimodal) as writer:
        for number, document in enumerate(documents):
            cut = len(document) // 2 if number % 3 == 0 else len(document)
            lengths = [cut, len(document) - cut]
            writer.add_document(document, lengths, [0, 1] if multimodal else None)


def random_documents(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([2, 3, 7, 12, 20, 31, 32, 33, 70], count)
    return [[*rng.integers(1, 1000, size - 1).tolist(), EOD] for size in sizes]


def pieces_of(document: list[int], length: int = PACK) -> list[tuple[int, ...]]:
    return [tuple(document[start : start + length]) for start in range(0, len(document), length)]


def stored(prefix: str) -> list[tuple[int, ...]]:
    """The documents of a dataset, in their order."""
    indexed = IndexedDataset(prefix)
    sequences = [item[0] if isinstance(item, tuple) else item for item in indexed[:]]
    bounds = indexed.document_indices.tolist()
    documents = []
    for first, last in zip(bounds, bounds[1:], strict=False):
        documents.append(tuple(np.concatenate(sequences[first:last]).tolist()))
    return documents


def bins_of(prefix: str, length: int = PACK) -> list[list[tuple[int, ...]]]:
    """The documents of each bin, by where they lie."""
    bins: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for shard in IndexedDataset(prefix).shards:
        indexed = IndexedDataset(shard)
        bounds = indexed.document_indices[:-1]
        starts = indexed.sequence_offsets[bounds] // indexed.dtype.itemsize
        for start, document in zip(starts.tolist(), stored(shard), strict=True):
            place = bins.setdefault((shard, start // length), [])
            assert start % length == sum(map(len, place)), "documents of a bin lie end to end"
            assert start % length + len(document) <= length, "no document lies in two bins"
            place.append(document)
    return list(bins.values())


def lengths_of_bins(prefix: str, length: int = PACK) -> dict[tuple[int, ...], list[int]]:
    """The lengths of the documents of each bin, by its tokens."""
    bins = bins_of(prefix, length)
    return {
        tuple(token for document in one for token in document): [*map(len, one)] for one in bins
    }


def convert_packed(
    folder: Path, documents: list[list[int]], *, multimodal: bool = False, **settings: Any
) -> ConvertReport:
    """Write documents as `in`, and pack them as `out` in a folder."""
    write(str(folder / "in"), documents, multimodal=multimodal)
    return convert(
        [str(folder / "in")],
        str(folder / "out"),
        **({"pack_length": PACK, "eod_id": EOD} | settings),
    )


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    return random_documents(400)


@pytest.fixture(scope="module")
def packed(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A packed dataset of three shards."""
    folder = tmp_path_factory.mktemp("packed")
    convert_packed(folder, documents, shard_bytes=8000)
    return str(folder / "out")


# What is stored.


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int, int | None]:
    capacity = draw(st.integers(2, 40))
    sizes = draw(st.lists(st.integers(1, 3 * capacity), min_size=1, max_size=60))
    return sizes, capacity, draw(st.sampled_from([None, 1, 3]))


@pytest.mark.many_examples
@pytest.mark.guarantee("pack-puts-document")
@settings(max_examples=examples(25))
@given(windows())
def test_bins_hold_every_token_once_and_no_more_than_they_may(
    window: tuple[list[int], int, int | None],
) -> None:
    sizes, capacity, most = window
    options = ConvertOptions(pack_length=capacity, pack_max_documents=most)
    packed, counts = pack(np.array(sizes, np.int64), options)
    tokens: Counter[tuple[int, int]] = Counter()
    for document, start, size in zip(packed.document, packed.start, packed.size, strict=True):
        tokens.update((document, token) for token in range(start, start + size))
    assert tokens == Counter((d, t) for d, size in enumerate(sizes) for t in range(size))
    first_bin = packed.target // capacity
    assert np.array_equal(first_bin, (packed.target + packed.size - 1) // capacity)
    ends = packed.target + packed.size
    assert (ends[:-1] <= packed.target[1:]).all()
    assert set(first_bin.tolist()) == set(range(packed.num_bins))
    per_bin = np.bincount(first_bin)
    assert most is None or per_bin.max() <= most
    assert counts.padding == packed.num_bins * capacity - sum(sizes)
    assert (counts.bins, counts.pieces) == (packed.num_bins, len(packed.size))
    assert counts.most_pieces == per_bin.max()
    assert counts.split == sum(size > capacity for size in sizes)


@pytest.mark.guarantee("whole-documents-equal", "pack-puts-document")
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_each_document_goes_where_it_fits_best(sizes: list[int]) -> None:
    capacity = 20
    order = np.argsort(-np.array(sizes), kind="stable")
    bins = np.empty(len(sizes), np.int64)
    num_bins = best_fit(np.array(sizes), order, capacity, 1 << 62, bins)
    rooms: list[int] = []
    for item in order.tolist():
        fitting = [room for room in rooms if room >= sizes[item]]
        chosen = int(bins[item])
        if not fitting:
            assert chosen == len(rooms)
            rooms.append(capacity)
        assert not fitting or rooms[chosen] == min(fitting)
        rooms[chosen] -= sizes[item]
    assert num_bins == len(rooms)


@pytest.mark.guarantee("whole-documents-equal", "pack-puts-document")
def test_documents_arrive_whole_in_bins(packed: str, documents: list[list[int]]) -> None:
    bins = bins_of(packed)
    pieces = [piece for document in documents for piece in pieces_of(document)]
    assert Counter(piece for one in bins for piece in one) == Counter(pieces)
    said = json.loads(Path(f"{packed}.manifest.json").read_text())["pack"]
    tokens = sum(map(len, documents))
    assert said == {"length": PACK, "bins": len(bins), "padding": len(bins) * PACK - tokens}
    assert said["padding"] < 0.05 * tokens
    assert not verify(packed, eod_id=EOD).problems


def test_a_dataset_that_is_not_packed_has_no_bins(tmp_path: Path) -> None:
    write(str(tmp_path / "in"), random_documents(3))
    dataset = IndexedDataset(str(tmp_path / "in"))
    with pytest.raises(ConfigError, match="in: has no bins; convert it with --pack-length"):
        _ = dataset.num_bins
    with pytest.raises(ConfigError, match="has no bins"):
        dataset.bin_offsets()


@pytest.mark.guarantee("packed-dataset-megatron")
def test_megatron_reads_the_documents_and_no_padding(packed: str) -> None:
    shard = str(sorted(Path(packed).parent.glob("out-*.idx"))[0].with_suffix(""))
    ours = IndexedDataset(shard)
    theirs = MegatronDataset(shard)
    assert len(theirs) == len(ours)
    for number in range(len(ours)):
        assert theirs[number].tolist() == np.asarray(ours[number]).tolist()


@pytest.mark.guarantee("pack-puts-document")
def test_long_documents_are_dropped_where_asked_and_counted(
    documents: list[list[int]], tmp_path: Path
) -> None:
    report = convert_packed(tmp_path, documents, pack_overflow="drop")
    fitting = [tuple(document) for document in documents if len(document) <= PACK]
    assert Counter(stored(str(tmp_path / "out"))) == Counter(fitting)
    assert report.packing["dropped"] == len(documents) - len(fitting)


@pytest.mark.guarantee("packed-dataset-megatron")
def test_modes_stay_with_their_tokens(documents: list[list[int]], tmp_path: Path) -> None:
    convert_packed(tmp_path, documents, multimodal=True)

    def modes_of_tokens(prefix: str) -> Counter[tuple[int, int]]:
        counts: Counter[tuple[int, int]] = Counter()
        for tokens, mode in IndexedDataset(prefix)[:]:
            counts.update((token, mode) for token in tokens.tolist())
        return counts

    assert modes_of_tokens(str(tmp_path / "out")) == modes_of_tokens(str(tmp_path / "in"))


@pytest.mark.guarantee("memory-workers-interruptions")
@pytest.mark.parametrize("shuffle_seed", [None, 7])
def test_memory_workers_and_kills_change_no_byte(
    shuffle_seed: int | None,
    documents: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(str(tmp_path / "in"), documents)
    # so small that documents of several windows, and of several parts, meet
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 600)
    monkeypatch.setattr(packing, "WINDOW_BINS", 1)
    settings: dict[str, Any] = {
        "pack_length": PACK, "eod_id": EOD, "shard_bytes": 6000, "shuffle_seed": shuffle_seed,
    }  # fmt: skip
    inputs = [str(tmp_path / "in")]
    convert(inputs, str(tmp_path / "one" / "out"), workers=1, **settings)
    monkeypatch.setattr("streammega.convert.job.MIN_SEGMENT_BYTES", 900)
    monkeypatch.setattr("streammega.convert.job.SEGMENT_BYTES", 900)
    write_shard = shards.write_shard
    calls = []

    def failing(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write_shard(*arguments, **named)

    monkeypatch.setattr("streammega.convert.conversion.write_shard", failing)
    output = str(tmp_path / "two" / "out")
    with pytest.raises(KeyboardInterrupt):
        convert(inputs, output, workers=1, **settings)
    convert(inputs, output, workers=1, shuffle_memory_bytes=1 << 20, **settings)
    first = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    second = {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert first == second
    assert len(first) > 5


@pytest.mark.guarantee("tokens-window-packing")
def test_a_window_is_let_go_of_before_the_next_one_is_read(
    documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tmp_path / "in"), documents)
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 600)
    monkeypatch.setattr(packing, "WINDOW_BINS", 1)
    add_documents = IndexedDatasetWriter.add_documents
    read: list[weakref.ref[Any]] = []
    filled: list[weakref.ref[Any]] = []

    def reading(*arguments: Any) -> LoadedDocuments:
        assert not any(array() is not None for array in read + filled)
        held = load_documents(*arguments)
        read.extend(weakref.ref(tokens) for tokens in held.tokens)
        return held

    def gathering(*arguments: Any) -> None:
        filled.append(weakref.ref(arguments[-2]))
        gather(*arguments)

    def writing(*arguments: Any, starts: Any = None) -> None:
        assert starts is None or not any(array() is not None for array in read)
        add_documents(*arguments, starts=starts)

    monkeypatch.setattr("streammega.convert.write.packing.load_documents", reading)
    monkeypatch.setattr("streammega.convert.write.packing.gather", gathering)
    monkeypatch.setattr(IndexedDatasetWriter, "add_documents", writing)
    convert_files(tmp_path / "out", tmp_path / "in", pack_length=PACK, eod_id=EOD)
    assert len(filled) > 3


@pytest.mark.parametrize("shuffle_seed", [None, 7])
def test_origins_go_with_the_documents_of_bins(shuffle_seed: int | None, tmp_path: Path) -> None:
    texts = [f"{number} " * (number % 9 + 1) for number in range(60)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output = str(tmp_path / "out")
    convert(
        [str(source)],
        output,
        tokenizer="bytes",
        pack_length=16,
        provenance=True,
        shuffle_seed=shuffle_seed,
    )
    origins = open_provenance(output, StorageConfig())
    assert origins is not None
    for number, piece in enumerate(stored(output)):
        # their lines; large files tell bytes instead
        text = texts[origins[number].place - 1]
        assert bytes(token for token in piece if token < 256).decode() in text


@pytest.mark.guarantee("pack-puts-document")
def test_the_command_line_packs(documents: list[list[int]], tmp_path: Path) -> None:
    write(str(tmp_path / "in"), documents)
    arguments = [
        "convert",
        str(tmp_path / "in.idx"),
        str(tmp_path / "out"),
        "--pack-length",
        str(PACK),
    ]
    result = CliRunner().invoke(app, [*arguments, "--pack-max-documents", "2", "--eod-id", "0"])
    assert result.exit_code == 0, result.output
    assert max(map(len, bins_of(str(tmp_path / "out")))) == 2
    assert "padding: " in result.output
    described = CliRunner().invoke(app, ["describe", str(tmp_path / "out")])
    assert f"{len(bins_of(str(tmp_path / 'out'))):,} of {PACK} tokens\n" in described.output


@pytest.mark.guarantee("memory-workers-interruptions")
def test_packed_datasets_are_packed_anew_and_laid_end_to_end(
    packed: str, documents: list[list[int]], tmp_path: Path
) -> None:
    pieces = Counter(piece for document in documents for piece in pieces_of(document))
    for length in (2 * PACK, None):
        output = str(tmp_path / str(length))
        convert([f"{packed}.manifest.json"], output, eod_id=EOD, pack_length=length)
        assert Counter(stored(output)) == pieces


@pytest.mark.guarantee("packed-dataset-megatron")
def test_zstd_shards_hold_bins_too_and_tars_do_not(
    documents: list[list[int]], tmp_path: Path
) -> None:
    convert_packed(tmp_path, documents, format="zst")
    assert len(list(samples_of(config_of(str(tmp_path / "out"), "stream", tmp_path)))) == 48
    with pytest.raises(ConfigError, match="--pack-length"):
        convert([str(tmp_path / "in")], str(tmp_path / "tar"), pack_length=PACK, format="tar")


# How it is trained on.


def config_of(prefix: str, order: Order, tmp_path: Path, **settings: Any) -> DataConfig:
    return DataConfig(
        blend=[prefix],
        sequence_length=PACK,
        order=order,
        num_samples=(48, 0, 0),
        seed=3,
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
        shuffle_lanes=8 if order == "stream" else None,
        shuffle_block_bytes=256,
        **settings,
    )


def samples_of(config: DataConfig, dp_size: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Samples in their order."""
    ranks = [
        StreamLoader(config, micro_batch_size=2, global_batch_size=8, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    found = {}
    while ranks[0].consumed_samples < 48:
        for loader in ranks:
            ids = loader.dataset.sample_ids(loader.consumed_samples).tolist()
            batch = loader.take()
            for row, sample in enumerate(ids):
                found[sample] = {name: field[row] for name, field in batch.items()}
    for loader in ranks:
        loader.close()
    for sample in sorted(found):
        yield found[sample]


def bin_of(sample: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """The documents of a sample, end to end: what there is a loss on, and the first token."""
    tokens = sample["tokens"].tolist()
    filled = int(sample["loss_mask"].sum()) + 1
    assert sample["loss_mask"].tolist() == [1.0] * (filled - 1) + [0.0] * (PACK - filled + 1)
    assert tokens[1:filled] == sample["labels"].tolist()[: filled - 1]
    assert not any(tokens[filled:]), "padding becomes 0"
    return tuple(tokens[:filled])


@pytest.mark.guarantee("samples-bins-order")
@pytest.mark.parametrize(
    ("where", "order"),
    [
        ("disk", "stream"),
        ("disk", "megatron"),
        ("disk", "sequential"),
        ("bucket", "stream"),
        pytest.param("bucket", "megatron", marks=pytest.mark.soak),
        pytest.param("bucket", "sequential", marks=pytest.mark.soak),
    ],
)
def test_samples_are_bins_and_padding_has_no_loss(
    packed: str, order: Order, where: str, moto: S3, tmp_path: Path
) -> None:
    bins = [tuple(token for document in one for token in document) for one in bins_of(packed)]
    config = config_of(packed, order, tmp_path)
    if where == "bucket":
        bucket = moto.new_bucket()
        for path in Path(packed).parent.glob("out*"):
            moto.client().put_object(Bucket=bucket, Key=path.name, Body=path.read_bytes())
        storage = StorageConfig(storage_options=moto.options)
        config = replace(config, blend=[f"s3://{bucket}/out"], storage=storage)
    seen = [bin_of(sample) for sample in samples_of(config)]
    assert len(seen) == 48
    assert not Counter(seen) - Counter(bins), "of an epoch, each bin comes once"
    if order == "sequential":
        assert seen == bins[:48]
    assert seen == [bin_of(sample) for sample in samples_of(config, dp_size=2)]


@pytest.mark.guarantee("samples-bins-order")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_bounds_are_those_of_the_documents(packed: str, order: Order, tmp_path: Path) -> None:
    bins = lengths_of_bins(packed)
    by_eod = config_of(
        packed, order, tmp_path, eod_id=EOD, reset_attention_mask=True, reset_position_ids=True
    )
    for sample in samples_of(by_eod):
        lengths = bins[bin_of(sample)]
        padding = PACK - sum(lengths)
        expected = lengths + [padding] * (padding > 0)
        bounds = np.cumsum([0, *expected]).tolist()
        assert sample["cu_seqlens"].tolist()[: len(bounds)] == bounds
        positions = [place for length in expected for place in range(length)]
        assert sample["position_ids"].tolist() == positions
    if order == "stream":
        return
    by_index = config_of(packed, order, tmp_path, inter_document_masking=True)
    for sample in samples_of(by_index):
        lengths = bins[bin_of(sample)]
        lengths[-1] += PACK - sum(lengths)
        bounds = np.cumsum([0, *lengths]).tolist()
        assert sample["cu_seqlens"].tolist()[: len(bounds)] == bounds
        lengths[-1] -= lengths[-1] - bins[bin_of(sample)][-1]


@pytest.mark.guarantee("samples-bins-order")
@pytest.mark.parametrize("by_document", [False, True], ids=["parts", "whole"])
def test_ranks_of_a_layout_get_the_fields_of_bins(
    gang: Gang, packed: str, by_document: bool, tmp_path: Path
) -> None:
    config = config_of(
        packed,
        "stream",
        tmp_path,
        eod_id=EOD,
        reset_position_ids=by_document,
        reset_attention_mask=by_document,
    )
    sizes: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 8}
    with StreamLoader(config, **sizes) as loader:
        expected = [loader.take() for _ in range(3)]
    layout = ParallelLayout(tp=2, cp=2)
    quarter = PACK // 4
    for result in gang.run(layout.world_size, read_batches, layout, config, sizes, 3, 1, False):
        cp = result["at"]["cp"]
        kept = np.concatenate([np.arange(n * quarter, (n + 1) * quarter) for n in (cp, 3 - cp)])
        for batch, whole in zip(result["batches"], expected, strict=True):
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert np.array_equal(batch[name], whole[name].numpy()[:, kept]), name


@pytest.mark.guarantee("resume-splits-blends")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_resume_and_splits_and_blends_are_of_bins(
    packed: str, documents: list[list[int]], order: Order, tmp_path: Path
) -> None:
    convert_packed(tmp_path, random_documents(300, seed=1))
    other = str(tmp_path / "out")
    config = config_of(packed, order, tmp_path, split="1,1,0")
    config = replace(config, blend=[(packed, 0.5), (other, 0.5)], num_samples=(48, 24, 0))
    bins = [lengths_of_bins(name) for name in (packed, other)]
    samples = [bin_of(sample) for sample in samples_of(config)]
    of_first = sum(sample in bins[0] for sample in samples)
    assert 20 <= of_first <= 28
    assert all(sample in bins[0] or sample in bins[1] for sample in samples)
    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        for _ in range(5):
            loader.take()
        state = json.loads(json.dumps(loader.state_dict()))
    with StreamLoader(config, micro_batch_size=2, global_batch_size=8) as loader:
        loader.load_state_dict(state)
        rest = [loader.take()["tokens"] for _ in range(14)]
    expected = [sample["tokens"] for sample in samples_of(config)]
    assert torch.equal(torch.cat(rest), torch.stack(expected[20:]))


@pytest.mark.guarantee("resume-splits-blends")
def test_another_length_and_mixed_blends_are_refused(
    packed: str, documents: list[list[int]], tmp_path: Path
) -> None:
    plain = str(tmp_path / "in")
    write(plain, documents)
    for order in ("stream", "megatron", "sequential"):
        config = config_of(packed, order, tmp_path)
        longer = replace(config, sequence_length=2 * PACK)
        with pytest.raises(ConfigError, match=rf"bins of {PACK} tokens.*set it to {PACK}"):
            StreamLoader(longer, micro_batch_size=2, global_batch_size=8)
        mixed = replace(config, blend=[(packed, 0.5), (plain, 0.5)])
        with pytest.raises(ConfigError, match=r"is packed into bins and .*in is not"):
            StreamLoader(mixed, micro_batch_size=2, global_batch_size=8)


def test_phases_are_of_packed_datasets_of_their_length(packed: str, tmp_path: Path) -> None:
    convert_packed(tmp_path, random_documents(200, seed=1), pack_length=2 * PACK)
    long = str(tmp_path / "out")
    config = config_of(packed, "stream", tmp_path)
    phase = PhaseConfig(first_sample=16, blend=[long], sequence_length=2 * PACK)
    bins = [lengths_of_bins(packed), lengths_of_bins(long, 2 * PACK)]
    with StreamLoader(
        replace(config, phases=[phase]), micro_batch_size=4, global_batch_size=8
    ) as loader:
        for number in range(8):
            batch = loader.take()
            for tokens, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
                filled = int(mask.sum()) + 1
                assert tuple(tokens[:filled].tolist()) in bins[number >= 4]
    for wrong, match in (
        (replace(phase, sequence_length=None), f"bins of {2 * PACK} tokens"),
        (replace(phase, blend=None), f"bins of {PACK} tokens"),
        (replace(phase, blend=[str(tmp_path / "in")]), "is not"),
    ):
        with pytest.raises(ConfigError, match=match):
            StreamLoader(replace(config, phases=[wrong]), micro_batch_size=4, global_batch_size=8)


@pytest.mark.guarantee("resume-splits-blends")
def test_without_its_manifest_the_stream_order_refuses_it(packed: str, tmp_path: Path) -> None:
    for path in Path(packed).parent.glob("out-*"):
        shutil.copy(path, tmp_path)
    with pytest.raises(FormatError, match="its sequences end at byte"):
        config = config_of(f"{tmp_path}/", "stream", tmp_path)
        StreamLoader(config, micro_batch_size=2, global_batch_size=8)


@pytest.mark.guarantee("resume-splits-blends")
def test_a_state_of_the_same_documents_end_to_end_is_refused(
    packed: str, documents: list[list[int]], tmp_path: Path
) -> None:
    plain = str(tmp_path / "in")
    write(plain, documents)
    with StreamLoader(
        config_of(plain, "stream", tmp_path), micro_batch_size=2, global_batch_size=8
    ) as loader:
        loader.take()
        state = loader.state_dict()
    config = config_of(packed, "stream", tmp_path)
    loader = StreamLoader(config, micro_batch_size=2, global_batch_size=8)
    with loader, pytest.raises(StateError, match="packed"):
        loader.load_state_dict(state)


@pytest.mark.guarantee("memory-workers-interruptions")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
def test_documents_are_traced_to_samples_and_back(
    packed: str, order: Order, tmp_path: Path
) -> None:
    config = config_of(packed, order, tmp_path)
    traces = Provenance(config, "train", 8)
    pieces = set(stored(packed))
    for sample, traced in zip(samples_of(config), traces.trace(np.arange(48)), strict=True):
        tokens = bin_of(sample)
        assert sum(run.stop - run.start for run in traced.runs) == len(tokens)
        for run in traced.runs:
            piece = tokens[run.column : run.column + run.stop - run.start]
            assert piece in pieces
            readings = list(traces.uses([run.name], end=48))
            whole = [(reading.start, reading.stop) for reading in readings]
            assert traced.sample in [reading.sample for reading in readings]
            assert set(whole) == {(0, len(piece))}


@pytest.mark.guarantee("memory-workers-interruptions")
def test_verify_finds_a_broken_index_of_bins(packed: str, tmp_path: Path) -> None:
    for path in Path(packed).parent.glob("out*"):
        shutil.copy(path, tmp_path)
    assert verify(str(tmp_path / "out")).problems == []
    index = sorted(tmp_path.glob("*.idx"))[0]
    stored_bytes = bytearray(index.read_bytes())
    stored_bytes[40] ^= 1
    index.write_bytes(stored_bytes)
    assert verify(str(tmp_path / "out")).problems


@pytest.mark.guarantee("pack-puts-document")
def test_the_report_counts_bins(documents: list[list[int]], tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    report = convert_packed(tmp_path, documents)
    bins = bins_of(str(tmp_path / "out"))
    assert report.packing == {
        "bins": len(bins),
        "padding": len(bins) * PACK - sum(map(len, documents)),
        "pieces": sum(map(len, bins)),
        "most_pieces": max(map(len, bins)),
        "split": sum(len(document) > PACK for document in documents),
        "dropped": 0,
    }


def test_what_is_said_of_bins_without_bins_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--pack-overflow"):
        convert([str(tmp_path)], str(tmp_path / "out"), pack_overflow="drop")
