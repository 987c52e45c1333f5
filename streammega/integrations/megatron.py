"""Megatron-LM trains from s3:// and oss:// through this provider, by `--dataloader-type external`.

    from streammega.integrations.megatron import train_valid_test_datasets_provider

    pretrain(train_valid_test_datasets_provider, ...)

Everything is taken from Megatron's own arguments: data paths, split, seed, sizes, fields, ranks and
consumed samples, so its checkpoints need nothing of ours and go on with any data-parallel size. By
default each micro-batch is the one that Megatron's own datasets and sampler give, bit for bit;
`datasets_provider(order="stream")` shuffles for object storage instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from streammega.config import ORDERS, DataConfig, Order, StorageConfig, parse_blend
from streammega.config.columns import refuse_columns
from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property
from streammega.integrations.frameworks import check_phases, import_framework, with_used_fields
from streammega.integrations.megatron_arguments import data_config, refuse_arguments
from streammega.loading import StreamLoader
from streammega.loading.ranks import data_parallel
from streammega.order.split import SPLITS
from streammega.order.stream_order import default_lanes
from streammega.samples.fields import Batch
from streammega.samples.gather import read_fields
from streammega.samples.open import open_source
from streammega.samples.segments import has_data
from streammega.samples.source import SampleSource

BATCH_FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "max_seqlen",
    "dataset_id",
)
"""What Megatron reads of a batch: it needs the first four in any case; the last is for one's own steps."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The data-parallel rank of a process, and whether the process reads.

    Megatron reads on tensor-parallel rank 0 of the first and the last pipeline stage, and with
    inter-document masking of every stage. On other ranks nothing is opened before the first `next`.
    """

    dp_rank: int
    dp_size: int
    reads: bool = True


class SplitBatches(Iterator[Batch]):
    """Micro-batches of one split for one rank, from a consumed sample on.

    Each is {"tokens", "labels", "position_ids"} int64 and "loss_mask" float32, [micro_batch_size,
    S], and "attention_mask", or "cu_seqlens" int32 [micro_batch_size, S + 1] and "max_seqlen" int32
    [micro_batch_size], where Megatron's arguments ask for it; a dict of its own, which may be
    written to. After the last whole micro-step of all ranks: StopIteration.

    Nothing is opened before the first batch, or `open`.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        split: str,
        micro_batch_size: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        consumed_samples: int = 0,
        **options: Any,
    ) -> None:
        dp_rank, dp_size = data_parallel(dp_rank, dp_size)
        refuse_columns(config, "Megatron sends its own fields alone from rank to rank")
        self._config = with_used_fields(config, BATCH_FIELDS)
        self._consumed = consumed_samples
        self._loader: StreamLoader | None = None
        self.split = split
        # One micro-step is a global batch to the loader: how many make a step, and how that number
        # grows, is Megatron's own affair, and its consumed samples are all there is to a position.
        self._options = {
            "split": split,
            "micro_batch_size": micro_batch_size,
            "global_batch_size": micro_batch_size * dp_size,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "evaluation": False,
            **options,
        }

    def open(self) -> StreamLoader:
        """The loader, opened if it was not. Raises what a StreamLoader raises."""
        if self._loader is None:
            loader = StreamLoader(self._config, **self._options)
            loader.seek(self._consumed)
            self._loader = loader
        return self._loader

    def __copy__(self) -> Self:
        """As deepcopy: with a position of its own."""
        return copy.deepcopy(self)

    def __next__(self) -> Batch:
        batch = self.open().take()
        if not self._config.inter_document_masking:
            # Ours goes by eod_id; Megatron takes a field of this name for its own form.
            batch.pop("cu_seqlens", None)
        return batch

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks, those before this run included."""
        return self._consumed if self._loader is None else self._loader.consumed_samples

    def seek(self, consumed_samples: int) -> None:
        """Go on at a sample, counted over all ranks. Raises StateError outside of the data."""
        if self._loader is None:
            self._consumed = consumed_samples
        else:
            self._loader.seek(consumed_samples)

    def close(self) -> None:
        """End reading and its threads. `next` opens everything again, where it was."""
        if self._loader is not None:
            self._consumed = self._loader.consumed_samples
            self._loader.close()
            self._loader = None


class MegatronBatches(SplitBatches):
    """What Megatron-LM calls `next` on. It keeps the position too, with `--dataloader-save`."""

    def save_state(self) -> dict[str, Any]:
        """The position, which Megatron keeps with `--dataloader-save`. Its own consumed samples are
        what a resume goes by; the identity of the order is in here too.
        """
        return self.open().state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a saved state. Raises StateError where it counts in another
        order.
        """
        self.open().load_state_dict(state)


