"""A run's settings: a TOML file, overrides on the command line, checked before anything starts."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import dacite

from streammega.config import DataConfig
from streammega.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MEGATRON_NAMES = {
    "data_path": "blend",
    "seq_length": "sequence_length",
    "path_to_cache": "index_cache_dir",
    "path_to_idx_cache": "index_cache_dir",
    "mid_level_dataset_surplus": "surplus",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The example GPT."""

    vocab_size: int
    """Ids run below this; the data is checked against it."""
    dim: int = 192
    """Width."""
    layers: int = 4
    """Blocks."""
    heads: int = 6
    """Attention heads; they divide dim."""

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.dim, self.layers, self.heads) < 1 or self.dim % (2 * self.heads):
            raise ConfigError(f"model: dim {self.dim} must be a multiple of 2 x heads ({self.heads}), and all sizes positive")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batches, optimizer, intervals. Intervals and lengths in iterations; a zero interval means never."""

    iters: int
    """Optimizer steps of the whole run; the learning-rate schedule ends here."""
    micro_batch_size: int
    """Samples of one pass of one rank."""
    global_batch_size: int
    """Samples of one optimizer step over all ranks."""
    out_dir: str
    """Where checkpoints and metrics.jsonl go."""
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_iters: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    seed: int = 1234
    """Of the model's initial weights."""
    save_interval: int = 0
    keep_checkpoints: int = 3
    """The last so many are kept."""
    eval_interval: int = 0
    eval_iters: int = 0
    """Global batches of one evaluation."""
    log_interval: int = 10
    hash_batches: bool = False
    """Write a hash of every global batch to metrics.jsonl: the proof that a resume is exact."""

    def __post_init__(self) -> None:
        least = {"iters": 1, "keep_checkpoints": 1, "log_interval": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least {low}")
        for name in ("warmup_iters", "save_interval", "eval_interval", "eval_iters"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run: [data] with [data.storage], [model], [train]."""

    data: DataConfig
    model: ModelConfig
    train: TrainConfig = field()

    def num_samples(self) -> tuple[int, int, int]:
        """Samples the run asks of train, valid and test, as Megatron counts them."""
        train = self.train
        evaluations = train.iters // train.eval_interval + 1 if train.eval_interval else 0
        size = train.global_batch_size
        return train.iters * size, evaluations * train.eval_iters * size, 0


def load_run(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A RunConfig from a TOML file and `section.name=value` overrides (values as in TOML, or bare text).

    Raises ConfigError for a missing file, broken TOML, an unknown name (with the nearest known one), a wrong type.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of the run's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no valid TOML ({error})") from None
    for override in overrides:
        _apply(table, override)
    if isinstance(table.get("data"), dict):  # names that users of Megatron know
        table["data"] = {MEGATRON_NAMES.get(name, name): value for name, value in table["data"].items()}
    _check_names(table, RunConfig, "")
    _fill_defaults(table)
    settings = dacite.Config(strict=True, cast=[tuple], type_hooks={float: _to_float})
    try:
        return dacite.from_dict(RunConfig, table, settings)
    except dacite.DaciteError as error:
        raise ConfigError(f"{path}: {error}") from None


def _to_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value  # `lr = 1` is meant as 1.0


def _apply(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.lstrip("-").partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: write it as section.name=value, for instance train.iters=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {section} is a setting, not a section")
    table[last] = value


def _check_names(table: Mapping[str, Any], kind: type, path: str) -> None:
    hints = get_type_hints(kind)
    known = [item.name for item in fields(kind)]
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {path}{near[0]}?" if near else f"known: {', '.join(path + other for other in known)}"
            raise ConfigError(f"unknown setting {path}{name}; {hint}")
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            _check_names(value, hints[name], f"{path}{name}.")
    for item in fields(kind):
        if is_dataclass(hints[item.name]) and item.name not in table and kind is RunConfig:
            raise ConfigError(f"the run has no [{item.name}] section")


def _fill_defaults(table: dict[str, Any]) -> None:
    data, model = table["data"], table["model"]
    if "vocab_size" in model:
        data.setdefault("vocab_size", model["vocab_size"])
