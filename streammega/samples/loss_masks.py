"""Which labels of a sample have a loss: by the modes of stored tokens, and at seams, where a sample of
the stream order goes over from one run of tokens to another.

Samples are single runs, but for some of those that phases of another length make of what epochs
have left (`order/epoch_remainder.py`). Seams are known of the order alone, on every rank and before
a token is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.dataset import IndexedDataset
from streammega.dataset.manifest_metadata import loss_modes_of
from streammega.dataset.shard import Shard
from streammega.errors import ConfigError, FormatError
from streammega.errors.redaction import redact_urls
from streammega.kernels.fields import MIN_MODE

MODES = 256
"""Values of an int8: mode m is entry m - MIN_MODE of a table."""
NOT_LEARNED = 0
"""The mode of tokens without loss, in data that does not name the modes that are learned."""


@dataclass(frozen=True, kw_only=True)
class TokenModes:
    """The modes of a file's tokens. `index`: where its sequences lie, and their modes; `learned`:
    bool [256], of mode m at m - MIN_MODE.

    The arrays are opened when they are first needed, in each process by itself: they are maps of
    files.
    """

    index: IndexedDataset | Shard
    learned: NDArray[np.bool_]

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
        """(byte offset, mode) of each sequence.

        Raises FormatError where sequences do not lie in their order.
        """
        source: Any = self.index if isinstance(self.index, IndexedDataset) else self.index.arrays()
        offsets = source.sequence_offsets.view()
        modes = source.sequence_modes.view()
        if (offsets[1:] < offsets[:-1]).any():
            name = self.index.prefix
            raise FormatError(
                f"{name}: its sequences lie in no order, so tokens have no mode; convert it, "
                "or set loss_from_modes=False"
            )
        for array in (offsets, modes):
            # one kind of argument for the kernel, whether mapped or joined in memory
            array.flags.writeable = False
        return offsets, modes

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "learned": self.learned}


def modes_of_dataset(indexed: IndexedDataset, config: DataConfig) -> TokenModes | None:
    """The modes that make the loss mask of an open dataset, as the config asks; None: all of it is
    learned.
    """
    if config.loss_from_modes is False:
        return None
    table = _table(indexed.prefix, indexed.multimodal, indexed.loss_modes, config)
    return None if table is None else TokenModes(index=indexed, learned=table)


def modes_of_shards(
    name: str, shards: Sequence[Shard], config: DataConfig
) -> list[TokenModes | None]:
    """The same for each shard of a dataset of which no index was read."""
    if config.loss_from_modes is False:
        return [None] * len(shards)
    multimodal = all(shard.multimodal for shard in shards)
    labelled = [shard for shard in shards if shard.manifest is not None or shard.multimodal]
    table = _table(name, multimodal, loss_modes_of(labelled, name), config)
    if table is None:
        return [None] * len(shards)
    return [TokenModes(index=shard, learned=table) for shard in shards]


def _table(
    name: str, multimodal: bool, named: tuple[int, ...] | None, config: DataConfig
) -> NDArray[np.bool_] | None:
    """Which modes are learned, [MODES]; None: no mask is made of them.

    named: the learned modes that the data itself names; None: it names none.
    """
    asked = config.loss_from_modes is True
    if named is None and not asked:
        return None
    if not multimodal:
        raise ConfigError(
            f"{redact_urls(name)}: has no modes to make a loss mask of (loss_from_modes); "
            "convert it with --chat, or by KEY:MODE"
        )
    modes = np.arange(MIN_MODE, MIN_MODE + MODES)
    return modes != NOT_LEARNED if named is None else np.isin(modes, named)


Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Seams:
    """Token `column` of sample `sample` is the first of another run; int64 [seams] each, sample by
    sample. As a label it stands one column before, and continues nothing.

    apart: documents end there too.
    """

    sample: Integers
    column: Integers
    apart: bool = False

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def label_column(self) -> Integers:
        """Where that token is the label, int64 [seams]."""
        return self.column - 1


NO_SEAMS = Seams(sample=np.empty(0, np.int64), column=np.empty(0, np.int64))
"""Those of samples that are a run each."""


def seams_between(
    rows_of_sample: Integers, file: Integers, start: Integers, size: Integers, column: Integers
) -> Seams:
    """The seams between rows of samples: where a row does not go on in its file where the one before
    has ended.

    rows_of_sample: int64 [samples]; of each row its file, first token and tokens, and the column of
    its sample at which it begins.
    """
    goes_on = np.zeros(len(file), np.bool_)
    goes_on[1:] = (file[1:] == file[:-1]) & (start[1:] == start[:-1] + size[:-1])
    seams = np.flatnonzero((column > 0) & ~goes_on)
    sample = np.repeat(np.arange(len(rows_of_sample)), rows_of_sample)
    return Seams(sample=sample[seams], column=column[seams])


def as_asked(seams: Seams, config: DataConfig) -> Seams | None:
    """Seams as the fields of a config are to have them; None: as there were none."""
    if not len(seams) or config.seams == "joined":
        return None
    return replace(seams, apart=config.seams == "apart")
