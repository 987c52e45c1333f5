"""From Megatron's command line to a DataConfig: blends, splits, fields and the padding id, each by
Megatron's own rules.

Works on the parsed arguments alone, without Megatron being installed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from streammega.config import DataConfig, StorageConfig
from streammega.config.validate import parse_json
from streammega.errors import ConfigError
from streammega.order.split import SPLITS
from streammega.storage.object_ops import read_if_exists

NOT_SERVED = {
    "mock_data": "Megatron's mock data needs no storage: leave out --dataloader-type external",
    "sft": "use Megatron's own loader for --sft",
    "fim_data": "use Megatron's own loader for --fim-data",
    "hybrid_context_parallel": "Megatron itself allows it with --dataloader-type single only",
}
"""Arguments that change what a sample is in ways that are not made here, with what to do instead."""

OF_MEGATRON = {
    "blend": "--data-path",
    "blend_per_split": "--train-data-path, --valid-data-path and --test-data-path",
    "split": "--split",
    "seed": "--seed",
    "sequence_length": "--seq-length",
    "num_samples": "--train-iters or --train-samples",
    "full_validation": "--full-validation",
    "mid_level_dataset_surplus": "--mid-level-dataset-surplus",
    "eod_mask_loss": "--eod-mask-loss",
    "reset_position_ids": "--reset-position-ids",
    "reset_attention_mask": "--reset-attention-mask",
    "inter_document_masking": "--dataloader-inter-document-masking",
    "allow_ambiguous_pad_tokens": "--allow-ambiguous-pad-tokens",
    "eod_id": "the tokenizer",
    "pad_id": "the tokenizer",
}
"""Settings of a DataConfig that come from Megatron, and where they are set there."""

DEFAULT_SPLIT = "969,30,1"
"""Megatron's, where --data-path comes without --split."""


def read_blends(args: Any, storage: StorageConfig) -> dict[str, Any]:
    """The `blend` or `blend_per_split` of a DataConfig, of --data-path, --data-args-path,
    --train-data-path and its sisters, or --per-split-data-args-path. Files among them may be URLs.

    Raises ConfigError where none is given, or both kinds.
    """
    all_splits = _words(args, "data_path", storage, name_of_file="data_args_path")
    per_split = _per_split(args, storage)
    if all_splits is not None and per_split is not None:
        raise ConfigError(
            "--data-path and data paths of single splits are both given; give one of them"
        )
    if per_split is not None:
        return {"blend_per_split": [_blend(words) for words in per_split]}
    if all_splits is None:
        raise ConfigError(
            "no data is named: give --data-path, or --train-data-path, --valid-data-path and "
            "--test-data-path"
        )
    return {"blend": _blend(all_splits)}


