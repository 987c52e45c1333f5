"""Tokens from one layout to another: nothing is lost, killed runs go on to the same bytes, workers
and memory change nothing.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.convert import ConvertReport, ProgressObserver, convert
from streammega.convert.conversion import Conversion
from streammega.convert.options import ExecutionConfig
from streammega.convert.work_dir import WorkDir
from streammega.convert.workers import run_parallel
from streammega.dataset import checksums
from streammega.dataset.verify import verify
from streammega.errors import ConfigError, ConvertError, EndpointError, ObjectChangedError
from streammega.storage.backends.local import FileRange, LocalStore
from streammega.storage.thread_pool import pause
from tests.support.builders import convert_bytes, convert_files, write_random_pair
from tests.support.examples import examples
from tests.support.kill_programs import failing_task, slow_task
from tests.support.oracle import IndexedDatasetBuilder
from tests.support.processes import Family, launch
from tests.support.servers import S3

Document = tuple[tuple[tuple[int, ...], int], ...]


def documents_of(prefix: str | Path) -> list[Document]:
    read = IndexedDataset(str(prefix))
    items = [item if isinstance(item, tuple) else (item, 0) for item in read[:]]
    bounds = read.document_indices.tolist()
    return [
        tuple((tuple(np.asarray(tokens).tolist()), mode) for tokens, mode in items[a:b])
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


def write(prefix: str, documents: list[list[tuple[list[int], int]]], *, multimodal: bool) -> None:
    with IndexedDatasetWriter(prefix, np.uint16, multimodal) as writer:
        for document in documents:
            for tokens, mode in document:
                writer.add_item(np.array(tokens, np.int64), mode)
            writer.end_document()


def reshape(source: Path, target: Path, **options: Any) -> ConvertReport:
    """Convert one dataset, by one worker."""
    return convert([str(source)], str(target), workers=1, **options)


EMPTY: tuple[list[int], int] = ([], 0)


@pytest.mark.guarantee("chain-formats-keeps")
@pytest.mark.parametrize("options", [{}, {"dtype": "int32"}, {"format": "zst"}], ids=str)
@pytest.mark.parametrize(
    "documents",
    [[[EMPTY]], [[], [EMPTY], []], [[([1, 2], 0)], [EMPTY], [([3], 0), EMPTY]]],
    ids=["alone", "among empty documents", "between others"],
)
@pytest.mark.parametrize("multimodal", [False, True])
def test_empty_sequences_are_copied_like_others(
    documents: list[list[tuple[list[int], int]]],
    options: dict[str, Any],
    multimodal: bool,
    tmp_path: Path,
) -> None:
    write(str(tmp_path / "in"), documents, multimodal=multimodal)
    reshape(tmp_path / "in", tmp_path / "out", **options)
    assert documents_of(tmp_path / "out") == documents_of(tmp_path / "in")


sequence = st.tuples(st.lists(st.integers(0, 60_000), min_size=1, max_size=30), st.integers(-3, 3))
corpus = st.lists(st.lists(sequence, min_size=1, max_size=3), min_size=1, max_size=25)


def digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


@pytest.mark.many_examples
@pytest.mark.guarantee("chain-formats-keeps")
@given(
    documents=corpus,
    multimodal=st.booleans(),
    kinds=st.lists(st.sampled_from(["bin", "zst", "tar"]), min_size=2, max_size=4),
    sizes=st.lists(st.sampled_from([None, 1, 40, 200, 10_000]), min_size=4, max_size=4),
)
@settings(max_examples=examples(10))
def test_any_chain_of_layouts_keeps_every_token_bound_and_mode(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Any,
    multimodal: bool,
    kinds: list[Any],
    sizes: list[int | None],
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    write(str(folder / "0"), documents, multimodal=multimodal)
    name = str(folder / "0")
    for number, (kind, size) in enumerate(zip(kinds, sizes, strict=False), 1):
        convert_files(folder / str(number), name, format=kind, shard_bytes=size)
        name = str(folder / f"{number}.manifest.json")
    convert_files(folder / "last", name)
    for suffix in (".bin", ".idx"):
        assert (folder / f"last{suffix}").read_bytes() == (folder / f"0{suffix}").read_bytes()


def test_a_tar_of_several_shards_holds_the_tokens_of_each(tmp_path: Path) -> None:
    documents = [[([number + 1] * 3, 0)] for number in range(6)]
    write(str(tmp_path / "in"), documents, multimodal=False)
    reshape(tmp_path / "in", tmp_path / "shards", shard_bytes=1)
    shards = str(tmp_path / "shards.manifest.json")
    convert_files(tmp_path / "out", shards, format="tar")
    assert documents_of(tmp_path / "out.manifest.json") == documents_of(tmp_path / "in")


@pytest.mark.many_examples
@pytest.mark.guarantee("units-shards-functions", "shuffle-permutation-whatever")
@given(
    documents=corpus,
    multimodal=st.booleans(),
    seed=st.integers(0, 9),
    size=st.sampled_from([None, 60, 400]),
)
@settings(max_examples=examples(9))
def test_a_shuffle_is_one_permutation_whatever_the_memory(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Any,
    multimodal: bool,
    seed: int,
    size: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("shuffle")
    write(str(folder / "in"), documents, multimodal=multimodal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streammega.convert.job.SEGMENT_BYTES", 50)
        reshape(folder / "in", folder / "a", shuffle_seed=seed, shard_bytes=size)
        patch.setattr("streammega.convert.options.ExecutionConfig.__post_init__", lambda self: None)
        reshape(folder / "in", folder / "b", shuffle_seed=seed, shuffle_memory_bytes=100)
    got = documents_of(folder / "a")
    assert sorted(got) == sorted(documents_of(folder / "in"))
    assert got == documents_of(folder / "b")


@pytest.mark.guarantee("shuffle-permutation-whatever")
def test_a_shuffle_is_uniform_and_its_seed_matters(tmp_path: Path) -> None:
    with IndexedDatasetWriter(str(tmp_path / "in"), np.int32) as writer:
        for number in range(2000):
            writer.add_item([number])
            writer.end_document()
    order = []
    for seed in (1, 2):
        reshape(tmp_path / "in", tmp_path / str(seed), shuffle_seed=seed)
        order.append(
            np.array([int(item[0]) for item in IndexedDataset(str(tmp_path / str(seed)))[:]])
        )
        assert sorted(order[-1]) == list(range(2000))
        assert abs(np.corrcoef(order[-1], np.arange(2000))[0, 1]) < 0.08
        assert (np.diff(order[-1]) == 1).sum() < 10
    assert (order[0] != order[1]).mean() > 0.98


@pytest.mark.many_examples
@pytest.mark.guarantee("left-out-counted")
@given(
    numbers=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    shuffled=st.booleans(),
    cut=st.sampled_from([20, 1 << 20]),
)
@settings(max_examples=examples(12))
def test_the_first_of_equal_documents_stays(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], shuffled: bool, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("dedup")
    write(
        str(folder / "in"), [[([number] * (number + 1), 0)] for number in numbers], multimodal=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streammega.convert.job.SEGMENT_BYTES", cut)
        patch.setattr("streammega.convert.options.ExecutionConfig.__post_init__", lambda self: None)
        report = reshape(
            folder / "in",
            folder / "out",
            dedup=True,
            shuffle_seed=1 if shuffled else None,
            shuffle_memory_bytes=200,
        )
    got = [document[0][0][0] for document in documents_of(folder / "out")]
    expected = list(dict.fromkeys(numbers))
    assert (sorted(got) == sorted(expected)) if shuffled else (got == expected)
    assert report.dropped.get("duplicates", 0) == len(numbers) - len(expected)


def test_merging_is_megatrons_own_merge(tmp_path: Path) -> None:
    names = []
    for number in range(3):
        names.append(str(tmp_path / f"in{number}"))
        write_random_pair(names[-1], seed=number)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for name in names:
        builder.add_index(name)
    builder.finalize(str(tmp_path / "theirs.idx"))
    convert_files(tmp_path / "ours", *names)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()


def test_a_named_shard_keeps_its_documents_and_modes_and_what_is_known_of_its_ids(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one", "a": "two"}\n{"q": "x", "a": "y"}\n')
    for kind, suffix in (("bin", ".bin"), ("zst", ".bin.zst"), ("tar", ".tar")):
        name = str(tmp_path / f"in-{kind}")
        convert_bytes(name, tmp_path / "a.jsonl", text_keys=("q", "a:1"), format=kind)
        convert_files(tmp_path / f"out-{kind}", name + suffix)
        assert documents_of(tmp_path / f"out-{kind}") == documents_of(name) != []
        report = verify(str(tmp_path / f"out-{kind}"))
        assert (report.problems, report.notes) == ([], []), "the end of documents is known"


@pytest.mark.guarantee("chain-formats-keeps")
def test_shards_have_the_size_asked(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "in"), count=500)
    reshape(tmp_path / "in", tmp_path / "out", shard_bytes=5000)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("out-*.bin"))]
    assert max(sizes) <= 5000
    assert all(a + 200 >= 5000 for a in sizes[:-1]), (
        "every shard but the last is full: no document of at most 200 bytes would fit"
    )


def test_sequences_that_do_not_lie_end_to_end_are_read_where_they_are(tmp_path: Path) -> None:
    from streammega.dataset.idx import encode_index

    tokens = np.arange(100, dtype=np.uint16)
    tokens.tofile(tmp_path / "odd.bin")
    lengths = np.array([10, 5, 20], np.int32)
    offsets = np.array([120, 0, 20], np.int64)
    (tmp_path / "odd.idx").write_bytes(
        b"".join(encode_index(np.dtype(np.uint16), lengths, np.array([0, 2, 3]), None, offsets))
    )
    expected = documents_of(tmp_path / "odd")
    for options in (
        {},
        {"format": "tar"},
        {"dtype": "int32"},
        {"min_tokens": 1},
        {"shuffle_seed": 1},
        {"shard_bytes": 20},
    ):
        reshape(tmp_path / "odd", tmp_path / "out", overwrite=True, **options)
        assert sorted(documents_of(tmp_path / "out")) == sorted(expected)


# --- interruptions ------------------------------------------------------------------------------------------------------


def make_corpus(path: Path, lines: int = 3000) -> None:
    rng = random.Random(0)
    with open(path, "w") as file:
        for number in range(lines):
            file.write(
                '{"text": "' + f"document {number} " + "lorem ipsum " * rng.randrange(30) + '"}\n'
            )


CONVERT = """
import sys
import streammega.convert.job as job
from streammega.convert import convert
job.MAX_UNIT_BYTES, job.SEGMENT_BYTES = 40_000, 15_000
convert([sys.argv[1]], sys.argv[2], tokenizer="bytes", format="zst", shard_bytes=90_000, shuffle_seed=5, dedup=True,
        workers=int(sys.argv[3]), pack_length=int(sys.argv[4]) or None)
