"""torch's distributed checkpoints (DCP): the state of a loader under one key, as one JSON string.

    from streammega.integrations.dcp import DataState, load

    state = {"model": model, "data": DataState(loader)}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    load(state, checkpoint_id=folder)

DCP stores an entry for each key of a state, and refuses checkpoints with other keys by errors of its own.
With one constant key every state stays loadable, also if states get new fields. What another loader wrote
is refused here, with what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from streammega.config.validate import parse_json
from streammega.errors import StateError
from streammega.order.state import KEYS

STATE_KEY = "streammega_state"
"""The one key. The error of DCP's own `load` names it if a checkpoint has no data state."""


class DataState:
    """What to give to DCP in place of a loader: {"streammega_state": JSON text}, the same on every
    rank, and loaded by any number of them.
    """

    def __init__(self, loader: Stateful) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, str]:
        """The state of the loader under the one key."""
        return {STATE_KEY: json.dumps(self._loader.state_dict(), sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state under the one key, or from one with the keys of a bare loader.

        Raises StateError for any other, and changes nothing.
        """
        self._loader.load_state_dict(dict(read_state(state)))


def read_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a loader in what `DataState` keeps. Raises StateError for anything else."""
    entries = state if isinstance(state, Mapping) else {}
    if set(KEYS) <= set(entries):
        return entries
    text = entries.get(STATE_KEY)
    if not isinstance(text, str):
        names = ", ".join(sorted(map(str, entries)))
        raise StateError(
            f"the checkpoint's data state has no {STATE_KEY!r} (it has: {names or 'nothing'}); "
            "another loader wrote it: leave it out of what is loaded, to begin at the first sample"
        )
    try:
        read = parse_json(text)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise StateError(f"{STATE_KEY} of the checkpoint is no JSON object; it is damaged")
    return read


def load(state: dict[str, Any], **options: Any) -> None:
    """`torch.distributed.checkpoint.load(state, **options)`, on all ranks together.

    Raises StateError where the checkpoint has no data state, or one of another loader. Also takes
    checkpoints in which a bare loader stood in the place of a DataState.
    """
    options.setdefault("planner", DataStatePlanner())
    try:
        torch.distributed.checkpoint.load(state, **options)
    except CheckpointException as error:
        # DCP gathers what failed on each rank; ours is the same on all of them
        for failure, _ in error.failures.values():
            if isinstance(failure, StateError):
                raise failure from None
        raise


class DataStatePlanner(DefaultLoadPlanner):
    """Looks, before anything is read, whether a checkpoint has what each DataState asks for.

    Takes the arguments of DefaultLoadPlanner.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Raises StateError for a checkpoint without a data state."""
        assert metadata is not None  # DCP always has it when it loads
        _fit(state_dict, "", set(metadata.state_dict_metadata))
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _fit(state: dict[str, Any], path: str, stored: set[str]) -> None:
    """Leave each data state in `state` as it is, or give it the keys of a bare loader, if the checkpoint
    has those there. Values of None are placeholders, which DCP fills.

    path: of `state` in the checkpoint. stored: all keys of the checkpoint. Raises StateError where
    neither is stored.
    """
    for name, inner in state.items():
        if isinstance(inner, dict):
            _fit(inner, f"{path}{name}.", stored)
    if STATE_KEY not in state or path + STATE_KEY in stored:
        return
    if all(path + name in stored for name in KEYS):  # a bare loader was saved
        state.clear()
        state.update(dict.fromkeys(KEYS))
        return
    here = sorted(key for key in stored if key.startswith(path))
    what = f"has only {', '.join(here[:5])} there" if here else "has nothing there"
    tops = sorted({key.split(".")[0] for key in stored})
    raise StateError(
        f"the checkpoint has no data state under {path[:-1]!r}: it {what}, and {', '.join(tops[:8])} "
        f"at the top. It was saved without the loader, or with another one. Leave {path[:-1]!r} out of "
        f"what is loaded, to begin at the first sample"
    )
