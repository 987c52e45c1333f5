"""What the manifest of an output says of its ids: from the tokenizer, or from the manifests of
inputs, where they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import Input
from streammega.convert.tokenize.tokenizers import TextTokenizer, find_eod
from streammega.dataset.manifest import MANIFEST, Manifest, read_manifest
from streammega.dataset.shards import set_name, split_name
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError

Labels = dict[str, Any]
UNKNOWN: Labels = {"eod_id": None, "vocab_size": None, "tokenizer": {}, "loss_modes": None}


def labels_of(
    inputs: Sequence[Input],
    options: ConvertOptions,
    tokenizer: TextTokenizer | None,
    storage: StorageConfig,
) -> Labels:
    """eod_id, vocab_size, tokenizer and loss_modes of what a conversion makes.

    Raises ConvertError, naming both, for inputs of different tokenizers and for a tokenizer that is
    not that of inputs which hold tokens already, unless `mix_tokenizers` is set; and for inputs
    whose modes mean different things.
    """
    manifests = _manifests(inputs, storage)
    known = {name: manifest for name, manifest in manifests.items() if manifest is not None}
    text = any(item.format != "megatron" for item in inputs)
    complete = bool(known) and None not in manifests.values() and not text
    modes = _loss_modes(manifests, options, text=text)
    if tokenizer is not None:
        eod_id = find_eod(tokenizer, options.eod) if options.append_eod else None
        own = {"name": tokenizer.name, "digest": tokenizer.digest}
        made = {
            "eod_id": eod_id,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": own,
            "loss_modes": modes,
        }
        for name, manifest in known.items():
            if _differ(manifest.tokenizer, own):
                _refuse_mix(
                    options, f"--tokenizer {options.tokenizer}", own, name, manifest.tokenizer
                )
                return UNKNOWN | {"loss_modes": modes}
        return made
    first_name, first = next(iter(known.items()), ("", None))
    for name, manifest in known.items():
        if first is not None and _differ(manifest.tokenizer, first.tokenizer):
            _refuse_mix(options, first_name, first.tokenizer, name, manifest.tokenizer)
    agree = first is not None and all(_vocabulary(m) == _vocabulary(first) for m in known.values())
    if not complete or not agree or first is None:
        return UNKNOWN | {"eod_id": options.eod_id, "loss_modes": modes}
    eod_id = first.eod_id if options.eod_id is None else options.eod_id
    return {
        "eod_id": eod_id,
        "vocab_size": first.vocab_size,
        "tokenizer": first.tokenizer,
        "loss_modes": modes,
    }


def _manifests(inputs: Sequence[Input], storage: StorageConfig) -> dict[str, Manifest | None]:
    """The manifest of each dataset among the inputs, by its prefix; None where there is none that
    can be read.
    """
    found: dict[str, Manifest | None] = {}
    for item in inputs:
        if item.format != "megatron":
            continue
        prefix = item.path.removesuffix(MANIFEST)
        candidates = (
            [prefix]
            if prefix != item.path
            else [split_name(prefix)[0], set_name(split_name(prefix)[0])]
        )
        if not any(name in found and found[name] is not None for name in candidates):
            found[candidates[-1]] = next(
                filter(None, (_read(name, storage) for name in dict.fromkeys(candidates))), None
            )
    return found


def _read(prefix: str, storage: StorageConfig) -> Manifest | None:
    try:
        return read_manifest(prefix + MANIFEST, storage)
    except (ObjectNotFoundError, FormatError):
        return None


def _vocabulary(manifest: Manifest) -> tuple[Any, ...]:
    return manifest.eod_id, manifest.vocab_size, manifest.tokenizer


def _differ(first: dict[str, str], other: dict[str, str]) -> bool:
    """Whether both are known, and not the same."""
    return bool(first and other) and first.get("digest") != other.get("digest")


def _refuse_mix(
    options: ConvertOptions, first: str, its: dict[str, str], other: str, others: dict[str, str]
) -> None:
    if options.mix_tokenizers:
        return
    raise ConvertError(
        f"{first} is of tokenizer {its.get('name')} ({its.get('digest', '')[:12]}), {other} of {others.get('name')} "
        f"({others.get('digest', '')[:12]}): their ids mean different things; tokenize the text again with one of them, or pass "
        f"--mix-tokenizers if you know that they agree"
    )


def _loss_modes(
    manifests: dict[str, Manifest | None], options: ConvertOptions, *, text: bool
) -> list[int] | None:
    """What modes mean in the output: what they mean in every input that has some."""
    if options.loss_modes is not None:
        return list(options.loss_modes)
    found = {
        name: m.loss_modes if m is not None else None
        for name, m in manifests.items()
        if m is None or m.multimodal
    }
    if text and options.makes_modes:
        found["the text"] = options.learned_modes
    first = next(iter(found), "")
    for name, modes in found.items():
        if modes != found[first]:
            raise ConvertError(
                f"modes mean different things in {first} (learned: {found[first]}) and in {name} (learned: {modes}); convert "
                f"them apart, or say by --loss-mode which are to be learned"
            )
    return found.get(first)
