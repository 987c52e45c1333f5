"""Samples: token ids from their files, and the fields that training wants of them."""

from streammega.samples.blended import BlendedDataset
from streammega.samples.build import build_datasets
from streammega.samples.gpt import GPTDataset
from streammega.samples.open import locate
from streammega.samples.sft import SFTDataset

__all__ = ["BlendedDataset", "GPTDataset", "SFTDataset", "build_datasets", "locate"]
