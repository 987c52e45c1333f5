"""All settings of a run: its sections [model], [parallel] and [train], and what they must be together; and
its file: TOML, with overrides of the command line.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import dacite

from streammega.config import DataConfig, PhaseConfig, StorageConfig, parse_blend
from streammega.config.validate import (
    Ge,
    Le,
    Lt,
    check_fields,
    field_types,
    read_toml,
    unknown_setting,
)
from streammega.errors import ConfigError
from streammega.errors.redaction import redacted_repr
from streammega.errors.words import pluralize
from streammega.order.schedule import TrainingSchedule, resolve_phase_starts, training_schedule
from streammega.storage.open import resolved

__all__ = ["ModelConfig", "ParallelConfig", "RunConfig", "TrainConfig", "load_run"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The example GPT."""

    vocab_size: Annotated[int, Ge(0)] = 0
    """Ids run below this; the data is checked against it. 0: data.vocab_size, or else what the manifests
    of the data name.
    """
    dim: int = 192
    """Width."""
    layers: int = 4
    """Blocks."""
    heads: int = 6
    """Attention heads; they divide dim."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        smallest = min(self.dim, self.layers, self.heads)
        # 2 x heads: rotary embeddings rotate pairs of the elements of a head.
        if smallest < 1 or self.dim % (2 * self.heads) != 0:
            raise ConfigError(
                f"model: dim {self.dim} must be a multiple of 2 x heads ({self.heads}), "
                f"and all sizes positive"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks divide the work; data parallelism is what the sizes leave of the world."""

    tp: int = 1
    """Tensor parallelism: each layer is split over so many ranks."""
    cp: int = 1
    """Context parallelism: each sequence is split over so many ranks."""
    pp: int = 1
    """Pipeline parallelism: the layers are divided over so many ranks."""
    virtual_pipeline_stages: int = 1
    """Pipeline stages on each pipeline rank. With more than one the schedule is interleaved."""
    optimizer: Literal["replicated", "sharded"] = "replicated"
    """replicated: each rank has whole parameters and optimizer state, and BucketedDataParallel sums
    gradients. sharded: torch's fully_shard divides parameters, gradients and state over ranks.
    """
    bucket_size: int | None = None
    """Elements of a gradient bucket; default max(40M, 1M x ranks). With optimizer = "sharded" it has no
    effect: each layer is a bucket.
    """
    sequence_parallel: bool = True
    """With tp: between the split layers each rank keeps a tp-th of its tokens, and norms only those. tp
    must divide them. Losses stay the same.
    """

    def __post_init__(self) -> None:
        check_fields(self, "parallel.")
        if self.virtual_pipeline_stages < 1 or (self.virtual_pipeline_stages > 1 and self.pp == 1):
            raise ConfigError(
                f"parallel.virtual_pipeline_stages is {self.virtual_pipeline_stages}; "
                f"more than one needs parallel.pp of two or more"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batches, optimizer, intervals. Intervals and lengths in iterations; a zero interval
    means never.
    """

    train_iters: Annotated[int, Ge(1)]
    """Optimizer steps of the whole run; the learning-rate schedule ends here."""
    micro_batch_size: Annotated[int, Ge(1)]
    """Samples of one pass of one rank."""
    global_batch_size: Annotated[int, Ge(1)]
    """Samples of one optimizer step over all ranks."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """(start, increment, samples): the global batch grows from start to global_batch_size over so
    many samples.
    """
    out_dir: str
    """Where checkpoints and metrics go: one folder for all ranks, or a URL such as s3://bucket/run. For
    a URL, metrics.jsonl is on the first rank's machine, in bucket/run under the current folder.
    """
    lr: Annotated[float, Ge(0), Lt(math.inf)] = 1e-3
    """The learning rate after the warmup: the largest."""
    warmup_iters: Annotated[int, Ge(0)] = 0
    """Steps in which the learning rate rises to lr."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate goes from lr to a tenth of it, from the warmup to the last step."""
    weight_decay: Annotated[float, Ge(0), Lt(math.inf)] = 0.1
    """The weight decay of matrices; vectors have none."""
    clip_grad: Annotated[float, Ge(0)] = 1.0
    """Largest global gradient norm; 0: no clipping."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the computation. Parameters are always fp32; narrower computation needs
    parallel.optimizer = sharded.
    """
    seed: Annotated[int, Ge(-(2**63)), Lt(2**64)] = 1234
    """The seed of the model's initial weights."""
    recompute: Literal["none", "full"] = "none"
    """Layers whose activations backward computes again: none, or full (all). They need less memory, and a
    third more compute. Losses and gradients stay the same to the bit.
    """
    deterministic: bool = False
    """Only algorithms of torch that give the same bits every time; an operation that has none is an
    error. Slower on CUDA.
    """
    save_interval: Annotated[int, Ge(0)] = 0
    """Steps from one checkpoint to the next; the last step is saved too.

    0: no checkpoints, of the last step neither, but after SIGTERM or Ctrl-C; the run says so as it
    begins.
    """
    keep_checkpoints: Annotated[int, Ge(1)] = 3
    """How many of the last checkpoints are kept."""
    resume_from: str | None = None
    """Begin at a checkpoint of another run, such as runs/one/checkpoints/step-1200 or the URL of one, with
    a new out_dir. Once out_dir has checkpoints, the run goes on from those.
    """
    eval_interval: Annotated[int, Ge(0)] = 0
    """Steps from one evaluation to the next; the last step is evaluated too."""
    eval_iters: Annotated[int, Ge(0)] = 0
    """Global batches of one evaluation."""
    log_interval: Annotated[int, Ge(1)] = 10
    """Steps from one line of the log to the next; metrics.jsonl has every step."""
    log_batch_hash: bool = False
    """Write a hash of every global batch to metrics.jsonl: the proof that a resume is exact."""
    metrics_port: Annotated[int | None, Ge(1), Le(65535)] = None
    """Serve the figures of each rank's loader to Prometheus and `streammega top`, at
    http://127.0.0.1:PORT/metrics. Rank r of a machine has the port metrics_port + r. Of
    a tensor-parallel group and of a pipeline the first rank serves. Needs
    `pip install 'streammega[metrics]'`.
    """
    collective_timeout: Annotated[float, Ge(1e-3), Le(1e9)] = 600.0
    """Seconds that ranks wait for each other in a collective before the run ends with an error."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is. auto: CUDA if there are GPUs; the CPU if there are none, or if torchrun started
    more ranks on a host than it has GPUs.
    """
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How ranks communicate. auto: NCCL for CUDA if torch has it, else gloo. gloo with device = cuda lets
    ranks share a GPU.
    """

    def __post_init__(self) -> None:
        self._check_out_dir()
        check_fields(self, "train.")
        beginning = None if self.resume_from is None else resolved(self.resume_from)
        if beginning is not None and beginning.startswith(f"{resolved(self.out_dir).rstrip('/')}/"):
            raise ConfigError(
                f"train.resume_from is {self.resume_from!r}, in train.out_dir itself, where a run goes on "
                f"from its newest checkpoint; give a new out_dir"
            )
        if self.warmup_iters > self.train_iters:
            raise ConfigError(
                f"train.warmup_iters is {self.warmup_iters}, more than train.train_iters {self.train_iters}: "
                f"the learning rate would never reach train.lr; lower warmup_iters"
            )
        if self.device == "cpu" and self.backend == "nccl":
            raise ConfigError(
                "train.backend = nccl goes with GPUs, and train.device is cpu: "
                "set backend to auto or gloo"
            )

    def _check_out_dir(self) -> None:
        scheme, is_url, rest = self.out_dir.partition(":/")
        is_cut_short = scheme.isalnum() and not (rest.startswith("/") and rest.strip("/"))
        if not self.out_dir.strip() or (is_url and is_cut_short):
            raise ConfigError(
                f"train.out_dir is {self.out_dir!r}; it must be a folder or a URL, "
                f"such as s3://bucket/run"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run: [data] with [data.storage], [model], [train], and where wanted [parallel] and
    [validation].
    """

    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig
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

    def with_vocabulary(self, vocab_size: int | None) -> RunConfig:
        """The run with the vocabulary of its opened data, where the model names none. Raises ConfigError
        if neither does.
        """
        if self.model.vocab_size:
            return self
        if vocab_size is None:
            raise ConfigError(
                "nothing says how many ids there are: not all manifests of the data name a tokenizer; set "
                "model.vocab_size"
            )
        return replace(self, model=replace(self.model, vocab_size=vocab_size))

    def _set_vocabulary(self) -> None:
        """The data is checked against the model's vocabulary, unless it names its own."""
        of_data = self.data.vocab_size
        of_model = self.model.vocab_size
        if not of_model:  # known when the data is open
            return
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
        for section in ("data", "train"):
            if section not in table:
                raise ConfigError(f"the run has no [{section}] section")


def _check_section(table: Any, kind: type, section: str) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{section} is a setting; it must be a section: write [{section}]")
    _check_names(table, kind, f"{section}.")
