"""What is read, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from types import EllipsisType
from typing import Annotated, Any, ClassVar

from streammega.config.blends import Blend, parse_blend
from streammega.config.columns import Column, read_columns
from streammega.config.fields import DEFAULT, FIELDS
from streammega.config.orders import ORDERS, Order
from streammega.config.phases import (
    ExcludedList,
    ExcludedNames,
    PhaseConfig,
    Segment,
    check_phases,
    excluded_lists,
    excluded_names,
    excluded_ranges,
)
from streammega.config.storage import StorageConfig, with_prefixes
from streammega.config.validate import Ge, Le, Lt, check_fields, refuse_unknown
from streammega.errors import ConfigError
from streammega.errors.redaction import redacted_repr

MAX_SAMPLES = 1 << 50
"""Most samples of a split: far more than any run has, and all counts of them fit int64."""

NO_MASK = (
    "by {} some labels have no loss, and fields leaves out loss_mask, which says which; add 'loss_mask' "
    "to fields"
)


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class FieldsConfig:
    """Which fields are made of the ids of a sample: what `batch_fields` needs of a DataConfig, for
    ids from elsewhere.
    """

    sequence_length: Annotated[int, Ge(1)]
    """Tokens of a sample, S."""
    eod_id: Annotated[int | None, Ge(0)] = None
    """The id that ends documents. None: of stored data that which its manifests name, if all name the
    same one.
    """
    pad_id: Annotated[int | None, Ge(0)] = None
    """The tokenizer's padding id; None: it has no padding."""
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
    vocab_size: Annotated[int | None, Ge(1)] = None
    """A token id at or past it is an error, and so is a dataset whose manifest has more ids. None: of
    stored data as many as its manifests have, if all name a tokenizer; else ids are not checked.
    """
    fields: Sequence[str | EllipsisType] | None = None
    """The fields that batches have, such as ["tokens", "labels"]; the others are not made, sent or held.
    None, the default ones: "tokens", "labels", "loss_mask", "position_ids", and those that other settings
    add. With `...`, in TOML "default", these and more: [..., "dataset_id"]. Batches of a StreamLoader or
    StreamingDataset in the stream order leave out "loss_mask" and "position_ids" by default if every
    label has a loss and positions only count up. A field that the training needs cannot be left out:
    "loss_mask" where some labels have no loss.
    """

    _has_manifests: ClassVar[bool] = False
    # Whether manifests of data may say what eod_id and vocab_size are.

    def __post_init__(self) -> None:
        check_fields(self)
        vocab_size = self.vocab_size
        if self.eod_id is not None and vocab_size is not None and self.eod_id >= vocab_size:
            raise ConfigError(
                f"eod_id is {self.eod_id}, outside of the vocabulary of {vocab_size}: no document "
                f"would ever end; give the id that ends documents in the data"
            )
        if not self._has_manifests:
            self.check_eod_id()
        if self.fields is not None:
            self._set_fields(self.fields)
            self._check_fields()

    @property
    def field_names(self) -> tuple[str, ...]:
        """All fields of `fields`, and of the default ones if they are among them, in their order. What
        batches of a loader have by default, their data decides too: `SegmentSource.field_names`.
        """
        wanted = [*self.named_fields, *(self._default_fields() if self.has_default_fields else ())]
        return tuple(name for name in FIELDS if name in wanted)

    def needs_eod_id(self, split: str = "train") -> str:
        """Why a split needs eod_id by these settings; empty if it does not."""
        if not (self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask):
            return ""
        return (
            "eod_mask_loss, reset_position_ids and reset_attention_mask need eod_id, the id that ends "
            "documents"
        )

    def check_eod_id(self, split: str = "train", problem: str = "") -> None:
        """Raise ConfigError if a split needs eod_id and there is none. problem: why there is none."""
        if self.eod_id is None and (why := self.needs_eod_id(split)):
            raise ConfigError("; ".join(filter(None, (why, problem, "set eod_id"))))

    def alone(self) -> FieldsConfig:
        """These settings without the others of a DataConfig, and without a choice of fields."""
        wanted = {item.name: getattr(self, item.name) for item in fields(FieldsConfig)}
        return FieldsConfig(**wanted | {"fields": None})

    @property
    def has_default_fields(self) -> bool:
        """Whether batches have the default fields, and those that `fields` names beyond these."""
        return self.fields is None or DEFAULT in self.fields

    @property
    def named_fields(self) -> tuple[str, ...]:
        """The fields that `fields` names one by one, in their order."""
        return tuple(name for name in FIELDS if name in (self.fields or ()))

    @property
    def needs_whole_samples(self) -> bool:
        """Whether some field of a part of a sample depends on other tokens of the sample: then every
        context-parallel rank reads ids of whole samples.
        """
        return any(FIELDS[name].needs_whole(self) for name in self.field_names)

    def _default_fields(self) -> list[str]:
        """The four fields of Megatron, and those that these settings add."""
        default = ["tokens", "labels", "loss_mask", "position_ids"]
        if self.reset_attention_mask:
            default.append("cu_seqlens")
        return default

    def _set_fields(self, names: Sequence[str | EllipsisType]) -> None:
        """Keep `fields` in its one form: each name once, in the order of the table after `DEFAULT`; None
        for this alone. Raises ConfigError for a name that no field has.
        """
        known = (DEFAULT, *FIELDS)
        names = [DEFAULT if name is ... else name for name in names]
        if not names:
            raise ConfigError('fields is empty; name the fields that are used, such as ["tokens"]')
        for name in names:
            if name not in known:
                nearest = get_close_matches(str(name), known, 1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {list(known)}"
                raise ConfigError(f"fields names {name!r}, which batches never have; {hint}")
        ordered = tuple(name for name in known if name in names)
        # This sets a field of a frozen dataclass.
        object.__setattr__(self, "fields", None if ordered == (DEFAULT,) else ordered)

    def _check_fields(self) -> None:
        """Raise ConfigError for fields that are not made, or not enough to train as these settings
        say.
        """
        names = self.named_fields
        default = self._default_fields()
        for name in names:
            made_by = FIELDS[name].made_by
            if made_by and name not in default:
                raise ConfigError(f"fields names {name!r}, which no setting makes; set {made_by}")
        if self.has_default_fields:
            return
        if "labels" in names and "loss_mask" not in names:
            self._check_all_is_learned()
        if "tokens" not in names:
            return
        if self._restarts_positions() and "position_ids" not in names:
            raise ConfigError(
                "positions restart within samples, and fields leaves out position_ids, which says "
                "where; add 'position_ids' to fields, or leave out reset_position_ids"
            )
        if "cu_seqlens" in default and not {"cu_seqlens", "attention_mask"} & set(names):
            raise ConfigError(
                "documents do not attend to each other, and fields leaves out where they begin; add "
                "'cu_seqlens' to fields, or leave out reset_attention_mask and inter_document_masking"
            )

    def _restarts_positions(self) -> bool:
        """Whether positions restart within samples."""
        return self.reset_position_ids

    def _check_all_is_learned(self) -> None:
        """Raise ConfigError where these settings give some labels no loss."""
        if self.eod_mask_loss:
            raise ConfigError(NO_MASK.format("eod_mask_loss"))

    @property
    def effective_pad_id(self) -> int:
        """The padding id in use: -1 without padding, or if it equals eod_id and that is not allowed.

        No token is -1, so it may also fill what a sample lacks at the end of the data.
        """
        if self.pad_id is None:
            return -1
        if self.pad_id == self.eod_id and not self.allow_ambiguous_pad_tokens:
            # Otherwise ends of documents would be masked and zeroed as padding.
            return -1
        return self.pad_id


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class DataConfig(FieldsConfig):
    """What is read, and in which order."""

    blend: Blend | None = None
    """Datasets: a prefix, [prefix, ...], [(prefix, weight), ...], or a string "0.3 a 0.7 b".

    Paths or URLs.
    """
    blend_per_split: Sequence[Blend | None] | None = None
    """Instead of `blend` and `split`: a blend for each of train, valid and test. None means a
    split without data.
    """
    phases: Sequence[PhaseConfig] = ()
    """Stream order: changes in the middle of training, in the order of `first_sample`. The settings
    above are the first phase. Phases past the cursor of a run may still be changed, and more may be
    added: docs/phases.md.
    """
    split: str = "1,0,0"
    """Shares of train, valid and test, cut by sequence."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 1234
    """The seed of the order."""
    order: Order = None  # type: ignore[assignment]  # a name from __post_init__ on
    """`stream`: shuffled for object storage. `megatron`: Megatron's shuffle, bit for bit. `sequential`:
    every dataset in its stored order; a blend draws from its datasets as in the Megatron order. Default:
    `megatron` where num_samples is set, else `stream`. A copy by `replace` keeps the order.
    """
    columns: Mapping[str, Any] | Sequence[str] = ()
    """What is stored for each token next to the ids and read with them, such as ["teacher_ids"]: batches
    have each under its name, [batch, S, width], or [batch, S] for one value a token. As a mapping,
    {"weight": Column(missing=1.0)}, it says how: docs/columns.md.
    """
    inter_document_masking: bool = False
    """Tokens do not attend over the bounds of sequences in the `.idx`, whatever their ids, in
    Megatron's form: batches have "cu_seqlens", int32 [batch, S + 1], filled up with S, and
    "max_seqlen", int32 [batch]; positions restart at every bound. Not in the stream order.
    """
    num_samples: Annotated[tuple[int, int, int] | None, Ge(0), Le(MAX_SAMPLES)] = None
    """Samples asked of train, valid and test; they define the Megatron order, epochs included. None:
    training has no end in the stream order, is one epoch in the sequential one, and is refused in
    Megatron's; valid and test are every sample once, whatever the weights, in whole global batches.
    """
    add_extra_token: bool = True
    """Samples carry S + 1 tokens, so that every position has a label."""
    drop_last_partial_validation_sequence: bool = True
    """Drop the last, partial sample of valid (train and test always do)."""
    full_validation: bool = False
    """Valid is one epoch of everything, whatever num_samples says."""
    mask_loss_by_mode: bool | None = None
    """Loss only for labels in sequences whose mode is learned. None: in datasets whose manifest names
    these modes, as after `convert --chat`; True: in every dataset, where without such a manifest all
    modes but 0 are learned; False: never.
    """
    allow_mixed_tokenizers: bool = False
    """Allow a blend of datasets whose manifests name different tokenizers. Their ids mean different
    things, so it is an error by default.
    """
    multiple_validation_sets: bool = False
    """With blend_per_split: every prefix of valid is a dataset of its own, not blended."""
    mid_level_dataset_surplus: Annotated[float, Ge(0)] = 0.005
    """Megatron order: the share of samples that a blend requests from its datasets beyond those that it
    takes.
    """
    shuffle_lanes: Annotated[int | None, Ge(1)] = None
    """Stream order: lanes, a multiple of the global batch, kept in the state; default the smallest
    whose open blocks take at least 128 MiB (512 lanes of 256 KiB), or of at least 4096.
    """
    shuffle_block_bytes: Annotated[int | None, Ge(1)] = None
    """Stream order: the most bytes that are shuffled as one; default 128 MiB divided by the lanes of the
    first phase, from 128 to 256 KiB. A dataset with fewer such blocks than lanes has smaller ones.
    """
    exclude_samples: Sequence[tuple[int, int]] = ()
    """Ranges [start, stop) of global sample ids of training to leave out: whole global batches."""
    exclude_documents: ExcludedNames | Sequence[tuple[int, ExcludedNames]] = ()
    """Documents to leave out of training: each of their tokens becomes eod_id, without loss.
    Given as the path of a file of names, one a line; a list of names; either by dataset, as
    {prefix: names}; or several of these, each from a sample on, as [(first sample, names)]. A name
    is NAME#NUMBER of a dataset or shard, or what convert kept by --provenance: an id, or FILE:LINE.
    Lists that begin past the cursor of a run may still be changed: docs/phases.md.
    """
    index_publish_url: str | None = None
    """A folder, such as that of the data, that `streammega prepare` fills with built indices for nodes
    to download.
    """
    storage: StorageConfig = field(default_factory=StorageConfig)
    """How its bytes are fetched."""
    storage_by_prefix: Mapping[str, StorageConfig] = field(default_factory=dict)
    """Storage of another account, endpoint or region: {"s3://other/": StorageConfig}. The longest
    prefix that a URL begins with counts; other URLs use `storage`. A value sets transport,
    storage_options and request_timeout. All other settings are those of `storage`, for the whole
    loader.
    """

    _has_manifests: ClassVar[bool] = True
    _manifests: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    # Not a setting: `open_together` and the file of a written blend set it.

    def __repr__(self) -> str:
        return redacted_repr(self)

    @property
    def manifests(self) -> Mapping[str, Any]:
        """What is known of datasets by their names: nothing is asked about these when they are opened."""
        return self._manifests

    def with_manifests(self, manifests: Mapping[str, Any]) -> DataConfig:
        """A copy that knows more datasets."""
        return replace(self, _manifests={**self._manifests, **manifests})

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", _order_of(self.order, self.num_samples))
        super().__post_init__()
        object.__setattr__(self, "storage", with_prefixes(self.storage, self.storage_by_prefix))
        object.__setattr__(self, "columns", read_columns(self.columns))
        self._check_blends()
        if self.inter_document_masking:
            self._check_masking()
        object.__setattr__(self, "exclude_samples", excluded_ranges(self.exclude_samples))
        if self.phases:
            check_phases(self.phases, self.order)
        _ = self.exclusions_of("train")  # now: raises for what is no list of names

    def needs_eod_id(self, split: str = "train") -> str:
        """As of any ids; and training needs it for documents that it does not see."""
        if why := super().needs_eod_id(split):
            return why
        if self.exclusions_of(split):
            return "exclude_documents needs eod_id, the id that replaces the excluded tokens"
        return ""

    def _default_fields(self) -> list[str]:
        default = super()._default_fields()
        if self.inter_document_masking:
            default += ["cu_seqlens", "max_seqlen"]
        return default

    def _restarts_positions(self) -> bool:
        return self.reset_position_ids or self.inter_document_masking

    @property
    def has_plain_fields(self) -> bool:
        """Whether by these settings every label has a loss and positions only count up. What is padding
        is not known ahead: with pad_id it is False.
        """
        may_mask = (
            self.eod_mask_loss
            or self.effective_pad_id >= 0
            or not self.add_extra_token
            or bool(self.exclusions_of("train"))
        )
        return not may_mask and not self._restarts_positions()

    def _check_all_is_learned(self) -> None:
        super()._check_all_is_learned()
        if not self.add_extra_token:
            raise ConfigError(NO_MASK.format("add_extra_token=False"))

    @property
    def column_settings(self) -> Mapping[str, Column]:
        """`columns` in its one form: how each is read, by name."""
        return dict(self.columns)  # type: ignore[arg-type]  # a mapping since it was checked

    def segments(self, split: str) -> list[Segment]:
        """What holds in a split from which sample on. Training alone has more than one, so that
        validation stays the same.
        """
        blend = self.blend
        if self.blend_per_split is not None:
            blend = self.blend_per_split[("train", "valid", "test").index(split)]
        datasets, weights = ((), None) if blend is None else parse_blend(blend)
        first = Segment(
            first_sample=0,
            datasets=datasets,
            weights=weights,
            sequence_length=self.sequence_length,
            lanes=self.shuffle_lanes,
        )
        segments = [first]
        if split == "train":
            for phase in self.phases:
                segments.append(segments[-1].followed_by(phase))
        return segments

    def exclusions_of(self, split: str) -> list[ExcludedList]:
        """The documents that a split does not see. Those of training alone: validation stays the
        same.
        """
        if split != "train":
            return []
        lists = excluded_lists(self.exclude_documents)
        for phase in self.phases:
            lists += excluded_names(phase.exclude_documents, phase.first_sample)
        return lists

    def _check_blends(self) -> None:
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
        if self.multiple_validation_sets and self.blend_per_split is None:
            raise ConfigError(
                "multiple_validation_sets needs blend_per_split, whose valid entry names them"
            )

    def _check_masking(self) -> None:
        by_eod_id = ("reset_attention_mask", "reset_position_ids")
        set_too = [name for name in by_eod_id if getattr(self, name)]
        set_too += [name for name in self.named_fields if name == "attention_mask"]
        if set_too:
            raise ConfigError(
                f"inter_document_masking goes by the bounds of sequences, and {set_too[0]} by "
                f"eod_id; leave one of them out"
            )
        if not ORDERS[self.order].has_indices:
            raise ConfigError(
                f"inter_document_masking needs the bounds of every sequence, which the {self.order} order "
                "does not read; set reset_attention_mask and reset_position_ids, which go by eod_id, "
                'or order="megatron"'
            )


def _order_of(order: Order | None, num_samples: object) -> Order:
    """The order that is named; without a name, the one that num_samples define, if they are there."""
    if order is not None:
        return order
    return "stream" if num_samples is None else "megatron"
