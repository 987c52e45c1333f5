"""Token shards of every kind: what is written is read, trained on in every order, and damage is
named.
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    IndexedDataset,
    IndexedDatasetWriter,
    StorageConfig,
    StreamLoader,
    build_datasets,
)
from streammega.convert import convert
from streammega.convert.options import ConvertOptions
from streammega.dataset.manifest import MAX_BIN_TOKENS
from streammega.dataset.names import SUFFIXES, missing_shards, split_name
from streammega.dataset.opening import find_shards
from streammega.dataset.verify import verify
from streammega.errors import (
    ConfigError,
    FormatError,
    ObjectChangedError,
    ObjectNotFoundError,
    StreammegaError,
)
from streammega.storage.seekable_zstd import MAX_FRAME_BYTES
from tests.support.builders import KINDS, write_manifest, write_random_pair
from tests.support.examples import examples
from tests.support.typed import map_style


def fill(writer: IndexedDatasetWriter, documents: list[list[tuple[list[int], int]]]) -> None:
    for document in documents:
        for tokens, mode in document:
            writer.add_item(np.array(tokens, np.int64), mode)
        writer.end_document()


sequence = st.tuples(st.lists(st.integers(0, 60_000), max_size=40), st.integers(-3, 3))


@pytest.mark.many_examples
@settings(max_examples=examples(25))
@given(
    documents=st.lists(st.lists(sequence, max_size=3), min_size=1, max_size=12),
    multimodal=st.booleans(),
    kind=st.sampled_from(KINDS),
    frame=st.sampled_from([1024, 65536]),
    at=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Any,
    multimodal: bool,
    kind: Any,
    frame: int,
    at: tuple[float, float],
) -> None:
    folder = tmp_path_factory.mktemp("s")
    pair = str(folder / "pair")
    shard = str(folder / f"shard{SUFFIXES[kind]}")
    with IndexedDatasetWriter(pair, np.uint16, multimodal) as plain, IndexedDatasetWriter(
        shard, np.uint16, multimodal, frame_bytes=frame
    ) as other:  # fmt: skip
        fill(plain, documents)
        fill(other, documents)
    a = IndexedDataset(pair)
    b = IndexedDataset(shard)
    assert Path(f"{pair}.idx").read_bytes() == Path(f"{folder}/shard.idx").read_bytes()
    tokens = Path(f"{pair}.bin").read_bytes()
    low, high = sorted(int(share * len(tokens)) for share in at)
    assert bytes(b.store.read(b.bin_key, [(0, len(tokens)), (low, high)])[0]) == tokens
    out = np.empty(high - low, np.uint8)
    b.store.fetch_into(b.bin_key, [(low, high)], [out])
    assert out.tobytes() == tokens[low:high]
    for x, y in zip(a[:], b[:], strict=True):
        np.testing.assert_array_equal(
            np.asarray(x[0] if multimodal else x), np.asarray(y[0] if multimodal else y)
        )


def batches(
    config: DataConfig, steps: int | None = None, seek: int = 0, dp_size: int = 1
) -> torch.Tensor:
    found = []
    for rank in range(dp_size):
        with StreamLoader(
            config, micro_batch_size=2, global_batch_size=4, dp_rank=rank, dp_size=dp_size
        ) as loader:
            loader.seek(seek)
            found.append(torch.stack([batch["tokens"].clone() for batch in loader]))
    return torch.cat(found, 1) if dp_size > 1 else found[0]


def config_of(
    blend: Any, order: str, cache: Path, storage: StorageConfig | None = None
) -> DataConfig:
    return DataConfig(
        blend=blend,
        sequence_length=32,
        order=order,  # type: ignore[arg-type]
        num_samples=(400, 0, 0),
        shuffle_lanes=8 if order == "stream" else None,
        shuffle_block_bytes=512,
        storage=(storage or StorageConfig()).changed(cache_dir=cache),
    )


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus as a pair, and as shards of every kind with manifests."""
    root = tmp_path_factory.mktemp("sets")
    write_random_pair(str(root / "pair"), count=300, longest=200)
    for kind in KINDS:
        convert([str(root / "pair")], str(root / kind), format=kind, shard_bytes=6000, workers=1)
    return root


