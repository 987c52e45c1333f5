"""Mapped files: no descriptor, no byte past their end, gone with the last array."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from streammega.storage.backends.local import map_file


def map_path(path: Path, size: int) -> np.ndarray:
    fd = os.open(path, os.O_RDONLY)
    try:
        return map_file(fd, size, path)
    finally:
        os.close(fd)


@pytest.mark.guarantee("mapped-files-hold")
def test_mapped_files_hold_no_descriptors_and_are_unmapped_with_their_last_view(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bytes"
    data = os.urandom(10_000)
    path.write_bytes(data)
    before = len(os.listdir("/proc/self/fd"))
    arrays = [map_path(path, 10_000) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(array.tobytes() == data for array in arrays)
    view = memoryview(arrays[0])[100:200]  # type: ignore[arg-type]
    del arrays
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1
    assert bytes(view) == data[100:200]
    del view
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_mapped_bytes_are_read_only_and_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"old" * 1000)
    array = map_path(path, 3000)
    (tmp_path / "new").write_bytes(b"n")
    os.replace(tmp_path / "new", path)
    assert array.tobytes() == b"old" * 1000
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_file_shorter_than_what_is_to_be_mapped_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 10)
    with pytest.raises(OSError, match="has 10 bytes, not the 11") as caught:
        map_path(path, 11)
    assert caught.value.filename == str(path)
    assert len(map_path(path, 0)) == 0
    assert len(map_path(path, 4)) == 4
