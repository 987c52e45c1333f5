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
"""Seconds.

A machine starts a process for its first task; a busy one takes this one all the same, as it asks
for no CPU.
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
        return (
            f"the work folder {os.path.dirname(self.marker)} is another one there; name one that all machines share by --work: "
            f"a URL, or a folder of a shared file system"
        )

    def lacking(self) -> str | None:
        """What this machine does not see, and how to mend it; None if it sees all."""
        if (folder := self.lacking_marker()) is not None:
            return folder
        for path, size in self.inputs:
            try:
                there = os.stat(path).st_size
            except OSError as error:
                return f"the input {path} cannot be read there ({error.strerror}); put the inputs where all machines see them"
            if there != size:
                return f"the input {path} has {there:,} bytes there, not {size:,}; put the inputs where all machines see them"
        return None


@contextmanager
def connected() -> Iterator[Any]:
    """Ray, joined or started; what was joined before is left as it is. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError("the ray engine needs Ray: pip install 'streammega[ray]'") from None
    own = not ray.is_initialized()
    if own:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"),
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


@contextmanager
def shared_files(work: str, inputs: Sequence[Input]) -> Iterator[SharedFiles]:
    """Of a conversion on the cluster that is connected, once all its machines were asked.

    Raises ConvertError naming one.
    """
    local = [(os.path.abspath(item.path), item.size) for item in inputs if not is_remote(item.path)]
    local = [item for item in local if os.path.isfile(item[0])][
        :: -(-max(1, len(local)) // LOOKED_AT)
    ]
    marker = "" if is_remote(work) else os.path.join(work, f"cluster-{uuid.uuid4().hex}")
    files = SharedFiles(marker=marker, inputs=tuple(local))
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


def _check_machines(ray: Any, files: SharedFiles) -> None:
    """Ask every machine that may get tasks; one without CPUs, as the head of many clusters, gets
    none.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=0, scheduling_strategy=there)(SharedFiles.lacking)
            asked[look.remote(files)] = node["NodeManagerHostname"]
    done, waiting = (
        ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_WITHIN) if asked else ([], [])
    )
    for reference in waiting:
        raise ConvertError(
            f"{asked[reference]}: this machine of the cluster starts no task within {ANSWER_WITHIN:.0f} s; see Ray's own logs"
        )
    for reference in done:
        try:
            lacking = ray.get(reference)
        except ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or [""])[-1]
            lacking = (
                f"{type(error).__name__}: {reason}; is streammega installed there, in this version?"
            )
        check_answer(asked[reference], lacking)


def check_answer(machine: str, lacking: str | None) -> None:
    """Raise ConvertError for a machine of the cluster that lacks something."""
    if lacking is not None:
        raise ConvertError(f"{machine}: this machine of the cluster cannot take part: {lacking}")
