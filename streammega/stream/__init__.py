"""Batches from the order: the IterableDataset, the loader, prefetch and state."""

from streammega.stream.dataset import StreamingDataset
from streammega.stream.loader import StreamLoader
from streammega.stream.samplers import MegatronBatchSampler

__all__ = ["MegatronBatchSampler", "StreamLoader", "StreamingDataset"]
