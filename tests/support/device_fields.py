"""Fields as a device makes them, of ids on any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from streammega.config import FieldsConfig
from streammega.samples.device_fields import DeviceFields
from streammega.samples.field_inputs import Batch, Samples, make_fields, makers


def device_fields(
    ids: Tensor,
    valid: Tensor,
    config: FieldsConfig,
    names: Sequence[str] | None = None,
    *,
    may_pad: bool = True,
    max_documents: int | None = None,
) -> Batch:
    """What `batch_fields` makes, by torch on any device.

    ids: [samples, S + 1] or [samples, S], of any integer dtype; valid: integers [samples], ids of a row
    that are not padding. names: of the fields; None: those of the config.
    """
    inputs = DeviceFields(Samples(ids, valid), config, may_pad=may_pad, max_documents=max_documents)
    (batch,) = make_fields(inputs, makers(config.field_names if names is None else names))
    return batch
