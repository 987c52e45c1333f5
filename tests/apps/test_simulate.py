"""`streammega simulate`: forecasts of whole clusters."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega.apps.simulate import Simulation
from streammega.cli.main import main
from streammega.cli.render import show_report
from tests.support.builders import write_dataset, write_manifest

SMALL = ["--sequence-length", "64"]


def forecast(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def value(report: dict[str, Any], section: str, name: str) -> float:
    return float(report[section][name]["value"])


@pytest.mark.guarantee("simulate-forecast")
def test_a_run_that_is_simulated_whole_reads_every_byte_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["web=160m", "code=80m", "--nodes", "4", "--ranks-per-node", "2"]
    report = forecast(capsys, *words, "--sequence-length", "512")
    assert report["run"]["ranks"] == {"value": 8, "unit": "", "basis": "exact"}
    assert value(report, "run", "shards") == 2
    assert value(report, "run", "steps") == 240_000_000 // (512 * 8)
    opened = value(report, "start", "requests_of_a_rank")
    assert value(report, "start", "requests_of_all") == 8 * opened
    assert value(report, "whole_run", "egress_for_each_byte_trained") == pytest.approx(1, rel=0.12)
    assert value(report, "whole_run", "bytes_of_a_node") == pytest.approx(
        value(report, "whole_run", "egress") / 4
    )
    assert value(report, "start", "first_batch") > value(report, "start", "opening") > 0
    assert "4 of 8 ranks" in report["basis"]["sampled"]
    assert [row["figure"] for row in report["shuffling"]] == [
        "places",
        "neighbours",
        "domain drift",
    ]


@pytest.mark.guarantee("simulate-limits")
def test_few_prefixes_limit_the_start_of_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "1280", *SMALL]
    many = forecast(capsys, "set=700m*12", *words)
    one = forecast(capsys, "set=8400m", *words)
    few_ranks = forecast(capsys, "set=8400m", "--nodes", "64", *SMALL)
    assert "bound by the requests a second of a prefix" in one["notes"][0]
    requests = value(one, "start", "requests_of_all")
    assert value(one, "start", "requests_to_busiest_prefix") == requests
    assert value(one, "start", "opening") == pytest.approx(requests / 5500)
    assert value(one, "start", "opening") > value(few_ranks, "start", "opening")
    assert [prefix["dataset"] for prefix in one["prefixes"]] == ["set"]
    assert value(one, "reading", "wait_share_at_first") > value(
        many, "reading", "wait_share_at_first"
    )


def test_ranks_that_open_together_send_fewer_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["web=2m", "code=1m", "--nodes", "4", "--ranks-per-node", "2", *SMALL]
    reports = {
        opening: forecast(capsys, *words, "--opening", opening) for opening in ("each", "together")
    }
    requests = {name: value(report, "start", "requests_of_all") for name, report in reports.items()}
    assert requests["each"] == 8 * requests["together"]
    saved = requests["each"] - requests["together"]
    whole = [value(reports[name], "whole_run", "requests") for name in ("each", "together")]
    assert whole[0] - whole[1] == saved


def test_tokens_scale_the_egress(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["web=20m", *SMALL]
    egress = value(forecast(capsys, *words), "whole_run", "egress")
    longer = forecast(capsys, *words, "--train-tokens", "2G")
    assert value(longer, "run", "epochs_of_all_data") == 100
    assert value(longer, "whole_run", "egress") == pytest.approx(100 * egress, rel=0.15)


def test_a_small_dataset_is_fetched_once_however_long_a_run_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["web=2m", *SMALL]
    egress = value(forecast(capsys, *words), "whole_run", "egress")
    longer = forecast(capsys, *words, "--train-tokens", "200m")
    assert value(longer, "whole_run", "egress") == pytest.approx(egress, rel=0.01)


@pytest.mark.guarantee("simulate-forecast")
def test_a_manifest_and_a_file_of_settings_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_dataset(tmp_path / "web", [np.zeros(90_000, np.uint16)])
    write_manifest(tmp_path / "web", ["web"])
    settings = tmp_path / "cluster.toml"
    settings.write_text(
        f'blend = ["3", "{tmp_path}/web", "1", "code=50k"]\nnodes = 2\nsequence_length = 64\n'
        'train_tokens = "300k"\n'
    )
    report = forecast(capsys, str(settings), "--ranks-per-node", "4")
    assert value(report, "run", "ranks") == 8
    assert value(report, "run", "tokens") == pytest.approx(3e-4)


@pytest.mark.parametrize(
    "words",
    [
        "web=10m code=3m --nodes 2 --train-tokens 20m",
        "a-dataset-with-a-long-name-in-a-bucket=700m*12 --nodes 1280",
        "web=1m --ranks-per-node 2 --train-tokens 1k --latency-ms 3000 --tokens-per-s 1e9",
    ],
)
def test_a_forecast_for_people_fits_a_screen_and_begins_with_what_to_change(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words.split(), *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "storage" in lines[1]
    assert lines[2] == "change first:"
    assert lines[3].startswith("  - ")
    (price,) = [line for line in lines if "US dollars" in line]
    assert "at 0.40 for a million (S3 Standard, us-east-1)" in price
    rows = [line for line in lines[4:] if line.startswith("  ") and not line.startswith("    ")]
    assert all(re.fullmatch(r"  .{16} .+  \S.+", row) for row in rows), "a name, a value, words"


def test_what_to_change_follows_from_what_limits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["web=8m", "--ranks-per-node", "2", *SMALL]
    calm = forecast(capsys, *words)
    assert calm["change_first"] == ["nothing: ranks do not wait for data"]
    price = value(calm, "whole_run", "price_of_requests")
    assert price == pytest.approx(value(calm, "whole_run", "requests") * 0.4e-6)
    words[0] = "web=40m"
    narrow = forecast(capsys, *words, "--nic-gbit", "0.001", "--tokens-per-s", "1e6")
    assert "--nic-gbit" in narrow["change_first"][0]
    slow = forecast(capsys, *words, "--latency-ms", "30000", "--tokens-per-s", "1e6")
    assert "open the data once for all ranks (--opening together)" in " ".join(slow["change_first"])


def test_simulate_has_ten_settings_at_most() -> None:
    assert len(fields(Simulation)) <= 10


WRONG = [
    (["web"], "web: no run's file, dataset or folder has this name"),
    (["web=many"], "write 15T"),
    (["web=0"], "write 15T"),
    (["0.7"], "ends with a weight"),
    (["0.7", "web=1G", "code=1G"], "give it to all"),
    (["web=1G", "web=2G"], "twice"),
    (["web=1G*0"], "COUNT"),
    (["0", "web=1G", "1", "code=1G"], "the weight 0 is not a positive number"),
    (["1e999", "web=1G"], "the weight 1e999 is not a positive number"),
    (["web=1e999"], "web=1e999: '1e999' is no number of tokens"),
    (["web=1e17"], "give it as several datasets"),
    (["web=1G", "--nodes", "0"], "nodes (--nodes) is 0"),
    (["web=1G", "--opening", "never"], "each or together"),
    (["web=1G", "--train-tokens", "all"], "train_tokens (--train-tokens)"),
    (["web=1G", "--global-batch-size", "12"], "global_batch_size"),
    (["no.toml"], "no.toml"),
    (["web=100"], "holds no sample"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_input_is_refused_with_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert "defect" not in error


def test_a_file_with_unknown_or_wrong_settings_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    for text, message in (
        ("nodes = 2", "needs blend"),
        ('blend = "web=1G"\nnode = 2', "did you mean nodes?"),
        ('blend = "web=1G"\nnodes = "two"', "nodes (--nodes) is 'two'"),
        ("blend = [1, 2]", "needs blend"),
        ("blend = ", "no valid TOML"),
    ):
        path.write_text(text)
        assert main(["simulate", str(path)]) == 1
        assert message in capsys.readouterr().err


def test_a_figure_that_there_is_not_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    """A single micro-batch has no second half."""
    words = ["web=20m", "--ranks-per-node", "2", "--sequence-length", "64", "--train-tokens", "1k"]
    report = forecast(capsys, *words)
    assert report["reading"]["answers_may_be_late_by"]["value"] is None
    show_report({"runs": [{"figures": (1.5, math.inf, math.nan)}]}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"runs": [{"figures": [1.5, None, None]}]}
