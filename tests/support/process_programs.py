"""Work whose process ends in the middle of it. In a module of its own: processes import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from streammega.convert.job import Job, UnitRecord
from streammega.convert.read.source import Place, native_reads
from streammega.convert.write import segments
from streammega.storage.progress import Progress


def end_at(end: Callable[[], None], times: int, folder: Path, number: int, _: Progress) -> int:
    """Reads two parts of a file; the second one ends the process so many times."""
    assert native_reads.tell is not None
    for part in ("row group 0", "row group 1"):
        place = Place(f"{number}.parquet", part)
        if place in native_reads.fatal:
            return -number
        native_reads.tell(place)
    deaths = folder / str(number)
    if number == 2 and len(list(folder.glob("2-*"))) < times:
        deaths.with_name(f"2-{os.getpid()}").touch()
        end()
    return number


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once() -> None:
    os._exit(7)


def run_unit_or_die(
    end: Callable[[], None], places: dict[str, str], job: Job, number: int, progress: Progress
) -> UnitRecord:
    """Ends its process where a part of a file is read. places: file -> part."""
    tell = native_reads.tell
    assert tell is not None

    def tell_and_die(place: Place) -> None:
        tell(place)
        if places.get(Path(place.path).name) == place.part:
            end()

    native_reads.tell = tell_and_die
    return segments.run_unit(job, number, progress)


def run_unit_in_small_batches(job: Job, number: int, progress: Progress) -> UnitRecord:
    """Progress is reported after a few documents."""
    segments.BATCH_DOCUMENTS = 5
    try:
        return segments.run_unit(job, number, progress)
    finally:
        segments.BATCH_DOCUMENTS = 4096
