"""Train a language model straight from s3:// or oss://: Megatron's bytes and order, resumable to
the token.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streammega.config import Column as Column
    from streammega.config import DataConfig as DataConfig
    from streammega.config import FieldsConfig as FieldsConfig
    from streammega.config import PhaseConfig as PhaseConfig
    from streammega.config import StorageConfig as StorageConfig
    from streammega.dataset import IndexedDataset as IndexedDataset
    from streammega.dataset import IndexedDatasetWriter as IndexedDatasetWriter
    from streammega.errors import StreammegaError as StreammegaError
    from streammega.gradients.data_parallel import BucketedDataParallel as BucketedDataParallel
    from streammega.loading import MegatronBatchSampler as MegatronBatchSampler
    from streammega.loading import StreamingDataset as StreamingDataset
    from streammega.loading import StreamLoader as StreamLoader
    from streammega.loading.source_losses import add_losses_by_source as add_losses_by_source
    from streammega.parallel import ColumnWriter as ColumnWriter
    from streammega.parallel import RankBatches as RankBatches
    from streammega.parallel import Ranks as Ranks
    from streammega.parallel import device_mesh as device_mesh
    from streammega.parallel import get_batch as get_batch
    from streammega.parallel import open_loader as open_loader
    from streammega.parallel import open_together as open_together
    from streammega.parallel.layout import ParallelLayout as ParallelLayout
    from streammega.samples import BlendedDataset as BlendedDataset
    from streammega.samples import GPTDataset as GPTDataset
    from streammega.samples import SFTDataset as SFTDataset
    from streammega.samples import build_datasets as build_datasets
    from streammega.samples import locate as locate
    from streammega.samples.document_names import DocumentName as DocumentName
    from streammega.samples.fields import attention_mask as attention_mask
    from streammega.samples.fields import batch_fields as batch_fields
    from streammega.samples.fields import cu_seqlens as cu_seqlens
    from streammega.samples.fields import loss_mask as loss_mask
    from streammega.samples.fields import position_ids as position_ids
    from streammega.samples.pinned import write_manifest as write_manifest
    from streammega.samples.provenance import Provenance as Provenance
    from streammega.samples.segments import source_names as source_names
    from streammega.samples.usage import sample_usage as sample_usage

__version__ = "0.2.0"

# Loaded at first use: `import streammega` and the command line stay fast, and torch is not needed
# to convert.
_HOMES = {
    "Column": "streammega.config",
    "DataConfig": "streammega.config",
    "FieldsConfig": "streammega.config",
    "PhaseConfig": "streammega.config",
    "StorageConfig": "streammega.config",
    "StreammegaError": "streammega.errors",
    "IndexedDataset": "streammega.dataset",
    "IndexedDatasetWriter": "streammega.dataset",
    "ParallelLayout": "streammega.parallel.layout",
    "ColumnWriter": "streammega.parallel",
    "RankBatches": "streammega.parallel",
    "Ranks": "streammega.parallel",
    "device_mesh": "streammega.parallel",
    "get_batch": "streammega.parallel",
    "open_loader": "streammega.parallel",
    "open_together": "streammega.parallel",
    "BlendedDataset": "streammega.samples",
    "GPTDataset": "streammega.samples",
    "SFTDataset": "streammega.samples",
    "build_datasets": "streammega.samples",
    "locate": "streammega.samples",
    "attention_mask": "streammega.samples.fields",
    "batch_fields": "streammega.samples.fields",
    "cu_seqlens": "streammega.samples.fields",
    "loss_mask": "streammega.samples.fields",
    "position_ids": "streammega.samples.fields",
    "Provenance": "streammega.samples.provenance",
    "DocumentName": "streammega.samples.document_names",
    "sample_usage": "streammega.samples.usage",
    "source_names": "streammega.samples.segments",
    "write_manifest": "streammega.samples.pinned",
    "MegatronBatchSampler": "streammega.loading",
    "StreamingDataset": "streammega.loading",
    "StreamLoader": "streammega.loading",
    "add_losses_by_source": "streammega.loading.source_losses",
    "BucketedDataParallel": "streammega.gradients.data_parallel",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'streammega' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
