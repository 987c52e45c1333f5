"""The sizes of the example model, and how the ranks divide its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streammega.config.validate import check_fields
from streammega.errors import ConfigError
from streammega.parallel.layout import ORDER


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The example GPT."""

    vocab_size: int
    """Ids run below this; the data is checked against it."""
    dim: int = 192
    """Width."""
    layers: int = 4
    """Blocks."""
    heads: int = 6
    """Attention heads; they divide dim."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        smallest = min(self.vocab_size, self.dim, self.layers, self.heads)
        # Twice: rotary embeddings turn pairs of the elements of a head.
        if smallest < 1 or self.dim % (2 * self.heads) != 0:
            raise ConfigError(
                f"model: dim {self.dim} must be a multiple of 2 x heads ({self.heads}), "
                f"and all sizes positive"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks divide the work; data parallelism is what the sizes leave of the world."""

    tp: int = 1
    """Tensor parallel: every layer is split over so many ranks."""
    cp: int = 1
    """Context parallel: every sequence is."""
    pp: int = 1
    """Pipeline parallel: the layers are."""
    virtual_stages: int = 1
    """Stretches of layers of each pipeline rank; more than one: the interleaved schedule."""
    order: str = ORDER
    """Which kind of parallelism numbers the ranks fastest."""
    data_parallel: Literal["buckets", "torch"] = "buckets"
    """Gradients by BucketedDataParallel, or by torch's DistributedDataParallel (tp = pp = 1)."""
    optimizer: Literal["replicated", "sharded", "zero"] = "replicated"
    """State on every rank; sharded: parameters, gradients and state divided by torch's fully_shard;
    zero: state divided by ZeroRedundancyOptimizer (with data_parallel = "torch").
    """
    bucket_size: int | None = None
    """Elements of a gradient bucket; default max(40M, 1M x ranks). Not of optimizer = "sharded",
    which has one for each layer.
    """
    sequence_parallel: bool = True
    """With tp: between the split layers each rank keeps and norms a tp-th of its tokens, which tp
    divides; losses are equal.
    """

    def __post_init__(self) -> None:
        check_fields(self, "parallel.")
        without_pipeline = self.pp == 1
        if self.virtual_stages < 1 or (self.virtual_stages > 1 and without_pipeline):
            raise ConfigError(
                f"parallel.virtual_stages is {self.virtual_stages}; "
                f"more than one needs parallel.pp of two or more"
            )
        by_torch = self.data_parallel == "torch"
        splits_the_model = self.tp > 1 or self.pp > 1
        if by_torch and (splits_the_model or self.optimizer == "sharded"):
            raise ConfigError(
                "parallel.data_parallel = torch goes with tp = pp = 1 "
                "and a replicated or zero optimizer"
            )
        if self.optimizer == "zero" and not by_torch:
            raise ConfigError(
                "parallel.optimizer = zero goes with parallel.data_parallel = torch; "
                "with buckets take sharded"
            )