class FullValidation:
    """Every sample of valid once for each iteration, one by one: rank r gets samples r, r + dp_size,
    and so on, as by Megatron's own sampler for --full-validation.

    Ranks may differ in length by one.
    """

    def __init__(self, config: DataConfig, *, dp_rank: int, dp_size: int, **options: Any) -> None:
        self._config = config
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._batches = MegatronBatches(
            config,
            split="valid",
            micro_batch_size=1,
            dp_rank=dp_rank,
            dp_size=dp_size,
            **options,
        )

    def open(self) -> None:
        """Open the files, if they were not."""
        _ = self._samples

    def __len__(self) -> int:
        return len(range(self._dp_rank, self._total, self._dp_size))

    def __iter__(self) -> Iterator[Batch]:
        whole_rounds = self._total // self._dp_size
        if whole_rounds:  # a loader has no less than one sample for each rank
            self._batches.open().seek(0)
        for _ in range(whole_rounds):
            yield next(self._batches)
        last = whole_rounds * self._dp_size + self._dp_rank
        if last < self._total:  # the ranks before the end of a round that not all take part in
            # The fields of a batch of one sample, as `next` gives them: without `bounds` there is no
            # cu_seqlens by eod_id either.
            yield read_fields(self._samples.segment_at(last), np.array([last]))

    @cached_property
    def _samples(self) -> SampleSource:
        return open_source(self._config, "valid", self._dp_size)

    @property
    def _total(self) -> int:
        total = self._samples.num_samples
        assert total is not None  # one epoch, in every order that is used here
        return total

    def close(self) -> None:
        """End reading and its threads."""
        self._batches.close()


Valid = MegatronBatches | FullValidation
Datasets = tuple[MegatronBatches | None, Valid | list[Valid] | None, MegatronBatches | None]


def datasets_provider(
    *,
    order: Order = "megatron",
    storage: StorageConfig | None = None,
    prefetch: int = 4,
    **settings: Any,
) -> Callable[..., Datasets]:
    """A provider for Megatron's `pretrain`, with what its command line has no arguments for.

    order: "megatron", Megatron's own samples, or "stream", shuffled for object storage. storage: how
    bytes are fetched. prefetch: micro-batches made ahead of the step. settings: fields of a DataConfig
    that Megatron has no argument for; ConfigError names the argument of others. The default of
    shuffle_lanes goes by --global-batch-size: set it if that size will change.
    """
    refuse_arguments(settings)

    def provider(train_val_test_num_samples: Any, vp_stage: int | None = None) -> Datasets:
        """What Megatron calls, for each chunk of a virtual pipeline by the name `vp_stage`."""
        args = import_framework("megatron.training", "megatron").get_args()
        every_stage = getattr(args, "dataloader_inter_document_masking", False)
        return datasets_of(
            args,
            _tokenizer(),
            train_val_test_num_samples,
            place=_place(vp_stage, every_stage=every_stage),
            prefetch=prefetch,
            storage=storage,
            order=order,
            **settings,
        )

    # Megatron calls it on every rank then, and leaves it to it which of them read.
    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


train_valid_test_datasets_provider = datasets_provider()
"""The provider of Megatron's own order: see the top of this module."""


def datasets_of(
    args: Any,
    tokenizer: Any,
    num_samples: Any,
    *,
    place: Place,
    prefetch: int = 4,
    storage: StorageConfig | None = None,
    **settings: Any,
) -> Datasets:
    """Train, valid and test of parsed arguments, for one process; None where a split has no share,
    or nothing is asked of it.

    num_samples: (train, valid, test), None for valid under --full-validation. settings: as of
    `datasets_provider`. With --multiple-validation-sets valid is a list. Raises ConfigError for
    arguments that are not served; StorageError and FormatError for the files, on ranks that read.
    """
    _check(args)
    storage = storage or StorageConfig()
    config = data_config(args, tokenizer, num_samples, storage=storage, **settings)
    check_phases(config, "Megatron", None, one_length=True)
    transitions = getattr(args, "phase_transition_iterations", None)
    if transitions and ORDERS[config.order].has_phases:
        raise ConfigError(
            "--phase-transition-iterations counts samples from the beginning of a phase, so the "
            f'{config.order} order would restart there; use order="megatron", or leave it out'
        )
    rank_options: dict[str, Any] = {
        "dp_rank": place.dp_rank,
        "dp_size": place.dp_size,
        "prefetch": prefetch,
    }

    def batches(split: str) -> MegatronBatches | None:
        """The batches of a split, if samples of it are asked; else None."""
        if not has_data(config, split) or not num_samples[SPLITS.index(split)]:
            return None
        return MegatronBatches(
            _in_lanes(config, _batch_size(args, "global", split)),
            split=split,
            micro_batch_size=_batch_size(args, "micro", split),
            consumed_samples=_consumed_samples(args, split),
            **rank_options,
        )

    train = None if getattr(args, "skip_train", False) else batches("train")
    valid: Valid | list[Valid] | None
    if config.full_validation:
        sets: list[Valid] = [
            FullValidation(one, **rank_options) for one in _validation_sets(args, config)
        ]
        valid = sets if getattr(args, "multiple_validation_sets", False) else next(iter(sets), None)
    else:
        valid = batches("valid")
    test = batches("test")
    if place.reads:
        for opened in (train, *(valid if isinstance(valid, list) else [valid]), test):
            if opened is not None:
                opened.open()
    return train, valid, test


