"""Settings, checked once. Frozen and keyword-only; units in the name or beside it."""

from __future__ import annotations

import math
import numbers
import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls, redacted_repr

Transport = Literal["auto", "obstore", "fsspec"]

MiB = 1 << 20
STORAGE_LEAST = {
    "part_bytes": 4096,
    "max_requests": 1,
    "in_flight_bytes": 4096,
    "memory_bytes": 4096,
    "coalesce_bytes": 0,
    "cache_bytes": 0,
    "chunk_bytes": MiB,
    "retries": 0,
    "upload_part_bytes": 5 * MiB,
}
"""The least that fields of StorageConfig may be; of parts of an upload it is S3's own."""


def set_whole_numbers(settings: Any, names: Sequence[str]) -> None:
    """Have fields be plain ints, whatever kind of whole number was given: states are JSON.

    Raises ConfigError for others.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None:
            continue
        try:
            # the way to set a field of what is frozen
            object.__setattr__(settings, name, operator.index(value))
        except TypeError:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number") from None


def local_folder(path: str | Path) -> Path:
    """A folder that somebody named, `~` being their home."""
    return Path(os.path.expanduser(path))  # which leaves the home of an unknown user as it is


def _folder(name: str, path: str | Path) -> Path:
    """The folder that a setting names. Raises ConfigError for what is no path."""
    try:
        return local_folder(path)
    except TypeError:
        raise ConfigError(f"{name} is {path!r}; it must be the path of a folder") from None


def _check_number(name: str, value: Any) -> None:
    """Raise ConfigError where a setting is text, say, which compares with no number."""
    if not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} is {value!r}; it must be a number")


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """How bytes are fetched. Nothing here changes what is read, only how fast and from where."""

    transport: Transport = "auto"
    """`auto` takes obstore for s3, oss, gs, az and http(s), fsspec for every other scheme; for oss,
    `fsspec` is oss2.
    """
    local: Literal["mmap", "pread"] = "mmap"
    """How local files are read: mapped, or by reads, whose I/O errors (of NFS, of FUSE) are tried
    again, and end no process.
    """
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Credentials, endpoint and so on, as fsspec takes them (`key`, `secret`, `endpoint_url`,
    `anon`, ...): docs/storage.md.
    """
    part_bytes: int = 8 * MiB
    """Largest single range request."""
    max_requests: int = 384
    """Range requests in flight at once: what many small reads need."""
    in_flight_bytes: int = 96 * MiB
    """Bytes of range requests in flight at once: what few large reads need."""
    memory_bytes: int = 1024 * MiB
    """Bytes a loader may hold of what it fetched ahead; what is in flight counts. Too few for the
    open pieces of the stream order make it several times slower, and a warning says how many would
    do.
    """
    coalesce_bytes: int = 64 * 1024
    """Ranges with at most this gap between them are fetched as one, while at most a seventh more is
    fetched than is used.
    """
    cache_dir: str | Path | None = None
    """A folder on a local disk that keeps what was fetched, for all processes and runs of this
    node; None: no cache.
    """
    cache_bytes: int = 64 * 1024 * MiB
    """Largest size of everything in `cache_dir`.

    The larger of 1 GiB and 1 % of its disk stays free; of a small one, a tenth.
    """
    chunk_bytes: int = 256 * MiB
    """Bytes of an object that are one file of the cache."""
    timeout: float = 60.0
    """Seconds one request may take."""
    stall_timeout: float = 10.0
    """Seconds without a single byte after which a request is given up and tried again."""
    upload_part_bytes: int = 32 * MiB
    """Bytes of one part of an upload by obstore, which holds seven in memory. Stores take 10,000
    parts: this times as much is the largest object. Conversions raise it by themselves where a
    shard will be larger.
    """
    give_up_after: float = 600.0
    """Seconds for which a request that fails for a passing reason (503, 429, refused, reset, no
    answer, name not found) is tried again, with pauses that grow to 10 seconds, before its error is
    raised. Other errors are raised at once.
    """
    first_answer_within: float = 30.0
    """Seconds after which an endpoint that has never answered this process is given up, if that is
    less than `give_up_after`: a mistyped name is no outage. Any answer counts, of any bucket of the
    endpoint; spawned workers know of their parent's.
    """
    retries: int | None = None
    """Times a failed request is tried again at most; None: as often as `give_up_after` allows."""
    hedge: bool = True
    """Send a second request for one that takes far longer than others did."""

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "obstore", "fsspec"):
            raise ConfigError(
                f"transport is {self.transport!r}; it must be 'auto', 'obstore' or 'fsspec'"
            )
        if self.local not in ("mmap", "pread"):
            raise ConfigError(f"local is {self.local!r}; it must be 'mmap' or 'pread'")
        for name, least in STORAGE_LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            _check_number(name, value)
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        for name in ("timeout", "stall_timeout", "give_up_after", "first_answer_within"):
            seconds = getattr(self, name)
            _check_number(name, seconds)
            if not seconds > 0:  # NaN is not, and is not less either
                raise ConfigError(f"{name} is {seconds}; it must be a positive number of seconds")
        if self.cache_dir:
            # the way to set a field of what is frozen
            object.__setattr__(self, "cache_dir", _folder("cache_dir", self.cache_dir))


