"""What the phases of a run take from their datasets, as commands say it: what a scan counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega.cli.main import main
from streammega.cli.render import as_text
from streammega.samples.provenance import Provenance
from streammega.train.config import load_run
from streammega.train.splits import data_of

WEB = "mock://tokens=9000,length=70"
CODE = "mock://tokens=4000,length=50,seed=1"
MATH = "mock://tokens=5000,length=90,seed=2"
RUN = f"""
[data]
blend = ["0.7", "{WEB}", "0.3", "{CODE}"]
split = "1,0,0"
order = "stream"
shuffle_lanes = 16
shuffle_block_bytes = 512
sequence_length = 16
exclude_samples = [[80, 96], [208, 240]]
[[data.phases]]
first_sample = 160
blend = ["0.2", "{WEB}", "0.8", "{MATH}"]
[[data.phases]]
first_sample = 400
blend = ["0.5", "{CODE}", "0.4", "{WEB}", "0.1", "{MATH}"]
sequence_length = 40
global_batch_size = 16
[[data.phases]]
first_sample = 640
sequence_length = 20
[model]
vocab_size = 50304
[train]
train_iters = 94
micro_batch_size = 1
global_batch_size = 8
out_dir = "runs/one"
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    return "run.toml"


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    capsys.readouterr()
    assert main(list(command)) == 0
    return json.loads(capsys.readouterr().out)


def scanned(provenance: Provenance, ids: np.ndarray) -> dict[str, int]:
    """Samples of each dataset, by looking at every sample."""
    extents = provenance.source.locate(ids)
    dataset = extents.dataset[extents.row_splits[:-1]]
    return {
        provenance.dataset_name(number): int((dataset == number).sum())
        for number in np.unique(dataset).tolist()
    }


