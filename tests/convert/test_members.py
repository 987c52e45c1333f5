"""WebDataset samples with several members: one of them is the document, by its name, and never two
in silence.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from streammega.errors import ConfigError, ConvertError
from streammega.integrations.webdataset import webdataset_texts
from tests.support.builders import (
    convert_bytes,
    convert_files,
    stored_ids,
    stored_texts,
    tar_with_holes,
    write_tar,
)


def images(path: Path, **more: Any) -> str:
    """As image-text datasets are: a picture, its caption, and what is known of it."""
    with webdataset.TarWriter(str(path)) as writer:
        for n in range(5):
            meta = {"caption": f"meta caption {n}", "width": n, "text": f"meta text {n}"}
            writer.write(
                {
                    "__key__": f"{n:05d}",
                    "jpg": b"\xff\xd8",
                    "json": meta,
                    "txt": f"caption {n}",
                    **more,
                }
            )
    return str(path)


@pytest.mark.guarantee("webdataset-sample-member")
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"tar_member": "txt"}, "caption"),
        ({"tar_member": ".TXT"}, "caption"),
        ({"tar_member": "json"}, "meta text"),
        ({"tar_member": "json", "text_key": "caption"}, "meta caption"),
    ],
)
def test_the_member_that_is_named_is_the_document(
    settings: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    report = convert_bytes(tmp_path / "out", images(tmp_path / "a.tar"), **settings)
    assert stored_texts(tmp_path / "out") == [f"{wanted} {n}" for n in range(5)]
    assert not report.dropped


MANY = r"a\.tar: of sample '00000' .*'00000\.jpg', '00000\.json', '00000\.txt'\); name one by --tar-member, 'json' or 'txt'"


@pytest.mark.guarantee("webdataset-sample-member")
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_samples_with_two_documents_are_an_error_that_lists_them(
    on_error: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=MANY) as caught:
        convert_bytes(tmp_path / "out", images(tmp_path / "a.tar"), on_error=on_error)
    assert "@" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_every_member_can_be_a_document(tmp_path: Path) -> None:
    members = [
        ("2101.00001.txt", b"one"),
        ("2101.00002.txt", b"two"),
        ("a.jpg", b""),
        ("a.txt", b"three"),
        ("a.txt", b"four"),
    ]
    path = write_tar(tmp_path / "a.tar", *members)
    with pytest.raises(ConfigError, match=r"'00001\.txt' or '00002\.txt'"):
        convert_bytes(tmp_path / "out", path)
    for pattern in ("*", "*txt"):
        convert_bytes(tmp_path / "out", path, tar_member=pattern, overwrite=True)
        assert stored_texts(tmp_path / "out") == ["one", "two", "three", "four"]
    convert_bytes(tmp_path / "second", path, tar_member="00002.txt")
    assert stored_texts(tmp_path / "second") == ["two"]


def test_members_of_any_suffix_and_compression_can_be_named(tmp_path: Path) -> None:
    members = [
        ("x/1.ocr.TXT.gz", gzip.compress(b"scanned")), ("x/1.txt", b"typed"), ("x/1.md", b"marked"),
        ("x/2.txt", b"typed alone"), ("x/3.cls", b"7"),
    ]  # fmt: skip
    path = write_tar(tmp_path / "a.tar", *members)
    wanted = {"txt": ["typed", "typed alone"], "ocr.txt": ["scanned"], "md": ["marked"]}
    for member, found in wanted.items():
        report = convert_bytes(tmp_path / "out", path, tar_member=member, overwrite=True)
        assert stored_texts(tmp_path / "out") == found
        assert report.dropped == {"samples without the member": 3 - len(found)}


def test_a_member_that_no_sample_has_is_an_error_that_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        ConvertError,
        match=r"a\.tar: no sample has a member 'text' \(they have: 'jpg', 'json', 'txt'\)",
    ):
        convert_bytes(tmp_path / "out", images(tmp_path / "a.tar"), tar_member="text")


def test_tokens_beside_their_metadata_are_chosen_too(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for n in range(3):
            writer.write(
                {"__key__": f"{n}", "json": {"n": n}, "npy": np.arange(n, n + 4, dtype=np.int32)}
            )
    with pytest.raises(ConfigError, match="'json' or 'npy'"):
        convert_files(tmp_path / "out", tmp_path / "a.tar")
    convert_files(tmp_path / "out", tmp_path / "a.tar", tar_member="npy")
    assert stored_ids(tmp_path / "out") == [list(range(n, n + 4)) for n in range(3)]


def test_samples_with_one_document_need_no_choice(tmp_path: Path) -> None:
    members = [
        ("a.jpg", b""),
        ("a.txt", b"one"),
        ("b.json", json.dumps({"text": "two"}).encode()),
        ("c.jsonl", b'{"text": "three"}\n{"text": "four"}\n'),
    ]
    convert_bytes(tmp_path / "out", write_tar(tmp_path / "a.tar", *members))
    assert stored_texts(tmp_path / "out") == ["one", "two", "three", "four"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_members_with_holes_are_refused_and_not_filled(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.tar").write_bytes(tar_with_holes(name))
    with pytest.raises(ConvertError, match=r"a\.tar!a\.\w+: is stored with holes"):
        convert_bytes(tmp_path / "out", tmp_path / "a.tar")
    with pytest.raises(ConvertError, match="unreadable member: 1"):
        convert_bytes(tmp_path / "out", tmp_path / "a.tar", on_error="skip")


HIDDEN = (
    ("._0001.txt", b"\0\5\x16\7 attributes of a Mac"),
    ("./._in.txt", b"\0\5\x16\7"),
    ("__MACOSX/in/._0002.txt", b"\0\5\x16\7"),
    ("__MACOSX/0002.txt", b"\0\5\x16\7"),
    ("in/.cache/0003.txt", b"hidden by its folder"),
    (".hidden.txt", b"hidden"),
    ("__notes__/0001.txt", b"a note of webdataset"),
)
SHOWN = (("./0001.txt", b"one"), ("in/../in/0002.txt", b"two"), ("__init__.txt", b"three"))


@pytest.mark.guarantee("everything-found-below")
@pytest.mark.parametrize("member", [None, "txt", "*", "*txt"])
def test_hidden_members_are_no_documents_and_are_counted(
    member: str | None, tmp_path: Path
) -> None:
    shown = [SHOWN[0], SHOWN[2]]
    path = write_tar(tmp_path / "a.tar", *HIDDEN[:3], *shown, *HIDDEN[3:])
    report = convert_bytes(tmp_path / "out", path, tar_member=member)
    assert stored_texts(tmp_path / "out") == ["one", "three"]
    assert report.members_left_out == {"hidden": len(HIDDEN)}
    assert not report.dropped


def test_a_zip_and_a_stream_of_texts_leave_the_same_members_out(tmp_path: Path) -> None:
    for name, data in HIDDEN:
        with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
            archive.writestr(name, data)
            archive.writestr("a.jsonl", b'{"text": "one"}')
        convert_bytes(tmp_path / "out", tmp_path / "a.jsonl.zip", overwrite=True)
        assert stored_texts(tmp_path / "out") == ["one"]
    path = write_tar(tmp_path / "a.tar", *HIDDEN, *SHOWN)
    assert list(webdataset_texts()(path)) == ["one", "two", "three"]
    with zipfile.ZipFile(tmp_path / "b.jsonl.zip", "w") as archive:
        for name, data in SHOWN[:2]:
            archive.writestr(name, data)
    with pytest.raises(ConvertError, match="holds 2 files"):
        convert_bytes(tmp_path / "none", tmp_path / "b.jsonl.zip")
