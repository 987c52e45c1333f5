"""torchdata: a loader as a node of a `torchdata.nodes` pipeline.

    from streammega.integrations.torchdata import stream_node

    node = torchdata.nodes.Mapper(stream_node(loader), to_device)
    batches = torchdata.nodes.Loader(node)

`StatefulDataLoader` needs no adapter: give it a `StreamingDataset`, `batch_size=None` and any number
of workers.
"""

from __future__ import annotations

from typing import Any

from streammega.integrations.frameworks import import_framework, with_bases
from streammega.loading import StreamLoader
from streammega.samples.fields import Batch


def stream_node(loader: StreamLoader) -> Any:
    """A `torchdata.nodes.BaseNode` of the micro-batches of a loader, whose state it keeps.

    It begins at the loader's cursor. `reset` goes back to the first sample, `reset(state)` to a
    state of `get_state`, on any number of ranks; it raises StateError for another one. The end of
    the data is StopIteration. The state counts what this node gave: nodes behind it that read ahead
    keep, as those of torchdata do, the state that belongs to what they gave themselves.
    """
    base = import_framework("torchdata.nodes", "torchdata").BaseNode
    return with_bases(StreamNode, base)(loader)


class StreamNode:
    """Micro-batches of a loader; before torchdata's own base class."""

    def __init__(self, loader: StreamLoader) -> None:
        super().__init__()
        self._loader = loader
        self._has_begun = False

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to a state, or to the first sample; the first time without one, stay."""
        super().reset(initial_state)  # type: ignore[misc]
        if initial_state is not None:
            self._loader.load_state_dict(initial_state)
        elif self._has_begun:
            self._loader.seek(0)
        self._has_begun = True

    def next(self) -> Batch:
        """The next micro-batch. Raises StopIteration after the last."""
        return self._loader.take()

    def get_state(self) -> dict[str, Any]:
        """The state of the loader."""
        return self._loader.state_dict()
