"""What the manifest of an output says of its ids: from the tokenizer, or from the manifests of
inputs, where they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions
from streammega.convert.read.source import Input
from streammega.convert.tokenize.chat import find_template
from streammega.convert.tokenize.tokenizers import Tokenizer, resolve_eod
from streammega.dataset.labels import TokenizerLabel, list_names, mixed_tokenizers
from streammega.dataset.manifest import Manifest, read_manifest
from streammega.dataset.names import MANIFEST, datasets_of, strip_suffix
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError
from streammega.errors.logs import get_logger

log = get_logger(__name__)

Labels = dict[str, Any]
UNKNOWN: Labels = {"eod_id": None, "vocab_size": None, "tokenizer": {}}


def labels_of(
    inputs: Sequence[Input],
    options: ConvertOptions,
    tokenizer: Tokenizer | None,
    storage: StorageConfig,
) -> Labels:
    """eod_id, vocab_size, tokenizer, loss_modes and chat_template of what a conversion makes.

    Raises ConvertError, naming both, for inputs of different tokenizers and for a tokenizer that is
    not that of inputs which hold tokens already, unless `allow_mixed_tokenizers` is set; and for inputs
    whose modes mean different things.
    """
    manifests = _manifests(inputs, storage)
    _warn_of_unknown_tokenizers(inputs, manifests, has_tokenizer=tokenizer is not None)
    known = {name: manifest for name, manifest in manifests.items() if manifest is not None}
    has_text = any(item.format != "megatron" for item in inputs)
    of_modes = {
        "loss_modes": _loss_modes(manifests, options, has_text=has_text),
        "chat_template": _chat_template(known, options, has_text=has_text),
    }
    if tokenizer is not None:
        record = {"name": tokenizer.name, "digest": tokenizer.digest}
        if _is_mix(known, options, (f"--tokenizer {options.tokenizer}", record)):
            return UNKNOWN | of_modes
        eod_id = None
        if options.append_eod:
            _, eod_id = resolve_eod(tokenizer, options.eod)
        return {
            "eod_id": eod_id,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": record,
        } | of_modes
    _is_mix(known, options)
    # What one input does not say, the output cannot say either.
    is_known_of_all = bool(known) and len(known) == len(manifests) and not has_text
    vocabularies = [
        {name: getattr(manifest, name) for name in UNKNOWN} for manifest in known.values()
    ]
    if not is_known_of_all or any(other != vocabularies[0] for other in vocabularies):
        return UNKNOWN | {"eod_id": options.eod_id} | of_modes
    labels = dict(vocabularies[0])
    if options.eod_id is not None:
        labels["eod_id"] = options.eod_id
    return labels | of_modes


def _is_mix(
    known: dict[str, Manifest], options: ConvertOptions, *others: tuple[str, dict[str, str]]
) -> bool:
    """Whether datasets are of several tokenizers, as far as they are known. others: names and
    tokenizers that go before them.

    Raises ConvertError with the datasets of each, unless tokenizers may be mixed.
    """
    records = [*others, *((name, manifest.tokenizer) for name, manifest in known.items())]
    mixed = mixed_tokenizers(
        (name, {TokenizerLabel(record.get("name", ""), record.get("digest", ""))} if record else ())
        for name, record in records
    )
    if mixed and not options.allow_mixed_tokenizers:
        raise ConvertError(
            f"{mixed}; tokenize the text again with one of them, or pass "
            f"--allow-mixed-tokenizers if you know that they agree"
        )
    return bool(mixed)


def _warn_of_unknown_tokenizers(
    inputs: Sequence[Input], manifests: dict[str, Manifest | None], *, has_tokenizer: bool
) -> None:
    """Warn of tokens whose tokenizer no manifest names, where they come together with others."""
    unknown = [
        name for name, manifest in manifests.items() if not (manifest and manifest.tokenizer)
    ]
    others: list[str] = []
    if not has_tokenizer:  # then all inputs hold tokens
        others = [item.path for item in inputs if item.format != "megatron"]
    # tokens of one origin agree with themselves
    origins = len(manifests) + bool(others) + has_tokenizer
    if origins > 1 and (unknown or others):
        log.warning(
            "%s: no manifest names the tokenizer of these tokens, so it is not compared; put together "
            "only what one tokenizer made ('streammega describe' shows ids and texts)",
            list_names([*unknown, *others]),
        )


def _chat_template(
    known: dict[str, Manifest], options: ConvertOptions, *, has_text: bool
) -> dict[str, Any] | None:
    """The template that wrote all conversations."""
    templates = [manifest.chat_template for manifest in known.values()]
    if has_text and options.chat_template is not None:
        templates.append(find_template(options.chat_template, options.tokenizer).record)
    elif has_text:
        templates.append(None)
    is_one = bool(templates) and all(template == templates[0] for template in templates)
    return templates[0] if is_one else None


def _manifests(inputs: Sequence[Input], storage: StorageConfig) -> dict[str, Manifest | None]:
    """The manifest of each dataset among the inputs, by its prefix; None if it cannot be read."""
    manifests: dict[str, Manifest | None] = {}
    for item in inputs:
        if item.format != "megatron":
            continue
        # An input is a dataset itself, or a shard of the set that its name tells.
        candidates = [item.path.removesuffix(MANIFEST)]
        if not item.path.endswith(MANIFEST):
            candidates = datasets_of(strip_suffix(item.path))
        if any(manifests.get(name) is not None for name in candidates):
            continue
        # Where none of them has a manifest, the dataset is the last: it has all shards of a set.
        manifests[candidates[-1]] = None
        for name in candidates:
            with suppress(ObjectNotFoundError, FormatError):
                manifests[candidates[-1]] = read_manifest(name + MANIFEST, storage)
                break
    return manifests


def _loss_modes(
    manifests: dict[str, Manifest | None], options: ConvertOptions, *, has_text: bool
) -> list[int] | None:
    """What modes mean in the output: what they mean in every input that has some."""
    if options.loss_modes is not None:
        return list(options.loss_modes)
    learned: dict[str, list[int] | None] = {}
    for name, manifest in manifests.items():
        if manifest is None:
            # It may have modes; what they mean is not known.
            learned[name] = None
        elif manifest.multimodal:
            learned[name] = manifest.loss_modes
    if has_text and options.makes_modes:
        learned["the text"] = options.learned_modes
    if not learned:
        return None
    first = next(iter(learned))
    for name, modes in learned.items():
        if modes != learned[first]:
            raise ConvertError(
                f"modes mean different things in {first} (learned: {learned[first]}) and in {name} "
                f"(learned: {modes}); convert them apart, or say by --loss-mode which are to be "
                f"learned"
            )
    return learned[first]