Order = Literal["megatron", "stream", "sequential"]
Blend = str | Sequence[str] | Sequence[tuple[str, float]]
SkippedNames = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Names of documents: a file of them, one a line; a list; or either for each of some datasets."""
ORDERS = ("megatron", "stream", "sequential")
SEAMS = ("joined", "masked", "apart")
MOST_DATASETS = 32766
"""Of a blend: which dataset a sample is of is an int16, as in Megatron's index."""
MOST_SAMPLES = 1 << 50
"""Of a split: far more than any run has, and few enough for all that is counted of them to be
int64.
"""


@dataclass(frozen=True, kw_only=True)
class FieldsConfig:
    """Which fields are made of the ids of a sample: what `batch_fields` needs of a DataConfig, for
    ids from elsewhere.
    """

    sequence_length: int
    """Tokens of a sample, S."""
    eod_id: int | None = None
    """The id that ends documents."""
    pad_id: int | None = None
    """The tokenizer's padding id; None: there is none."""
    allow_ambiguous_pad_tokens: bool = False
    """Accept a pad_id that equals eod_id; otherwise such a pad_id is ignored."""
    eod_mask_loss: bool = False
    """No loss where the token is eod_id."""
    reset_position_ids: bool = False
    """Positions restart after every eod_id."""
    reset_attention_mask: bool = False
    """Tokens do not attend over an eod_id: the loader adds "cu_seqlens", and an attention mask that
    is made says so.
    """
    create_attention_mask: bool = False
    """Add "attention_mask", bool [batch, 1, S, S], True where attention is forbidden."""
    vocab_size: int | None = None
    """When given, a token id at or past it is an error."""

    def __post_init__(self) -> None:
        set_whole_numbers(self, ("sequence_length", "eod_id", "pad_id", "vocab_size"))
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length is {self.sequence_length}; it must be at least 1")
        if self.eod_id is not None and self.eod_id < 0:
            raise ConfigError(
                f"eod_id is {self.eod_id}, which no stored id is; leave it out if the data has none"
            )
        asks_for_documents = (
            self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask
        )
        if asks_for_documents and self.eod_id is None:
            raise ConfigError(
                "eod_mask_loss, reset_position_ids and reset_attention_mask need eod_id, "
                "the id that ends documents"
            )

    @property
    def effective_pad_id(self) -> int:
        """The padding id in use: -1 when there is none, or when it collides with eod_id and that is
        not allowed.
        """
        if self.pad_id is None:
            return -1
        if self.pad_id == self.eod_id and not self.allow_ambiguous_pad_tokens:
            # ends of documents would be masked and zeroed as padding
            return -1
        return self.pad_id


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What holds from a sample of the stream on; what is not given stays as in the phase before."""

    first_sample: int = 0
    """The global sample it begins at: the end of a step of the phase before. Or first_step or
    first_token says it.
    """
    first_step: int | None = None
    """Its first step, counted from 1 as in metrics.jsonl: over the batch sizes of the config from
    sample 0 on, its ramp-up and its skips.
    """
    first_token: int | None = None
    """How many tokens the samples before it have, skipped ones too; a step must end there."""
    blend: Blend | None = None
    """Datasets and weights of training, in any form of `blend`. One that stays goes on where it
    was, and so does one that comes back; one that is new begins its first epoch.
    """
    global_batch_size: int | None = None
    """Samples of one optimizer step over all ranks."""
    sequence_length: int | None = None
    """Tokens of a sample. What epochs in progress have left is cut anew, so that nothing is lost."""
    lanes: int | None = None
    """Lanes, a multiple of the global batch. As of `sequence_length`."""
    restart: Sequence[str] = ()
    """Prefixes of the blend that begin a new epoch here. What is left of the one before is passed
    over.
    """
    skip_documents: SkippedNames = ()
    """Documents that are not seen from this phase on, beside those of the phases before it: as
    `skip_documents` of the run.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        sizes = ("global_batch_size", "sequence_length", "lanes")
        set_whole_numbers(self, ("first_sample", "first_step", "first_token", *sizes))
        self._check_start()
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of a phase is {value}; it must be at least 1")
        if self.blend is not None:
            parse_blend(self.blend)
        if isinstance(self.restart, str):
            raise ConfigError(f"restart is {self.restart!r}; it must be a list of prefixes")
        _skipped_names(self.skip_documents, self.first_sample)

    @property
    def is_in_samples(self) -> bool:
        """Whether it is told by its first sample, rather than by a step or token."""
        return self.first_step is None and self.first_token is None

    def _check_start(self) -> None:
        starts = {"first_step": (self.first_step, 2), "first_token": (self.first_token, 1)}
        # 0 stands for one that is left out, where another says it
        if self.first_sample or self.is_in_samples:
            starts["first_sample"] = (self.first_sample, 1)
        told = {name: start for name, start in starts.items() if start[0] is not None}
        if len(told) > 1:
            raise ConfigError(f"a phase says {' and '.join(told)}; it begins at one of them")
        for name, (value, least) in told.items():
            if value is not None and value < least:
                raise ConfigError(
                    f"{name} of a phase is {value}; it must be at least {least} (a phase begins at a "
                    "first_sample, a first_step or a first_token)"
                )


