"""Fuzz targets for what the library stores: datasets, checkpoints, states, and files of settings."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
import xxhash
import zstandard

from streammega import IndexedDataset, IndexedDatasetWriter
from streammega.config.storage import load_storage
from streammega.dataset import local_cache
from streammega.dataset.document_lookup import open_documents
from streammega.dataset.idx import (
    DTYPE_OF_CODE,
    check_index,
    parse_index,
)
from streammega.dataset.manifest import Manifest, Shard, check_counts, read_manifest
from streammega.dataset.names import SUFFIXES, Kind
from streammega.dataset.provenance import (
    DocumentOrigin,
    ProvenanceReader,
    ProvenanceWriter,
    collect_origins,
)
from streammega.errors import StreammegaError
from streammega.order import state
from streammega.storage import open_store
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.seekable_zstd import FrameWriter, read_frames
from streammega.train.checkpoints import integrity
from streammega.train.checkpoints.files import CheckpointFiles
from streammega.train.checkpoints.integrity import (
    StoredPart,
    list_tensors,
    load_part,
    parse_tensors,
    sign,
)
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import load_run
from tools.fuzz.common import STORAGE, AnyChecksum, Target, new_number, stored_in

NUM_TOKENS = 70
"""Tokens of `_write_pair`."""
MAX_COMPARED = 4 << 20
"""Bytes of decompressed content that a second reader makes."""


# --- datasets -------------------------------------------------------------------------------------


def _write_pair(prefix: Path, dtype: Any = np.uint16, multimodal: bool = False) -> None:
    with IndexedDatasetWriter(str(prefix), dtype, multimodal=multimodal) as writer:
        for number in range(5):
            tokens = np.arange(number * 7, dtype=dtype)
            lengths = [len(tokens) - number, number]
            modes = {"modes": [0, 1]} if multimodal else {}
            writer.add_document(tokens, lengths, **modes)


def idx_target(folder: Path) -> Target:
    """An `.idx` beside a sound `.bin`."""
    seeds = []
    for dtype in (np.uint16, np.int32, np.uint8):
        for multimodal in (False, True):
            _write_pair(folder / "seed", dtype, multimodal)
            seeds.append((folder / "seed.idx").read_bytes())
    all_tokens = np.random.default_rng(0).bytes(8 * NUM_TOKENS)

    def run(data: bytes) -> None:
        dtype = DTYPE_OF_CODE.get(data[17]) if len(data) > 17 else None
        bin_data = all_tokens[: NUM_TOKENS * (2 if dtype is None else dtype.itemsize)]
        check_index(parse_index(memoryview(data), "x.idx"), len(bin_data), "x.idx")
        name = str(new_number())
        with (
            stored_in(folder, ".idx", data, name) as path,
            stored_in(folder, ".bin", bin_data, name),
        ):
            _compare_tokens(path.removesuffix(".idx"), data, bin_data)

    return Target(run, seeds)


def _compare_tokens(prefix: str, index: bytes, bin_data: bytes) -> None:
    """The tokens of all sequences are those at their places in the `.bin`, and each is in one document."""
    dataset = IndexedDataset(prefix)
    count, bounds = (int.from_bytes(index[at : at + 8], "little") for at in (18, 26))
    dtype = dataset.dtype.newbyteorder("<")
    lengths = np.frombuffer(index, "<i4", count, 34)
    offsets = np.frombuffer(index, "<i8", count, 34 + 4 * count)
    expected = [
        bin_data[offset : offset + length * dtype.itemsize]
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
    ]
    items = [item[0] if isinstance(item, tuple) else item for item in dataset[:]]
    assert [item.tobytes() for item in items] == expected, "other tokens than those of the .bin"
    assert sum(map(len, expected)) == dtype.itemsize * int(lengths.sum(dtype=np.int64))
    (shard,) = open_documents(prefix, STORAGE)
    assert shard.num_documents == bounds - 1
    shard.runs(0, shard.num_tokens)
    total = 0
    for document in range(shard.num_documents):
        total += sum(run.stop - run.start for run in shard.tokens_of(document))
    assert total == int(lengths.sum(dtype=np.int64)), "documents have other tokens than sequences"


def shard_target(folder: Path, kind: Kind) -> Target:
    """The tokens of a `.bin.zst` or `.tar` shard, beside a sound `.idx`; or its `.idx`.

    The first byte says which of both the rest is.
    """
    suffix = SUFFIXES[kind]
    _write_pair(folder / "plain")
    bin_data = (folder / "plain.bin").read_bytes()
    with IndexedDatasetWriter(str(folder / "seed"), np.uint16, kind=kind) as writer:
        for item in IndexedDataset(str(folder / "plain"))[:]:
            writer.add_document(item, [len(item)])
    stored = {end: (folder / f"seed{end}").read_bytes() for end in (suffix, ".idx")}

    def run(data: bytes) -> None:
        changed = suffix if data[:1] == b"\0" else ".idx"
        files = stored | {changed: data[1:]}
        name = str(new_number())
        with (
            stored_in(folder, ".idx", files[".idx"], name),
            stored_in(folder, suffix, files[suffix], name) as path,
        ):
            dataset = IndexedDataset(path)
            items = dataset[:]
        # Of a tar, the .idx says where tokens are. Multimodal items are pairs.
        if changed == ".idx" and kind == "zst" and not dataset.multimodal:
            joined = b"".join(np.asarray(item).tobytes() for item in items)
            assert len(joined) <= len(bin_data) or files[".idx"] != stored[".idx"]

    return Target(run, [b"\0" + stored[suffix], b"\1" + stored[".idx"]])


def zstd_target(folder: Path) -> Target:
    """A seekable zstd file, compared with what zstd makes of it from its beginning to its end."""
    seeds = []
    for content in (b"", b"abc" * 100, np.arange(1000, dtype="<u2").tobytes()):
        store, key = open_store(str(folder / "seed.zst"), STORAGE)
        writer = FrameWriter(store.open_writer(key), frame_bytes=256)
        writer.write(content)
        writer.commit()
        seeds.append((folder / "seed.zst").read_bytes())

    def run(data: bytes) -> None:
        with stored_in(folder, ".zst", data) as path:
            store, key = open_store(path, STORAGE)
            info = store.info(key)
            frames = read_frames(store, info)
            shown = DerivedStore(store, info, frames)
            size = frames.size
            part = min(size, 1 << 16)
            spans = [(0, part), (size // 3, min(size, size // 3 + 7)), (size - part, size)]
            bodies = [bytes(body) for body in shown.read(key, spans)]
        with suppress(zstandard.ZstdError):
            plain = _decompressed(data)
            if len(plain) == size < MAX_COMPARED:  # a dataset refuses what has another size
                expected = [plain[start:stop] for start, stop in spans]
                assert bodies == expected, "other bytes than zstd itself gives"

    return Target(run, seeds)


def _decompressed(data: bytes) -> bytes:
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        io.BytesIO(data), read_across_frames=True
    )
    return reader.read(MAX_COMPARED)


# --- what describes datasets ----------------------------------------------------------------------


def _manifest(folder: Path) -> Manifest:
    _write_pair(folder / "web")
    entry = Shard(
        name="web",
        documents=5,
        sequences=10,
        tokens=70,
        bytes=140,
        checksums=["0" * 32],
        index_bytes=(folder / "web.idx").stat().st_size,
        index_checksums=["0" * 32],
    )
    return Manifest(
        kind="bin",
        dtype="uint16",
        tokenizer={"name": "bytes", "digest": "1"},
        eod_id=3,
        vocab_size=500,
        documents=5,
        sequences=10,
        tokens=70,
        shards=[entry],
        origins=["0" * 32],
        pack={"length": 8, "bins": 2, "padding": 1},
        chat_template={"name": "chatml", "digest": "2"},
    )


def manifest_target(folder: Path) -> Target:
    """The manifest of a sound pair."""
    manifest = _manifest(folder)
    plain = Manifest(**{**vars(manifest), "pack": None, "origins": None, "chat_template": None})
    tokens = [np.asarray(item).tolist() for item in IndexedDataset(str(folder / "web"))[:]]

    def run(data: bytes) -> None:
        with stored_in(folder, ".manifest.json", data, "web") as path:
            read = check_counts(read_manifest(path, STORAGE), path)
            assert all("/" not in shard.name for shard in read.shards)
            read.to_json()
            dataset = IndexedDataset(path)
            stored = [np.asarray(item).tolist() for item in dataset[:]]
            assert stored == tokens * len(read.shards) or dataset.multimodal
            _ = dataset.tokenizers, dataset.loss_modes
            with suppress(StreammegaError):
                dataset.bin_offsets()

    return Target(run, [manifest.to_json(), plain.to_json()], is_json=True)


def provenance_target(folder: Path) -> Target:
    """The `.origins` of a shard."""
    seeds = []
    for count in (0, 3):
        writer = ProvenanceWriter()
        rows = [DocumentOrigin(path="a.jsonl", kind=n, place=n, id=f"id{n}") for n in range(count)]
        writer.add(collect_origins(rows))
        stored = writer.finish()
        without_checksums = io.BytesIO()
        table = pq.read_table(io.BytesIO(stored))
        pq.write_table(table, without_checksums, compression="zstd", store_schema=False)
        seeds += [stored, without_checksums.getvalue()]

    def run(data: bytes) -> None:
        with stored_in(folder, ".origins", data) as path:
            store, key = open_store(path, STORAGE)
            reader = ProvenanceReader(store, key)
            count = min(reader.documents, 10_000)
            shown = [reader[number].location for number in range(min(count, 100))]
            assert len(reader.between(0, count)) == count
            list(reader.find(["id1", *shown]))

    return Target(run, seeds)


def array_target(folder: Path) -> Target:
    """A built array of the index cache: its header, for its bytes have a checksum."""
    kinds: dict[str, local_cache.ArrayKind] = {"order": ((np.dtype("<i8"),), (None, 2))}
    array = np.arange(6, dtype="<i8").reshape(3, 2)
    local_cache.cached_arrays(folder, "seed", kinds, lambda: {"order": array})
    seed = (folder / "seed-order.npy").read_bytes()[: -local_cache.CHECKSUM_BYTES]

    def run(data: bytes) -> None:
        signed = data + xxhash.xxh3_64_digest(data)
        key = str(new_number())
        with stored_in(folder, ".npy", signed, f"{key}-order"):
            read = local_cache.cached_arrays(folder, key, kinds, lambda: {"order": array})["order"]
            assert read.dtype == array.dtype
            assert read.ndim == array.ndim
            assert read.tobytes() == data[len(data) - read.nbytes :]
        (folder / f"{key}.lock").unlink(missing_ok=True)

    return Target(run, [seed])


# --- what runs save -------------------------------------------------------------------------------


def state_target(_folder: Path) -> Target:
    """The state of a loader."""
    identity = {"kind": "stream", "datasets": ["a" * 16, "b" * 16], "seed": 1, "shuffle_lanes": 8}
    long_identity = {**identity, "weights": list(range(500)), "phases": {"1": {"x": [1] * 300}}}
    seeds = [
        json.dumps(state.make_state(one, 1000, 8, global_batch_size=16)).encode()
        for one in (identity, long_identity)
    ]

    def run(data: bytes) -> None:
        try:
            read = json.loads(data)
        except (ValueError, RecursionError):
            return  # a checkpoint's own format is read by torch
        with mock.patch.object(state, "_digest", AnyChecksum()):
            saved = state.parse_state(read)
        assert 0 <= saved.offset <= saved.consumed
        _ = saved.lanes
        for one in (identity, long_identity):
            with suppress(StreammegaError):
                saved.check(one)

    return Target(run, seeds, is_json=True)


def record_target(folder: Path) -> Target:
    """The record of a checkpoint, which names the folder of its files."""
    position = {
        "step": 100,
        "data": state.make_state({"kind": "stream"}, 1000, 8, global_batch_size=16),
    }
    folder_name = "step-00000100-3f09c1a2"
    signed = sign({"version": 3, "files": folder_name, "tensors": "1", "position": position})

    def run(data: bytes) -> None:
        home = folder / str(new_number())
        home.mkdir()
        store = CheckpointStore.open(str(home), STORAGE)
        (home / "checkpoints").mkdir()
        with (
            mock.patch.object(integrity, "xxhash", AnyChecksum()),
            stored_in(home / "checkpoints", ".json", data, "step-00000100"),
        ):
            with suppress(StreammegaError):
                saved = store.find(100)
                assert isinstance(saved.position["data"], dict)
                assert "/" not in saved.name
            store.begin(200)
            store.remove(100)
        for path in (home / "checkpoints").iterdir():
            path.unlink()
        (home / "checkpoints").rmdir()
        home.rmdir()

    return Target(run, [json.dumps(signed).encode()], is_json=True)


def tensors_target(folder: Path) -> Target:
    """The list of a checkpoint's tensors."""
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.tensor(1)}
    dcp.save(tensors, checkpoint_id=folder / "seed", no_dist=True)
    written = dcp.FileSystemReader(folder / "seed").read_metadata()
    written.storage_data = {
        index: StoredPart(place.relative_path, place.offset, place.offset + place.length, "1")
        for index, place in written.storage_data.items()
    }
    seed = list_tensors(written)
    store, key = open_store(str(folder / "seed"), STORAGE)
    files = CheckpointFiles(store, key)

    def run(data: bytes) -> None:
        metadata = parse_tensors(data, "x/tensors.json")
        files.check(metadata)
        assert parse_tensors(list_tensors(metadata), "again") == metadata

    return Target(run, [seed], is_json=True)


