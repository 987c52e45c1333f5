"""A Ray cluster, and whether its machines see the files that they are to share: found before the
first document is read.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from streammega.convert.read.inputs import Input
from streammega.errors import ConfigError, ConvertError
from streammega.storage.open import is_remote

ANSWER_WITHIN = 120.0
"""Seconds in which a machine has to answer. It starts a process for its first task; a busy one
takes this task all the same, as it asks for no CPU.
"""
LOOKED_AT = 1000
"""Inputs that are looked for on each machine: of more, so many spread over all."""


@dataclass(frozen=True, kw_only=True)
class SharedFiles:
    """What lies on disks and is needed on every machine. marker: a file in the work folder, ""
    where that is a URL.

    inputs: (path, bytes) of local ones.
    """

    marker: str = ""
    inputs: tuple[tuple[str, int], ...] = ()

    def lacking_marker(self) -> str | None:
        """Whether the work folder is another one on this machine: then a message
        with the remedy.
        """
        if not self.marker or os.path.exists(self.marker):
            return None
        folder = os.path.dirname(self.marker)
        return (
            f"the work folder {folder} is another one there; name one that all machines share by "
            f"--work: a URL, or a folder of a shared file system"
        )

    def lacking(self) -> str | None:
        """What this machine does not see, and how to mend it; None if it sees all."""
        work_folder = self.lacking_marker()
        if work_folder is not None:
            return work_folder
        remedy = "put the inputs where all machines see them"
        for path, size in self.inputs:
            try:
                size_there = os.stat(path).st_size
            except OSError as error:
                return f"the input {path} cannot be read there ({error.strerror}); {remedy}"
            if size_there != size:
                return f"the input {path} has {size_there:,} bytes there, not {size:,}; {remedy}"
        return None


@contextmanager
def connected() -> Iterator[Any]:
    """Ray, joined or started; what was joined before is left as it is. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError("the ray engine needs Ray: pip install 'streammega[ray]'") from None
    is_joined_here = not ray.is_initialized()
    if is_joined_here:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"),
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    try:
        yield ray
    finally:
        if is_joined_here:
            ray.shutdown()


@contextmanager
def shared_files(work: str, inputs: Sequence[Input]) -> Iterator[SharedFiles]:
    """Of a conversion on the cluster that is connected, once all its machines were asked.

    Raises ConvertError naming one.
    """
    # The name is new each time, so that no machine has such a file from a former conversion.
    marker = "" if is_remote(work) else os.path.join(work, f"cluster-{uuid.uuid4().hex}")
    files = SharedFiles(marker=marker, inputs=_looked_at(inputs))
    try:
        if marker:
            with open(marker, "wb"):
                pass
        with connected() as ray:
            _check_machines(ray, files)
            yield files
    finally:
        if os.path.exists(marker):
            os.unlink(marker)


def _looked_at(inputs: Sequence[Input]) -> tuple[tuple[str, int], ...]:
    """(path, bytes) of the local inputs that each machine looks for."""
    files = []
    for item in inputs:
        if is_remote(item.path):
            continue
        path = os.path.abspath(item.path)
        if os.path.isfile(path):
            files.append((path, item.size))
    step = max(1, -(-len(files) // LOOKED_AT))
    return tuple(files[::step])


def _check_machines(ray: Any, files: SharedFiles) -> None:
    """Ask every machine that may get tasks; one without CPUs, as the head of many clusters, gets
    none.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    machine_asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=0, scheduling_strategy=on_node)(SharedFiles.lacking)
            machine_asked[look.remote(files)] = node["NodeManagerHostname"]
    if not machine_asked:
        return
    answered, waiting = ray.wait(
        list(machine_asked), num_returns=len(machine_asked), timeout=ANSWER_WITHIN
    )
    for reference in waiting:
        raise ConvertError(
            f"{machine_asked[reference]}: this machine of the cluster starts no task within "
            f"{ANSWER_WITHIN:.0f} s; see Ray's own logs"
        )
    for reference in answered:
        check_answer(machine_asked[reference], _answer(ray, reference))


def _answer(ray: Any, reference: Any) -> str | None:
    """What a machine says that it lacks; that it could not say it, if so."""
    try:
        lacking: str | None = ray.get(reference)
    except ray.exceptions.RayError as error:
        # Ray's messages are those of the other machine with its traceback; the last line says what
        # was raised.
        lines = str(error).strip().splitlines() or [""]
        return (
            f"{type(error).__name__}: {lines[-1]}; is streammega installed there, in this version?"
        )
    return lacking


def check_answer(machine: str, lacking: str | None) -> None:
    """Raise ConvertError for a machine of the cluster that lacks something."""
    if lacking is not None:
        raise ConvertError(f"{machine}: this machine of the cluster cannot take part: {lacking}")
