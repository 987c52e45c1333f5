"""All settings of a run and what they must be together; and its file: TOML, with overrides of the
command line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, get_origin, get_type_hints

import dacite

from streammega.config import DataConfig, PhaseConfig, StorageConfig, parse_blend
from streammega.config.validate import field_types, read_toml, unknown_setting
from streammega.errors import ConfigError
from streammega.errors.redaction import redacted_repr
from streammega.errors.words import pluralize
from streammega.order.schedule import TrainingSchedule, resolve_phase_starts, training_schedule
from streammega.train.config.settings import ModelConfig, ParallelConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run: [data] with [data.storage], [model], [train], and where wanted [parallel] and
    [validation].
    """

    data: DataConfig
    model: ModelConfig
    train: TrainConfig = field()
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    validation: Mapping[str, Any] = field(default_factory=dict)
    """Name -> blend. Each is evaluated by itself, in addition to the valid split of [data], and is read
    from its start every time.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        data, train = self.data, self.train
        # Every phase has its first sample. All other code uses it, and no step.
        data = resolve_phase_starts(data, train.global_batch_size, train.rampup_batch_size)
        object.__setattr__(self, "data", data)  # the way to set a field of what is frozen
        self._set_vocabulary()
        if self.train.dtype != "float32" and self.parallel.optimizer != "sharded":
            raise ConfigError(
                f"train.dtype = {self.train.dtype} computes with copies of fp32 parameters, which "
                f"only the sharded model makes: set parallel.optimizer = sharded"
            )
        for name, blend in self.validation.items():
            _check_blend(name, blend)
            letters = name.replace("_", "").replace("-", "")
            if not letters.isalnum():
                raise ConfigError(
                    f"validation set {name!r} must have a name of letters, digits, - and _; rename it"
                )

    def _set_vocabulary(self) -> None:
        """The data is checked against the model's vocabulary, unless it names its own."""
        of_data = self.data.vocab_size
        of_model = self.model.vocab_size
        if of_data is None:
            object.__setattr__(self, "data", replace(self.data, vocab_size=of_model))
        elif of_data > of_model:
            raise ConfigError(
                f"data.vocab_size is {of_data}, more than model.vocab_size {of_model}: the model "
                f"has no embedding for the ids between; leave data.vocab_size out, "
                f"or raise model.vocab_size"
            )

    @property
    def schedule(self) -> TrainingSchedule:
        """The samples, steps and tokens of training, over all phases."""
        train = self.train
        return training_schedule(
            self.data, "train", train.global_batch_size, train.rampup_batch_size
        )

    @property
    def every_stage(self) -> bool:
        """Whether every pipeline stage gets batches. Attention in each layer needs positions and bounds
        of documents, if they differ from sample to sample.
        """
        return self.data.reset_position_ids or self.data.reset_attention_mask

    def num_samples(self) -> tuple[int, int, int]:
        """Samples of train, valid and test that the run needs, as Megatron counts them."""
        train = self.train
        evaluations = 0
        if train.eval_interval:
            evaluations = train.train_iters // train.eval_interval + 1
        train_samples = self.schedule.samples_after(train.train_iters)
        valid_samples = evaluations * train.eval_iters * train.global_batch_size
        return train_samples, valid_samples, 0


def _check_blend(name: str, blend: Any) -> None:
    """Raise ConfigError for what is no blend."""
    if not isinstance(blend, (str, Sequence)):
        raise ConfigError(
            f"validation.{name} is {blend!r}; it must be a blend, such as ['s3://bucket/books']"
        )
    try:
        parse_blend(blend)
    except ConfigError as error:
        raise ConfigError(f"validation.{name}: {error}") from None


