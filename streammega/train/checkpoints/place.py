"""Where the checkpoints of a run lie, and how they appear there whole: a folder on a disk, or a
prefix of an object store.

    on disk     step-00000100/            the files and position.json;
                                          written as step-00000100.partial, then renamed
    elsewhere   step-00000100.json        the position, and the name of the folder of the files
                step-00000100/3f09c1a2/   the files

No object store can rename a folder. There the small object is what makes a checkpoint: it is
written when all files are there, replaced at once where the step had one, and removed before them.
Every save writes to a folder of a new name, so that nothing which an earlier save left behind, or
still sends, gets among its files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from streammega.train.checkpoints.files import DamagedError, Files, is_as_written
from streammega.train.checkpoints.hold import Hold

NAME = re.compile(r"step-(?P<step>\d{8})")
"""Of a whole checkpoint."""
SIGN = ".shared-"
"""How the names of small files begin by which ranks see whether they share the place."""
SET_ASIDE = re.compile(r"step-\d{8}\.(rewound|damaged)(-\d+)?")
"""Of one that is kept, and resumed from no more."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint.

    step: after which it was saved. name: of the folder of its files. position: what was written
    beside the tensors.
    """

    step: int
    name: str
    position: dict[str, Any]


class CheckpointPlace(Protocol):
    """Checkpoints by step.

    Methods are called on the first rank alone, but for `draft` and `sees`.
    """

    url: str
    on_disk: bool

    def prepare(self) -> None:
        """At the start of a run, which holds the place: finish, undo or remove what a kill left."""

    def steps(self) -> list[int]:
        """Of whole checkpoints, rising."""

    def find(self, step: int) -> Found:
        """A whole checkpoint. Raises DamagedError."""

    def begin(self, step: int) -> str:
        """Make room for a checkpoint that is to be written; the name of its draft."""

    def draft(self, name: str) -> Files:
        """Where the files of a draft, or of a checkpoint that was found, lie."""

    def publish(self, step: int, name: str, position: Mapping[str, Any]) -> None:
        """Make a draft, whose files are all there, the checkpoint of its step."""

    def remove(self, step: int) -> None:
        """A checkpoint that is not wanted any more.

        Raises StorageError or OSError; it is gone from `steps` nevertheless.
        """

    def set_aside(self, step: int, why: str) -> str:
        """Take a checkpoint out of `steps` and keep it, under another name, which is returned."""

    def clean_aside(self, keep: int) -> None:
        """Remove what was set aside, but for the last `keep` of them."""

    def hold(self) -> Hold:
        """Keep other jobs out. Raises ConfigError where one is at work."""

    def leave_sign(self, name: str) -> None:
        """Write a small file."""

    def sees(self, name: str) -> bool:
        """Whether such a file is there."""

    def remove_sign(self, name: str) -> None:
        """Remove it."""


def folder_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """The step of a whole checkpoint, by its name; None for every other name."""
    match = NAME.fullmatch(name)
    return None if match is None else int(match["step"])


def free_name(name: str, taken: set[str]) -> str:
    """A name, with a number where it is taken."""
    if name not in taken:
        return name
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"


def parsed(text: bytes, url: str) -> Any:
    """A JSON file. Raises DamagedError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DamagedError(f"{url}: cannot be read ({error})") from None


def position_in(position: Any, url: str) -> dict[str, Any]:
    """What was written beside the tensors, which `url` holds.

    Raises DamagedError where a run's step or state is not there.
    """
    if not isinstance(position, dict) or not is_as_written(position):
        raise DamagedError(f"{url}: is damaged: its checksum is missing or another")
    try:
        step = int(position["step"])
        data = dict(position["data"])
        return {**position, "step": step, "data": data}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{url}: holds no position of a run ({error})") from None
