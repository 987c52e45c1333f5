"""Datasets of one blend are of one tokenizer, as far as their manifests tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from streammega.config import DataConfig
from streammega.dataset.manifest_metadata import TokenizerLabel
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls


def check_tokenizers(
    datasets: Iterable[tuple[str, set[TokenizerLabel]]], config: DataConfig
) -> None:
    """Raise ConfigError for (name, tokenizers) of datasets of which two differ, naming both;
    datasets without any pass.
    """
    if config.mix_tokenizers:
        return
    by_digest: dict[str, tuple[str, TokenizerLabel]] = {}
    for name, tokenizers in datasets:
        # sorted, so that the message names the same two each time
        for tokenizer in sorted(tokenizers, key=str):
            by_digest.setdefault(tokenizer.digest, (name, tokenizer))
    if len(by_digest) > 1:
        two = itertools.islice(by_digest.values(), 2)
        (first, its), (other, others) = two
        raise ConfigError(
            f"{redact_urls(first)} is of tokenizer {its}, {redact_urls(other)} of {others}: "
            "their ids mean different things; "
            "convert the text of one with the other's tokenizer, "
            "or set mix_tokenizers if you know that they agree"
        )
