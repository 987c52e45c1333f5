"""A micro-batch in a DataLoader worker whose fields nobody has asked for: ids, as they are stored.

Most programs leave batches alone until they have left the worker. To make 28 bytes a token there,
and to find out of them which ids they were made of, takes more time than all else that a worker
does with them. So only ids are gathered and sent, and the fields are made where they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data
from torch import Tensor

from streammega.kernels.batch import scan_ids
from streammega.loading.sent_batch import SentBatch, unpack_ids
from streammega.loading.steps import MicroSteps
from streammega.samples.fields import Batch, fields_of_ids
from streammega.samples.packed import are_packed
from streammega.samples.source import all_files
from streammega.samples.token_file import has_modes


def goes_as_ids(dataset: object, steps: MicroSteps) -> bool:
    """Whether batches of an iteration of `dataset` are sent as ids: those of a worker, whose ids
    tell all fields.

    Where the worker's dataset is another one, which has this one within, a program is about to look
    at batches: they are dicts then, as without workers.
    """
    worker = torch.utils.data.get_worker_info()
    if worker is None or worker.dataset is not dataset:
        return False
    config = steps.config
    asks_for_more = (
        config.eod_mask_loss
        or config.reset_position_ids
        or config.reset_attention_mask
        or config.create_attention_mask
        or config.inter_document_masking
        or config.dataset_ids
        or config.seams != "joined"
        or not config.add_extra_token
    )
    files = all_files(steps.samples)
    some_unlearned = steps.samples.skipped is not None or has_modes(files) or are_packed(files)
    return not asks_for_more and not some_unlearned


def as_given(batch: Batch, steps: MicroSteps, *, as_ids: bool) -> Any:
    """A batch of the engine as an iteration gives it: as it is, and in a worker as it is sent."""
    if as_ids:
        return sent_batch(batch, steps)
    return batch if torch.utils.data.get_worker_info() is None else SentBatch(batch)


def sent_batch(fields: Batch, steps: MicroSteps) -> SentIds | SentBatch:
    """What a worker gives for {"ids", "valid"}: ids, or where there is padding among them, fields.

    Raises FormatError for an id outside of the vocabulary.
    """
    ids = fields["ids"]
    batch = SentIds(ids, steps)
    if _all_are_tokens(ids, fields["valid"], steps):
        return batch
    return SentBatch(fields_of_ids(ids, fields["valid"], steps.config, bounds=True))


def _all_are_tokens(ids: Tensor, valid: Tensor, steps: MicroSteps) -> bool:
    """Whether all ids can be widened as they are: none is padding, none has to be refused."""
    config = steps.config
    stored = ids.numpy()
    if (valid.numpy() < stored.shape[1]).any():
        return False
    pad = config.effective_pad_id
    if pad < 0 and stored.dtype.kind == "u" and config.vocab_size is None:
        return True
    padding, lowest, highest = scan_ids(stored, pad)
    if config.vocab_size is not None and not 0 <= lowest <= highest < config.vocab_size:
        return False  # they are refused where fields are made of them
    return not padding


class SentIds:
    """Sent as ids [samples, S + 1], it arrives as a plain dict of fields.

    Whoever asks it for a field in the worker gets that of a `SentBatch`, and may write to it: that
    is what is sent then. It is no dict, for torch's `default_convert` asks a mapping for all its
    fields.
    """

    def __init__(self, ids: Tensor, steps: MicroSteps) -> None:
        self._ids = ids
        self._steps = steps
        self._made: SentBatch | None = None

    def __getitem__(self, name: str) -> Any:
        return self._fields()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._fields()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._fields()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._fields())

    def __or__(self, other: dict[str, Any]) -> dict[str, Any]:
        return self._fields() | other

    def __ror__(self, other: dict[str, Any]) -> dict[str, Any]:
        return other | self._fields()

    def __ior__(self, other: Any) -> SentIds:  # type: ignore[misc] # as that of dict
        self._fields().update(other)
        return self

    def __getattr__(self, name: str) -> Any:
        """The methods of a dict."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fields(), name)

    def __copy__(self) -> SentBatch:
        return SentBatch(self._fields())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._made is not None:
            return self._made.__reduce__()
        return unpack_ids, (self._ids.numpy(),)

    def _fields(self) -> SentBatch:
        """The fields, made when they are asked for first."""
        if self._made is None:
            self._made = SentBatch(fields_of_ids(self._ids, None, self._steps.config, bounds=True))
        return self._made