@dataclass(frozen=True, kw_only=True)
class FollowConfig:
    """Take in by itself what is appended to datasets that the blend names by a version (`web@7`)."""

    every_samples: int
    """Newer versions are looked for at each multiple of so many samples of training, or where the
    step ends that holds it. What they have more joins there, in a phase.
    """
    record: str | None = None
    """A folder, path or URL, of small files that say what joined at which sample. Every rank,
    worker and resume of the run goes by them: all must see it, and it must keep conditional writes.
    None: `follow` in train.out_dir, in runs of streammega.train.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        set_whole_numbers(self, ("every_samples",))
        if self.every_samples < 1:
            raise ConfigError(
                f"follow.every_samples is {self.every_samples}; it must be at least 1"
            )
        if self.record is not None:
            try:
                object.__setattr__(self, "record", os.fspath(self.record).rstrip("/"))
            except TypeError:
                raise ConfigError(
                    f"follow.record is {self.record!r}; it must be the path or URL of a folder"
                ) from None
            if not self.record:
                raise ConfigError(
                    "follow.record is empty; name a folder of the run's own, path or URL"
                )


@dataclass(frozen=True, kw_only=True)
class DataConfig(FieldsConfig):
    """What is read, and in which order."""

    blend: Blend | None = None
    """Datasets: a prefix, [prefix, ...], [(prefix, weight), ...], or a string "0.3 a 0.7 b".

    Paths or URLs.
    """
    blend_per_split: Sequence[Blend | None] | None = None
    """Instead of `blend` and `split`: a blend for train, valid and test each; None where there is
    none.
    """
    blend_schedule: Sequence[tuple[int, Sequence[float]]] | None = None
    """Stream order: [(first sample, weights)], weights for the datasets of `blend` from then on;
    one may be zero for a while. A segment at 0 replaces the blend's own weights. Segments past the
    cursor of a run may still be changed.
    """
    phases: Sequence[PhaseConfig] = ()
    """What changes in the middle of training, in the order of `first_sample`; what stands above is
    the first phase. In the stream order phases past the cursor of a run may still be changed, and
    more be appended; in the Megatron order each is a run of its own, as Megatron's phase
    transitions make it: docs/orders.md.
    """
    follow: FollowConfig | None = None
    """Stream order: take in what is appended to the datasets while the run trains."""
    split: str = "1,0,0"
    """Shares of train, valid and test, cut by sequence."""
    seed: int = 1234
    """Of the order, in [0, 2**32)."""
    order: Order = "megatron"
    """`megatron`: Megatron's shuffle, bit for bit.

    `stream`: shuffled for object storage. `sequential`: as files lie.
    """
    inter_document_masking: bool = False
    """Tokens do not attend over the bounds of sequences in the `.idx`, whatever ids stand there, in
    Megatron's form: batches have "cu_seqlens", int32 [batch, S + 1], filled up with S, and
    "max_seqlen", int32 [batch]; positions restart at every bound. Not in the stream order.
    """
    dataset_ids: bool = False
    """Add "dataset_id", int64 [batch]: which dataset each sample is of, by its place in the blend; over
    phases, in the order in which they first appear. For losses by source: SourceLosses.
    """
    num_samples: tuple[int, int, int] | None = None
    """Samples asked of train, valid and test; they define the Megatron order, epochs included."""
    add_extra_token: bool = True
    """Samples carry S + 1 tokens, so that every position has a label."""
    drop_last_partial_validation_sequence: bool = True
    """Drop the last, partial sample of valid (train and test always do)."""
    full_validation: bool = False
    """Valid is one epoch of everything, whatever num_samples says."""
    loss_from_modes: bool | None = None
    """Loss only where the label lies in a sequence whose mode is learned. None: in datasets whose
    manifest names such modes (that of `convert --chat` does); True: in every dataset, those without
    such a manifest learning all modes but 0; False: never.
    """
    mix_tokenizers: bool = False
    """Blend datasets whose manifests name different tokenizers, whose ids mean different things;
    else that is an error.
    """
    multiple_validation_sets: bool = False
    """With blend_per_split: every prefix of valid is a dataset of its own, not blended."""
    surplus: float = 0.005
    """Megatron order: share by which a blend asks its datasets for more samples than it will
    take.
    """
    lanes: int | None = None
    """Stream order: lanes, a multiple of the global batch; default the smallest of at least 1024,
    kept in the state.
    """
    block_bytes: int = MiB // 4
    """Stream order: bytes that are shuffled as one."""
    skip_samples: Sequence[tuple[int, int]] = ()
    """Ranges [start, stop) of global sample ids to pass over: whole global batches."""
    skip_documents: SkippedNames | Sequence[tuple[int, SkippedNames]] = ()
    """Documents that training does not see: eod_id stands for each of their tokens, and there is no
    loss on it. The path of a file of names, one a line; a list of names; either by dataset, as
    {prefix: names}; or several of these, each from a sample on, as [(first sample, names)]. A name
    is PREFIX#NUMBER of a dataset or shard, or what convert kept by --origins: an id, or FILE:LINE.
    Lists that begin past the cursor of a run may still be changed: docs/orders.md.
    """
    seams: Literal["joined", "masked", "apart"] = "joined"
    """Stream order: what becomes of the seams in samples that join several runs of tokens, as some do
    after a phase has changed their length. `joined`: nothing; `masked`: no loss on the label over a
    seam; `apart`: moreover a document ends there, for reset_attention_mask and reset_position_ids, one
    of which must be set. Those in every batch: StreamingDataset.seams.
    """
    balance_batches: bool = False
    """Deal the samples of a global batch out to ranks and micro-batches so that attention over
    their documents costs all the same, by the lengths in the `.idx`; for configs with
    reset_attention_mask or inter_document_masking. Global batches stay the same sets.
    """
    index_cache_dir: str | Path | None = None
    """Where `.idx` copies and built indices go; default ~/.cache/streammega."""
    shared_index_url: str | None = None
    """A folder, beside the data for instance, that `streammega prepare` fills with built indices
    for nodes to download.
    """
    storage: StorageConfig = field(default_factory=StorageConfig)
    """How its bytes are fetched."""

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        if (self.blend is None) == (self.blend_per_split is None):
            raise ConfigError("give either blend or blend_per_split, and not both")
        if self.blend_per_split is not None and len(self.blend_per_split) != 3:
            raise ConfigError(
                f"blend_per_split has {len(self.blend_per_split)} entries; "
                f"it takes three: train, valid, test"
            )
        for blend in (self.blend, *(self.blend_per_split or ())):
            if blend is not None:
                parse_blend(blend)
        super().__post_init__()
        self._check_numbers()
        if self.multiple_validation_sets and self.blend_per_split is None:
            raise ConfigError(
                "multiple_validation_sets needs blend_per_split, whose valid entry names them"
            )
        if self.inter_document_masking:
            self._check_masking()
        if self.balance_batches and not self.documents_are_apart:
            raise ConfigError(
                "balance_batches goes by the lengths of documents that do not see each other; set "
                "reset_attention_mask or inter_document_masking, without which all samples cost "
                "the same"
            )
        self._check_skipped()
        if self.blend_schedule is not None:
            self._check_schedule()
        if self.phases:
            self._check_phases()
        if self.follow is not None:
            self._check_follow()
        self._check_skipped_documents()
        if self.index_cache_dir:
            folder = _folder("index_cache_dir", self.index_cache_dir)
            object.__setattr__(self, "index_cache_dir", folder)

    @property
    def documents_are_apart(self) -> bool:
        """Whether batches say where documents begin, so that attention does not pass their
        bounds.
        """
        return self.reset_attention_mask or self.inter_document_masking

    def follows(self, split: str) -> bool:
        """Whether a split takes in what is appended: training alone does."""
        return self.follow is not None and split == "train"

    def phases_of(self, split: str) -> Sequence[PhaseConfig]:
        """The later phases of a split: training alone has any, so that validation stays the same."""
        return self.phases if split == "train" else ()

    def skips_of(self, split: str) -> list[SkippedList]:
        """The documents that a split does not see. Those of training alone: validation stays the
        same.
        """
        if split != "train":
            return []
        lists = _skipped_lists(self.skip_documents)
        for phase in self.phases:
            lists += _skipped_names(phase.skip_documents, phase.first_sample)
        return lists

    def lengths_of(self, split: str) -> set[int]:
        """Tokens of a sample, over all phases of a split."""
        lengths = [phase.sequence_length for phase in self.phases_of(split)]
        return {self.sequence_length, *(length for length in lengths if length is not None)}

    def length_starts(self, split: str) -> list[tuple[int, int]]:
        """(first sample, tokens of a sample) of each phase of a split."""
        starts = [(0, self.sequence_length)]
        for phase in self.phases_of(split):
            _, length_before = starts[-1]
            starts.append((phase.first_sample, phase.sequence_length or length_before))
        return starts

    def batch_changes(self, split: str) -> list[tuple[int, int | None]]:
        """(first sample, global batch size or None) of each later phase of a split."""
        phases = self.phases_of(split)
        return [(phase.first_sample, phase.global_batch_size) for phase in phases]

    def _check_numbers(self) -> None:
        set_whole_numbers(self, ("seed", "lanes", "block_bytes"))
        for name in ("block_bytes", "lanes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; it must lie in [0, 2**32)")
        if self.order not in ORDERS:
            raise ConfigError(
                f"order is {self.order!r}; it must be 'megatron', 'stream' or 'sequential'"
            )
        if self.seams not in SEAMS:
            raise ConfigError(f"seams is {self.seams!r}; it must be one of {', '.join(SEAMS)}")
        if self.seams != "joined" and self.order != "stream":
            raise ConfigError(
                'seams are of phases, which belong to the stream order: set order="stream", or leave '
                "seams out"
            )
        if self.seams == "apart" and not (self.reset_attention_mask or self.reset_position_ids):
            raise ConfigError(
                'seams="apart" ends documents for reset_attention_mask and reset_position_ids, of which '
                'neither is set; set one of them, or seams="masked", which has no loss there'
            )
        if self.num_samples is not None:
            object.__setattr__(self, "num_samples", _three_counts(self.num_samples))
        _check_number("surplus", self.surplus)
        if not self.surplus >= 0:
            raise ConfigError(
                f"surplus is {self.surplus}; it must be a share of at least 0, such as 0.005"
            )

    def _check_masking(self) -> None:
        by_eod_id = ("reset_attention_mask", "reset_position_ids", "create_attention_mask")
        set_too = [name for name in by_eod_id if getattr(self, name)]
        if set_too:
            raise ConfigError(
                f"inter_document_masking goes by the bounds of sequences, and {set_too[0]} by "
                f"eod_id; leave one of them out"
            )
        if self.order == "stream":
            raise ConfigError(
                "inter_document_masking needs the bounds of every sequence, which the stream order "
                "does not read; set reset_attention_mask and reset_position_ids, which go by eod_id, "
                'or order="megatron"'
            )

    def _check_skipped(self) -> None:
        try:
            ranges = [(start, stop, 0 <= start < stop) for start, stop in self.skip_samples]
        except (TypeError, ValueError):
            raise ConfigError(
                f"skip_samples is {self.skip_samples!r}; it takes ranges of sample ids, "
                f"each as (start, stop)"
            ) from None
        for start, stop, runs_upwards in ranges:
            if not runs_upwards:
                raise ConfigError(
                    f"skip_samples holds [{start}, {stop}); ranges run upwards from 0 or more"
                )

    def _check_skipped_documents(self) -> None:
        if self.skips_of("train") and self.eod_id is None:
            raise ConfigError(
                "skip_documents needs eod_id, the id that stands for tokens which are not seen"
            )

    def _check_schedule(self) -> None:
        if self.order != "stream" or self.blend is None:
            raise ConfigError("blend_schedule belongs to the stream order and a blend")
        prefixes, _ = parse_blend(self.blend)
        try:
            self._check_segments(prefixes)
        except ConfigError:  # which is a ValueError too
            raise
        except (TypeError, ValueError):
            raise ConfigError(
                f"blend_schedule is {self.blend_schedule!r}; it takes segments, each as "
                f"(first sample, weights)"
            ) from None

    def _check_segments(self, prefixes: Sequence[str]) -> None:
        start_before = -1
        for start, weights in self.blend_schedule or ():
            if start <= start_before:
                raise ConfigError(
                    f"blend_schedule starts a segment at sample {start}; starts must rise, "
                    f"from 0 or later"
                )
            # so that NaN is none either; a weight may be zero for a while, all of them may not
            are_weights = all(0 <= weight < math.inf for weight in weights)
            if len(weights) != len(prefixes) or not are_weights or not 0 < sum(weights) < math.inf:
                raise ConfigError(
                    f"blend_schedule at sample {start} needs {len(prefixes)} weights, "
                    f"none negative, not all zero, and a finite sum"
                )
            start_before = start

    def _check_phases(self) -> None:
        if self.order == "sequential":
            raise ConfigError(
                'phases belong to the stream order, and to that of Megatron: set order="stream"'
            )
        first_before = 0
        for number, phase in enumerate(self.phases, 1):
            if not isinstance(phase, PhaseConfig):
                raise ConfigError(
                    f"phase {number} is {phase!r}; it must be a PhaseConfig, such as "
                    "PhaseConfig(first_sample=1_000_000, blend=['s3://bucket/code'])"
                )
            if phase.is_in_samples and phase.first_sample <= first_before:
                raise ConfigError(
                    f"phase {number} begins at sample {phase.first_sample}, and the one before it "
                    f"at {first_before}; phases stand in the order of their first samples"
                )
            if self.order == "megatron":
                _check_megatron_phase(number, phase)
            first_before = max(first_before, phase.first_sample)
        first_of_phases = self.phases[0].first_sample
        for start, _ in self.blend_schedule or ():
            # 0 where that is told by a step or a token: then it is compared when that is known
            if start >= first_of_phases > 0:
                raise ConfigError(
                    f"blend_schedule has a segment from sample {start} on, where the phase from "
                    f"{first_of_phases} on holds; give its weights to a phase"
                )

    def _check_follow(self) -> None:
        if not isinstance(self.follow, FollowConfig):
            raise ConfigError(
                f"follow is {redact_urls(repr(self.follow))}; it must be a FollowConfig, such as "
                "FollowConfig(every_samples=1_000_000, record='s3://bucket/run/follow')"
            )
        if self.order != "stream":
            raise ConfigError('follow belongs to the stream order: set order="stream"')
        if self.blend_schedule is not None:
            raise ConfigError(
                "follow begins phases, and blend_schedule holds in the first one alone; give its "
                "weights to phases"
            )


def _check_megatron_phase(number: int, phase: PhaseConfig) -> None:
    """Raise ConfigError for what Megatron's phase transitions do not change."""
    if phase.global_batch_size is not None:
        raise ConfigError(
            f"phase {number} sets global_batch_size, which is the same in all phases of the Megatron "
            'order, as with --phase-transition-iterations; leave it out, or set order="stream"'
        )
    if phase.lanes is not None or phase.restart:
        name = "lanes" if phase.lanes is not None else "restart"
        raise ConfigError(
            f"phase {number} sets {name}, which is of the stream order; in that of Megatron every "
            "phase begins its datasets anew: leave it out"
        )


