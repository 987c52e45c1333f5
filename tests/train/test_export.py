"""A checkpoint as one file of safetensors or torch: of any layout, from a disk or a bucket, whole or not
there.
"""

from __future__ import annotations

import json
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from streammega.cli.main import main
from streammega.train.checkpoints.export import export_checkpoint
from streammega.train.config import load_run
from streammega.train.model import GPT
from streammega.train.trainer import Trainer
from tests.support.builders import write_random_pair, write_run_file
from tests.support.checkpoint_programs import checkpoint_records, files_of, train_steps
from tests.support.gang import Gang
from tests.support.servers import S3

CPU = torch.device("cpu")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_random_pair(str(tmp_path / "pair"))
    return write_run_file(
        tmp_path,
        data={"blend": [f"{tmp_path}/pair"], "order": "stream"},
        train={"train_iters": 2, "save_interval": 2, "device": None},
        model={"layers": 2},
    )


@pytest.fixture
def checkpoint(run_file: str) -> str:
    """One of a single rank."""
    Trainer(load_run(run_file), CPU).run()
    return "run/checkpoints/step-2"


def resumed(run_file: str) -> Trainer:
    trainer = Trainer(load_run(run_file), CPU)
    trainer.resume()
    trainer.close()
    return trainer


def assert_same(tensors: dict[str, torch.Tensor], run_file: str) -> None:
    """The tensors are those of a run that resumes from the checkpoint, and a whole model takes them."""
    expected = resumed(run_file).model.chunks[0].state_dict()
    assert tensors.keys() == expected.keys()
    model = GPT(load_run(run_file).model)
    model.load_state_dict(tensors)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name])


@pytest.mark.guarantee("checkpoint-exported")
@pytest.mark.parametrize(
    "layout",
    [["parallel.tp=2", "parallel.optimizer=sharded"], ["parallel.pp=2"]],
    ids=["tp-sharded", "pp"],
)
def test_a_checkpoint_of_any_layout_is_the_whole_models_state_in_both_formats(
    gang: Gang, run_file: str, layout: list[str]
) -> None:
    gang.run(2, train_steps, run_file, layout)
    for name in ("model.safetensors", "model.pt"):
        assert main(["export", "run/checkpoints/step-2", name]) == 0
    assert_same(load_file("model.safetensors"), run_file)
    assert_same(torch.load("model.pt", weights_only=True), run_file)
    with safe_open("model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["model"])["dim"] == load_run(run_file).model.dim


@pytest.mark.guarantee("checkpoint-exported")
def test_a_checkpoint_of_a_bucket_is_written_to_a_bucket_and_the_optimizer_on_request(
    run_file: str, moto: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = moto.new_bucket()
    options = [f"{name} = {json.dumps(value)}" for name, value in moto.options.items()]
    (tmp_path / "storage.toml").write_text("\n".join(["[storage_options]", *options]))
    settings = [
        f"data.storage.storage_options.{name}={json.dumps(value)}"
        for name, value in moto.options.items()
    ]
    trainer = Trainer(load_run(run_file, [f"train.out_dir=s3://{bucket}/run", *settings]), CPU)
    trainer.run()
    url = f"s3://{bucket}/run/step-2"
    words = ["export", url, f"s3://{bucket}/m.pt", "--optimizer", "--json"]
    assert main([*words, "--storage-file", "storage.toml"]) == 0
    report = json.loads(capsys.readouterr().out)
    data = moto.objects(bucket)["m.pt"]
    Path("model.pt").write_bytes(data)
    tensors = torch.load("model.pt", weights_only=True)
    assert report == {"step": 2, "tensors": len(tensors), "bytes": len(data)}
    weight = dict(trainer.model.chunks[0].named_parameters())["norm.weight"]
    assert torch.equal(tensors["norm.weight"], weight)
    state = trainer.optimizer.state[weight]
    for name, value in state.items():
        assert torch.equal(tensors[f"optimizer.norm.weight.{name}"], value)


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("run/checkpoints/step-2", "model.bin", "must end in .safetensors, or in .pt"),
        ("run/checkpoints/step-3", "model.pt", "no checkpoint of step 3 in run/checkpoints: there"),
        ("run", "model.pt", "it must end in the checkpoint's name"),
        ("run/checkpoints/step-2", "pair.bin/model.pt", "pair.bin/model.pt: "),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    checkpoint: str, source: str, out: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", source, out]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.guarantee("checkpoint-exported")
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_damaged_checkpoint_and_a_full_disk_leave_the_file_before(
    checkpoint: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(b"before")
    here = sorted(Path().iterdir())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        assert main(["export", checkpoint, name]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert capsys.readouterr().err.endswith(f"{name}: File too large\n")
    (record,) = checkpoint_records(Path("run/checkpoints"))
    file = files_of(record) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[1000] ^= 1  # of the embedding
    file.write_bytes(data)
    assert main(["export", checkpoint, name]) == 1
    assert "are damaged: their checksum is another" in capsys.readouterr().err
    assert Path(name).read_bytes() == b"before"
    assert sorted(Path().iterdir()) == here


@pytest.mark.guarantee("metadata-checkpoints-makes", "checkpoint-exported")
def test_an_export_unpickles_nothing(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is unpickled")

    for module, name in ((pickle, "Unpickler"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert export_checkpoint(checkpoint, "model.pt").step == 2
