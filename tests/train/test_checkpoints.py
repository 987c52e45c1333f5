"""Checkpoints: whole wherever they lie and whenever a run is killed, told apart when damaged, of
one job at a time.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from streammega import StorageConfig
from streammega.errors import (
    ConfigError,
    EndpointError,
    GradientError,
    StateError,
    StorageError,
)
from streammega.parallel.rank_sync import RankSync
from streammega.storage.backends.local import PreadStore
from streammega.train.checkpoints import files as checkpoint_files
from streammega.train.checkpoints import out_dir
from streammega.train.checkpoints.checkpointer import one_line
from streammega.train.checkpoints.files import (
    METADATA,
    TENSORS,
    CheckpointFiles,
    read_tensors,
    write_tensors,
)
from streammega.train.checkpoints.integrity import (
    CHECKSUM,
    DamagedError,
    load_part,
    parse_tensors,
    sign,
)
from streammega.train.checkpoints.out_dir import wait_until_visible
from streammega.train.checkpoints.state import state_to_load, state_to_save
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import load_run
from streammega.train.run_log import read_metrics
from streammega.train.signals import Terminated
from streammega.train.trainer import Trainer
from tests.support.builders import write_random_pair, write_run_file
from tests.support.checkpoint_programs import (
    checkpoint_records,
    failing_save,
    files_of,
    outcome,
    train_and_die,
    train_slowly,
    train_steps,
)
from tests.support.examples import examples
from tests.support.gang import Gang
from tests.support.servers import S3, Objects

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Metrics of runs into a bucket are in the current folder."""
    monkeypatch.chdir(tmp_path)