def _three_counts(given: Any) -> tuple[int, int, int]:
    """num_samples as plain ints. Raises ConfigError for anything but three counts."""
    try:
        train, valid, test = map(operator.index, given)
    except (TypeError, ValueError):
        train = valid = test = -1
    if min(train, valid, test) < 0:
        raise ConfigError(f"num_samples is {given}; it takes three counts: (train, valid, test)")
    if max(train, valid, test) > MOST_SAMPLES:
        raise ConfigError(f"num_samples is {given}; no run has more than {MOST_SAMPLES:,} samples")
    return train, valid, test


class SkippedList(NamedTuple):
    """Names of documents that are not seen in samples `first_sample` and later.

    names: the names, or the path of a file of them. dataset: the prefix whose documents they are;
    None: those of any.
    """

    first_sample: int
    names: str | tuple[str, ...]
    dataset: str | None = None


def _skipped_lists(given: Any) -> list[SkippedList]:
    """skip_documents of a run, in any of its forms. Raises ConfigError for others."""
    if isinstance(given, Sequence) and given and not isinstance(given[0], str):
        lists: list[SkippedList] = []
        for entry in given:
            is_pair = isinstance(entry, Sequence) and len(entry) == 2
            if not is_pair or type(entry[0]) is not int or entry[0] < 0:
                raise ConfigError(
                    f"skip_documents holds {redact_urls(repr(entry))}; it takes names of documents, or several lists "
                    "of them, each as (first sample, names)"
                )
            first_sample, names = entry
            lists += _skipped_names(names, first_sample)
        return lists
    return _skipped_names(given, 0)


