"""Everything that is found below a folder or by a glob is read, or is counted with the reason why it
is not: on disks, in buckets, in listings of the web.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streammega
from streammega import StorageConfig
from streammega.cli.main import main
from streammega.convert import ConvertOptions, convert
from streammega.convert.read.inputs import SkippedFiles, find_inputs
from streammega.errors import ConfigError, ConvertError, EndpointError, ObjectNotFoundError
from tests.support.builders import convert_bytes, stored_texts
from tests.support.data.make_peers import HERE as PEERS
from tests.support.data.make_peers import TEXTS
from tests.support.servers import S3, http_server

LINE = b'{"text": "%s"}\n'


def tree(root: Path, names: Sequence[str]) -> str:
    """Files of a record each, no two alike."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(LINE % name.encode())
    return str(root)


def found(
    *items: str, storage: StorageConfig | None = None, **options: Any
) -> tuple[list[str], dict[str, int]]:
    """Paths of the inputs, and what was counted."""
    passed = SkippedFiles()
    inputs = find_inputs(items, storage, ConvertOptions(**options), passed)
    return [item.path for item in inputs], passed.counts


def names(root: str | Path, *items: str, **options: Any) -> list[str]:
    """Paths of the inputs within a folder."""
    return [os.path.relpath(path, root) for path in found(*items, **options)[0]]


# --- what a name means ----------------------------------------------------------------------------


def pipe(tmp_path: Path) -> str:
    read, write = os.pipe()
    os.write(write, gzip.compress(LINE % b"piped"))
    os.close(write)
    return f"/dev/fd/{read}"


def pair(tmp_path: Path) -> str:
    convert_bytes(tmp_path / "ids", tree(tmp_path / "corpus", ["of a pair.jsonl"]))
    return f"{tmp_path}/ids"


def listed(tmp_path: Path) -> str:
    root = tree(tmp_path / "named", ["one.jsonl", "unnamed.jsonl"])
    (tmp_path / "names").write_text(f"# first\n{root}/one.jsonl\n{tmp_path}/web/a.jsonl\n")
    return f"@{tmp_path}/names"


def elsewhere(tmp_path: Path) -> str:
    fsspec.filesystem("memory").put(f"{tmp_path}/web", f"{tmp_path}/web", recursive=True)
    return f"memory:/{tmp_path}/web/deep"


def indexed(tmp_path: Path) -> str:
    root = shutil.copytree(PEERS / "mds_text", tmp_path / "mds")
    (root / "cache.arrow").write_bytes(b"of another program")
    return str(root)


