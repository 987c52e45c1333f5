"""The command `doctor`: which faults keep a run from working here, and which settings fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from streammega.cli.options import (
    AsJson,
    DataWords,
    StorageFile,
    StorageOption,
    load_data,
    show_progress,
)
from streammega.cli.render import Report, as_text, show_report
from streammega.config import DataConfig
from streammega.errors import ConfigError

COUNTS = ("faults", "warnings")


def doctor(
    words: DataWords,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Check conditional writes too: creates and deletes one small object."
        ),
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds after which the command ends at the latest.")
    ] = 20.0,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Can this machine train from a bucket or dataset, and how fast? Checks access and storage.

    Prints faults first, then what would help most, and the settings that fit. Looks at this
    machine too. Exit status 1 if there is a fault. A bucket or any object may be named. Of a run,
    and of several datasets, the first dataset is examined; data in other buckets is named.
    """
    from streammega.apps.checks import Examination

    data, _ = load_data(words, storage, storage_file, options={})
    url, *elsewhere = _first_of_each_bucket(data)
    settings = data.storage.for_url(url)
    log = logging.getLogger("streammega")
    if log.level == logging.WARNING:
        log.setLevel(logging.ERROR)  # the findings say the same
    with show_progress("checking", line_every=5.0) as progress:
        examination = Examination(url, settings, may_write=write, seconds=seconds)
        examination.run(progress.begin)
        for name in elsewhere:
            examination.not_checked.append(f"data elsewhere: `streammega doctor {name}`")
    report = examination.report()
    text = "" if as_json else examination_text(report)
    show_report(report if as_json else {}, summary=text, as_json=as_json)
    if report["faults"]:
        raise typer.Exit(1)


def _first_of_each_bucket(data: DataConfig) -> list[str]:
    """The first dataset of training in each bucket or, of this machine, among all files."""
    firsts: dict[tuple[str, str], str] = {}
    for segment in data.segments("train"):
        for name in segment.datasets:
            url = urlsplit(name)
            firsts.setdefault((url.scheme, url.netloc), name)
    if not firsts:
        raise ConfigError("[data]: names no data for training; name a dataset in place of the run")
    return list(firsts.values())


def examination_text(report: Report) -> str:
    """The report for people: a line for each check, rates, and a section of a run's file."""
    from streammega.apps.checks import size_of

    counts = [f"{report[name]} {name[:-1] if report[name] == 1 else name}" for name in COUNTS]
    lines = [f"{report['url']}: {', '.join(counts)}", ""]
    width = max(len(item["check"]) for item in report["checks"])
    for item in report["checks"]:
        line = f"{item['status']:<8} {item['check']:<{width}}  {item['result']}"
        lines.append(line + (f" -> {item['remedy']}" if item["remedy"] else ""))
    lines += [f"not checked: {reason}" for reason in report["not_checked"]]
    rates = [
        {
            "requests": f"{rate['at_once']} x {size_of(rate['bytes'])}",
            "MB/s": round(rate["bytes_per_second"] / 1e6, 1),
            "median ms": round(1e3 * rate["median_seconds"], 1) if rate["requests"] else None,
            "slowest ms": round(1e3 * rate["slowest_seconds"], 1) if rate["requests"] else None,
            "refused": rate["refused"],
        }
        for rate in report["requests"]
    ]
    if rates:
        lines += ["", as_text({"requests": rates})]
    if rates or not report["faults"]:  # where nothing could be read, it is unknown what fits
        lines += ["", *storage_toml(report["storage"], report["hidden_options"])]
    return "\n".join(lines)


def storage_toml(settings: Mapping[str, Any], hidden_options: Sequence[str]) -> list[str]:
    """The section of a run's file that has these settings."""
    lines = ["# The defaults fit: a run's file needs no settings of storage."]
    if settings:
        lines = ["# For a run's file:", "[data.storage]"]
        plain = {name: value for name, value in settings.items() if name != "storage_options"}
        lines += [f"{name} = {_toml(value)}" for name, value in plain.items()]
    options = settings.get("storage_options", {})
    if options:
        lines.append("[data.storage.storage_options]")
        lines += [f"{name} = {_toml(value)}" for name, value in options.items()]
    if hidden_options:
        names = ", ".join(hidden_options)
        lines.append(f"# Not shown: {names}. Keep secrets in the environment or a profile.")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)  # of texts, numbers and booleans it is TOML