def write_run(folder: Path) -> str:
    write_random_pair(str(folder / "pair"))
    return write_run_file(
        folder,
        data={"blend": [f"{folder}/pair"], "order": "stream"},
        train={
            "train_iters": 6,
            "save_interval": 2,
            "log_interval": 4,
            "lr_decay_style": "constant",
            "collective_timeout": 20.0,
            "device": None,
        },
    )


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    return write_run(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out_dir of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    Trainer(load_run(write_run(folder)), CPU).run()
    return folder / "run"


@pytest.fixture
def folder(run_file: str, finished: Path) -> Path:
    """A copy of its checkpoints, of steps 2, 4 and 6."""
    copied = shutil.copytree(finished, Path(run_file).parent / "run")
    return copied / "checkpoints"


@pytest.fixture(params=["disk", "s3"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Settings of a run whose results go to a disk, or to an object store."""
    if request.param == "disk":
        return [f"train.out_dir={tmp_path}/out"]
    server = request.getfixturevalue("oss" if request.param == "oss" else "moto")
    return in_bucket(f"{request.param}://{server.new_bucket()}", server)


def in_bucket(url: str, server: Any) -> list[str]:
    """Settings of a run whose results go to a bucket of a server."""
    options = [
        f"data.storage.storage_options.{name}={json.dumps(value)}"
        for name, value in server.options.items()
    ]
    return [f"train.out_dir={url}/deep/run", *options]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.chunks[0].parameters()]


def assert_same(trainer: Trainer, others: list[torch.Tensor], atol: float = 0.0) -> None:
    for ours, theirs in zip(weights(trainer), others, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=atol)


def resumed(run_file: str, *overrides: str) -> Trainer:
    trainer = Trainer(load_run(run_file, overrides), CPU)
    trainer.resume()
    return trainer


def names(folder: Path) -> list[str]:
    """Of the records of a folder."""
    return sorted(path.stem for path in folder.glob("*.json"))


def record_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.json"


def step_files(folder: Path, step: int) -> Path:
    return files_of(record_of(folder, step))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def metadata_of(path: Path) -> Metadata:
    return parse_tensors((path / TENSORS).read_bytes(), str(path))


def rewrite_position(path: Path, **changes: Any) -> None:
    """Give the position in a record other values, as if a run had saved them."""
    record = json.loads(path.read_text())
    record["position"] |= changes
    path.write_text(json.dumps(sign(record)))


def flip(path: Path) -> None:
    """One bit of a value, in the middle of the largest tensor."""
    largest = max(metadata_of(path).storage_data.values(), key=lambda part: part.stop - part.start)
    data = bytearray((path / largest.file).read_bytes())
    data[(largest.start + largest.stop) // 2] ^= 1
    (path / largest.file).write_bytes(data)


def check_checksums(record: Path) -> set[str]:
    """Every byte that was written of a checkpoint has a checksum; the names of the ranks' files."""
    path = files_of(record)
    written = json.loads(record.read_text())
    assert written["tensors"] == xxhash.xxh3_64_hexdigest((path / TENSORS).read_bytes())
    assert written == sign(written)
    covered: dict[str, int] = {}
    for part in sorted(metadata_of(path).storage_data.values()):
        data = (path / part.file).read_bytes()[part.start : part.stop]
        assert part.checksum == xxhash.xxh3_64_hexdigest(data)
        assert part.start == covered.get(part.file, 0)
        covered[part.file] = part.stop
    assert covered == {file.name: file.stat().st_size for file in path.glob("*.distcp")}
    return set(covered)


def rename_a_tensor(record: Path) -> None:
    path = files_of(record) / TENSORS
    path.write_bytes(path.read_bytes().replace(b"model.", b"mo`el."))  # one bit of each


def change_a_digit(record: Path) -> None:
    """One bit of the samples that were consumed: still a number, and one that a run could have."""
    text = record.read_text()
    assert json.loads(text)["position"]["data"]["consumed_samples"] == 48
    record.write_text(text.replace('"consumed_samples": 48', '"consumed_samples": 40'))


def flip_and_hide(before: str, after: str, name: str = "") -> Callable[[Path], None]:
    """One bit of a tensor, and others where its checksum stands: in the record, or the file of a name."""

    def damage(record: Path) -> None:
        flip(files_of(record))
        path = files_of(record) / name if name else record
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    return damage


def remove_checksums(record: Path) -> None:
    written = json.loads(record.read_text())
    del written["tensors"], written[CHECKSUM]
    record.write_text(json.dumps(written))


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE = {
    "record": lambda record: record.write_text("{"),
    "tensors": lambda record: cut(files_of(record) / TENSORS),
    "no-tensors": lambda record: (files_of(record) / TENSORS).unlink(),
    "no-files": lambda record: shutil.rmtree(files_of(record)),
    "cut": lambda record: cut(files_of(record) / "__0_0.distcp"),
    "missing": lambda record: (files_of(record) / "__0_0.distcp").unlink(),
    "other-bytes": lambda record: fill_with_zeros(files_of(record) / "__0_0.distcp"),
    "flipped-bit": lambda record: flip(files_of(record)),
    "flipped-bit-of-metadata": rename_a_tensor,
    "flipped-bit-of-position": change_a_digit,
    "name-in-the-table": flip_and_hide('"__0_0.distcp"', '"__0_1.distcp"', TENSORS),
    "name-of-the-table": flip_and_hide('"tensors"', '"tensorr"'),
    "name-of-the-checksum": flip_and_hide(f'"{CHECKSUM}"', '"checksul"'),
    "no-checksums": remove_checksums,
    "a-record-nested-deeply": lambda record: record.write_text("[" * 100_000),
}


@pytest.mark.guarantee("damaged-checkpoint-bit")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    run_file: str, folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = record_of(folder, 4)
    whole = replace(
        load_run(run_file), train=replace(load_run(run_file).train, out_dir=f"{folder}/../../whole")
    )
    copied = Path(whole.train.out_dir) / "checkpoints"
    shutil.copytree(files_of(before), copied / files_of(before).name)
    shutil.copy(before, copied)
    truth = Trainer(whole, CPU)
    truth.resume()
    DAMAGE[kind](record_of(folder, 6))
    with caplog.at_level(logging.WARNING):
        trainer = resumed(run_file)
    assert trainer.step == 4
    assert_same(trainer, weights(truth))
    [line] = [
        one.message
        for one in caplog.records
        if one.name.startswith("streammega") and one.levelno == logging.WARNING
    ]
    assert line.startswith("the checkpoint of step 6 is damaged and skipped: ")
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.guarantee("damaged-checkpoint-bit")
@pytest.mark.parametrize(
    ("interval", "kept"), [(2, [6, 8]), (4, [4, 8])], ids=["its-step-again", "another-step"]
)
@pytest.mark.parametrize("kind", ["flipped-bit", "record", "no-checksums"])
def test_a_damaged_checkpoint_is_none_of_those_that_are_kept(
    run_file: str, folder: Path, kind: str, interval: int, kept: list[int]
) -> None:
    DAMAGE[kind](record_of(folder, 6))
    trainer = resumed(
        run_file,
        "train.keep_checkpoints=2",
        f"train.save_interval={interval}",
        "train.train_iters=8",
    )
    assert trainer.step == 4
    trainer.run()
    assert trainer.checkpoints.store.steps() == kept
    assert resumed(run_file, "train.train_iters=8").step == 8
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        step_files(folder, step).name for step in kept
    ], "the files of the damaged one went with its record"
    record_of(folder, 8).unlink()
    assert resumed(run_file).step == kept[0], "the one before is whole too"


@pytest.mark.guarantee("damaged-checkpoint-bit")
@pytest.mark.parametrize("file", ["record", TENSORS])
def test_a_checkpoint_of_another_release_is_no_damaged_one(
    run_file: str, folder: Path, file: str
) -> None:
    """It would be skipped, and removed with the next save."""
    path = record_of(folder, 6)
    record = json.loads(path.read_text())
    del record[CHECKSUM]
    if file == "record":
        record["version"] += 1
    else:
        tensors = files_of(path) / TENSORS
        tensors.write_text(tensors.read_text().replace('"version": 2', '"version": 3'))
        record["tensors"] = xxhash.xxh3_64_hexdigest(tensors.read_bytes())
    path.write_text(json.dumps(sign(record)))
    with pytest.raises(
        StateError, match=r"has version \d, and this release reads \d: go on with"
    ) as error:
        resumed(run_file)
    assert not isinstance(error.value, DamagedError)


@pytest.mark.guarantee("damaged-checkpoint-bit")
def test_every_item_has_a_checksum(folder: Path) -> None:
    assert check_checksums(record_of(folder, 6)) == {"__0_0.distcp"}


@pytest.mark.guarantee("damaged-checkpoint-bit")
def test_a_run_all_of_whose_checkpoints_are_damaged_does_not_begin_anew(
    run_file: str, folder: Path
) -> None:
    for path in checkpoint_records(folder):
        cut(files_of(path) / "__0_0.distcp")
    with pytest.raises(
        StateError, match=r"no checkpoint can be read, of steps 6, 4, 2 .*is cut short.*restore one"
    ):
        resumed(run_file)
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_checkpoint_of_other_parameters_or_of_another_optimizer_is_refused(
    run_file: str, folder: Path
) -> None:
    trainer = resumed(run_file)
    state = state_to_save(trainer.model, trainer.optimizer)

    def load(other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored: dict[str, Any] = {
            name: TensorStorageMetadata(TensorProperties(), tensor.size(), [])
            for name, tensor in other.items()
        }
        return state_to_load(trainer.model, trainer.optimizer, Metadata(stored))

    assert load(state).keys() == state.keys()
    name = min(trainer.model.parameter_shapes)
    lacking = {key: value for key, value in state.items() if key != f"model.{name}"}
    with pytest.raises(StateError, match=f"this model has a parameter {name}, the checkpoint"):
        load(lacking)
    with pytest.raises(StateError, match="the checkpoint has a parameter other, this model"):
        load(state | {"model.other": torch.ones(1)})
    with pytest.raises(StateError, match=rf"the optimizer keeps .*'momentum'.* of {name} in the"):
        load(state | {f"optimizer.{name}.momentum": torch.ones(1)})
    trainer.close()


@pytest.mark.guarantee("damaged-checkpoint-bit")
def test_storage_that_fails_is_named_and_is_no_reason_to_go_back(
    run_file: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PreadStore.read

    def failing(self: PreadStore, key: str, *rest: Any) -> Any:
        if key.endswith(".distcp"):
            raise EndpointError(f"{key}: the endpoint did not answer")
        return read(self, key, *rest)

    monkeypatch.setattr(PreadStore, "read", failing)
    with pytest.raises(
        EndpointError, match=r"step-00000006-\w+/__0_0.distcp: the endpoint did not answer"
    ):
        resumed(run_file)
    assert len(checkpoint_records(folder)) == 3


@pytest.mark.guarantee("metadata-checkpoints-makes")
def test_nothing_of_a_checkpoint_is_unpickled(
    run_file: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is unpickled")

    (step_files(folder, 6) / METADATA).write_bytes(pickle.dumps(Evil()))
    for module, name in ((pickle, "Unpickler"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert resumed(run_file).step == 6
    assert not (tmp_path / "evil").exists()


def forge_tensors(folder: Path, data: bytes) -> None:
    """Other tensors in the checkpoint of step 6, with a checksum that fits."""
    (step_files(folder, 6) / TENSORS).write_bytes(data)
    path = record_of(folder, 6)
    record = json.loads(path.read_text()) | {"tensors": xxhash.xxh3_64_hexdigest(data)}
    path.write_text(json.dumps(sign(record)))


@pytest.mark.guarantee("metadata-checkpoints-makes")
def test_a_list_of_tensors_names_no_file_of_another_checkpoint(run_file: str, folder: Path) -> None:
    written = (step_files(folder, 6) / TENSORS).read_bytes()
    other = f"../{step_files(folder, 2).name}/__0_0.distcp".encode()
    forge_tensors(folder, written.replace(b"__0_0.distcp", other))
    assert resumed(run_file).step == 4


def test_a_tensor_that_has_no_parts_leaves_no_first_weights_in_the_model(
    run_file: str, folder: Path
) -> None:
    listed = json.loads((step_files(folder, 6) / TENSORS).read_bytes())
    name = sorted(listed["tensors"])[0]
    listed["tensors"][name]["parts"] = []
    forge_tensors(folder, json.dumps(listed).encode())
    assert resumed(run_file).step == 4


@pytest.mark.parametrize(
    "forged",
    [
        {"step": "6"},
        {"step": None},
        {"data": [1]},
        {"model": []},
        {"step": 5},
        {"step": -6},
        {"loss_scale": 7},
    ],
)
def test_a_signed_record_without_a_position_is_damaged(
    run_file: str, folder: Path, forged: dict[str, Any]
) -> None:
    rewrite_position(record_of(folder, 6), **forged)
    assert resumed(run_file).step == 4


def test_a_record_under_the_name_of_another_step_is_not_taken(run_file: str, folder: Path) -> None:
    """As the newest, it would be where every later resume begins."""
    shutil.copy(record_of(folder, 2), record_of(folder, 99))
    trainer = resumed(run_file)
    assert trainer.step == 6
    trainer.step = 7
    trainer.save()
    trainer.close()
    assert resumed(run_file).step == 7
    assert names(folder) == [f"step-{step:08d}" for step in (4, 6, 7, 99)]


PART = [[0], [4], "__0_0.distcp", 0, 100, "0" * 16]
TENSOR = {"dtype": "float32", "size": [4], "parts": [PART]}
BAD_TENSORS: list[dict[str, Any]] = [
    {"dtype": "Tensor"},
    {"dtype": 7},
    {"size": [-1]},
    {"size": [2**60]},
    {"size": "4"},
    {"size": [4, 4]},
    {"parts": []},
    {"parts": [PART, PART]},
    {"parts": [[[0], [3], *PART[2:]]]},
    {"parts": [[[0], [0], *PART[2:]]]},
    {"size": [], "parts": []},
    {
        "size": [2, 2],
        "parts": [[[0, 0], [1, 2], *PART[2:]], [[1, 0], [1, 1], *PART[2:]]],
    },
    {"parts": [PART[:4]]},
    {"parts": [[[1], *PART[1:]]]},
    {"parts": [[[0], [4], 7, *PART[3:]]]},
    {"parts": [[*PART[:3], -1, *PART[4:]]]},
    {"parts": [[*PART[:4], True, PART[5]]]},
]


@pytest.mark.parametrize(
    "tensors",
    [
        b"",
        b"[" * 100_000,
        pickle.dumps({}),
        [],
        {"tensors": {}},
        {"version": 2},
        {"version": 2, "tensors": [TENSOR]},
        *({"version": 2, "tensors": {"a": TENSOR | change}} for change in BAD_TENSORS),
    ],
)
def test_what_lists_no_tensors_is_damage(tensors: Any) -> None:
    data = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    with pytest.raises(DamagedError, match=r"^x: lists no tensors"):
        parse_tensors(data, "x")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("Traceback\n  File x\nit failed\n"), "it failed"),
        (RuntimeError(""), "RuntimeError"),
        (OSError(28, "No space left", "/x"), "[Errno 28] No space left: '/x'"),
        (DamagedError("two\nlines"), "two\nlines"),
    ],
)
def test_errors_of_others_are_said_in_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.ones(3, 2).bool(),
    ],
)
def test_a_part_is_read_from_what_torch_wrote_and_other_bytes_are_refused(
    tensor: torch.Tensor,
) -> None:
    file = io.BytesIO()
    torch.save(tensor, file)
    data = file.getvalue()
    part = load_part(data, tensor.dtype, tensor.shape)
    assert part.dtype == tensor.dtype
    assert torch.equal(part, tensor)
    for wrong in (data[:-1], data[:100], b"", data.replace(b"data/0", b"data/1")):
        with pytest.raises(Exception, match=r".*"):
            load_part(wrong, tensor.dtype, tensor.shape)
    with pytest.raises(ValueError, match="it has no 400 bytes"):
        load_part(data, torch.float32, (100,))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_in_a_folder_of_a_checkpoint_is_none_of_it(tmp_path: Path) -> None:
    files = CheckpointFiles(PreadStore(StorageConfig().tuned(local_io="pread")), str(tmp_path))
    tensors = {"t": torch.ones(3)}
    _, checksum = write_tensors(files, tensors, tensors, RankSync(None))
    metadata = files.read_metadata(checksum)
    files.check(metadata)
    (tmp_path / "other").mkdir()
    (tmp_path / "__0_0.distcp").rename(tmp_path / "other" / "__0_0.distcp")
    with pytest.raises(DamagedError, match="is missing"):
        files.check(metadata)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12), skipped=st.data())
