"""Kernels are compiled once, ahead if asked for, and not without a word."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streammega
from streammega.cli.main import main
from streammega.convert.conversion import Conversion
from streammega.kernels import jit
from tests.support.builders import write_dataset, write_jsonl
from tests.support.servers import S3

ONE_KERNEL = """
import json, logging
logging.basicConfig()
import numpy as np
from streammega.kernels.documents import id_range, wrong_ends
id_range(np.arange(3, dtype=np.uint16))
id_range(np.arange(3, dtype=np.int32))
print(json.dumps([id_range.stats.cache_path, sum(id_range.stats.cache_misses.values())]))
"""
NO_HOME = """
import os, pwd
del os.environ["HOME"], pwd.getpwuid
pwd.getpwuid = {}.__getitem__
"""
LOADED_ALONE = """
import json, sys
import numba
import numpy as np
from streammega.kernels.documents import id_range
ids = np.arange(3, dtype=np.uint16)
id_range(ids)
registered = "numba.core.typing.cmathdecl" in sys.modules
@numba.njit
def theirs(ids):
    return ids.max() + id_range(ids)[0]
print(json.dumps([registered, int(theirs(ids))]))
"""
OPENED = """
import json, sys, threading
from streammega import DataConfig, StreamingDataset
from streammega.kernels.jit import ARRAY_MODULE
before = ARRAY_MODULE in sys.modules
config = DataConfig(blend=["mock://tokens=10000,length=100,seed=1"], sequence_length=64)
StreamingDataset(config, micro_batch_size=1, global_batch_size=1, dp_rank=0, dp_size=1)
loading = [one.name for one in threading.enumerate() if one.name == "streammega-kernels"]
registered = "numba.core.typing.cmathdecl" in sys.modules
print(json.dumps([before, ARRAY_MODULE in sys.modules, registered, loading]))
"""
OUTSIDE = """
import json
import numpy as np
from streammega.kernels.plan import count_down
one = np.zeros(1, np.int64)
try:
    said = count_down(one, one + 5, one + 1, one)
except IndexError as error:
    said = str(error)
print(json.dumps([said, count_down.stats.cache_path]))
"""
OF_ANOTHER_NUMBA = """
import numba
numba.__version__ = "0.1"
"""
KILLED_BEFORE_THE_CODE = """
from numba.core.caching import IndexDataCacheFile
IndexDataCacheFile._save_data = lambda *_: None
"""
PLUS = """
from streammega.kernels.jit import kernel
@kernel
def plus(count):
    return count + {number}
"""
CALL = "import one; print(one.plus(0))"
OF_THE_USER = """
import json, pathlib, sys
import numba
import streammega.kernels.documents
folder = "{folder}"
pathlib.Path(folder, "theirs.py").write_text("def same(count): return count")
sys.path.insert(0, folder)
import theirs
compiled = numba.njit(theirs.same, cache=True)
compiled(1)
print(json.dumps([compiled.stats.cache_path, numba.config.CACHE_DIR]))
"""
FIRST_BATCHES = """
import json, sys
from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.kernels.jit import KERNELS
from streammega.convert import convert
local, remote, texts, out, options = sys.argv[1:]
convert([texts], out, tokenizer="bytes", shuffle_seed=1, dedup=True, pack_length=64)
storage = StorageConfig(storage_options=json.loads(options))
for name in (local, remote):
    for order in ("stream", "megatron", "sequential"):
        for blend in ([name], ["0.3", name, "0.7", name]):
            config = DataConfig(
                blend=blend, sequence_length=32, order=order, split="9,1,0", num_samples=(50, 8, 0),
                eod_id=0, reset_attention_mask=True, reset_position_ids=True, storage=storage,
            )
            next(iter(StreamLoader(config, micro_batch_size=4, global_batch_size=8, dp_rank=0, dp_size=1)))
print(json.dumps({k.__name__: sum(k.stats.cache_misses.values()) for k in KERNELS}))
"""


def run(code: str, *arguments: str, **environment: str) -> tuple[Any, str]:
    """What a program printed, as JSON, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """A cache with the kernel of ONE_KERNEL; what the process that compiled it told, and its stderr."""
    cache = tmp_path_factory.mktemp("numba")
    return cache, *run(ONE_KERNEL, NUMBA_CACHE_DIR=str(cache))


def test_one_line_tells_that_kernels_are_compiled(filled: tuple[Path, Any, str]) -> None:
    """Only where none is in the cache; the next process finds them there, and tells nothing."""
    cache, (folder, misses), stderr = filled
    assert cache in Path(folder).parents
    assert misses == 2
    assert stderr.count("streammega warmup") == 1
    (_, misses), stderr = run(ONE_KERNEL, NUMBA_CACHE_DIR=str(cache))
    assert misses == 0
    assert stderr == ""


def test_a_kernel_of_the_cache_is_loaded_without_what_only_compiling_needs(
    filled: tuple[Path, Any, str],
) -> None:
    """numba takes half a second for that in each new process. What is compiled later gets it."""
    (registered, last), _ = run(LOADED_ALONE, NUMBA_CACHE_DIR=str(filled[0]))
    assert not registered
    assert last == 2


def test_what_kernels_need_is_loaded_when_the_data_is_open(tmp_path: Path) -> None:
    """A child that is forked then waits for no import."""
    run(OPENED, NUMBA_CACHE_DIR=str(tmp_path))  # compiles
    assert run(OPENED, NUMBA_CACHE_DIR=str(tmp_path))[0] == [False, True, False, []]


