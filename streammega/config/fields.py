"""The fields that batches can have, as a table: what each is made of, its dtype, and who uses it.

A new field is one entry of `FIELDS`; what it is made of is there already, or is an entry of
`samples.columns.COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

DEFAULT = "default"
"""In a list of fields: those that batches have by default. Python code writes `...` too."""
FIRST, MIDDLE, LAST = "first", "middle", "last"
"""Stages of a pipeline. Those in the middle get fields only if they ask for them."""


ITEMSIZES = {
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "float32": 4, "float64": 8,
    "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "bool": 1,
}  # fmt: skip
"""Bytes of a value of each dtype, by torch's names."""


def _never(_: Any) -> bool:
    return False


def _always(_: Any) -> bool:
    return True


class Field(NamedTuple):
    """A field of batches.

    about: its shape and meaning, for the page on settings. make: the field of some samples, a tensor, by
    their `samples.field_inputs.FieldInputs`; None: they do not have it. dtype: of its values. stages: the
    pipeline stages that use it. columns: those that it is made of, where the data has them. size: the
    values of a sample of S tokens, at most. tokens_dim: the dimension of tokens; 0: it has none.
    needs_whole: by a FieldsConfig, whether values depend on other tokens of the sample, so that no part
    of a sample is enough; such a field has no columns. made_by: the settings that add it; empty: it is
    there if it is named.
    """

    about: str
    make: Callable[[Any], Any]
    dtype: str
    stages: Collection[str]
    columns: Sequence[str] = ()
    size: Callable[[int], int] = int
    tokens_dim: int = 1
    needs_whole: Callable[[Any], bool] = _never
    made_by: str = ""

    def nbytes(self, length: int) -> int:
        """Bytes that it has for a sample of `length` tokens, at most."""
        return ITEMSIZES[self.dtype] * self.size(length)


FIELDS: dict[str, Field] = {
    "tokens": Field("[batch, S]", lambda made: made.tokens, "int64", [FIRST]),
    "labels": Field(
        "[batch, S], the id after each token", lambda made: made.labels, "int64", [LAST]
    ),
    "loss_mask": Field(
        "[batch, S], 0 where there is no loss",
        lambda made: made.loss_mask,
        "float32",
        [LAST],
        columns=["has_loss"],
    ),
    "position_ids": Field(
        "[batch, S], counted from the first token of the sample or document",
        lambda made: made.position_ids,
        "int64",
        [FIRST, MIDDLE],
        needs_whole=lambda config: config.reset_position_ids,
    ),
    "cu_seqlens": Field(
        "[batch, n], bounds of documents, from 0 to S",
        lambda made: made.cu_seqlens,
        "int32",
        [FIRST, MIDDLE, LAST],
        size=lambda length: length + 1,
        needs_whole=_always,
        made_by="reset_attention_mask or inter_document_masking",
    ),
    "max_seqlen": Field(
        "[batch], tokens of the longest sequence",
        lambda made: made.max_seqlen,
        "int32",
        [FIRST, MIDDLE, LAST],
        size=lambda _: 1,
        tokens_dim=0,
        needs_whole=_always,
        made_by="inter_document_masking",
    ),
    "attention_mask": Field(
        "[batch, 1, S, S], True where attention is forbidden",
        lambda made: made.attention_mask,
        "bool",
        [FIRST, MIDDLE, LAST],
        size=lambda length: length * length,
        tokens_dim=2,
        needs_whole=_always,
    ),
    "dataset_id": Field(
        "[batch], the dataset of each sample, by its place in the blend; over phases, in the order in "
        "which datasets first appear. For losses by source: add_losses_by_source",
        lambda made: made.dataset_id,
        "int64",
        [LAST],
        size=lambda _: 1,
        tokens_dim=0,
    ),
}
"""The fields that batches can have, in their order."""