@pytest.mark.guarantee("shards-trained-order", "derived-stores-read")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_the_same_tokens_whatever_the_shards_are(
    sets: Path, tmp_path: Path, order: str, kind: str
) -> None:
    # files of a dataset are part of the stream order
    whole = "pair" if order != "stream" else "bin"
    expected = batches(config_of([str(sets / whole)], order, tmp_path))
    got = batches(config_of([str(sets / f"{kind}.manifest.json")], order, tmp_path))
    assert torch.equal(got, expected)
    resumed = batches(config_of([str(sets / kind)], order, tmp_path), seek=200, dp_size=2)
    one_rank = batches(config_of([str(sets / whole)], order, tmp_path), seek=200)
    assert torch.equal(resumed.flatten(0, 1).sort(0).values, one_rank.flatten(0, 1).sort(0).values)


def kinds_with_servers() -> list[Any]:
    """Each kind of shards from one server by one transport; all nine in `make soak`."""
    soon = [("bin", "moto", "obstore"), ("zst", "rclone", "fsspec"), ("tar", "moto", "obstore")]
    ways = (("moto", "obstore"), ("moto", "fsspec"), ("rclone", "fsspec"))
    combinations = ((kind, *way) for kind, way in itertools.product(KINDS, ways))
    return [
        pytest.param(*combination, marks=[] if combination in soon else pytest.mark.soak)
        for combination in combinations
    ]


@pytest.mark.guarantee("shards-trained-order")
@pytest.mark.parametrize(
    ("kind", "s3", "s3_storage"), kinds_with_servers(), indirect=["s3", "s3_storage"]
)
def test_training_from_object_storage_sees_them_too(
    sets: Path, tmp_path: Path, kind: str, s3_storage: StorageConfig, bucket: str
) -> None:
    url = f"s3://{bucket}/{kind}"
    report = convert(
        [str(sets / "pair")], url, format=kind, shard_bytes=6000, storage=s3_storage, workers=1
    )
    assert report.shards > 3
    storage = replace(s3_storage, cache_max_bytes=1 << 30)
    for order in ("stream", "megatron"):
        local = batches(config_of([str(sets / f"{kind}.manifest.json")], order, tmp_path))
        for _ in range(2):  # then from the cache
            assert torch.equal(batches(config_of([url], order, tmp_path / "r", storage)), local)


def test_a_manifest_is_what_a_merge_of_its_shards_would_be(sets: Path, tmp_path: Path) -> None:
    assert find_shards(str(sets / "bin.manifest.json"), StorageConfig()) == find_shards(
        f"{sets}/bin-*", StorageConfig()
    )
    convert([str(sets / "zst.manifest.json")], str(tmp_path / "merged"), workers=1)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (sets / f"pair{suffix}").read_bytes()
    config = config_of([str(sets / "tar")], "megatron", tmp_path)
    pair = config_of([str(sets / "pair")], "megatron", tmp_path)
    ours = map_style(build_datasets(config, (50, 0, 0))[0])
    expected = map_style(build_datasets(pair, (50, 0, 0))[0])
    for k in range(50):
        assert torch.equal(ours[k]["tokens"], expected[k]["tokens"])


