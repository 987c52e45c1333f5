"""Batches from the order: the IterableDataset, the loader, prefetch and state."""

from streammega.kernels import first_call
from streammega.loading.dataset import StreamingDataset
from streammega.loading.loader import StreamLoader
from streammega.samples.megatron_samplers import MegatronBatchSampler

__all__ = ["MegatronBatchSampler", "StreamLoader", "StreamingDataset"]

first_call.begin()  # when all else is imported: it slows nothing down
