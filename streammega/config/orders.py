"""The orders of samples, and what each of them can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Order = Literal["megatron", "stream", "sequential"]


class OrderFeatures(NamedTuple):
    """What an order can do, and what it needs. All code asks for these, never for an order's name."""

    is_shuffled: bool
    """Whether its samples depend on the seed. Else those of a dataset follow each other in its files."""
    is_endless: bool
    """Whether its samples have no end where num_samples is not set."""
    needs_num_samples: bool
    """Whether other num_samples are another order. Then they must be set."""
    has_indices: bool
    """Whether it is built from the lengths of all sequences in the `.idx`. `streammega prepare` does
    that ahead, and inter_document_masking needs it.
    """
    has_lanes: bool
    """Whether shuffle_lanes of the config, or of a state, are part of the order."""
    has_phases: bool
    """Whether a run may change in phases, in which datasets go on where they were."""
    has_contiguous_ranks: bool
    """Whether a micro-batch of a rank is consecutive samples, as Megatron's sampler takes them. Else
    it is every dp_size-th sample, so that ranks own lanes.
    """
    omits_plain_fields: bool
    """Whether batches leave out loss_mask and position_ids by default, where every label has a loss
    and positions only count up.
    """


ORDERS: Mapping[Order, OrderFeatures] = {
    "megatron": OrderFeatures(
        is_shuffled=True,
        is_endless=False,
        needs_num_samples=True,
        has_indices=True,
        has_lanes=False,
        has_phases=False,
        has_contiguous_ranks=True,
        omits_plain_fields=False,
    ),
    "stream": OrderFeatures(
        is_shuffled=True,
        is_endless=True,
        needs_num_samples=False,
        has_indices=False,
        has_lanes=True,
        has_phases=True,
        has_contiguous_ranks=False,
        omits_plain_fields=True,
    ),
    "sequential": OrderFeatures(
        is_shuffled=False,
        is_endless=False,
        needs_num_samples=False,
        has_indices=True,
        has_lanes=False,
        has_phases=False,
        has_contiguous_ranks=False,
        omits_plain_fields=False,
    ),
}
"""One row an order. `samples/open.py` says how each is opened."""