"""


def start(source: Path, target: Path, workers: int, pack: int) -> Family:
    """A conversion by a process that has imported what it needs."""
    words = ["-c", CONVERT, str(source), str(target / "web"), str(workers), str(pack)]
    return launch(source.parent, 1, words)


def files_below(folder: Path) -> int:
    """How far a conversion is, however fast the machine: so many files of work and output there
    are.
    """
    return sum(len(files) for _, _, files in os.walk(folder))


def digest_of_dataset(folder: Path) -> dict[str, str]:
    """As `digest`, without temporary files of killed writers, which are removed a day later."""
    return {name: own for name, own in digest(folder).items() if not name.endswith(".partial")}


def kill_again_and_again(
    tmp_path: Path, kills: int, seed: int, workers: int, pack: int = 0
) -> None:
    """Kill a conversion at random moments until it was killed so often, then let it finish: the
    bytes must be the same. pack: tokens of its bins, if any.
    """
    source = tmp_path / "in.jsonl"
    make_corpus(source)
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    process = start(source, whole, 1, pack)
    most = 0
    while process.ended(0, within=0.005) == [None]:
        most = max(most, files_below(whole))
    assert process.ended(0, within=0) == [0], process.log(0)
    rng = random.Random(seed)
    killed = 0
    while killed < kills:
        # killed when all was done
        if (broken / "web.manifest.json").exists() and not (broken / ".web.convert").exists():
            assert digest_of_dataset(broken) == digest(whole)
            shutil.rmtree(broken)
        wanted = files_below(broken) + rng.randint(1, most)
        process = start(source, broken, workers, pack)
        while process.ended(0, within=0.005) == [None] and files_below(broken) < wanted:
            pass
        if process.ended(0, within=0) == [None]:
            workers_of_it = psutil.Process(process.members[0].pid).children(recursive=True)
            for member in (*workers_of_it, process.members[0]):
                member.kill()
            process.close()
            psutil.wait_procs(workers_of_it, timeout=60)
            killed += 1
            names = {path.name for path in broken.glob("web*")} if broken.exists() else set()
            if "web.manifest.json" not in names and names:
                with pytest.raises(Exception):  # noqa: B017  half published: not a dataset by any name
                    IndexedDataset(str(broken / "web"))
            continue
        assert digest_of_dataset(broken) == digest(whole)
        shutil.rmtree(broken)
    shutil.rmtree(broken, ignore_errors=True) if (broken / "web.manifest.json").exists() else None
    process = start(source, broken, workers, pack)
    assert process.ended(0, within=120) == [0], process.log(0)
    assert digest_of_dataset(broken) == digest(whole)
    assert [path.name for path in broken.iterdir() if path.is_dir()] == [], (
        "nothing of the work is left"
    )


@pytest.mark.guarantee("conversion-killed-goes", "units-shards-functions")
def test_a_killed_conversion_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 2, 0, 2)


@pytest.mark.guarantee("conversion-killed-goes")
@pytest.mark.soak
@pytest.mark.parametrize(("workers", "pack"), [(1, 0), (3, 0), (3, 512)])
def test_fifty_kills_change_no_byte(tmp_path: Path, workers: int, pack: int) -> None:
    kill_again_and_again(tmp_path, 25, workers, workers, pack)


@pytest.mark.guarantee("units-shards-functions")
def test_a_conversion_killed_while_it_publishes_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_pair(str(tmp_path / "in"))
    reshape(tmp_path / "in", tmp_path / "whole" / "web", shard_bytes=3000)
    from streammega.convert.write import publish
    from streammega.storage.object_ops import move_or_copy

    real = move_or_copy
    count = [0]
    for stop_at in range(1, 14, 3):

        def dies(*arguments: Any, stop_at: int = stop_at) -> None:
            count[0] += 1
            if count[0] == stop_at:
                raise KeyboardInterrupt
            real(*arguments)

        count[0] = 0
        monkeypatch.setattr(publish, "move_or_copy", dies)
        with pytest.raises(KeyboardInterrupt):
            reshape(tmp_path / "in", tmp_path / "broken" / "web", shard_bytes=3000)
        monkeypatch.setattr(publish, "move_or_copy", real)
        reshape(tmp_path / "in", tmp_path / "broken" / "web", shard_bytes=3000)
        assert digest(tmp_path / "broken") == digest(tmp_path / "whole")
        for path in (tmp_path / "broken").glob("web*"):
            path.unlink()


@pytest.mark.guarantee("after-mended-line")
def test_only_changed_inputs_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 1)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    inputs = [str(tmp_path / f"{name}.txt") for name in "abc"]
    target = str(tmp_path / "out" / "p")
    with pytest.raises(ConvertError, match=r"b\.txt: is not UTF-8"):
        convert_bytes(target, *inputs)
    (tmp_path / "b.txt").write_text("mended")
    done = []
    real = Conversion.run

    def counted(self: Any, **named: Any) -> Any:
        done.append(
            sum((tmp_path / "out" / ".p.convert" / f"unit-{n:06d}.json").exists() for n in range(3))
        )
        return real(self, **named)

    monkeypatch.setattr(Conversion, "run", counted)
    convert_bytes(target, *inputs)
    assert done == [1]
    assert len(IndexedDataset(target)) == 3


def test_two_conversions_to_one_output_do_not_mix(tmp_path: Path) -> None:
    import filelock

    write_random_pair(str(tmp_path / "in"))
    (tmp_path / ".out.convert").mkdir()
    with (
        filelock.FileLock(tmp_path / ".out.convert" / "lock"),
        pytest.raises(ConvertError, match="another conversion"),
    ):
        reshape(tmp_path / "in", tmp_path / "out")


def test_replacing_a_dataset_leaves_nothing_of_the_former(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "in"))
    reshape(tmp_path / "in", tmp_path / "o" / "p", shard_bytes=2000)
    with pytest.raises(ConvertError, match="--overwrite"):
        reshape(tmp_path / "in", tmp_path / "o" / "p", format="zst")
    report = reshape(tmp_path / "in", tmp_path / "o" / "p", format="zst", overwrite=True)
    (shard,) = (Path(prefix).name for prefix in report.shard_prefixes)
    assert re.fullmatch("p-gen[0-9a-f]{12}", shard)
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [
        f"{shard}.bin.zst",
        f"{shard}.idx",
        "p.manifest.json",
    ]


def test_inputs_are_never_removed(tmp_path: Path) -> None:
    """An input may have the output's name with another suffix."""
    full = sum(len(sequence) > 0 for sequence in write_random_pair(str(tmp_path / "in")))
    reshape(tmp_path / "in", tmp_path / "web", format="tar")
    (tmp_path / "web.idx").unlink()
    (tmp_path / "web.manifest.json").unlink()
    data = (tmp_path / "web.tar").read_bytes()
    reshape(tmp_path / "web.tar", tmp_path / "web")
    assert (tmp_path / "web.tar").read_bytes() == data
    # the last is read with web.idx, now that it is there
    for name in ("web", "web.idx", "web.manifest.json", "web.tar"):
        with pytest.raises(ConvertError, match="replace its own input"):
            convert_files(tmp_path / "web", tmp_path / name, format="zst", overwrite=True)
    assert len(IndexedDataset(str(tmp_path / "web"))) == full