def test_tensors_are_read_by_requests_of_bounded_size_that_near_ones_share(
    sizes: list[int], skipped: st.DataObject
) -> None:
    limits = {"REQUEST_BYTES": 4096, "MAX_GAP_BYTES": 1500, "RUN_BYTES": 20_000}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name, limit in limits.items():
            patch.setattr(checkpoint_files, name, limit)
        files = CheckpointFiles(
            PreadStore(StorageConfig().tuned(local_io="pread")), f"{folder}/saved"
        )
        saved = {f"t{n}": torch.randn(size) for n, size in enumerate(sizes)}
        _, checksum = write_tensors(files, saved, saved, RankSync(None))
        names = skipped.draw(st.lists(st.sampled_from(sorted(saved)), min_size=1, unique=True))
        loaded = {name: torch.zeros_like(saved[name]) for name in names}
        metadata = files.read_metadata(checksum)
        spans: list[tuple[int, int]] = []
        read = PreadStore.read

        def noted(store: PreadStore, key: str, wanted: Any) -> Any:
            spans.extend(wanted)
            return read(store, key, wanted)

        patch.setattr(PreadStore, "read", noted)
        read_tensors(files, metadata, loaded, RankSync(None))
    assert all(torch.equal(loaded[name], saved[name]) for name in names)
    assert all(stop - start <= limits["REQUEST_BYTES"] for start, stop in spans)
    stored = [
        part.stop - part.start
        for index, part in metadata.storage_data.items()
        if index.fqn in names
    ]
    if max(stored) <= limits["REQUEST_BYTES"] and sum(stored) <= limits["RUN_BYTES"]:
        assert all(
            far - near > limits["MAX_GAP_BYTES"] or stop - start > limits["REQUEST_BYTES"]
            for (start, near), (far, stop) in pairwise(spans)
        )


