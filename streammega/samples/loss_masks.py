"""Which labels of a sample have a loss: by the modes of stored tokens, and at joins, where a sample
of the stream order joins two runs of tokens.

Only samples of remainders (`order/epoch_remainder.py`) have joins; other samples are single runs.
The order alone says where joins are, on every rank and before a token is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.dataset import IndexedDataset
from streammega.dataset.manifest_metadata import loss_modes_of
from streammega.dataset.shard import Shard
from streammega.errors import ConfigError
from streammega.kernels.fields import MIN_MODE

MODES = 256
"""Values of an int8: mode m is entry m - MIN_MODE of a table."""
NOT_LEARNED = 0
"""The mode of tokens without loss, in data that does not name its learned modes."""


def learned_modes_of(indexed: IndexedDataset, config: DataConfig) -> NDArray[np.bool_] | None:
    """Which modes of an open dataset have a loss by the config, bool [MODES]; None: all tokens
    have.
    """
    if config.mask_loss_by_mode is False:
        return None
    return _table(indexed.prefix, indexed.multimodal, indexed.loss_modes, config)


def learned_modes_of_shards(
    name: str, shards: Sequence[Shard], config: DataConfig
) -> NDArray[np.bool_] | None:
    """The same for the shards of a dataset; no index is read."""
    if config.mask_loss_by_mode is False:
        return None
    multimodal = all(shard.multimodal for shard in shards)
    labelled = [shard for shard in shards if shard.manifest is not None or shard.multimodal]
    return _table(name, multimodal, loss_modes_of(labelled, name), config)


def _table(
    name: str, multimodal: bool, named: tuple[int, ...] | None, config: DataConfig
) -> NDArray[np.bool_] | None:
    """Which modes have a loss, [MODES], mode m at m - MIN_MODE; None: modes make no mask.

    named: the learned modes that the data names; None: it names none.
    """
    is_required = config.mask_loss_by_mode is True
    if named is None and not is_required:
        return None
    if not multimodal:
        raise ConfigError(
            f"{name}: has no modes to make a loss mask of (mask_loss_by_mode); "
            "convert it with --chat, or by KEY:MODE"
        )
    modes = np.arange(MIN_MODE, MIN_MODE + MODES)
    return modes != NOT_LEARNED if named is None else np.isin(modes, named)


Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SampleJoins:
    """Where samples join runs: token `column` of sample `sample` is the first of another run; int64
    [joins] each, ascending. Its label is one column before.

    separate: documents end at joins too.
    """

    sample: Integers
    column: Integers
    separate: bool = False

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def label_column(self) -> Integers:
        """Where that token is the label, int64 [joins]."""
        return self.column - 1


NO_JOINS = SampleJoins(sample=np.empty(0, np.int64), column=np.empty(0, np.int64))
"""What samples that are single runs have."""


def joins_between(
    rows_of_sample: Integers, file: Integers, start: Integers, size: Integers, column: Integers
) -> SampleJoins:
    """The joins of samples: where a row does not continue the row before it in the same file.

    rows_of_sample: int64 [samples]. file, start, size, column [rows]: of each row the file, its
    first token, its tokens, and the column at which it begins.
    """
    goes_on = np.zeros(len(file), np.bool_)
    goes_on[1:] = (file[1:] == file[:-1]) & (start[1:] == start[:-1] + size[:-1])
    joins = np.flatnonzero((column > 0) & ~goes_on)
    sample = np.repeat(np.arange(len(rows_of_sample)), rows_of_sample)
    return SampleJoins(sample=sample[joins], column=column[joins])


def joins_of_config(joins: SampleJoins, config: DataConfig) -> SampleJoins | None:
    """The joins that change fields by `sample_joins`; None: none does."""
    if not len(joins) or config.sample_joins == "keep":
        return None
    return replace(joins, separate=config.sample_joins == "separate")