def _skipped_names(given: Any, first_sample: int) -> list[SkippedList]:
    """One list of names, or those of each dataset. Raises ConfigError for anything else."""
    by_dataset = given if isinstance(given, Mapping) else {None: given}
    lists = []
    for dataset, names in by_dataset.items():
        if isinstance(names, os.PathLike):
            names = os.fspath(names)
        if isinstance(dataset, os.PathLike):
            dataset = os.fspath(dataset)
        are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
        if not are_names or not isinstance(dataset, str | None):
            raise ConfigError(
                f"skip_documents is {redact_urls(repr(given))}; it takes the path of a file of names, a list of "
                "names, or either for each dataset, as {prefix: names}"
            )
        if len(names):
            names = names if isinstance(names, str) else tuple(names)
            lists.append(SkippedList(first_sample=first_sample, names=names, dataset=dataset))
    return lists


def parse_blend(blend: Blend) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """(prefixes, weights or None) of a blend in any of its forms.

    A string without blanks is one prefix; "0.3 a 0.7 b" gives weights, "a b" none. So do lists of
    strings, but for those of odd length, which are prefixes. Raises ConfigError for an empty blend,
    weights that are not positive numbers, or weights for some of the prefixes only.
    """
    pairs = _pairs(blend)
    if len(pairs) > MOST_DATASETS:
        raise ConfigError(
            f"the blend has {len(pairs)} datasets; there may be {MOST_DATASETS}: merge some, "
            f"or name folders of them"
        )
    prefixes = tuple(prefix for prefix, _ in pairs)
    weighted = [(prefix, weight) for prefix, weight in pairs if weight is not None]
    if not weighted:
        return prefixes, None
    if len(weighted) != len(pairs):
        raise ConfigError(f"blend {blend!r}: give a weight to every prefix, or to none")
    weights = tuple(_weight(prefix, weight) for prefix, weight in weighted)
    if not math.isfinite(sum(weights)):
        raise ConfigError(
            f"the weights of the blend add up to more than {sys.float_info.max:.3g}; "
            f"divide them by a common number"
        )
    return prefixes, weights


