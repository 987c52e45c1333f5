"""A blend that is written down: runs go on with it and without, and what changes is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import (
    Column,
    DataConfig,
    PhaseConfig,
    Provenance,
    StorageConfig,
    StreamLoader,
    open_together,
    write_manifest,
)
from streammega.cli.main import main
from streammega.dataset.manifest import parse_blend_file
from streammega.dataset.names import SUFFIXES
from streammega.dataset.opening import open_manifests
from streammega.errors import (
    ConfigError,
    FormatError,
    ObjectChangedError,
    ObjectNotFoundError,
    StreammegaError,
)
from streammega.samples.pinned import pin
from tests.support.builders import write_dataset, write_run_file
from tests.support.builders import write_manifest as manifest_of_shards
from tests.support.columns import add_column
from tools.bench.object_server import Running, running

SIZES: Any = {"micro_batch_size": 2, "global_batch_size": 4}
EOD = 60_001


def put(name: Path, seed: int, kind: Any = "bin", count: int = 300) -> None:
    rng = np.random.default_rng(seed)
    documents = [
        np.append(rng.integers(0, 60_000, rng.integers(20, 60)), EOD).astype(np.uint16)
        for _ in range(count)
    ]
    write_dataset(f"{name}{SUFFIXES[kind]}", documents)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A bucket of a pair, a set with a manifest, a folder, zstd and tar shards."""
    root = tmp_path_factory.mktemp("served")
    bucket = root / "b"
    put(bucket / "pair", 1)
    put(bucket / "other", 2)
    for number in range(3):
        put(bucket / "set" / f"s{number}", 10 + number)
        put(bucket / "folder" / f"f{number}", 20 + number)
    manifest_of_shards(bucket / "set" / "s", [f"s{number}" for number in range(3)])
    put(bucket / "z", 30, "zst")
    put(bucket / "t", 31, "tar")
    with running(root) as server:
        yield server, root


BLEND = [
    ("s3://b/pair", 0.3),
    ("s3://b/set/s", 0.2),
    ("s3://b/folder/", 0.2),
    ("s3://b/z.bin.zst", 0.2),
    ("s3://b/t.tar", 0.1),
]


def config_of(server: Running, tmp_path: Path, **options: Any) -> DataConfig:
    storage = StorageConfig(storage_options=server.storage_options, cache_dir=tmp_path / "cache")
    defaults: Any = {
        "blend": BLEND,
        "sequence_length": 32,
        "order": "stream",
        "eod_id": EOD,
        "split": "90,10,0",
        "storage": storage.tuned(hedge_requests=False),
    }
    return DataConfig(**{**defaults, **options})


def written(config: DataConfig, tmp_path: Path) -> DataConfig:
    """The config whose blend is a file that was written of it."""
    path = str(tmp_path / "blend.json")
    write_manifest(config, path)
    return replace(config, blend=path)


def asked(server: Running) -> int:
    counts = server.counts()
    return counts["requests"] + counts["lists"]


def batches_of(loader: StreamLoader, count: int) -> list[bytes]:
    return [
        batch["tokens"].numpy().tobytes() for _, batch in zip(range(count), loader, strict=False)
    ]


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "phases": {
        "phases": [
            PhaseConfig(first_sample=16, blend=[("s3://b/pair", 0.5), ("s3://b/other", 0.5)]),
        ]
    },
    "excluded": {"exclude_documents": ["s3://b/pair#3", "s2#5", "folder/#700"]},
    "megatron": {"order": "megatron", "num_samples": (64, 8, 0)},
    "sequential": {"order": "sequential", "num_samples": (64, 8, 0)},
    "split": {"split": "70,20,10"},
}


@pytest.mark.guarantee("pinned-blend")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_on_with_a_written_blend_and_back(
    served: tuple[Running, Path], tmp_path: Path, name: str
) -> None:
    server, _ = served
    config = config_of(server, tmp_path, **CONFIGS[name])
    pinned = written(config, tmp_path)
    with StreamLoader(config, **SIZES) as loader:
        expected = batches_of(loader, 24)
    state: Any = None
    found = []
    for number in range(3):
        with StreamLoader(config if number % 2 == 0 else pinned, **SIZES) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found += batches_of(loader, 8)
            state = json.loads(json.dumps(loader.state_dict()))
    assert found == expected