def data_config(
    args: Any,
    tokenizer: Any,
    num_samples: Sequence[int | None],
    *,
    storage: StorageConfig,
    **options: Any,
) -> DataConfig:
    """The config of Megatron's arguments.

    num_samples: (train, valid, test), as Megatron counts them; None for valid under
    --full-validation. options: fields of a DataConfig that Megatron has no argument for. Raises
    ConfigError for arguments that are not served, and says what to do.
    """
    for name, remedy in NOT_SERVED.items():
        if getattr(args, name, False):
            raise ConfigError(f"{_flag(name)} is not served from here; {remedy}")
    train, valid, test = num_samples
    by_arguments = field_settings(
        args,
        tokenizer,
        inter_document_masking=getattr(args, "dataloader_inter_document_masking", False),
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    if (wanted := options.pop("fields", None)) is not None:
        by_arguments["fields"] = [*wanted, *(by_arguments["fields"] or ())]
    return DataConfig(
        **read_blends(args, storage),
        split=args.split or DEFAULT_SPLIT,
        seed=args.seed,
        sequence_length=args.seq_length,
        num_samples=(train or 0, valid or 0, test or 0),
        full_validation=bool(getattr(args, "full_validation", False)),
        mid_level_dataset_surplus=getattr(
            args, "mid_level_dataset_surplus", DataConfig.mid_level_dataset_surplus
        ),
        storage=with_cache_folder(storage, getattr(args, "data_cache_path", None)),
        **by_arguments,
        **{"order": "megatron", **options},
    )


def refuse_arguments(settings: Collection[str]) -> None:
    """Raise ConfigError for a setting of a DataConfig that Megatron has an argument for."""
    for name in settings:
        if name in OF_MEGATRON:
            raise ConfigError(
                f"{name} comes from Megatron: leave it out here, and set {OF_MEGATRON[name]}"
            )


def with_cache_folder(storage: StorageConfig, folder: str | None) -> StorageConfig:
    """The settings with Megatron's folder of caches, if it has one and they name none."""
    return storage.changed(cache_dir=folder) if folder and not storage.cache_dir else storage


def field_settings(
    settings: Any, tokenizer: Any, *, inter_document_masking: bool, create_attention_mask: bool
) -> dict[str, Any]:
    """Settings of a DataConfig that say which fields a batch has, of Megatron's arguments or of its
    GPTDatasetConfig, which call two of them by other names.
    """
    is_ambiguous_allowed = bool(getattr(settings, "allow_ambiguous_pad_tokens", False))
    # Megatron makes neither what goes by ends of documents nor an attention mask then.
    is_masked = bool(inter_document_masking)
    return {
        "eod_id": _token_id(tokenizer, "eod"),
        "pad_id": pad_id(tokenizer, allowed=is_ambiguous_allowed),
        # pad_id has already been dropped where it is ambiguous and that is not allowed
        "allow_ambiguous_pad_tokens": True,
        "eod_mask_loss": bool(settings.eod_mask_loss),
        "inter_document_masking": is_masked,
        "reset_position_ids": bool(settings.reset_position_ids) and not is_masked,
        "reset_attention_mask": bool(settings.reset_attention_mask) and not is_masked,
        "fields": [..., "attention_mask"] if create_attention_mask and not is_masked else None,
    }


def pad_id(tokenizer: Any, *, allowed: bool) -> int | None:
    """The padding id to mask; None: the tokenizer has no such id.

    An id that is another special token too would mask tokens of the data. It is returned only if
    that is `allowed`.
    """
    pad = _token_id(tokenizer, "pad")
    return pad if allowed or pad not in _special_ids(tokenizer) else None


def _special_ids(tokenizer: Any) -> list[Any]:
    """Ids of the special tokens besides padding; of a tokenizer that does not list them, the two
    that end texts.
    """
    try:
        special_tokens: Mapping[str, Any] = tokenizer.special_tokens_dict
        tokens = [token for name, token in special_tokens.items() if name != "pad_token"]
    except (AttributeError, IndexError, ValueError, NotImplementedError):
        tokens = []
    return tokens or [_token_id(tokenizer, "eos"), _token_id(tokenizer, "eod")]


def _token_id(tokenizer: Any, name: str) -> int | None:
    """A special token's id; None: there is none, or a negative one. Tokenizers without one raise what
    they like.
    """
    try:
        token = getattr(tokenizer, name)
    except Exception:
        return None
    return None if token is None or token < 0 else int(token)


def _per_split(args: Any, storage: StorageConfig) -> list[list[str] | None] | None:
    """The words of each split's blend; None where no split has one."""
    url = getattr(args, "per_split_data_args_path", None)
    if url is not None:
        return _read_per_split(url, storage)
    words = [_words(args, f"{split}_data_path", storage) for split in SPLITS]
    return None if all(one is None for one in words) else words


def _read_per_split(url: str, storage: StorageConfig) -> list[list[str] | None]:
    text = _read_text("--per-split-data-args-path", url, storage)
    try:
        by_split = parse_json(text)
        words = [by_split[split] for split in SPLITS]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--per-split-data-args-path {url} must be JSON: {{"train": [...], "valid": [...], '
            f'"test": [...]}} ({type(error).__name__}: {error})'
        ) from None
    return [one.split() if isinstance(one, str) else one for one in words]


def _words(
    args: Any, name: str, storage: StorageConfig, *, name_of_file: str = ""
) -> list[str] | None:
    """What an argument, or the file that another one names, lists; None: neither is given."""
    words = getattr(args, name, None)
    url = getattr(args, name_of_file, None)
    if words is not None and url is not None:
        raise ConfigError(
            f"{_flag(name)} and {_flag(name_of_file)} are both given; give one of them"
        )
    if url is not None:
        return _read_text(_flag(name_of_file), url, storage).split()
    return None if words is None else list(words)


def _flag(name: str) -> str:
    """An argument as the command line has it."""
    return f"--{name.replace('_', '-')}"


def _read_text(argument: str, url: str, storage: StorageConfig) -> str:
    data = read_if_exists(url, storage)
    if data is None:
        raise ConfigError(f"{argument}: there is no {url}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{argument}: {url} is no text of UTF-8") from None


def _blend(words: Sequence[Any] | None) -> list[str] | None:
    """The words as a blend, which follows Megatron's rules; None: there are none."""
    return None if words is None else [str(word).strip() for word in words]
