"""A conversion in tasks that know nothing of each other, as Slurm arrays and Kubernetes jobs start
them.

A task does its share of the units, into a work folder that all tasks share. When all have ended,
one conversion makes the dataset of what they did. Nothing is asked of the order of tasks, of their
number from one time to the next, or of how often one is killed and started again: a unit is made
of its inputs alone, and one that has a record is not done again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.read.stdin import check_output, is_pipe
from streammega.convert.report import ConvertReport
from streammega.convert.run import convert_files
from streammega.convert.setup import check_may_write, merge_settings, plan
from streammega.convert.work_dir import check_unlocked
from streammega.errors import ConfigError
from streammega.storage.open import is_remote
from streammega.storage.progress import ProgressObserver

MERGE = "merge"
"""In place of a task's number: make the dataset of what all tasks did."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of `of` tasks, counted from 0."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ConfigError(
                f"there is no task {self.number} of {self.of}; tasks are counted from 0, to "
                f"{self.of - 1}"
            )


def parse_task(text: str) -> Task | None:
    """The task of "3/16"; None for "merge". Raises ConfigError for anything else."""
    if text == MERGE:
        return None
    number, slash, of = text.partition("/")
    if not slash or not number.isdigit() or not of.isdigit():
        raise ConfigError(
            f"task (--task) is {text!r}; give the number of a task, from 0 on, and how many there "
            f"are, such as 3/16, or '{MERGE}' when all of them have ended"
        )
    return Task(number=int(number), of=int(of))


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What a task did. units: of this task; units_before: of those, done by an earlier start of it;
    units_of_all: of all tasks together.
    """

    task: Task
    units: int
    units_before: int
    units_of_all: int
    documents: int
    tokens: int
    seconds: float

    def as_text(self) -> str:
        """For people."""
        before = f", {self.units_before:,} of them before" if self.units_before else ""
        return (
            f"task {self.task.number} of {self.task.of}: {self.units:,} of {self.units_of_all:,} "
            f"units are done{before}; {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.seconds:.1f} s\n"
            f"when all tasks have ended: the same command with --task {MERGE}"
        )


def convert_task(
    inputs: Sequence[str],
    output: str,
    task: Task,
    *,
    options: ConvertOptions | None = None,
    runner: Runner | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    input_storage: StorageConfig | None = None,
    progress: ProgressObserver | None = None,
    **settings: Any,
) -> TaskReport:
    """Do one task's share of a conversion; `merge_tasks` makes the dataset.

    All tasks, and what merges, are given the same inputs, output, options and work folder (of the
    runner: a URL, or a folder of a shared file system). Arguments and errors are those of
    `convert`.
    """
    began = time.monotonic()
    options, runner = merge_settings(options, runner, settings)
    _check_tasks(inputs, output, runner)
    conversion = plan(
        inputs,
        output,
        options=options,
        runner=runner,
        overwrite=overwrite,
        storage=storage,
        input_storage=input_storage,
        progress=progress,
    )
    check_unlocked(conversion.work)
    conversion.publisher.check(conversion.inputs, overwrite=overwrite)
    check_may_write(conversion.prefix, conversion.storage)
    # All tasks are one conversion: each may take the reservation.
    conversion.publisher.reserve(overwrite=overwrite)
    records, num_before, num_units = conversion.run_units(task.number, task.of)
    return TaskReport(
        task=task,
        units=len(records),
        units_before=num_before,
        units_of_all=num_units,
        documents=sum(record.documents for record in records),
        tokens=sum(record.tokens for record in records),
        seconds=time.monotonic() - began,
    )


def merge_tasks(
    inputs: Sequence[str],
    output: str,
    *,
    options: ConvertOptions | None = None,
    runner: Runner | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    input_storage: StorageConfig | None = None,
    progress: ProgressObserver | None = None,
    **settings: Any,
) -> ConvertReport:
    """Make the dataset of what tasks did: `convert`, which does none of their work.

    Raises ConvertError where some of it is not done.
    """
    options, runner = merge_settings(options, runner, settings)
    _check_tasks(inputs, output, runner)
    return convert_files(
        inputs,
        output,
        is_merge=True,
        options=options,
        runner=runner,
        overwrite=overwrite,
        storage=storage,
        input_storage=input_storage,
        progress=progress,
    )


def _check_tasks(inputs: Sequence[str], output: str, runner: Runner) -> None:
    """Raise ConfigError for what several processes cannot share."""
    check_output(output)
    if any(is_pipe(name) for name in inputs):
        raise ConfigError("a pipe can be read once: give tasks (--task) files that all can read")
    if runner.restart:
        raise ConfigError(
            "restart (--restart) would forget what other tasks have done; remove the work folder "
            "before the first of them starts"
        )
    if runner.engine != "local":
        raise ConfigError(
            "tasks (--task) and the ray engine both share the work out; choose one of them"
        )
    if runner.work is None and is_remote(output):
        raise ConfigError(
            f"{output}: tasks need a work folder that all of them can write; name one by --work, a "
            f"URL beside the output for instance"
        )
