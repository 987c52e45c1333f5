"""Batches from the order: the IterableDataset, the loader, prefetch and state."""

from streammega.loading.loader import StreamLoader
from streammega.loading.torch_dataset import StreamingDataset
from streammega.samples.samplers import MegatronBatchSampler

__all__ = ["MegatronBatchSampler", "StreamLoader", "StreamingDataset"]
