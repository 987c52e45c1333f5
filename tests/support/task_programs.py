"""A task of a conversion in a process of its own, which may wait to be killed."""

from __future__ import annotations

import sys
import time
from typing import Any

import streammega.convert.job as plan
from streammega import StorageConfig
from streammega.convert import ExecutionConfig, Task, convert_task
from streammega.convert.write.segments import run_unit

AT_MOST = 100.0
"""Seconds that a process waits to be killed."""


def do_task(
    storage: StorageConfig,
    inputs: list[str],
    output: str,
    work: str,
    number: int,
    of: int,
    wait_after: int | None,
    options: dict[str, Any],
) -> None:
    """One task; with `wait_after` it does so many units and then nothing more."""
    plan.MAX_UNIT_BYTES = 10_000
    units: Any = sys.modules[run_unit.__module__]
    save = units.save_record
    saved = 0

    def save_and_wait(*arguments: Any) -> None:
        nonlocal saved
        save(*arguments)
        saved += 1
        if saved == wait_after:
            time.sleep(AT_MOST)

    units.save_record = save_and_wait
    convert_task(
        inputs,
        output,
        Task(number=number, of=of),
        execution=ExecutionConfig(work_dir=work, workers=1),
        storage=storage,
        **options,
    )
