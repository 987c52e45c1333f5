"""What one split of a config is made of.

Every order, and the trainer, decode blends and splits here.
"""

from __future__ import annotations

from dataclasses import dataclass

from streammega.config import DataConfig, parse_blend
from streammega.order.split import SPLITS, split_fractions


@dataclass(frozen=True, kw_only=True)
class SplitBlend:
    """The datasets of a split, and how they are cut.

    weights: None where the config gives none. shares: the split string by which every dataset is
    cut; with `blend_per_split`, the one that gives all of it to the split.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    shares: str


def split_blend(config: DataConfig, split: str) -> SplitBlend | None:
    """What a split reads: "train", "valid" or "test". None where the config gives it nothing.

    Raises ConfigError for a split string that means nothing.
    """
    number = SPLITS.index(split)
    blend = config.blend
    shares = config.split
    if blend is None:
        blend = (config.blend_per_split or ())[number]
        # such a dataset belongs to one split, and all of it does
        shares = ",".join("1" if name == split else "0" for name in SPLITS)
    if blend is None or not split_fractions(shares)[number] > 0:
        return None
    prefixes, weights = parse_blend(blend)
    return SplitBlend(prefixes=prefixes, weights=weights, shares=shares)
