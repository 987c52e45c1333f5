"""The dashboard for Grafana asks for what a loader serves, in the form that Grafana reads."""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, StreamLoader
from tests.support.builders import write_dataset

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "assets" / "grafana.json").read_text()
)
PANELS: list[dict[str, Any]] = BOARD["panels"]
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus itself adds."""
COLUMNS = 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The labels, and the kind, of each metric that a loader serves."""
    root = tmp_path_factory.mktemp("board")
    write_dataset(root / "web", [np.arange(2000)])
    config = DataConfig(blend=[str(root / "web")], sequence_length=16, order="stream")
    sizes: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 2}
    with StreamLoader(config, split="train", **sizes, metrics_port=0) as loader:
        loader.take()
        assert loader.metrics_address is not None
        with urllib.request.urlopen(loader.metrics_address) as answer:
            text = answer.read().decode()
    lines = re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE)
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in lines}, kinds


def queries() -> list[tuple[str, str, str]]:
    """(title, expression, legend) of each query of a panel."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in PANELS
        for target in panel["targets"]
    ]


@pytest.mark.guarantee("dashboard-metrics-exist")
def test_every_metric_and_label_of_a_query_is_served(
    served: tuple[dict[str, set[str]], dict[str, str]],
) -> None:
    labels_of, kinds = served
    for title, expression, legend in queries():
        names = set(re.findall(r"streammega_\w+", expression))
        assert names, title
        assert names <= set(labels_of), title
        known = OF_PROMETHEUS | set.union(*(labels_of[name] for name in names))
        by = [
            label
            for group in re.findall(r"by \((.*?)\)", expression)
            for label in group.split(", ")
        ]
        by += re.findall(r"\{\{(\w+)\}\}", legend) + re.findall(r'(\w+)=~"', expression)
        assert set(by) <= known, title
        for name in names:
            is_rate = f"rate({name}{{" in expression
            is_counted = f"count({name}{{" in expression
            assert is_rate or is_counted or kinds[name] == "gauge", f"{title}: a counter as it is"
            assert not is_rate or kinds[name] == "counter", f"{title}: a rate of a gauge"
        assert expression.count("(") == expression.count(")")
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD)))
    assert used == variables | {"__rate_interval"}
    (job,) = [item for item in BOARD["templating"]["list"] if item["name"] == "job"]
    assert set(re.findall(r"streammega_\w+", job["definition"])) <= set(labels_of)


def test_panels_have_what_grafana_needs_and_do_not_overlap() -> None:
    assert BOARD["schemaVersion"] >= 36
    assert {"title", "uid", "panels", "templating", "time", "timezone", "refresh"} <= set(BOARD)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for place in (panel, *panel["targets"]):
            assert place["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    cells = [
        {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        for at in (panel["gridPos"] for panel in PANELS)
    ]
    assert max(x for panel in cells for x, _ in panel) < COLUMNS
    assert not any(one & other for one, other in itertools.combinations(cells, 2))