def _pairs(blend: Blend) -> list[tuple[str, Any]]:
    """(prefix, weight or None) of each entry of a blend. Raises ConfigError for other entries."""
    entries = _entries(blend)
    if not entries:
        raise ConfigError(
            "the blend is empty; it takes one prefix, such as ['s3://bucket/web'], "
            "or more with weights"
        )
    pairs: list[tuple[str, Any]] = []
    for entry in entries:
        pair = (entry, None) if isinstance(entry, str) else tuple(entry)
        if len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
            raise ConfigError(f"blend {blend!r}: each entry is a prefix or a (prefix, weight) pair")
        pairs.append(pair)
    return pairs


def _entries(blend: Blend) -> list[Any]:
    """The entries of a blend in a list; weights that alternate with prefixes are put behind them.

    They do where every other of an even number of words, from the first on, is a number, as in
    Megatron's --data-path; where only some of these are, a weight was forgotten.
    """
    if isinstance(blend, os.PathLike):
        blend = [os.fspath(blend)]
    if not isinstance(blend, Iterable):
        raise ConfigError(
            f"blend {blend!r}: give a prefix, a list of them, or of (prefix, weight) pairs"
        )
    entries: list[Any] = (
        blend.split() if isinstance(blend, str) else [_as_text(entry) for entry in blend]
    )
    all_words = all(isinstance(entry, str) for entry in entries)
    if not entries or not all_words:
        return entries
    in_places_of_weights = entries[0::2] if len(entries) % 2 == 0 else entries[:1]
    if not any(map(_is_number, in_places_of_weights)):
        return entries
    if len(entries) % 2:
        # As Megatron reads its lists: one of odd length has no weights, whatever its first prefix
        # looks like. In a string something was forgotten.
        if not isinstance(blend, str):
            return entries
        raise ConfigError(
            f"blend {blend!r}: weights and prefixes must alternate, as in '0.3 a 0.7 b'"
        )
    weights = entries[0::2]
    prefixes = entries[1::2]
    return list(zip(prefixes, weights, strict=True))


def _as_text(item: Any) -> Any:
    """An entry of a blend, paths of pathlib being text."""
    if isinstance(item, os.PathLike):
        return os.fspath(item)
    if isinstance(item, (tuple, list)) and item and isinstance(item[0], os.PathLike):
        return (os.fspath(item[0]), *item[1:])
    return item


def _weight(prefix: str, weight: Any) -> float:
    try:
        value = float(weight)
    except (TypeError, ValueError):
        raise ConfigError(f"the weight of {prefix} is {weight!r}, which is no number") from None
    if not 0 < value < math.inf:
        raise ConfigError(
            f"the weight of {prefix} is {value}; weights are positive numbers "
            f"(leave the dataset out instead)"
        )
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