def test_a_work_folder_may_be_named_by_a_url_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("text")
    convert_bytes("out", "in.txt", work_dir=f"file://{tmp_path}/work")
    assert not Path("file:").exists()
    assert not list(Path("work").iterdir())


class Replaces(ProgressObserver):
    """Replaces a dataset by one of as many documents when a stage begins."""

    def __init__(self, prefix: Path, stage: str) -> None:
        self._prefix = prefix
        self._stage = stage

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        if stage == self._stage:
            for suffix in (".bin", ".idx"):
                self._prefix.with_suffix(suffix).unlink()
            write_random_pair(str(self._prefix), seed=1)


@pytest.mark.guarantee("corpora-buckets-read")
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("converting", {"min_tokens": 1}),
        ("writing shards", {}),
        ("converting", {"provenance": True}),
    ],
)
def test_a_dataset_that_is_replaced_ends_its_conversion(
    stage: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write_random_pair(str(tmp_path / name))
    inputs = [str(tmp_path / "a"), str(tmp_path / "b")]
    observer = Replaces(tmp_path / "b", stage)
    with pytest.raises(ObjectChangedError, match=f"{tmp_path}/b"):
        convert(inputs, str(tmp_path / "out"), workers=1, progress=observer, **options)
    assert not list(tmp_path.glob("out*"))


def test_a_work_folder_that_cannot_be_reached_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_text("text")
    work_dir = WorkDir(url=str(tmp_path / "work"), storage=StorageConfig())
    assert work_dir.read_record("unit-000000.json") is None
    with monkeypatch.context() as patch:
        error = EndpointError("no answer")
        patch.setattr(WorkDir, "read", lambda *_: raise_(error))
        with pytest.raises(EndpointError, match="no answer"):
            work_dir.read_record("unit-000000.json")


def raise_(error: Exception) -> Any:
    raise error


def test_a_work_folder_keeps_what_else_is_in_it(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "in"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "precious").write_text("not ours")
    reshape(
        tmp_path / "in",
        tmp_path / "out",
        min_tokens=1,
        work_dir=str(tmp_path / "work"),
        resume=False,
    )
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["precious"]
    assert len(IndexedDataset(str(tmp_path / "out"))) > 100


@pytest.mark.guarantee("nothing-shows-under")
def test_a_full_disk_is_named_and_leaves_no_dataset(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "in"), count=3000)
    (tmp_path / "out").mkdir()
    script = f"""
import resource
from streammega.convert import convert
from streammega.errors import StreammegaError
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    convert([{str(tmp_path / "in")!r}], {str(tmp_path / "out" / "p")!r}, workers=1)
except StreammegaError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "File too large" in done.stdout, done.stderr
    assert not list((tmp_path / "out").glob("p*"))


# --- engines ------------------------------------------------------------------------------------------------------------


def ignore(size: int, tokens: int) -> None:
    """Progress that nobody watches."""


def library_threads(number: int, progress: Any) -> tuple[str, str]:
    return os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"]


@pytest.mark.parametrize(
    ("workers", "threads", "told"),
    [
        (1, 4, ("false", "1")),
        (3, 4, ("true", "3")),
        pytest.param(3, 2, ("false", "1"), marks=pytest.mark.soak),
    ],
)
def test_the_threads_of_a_process_share_as_many_of_the_library(
    monkeypatch: pytest.MonkeyPatch, workers: int, threads: int, told: tuple[str, str]
) -> None:
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    execution = ExecutionConfig(workers=workers)
    results = dict(run_parallel(library_threads, range(6), execution, ignore, max_threads=threads))
    assert results == dict.fromkeys(range(6), told)
    assert "RAYON_NUM_THREADS" not in os.environ


def test_no_task_begins_if_they_are_interrupted_while_they_are_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool does not wait for a thread that was half started: what it wrote would meet a removal
    of the work folder. Those that nobody told would do all that they were given.
    """
    start = threading.Thread.start
    begun: list[int] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.endswith("_1"):
            time.sleep(0.05)
            raise KeyboardInterrupt

    def work(number: int, progress: Any) -> None:
        begun.append(number)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run_parallel(work, range(10), ExecutionConfig(workers=2), ignore, max_threads=2))
    assert not begun