# it leaves its files open
@pytest.mark.guarantee("format-zstd-webdataset")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_itself_reads_the_tars(sets: Path) -> None:
    tars = sorted(map(str, sets.glob("tar-*.tar")))
    samples = webdataset.WebDataset(tars, shardshuffle=False, empty_check=False).decode()
    expected = IndexedDataset(str(sets / "pair"))
    number = 0
    for sample in samples:
        np.testing.assert_array_equal(sample["npy"], np.asarray(expected[number]))
        number += 1
    assert number == len(expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 1},
        {"dedup": True, "workers": 2},
        {"shuffle_seed": 3, "shuffle_memory_bytes": 1 << 20},
    ],
)
def test_samples_of_all_tars_of_a_dataset_have_keys_of_their_own(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The key is the number of the sequence in the dataset; the bytes do not depend on who writes
    them.
    """
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(str(tmp_path / "pair"), np.uint16, multimodal=True) as writer:
        for document in range(60):
            for part in range(document % 4):
                writer.add_item(rng.integers(0, 1000, rng.integers(1, 2000)), part)
            writer.end_document()
    options: dict[str, Any] = {"format": "tar", "shard_bytes": 20_000, "min_tokens": 1} | settings
    convert([str(tmp_path / "pair")], str(tmp_path / "set"), **options)
    tars = sorted(tmp_path.glob("set-*.tar"))
    assert len(tars) > 3
    samples = list(
        webdataset.WebDataset(list(map(str, tars)), shardshuffle=False, empty_check=False).decode()
    )
    made = IndexedDataset(str(tmp_path / "set.manifest.json"))
    assert len({sample["__key__"] for sample in samples}) == len(samples) == len(made)
    for sample in samples:
        tokens, mode = made[int(sample["__key__"])]
        np.testing.assert_array_equal(sample["npy"], tokens)
        assert sample["cls"] == mode
    assert not verify(str(tmp_path / "set")).problems
    (tmp_path / "again").mkdir()
    convert(
        [str(tmp_path / "pair")],
        str(tmp_path / "again" / "set"),
        **options | {"workers": 3 - settings.get("workers", 1)},
    )
    assert [tar.read_bytes() for tar in tars] == [
        (tmp_path / "again" / tar.name).read_bytes() for tar in tars
    ]


def test_tars_whose_keys_begin_anew_are_read_as_before(tmp_path: Path) -> None:
    tokens = [np.arange(number + 3, dtype=np.uint16) for number in range(6)]
    for shard in range(2):
        with IndexedDatasetWriter(f"{tmp_path}/set-0000{shard}-of-00002.tar", np.uint16) as writer:
            for own in tokens[3 * shard : 3 * shard + 3]:
                writer.add_item(own)
                writer.end_document()
    read = IndexedDataset(f"{tmp_path}/set-*")
    assert [own.tolist() for own in read[:]] == [own.tolist() for own in tokens]  # type: ignore[union-attr]
    assert not verify(f"{tmp_path}/set-*").problems


@pytest.mark.guarantee("format-zstd-webdataset")
def test_zstd_itself_reads_the_frames(sets: Path) -> None:
    import zstandard

    shards = sorted(sets.glob("zst-*.bin.zst"))
    whole = b"".join(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(p.read_bytes()), read_across_frames=True).read()
                     for p in shards)  # fmt: skip
    assert whole == (sets / "pair.bin").read_bytes()


@pytest.mark.guarantee("format-zstd-webdataset")
def test_megatron_itself_reads_the_shards(sets: Path) -> None:
    from tests.support.oracle import IndexedDataset as Theirs

    number = 0
    ours = IndexedDataset(str(sets / "pair"))
    for path in sorted(sets.glob("bin-*.bin")):
        theirs = Theirs(str(path)[:-4])
        for item in theirs:
            np.testing.assert_array_equal(item, np.asarray(ours[number]))
            number += 1
    assert number == len(ours)


def copy(sets: Path, target: Path, pattern: str) -> None:
    target.mkdir(exist_ok=True)
    for path in sets.glob(pattern):
        (target / path.name).write_bytes(path.read_bytes())


@pytest.mark.guarantee("frames-zstd-arrive")
def test_a_damaged_frame_is_named(sets: Path, tmp_path: Path) -> None:
    copy(sets, tmp_path / "d", "zst*")
    path = sorted((tmp_path / "d").glob("*.zst"))[1]
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"zst-00001.*frame 0, bytes \[0, \d+\), is damaged"):
        batches(config_of([str(tmp_path / "d" / "zst")], "stream", tmp_path))


@pytest.mark.parametrize("kind", ["zst", "tar"])
def test_a_shard_cut_short_is_an_error_at_once(sets: Path, tmp_path: Path, kind: str) -> None:
    copy(sets, tmp_path / "d", f"{kind}*")
    path = sorted((tmp_path / "d").glob(f"*{SUFFIXES[kind]}"))[0]  # type: ignore[index]
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(FormatError, match="cut short"):
        IndexedDataset(str(tmp_path / "d" / kind))


@pytest.mark.guarantee("missing-shard-error")
def test_a_set_with_a_missing_shard_is_no_dataset(sets: Path, tmp_path: Path) -> None:
    copy(sets, tmp_path / "d", "bin-*")
    sorted((tmp_path / "d").glob("*.idx"))[2].unlink()
    with pytest.raises(ObjectNotFoundError, match=r"missing, such as .*bin-00002-of-"):
        find_shards(str(tmp_path / "d"), StorageConfig())
    assert missing_shards(["a-00000-of-00003", "a-00002-of-00003.tar", "other"]) == [
        "a-00001-of-00003"
    ]


def test_a_dataset_wins_over_a_folder_of_its_name(sets: Path, tmp_path: Path) -> None:
    copy(sets, tmp_path, "pair.*")
    (tmp_path / "pair").mkdir()
    assert find_shards(str(tmp_path / "pair"), StorageConfig()) == [str(tmp_path / "pair")]
    assert len(IndexedDataset(str(tmp_path / "pair"))) == 300


MANIFESTS = {
    "another JSON": ("{}", "not a manifest"),
    "another version": ('{"format": "streammega-manifest", "version": 9}', "version 9"),
    "fields missing": ('{"format": "streammega-manifest", "version": 1}', "damaged manifest"),
    "no JSON": ("{", "damaged manifest"),
    "nested too deeply": ("[" * 100_000, "damaged manifest"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_damaged_manifests_are_named(tmp_path: Path, name: str) -> None:
    text, message = MANIFESTS[name]
    (tmp_path / "x.manifest.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        IndexedDataset(str(tmp_path / "x.manifest.json"))


@pytest.mark.parametrize("length", [0, -1, MAX_BIN_TOKENS + 1, 1 << 80])
def test_a_manifest_with_bins_of_no_possible_length_is_damaged(
    sets: Path, tmp_path: Path, length: int
) -> None:
    ConvertOptions(pack_length=MAX_BIN_TOKENS)
    with pytest.raises(ConfigError):
        ConvertOptions(pack_length=MAX_BIN_TOKENS + 1)
    copy(sets, tmp_path, "pair.*")
    path = tmp_path / "pair.manifest.json"
    write_manifest(tmp_path / "pair", ["pair"])
    pack = {"length": length, "bins": 1, "padding": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pack": pack}))
    with pytest.raises(FormatError, match="damaged manifest: its bins have no length"):
        IndexedDataset(str(path))


def test_a_manifest_without_shards_is_no_dataset(sets: Path, tmp_path: Path) -> None:
    manifest = json.loads((sets / "bin.manifest.json").read_text()) | {"shards": []}
    (tmp_path / "x.manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match="lists no shards"):
        IndexedDataset(str(tmp_path / "x.manifest.json"))


@pytest.mark.guarantee("names-in-folder")
@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    "name",
    ["../pair", "{folder}/pair", "x/../../pair", "..%2Fpair", "%2e%2e%2fpair", "..", "", "a\0b", "a\ud800",
     "file://{folder}/pair", "s3://other/pair", "s3:/pair"],
)  # fmt: skip
def test_a_manifest_names_nothing_outside_of_its_folder(
    sets: Path, tmp_path: Path, scheme: str, name: str
) -> None:
    (tmp_path / "set").mkdir()
    for path in sets.glob("pair.*"):
        shutil.copy(path, tmp_path)
    write_manifest(tmp_path / "pair", ["pair"])
    manifest = tmp_path / "set" / "x.manifest.json"
    text = (tmp_path / "pair.manifest.json").read_text()
    name = name.format(folder=tmp_path)
    manifest.write_text(text.replace('"name": "pair"', f'"name": {json.dumps(name)}'))
    assert json.loads(manifest.read_text())["shards"][0]["name"] == name
    with pytest.raises(FormatError, match="outside of its folder"):
        IndexedDataset(f"{scheme}{manifest}")


def test_a_suffix_says_of_what_kind_a_shard_is() -> None:
    assert split_name("a/b.bin.zst") == ("a/b", "zst")
    assert split_name("a/b.tar") == ("a/b", "tar")
    assert split_name("a/b.idx") == split_name("a/b.bin") == split_name("a/b") == ("a/b", "bin")


@pytest.mark.guarantee("object-replaced-under")
def test_an_object_of_several_that_changes_is_noticed(
    sets: Path, s3_storage: StorageConfig, bucket: str, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/set"
    convert(
        [str(sets / "pair")], url, format="zst", shard_bytes=20_000, storage=s3_storage, workers=1
    )
    indexed = IndexedDataset(url, s3_storage.changed(cache_dir=tmp_path))
    with IndexedDatasetWriter(indexed.shards[0], np.uint16, storage=s3_storage) as writer:
        writer.add_item(np.arange(30_000) % 7)
        writer.end_document()
    with pytest.raises((ObjectChangedError, StreammegaError)):
        out = np.empty(64, np.uint8)
        indexed.store.fetch_into(indexed.bin_key, [(0, 64)], [out])


@settings(max_examples=25)
@given(cut=st.integers(0, 400), kind=st.sampled_from(["zst"]))
def test_any_truncation_of_a_small_shard_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, kind: str
) -> None:
    folder = tmp_path_factory.mktemp("t")
    with IndexedDatasetWriter(str(folder / "a.bin.zst"), np.uint16, frame_bytes=1024) as writer:
        writer.add_item(np.arange(3000) % 1000)
        writer.end_document()
    path = folder / "a.bin.zst"
    data = path.read_bytes()
    path.write_bytes(data[: max(0, len(data) - 1 - cut)])
    with pytest.raises(StreammegaError):
        IndexedDataset(str(path))


@pytest.mark.parametrize("frame_bytes", [-1, 0, MAX_FRAME_BYTES + 1])
def test_frames_that_no_reader_takes_are_not_written(tmp_path: Path, frame_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"frame_bytes is .*at least 1 and at most 134,217,728"):
        IndexedDatasetWriter(str(tmp_path / "a.bin.zst"), frame_bytes=frame_bytes)
    assert not list(tmp_path.iterdir())


def test_the_largest_frame_is_read(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a.bin.zst")
    with IndexedDatasetWriter(prefix, np.uint8, frame_bytes=MAX_FRAME_BYTES) as writer:
        writer.add_item(np.zeros(MAX_FRAME_BYTES + 1, np.uint8))
        writer.end_document()
    assert IndexedDataset(prefix).get(0, MAX_FRAME_BYTES - 1, 2).tolist() == [0, 0]


def test_standard_tools_see_plain_archives(sets: Path) -> None:
    tar = sorted(sets.glob("tar-*.tar"))[0]
    listed = subprocess.run(
        ["tar", "tf", str(tar)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed[0] == "000000000.npy"


@pytest.mark.guarantee("shards-short-sample")
def test_shards_too_short_for_a_sample_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, tokens in enumerate([16, 500, 3, 17, 0]):
        with IndexedDatasetWriter(str(tmp_path / "set" / f"{number}"), np.uint16) as writer:
            writer.add_item(np.full(tokens, number, np.uint16))
            writer.end_document()
    config = DataConfig(blend=[f"{tmp_path / 'set'}/"], sequence_length=16, order="stream")
    with StreamLoader(
        config, micro_batch_size=1, global_batch_size=1, dp_rank=0, dp_size=1
    ) as loader:
        assert set(np.unique([next(iter(loader))["tokens"].numpy() for _ in range(200)])) <= {1, 3}
    (warning,) = [
        record.getMessage() for record in caplog.records if record.name.startswith("streammega")
    ]
    assert str(tmp_path / "set") in warning
    assert "2 of its 5 shards have fewer than the 17 tokens of a sample" in warning
    assert "19 tokens" in warning
