"""Tars as inputs: their members in order, and no damage that loses some of them in silence."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.convert import ConvertOptions, convert
from streammega.convert.read.formats import read_slice
from streammega.convert.read.source import Input, Skipped, Slice
from streammega.errors import ConvertError, FormatError
from tests.support.examples import examples
from tests.support.typed import all_tokens


def test_members_are_read_in_their_order_by_their_suffixes(tmp_path: Path) -> None:
    members = {
        "a.txt": b"one", "a.jpg": b"no text", "b/c.d/e.TXT": b"two", ".txt": b"hidden", "__meta__.json": b'{"text": "four"}',
        "k": b"none",
        "f.g.json": b'{"text": "five"}', "h.txt.gz": gzip.compress(b"six"), "a.json": b'{"text": "seven"}', "j.cls": b"0",
    }  # fmt: skip
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.txt")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        archive.addfile(link)
        again = tarfile.TarInfo("a.txt")
        again.size = 5
        archive.addfile(again, io.BytesIO(b"eight"))
    report = convert([str(tmp_path / "a.tar")], str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert report.members_left_out["hidden"] == 1
    texts = [
        bytes(ids[:-1].astype(np.uint8)).decode()
        for ids in all_tokens(IndexedDataset(str(tmp_path / "out")))
    ]
    assert texts == ["one", "two", "four", "five", "six", "seven", "eight"]


@pytest.mark.many_examples
@pytest.mark.guarantee("end-tar-checked")
@settings(max_examples=examples(25))
@given(data=st.data())
def test_no_cut_and_no_damage_of_a_header_loses_documents_in_silence(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Of archives as Python, GNU tar and others write them: with extended headers, long names,
    links and folders.
    """
    folder = tmp_path_factory.mktemp("tar")
    headers = []
    packed = io.BytesIO()
    style = data.draw(
        st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
    )
    count = data.draw(st.integers(1, 40))
    with tarfile.open(fileobj=packed, mode="w", format=style) as archive:
        for number in range(count):
            headers.append(archive.offset)
            name = (
                f"{number}.txt"
                if number % 3 or style == tarfile.USTAR_FORMAT
                else f"{'é' * 120}{number}.txt"
            )
            member = tarfile.TarInfo(name)
            member.size = data.draw(st.integers(1, 3000))
            member.mtime = 0.5 if style == tarfile.PAX_FORMAT else 0
            archive.addfile(member, io.BytesIO(b"x" * member.size))
            if number % 5 == 0:
                folder_member = tarfile.TarInfo(f"folder{number}")
                folder_member.type = tarfile.DIRTYPE
                archive.addfile(folder_member)
    whole = packed.getvalue()

    def texts(content: bytes) -> int:
        (folder / "a.tar").write_bytes(content)
        piece = Slice(
            input=Input(path=str(folder / "a.tar"), format="tar", size=len(content), etag="")
        )
        return len(
            list(read_slice(piece, ConvertOptions(tokenizer="bytes"), StorageConfig(), Skipped()))
        )

    assert texts(whole) == count
    at = data.draw(st.sampled_from(headers))
    # a checksum may be spelt in many ways
    byte = data.draw(st.integers(0, 499).filter(lambda byte: not 148 <= byte < 156))
    broken = bytearray(whole)
    broken[at + byte] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ConvertError):
        texts(bytes(broken))
    holed = whole[:at] + bytes(512) + whole[at + 512 :]
    with pytest.raises(ConvertError):
        texts(holed)
    end = len(whole.rstrip(b"\0")) // 512 * 512
    with pytest.raises(ConvertError):
        texts(whole[: data.draw(st.integers(1, end))])


@pytest.mark.parametrize("kind", ["bin", "zst", "tar"])
def test_bytes_beyond_the_lengths_are_an_error_in_every_kind(kind: Any, tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(str(tmp_path / "web"), np.uint16, kind=kind)
    pieces = [memoryview(b"abcd"), memoryview(b"efgh")]
    with pytest.raises(FormatError, match="8 bytes do not belong to these lengths"):
        writer.add_documents(iter(pieces), np.array([2]), np.array([1]))
