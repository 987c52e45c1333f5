"""The tokenizer that made a dataset: by the copy that `convert` keeps next to it, else by its name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from streammega.config import StorageConfig
from streammega.convert.tokenize.tokenizers import Tokenizer, load_stored, load_tokenizer
from streammega.dataset.labels import TokenizerLabel
from streammega.dataset.manifest import Manifest
from streammega.dataset.names import datasets_of, tokenizer_name
from streammega.errors import ConfigError, ConvertError, ObjectNotFoundError, StorageError
from streammega.storage.object_ops import read_if_exists


def tokenizer_of(
    manifest: Manifest,
    storage: StorageConfig,
    chosen: str | None = None,
    *,
    by_name: bool = True,
) -> tuple[Tokenizer | None, str]:
    """(the tokenizer, or None; what is wrong with it, as a sentence).

    manifest: of an opened dataset. chosen: the name of the one that is wanted; None: that which the
    manifest names. by_name: whether to load that by its name where there is no copy of it, which may
    ask the hub. Raises ObjectNotFoundError, ConvertError, ConfigError for a chosen one that cannot
    be loaded.
    """
    labels = sorted(manifest.tokenizers, key=str)
    label = labels[0] if len(labels) == 1 else None
    if chosen is not None:
        model = load_tokenizer(chosen)
    elif label is None:
        if not labels:
            return None, "no manifest names its tokenizer; name one by --tokenizer"
        names = ", ".join(map(str, labels))
        return None, f"it was made with several tokenizers ({names}); name one by --tokenizer"
    else:
        prefixes = [shard.name for shard in manifest.shards[:1]]
        made_by, problem = _made_by(label, prefixes, storage, by_name)
        if made_by is None:
            return None, problem
        model = made_by
    if label is not None and label.digest != model.digest:
        return model, (
            f"was made with {label.name!r}, and {model.name!r} is another tokenizer, or has other "
            f"settings: the text may be wrong"
        )
    return model, ""


def _made_by(
    label: TokenizerLabel, shards: Sequence[str], storage: StorageConfig, by_name: bool
) -> tuple[Tokenizer | None, str]:
    """(the tokenizer of a label by its copy, or else by its name; why there is none)."""
    copy = stored_copy(label.digest, shards, storage)
    problem = "there is no copy of its tokenizer"
    if copy:
        try:
            model = load_stored(label.name, copy)
        except (ConvertError, ConfigError) as error:
            problem = str(error)
        else:
            if model.digest == label.digest:
                return model, ""
            problem = f"the copy of its tokenizer {label.name!r} is another one"
    if by_name:
        try:
            return load_tokenizer(label.name), ""
        except (ObjectNotFoundError, ConvertError, ConfigError) as error:
            problem += f", and its tokenizer {label.name!r} cannot be loaded ({error})"
    return None, f"{problem}; name it by --tokenizer"


def stored_copy(digest: str, shards: Sequence[str], storage: StorageConfig) -> bytes:
    """What is stored of the tokenizer of a digest next to shards; empty where none has a copy.

    shards: their prefixes. A copy that cannot be read counts as none: its name may do.
    """
    for prefix in dict.fromkeys(chain.from_iterable(map(datasets_of, shards))):
        try:
            copy = read_if_exists(tokenizer_name(prefix, digest), storage)
        except StorageError as error:
            if error.transient:
                raise
            continue
        if copy:
            return copy
    return b""