@pytest.mark.guarantee("pinned-blend")
def test_a_written_blend_is_opened_by_one_request(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, root = served
    config = config_of(server, tmp_path, **CONFIGS["excluded"])
    pinned = replace(written(config, tmp_path), blend="s3://b/blend.json")
    shutil.copy(tmp_path / "blend.json", root / "b" / "blend.json")
    config = replace(config, exclude_documents=())
    pinned = replace(pinned, exclude_documents=())
    for split, expected in (("train", 1), ("valid", 1)):
        before = asked(server)
        with StreamLoader(pinned, split=split, **SIZES) as loader:
            assert asked(server) - before == expected
            identity = loader.state_dict()["order"]
        with StreamLoader(config, split=split, **SIZES) as loader:
            assert loader.state_dict()["order"] == identity


@pytest.mark.guarantee("pinned-blend")
@pytest.mark.parametrize("name", ["pair.bin", "set/s1.bin", "folder/f2.bin", "z.bin.zst", "t.tar"])
@pytest.mark.parametrize("place", ["bucket", "local"])
def test_a_shard_that_has_changed_since_is_refused_by_its_name(
    served: tuple[Running, Path], tmp_path: Path, name: str, place: str
) -> None:
    _, root = served
    shutil.copytree(root, tmp_path / "here")
    with running(tmp_path / "here") as server:
        config = config_of(server, tmp_path)
        if place == "local":
            local = f"{tmp_path}/here/b/"
            blend = [(each.replace("s3://b/", local), weight) for each, weight in BLEND]
            config = replace(config, blend=blend)
        pinned = written(config, tmp_path)
        path = tmp_path / "here" / "b" / name
        body = bytearray(path.read_bytes())
        for at in (0, len(body) // 2, -1):
            body[at] ^= 1
        path.with_suffix(".new").write_bytes(body)
        path.with_suffix(".new").replace(path)
        stem = path.name.partition(".")[0]
        if place == "local" and not name.endswith(".bin"):
            return  # of these only the size is compared, and what they hold when it is read
        with (
            pytest.raises((ObjectChangedError, FormatError), match=stem),
            StreamLoader(pinned, **SIZES) as loader,
        ):
            batches_of(loader, 2000)


@pytest.mark.guarantee("pinned-blend")
def test_local_datasets_are_pinned_by_what_they_hold(
    served: tuple[Running, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, root = served
    monkeypatch.chdir(root / "b")
    config = config_of(server, tmp_path, blend=["pair", "folder/", "set/s"])
    pinned = written(config, tmp_path)
    with StreamLoader(config, **SIZES) as loader:
        expected = (batches_of(loader, 4), loader.state_dict())
    with StreamLoader(pinned, **SIZES) as loader:
        assert (batches_of(loader, 4), loader.state_dict()) == expected
    monkeypatch.chdir(tmp_path)
    with StreamLoader(pinned, **SIZES) as loader:
        assert (batches_of(loader, 4), loader.state_dict()) == expected, "it has full paths"


@pytest.mark.guarantee("pinned-blend")
def test_provenance_and_losses_know_datasets_by_their_names(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    config = config_of(server, tmp_path)
    pinned = written(config, tmp_path)
    with_file = Provenance(pinned)
    without = Provenance(config)
    assert list(with_file.datasets) == list(without.datasets) == [name for name, _ in BLEND]
    assert with_file.trace([0, 5, 9]) == without.trace([0, 5, 9])


def test_blends_per_split_are_pinned_too(served: tuple[Running, Path], tmp_path: Path) -> None:
    server, _ = served
    per_split = [["s3://b/pair", "s3://b/set/s"], ["s3://b/folder/"], None]
    config = config_of(server, tmp_path, blend=None, blend_per_split=per_split, split="1,0,0")
    path = str(tmp_path / "blend.json")
    write_manifest(config, path)
    pinned = replace(config, blend=path, blend_per_split=None)
    for split in ("train", "valid"):
        identities = []
        for each in (config, pinned):
            with StreamLoader(each, split=split, **SIZES) as loader:
                identities.append(loader.state_dict()["order"])
        assert identities[0] == identities[1]


@pytest.mark.guarantee("pinned-blend")
def test_the_command_writes_what_describe_and_verify_read(
    served: tuple[Running, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, root = served
    here = shutil.copytree(root / "b", tmp_path / "b")
    out = str(tmp_path / "blend.json")
    words = ["0.7", str(here / "pair"), "0.3", str(here / "set" / "s")]
    assert main(["manifest", *words, out]) == 0
    assert "2 datasets written" in capsys.readouterr().out
    assert main(["describe", out, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [row["weight"] for row in described["datasets"]] == [0.7, 0.3]
    assert [row["shards"] for row in described["datasets"]] == [1, 3]
    assert main(["verify", out]) == 0
    capsys.readouterr()
    body = bytearray((here / "set" / "s1.idx").read_bytes())
    body[40] ^= 1
    (here / "set" / "s1.idx").write_bytes(body)
    assert main(["verify", out]) == 1
    assert "s1.idx" in capsys.readouterr().out
    run = write_run_file(tmp_path, data={"blend": [str(here / "pair")]}, train={"train_iters": 4})
    assert main(["manifest", run, out, "data.split=80,20,0"]) == 0
    capsys.readouterr()
    assert main(["describe", out, "--json"]) == 0
    assert [row["dataset"] for row in json.loads(capsys.readouterr().out)["datasets"]] == [
        str(here / "pair")
    ]


@pytest.mark.guarantee("pinned-blend")
def test_all_commands_of_a_run_take_a_written_blend(
    served: tuple[Running, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, root = served
    out = str(tmp_path / "blend.json")
    data = {"blend": [str(root / "b" / "pair"), str(root / "b" / "set" / "s")], "order": "stream"}
    train = {"train_iters": 4, "save_interval": 2, "eval_interval": 2, "eval_iters": 1}
    model = {"vocab_size": 65_000}
    run = write_run_file(tmp_path, data=data, train=train, model=model)
    assert main(["manifest", run, out]) == 0
    told = []
    for blend in (data["blend"], out):
        run = write_run_file(tmp_path, data={**data, "blend": blend}, train=train, model=model)
        capsys.readouterr()
        for words in (["trace", run, "--step", "1"], ["order-report", run, "--ranks", "1"]):
            assert main(words) == 0
            told.append(capsys.readouterr().out)
        assert main(["describe", run]) == 0
        assert main(["prepare", run]) == 0
    assert told[:2] == told[2:]
    # It goes on with the file from the checkpoint of a run without.
    first = write_run_file(tmp_path, data=data, train=train | {"train_iters": 2}, model=model)
    assert main(["train", first]) == 0
    run = write_run_file(tmp_path, data={**data, "blend": out}, train=train, model=model)
    assert main(["train", run]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["manifest"],
        ["manifest", "only"],
        ["manifest", "web", "out.txt"],
        ["manifest", "no", "o.json"],
    ],
)
def test_a_wrong_command_line_is_told(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) != 0
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_names_with_credentials_are_not_written(tmp_path: Path) -> None:
    config = DataConfig(
        blend=["https://user:secret@host.invalid/web"], sequence_length=8, order="stream"
    )
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        write_manifest(config, str(tmp_path / "blend.json"))
    assert "secret" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_blend_is_an_error_and_never_a_traceback(
    data: st.DataObject, served: tuple[Running, Path]
) -> None:
    _, root = served
    config = DataConfig(
        blend=[str(root / "b" / "pair"), str(root / "b" / "set" / "s")],
        sequence_length=8,
        order="stream",
    )
    raw = bytearray(_pinned(config))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with suppress(StreammegaError):
        parse_blend_file(bytes(raw), "blend.json")


_kept: dict[str, bytes] = {}


def _pinned(config: DataConfig) -> bytes:
    key = str(config.blend)
    if key not in _kept:
        path = Path(f"{config.blend[0]}.blend.json")  # type: ignore[index]
        write_manifest(config, str(path))
        _kept[key] = path.read_bytes()
    return _kept[key]


@pytest.mark.parametrize(
    "pointer", [[1, 1, 5], [0, 1, 10**9], [0, 10**9, 5], [0, -1, 5], [0, 1, -5]]
)
def test_a_pointer_out_of_its_shard_is_a_damaged_blend(
    served: tuple[Running, Path], tmp_path: Path, pointer: list[int]
) -> None:
    _, root = served
    config = DataConfig(blend=[str(root / "b" / "pair")], sequence_length=8, order="stream")
    path = tmp_path / "blend.json"
    write_manifest(config, str(path))
    stored = json.loads(path.read_text())
    (dataset,) = stored["datasets"].values()
    dataset["pointers"] = [pointer]
    with pytest.raises(FormatError, match=r"blend\.json: is a damaged"):
        parse_blend_file(json.dumps(stored).encode(), "blend.json")


def test_a_written_blend_is_named_alone(served: tuple[Running, Path], tmp_path: Path) -> None:
    _, root = served
    pair = str(root / "b" / "pair")
    path = str(tmp_path / "blend.json")
    config = DataConfig(blend=[pair], sequence_length=8, order="stream")
    write_manifest(config, path)
    with pytest.raises(FormatError, match="name it alone"):
        StreamLoader(replace(config, blend=[path, pair]), **SIZES)


@pytest.mark.guarantee("pinned-blend")
def test_what_is_known_of_local_datasets_stays_known_where_others_are_opened_together(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, root = served
    shutil.copytree(root / "b", tmp_path / "near")
    blend = ["s3://b/pair", str(tmp_path / "near" / "other")]
    pinned = written(config_of(server, tmp_path, blend=blend), tmp_path)
    assert set(open_together(pinned).manifests) == set(blend)


def test_names_with_credentials_are_opened_together_by_each_rank(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    signed = f"{server.endpoint.replace('//', '//user:secret@')}/b/pair"
    config = config_of(server, tmp_path, blend=["s3://b/pair", signed])
    together = open_together(config)
    assert list(together.manifests) == ["s3://b/pair"]
    assert together.blend == config.blend


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    config = DataConfig(blend=str(tmp_path / "no.json"), sequence_length=8, order="stream")
    with pytest.raises(ObjectNotFoundError, match=r"no\.json"):
        StreamLoader(config, **SIZES)
    assert pin(DataConfig(blend="mock://tokens=1000,length=10", sequence_length=8), "train")


@pytest.mark.guarantee("pinned-blend")
def test_columns_are_pinned_and_nothing_is_asked_about_them_again(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    _, root = served
    shutil.copytree(root, tmp_path / "here")
    bucket = tmp_path / "here" / "b"
    names = ["pair", "set/s", "z.bin.zst"]
    for name in names:
        add_column(bucket / name, "weight", Column("float16"))
        add_column(bucket / name, "others", Column("uint8", 3))
    blend = [f"s3://b/{name}" for name in names]
    with running(tmp_path / "here") as server:
        config = config_of(server, tmp_path, blend=blend, columns=["weight"])
        pinned = written(config, tmp_path)
        assert list(pinned.columns) == ["weight"]
        raw = (tmp_path / "blend.json").read_bytes()
        blend_file = parse_blend_file(raw, "blend.json")
        assert blend_file is not None
        before = asked(server)
        known = blend_file.manifests
        opened = open_manifests(blend, config.storage, known, columns=["weight", "others"])
        assert asked(server) == before
    for name, manifest in zip(blend, opened, strict=True):
        assert [column.name for column in manifest.columns] == ["weight", "others"]
        folder = name.rpartition("/")[0]
        for column in manifest.columns:
            files = [file for file in column.files if file]
            assert len(files) == len(manifest.shards)
            assert all(file.name.startswith(f"{folder}/") and file.etag for file in files)


@pytest.mark.guarantee("pinned-blend")
def test_columns_of_local_datasets_have_full_names_and_no_versions(
    served: tuple[Running, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, root = served
    here = shutil.copytree(root / "b", tmp_path / "b")
    add_column(here / "pair", "weight", Column("float16"))
    monkeypatch.chdir(here)
    config = DataConfig(
        blend=["pair", "folder/"], sequence_length=8, order="stream", columns=["weight"]
    )
    add_column(here / "folder" / "f0", "weight", Column("float16"))
    manifests = write_manifest(config, str(tmp_path / "blend.json"))
    monkeypatch.chdir(tmp_path)
    for manifest in manifests.values():
        (column,) = manifest.columns
        assert {file.etag for file in column.files if file} == {""}
        assert all(Path(file.name).is_file() for file in column.files if file)
    path = here / "pair.col-weight"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(FormatError, match=r"pair\.col-weight: has"):
        open_manifests(["pair"], StorageConfig(), manifests, columns=["weight"])
    monkeypatch.chdir(here)
    with pytest.raises(FormatError, match=r"pair\.col-weight: has"):
        write_manifest(replace(config, columns=()), str(tmp_path / "other.json"))
