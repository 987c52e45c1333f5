"""The trainers and libraries that are integrated: they are imported when they are needed, and an error
names a missing one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from streammega.config import ORDERS, DataConfig
from streammega.config.fields import DEFAULT
from streammega.errors import ConfigError, StateError
from streammega.errors.extras import import_extra
from streammega.loading import StreamingDataset
from streammega.order.state import parse_state

PACKAGES = {
    "lightning": "lightning",
    "transformers": "transformers",
    "torchdata": "torchdata",
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "megatron-bridge": "megatron-bridge",
}
"""The package of each extra that installs a framework."""


def import_framework(module: str, extra: str) -> Any:
    """Import a module of a framework.

    Raises ConfigError if it is not installed, with the names of its package and its extra. Raises
    ImportError if it is installed, but a module that it needs is not.
    """
    needed_by = f"there is no module {module}, which {PACKAGES[extra]} has"
    return import_extra(module, extra, needed_by)


def with_bases(mixin: type, *bases: type, name: str = "", **members: Any) -> Any:
    """A class `name` (as the mixin's, if there is none) of `mixin` before base classes of a framework."""
    described = {"__doc__": mixin.__doc__, "__module__": mixin.__module__}
    return type(name or mixin.__name__, (mixin, *bases), described | members)


def class_on_demand(
    name: str,
    mixin: type,
    base: Callable[[], Any],
    members: Callable[[Any], dict[str, Any]] = lambda base: {},
) -> Callable[[str], Any]:
    """Make the `__getattr__` of the module of `mixin`, which then has a class `name` of `mixin` and
    `base()`.

    `base` imports the framework, which happens only when a program uses the class. members: further
    attributes of the class.
    """

    def get(attribute: str) -> Any:
        """Make the class and set it in the module. Raises AttributeError for another name."""
        if attribute != name:
            raise AttributeError(f"module {mixin.__module__!r} has no attribute {attribute!r}")
        base_class = base()
        made = with_bases(mixin, base_class, name=name, **members(base_class))
        setattr(sys.modules[mixin.__module__], name, made)
        return made

    return get


def with_used_fields(config: DataConfig, used: Collection[str]) -> DataConfig:
    """The config with all fields that a framework uses, and no others. A config whose `fields` leave out
    the default ones stays.

    Where the framework needs no position_ids, the default of the stream order stays: it leaves the
    loss_mask out too if every label has a loss, which data may decide.
    """
    if not config.has_default_fields:
        return config
    omits_plain_fields = ORDERS[config.order].omits_plain_fields and config.has_plain_fields
    if omits_plain_fields and "position_ids" not in used:
        named = [name for name in config.named_fields if name in used]
        return replace(config, fields=[DEFAULT, *named])
    return replace(config, fields=[name for name in config.field_names if name in used])


def check_batch_size(
    state: Mapping[str, Any],
    dataset: StreamingDataset,
    remedy: str,
    on_purpose: str = "allow_batch_size_change=True",
) -> None:
    """Raise StateError for a state of a run with another global batch, and for what is no state.

    For trainers whose global batch follows from the number of processes: to go on with fewer would
    change it without a word. remedy: what to set, with {size} for the former global batch and {count} for its
    micro-batches on this rank. on_purpose: what to set where the change is meant.
    """
    size = parse_state(state).global_batch_size
    if size == dataset.global_batch_size:
        return
    count, rest = divmod(size, dataset.step_samples)
    what = (
        f"no number of micro-batches makes {size} samples on {dataset.dp_size} processes with "
        f"{dataset.micro_batch_size} each, so change one of these"
        if rest
        else f"to keep it, set {remedy.format(size=size, count=count)}"
    )
    raise StateError(
        f"the checkpoint is of a run with a global batch of {size} samples, and this run has "
        f"{dataset.global_batch_size}: {what}. If the change is meant, set {on_purpose}"
    )


def check_phases(
    config: DataConfig, trainer: str, global_batch_size: int | None, *, one_length: bool = False
) -> None:
    """Raise ConfigError for phases that change what the steps of a trainer do not.

    global_batch_size: of those steps; None: they are the trainer's own affair. one_length: it takes
    samples of one length alone.
    """
    for number, phase in enumerate(config.phases, 1):
        size = phase.global_batch_size
        if size is not None and size != global_batch_size:
            raise ConfigError(
                f"phase {number} sets global_batch_size {size}, and the steps of {trainer} have one "
                "size: leave it out"
            )
        if global_batch_size is None and not phase.is_in_samples:
            raise ConfigError(
                f"phase {number} begins at a step or token, and how many samples a step of {trainer} "
                "has is not known here: give it first_sample"
            )
        length = phase.sequence_length
        if one_length and length not in (None, config.sequence_length):
            raise ConfigError(
                f"phase {number} sets sequence_length {length}, and {trainer} takes samples of one "
                f"length, {config.sequence_length}: leave it out"
            )