def part_target(_folder: Path) -> Target:
    """A part of a tensor in a checkpoint's file."""
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    file = io.BytesIO()
    torch.save(tensor, file)

    def run(data: bytes) -> None:
        try:
            part = load_part(data, tensor.dtype, tensor.shape)
        except MemoryError:
            raise
        except Exception:  # the reader names the file, and calls it damaged
            return
        assert part.shape == tensor.shape
        assert part.view(torch.uint8).numpy().tobytes() in data

    return Target(run, [file.getvalue()])


def run_file_target(folder: Path) -> Target:
    """A run file."""
    seeds = [
        b'[data]\nblend = [["s3://b/web", 0.7], ["x", 0.3]]\nsequence_length = 16\nsplit = "9,1,0"\n'
        b'order = "stream"\n[data.storage]\nmax_retries = 3\n[data.storage.storage_options]\nkey="k"\n'
        b"[model]\nvocab_size = 100\ndim = 16\nlayers = 1\nheads = 2\n[train]\nmicro_batch_size = 2\n"
        b'global_batch_size = 8\ntrain_iters = 10\nlr = 1\n[parallel]\ntp = 1\n[validation]\na = ["y"]\n',
        b'[data]\nblend = ["w"]\nsequence_length = 16\n[[data.phases]]\nfrom_step = 5\n'
        b'blend = ["v"]\n[model]\nvocab_size = 100\n[train]\nrampup_batch_size = [4, 4, 100]\n'
        b"global_batch_size = 8\ntrain_iters = 10\n",
    ]

    def run(data: bytes) -> None:
        with stored_in(folder, ".toml", data) as path:
            config = load_run(path)
            repr(config)
            _ = config.schedule

    return Target(run, seeds)


def storage_file_target(folder: Path) -> Target:
    """A file of storage settings."""
    seed = (
        b'transport = "fsspec"\nmax_retries = 3\nread_timeout = 5\n[storage_options]\nkey = "k"\n'
    )

    def run(data: bytes) -> None:
        with stored_in(folder, ".toml", data) as path:
            repr(load_storage(path))

    return Target(run, [seed])