def load_run(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A RunConfig from a TOML file and `section.name=value` overrides (values as in TOML, or bare
    text).

    Raises ConfigError for a missing file, broken TOML, an unknown name (with the nearest known
    one), a wrong type.
    """
    table = read_toml(path, "give the path of the run's TOML file")
    try:
        return _run_of_table(table, overrides)
    except ConfigError as error:
        changed = f" with {pluralize(len(overrides), 'override')}" if overrides else ""
        raise ConfigError(f"{path}{changed}: {error}") from None


def _run_of_table(table: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """`load_run` of a file that was read."""
    for override in overrides:
        _apply(table, override)
    _check_names(table, RunConfig, "")
    _check_phases(table.get("data"))
    # Each class checks the types of its fields by itself.
    settings = dacite.Config(
        strict=True, check_types=False, cast=[tuple], type_hooks={float: _to_float}
    )
    try:
        return dacite.from_dict(RunConfig, table, settings)
    except dacite.DaciteError as error:
        raise ConfigError(str(error)) from None
    except TypeError as error:
        # Of dacite, which makes tuples of lists: one number was given for several.
        raise ConfigError(
            f"{error}; settings of several values are lists, as rampup_batch_size = [64, 64, 100000]"
        ) from None


def _check_phases(data: Any) -> None:
    """Raise ConfigError for what is no list of phases, and for names that no phase has."""
    phases = data.get("phases", []) if isinstance(data, dict) else []
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        raise ConfigError(
            "data.phases is no list of phases; write [[data.phases]] before each, in two brackets"
        )
    for phase in phases:
        _check_names(phase, PhaseConfig, "data.phases.")


def _to_float(value: Any) -> Any:
    """Make 1 of `lr = 1` a float. `lr = true` stays, though Python calls it an int."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _apply(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.lstrip("-").partition("=")
    if not equals:
        # Only its first word: what follows may be a secret.
        word = re.split(r"[^\w.-]", override, maxsplit=1)[0]
        raise ConfigError(
            f"override {word!r}: write it as section.name=value, for instance train.train_iters=100"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    *sections, last = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {name!r}: {section} is a setting, not a section")
    table[last] = value


def _public_hints(kind: Any) -> dict[str, Any]:
    """The types of the settings of a section, without private ones, which no file sets."""
    hints = get_type_hints(kind)
    return {name: hint for name, hint in hints.items() if not name.startswith("_")}


def _check_names(table: Mapping[str, Any], kind: type, path: str) -> None:
    """Raise ConfigError for names that no setting has, with the nearest that one has; and for text in
    place of a list or mapping, which dacite would take to pieces.

    kind: the dataclass of a section, whose name `path` is, with a dot at its end.
    """
    hints = _public_hints(kind)
    for name, value in table.items():
        if name not in hints:
            homes = [
                f"{section}.{name}"
                for section, of_section in hints.items()
                if is_dataclass(of_section) and name in _public_hints(of_section)
            ]
            if homes:
                raise ConfigError(f"unknown setting {path}{name}; did you mean {path}{homes[0]}?")
            raise ConfigError(unknown_setting(name, kind, section=path))
        accepted = field_types(kind)[name]
        has_parts = any(get_origin(one) is not None for one in accepted.alternatives)
        takes_text = str in accepted.alternatives or value in accepted.choices
        if isinstance(value, str) and has_parts and not takes_text:
            raise ConfigError(f"{path}{name} is text; it must be {accepted.expected}")
        if is_dataclass(hints[name]):
            _check_section(value, hints[name], f"{path}{name}")
        if name == "storage_by_prefix" and isinstance(value, Mapping):
            for prefix, storage in value.items():
                section = f"{path}{name}.{json.dumps(prefix)}"
                _check_section(storage, StorageConfig, section)
    if kind is RunConfig:
        for section in ("data", "model", "train"):
            if section not in table:
                raise ConfigError(f"the run has no [{section}] section")


def _check_section(table: Any, kind: type, section: str) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{section} is a setting; it must be a section: write [{section}]")
    _check_names(table, kind, f"{section}.")