def test_what_other_ranks_wrote_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_dir, "LOOK_SECONDS", 0.0)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks != 3:
            raise DamagedError(f"not seen at look {looks}")

    wait_until_visible(look, DamagedError)
    monkeypatch.setattr(out_dir, "VISIBLE_SECONDS", -1.0)
    with pytest.raises(DamagedError, match="look 4"):
        wait_until_visible(look, DamagedError)


@pytest.mark.guarantee("background-save-fails")
def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(
    run_file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = os.unlink

    def busy(path: Any, *rest: Any, **options: Any) -> None:
        if str(path).endswith(".distcp"):
            raise OSError(16, "Device or resource busy", ".nfs0001")
        unlink(path, *rest, **options)

    monkeypatch.setattr(os, "unlink", busy)
    Trainer(load_run(run_file, ["train.keep_checkpoints=1"]), CPU).run()
    folder = Path(run_file).parent / "run" / "checkpoints"
    assert [path.stem for path in checkpoint_records(folder)] == ["step-00000006"], (
        "what is half removed has no record"
    )
    assert "cannot be removed" in caplog.text
    monkeypatch.undo()
    trainer = resumed(run_file)
    trainer.save()
    trainer.close()
    resumed(run_file).save()
    assert names(folder) == ["step-00000006"]
    left = [path.name for path in folder.iterdir() if path.is_dir()]
    assert step_files(folder, 6).name in left
    assert {name.rpartition("-")[0] for name in left} == {"step-00000006"}, (
        "a later save removes it"
    )


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_a_save_for_which_there_is_no_room_says_what_the_system_says(
    run_file: str, folder: Path, share: float
) -> None:
    """Wherever in a file it fails: torch's writer of archives then fails once more, in its own
    words.
    """
    trainer = resumed(run_file)
    whole = (step_files(folder, 6) / "__0_0.distcp").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * whole), before[1]))
    try:
        with pytest.raises(StorageError) as caught:
            trainer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the checkpoint of step 6 cannot be written (" in str(caught.value)
    assert "File too large); free" in str(caught.value)
    trainer.save()
    trainer.close()
    assert [path.stem for path in checkpoint_records(folder)][-1] == "step-00000006"


def test_a_step_is_replaced_without_a_moment_in_which_it_is_not_there(
    run_file: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old record is there until the new one takes its name."""
    rename = os.replace
    before = record_of(folder, 6).read_text()

    def killed(source: Any, target: Any) -> None:
        if str(target).endswith("step-00000006.json"):
            raise KeyboardInterrupt
        rename(source, target)

    trainer = resumed(run_file)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.save()
    monkeypatch.undo()
    assert record_of(folder, 6).read_text() == before
    trainer.close()
    again = resumed(run_file)
    assert again.step == 6
    again.save()
    assert record_of(folder, 6).read_text() != before


@pytest.mark.guarantee("evaluated-opened-start")
def test_what_is_evaluated_is_opened_before_the_first_step(run_file: str) -> None:
    with pytest.raises(ConfigError, match="valid"):
        Trainer(
            load_run(
                run_file, ["data.split=100,0.0001,0", "train.eval_interval=4", "train.eval_iters=1"]
            ),
            CPU,
        )
    overrides = ["validation.other=/no/such/pair", "train.eval_interval=4", "train.eval_iters=1"]
    with pytest.raises(StorageError, match="/no/such/pair"):
        Trainer(load_run(run_file, overrides), CPU)


@pytest.mark.guarantee("evaluated-opened-start")
@pytest.mark.parametrize("is_killed", [False, True])
def test_an_evaluation_that_fails_costs_no_steps_and_is_made_after_the_resume(
    is_killed: bool, run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["train.eval_interval=4", "train.eval_iters=1"]
    sound = load_run(run_file, [*settings, f"train.out_dir={Path(run_file).parent / 'sound'}"])
    Trainer(sound, CPU).run()
    config = load_run(run_file, settings)
    trainer = Trainer(config, CPU)

    def failing() -> Any:
        raise EndpointError("s3://bucket/valid.bin: 503")

    monkeypatch.setattr(trainer, "evaluate_all", failing)
    with pytest.raises(EndpointError, match=r"valid\.bin"):
        trainer.run()
    trainer.checkpoints.wait()
    metrics = Path(config.train.out_dir) / "metrics.jsonl"
    assert [record["step"] for record in read_metrics(metrics)] == [1, 2, 3, 4]
    if is_killed:  # before the record was written
        kept = metrics.read_text().splitlines()[:-1]
        metrics.write_text("\n".join(kept) + "\n")
    for _ in range(2):  # and no second time, once it is written
        again = Trainer(replace(config, train=replace(config.train, train_iters=4)), CPU)
        again.resume()
        assert again.step == 4
        again.run()
    again = Trainer(config, CPU)
    again.resume()
    again.run()
    records = read_metrics(metrics)
    repeated = [] if is_killed else [4]
    assert [record["step"] for record in records] == [1, 2, 3, 4, *repeated, 5, 6]
    assert all("batch_hash" in record for record in records)
    of_sound = {
        record["step"]: record
        for record in read_metrics(Path(sound.train.out_dir) / "metrics.jsonl")
    }
    for record in records[-3:]:
        assert record.get("valid_loss") == of_sound[record["step"]].get("valid_loss")
    assert "valid_loss" in records[-3]


@pytest.mark.guarantee("run-diverged-ends", "evaluated-opened-start")
@pytest.mark.parametrize("fails", ["step", "evaluation"])
def test_a_run_that_fails_finishes_the_save_under_way(
    run_file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """The thread of a save ends with the process."""
    publish = CheckpointStore.publish

    def slow(self: CheckpointStore, *arguments: Any) -> None:
        time.sleep(0.4)
        publish(self, *arguments)

    monkeypatch.setattr(CheckpointStore, "publish", slow)
    settings = ["train.eval_interval=2", "train.eval_iters=1"]
    trainer = Trainer(load_run(run_file, settings if fails == "evaluation" else []), CPU)
    finish = trainer.model.finish_gradients

    def diverging(tokens: torch.Tensor) -> None:
        if trainer.step == 2:
            raise GradientError("the gradient of norm.weight is not finite")
        finish(tokens)

    def unreadable() -> Any:
        raise EndpointError("norm.weight of no endpoint")

    monkeypatch.setattr(trainer.model, "finish_gradients", diverging)
    monkeypatch.setattr(trainer, "evaluate_all", unreadable)
    with pytest.raises((GradientError, EndpointError), match=r"norm\.weight"):
        trainer.run()
    assert trainer.checkpoints.store.steps() == [2]
    assert "finishing the save under way, before the run ends by: " in caplog.text


@pytest.mark.guarantee("stopped-run-waits")
def test_a_stopped_run_waits_for_its_save_and_makes_no_second_one_where_that_is_recent(
    run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(load_run(run_file, ["train.train_iters=16", "train.save_interval=3"]), CPU)
    step = trainer.train_step

    def stopped() -> Any:
        record, stop = step()
        return record, stop or (signal.SIGTERM if record["step"] == 4 else None)

    monkeypatch.setattr(trainer, "train_step", stopped)
    with pytest.raises(
        Terminated, match=r"after step 4; step 3, of less than 30 s before, is saved"
    ):
        trainer.run()
    assert resumed(run_file).step == 3
    late = resumed(run_file, "train.train_iters=16", "train.save_interval=3")
    late.checkpoints.last_save = (3, time.monotonic() - 31)
    late.stop_requests.first_signal = signal.SIGTERM
    with pytest.raises(Terminated, match=r"after step 4, which is saved"):
        late.run()
    assert resumed(run_file).step == 4


@pytest.mark.guarantee("out-dir-may")
@pytest.mark.parametrize("out", ["disk", "s3", "oss"], indirect=True)
def test_runs_on_a_disk_and_in_an_object_store_save_keep_and_resume(
    run_file: str, out: list[str], tmp_path: Path
) -> None:
    straight = Trainer(load_run(run_file, ["train.train_iters=10"]), CPU)
    straight.run()
    overrides = [*out, "train.keep_checkpoints=2"]
    first = Trainer(load_run(run_file, overrides), CPU)
    first.run()
    assert first.checkpoints.store.steps() == [4, 6]
    second = resumed(run_file, *overrides, "train.train_iters=10")
    assert second.step == 6
    second.run()
    assert_same(second, weights(straight))
    assert second.checkpoints.store.steps() == [8, 10]
    place = second.checkpoints.store
    if place.folder is None:
        store = place.files("any").store
        stored = [item.key for item in store.list("deep/run/")]
        assert {key for key in stored if key.endswith(".json") and TENSORS not in key} == {
            "deep/run/checkpoints/step-00000008.json", "deep/run/checkpoints/step-00000010.json"
        }  # fmt: skip
        assert len([key for key in stored if key.endswith(".metadata")]) == 2, (
            "what is dropped is dropped with its files"
        )
        bucket = out[0].partition("://")[2]
        metrics = read_metrics(tmp_path / bucket / "metrics.jsonl")
        assert [record["step"] for record in metrics] == list(range(1, 11))
        assert not any("metrics" in key for key in stored)


@pytest.mark.guarantee("out-dir-may")
@pytest.mark.parametrize(
    "name", ["step-2", "checkpoints/step-2", "checkpoints/step-00000002.json", "FOLDER"]
)
def test_a_run_begins_at_a_checkpoint_of_another_and_goes_on_from_its_own(
    run_file: str, folder: Path, out: list[str], name: str
) -> None:
    straight = resumed(run_file)
    before = names(folder)
    if name == "FOLDER":
        name = f"checkpoints/{step_files(folder, 2).name}"
    overrides = [*out, f"train.resume_from={folder.parent}/{name}"]
    branch = resumed(run_file, *overrides)
    assert (branch.step, branch.batches.consumed_samples) == (2, 16)
    branch.run()
    assert_same(branch, weights(straight))
    assert branch.checkpoints.store.steps() == [4, 6]
    assert names(folder) == before, "the other run keeps what it has"
    assert resumed(run_file, *overrides).step == 6, "a restart by the same command"
    straight.close()


def test_a_run_in_a_bucket_is_begun_from(run_file: str, moto: S3) -> None:
    url = f"s3://{moto.new_bucket()}"
    out, *options = in_bucket(url, moto)
    Trainer(load_run(run_file, [out, *options]), CPU).run()
    branch = resumed(
        run_file,
        f"train.out_dir={url}/other",
        f"train.resume_from={url}/deep/run/checkpoints/step-4",
        *options,
    )
    assert branch.step == 4
    branch.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "../run/step-3",
            r"no checkpoint of step 3 in .*: there are those of steps 2, 4, 6; check",
        ),
        ("../nothing/step-2", r"no checkpoint of step 2 in .*nothing: there is none; check"),
        ("../run/checkpoints", r"must end in the checkpoint's name, such as"),
        ("step-2", r"in train\.out_dir itself, .*; give a new out_dir"),
    ],
)
def test_a_checkpoint_that_no_run_can_begin_at_is_refused_by_name(
    run_file: str, folder: Path, name: str, message: str
) -> None:
    out_dir = f"{folder.parent.parent}/new"
    with pytest.raises(ConfigError, match=message):
        resumed(run_file, f"train.out_dir={out_dir}", f"train.resume_from={out_dir}/{name}")


def test_a_damaged_checkpoint_that_is_named_is_not_replaced_by_another(
    run_file: str, folder: Path
) -> None:
    flip(step_files(folder, 6))
    other = [f"train.out_dir={folder}/../../new", f"train.resume_from={folder}/step-6"]
    with pytest.raises(StateError, match=r"step-00000006-\w+/__0_0\.distcp: .* are damaged"):
        resumed(run_file, *other)


def flip_in_bucket(objects: Objects, prefix: str, folder: Path) -> None:
    """One bit of the largest tensor of the files that lie under a prefix. folder: for a copy."""
    for name in (TENSORS, "__0_0.distcp"):
        (folder / name).write_bytes(objects[f"{prefix}/{name}"])
    flip(folder)
    objects[f"{prefix}/__0_0.distcp"] = (folder / "__0_0.distcp").read_bytes()


@pytest.mark.guarantee("damaged-checkpoint-bit")
def test_damaged_checkpoints_of_an_object_store_fall_back(
    run_file: str, moto: S3, tmp_path: Path
) -> None:
    bucket = moto.new_bucket()
    overrides = in_bucket(f"s3://{bucket}", moto)
    first = Trainer(load_run(run_file, overrides), CPU)
    first.run()
    place = first.checkpoints.store
    objects = moto.objects(bucket)
    checkpoints = "deep/run/checkpoints"
    flip_in_bucket(objects, f"{checkpoints}/{place.find(6).name}", tmp_path)
    second = resumed(run_file, *overrides)
    assert second.step == 4
    second.close()
    assert place.steps() == [2, 4, 6]
    del objects[f"{checkpoints}/{place.find(4).name}/__0_0.distcp"]
    third = resumed(run_file, *overrides)
    assert third.step == 2
    third.step = 4
    third.save()
    third.close()
    objects[f"{checkpoints}/step-00000004.json"] = b"{"
    fourth = resumed(run_file, *overrides)
    assert fourth.step == 2
    fourth.close()
    assert place.steps() == [2, 4, 6], "what is damaged stays until a newer one is saved"


@pytest.mark.guarantee("out-dir-ranks")
def test_a_bucket_that_is_not_there_is_named_before_the_first_step(run_file: str, moto: S3) -> None:
    with pytest.raises(StorageError, match="bucket s3://no-such-bucket does not exist"):
        Trainer(load_run(run_file, in_bucket("s3://no-such-bucket", moto)), CPU)


@pytest.fixture
def truth(run_file: str) -> dict[int, list[torch.Tensor]]:
    """The weights of a run after each step."""
    trainer = Trainer(
        load_run(
            run_file, [f"train.out_dir={Path(run_file).parent}/truth", "train.save_interval=0"]
        ),
        CPU,
    )
    found = {0: weights(trainer)}
    for step in range(1, 7):
        trainer.train_step()
        trainer.step = step
        found[step] = weights(trainer)
    trainer.close()
    return found


def dies(gang: Gang, run_file: str, overrides: list[str], fatal: int, done: Path) -> bool:
    """Whether a run was killed; its process is not used again."""
    try:
        gang.run(1, train_and_die, run_file, overrides, fatal, str(done))
    except AssertionError as error:
        if "the process died" not in str(error):
            raise
        return True
    return False


KILLS = 3
"""Kill points of a run, evenly over all of its changes of what is stored; all of them by `make
soak`.
"""


@pytest.mark.guarantee("nothing-half-written")
@pytest.mark.parametrize(
    "every", [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.soak)]
)
def test_wherever_a_run_is_killed_its_newest_whole_checkpoint_resumes(
    gang: Gang,
    run_file: str,
    out: list[str],
    truth: dict[int, list[torch.Tensor]],
    tmp_path: Path,
    every: bool,
) -> None:
    def place(number: int) -> list[str]:
        settings = [
            out[0].replace("/run", f"/run-{number}") + ("" if "s3:" in out[0] else str(number)),
            *out[1:],
        ]
        return [
            *settings,
            "train.save_interval=1",
            "train.keep_checkpoints=1",
            "train.train_iters=3",
        ]

    count = gang.run(1, train_and_die, run_file, place(0), None, str(tmp_path / "done"))[0]
    gang.close()  # its process counts what is no longer of interest
    assert count > 10
    points = (
        range(1, count) if every else [1 + (2 * n + 1) * count // (2 * KILLS) for n in range(KILLS)]
    )
    killed = 0
    for fatal in points:
        done = tmp_path / f"done-{fatal}"
        killed += dies(gang, run_file, place(fatal), fatal, done)
        gang.close()
        published = [int(line) for line in done.read_text().split()] if done.exists() else [0]
        trainer = resumed(run_file, *place(fatal))
        assert trainer.step in (published[-1], published[-1] + 1), (fatal, published)
        assert_same(trainer, truth[trainer.step])
        # killed before the old one went, which goes with the next save
        left = [2, 3] if trainer.step == 3 else [3]
        trainer.run()
        assert trainer.checkpoints.store.steps() in ([3], left), fatal
    assert killed > 0.9 * len(points), "a run may end some changes earlier than another"


@pytest.mark.guarantee("nothing-half-written")
def test_ranks_that_are_killed_while_they_upload_in_the_background_resume_on_another_layout(
    gang: Gang, run_file: str, truth: dict[int, list[torch.Tensor]], moto: S3, tmp_path: Path
) -> None:
    overrides = in_bucket(f"s3://{moto.new_bucket()}", moto)
    begun = tmp_path / "begun"
    sharded = ["parallel.optimizer=sharded", "parallel.bucket_size=2000"]
    assert gang.run_until(
        begun.exists, 2, train_slowly, run_file, [*overrides, *sharded], 0.05, str(begun)
    )
    config = load_run(run_file, overrides)
    place = CheckpointStore.open(config.train.out_dir, config.data.storage)
    assert place.steps() == [2]
    trainer = resumed(run_file, *overrides)
    assert trainer.step == 2
    assert_same(trainer, truth[2], atol=1e-5)
    trainer.run()
    assert gang.run(2, train_steps, run_file, [*overrides, *sharded]) == [6, 6]
    assert place.steps() == [2, 4, 6]


def test_signs_that_killed_starts_left_on_a_disk_are_removed_by_the_next_start(
    run_file: str,
) -> None:
    """In a bucket another job may have one."""
    config = load_run(run_file)
    place = CheckpointStore.open(config.train.out_dir, config.data.storage)
    place.root.put(".shared-0123456789ab", b"")
    Trainer(config, CPU).close()
    assert not place.root.list(".shared-0123456789ab")


@pytest.mark.guarantee("out-dir-ranks")
def test_an_out_dir_that_is_not_one_for_all_ranks_is_found_before_the_first_step(
    gang: Gang, run_file: str
) -> None:
    apart = gang.run(
        2, outcome, run_file, [f"train.out_dir={Path(run_file).parent}/node-RANK"], 0.5
    )
    for message, seconds in apart:
        assert "does not see what rank 0 wrote there" in message
        assert "train.out_dir must be one folder for all ranks" in message
        assert seconds < 60
    assert not (Path(run_file).parent / "node-0" / "metrics.jsonl").exists()


@pytest.mark.guarantee("damaged-checkpoint-bit")
@pytest.mark.parametrize("kind", ["cut", "flipped-bit"])
def test_ranks_agree_on_the_checkpoint_to_resume_from(
    gang: Gang, run_file: str, folder: Path, kind: str
) -> None:
    DAMAGE[kind](record_of(folder, 6))
    assert gang.run(
        2, train_steps, run_file, ["train.train_iters=8", "parallel.optimizer=sharded"]
    ) == [
        4,
        4,
    ]
    assert [path.stem for path in checkpoint_records(folder)] == [
        "step-00000004",
        "step-00000006",
        "step-00000008",
    ]
    assert check_checksums(record_of(folder, 8)) == {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.guarantee("background-save-fails")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_in_the_background_is_told_within_seconds_on_all_ranks(
    gang: Gang, run_file: str, failing: int
) -> None:
    began = time.monotonic()
    ended = gang.run(
        2,
        failing_save,
        run_file,
        [
            "train.train_iters=60",
            "train.save_interval=5",
            "train.collective_timeout=60",
            "parallel.optimizer=sharded",
        ],
        failing,
        5,
    )
    assert time.monotonic() - began < 60, "the other rank would wait for `train.collective_timeout`"
    for message, step in ended:
        assert "No space left on device" in message
        assert "The checkpoints before it are whole" in message
        assert 5 <= step < 35
    assert len({step for _, step in ended}) == 1, "all ranks end after the same step"


def place_in_bucket(moto: S3) -> CheckpointStore:
    """Of a run of a new bucket."""
    storage = StorageConfig(storage_options=moto.options)
    return CheckpointStore.open(f"s3://{moto.new_bucket()}/run", storage)


@pytest.mark.guarantee("out-dir-may")
def test_an_older_damaged_record_keeps_no_files_of_removed_checkpoints(moto: S3) -> None:
    place = place_in_bucket(moto)
    for step in (2, 4, 6):
        publish_values(place, step)
    folders = {step: place.find(step).name for step in (2, 4, 6)}
    place.root.put("step-00000002.json", b"which is no record")
    place.remove(4)
    place.remove(2)
    assert place.steps() == [6]
    assert [len(place.files(folders[step]).list()) for step in (2, 4, 6)] == [0, 0, 1]


def test_a_step_of_nine_digits_is_found_and_removed(moto: S3) -> None:
    place = place_in_bucket(moto)
    for step in (99_999_999, 100_000_000):
        publish_values(place, step)
    assert place.steps() == [99_999_999, 100_000_000]
    folder = place.find(100_000_000).name
    place.remove(100_000_000)
    assert not place.files(folder).list()


def publish_values(place: Any, step: int) -> None:
    """A checkpoint of one small file."""
    name = place.begin(step)
    place.files(name).put("__0_0.distcp", b"values")
    place.publish(step, name, "", {"step": step, "data": {}})


def test_a_resumed_optimizer_has_the_state_that_it_would_make_itself(
    run_file: str, folder: Path
) -> None:
    """Fused kernels read the step by its address on the parameter's device."""

    def kinds(trainer: Trainer) -> list[Any]:
        values = [
            (name, value.shape, value.dtype, value.device)
            for state in trainer.optimizer.state.values()
            for name, value in state.items()
        ]
        return sorted(values, key=str)

    for sharded in ([], ["parallel.optimizer=sharded"]):
        stepped = Trainer(load_run(run_file, sharded), CPU)
        stepped.train_step()
        stepped.close()
        again = resumed(run_file, *sharded)
        assert kinds(again) == kinds(stepped)
        steps = {int(state["step"]) for state in again.optimizer.state.values()}
        assert steps == {6}
        again.close()


@pytest.mark.usefixtures("folder")
def test_the_state_of_another_optimizer_is_refused(run_file: str) -> None:
    trainer = Trainer(load_run(run_file), CPU)
    parameters = trainer.model.chunks[0].parameters()
    trainer.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    with pytest.raises(
        StateError, match=r"keeps \['exp_avg', .*\] of .* in the checkpoint, \['momentum_buffer'\]"
    ):
        trainer.resume()
    trainer.close()


def test_a_save_before_the_first_step_of_an_optimizer_is_no_step(run_file: str) -> None:
    """torch makes the state of an optimizer by a step, which a run must not count."""
    trainer = Trainer(load_run(run_file), CPU)
    trainer.save()
    assert not trainer.optimizer.state
    trainer.close()
    again = resumed(run_file)
    assert not again.optimizer.state
    again.close()


def test_a_run_says_before_each_change_that_copies_must_be_done(
    run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(load_run(run_file), CPU)
    calls: list[str] = []
    monkeypatch.setattr(trainer.checkpoints, "before_change", lambda: calls.append("before"))
    step = trainer.optimizer.step

    def noted(*arguments: Any) -> Any:
        calls.append("step")
        return step(*arguments)

    monkeypatch.setattr(trainer.optimizer, "step", noted)
    trainer.train_step()
    assert calls == ["before", "step"]