NAMED: dict[str, tuple[Callable[[Path], str], list[str]]] = {
    "file": (lambda path: f"{path}/web/a.jsonl", ["a.jsonl"]),
    "folder": (lambda path: f"{path}/web", ["a.jsonl", "deep/b.jsonl"]),
    "glob": (lambda path: f"{path}/web/**/b*.jsonl", ["deep/b.jsonl"]),
    "URL": (elsewhere, ["deep/b.jsonl"]),
    "`@list`": (listed, ["one.jsonl", "a.jsonl"]),
    "`-`, `<(zcat a.gz)`": (pipe, ["piped"]),
    "prefix or manifest": (pair, ["of a pair.jsonl"]),
    "MDS, litdata or `save_to_disk` folder": (indexed, TEXTS),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_means_what_the_page_says(name: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    rows = page.partition("| a name | means |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(NAMED)
    tree(tmp_path / "web", ["a.jsonl", "deep/b.jsonl"])
    make, wanted = NAMED[name]
    convert_bytes(tmp_path / "out", make(tmp_path))
    assert stored_texts(tmp_path / "out") == wanted


# --- symbolic links -------------------------------------------------------------------------------


@pytest.mark.guarantee("everything-found-below")
def test_folders_behind_links_are_searched_once_by_either_spelling(tmp_path: Path) -> None:
    tree(tmp_path, ["in/a.jsonl", "disk/p/b.jsonl", "disk/p/deep/c.jsonl"])
    (tmp_path / "in/linked").symlink_to("../disk/p")
    (tmp_path / "disk/p/deep/back").symlink_to("..")
    (tmp_path / "in/self").symlink_to(".")
    root = str(tmp_path / "in")
    wanted = ["a.jsonl", "linked/b.jsonl", "linked/deep/c.jsonl"]
    for item in (root, f"{root}/**", f"{root}/**/*.jsonl"):
        assert names(root, item) == wanted, item
        assert found(item)[1] == {"folders that were searched under another name": 2}, item
    report = convert_bytes(tmp_path / "out", root)
    assert report.documents == 3


def test_a_folder_is_searched_by_its_own_name_before_its_links(tmp_path: Path) -> None:
    root = tree(tmp_path, ["z/b.jsonl"])
    (tmp_path / "a").symlink_to("z")
    assert names(root, root) == ["z/b.jsonl"]


def test_a_file_with_several_names_is_read_once(tmp_path: Path) -> None:
    root = tree(tmp_path, ["a.jsonl", "b.jsonl"])
    (tmp_path / "c.jsonl").symlink_to("a.jsonl")
    os.link(tmp_path / "a.jsonl", tmp_path / "d.jsonl")
    again = "other names of files that are read"
    assert found(root) == ([f"{root}/a.jsonl", f"{root}/b.jsonl"], {again: 2})
    assert found(f"{root}/b.jsonl", f"{root}/*.jsonl", f"{root}/b.jsonl") == (
        [f"{root}/b.jsonl", f"{root}/a.jsonl"],
        {again: 4},
    )
    report = convert([f"{root}/a.jsonl"] * 2, str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert report.documents == 1
    assert report.files_passed_over == {again: 1}


def test_a_link_to_nothing_is_an_error_or_is_counted(tmp_path: Path) -> None:
    root = tree(tmp_path, ["a.jsonl"])
    (tmp_path / "b.jsonl").symlink_to("nothing")
    for item in (root, f"{root}/*"):
        with pytest.raises(ConvertError, match=r"b\.jsonl': this symbolic link .*--on-error skip"):
            found(item)
        wanted = ([f"{root}/a.jsonl"], {"names that lead to no file": 1})
        assert found(item, on_error="skip") == wanted
        assert found(item, exclude=("b.*",))[1] == {"excluded": 1}


# --- what cannot be listed, and what is no file --------------------------------------------------


@pytest.mark.guarantee("everything-found-below")
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_folder_that_cannot_be_listed_is_an_error_or_is_counted(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, ["a.jsonl", "sub/b.jsonl"])
    scandir = os.scandir

    def failing(path: str) -> Any:
        if path.endswith("/sub"):
            raise OSError(code, os.strerror(code), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    for item in (root, f"{root}/**", f"{root}/*/*.jsonl"):
        with pytest.raises(ConvertError, match=rf"/sub': .*cannot be listed \({os.strerror(code)}"):
            found(item)
    wanted = ([f"{root}/a.jsonl"], {"folders that cannot be listed": 1})
    assert found(root, on_error="skip") == wanted
    # a pattern of files does not say that nothing of them is there
    assert found(root, on_error="skip", include=("*.jsonl",)) == wanted
    for pattern in ("sub/*", "sub", "sub/", "s*b"):
        assert found(root, exclude=(pattern,)) == ([f"{root}/a.jsonl"], {"excluded": 1}), pattern
    with pytest.raises(
        ConvertError,
        match="holds no files that can be read; left out: folders that cannot be listed: 1",
    ):
        found(f"{root}/sub", on_error="skip")


def test_a_folder_is_excluded_by_its_name(tmp_path: Path) -> None:
    root = tree(tmp_path, ["a.jsonl", "old/b.jsonl", "x/old/c/d.jsonl", "x/old.jsonl"])
    for pattern in ("old", "old/"):
        assert names(root, root, exclude=(pattern,)) == ["a.jsonl", "x/old.jsonl"]
        assert names(root, f"{root}/**", exclude=(pattern,)) == ["a.jsonl", "x/old.jsonl"]
    assert names(root, root, exclude=("x/old",)) == ["a.jsonl", "old/b.jsonl", "x/old.jsonl"]


@pytest.mark.parametrize("name", ["include", "exclude"])
def test_a_pattern_that_nothing_matches_is_warned_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tree(tmp_path, ["a.jsonl", "b.jsonl", "c.tmp", ".d.jsonl"])
    patterns = ("a.*", "*.tmp", ".d*") if name == "exclude" else ("a.*",)
    options: dict[str, Any] = {name: patterns}
    found(root, **options)
    assert not caplog.messages
    options[name] += ("c.json*",)
    found(root, **options)
    assert "matches 'c.json*' (--include, --exclude); is it mistyped?" in caplog.text


@pytest.mark.parametrize(
    "index",
    [
        {"shards": ["a"]},
        {"shards": [{"raw_data": "a"}]},
        {"chunks": [1], "config": {}},
        {"shards": 1, "chunks": None},
        ["shards"],
    ],
)
def test_an_index_of_another_program_is_a_file_like_others(index: Any, tmp_path: Path) -> None:
    root = tree(tmp_path, ["a.jsonl"])
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert names(root, root) == ["a.jsonl", "index.json"]


def test_a_list_may_begin_with_a_byte_order_mark_and_holds_no_pipes(tmp_path: Path) -> None:
    root = tree(tmp_path, ["a.jsonl"])
    (tmp_path / "list").write_text(f"{root}/a.jsonl\n", encoding="utf-8-sig")
    assert names(root, f"@{root}/list") == ["a.jsonl"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "list").write_text(f"{root}/pipe\n")
    with pytest.raises(ConvertError, match="name it itself, not in a list"):
        found(f"@{root}/list")


@pytest.mark.parametrize("options", [{}, {"hf_split": "train"}])
def test_a_list_without_a_name_is_an_error(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# none yet\n\n")
    with pytest.raises(ConfigError, match="no inputs are named"):
        found(f"@{tmp_path}/list", **options)


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    root = tree(tmp_path, ["a.jsonl"])
    os.mkfifo(tmp_path / "b.jsonl")
    for item in (root, f"{root}/*"):
        assert found(item) == ([f"{root}/a.jsonl"], {"pipes, sockets and devices": 1})
    report = convert_bytes(tmp_path / "out", root)
    assert report.documents == 1


def test_a_folder_that_a_glob_matches_is_counted(tmp_path: Path) -> None:
    root = tree(tmp_path, ["a.jsonl", "sub/b.jsonl", ".git/c.jsonl", ".d.jsonl"])
    reason = "folders that a glob matches (end it in /** to search them)"
    assert found(f"{root}/*") == ([f"{root}/a.jsonl"], {reason: 1, "hidden": 2})
    assert names(root, f"{root}/.*") == [".d.jsonl"]


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    from streammega.convert.read.source import unreadable

    denied = PermissionError(errno.EACCES, "Permission denied", "a.jsonl")
    assert "a.jsonl: permission denied" in unreadable("a.jsonl", denied)


# --- datasets below ------------------------------------------------------------------------------

DATASETS = "streammega datasets among files of other formats"


@pytest.mark.guarantee("inputs-several-splits")
def test_outputs_within_the_input_folder_do_not_feed_the_next_conversion(tmp_path: Path) -> None:
    root = tree(tmp_path / "in", ["n/a.jsonl", "b.jsonl"])
    settings_: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}
    convert([root], f"{root}/n/ds", **settings_)
    for number, overwrite in ((2, False), (2, True), (3, False)):
        prefix = f"{root}/n/ds{number}"
        report = convert([root], prefix, shard_bytes=8, overwrite=overwrite, **settings_)
        assert report.documents == 2
        assert [item["path"] for item in report.inputs] == [f"{root}/b.jsonl", f"{root}/n/a.jsonl"]
    assert report.files_passed_over == {DATASETS: 3 + 5}
    assert names(root, f"{root}/**") == ["b.jsonl", "n/a.jsonl"]


def test_a_folder_of_datasets_alone_is_merged_without_the_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tree(tmp_path / "source", ["a.jsonl"])
    root = tmp_path / "sets"
    for name in ("one", "two"):
        convert_bytes(f"{root}/{name}", source)
    for _ in range(2):
        report = convert([str(root)], f"{root}/all", overwrite=True, workers=1)
        assert report.documents == 2
    assert report.files_passed_over == {"of this conversion's own output": 3}
    assert "Is it made of them" not in caplog.text
    convert([str(root)], str(tmp_path / "twice"), workers=1)
    assert f"{root}/all: has as many bytes of tokens as the 2 other datasets" in caplog.text
    # what is named is meant
    with pytest.raises(ConvertError, match="would replace its own input"):
        convert([f"{root}/all"], f"{root}/all", overwrite=True, workers=1)


def test_a_work_folder_within_the_input_folder_is_no_input(tmp_path: Path) -> None:
    root = tree(tmp_path / "in", ["a.jsonl"])
    settings_: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "work_dir": f"{root}/work"}
    (tmp_path / "in/work").mkdir()
    from streammega.convert import Task, convert_task

    convert_task([root], str(tmp_path / "out"), Task(number=0, of=1), **settings_)
    again = convert_task([root], str(tmp_path / "out"), Task(number=0, of=1), **settings_)
    assert again.units_before == 1


# --- splits --------------------------------------------------------------------------------------

LAYOUTS = [
    ["data/train-00000-of-00001.jsonl", "data/validation-0.jsonl", "data/test-00000.jsonl"],
    ["train/data-0.jsonl", "validation/data-0.jsonl", "test/data-0.jsonl"],
    ["train.jsonl", "sub/dev.jsonl", "sub/test.json"],
    ["wiki.train.txt", "wiki.valid.txt", "wiki.test.txt"],
    ["train/pos/1.txt", "eval/pos/1.txt"],
]


@pytest.mark.guarantee("inputs-several-splits")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_splits_are_an_error_unless_one_is_named(layout: list[str], tmp_path: Path) -> None:
    root = tree(tmp_path / "in", layout)
    for items in ([root], [f"{root}/**"], [f"{root}/{name}" for name in layout]):
        with pytest.raises(ConvertError, match=r"several splits .*--hf-split NAME.*--include GLOB"):
            found(*items)
        paths, counts = found(*items, hf_split="train")
        assert paths == [f"{root}/{layout[0]}"]
        assert counts == {"not of split train": len(layout) - 1}
        assert sorted(names(root, *items, hf_split="all")) == sorted(layout)
        with pytest.raises(ConvertError, match=r"no input is of split 'no' .*train: "):
            found(*items, hf_split="no")
    assert names(root, root, include=(layout[0],)) == [layout[0]]


def test_splits_of_any_name_can_be_chosen(tmp_path: Path) -> None:
    layout = ["train_sft-0.jsonl", "train_gen-0.jsonl", "test_sft-0.jsonl"]
    root = tree(tmp_path, layout)
    assert names(root, root, hf_split="train_sft") == layout[:1]
    assert names(root, root, hf_split="train") == ["train_gen-0.jsonl", "train_sft-0.jsonl"]


def test_the_last_name_that_says_a_split_counts(tmp_path: Path) -> None:
    layout = ["part-0.jsonl", "train-0.jsonl", "validation-0.jsonl", "val/train.x/test-0.jsonl"]
    root = tree(tmp_path / "training_data", layout)
    assert names(root, root, hf_split="train") == layout[:2]
    assert names(root, root, hf_split="Dev") == layout[2:3]
    assert names(root, root, hf_split="test") == layout[3:]


@pytest.mark.parametrize("name", ["hf_split", "include", "exclude"])
def test_a_choice_of_files_that_is_empty_is_an_error(name: str, tmp_path: Path) -> None:
    root = tree(tmp_path, ["train-0.jsonl", "test-0.jsonl"])
    with pytest.raises(ConfigError, match=rf"{name} \(--{name.replace('_', '-')}\) is empty"):
        values: dict[str, Any] = {name: "" if name == "hf_split" else ("",)}
        found(root, **values)


def test_names_that_are_no_splits_are_read(tmp_path: Path) -> None:
    layout = ["constrain.jsonl", "latest.jsonl", "dev/a.jsonl", "dev/b.txt", "values.jsonl"]
    root = tree(tmp_path / "test", layout)
    assert names(root, root) == sorted(layout)


# --- every path, anywhere -------------------------------------------------------------------------

FOLDERS = st.sampled_from(["sub", "a.jsonl", ".hidden", "x.y"])
NAMES = st.sampled_from(["a.jsonl", "b.txt", "d.json", ".e.jsonl", "f.md"])
PATHS = st.tuples(st.lists(FOLDERS, max_size=2), NAMES).map(
    lambda path: "/".join([*path[0], path[1]])
)
KINDS = ["file", "file", "file", "pipe", "lost", "link", "link"]
ENTRIES = st.lists(
    st.tuples(
        PATHS,
        st.sampled_from(KINDS),
        st.integers(0, 10),
    ),
    max_size=12,
)


def grow(root: Path, entries: list[tuple[str, str, int]]) -> None:
    """Make what can be made: a name that is taken stays what it is."""
    made = [root]
    for name, kind, target in entries:
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file" and not os.path.lexists(path):
                path.write_bytes(LINE % str(len(made)).encode())
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "lost":
                path.symlink_to("nothing-here")
            elif kind == "link":
                path.symlink_to(made[target % len(made)])
        except OSError:  # the name is taken, or a file is above it
            continue
        made.append(path)
        made += [above for above in path.parents if root in above.parents]


def is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


@pytest.mark.guarantee("everything-found-below")
@settings(max_examples=150, deadline=None)
@given(entries=ENTRIES)
def test_every_path_of_any_tree_is_read_or_counted(entries: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "in"
        root.mkdir()
        grow(root, entries)
        try:
            paths, counts = found(str(root), on_error="skip")
        except ConvertError:
            paths, counts = [], {}
        identities = Counter(os.path.realpath(path) for path in paths)
        assert set(identities.values()) <= {1}, "a file is read twice"
        there = []
        for above, _, files in os.walk(root):
            there += [Path(above, name) for name in files]
        shown = [path for path in there if not is_hidden(path, root)]
        own_files = {str(path) for path in shown if path.is_file() and not path.is_symlink()}
        unknown = {path for path in own_files if path.endswith(".md")}
        assert own_files - unknown <= set(identities), "a file is lost"
        assert not any(is_hidden(Path(path), root) for path in paths)
        if paths:
            pipes = [path for path in shown if path.is_fifo() and not path.is_symlink()]
            assert counts.get("pipes, sockets and devices", 0) >= len(pipes)
            lost = [path for path in shown if path.is_symlink() and not path.exists()]
            assert counts.get("names that lead to no file", 0) >= len(lost)
            assert counts.get("of unknown suffix", 0) >= len(unknown)
        by_glob, _ = found_or_nothing(f"{root}/**", on_error="skip")
        assert by_glob == paths


def found_or_nothing(*items: str, **options: Any) -> tuple[list[str], dict[str, int]]:
    try:
        return found(*items, **options)
    except (ConvertError, ObjectNotFoundError):
        return [], {}


FILES = st.lists(PATHS, max_size=10, unique=True)
PATTERNS = st.sampled_from(
    ["", "/*", "/**", "/**/*.jsonl", "/*/*", "/sub/*", "/*.[jt]*", "/**/sub/**", "/.*", "/x.?/*"]
)


def makeable(files: list[str]) -> list[str]:
    """Those of which no other one is a folder."""
    return [name for name in files if not any(other.startswith(f"{name}/") for other in files)]


def same_everywhere(files: list[str], pattern: str, far: str, put: Callable[[str], None]) -> None:
    """A disk and another place, which `put` fills, give the same files in the same order."""
    files = makeable(files)
    with tempfile.TemporaryDirectory() as folder:
        near = tree(Path(folder), files)
        for name in files:
            put(name)
        on_disk, counts = found_or_nothing(near + pattern)
        elsewhere, counts_there = found_or_nothing(far + pattern, storage=None)
        assert [path.removeprefix(near) for path in on_disk] == [
            path.removeprefix(far) for path in elsewhere
        ]
        if on_disk and not pattern:
            assert counts == counts_there


@pytest.mark.guarantee("everything-found-below")
@settings(max_examples=80, deadline=None)
@given(files=FILES, pattern=PATTERNS)
def test_a_file_system_elsewhere_gives_what_the_disk_gives(files: list[str], pattern: str) -> None:
    system = fsspec.filesystem("memory")
    root = tempfile.mktemp(prefix="tree-", dir="/")

    def put(name: str) -> None:
        system.pipe_file(f"{root}/{name}", LINE % name.encode())

    try:
        same_everywhere(files, pattern, f"memory://{root}", put)
    finally:
        if system.exists(root):
            system.rm(root, recursive=True)


@pytest.mark.guarantee("everything-found-below")
def test_a_bucket_gives_what_the_disk_gives(
    s3: S3, s3_storage: StorageConfig, bucket: str, tmp_path: Path
) -> None:
    files = ["b.jsonl", "a/c.jsonl", "a-b/d.jsonl", ".git/x/y", ".git/z", "a/.e.jsonl", "README.md"]
    near = tree(tmp_path, files)
    for name in files:
        s3.client().put_object(Bucket=bucket, Key=f"in/{name}", Body=LINE % name.encode())
    far = f"s3://{bucket}/in"
    for pattern in ("", "/*", "/**", "/*/*.jsonl", "/a*/**", "/**/c.*", "/[ab]*/*"):
        for options in ({}, {"exclude": ("a-b/*", "b.*")}, {"include": ("*.md", "c.*")}):
            on_disk, counts = found_or_nothing(near + pattern, **options)
            in_bucket, counts_there = found_or_nothing(far + pattern, storage=s3_storage, **options)
            assert [path.removeprefix(near) for path in on_disk] == [
                path.removeprefix(far) for path in in_bucket
            ]
            assert pattern or counts == counts_there


@pytest.mark.guarantee("everything-found-below")
def test_a_listing_of_the_web_is_searched_as_a_folder() -> None:
    def page(*links: str) -> bytes:
        return "".join(f'<a href="{link}">{link}</a>' for link in links).encode()

    pages = {
        "/d/": page("a.jsonl", "sub/", "gone/", ".hidden.jsonl"),
        "/d/sub/": page("b.jsonl", "../"),
        "/d/a.jsonl": LINE % b"a",
        "/d/sub/b.jsonl": LINE % b"b",
    }
    with http_server(pages) as server:
        with pytest.raises(EndpointError, match=r"/d/gone': .*cannot be listed"):
            found(f"{server.url}/d/")
        pages["/d/"] = page("a.jsonl", "sub/", ".hidden.jsonl")
        fsspec.filesystem("http").clear_instance_cache()
        assert found(f"{server.url}/d/") == (
            [f"{server.url}/d/a.jsonl", f"{server.url}/d/sub/b.jsonl"],
            {"hidden": 1},
        )


# --- what is told of it ---------------------------------------------------------------------------


@pytest.mark.guarantee("inputs-several-splits")
def test_ls_says_what_convert_reads_and_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path / "in", ["a.jsonl", "n\x1bm.txt", ".x", "old/b.jsonl", "sub/c.jsonl"])
    words = [root, "--exclude", "old/*", "--on-error", "skip"]
    assert main(["ls", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"jsonl: 2 inputs, {len(LINE) * 2 - 4 + 7 + 11} bytes",
        f"text: 1 input, {len(LINE) - 2 + 7} bytes",
        f"left out, excluded: 1 ('{root}/old/b.jsonl')",
        f"left out, hidden: 1 ('{root}/.x')",
    ]
    assert main(["ls", "--json", *words]) == 0
    listed = json.loads(capsys.readouterr().out)
    command = ["convert", *words, str(tmp_path / "out"), "--tokenizer", "bytes"]
    secret = ["--storage", "secret=hide-me-please"]
    assert main([*command, *secret, "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert {name: report[name] for name in listed} == listed
    assert [item["path"] for item in listed["inputs"]] == [
        f"{root}/a.jsonl",
        f"{root}/n\x1bm.txt",
        f"{root}/sub/c.jsonl",
    ]
    assert report["streammega"] == streammega.__version__
    assert report["command"][:2] == ["streammega", "convert"]
    assert "hide-me-please" not in text
    lengths = report["document_lengths"]
    assert sum(row["documents"] for row in lengths) == 3
    assert [row["from_tokens"] for row in lengths] == [2**n for n in range(len(lengths))]
    assert main(["ls", "-"]) == 1
    assert main(["ls", str(tmp_path / "nothing")]) == 1


def archive(path: Path, members: list[tuple[str, Any]]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            else:
                info.type = data.encode()
                info.linkname = "elsewhere"
                tar.addfile(info)
    return str(path)


@pytest.mark.guarantee("everything-found-below", "names-in-folder")
def test_members_of_archives_that_are_no_documents_are_counted(tmp_path: Path) -> None:
    members: list[tuple[str, Any]] = [
        ("0.txt", b"text"), ("0.jpg", b"x"), ("1.jpg", b"x"), ("2.txt", tarfile.SYMTYPE.decode()),
        ("3.txt", tarfile.LNKTYPE.decode()), ("4.txt", tarfile.CHRTYPE.decode()), ("folder", tarfile.DIRTYPE.decode()),
        ("no-suffix", b"x"),
    ]  # fmt: skip
    path = archive(tmp_path / "a.tar", members)
    report = convert_bytes(tmp_path / "out", path)
    assert report.documents == 1
    assert report.members_left_out == {
        ".jpg": 2,
        "links": 2,
        "devices and pipes": 1,
        "without a suffix": 1,
    }
    assert report.dropped == {"samples without text": 2}


@pytest.mark.parametrize("member", [None, "txt"])
def test_two_members_of_one_name_have_a_remedy_that_works(
    member: str | None, tmp_path: Path
) -> None:
    path = archive(tmp_path / "a.tar", [("0.txt", b"one"), ("0.txt", b"two")])
    with pytest.raises(ConfigError, match=r"'txt' more than once.*--tar-member '\*txt'"):
        convert_bytes(tmp_path / "out", path, tar_member=member)
    report = convert_bytes(tmp_path / "out", path, tar_member="*txt")
    assert report.documents == 2


@pytest.mark.parametrize(("suffix", "package"), [(".lz4", "lz4"), (".snappy", "python-snappy")])
def test_a_package_that_is_missing_is_named(
    suffix: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(fsspec.core.compr, {".lz4": "lz4", ".snappy": "snappy"}[suffix], False)
    monkeypatch.setattr("streammega.convert.read.compression.infer_compression", lambda name: None)
    root = tree(tmp_path, [f"a.jsonl{suffix}"])
    with pytest.raises(ConvertError, match=rf"{suffix} needs .*pip install {package}"):
        convert_bytes(tmp_path / "out", root)