@pytest.mark.guarantee("describe-order-report")
def test_a_run_is_described_phase_by_phase(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = printed(capsys, "describe", run_file, "--json")
    provenance = Provenance(data_of(load_run(run_file), "train"), "train", 8)
    steps = [[1, 18], [19, 44], [45, 59], [60, 94]]
    lengths = [16, 16, 40, 20]
    assert [phase["steps"] for phase in report["phases"]] == steps
    assert [phase["sequence_length"] for phase in report["phases"]] == lengths
    excluded = np.r_[80:96, 208:240]
    tokens: dict[str, int] = {}
    sizes = {
        name: sum(shard.num_tokens for shard in provenance.shards(number))
        for number, name in enumerate(provenance.dataset_names)
    }
    for phase in report["phases"]:
        ids = np.setdiff1d(np.arange(phase["first_sample"], phase["stop"]), excluded)
        assert phase["samples"] == len(ids)
        expected = scanned(provenance, ids)
        found = {entry["dataset"]: entry["samples"] for entry in phase["datasets"]}
        assert found == expected
        assert sum(entry["share"] for entry in phase["datasets"]) == pytest.approx(1)
        for entry in phase["datasets"]:
            assert entry["dealt"] == entry["samples"] / len(ids)
            assert entry["tokens"] == entry["samples"] * phase["sequence_length"]
            before = tokens.get(entry["dataset"], 0)
            tokens[entry["dataset"]] = before + entry["tokens"]
            epochs = [before, tokens[entry["dataset"]]]
            assert entry["epochs"] == [count / sizes[entry["dataset"]] for count in epochs]
    longer = report["phases"][2]
    assert sum(entry.get("from_remainder", 0) for entry in longer["datasets"]) > 10
    assert {entry["dataset"] for entry in longer["datasets"] if "carried_tokens" in entry} == {
        WEB,
        CODE,
        MATH,
    }
    capsys.readouterr()
    assert main(["describe", run_file]) == 0
    words = capsys.readouterr().out
    title = (
        "phase 2, first_sample 400, stop 640, excluded 0, sequence_length 40, lanes 16, samples 240"
    )
    assert f"{title}\n    steps: 45, 59\n" in words
    assert "first_sample 160, stop 400, excluded 32," in words
    assert "from_remainder" in words


@pytest.mark.guarantee("describe-order-report")
def test_weights_of_a_phase_are_in_the_shares(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = RUN.partition("[[data.phases]]")[0] + "[model]" + RUN.partition("[model]")[2]
    alone = alone.replace("exclude_samples = [[80, 96], [208, 240]]", "")
    phase = f'[[data.phases]]\nfirst_sample = 168\nblend = ["0.1", "{WEB}", "0.9", "{CODE}"]\n'
    Path(run_file).write_text(alone.replace("[model]", f"{phase}[model]"))
    report = printed(capsys, "describe", run_file, "--json", "--last-step", "44")
    assert [phase["first_sample"] for phase in report["phases"]] == [0, 168]
    for phase, share in zip(report["phases"], (0.7, 0.1), strict=True):
        web, _ = phase["datasets"]
        assert web["share"] == pytest.approx(share)
        assert web["dealt"] == pytest.approx(share, abs=0.05)


@pytest.mark.guarantee("describe-order-report")
def test_an_order_is_measured_in_every_phase(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["order-report", run_file, "--ranks", "4", "--steps", "10"]
    printed_report = printed(capsys, *arguments, "--json")
    assert printed_report["ranks"] == 4
    reports = printed_report["phases"]
    assert [report["phase"] for report in reports] == [0, 1, 2, 3]
    assert [report["first_sample"] for report in reports] == [0, 160, 400, 640]
    assert [report["samples"] for report in reports] == [80, 80, 160, 160]
    # ten steps are some rows of each lane, which keep to the shares
    drifts = [report["blend"]["most_samples_from_its_target"] for report in reports]
    assert max(drifts) < 16
    assert main(arguments) == 0
    assert "phase 3, first_sample 640, samples " in capsys.readouterr().out


def test_a_report_shows_keys_beside_names_and_leaves_out_what_is_empty() -> None:
    report = {
        "flat": {"a": {"name": "x", "size": 1}, "b": {"size": 2}},
        "deep": {"c": {"name": "y", "parts": [{"size": 3}]}},
        "empty": [{}, {}],
        "lines": [{"name": "z\u2028z"}],
    }
    lines = [re.findall("[^ ]+", line) for line in as_text(report).split("\n")]
    assert lines == [
        ["flat"],
        ["key", "name", "size"],
        ["a", "x", "1"],
        ["b", "2"],
        ["deep"],
        ["key", "c,", "name", "y"],
        ["size"],
        ["3"],
        ["empty"],
        ["lines"],
        ["name"],
        ["z\u2028z"],
    ]


@pytest.mark.guarantee("describe-order-report")
def test_options_that_would_be_passed_over_are_refused(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, message in (
        (["order-report", run_file, "--seed", "3"], "--seed: run.toml has this setting"),
        (
            ["order-report", run_file, "--plot", "r.png"],
            "--plot: draws one order, and run.toml has 4 phases",
        ),
        (["describe", run_file, "--tokenizer", "bytes"], "--tokenizer is for one dataset"),
        (["describe", run_file, "--tokens", "3"], "--tokens is for one dataset"),
        (["describe", WEB, "--last-step", "3"], "--last-step needs a run file (.toml)"),
        (["describe", run_file, "--last-step", "95"], "--last-step 95: steps are counted from 1"),
    ):
        capsys.readouterr()
        assert main(command) == 1
        assert message in capsys.readouterr().err


@pytest.mark.guarantee("trace-tells-phase")
def test_a_trace_tells_the_phase_of_a_sample_and_all_of_its_runs(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    provenance = Provenance(data_of(load_run(run_file), "train"), "train", 8)
    ids = np.arange(390, 640)
    extents = provenance.source.locate(ids)
    part_of = provenance.trace(ids, (20, 40))
    seams = 0
    for number, sample in enumerate(provenance.trace(ids)):
        phase = 1 if sample.sample < 400 else 2
        assert (sample.phase, part_of[number].phase) == (phase, phase)
        rows = slice(*extents.row_splits[number : number + 2].tolist())
        ends = np.cumsum(extents.stop[rows] - extents.start[rows])[:-1]
        # each run of a sample begins another document, or another place in it
        goes_on = (extents.file[rows][1:] == extents.file[rows][:-1]) & (
            extents.start[rows][1:] == extents.stop[rows][:-1]
        )
        assert {*ends[~goes_on].tolist()} <= {run.column for run in sample.runs}
        seams += int((~goes_on).sum())
    assert seams > 10
    command = ["trace", run_file, "--sample", "400"]
    (listed,) = printed(capsys, *command, "--json")["samples"]
    assert listed["phase"] == 2
    assert main(command) == 0
    assert ", phase 2\n" in capsys.readouterr().out
