"""Loaders that complete the last global batch: every sample of a dataset is handed out once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, StorageConfig, StreamingDataset, StreamLoader
from streammega.convert import convert
from streammega.dataset import IndexedDatasetWriter
from streammega.dataset.names import Kind
from streammega.errors import ConfigError
from streammega.parallel.broadcast import samples_of
from streammega.parallel.fields import rank_fields
from tests.support.builders import write_manifest
from tests.support.examples import examples
from tests.support.expected import check_batch

LENGTH = 12
EOD = 3
WHOLE = [(0, LENGTH)]
SHARDS = ["web-00000-of-00002", "web-00001-of-00002"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two shards with modes, as pairs, zstd and packed."""
    folder = tmp_path_factory.mktemp("data")
    kinds: tuple[Kind, ...] = ("bin", "zst")
    for kind in kinds:
        rng = np.random.default_rng(5)
        (folder / kind).mkdir()
        for shard in SHARDS:
            path = str(folder / kind / shard)
            with IndexedDatasetWriter(path, np.uint16, multimodal=True, kind=kind) as writer:
                for length in rng.integers(1, 12, 15).tolist():
                    ids = rng.integers(4, 500, length)
                    writer.add_document(np.append(ids, EOD), [length, 1], [1, 0])
        write_manifest(folder / kind / "web", SHARDS, kind)
    source = str(folder / "bin" / "web.manifest.json")
    convert([source], str(folder / "packed" / "web"), pack_length=LENGTH, eod_id=EOD, workers=1)
    return folder


def config_of(folder: Path, **options: Any) -> DataConfig:
    return DataConfig(
        blend=[str(folder / "web")],
        sequence_length=LENGTH,
        order="sequential",
        split="1,0,0",
        storage=StorageConfig(cache_dir=folder / "cache"),
        **({"eod_id": EOD} | options),
    )


FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "mask_loss_by_mode")


@pytest.mark.many_examples
@pytest.mark.guarantee("columns-written-once")
@settings(max_examples=examples(10))
@given(
    kind=st.sampled_from(["bin", "zst", "packed"]),
    flags=st.sets(st.sampled_from(FLAGS)),
    by_documents=st.booleans(),
    pad_id=st.sampled_from([None, 600]),
    add_extra_token=st.booleans(),
    micro=st.sampled_from([1, 2, 3]),
    ranks=st.sampled_from([1, 2, 5]),
    steps=st.sampled_from([1, 4]),
    start=st.integers(0, 3),
)
def test_every_sample_is_handed_out_once(
    data: Path, kind: str, flags: set[str], by_documents: bool, pad_id: int | None,
    add_extra_token: bool, micro: int, ranks: int, steps: int, start: int,
) -> None:  # fmt: skip
    if by_documents:
        flags = flags - {"reset_position_ids", "reset_attention_mask"}
    config = config_of(
        data / kind,
        pad_id=pad_id,
        add_extra_token=add_extra_token,
        inter_document_masking=by_documents,
        vocab_size=601,
        fields=[..., "dataset_id"],
        **dict.fromkeys(flags, True),
    )
    sizes: Any = {"micro_batch_size": micro, "global_batch_size": micro * ranks * steps}
    truth: Any = {"learned": {1, 2} if "mask_loss_by_mode" in flags else None}
    read: list[int] = []
    for rank in range(ranks):
        options = sizes | {"dp_rank": rank, "dp_size": ranks, "last": "pad"}
        loaders = [StreamLoader(config, **options)]
        if not by_documents:  # whose bounds ids do not tell
            loaders.append(StreamLoader(config, **options, ids_only=True))
        total = loaders[0].dataset.samples.num_samples
        assert total is not None
        num_samples = loaders[0].dataset.num_samples
        assert num_samples is not None
        assert total <= num_samples < total + sizes["global_batch_size"]
        position = min(start, steps) * micro * ranks
        for loader in loaders:
            loader.seek(position)
            state = loader.state_dict()
            if total >= sizes["global_batch_size"]:
                drops = StreamingDataset(config, **sizes, dp_rank=rank, dp_size=ranks)
                assert state == drops.state_at(position), "the order is that of any run"
            with loader:
                for consumed in range(position, num_samples, loader.dataset.step_samples):
                    raw = next(loader)
                    batch = rank_fields(samples_of(raw), config, WHOLE) if loader.ids_only else raw
                    check_batch(batch, loader.dataset, consumed, **truth)
                    is_padding = loader.dataset.sample_ids(consumed) >= total
                    assert not batch["loss_mask"][is_padding].any()
                    if loader.ids_only:
                        assert not raw["valid"][is_padding].any()
                        assert raw["valid"][~is_padding].all()
                        read += loader.dataset.sample_ids(consumed)[~is_padding].tolist()
                assert next(loader, None) is None
                check_batch(loader.dataset.batch(consumed), loader.dataset, consumed, **truth)
        end = total
    assert by_documents or sorted(read) == list(range(position, end))


def test_a_state_at_the_end_is_resumed_by_other_sizes(data: Path) -> None:
    config = config_of(data / "bin")
    loader = StreamLoader(
        config, micro_batch_size=2, global_batch_size=16, dp_rank=0, dp_size=2, last="pad"
    )
    assert len(list(loader)) == len(loader) == loader.dataset.num_samples // 4  # type: ignore[operator]
    state = loader.state_dict()
    for size in (1, 3, 4, 7, 16):
        other = StreamLoader(config, micro_batch_size=1, global_batch_size=size, last="pad")
        other.load_state_dict(state)
        assert list(other) == [], "every sample was handed out"
        assert next(other, None) is None
        other.seek(0)
        assert len(list(other)) == len(other)
        assert len(list(other)) == len(other), "another pass"
        other.close()


@pytest.mark.parametrize(
    "options",
    [
        {"order": "stream"},
        {"order": "megatron", "num_samples": (10, 0, 0)},
        {"num_samples": (10, 0, 0)},
        {"split": "9,1,0"},
        {"blend": ["web", "web"]},
    ],
)
def test_what_is_read_otherwise_than_once_and_whole_has_no_last_batch_to_pad(
    data: Path, options: dict[str, Any]
) -> None:
    config = replace(config_of(data / "bin"), **options)
    if "blend" in options:
        config = replace(config, blend=[str(data / "bin" / "web")] * 2)
    with pytest.raises(ConfigError, match="split='1,0,0'"):
        StreamLoader(config, micro_batch_size=1, global_batch_size=4, last="pad")


def test_padding_needs_a_mask(data: Path) -> None:
    config = replace(config_of(data / "bin"), fields=["tokens", "labels"])
    sizes: Any = {"micro_batch_size": 1, "global_batch_size": 4}
    StreamLoader(config, **sizes)
    with pytest.raises(ConfigError, match="loss_mask"):
        StreamLoader(config, **sizes, last="pad")
    with pytest.raises(ConfigError, match="'drop' or 'pad'"):
        StreamLoader(config, **sizes, last="keep")  # type: ignore[arg-type]
