"""Which modes of stored tokens have a loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.dataset import IndexedDataset
from streammega.dataset.manifest import Manifest
from streammega.errors import ConfigError
from streammega.kernels.fields import MIN_MODE

MODES = 256
"""Values of an int8: mode m is entry m - MIN_MODE of a table."""
NOT_LEARNED = 0
"""The mode of tokens without loss, in data that does not name its learned modes."""


def learned_modes_of(
    indexed: IndexedDataset, masks_by_mode: bool | None
) -> NDArray[np.bool_] | None:
    """Which modes of an open dataset have a loss, bool [MODES]; None: all tokens have.

    masks_by_mode: `mask_loss_by_mode` of a config.
    """
    if masks_by_mode is False:
        return None
    return _table(indexed.prefix, indexed.multimodal, indexed.loss_modes, bool(masks_by_mode))


def learned_modes_by_manifest(
    name: str, manifest: Manifest, masks_by_mode: bool | None
) -> NDArray[np.bool_] | None:
    """The same for a dataset by its manifest; no index is read."""
    if masks_by_mode is False:
        return None
    multimodal = all(shard.multimodal for shard in manifest.shards)
    return _table(name, multimodal, manifest.learned_modes(name), bool(masks_by_mode))


def _table(
    name: str, multimodal: bool, named: tuple[int, ...] | None, is_required: bool
) -> NDArray[np.bool_] | None:
    """Which modes have a loss, [MODES], mode m at m - MIN_MODE; None: modes make no mask.

    named: the learned modes that the data names; None: it names none. is_required: data that names
    none has a mask too.
    """
    if named is None and not is_required:
        return None
    if not multimodal:
        raise ConfigError(
            f"{name}: has no modes to make a loss mask of (mask_loss_by_mode); "
            "convert it with --chat, or by KEY:MODE"
        )
    modes = np.arange(MIN_MODE, MIN_MODE + MODES)
    return modes != NOT_LEARNED if named is None else np.isin(modes, named)
