"""Built order arrays that are damaged, on disk or in a shared folder: an error that names the file,
never a crash.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streammega import (
    BlendedDataset,
    DataConfig,
    GPTDataset,
    IndexedDataset,
    StorageConfig,
    build_datasets,
)
from streammega.errors import CacheError, ConfigError, FormatError
from streammega.samples.build import build_split
from streammega.samples.segments import split_data
from tests.support.builders import write_dataset, write_random_pair
from tests.support.kept_files import CHECKSUM_BYTES, save_kept, write_kept
from tests.support.processes import launch

SAMPLES = 300
DAMAGE: dict[str, list[tuple[Any, int]]] = {
    "document_index": [(slice(None), 10**9), (slice(None), -1), (slice(None), -(2**31))],
    "sample_index": [((slice(1, -1), 0), 2**31 - 1), ((slice(1, -1), 0), -5), ((slice(1, -1), 1), -(10**9)),
                     ((slice(1, -1), 1), 10**9), ((slice(1, -1), 0), 0)],
    "shuffle_index": [(slice(None), 2**32 - 1), (slice(None), 10**6)],
    "dataset_index": [(slice(None), 7), (slice(None), -1)],
    "dataset_sample_index": [(slice(None), 10**12), (slice(None), -1)],
}  # fmt: skip


def config_of(folder: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "sequence_length": 16,
        "num_samples": (SAMPLES, 0, 0),
        "storage": StorageConfig(cache_dir=folder / "cache"),
    }
    return DataConfig(**settings | {"blend": [str(folder / "a")]} | changes)


def write(folder: Path) -> tuple[DataConfig, DataConfig]:
    for seed, name in enumerate("ab"):
        write_random_pair(str(folder / name), seed=seed)
    return config_of(folder), config_of(
        folder, blend=[(str(folder / "a"), 0.5), (str(folder / "b"), 0.5)]
    )


EVERY_DAMAGE = """
import sys
from pathlib import Path
import numpy as np
from streammega import build_datasets
from streammega.errors import CacheError
from tests.order.test_damaged_order import DAMAGE, SAMPLES, write
from tests.support.kept_files import seal

folder = Path(sys.argv[1])
single, blend = write(folder)
for array, damages in DAMAGE.items():
    config = blend if array.startswith("dataset") else single
    for place, value in damages:
        built = build_datasets(config)[0]
        (path,) = [path for path in built.index_files() if path.name.endswith(f"-{array}.npy")]
        sound = path.read_bytes()
        np.lib.format.open_memmap(path, "r+")[place] = value
        seal(path)
        again, errors = build_datasets(config)[0], []
        for k in range(SAMPLES):
            try:
                again[k]
            except CacheError as error:
                errors.append(path.name in str(error) and "remove" in str(error))
        path.unlink()
        path.write_bytes(sound)
        print(array, place, value, bool(errors) and all(errors))
"""


@pytest.mark.guarantee("built-order-arrays")
def test_no_value_of_a_cached_order_leads_outside_of_what_is_there(tmp_path: Path) -> None:
    family = launch(tmp_path, 1, ["-c", EVERY_DAMAGE, str(tmp_path)])
    codes = family.ended(0, within=120)
    printed = family.log(0)
    family.close()
    assert codes == [0], f"rc {codes}: {printed[-2000:]}"
    expected = [
        f"{array} {place} {value} True"
        for array, damages in DAMAGE.items()
        for place, value in damages
    ]
    assert printed.splitlines() == expected


@pytest.mark.guarantee("built-order-arrays")
@pytest.mark.parametrize(
    "array",
    ["document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index"],
)
@pytest.mark.parametrize("wrong", ["shorter", "of floats", "Fortran's", "cut", "empty"])
def test_a_cached_array_of_another_shape_or_type_is_refused(
    tmp_path: Path, array: str, wrong: str
) -> None:
    single, blend = write(tmp_path)
    config = blend if array.startswith("dataset") else single
    built = build_datasets(config)[0]
    assert isinstance(built, (GPTDataset, BlendedDataset))
    files = built.index_files()
    (path,) = (path for path in files if path.name.endswith(f"-{array}.npy"))
    data = np.load(path)
    changed = {
        "shorter": data[:-1],
        "of floats": data.astype(np.float64),
        "Fortran's": np.asfortranarray(np.stack([data, data])),
    }
    if wrong in changed:
        save_kept(path, changed[wrong])
    else:
        body = path.read_bytes()[:-CHECKSUM_BYTES]
        write_kept(path, body[: -8 if wrong == "cut" else 0])
    with pytest.raises(CacheError, match=rf"{path.name}: .*remove the file"):
        built_again = build_datasets(config)[0]
        assert isinstance(built_again, (GPTDataset, BlendedDataset))
        built_again[0]


@pytest.mark.parametrize("ids", [[0, 200], [-1, 0], [5, 2**40], [[0, 1]], [0.5]])
def test_sequence_ids_that_are_not_the_datasets_are_refused(
    pair: str, config: DataConfig, ids: list[Any]
) -> None:
    with pytest.raises(ConfigError, match="sequence_ids"):
        GPTDataset(IndexedDataset(pair), np.array(ids), 10, config)


def test_more_sequences_than_the_megatron_order_can_number_are_refused(config: DataConfig) -> None:
    class Many:
        prefix = "many"
        bin_tokens = None
        manifest = SimpleNamespace(eod_ids={None}, vocab_sizes={None})

        def __len__(self) -> int:
            return 2**31 + 1

    data = split_data(config, "train")
    opened: Any = {data.prefixes[0]: Many()}
    with pytest.raises(ConfigError, match=r"2,147,483,649 sequences.*order='stream'"):
        build_split(config, data, 10, opened)


def test_an_idx_whose_lengths_are_negative_makes_no_tar(tmp_path: Path) -> None:

    write_dataset(tmp_path / "shard.tar", [np.full(1000, 5, np.uint16) for _ in range(4)])
    path = tmp_path / "shard.idx"
    data = bytearray(path.read_bytes())
    data[34:42] = np.array([-1000, 3200], "<i4").tobytes()  # the same bytes altogether
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"shard\.idx: sequence 0 has the negative length -1000"):
        IndexedDataset(str(tmp_path / "shard.tar"))


@pytest.mark.guarantee("12-page-file")
@pytest.mark.parametrize("wrong", ["a flipped bit", "cut", "empty"])
def test_a_cached_order_that_is_damaged_is_built_again(tmp_path: Path, wrong: str) -> None:
    config, _ = write(tmp_path)
    built: Any = build_datasets(config)[0]
    expected = [built[k]["tokens"].tolist() for k in range(SAMPLES)]
    for path in built.index_files():
        kept = bytearray(path.read_bytes())
        kept[-CHECKSUM_BYTES - 2] ^= 1
        size = {"a flipped bit": len(kept), "cut": len(kept) - 9, "empty": 0}[wrong]
        path.unlink()  # what is mapped stays as it was
        path.write_bytes(kept[:size])
    again: Any = build_datasets(config)[0]
    assert [again[k]["tokens"].tolist() for k in range(SAMPLES)] == expected