def _check(args: Any) -> None:
    """Raise ConfigError for arguments under which other samples than asked would be read."""
    if args.dataloader_type != "external":
        raise ConfigError(
            f"--dataloader-type is {args.dataloader_type}; micro-batches come ready from here: pass "
            f"--dataloader-type external"
        )
    full = getattr(args, "full_validation", False)
    if full and not hasattr(args, "eval_micro_batch_size"):
        raise ConfigError(
            "--full-validation is served for Megatron 0.18 and newer, which read one sample at a time; "
            "leave it out, or update Megatron"
        )
    if getattr(args, "multiple_validation_sets", False) and not full:
        raise ConfigError("--multiple-validation-sets needs --full-validation, in Megatron too")


def _validation_sets(args: Any, config: DataConfig) -> list[DataConfig]:
    """What is gone through whole, each dataset by itself where there are several sets."""
    if not has_data(config, "valid"):
        return []
    if ORDERS[config.order].is_endless:  # all samples once are the same in any order
        config = replace(config, order="sequential", phases=())  # which are of training alone
    if not getattr(args, "multiple_validation_sets", False):
        return [config]
    if config.blend_per_split is None:
        raise ConfigError("--multiple-validation-sets needs --valid-data-path, which names them")
    prefixes, _ = parse_blend(config.blend_per_split[SPLITS.index("valid")] or ())
    return [replace(config, blend_per_split=[None, [prefix], None]) for prefix in prefixes]


def _batch_size(args: Any, kind: str, split: str) -> int:
    """The "micro" or "global" batch: those of evaluation are arguments of their own from core 0.18 on."""
    size: int = getattr(args, f"{kind}_batch_size")
    return size if split == "train" else getattr(args, f"eval_{kind}_batch_size", None) or size


def _consumed_samples(args: Any, split: str) -> int:
    """The sample at which a split goes on. Megatron counts train and valid, and keeps both counts in
    its checkpoints; test begins at its first sample.
    """
    if split == "train":
        transitions = getattr(args, "phase_transition_iterations", None)
        if not transitions:
            return int(args.consumed_train_samples)
        phase_start = max(start for start in (0, *transitions) if start <= args.iteration)
        return int((args.iteration - phase_start) * args.global_batch_size)
    if split == "valid" and not getattr(args, "skip_train", False):
        return int(args.consumed_valid_samples)
    return 0


def _in_lanes(config: DataConfig, global_batch_size: int) -> DataConfig:
    """The config with lanes that do not depend on the ranks, whose number may change."""
    if not ORDERS[config.order].has_lanes or config.shuffle_lanes is not None:
        return config
    lanes = default_lanes(global_batch_size, config.shuffle_block_bytes)
    return replace(config, shuffle_lanes=lanes)


def _place(vp_stage: int | None, *, every_stage: bool) -> Place:
    """The place of this process, and of this chunk of a virtual pipeline. every_stage: bounds of
    documents are read by the stages between the first and the last as well.
    """
    from megatron.core import mpu

    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return Place(
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        reads=mpu.get_tensor_model_parallel_rank() == 0 and (first or last or every_stage),
    )


def _tokenizer() -> Any:
    """Megatron's tokenizer, whose end-of-document and padding ids make the fields."""
    try:
        from megatron.training import get_tokenizer
    except ImportError:  # not among the names of the package itself in every version
        from megatron.training.global_vars import get_tokenizer
    return get_tokenizer()
