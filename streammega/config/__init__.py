"""Settings, checked once. Frozen and keyword-only; units in the name or beside it."""

from streammega.config.blends import MOST_DATASETS, Blend, parse_blend
from streammega.config.data import MOST_SAMPLES, DataConfig, Order
from streammega.config.fields import FieldsConfig
from streammega.config.follow import FollowConfig
from streammega.config.phases import PhaseConfig
from streammega.config.setting_checks import local_folder
from streammega.config.skips import SkippedList, SkippedNames
from streammega.config.storage import MiB, StorageConfig, Transport, load_storage

__all__ = [
    "MOST_DATASETS",
    "MOST_SAMPLES",
    "Blend",
    "DataConfig",
    "FieldsConfig",
    "FollowConfig",
    "MiB",
    "Order",
    "PhaseConfig",
    "SkippedList",
    "SkippedNames",
    "StorageConfig",
    "Transport",
    "load_storage",
    "local_folder",
    "parse_blend",
]
