"""What manifests say of a dataset's ids: its tokenizer, and which modes are learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

LossModes = tuple[int, ...] | None
MAX_LISTED = 5
"""Datasets of each tokenizer that a message lists."""


class TokenizerLabel(NamedTuple):
    """A tokenizer by its name, for messages, and its digest. vocab_size: ids run below it; None: not
    known.
    """

    name: str
    digest: str
    vocab_size: int | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


class Label(NamedTuple):
    """What a manifest says of the ids of shards.

    prefix: the first of these shards, for messages. loss_modes: None: it says nothing of modes.
    has_modes: whether modes count: a shard in a folder may have none. eod_id: None: it names none.
    """

    prefix: str
    tokenizer: TokenizerLabel | None
    loss_modes: LossModes
    has_modes: bool
    eod_id: int | None = None

    @property
    def vocab_size(self) -> int | None:
        """Ids run below it; None where it is not known."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @classmethod
    def of_stored(cls, stored: Any) -> Label:
        """The label of a row of JSON. Raises TypeError, ValueError for another row."""
        prefix, tokenizer, modes, has_modes, eod_id = stored
        if type(prefix) is not str or type(has_modes) is not bool:
            raise ValueError("a label of shards has fields of other types")
        if tokenizer is not None:
            name, digest, vocab_size = tokenizer
            if type(name) is not str or type(digest) is not str:
                raise ValueError("a tokenizer has a name or a digest that is no text")
            tokenizer = TokenizerLabel(
                name, digest, None if vocab_size is None else int(vocab_size)
            )
        return cls(
            prefix,
            tokenizer,
            None if modes is None else tuple(map(int, modes)),
            has_modes,
            None if eod_id is None else int(eod_id),
        )


def mixed_tokenizers(datasets: Iterable[tuple[str, Iterable[TokenizerLabel]]]) -> str:
    """What a message says of datasets of several tokenizers, with the datasets of each. Empty if all
    are of one, as far as it is known. datasets: (name, tokenizers), none where they are not known.
    """
    names_of: dict[str, tuple[str, list[str]]] = {}
    unknown: list[str] = []
    for name, tokenizers in datasets:
        # sorted, so that the message is the same each time
        labels = sorted(tokenizers, key=str)
        for label in labels:
            names_of.setdefault(label.digest, (str(label), []))[1].append(name)
        if not labels:
            unknown.append(name)
    if len(names_of) < 2:
        return ""
    listed = [f"{list_names(names)}: tokenizer {label}" for label, names in names_of.values()]
    if unknown:
        listed.append(f"{list_names(unknown)}: no manifest names it")
    return (
        f"these datasets are of {len(names_of)} tokenizers, so their ids mean different things: "
        f"{'; '.join(listed)}"
    )


def list_names(names: Sequence[str]) -> str:
    """Names for a message: the first of them, and how many others there are."""
    more = len(names) - MAX_LISTED
    shown = ", ".join(names[:MAX_LISTED])
    return shown if more <= 0 else f"{shown} and {more:,} other{'s' * (more > 1)}"
