"""Settings, checked once. Frozen and keyword-only, with units in the name or the docstring."""

from streammega.config.blends import MAX_DATASETS, Blend, parse_blend
from streammega.config.columns import Column
from streammega.config.data import MAX_SAMPLES, DataConfig, FieldsConfig
from streammega.config.orders import ORDERS, Order
from streammega.config.phases import ExcludedList, ExcludedNames, PhaseConfig, Segment
from streammega.config.storage import MiB, StorageConfig, Transport, load_storage
from streammega.config.validate import local_folder

__all__ = [
    "MAX_DATASETS",
    "MAX_SAMPLES",
    "ORDERS",
    "Blend",
    "Column",
    "DataConfig",
    "FieldsConfig",
    "MiB",
    "Order",
    "PhaseConfig",
    "Segment",
    "ExcludedList",
    "ExcludedNames",
    "StorageConfig",
    "Transport",
    "load_storage",
    "local_folder",
    "parse_blend",
]