def test_what_cannot_be_loaded_ahead_is_left_to_the_first_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a numba that has moved it: no thread ends with a traceback."""
    monkeypatch.setattr(jit, "ARRAY_MODULE", "numba.not_there")
    with jit.loading_ahead():
        pass


def test_kernels_of_a_package_that_cannot_be_written_are_kept_for_the_user(tmp_path: Path) -> None:
    surroundings = read_only_package(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "user")}
    (folder, misses), _ = run(ONE_KERNEL, **surroundings)
    assert tmp_path / "user" in Path(folder).parents
    assert misses == 2
    (_, misses), _ = run(ONE_KERNEL, **surroundings)
    assert misses == 0


def test_kernels_work_where_no_cache_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "user").touch()
    surroundings = read_only_package(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "user")}
    (folder, _), _ = run(ONE_KERNEL, **surroundings)
    assert folder is None


def test_kernels_of_a_user_without_a_home_are_kept_in_a_temporary_folder_of_its_own(
    tmp_path: Path,
) -> None:
    surroundings = read_only_package(tmp_path) | {"XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path)}
    (folder, _), _ = run(NO_HOME + ONE_KERNEL, **surroundings)
    (kept,) = tmp_path.glob("caches-of-*")
    assert kept in Path(folder).parents
    shutil.rmtree(kept)
    kept.symlink_to(tmp_path)
    (folder, _), _ = run(NO_HOME + ONE_KERNEL, **surroundings)
    assert folder is None, "code that a stranger may have compiled is never loaded"


def read_only_package(folder: Path) -> dict[str, str]:
    """Copies the package to where its kernels find no place for a cache: the environment for it."""
    package = folder / "streammega"

    def leave_out(within: str, _: list[str]) -> list[str]:
        return ["__pycache__"] if Path(within).name == "kernels" else []

    shutil.copytree(Path(streammega.__path__[0]), package, ignore=leave_out)
    (package / "kernels" / "__pycache__").touch()  # no folder can be made of this name
    return {"NUMBA_CACHE_DIR": "", "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def test_kernels_that_another_numba_compiled_are_never_loaded(tmp_path: Path) -> None:
    """Not even where this one was killed when it had written the index, but not the code yet.

    Ranks that start together meet the same for a moment.
    """
    run(OF_ANOTHER_NUMBA + ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path))
    for code in tmp_path.rglob("*.nbc"):
        code.write_bytes(b"of another LLVM")
    run(KILLED_BEFORE_THE_CODE + ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path))
    (_, misses), _ = run(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path))
    assert misses == 2


def test_kernels_of_another_version_of_their_file_are_never_loaded(tmp_path: Path) -> None:
    """As with another numba."""
    kernels = tmp_path / "one.py"
    kernels.write_text(PLUS.format(number=1))
    surroundings = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "PYTHONPATH": str(tmp_path)}
    one, _ = run(CALL, **surroundings)
    kernels.write_text(PLUS.format(number=2))
    later = kernels.stat().st_mtime + 10
    os.utime(kernels, (later, later))  # within a second Python would take its own .pyc
    run(KILLED_BEFORE_THE_CODE + CALL, **surroundings)
    two, _ = run(CALL, **surroundings)
    assert (one, two) == (1, 2)


def test_caches_of_the_functions_of_others_stay_where_numba_puts_them(tmp_path: Path) -> None:
    code = OF_THE_USER.format(folder=tmp_path)
    (folder, chosen), _ = run(code, NUMBA_CACHE_DIR="")
    assert Path(folder) == tmp_path / "__pycache__"
    assert chosen == ""


@pytest.fixture
def _log_level() -> Iterator[None]:
    """Other tests of this process get warnings again."""
    log = logging.getLogger("streammega")
    level = log.level
    yield
    log.setLevel(level)


@pytest.mark.usefixtures("_log_level")
def test_a_warmup_that_is_interrupted_speaks_of_no_folder_to_resume_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is removed."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversion, "publish", interrupted)
    assert main(["warmup"]) == 130
    assert not caplog.messages


@pytest.mark.usefixtures("_log_level")
@pytest.mark.parametrize("cache", ["usual", pytest.param("empty", marks=pytest.mark.soak)])
def test_after_a_warmup_conversions_and_first_batches_compile_nothing(
    cache: str, tmp_path: Path, moto: S3
) -> None:
    """Of local files and of objects. An empty cache takes minutes to fill."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "numba")} if cache == "empty" else {}
    if cache == "empty":
        done = subprocess.run(
            [sys.executable, "-m", "streammega", "warmup"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / "numba") in done.stdout
    else:
        assert main(["warmup"]) == 0
    write_dataset(tmp_path / "web", [np.arange(1, 100)] * 50)
    texts = write_jsonl(tmp_path / "texts.jsonl", ["some words", "others"] * 50)
    bucket = moto.new_bucket()
    for ending in (".bin", ".idx"):
        moto.objects(bucket)[f"web{ending}"] = (tmp_path / f"web{ending}").read_bytes()
    datasets = [str(tmp_path / "web"), f"s3://{bucket}/web"]
    words = [*datasets, texts, str(tmp_path / "out"), json.dumps(moto.options)]
    misses, _ = run(FIRST_BATCHES, *words, **environment)
    assert not any(misses.values()), misses


@pytest.mark.guarantee("addresses-inside-memory")
def test_checked_kernels_refuse_an_index_outside_and_have_a_cache_of_their_own() -> None:
    (said, folder), _ = run(OUTSIDE, STREAMMEGA_CHECKED="1")
    assert "out of bounds" in said
    assert "checked-kernels" in folder
