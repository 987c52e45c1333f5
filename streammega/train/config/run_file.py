"""A run's file: TOML, with overrides of the command line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import dacite

from streammega.config import PhaseConfig, StorageConfig
from streammega.config.validate import read_toml, unknown_setting
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.train.config.whole_run import RunConfig

MEGATRON_NAMES = {
    "data_path": "blend",
    "seq_length": "sequence_length",
    "path_to_cache": "index_cache_dir",
    "path_to_idx_cache": "index_cache_dir",
    "object_storage_cache_path": "index_cache_dir",
    "mid_level_dataset_surplus": "surplus",
    "random_seed": "seed",
    "bin_chunk_nbytes": "storage.chunk_bytes",
}
"""Settings of [data] under the names that Megatron has for them."""


def load_run(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A RunConfig from a TOML file and `section.name=value` overrides (values as in TOML, or bare
    text).

    Raises ConfigError for a missing file, broken TOML, an unknown name (with the nearest known
    one), a wrong type.
    """
    table = read_toml(path, "give the path of the run's TOML file")
    for override in overrides:
        _apply(table, override)
    if isinstance(table.get("data"), dict):
        table["data"] = _with_our_names(table["data"])
    _check_names(table, RunConfig, "")
    _check_phases(table.get("data"), path)
    _fill_defaults(table)
    settings = dacite.Config(strict=True, cast=[tuple], type_hooks={float: _to_float})
    try:
        return dacite.from_dict(RunConfig, table, settings)
    except dacite.WrongTypeError as error:
        if "storage" not in str(error.field_path):
            raise ConfigError(f"{path}: {error}") from None
        # without its value, which may be a secret
        raise ConfigError(
            f"{path}: {error.field_path} must be of type {error.field_type}"
        ) from None
    except dacite.DaciteError as error:
        raise ConfigError(f"{path}: {error}") from None
    except TypeError as error:
        # Of dacite, which makes tuples of lists: one number was given for several.
        raise ConfigError(
            f"{path}: {error}; settings of several values are lists, as rampup = [64, 64, 100000]"
        ) from None


def _check_phases(data: Any, path: str) -> None:
    """Raise ConfigError for names that no phase has, and for single values where lists are wanted,
    which dacite would take to pieces.
    """
    phases = data.get("phases", []) if isinstance(data, dict) else []
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        raise ConfigError(
            f"{path}: data.phases is no list of phases; write [[data.phases]] before each, in two "
            f"brackets"
        )
    for number, phase in enumerate(phases, 1):
        _check_names(phase, PhaseConfig, "data.phases.")
        restart = phase.get("restart", [])
        if not isinstance(restart, list):
            raise ConfigError(
                f"{path}: phase {number}: restart is {restart!r}; it must be a list of prefixes"
            )


def _with_our_names(data: dict[str, Any]) -> dict[str, Any]:
    """[data] with our names for Megatron's; of two names of one setting the later counts, as an
    override does.
    """
    renamed: dict[str, Any] = {}
    for name, value in data.items():
        ours = MEGATRON_NAMES.get(name, name)
        section, _, setting = ours.rpartition(".")
        if section:
            renamed[section] = renamed.get(section, {}) | {setting: value}
        elif isinstance(value, dict):
            renamed[ours] = renamed.get(ours, {}) | value
        else:
            renamed[ours] = value
    return renamed


def _to_float(value: Any) -> Any:
    """`lr = 1` is meant as 1.0; `lr = true` is not, though it is an int to Python."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _apply(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.lstrip("-").partition("=")
    if not equals:
        # Only its first word: what follows may be a secret.
        word = re.split(r"[^\w.-]", override, maxsplit=1)[0]
        raise ConfigError(
            f"override {word!r}: write it as section.name=value, for instance train.iters=100"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {name!r}: {section} is a setting, not a section")
    table[last] = value


def _check_names(table: Mapping[str, Any], kind: type, path: str) -> None:
    """Raise ConfigError for names that no setting has, with the nearest that one has.

    kind: the dataclass of a section, whose name `path` is, with a point behind it.
    """
    hints = get_type_hints(kind)
    for name, value in table.items():
        if name not in hints:
            raise ConfigError(unknown_setting(name, kind, path))
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            _check_names(value, hints[name], f"{path}{name}.")
        if name == "storage_by_prefix" and isinstance(value, Mapping):
            for prefix, storage in value.items():
                if isinstance(storage, Mapping):
                    inner_path = f"{path}{name}.{json.dumps(redact_urls(prefix))}."
                    _check_names(storage, StorageConfig, inner_path)
    if kind is RunConfig:
        for section in ("data", "model", "train"):
            if section not in table:
                raise ConfigError(f"the run has no [{section}] section")


def _fill_defaults(table: dict[str, Any]) -> None:
    data = table["data"]
    model = table["model"]
    if isinstance(data, dict) and isinstance(model, dict) and "vocab_size" in model:
        data.setdefault("vocab_size", model["vocab_size"])
