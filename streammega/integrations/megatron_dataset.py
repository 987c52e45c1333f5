"""Megatron's own builder, samplers and DataLoader over s3:// and oss://, by a class for it to build.

    from streammega.integrations.megatron_dataset import StreamGPTDataset

    BlendedMegatronDatasetBuilder(StreamGPTDataset, sizes, is_built_on_rank, config).build()

In place of Megatron's GPTDataset, with the same config, samples and blends. Each sample is read
when it is asked for: the provider for `--dataloader-type external` reads ahead, and less often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import Column, DataConfig, StorageConfig
from streammega.dataset import IndexedDataset
from streammega.errors import ConfigError
from streammega.integrations.frameworks import class_on_demand, import_framework
from streammega.integrations.megatron_arguments import field_settings, with_cache_folder
from streammega.samples.fields import Batch
from streammega.samples.gather import read_fields
from streammega.samples.gpt import GPTDataset


def samples_config(
    config: Any, prefix: str, storage: StorageConfig, columns: Any = ()
) -> DataConfig:
    """The DataConfig of a dataset of Megatron's GPTDatasetConfig. columns: as a DataConfig takes them.

    Raises ConfigError for mock data, which is not stored.
    """
    if config.mock:
        raise ConfigError(
            "the config is one of mock data, which needs no storage: use Megatron's own "
            "MockGPTDataset"
        )
    return DataConfig(
        blend=[prefix],
        order="megatron",
        seed=config.random_seed,
        sequence_length=config.sequence_length,
        add_extra_token=bool(config.add_extra_token_to_sequence),
        drop_last_partial_validation_sequence=bool(config.drop_last_partial_validation_sequence),
        storage=_with_cache_folder(storage, config),
        columns=columns,
        **field_settings(
            config,
            config.tokenizer,
            inter_document_masking=getattr(config, "inter_document_masking", False),
            create_attention_mask=config.create_attention_mask,
        ),
    )


def _with_cache_folder(storage: StorageConfig, config: Any) -> StorageConfig:
    """Indices and `.idx` files of buckets are kept where Megatron keeps one or the other."""
    return with_cache_folder(storage, config.path_to_cache or config.object_storage_cache_path)


class StreamGPTSamples:
    """Samples of one split of a dataset, as Megatron's GPTDataset gives them: `StreamGPTDataset` is
    this before Megatron's own base class.

    `dataset[k]` is {"tokens", "labels", "loss_mask", "position_ids"} [S] and what the config
    asks for; `dataset[None]` is padding for a batch, without loss. Anything of the data may be
    a URL; indices are built once per node, in `path_to_cache` of the config. To set how bytes
    are fetched, derive a class with a `storage` of its own; a `cache_dir` of it comes before
    `path_to_cache`, and no tokens are kept. `columns` of a class, as those of a DataConfig, are in each
    sample too.

    Args: Megatron's: the open data, its path, the split's sequences (None: all), samples asked
    (None: one epoch), the split, a GPTDatasetConfig. Raises ConfigError, StorageError,
    FormatError.
    """

    storage = StorageConfig()
    columns: Sequence[str] | Mapping[str, Column] = ()

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32] | None,
        num_samples: int | None,
        index_split: Any,
        config: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]  # Megatron's, behind this class
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        indexed = indexed_dataset
        if not isinstance(indexed, IndexedDataset):  # Megatron's own
            indexed = self.build_low_level_dataset(str(dataset_path), config)
        # What is cut as valid is named by `index_split`: Megatron's samplers would look at a
        # `split` before that, and take a text for no validation at all.
        self.samples = GPTDataset(
            indexed,
            indexed_indices,
            num_samples,
            samples_config(config, indexed.prefix, self.storage, self.columns),
            index_split.name,
        )
        # Built here, where Megatron has rank 0 go first, and not by every worker of a
        # DataLoader at its first sample.
        self.samples.index_files()

    @classmethod
    def build_low_level_dataset(cls, dataset_path: str, config: Any) -> IndexedDataset:
        """The open pair, or folder of pairs, of a prefix or URL."""
        storage = _with_cache_folder(cls.storage, config)
        return IndexedDataset(dataset_path, storage=storage, columns=[*cls.columns])

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Its sequences, by which it is split."""
        return len(low_level_dataset)

    @property
    def document_index(self) -> NDArray[np.int32]:
        """Sequence ids in shuffled order, all epochs, int32."""
        return self.samples.document_index

    @property
    def sample_index(self) -> NDArray[np.int32] | NDArray[np.int64]:
        """(position in document_index, token offset) where each row starts, [rows + 1, 2]."""
        return self.samples.sample_index

    @property
    def shuffle_index(self) -> NDArray[np.uint32] | NDArray[np.int64]:
        """Sample -> row of sample_index."""
        return self.samples.shuffle_index

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int | None) -> Batch:
        return self.samples[idx]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Samples of a batch, as a DataLoader asks for them where it can: fetched together."""
        numbers = np.array(indices, np.int64)
        for number in (numbers.min(initial=0), numbers.max(initial=0)):
            if not 0 <= number < len(self):
                raise IndexError(f"sample {number} of {len(self)} in {self.samples.split}")
        batch = read_fields(self.samples, numbers)
        rows = zip(*(field.unbind() for field in batch.values()), strict=True)
        return [dict(zip(batch, row, strict=True)) for row in rows]


__getattr__ = class_on_demand(
    "StreamGPTDataset",
    StreamGPTSamples,
    lambda: import_framework("megatron.core.datasets.megatron_dataset", "megatron").MegatronDataset,
)
