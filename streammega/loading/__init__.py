"""Batches from the order: the IterableDataset, the loader, prefetch and state."""

from streammega.loading.dataset import StreamingDataset
from streammega.loading.loader import StreamLoader
from streammega.samples.megatron_samplers import MegatronBatchSampler

__all__ = ["MegatronBatchSampler", "StreamLoader", "StreamingDataset"]