def test_an_interrupt_ends_what_waits_for_storage_or_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads cannot be stopped from outside: they would wait until `retry_timeout`."""

    def work(number: int, progress: Any) -> None:
        if number == 0:
            raise ConvertError("the first one fails")
        pause(600)

    with pytest.raises(ConvertError, match="the first one fails"):
        list(run_parallel(work, range(2), ExecutionConfig(workers=2), ignore, max_threads=2))

    def read(ranges: Sequence[FileRange], buffer: Any) -> Iterator[Any]:
        if ranges[0].start == 0:
            raise OSError("the first one fails")
        pause(600)
        yield b""

    monkeypatch.setattr(checksums, "read_files", read)
    monkeypatch.setattr(checksums, "CHECK_BYTES", 1000)
    (tmp_path / "in").write_bytes(bytes(3000))
    writer = checksums.ChecksummedWriter(LocalStore().open_writer(str(tmp_path / "out")))
    with pytest.raises(OSError, match="the first one fails"):
        list(writer.write_files([FileRange(path=str(tmp_path / "in"), start=0, stop=3000)], 2))


def check_that_a_killed_worker_is_replaced(folder: Path, engine: Any) -> None:
    """Of a first list of tasks, whose results are whole; then one that fails is told of."""
    execution = ExecutionConfig(workers=2, backend=engine)
    results = dict(run_parallel(partial(slow_task, folder), range(8), execution, ignore))
    assert results == {number: number * number for number in range(8)}
    assert (folder / "killed").exists()
    with pytest.raises(ConvertError, match="this one cannot be done"):
        list(run_parallel(failing_task, range(3), execution, ignore))


def test_a_cluster_needs_a_work_folder_of_all_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray.example:6379")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="--work-dir"):
        convert([str(tmp_path / "a.txt")], "memory://x/web", tokenizer="bytes", backend="ray")


@pytest.mark.parametrize("failure", [None, ConnectionError("no answer"), SystemExit(15)])
def test_a_cluster_that_cannot_be_joined_is_a_setting_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException | None
) -> None:
    """Ray itself exits the program if no cluster answers."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    if failure is not None:
        monkeypatch.setattr(ray, "init", Mock(side_effect=failure))
    with pytest.raises(
        ConfigError, match="Ray cannot be joined or started at RAY_ADDRESS=nonsense"
    ):
        list(run_parallel(failing_task, range(3), ExecutionConfig(backend="ray"), ignore))


@pytest.mark.guarantee("nothing-shows-under")
def test_a_conversion_into_s3_that_fails_at_the_end_leaves_no_dataset(
    tmp_path: Path, s3: S3, s3_storage: StorageConfig, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streammega.convert.write import publish
    from streammega.errors import EndpointError, ObjectNotFoundError
    from streammega.storage.store import create_object

    write_random_pair(str(tmp_path / "in"))
    real = create_object

    def fails(store: Any, key: str, data: bytes) -> bool:
        assert key.endswith(".manifest.json")
        raise EndpointError("the endpoint went away")

    monkeypatch.setattr(publish, "create_object", fails)
    url = f"s3://{bucket}/web"
    with pytest.raises(EndpointError):
        convert_files(url, tmp_path / "in", shard_bytes=5000, format="zst", storage=s3_storage)
    with pytest.raises(ObjectNotFoundError):
        IndexedDataset(url, s3_storage.changed(cache_dir=tmp_path / "c"))
    monkeypatch.setattr(publish, "create_object", real)
    convert_files(url, tmp_path / "in", shard_bytes=5000, format="zst", storage=s3_storage)
    assert len(IndexedDataset(url, s3_storage.changed(cache_dir=tmp_path / "c"))) == 200
