"""The position of a run: what a checkpoint holds besides tensors, and what a resume checks of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from streammega.errors import StateError
from streammega.gradients.loss_scale import LossScale
from streammega.train.config import RunConfig
from streammega.train.run_log import finite

log = logging.getLogger(__name__)


def position_of(
    config: RunConfig,
    step: int,
    data: dict[str, Any],
    *,
    rewinds: Sequence[int],
    record: dict[str, Any] | None,
    scale: LossScale | None,
) -> dict[str, Any]:
    """The position of a run after a step, as JSON values.

    data: the state of the loader. rewinds: of this run and those it continues. record: of the step,
    if it is not in the metrics yet.
    """
    consumed = data["consumed_samples"]
    position: dict[str, Any] = {"step": step, "data": data, "model": asdict(config.model)}
    ahead = phases_ahead(config, consumed)
    if ahead:
        position["phases_ahead"] = ahead
    if rewinds:
        # A restart with one of these values of train.resume_from_step continues from here.
        position["rewinds"] = rewinds
    if record is not None:
        position["record"] = finite(record)
    if scale is not None:
        position["loss_scale"] = scale.state_dict()
    return position


def check_model(config: RunConfig, position: Mapping[str, Any]) -> None:
    """Raise StateError for a checkpoint of another [model]. The shapes of tensors may be the same, for
    another number of heads for instance.
    """
    saved = position.get("model", {})
    differences = [
        f"model.{name}: the checkpoint has {saved.get(name)}, this run {size}"
        for name, size in asdict(config.model).items()
        if saved.get(name) != size
    ]
    if differences:
        raise StateError(f"{'; '.join(differences)}; restore [model], or start a new out_dir")


def phases_ahead(config: RunConfig, consumed: int) -> list[int]:
    """The first samples of phases that have not begun."""
    firsts = [phase.first_sample for phase in config.data.phases]
    return [first for first in firsts if first >= consumed]


def warn_of_moved_phases(config: RunConfig, position: dict[str, Any], consumed: int) -> None:
    """Warn where later phases begin at other samples than when the checkpoint was saved, because of
    other batch sizes.
    """
    step = position["step"]
    ahead = phases_ahead(config, consumed)
    before = position.get("phases_ahead", ahead)
    if ahead == before or config.schedule.samples_of_step(max(step, 1)).stop == consumed:
        return
    log.warning(
        "the batch sizes of this config are not those of the checkpoint: step %d no longer ends at "
        "sample %d, and phases that were to begin at samples %s now begin at %s. To keep them there, "
        "give phases first_sample in place of first_step",
        step,
        consumed,
        before,
        ahead,
    )


def with_rewind(rewinds: Sequence[int], rewind: int | None) -> list[int]:
    """All values of train.resume_from_step so far, once each."""
    values = set(rewinds)
    if rewind is not None:
        values.add(rewind)
    return sorted(values)
