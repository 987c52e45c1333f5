"""A run's settings: a TOML file, overrides on the command line, checked before anything starts."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import dacite

from streammega.config import DataConfig, PhaseConfig, parse_blend
from streammega.errors import ConfigError
from streammega.errors.redaction import redacted_repr
from streammega.order.batch_size import BatchSchedule, batch_schedule
from streammega.order.phase_starts import in_samples
from streammega.parallel.layout import ORDER
from streammega.train.setting_checks import Range, check_numbers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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

CHOICES = {
    "decay": ("cosine", "linear", "constant"),
    "decay_by": ("steps", "samples", "tokens"),
    "dtype": ("float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "backend": ("auto", "gloo", "nccl"),
}
"""Settings of [train] that are one of a few words."""

RANGES = {
    **dict.fromkeys(
        ("iters", "micro_batch_size", "global_batch_size", "keep_checkpoints", "log_interval"),
        Range(1),
    ),
    **dict.fromkeys(
        ("warmup_iters", "save_interval", "eval_interval", "eval_iters", "rewind", "clip_grad"),
        Range(0),
    ),
    **dict.fromkeys(("lr", "min_lr", "weight_decay"), Range(0, sys.float_info.max)),
    **dict.fromkeys(("beta1", "beta2"), Range(0, 1, open=True)),
    "largest_gradient": Range(sys.float_info.min),
    "seed": Range(-(2**63), 2**64, open=True),
    "timeout": Range(1e-3, 1e9),
}
"""Of numbers in [train].

Seeds are those of torch's generators; a timeout is whole milliseconds to torch, 30 years at most.
"""


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
        check_numbers("model", self, {})
        smallest = min(self.vocab_size, self.dim, self.layers, self.heads)
        # Twice: rotary embeddings turn pairs of the elements of a head.
        if smallest < 1 or self.dim % (2 * self.heads) != 0:
            raise ConfigError(
                f"model: dim {self.dim} must be a multiple of 2 x heads ({self.heads}), "
                f"and all sizes positive"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks divide the work; data parallelism is what the sizes leave of the world."""

    tp: int = 1
    """Tensor parallel: every layer is split over so many ranks."""
    cp: int = 1
    """Context parallel: every sequence is."""
    pp: int = 1
    """Pipeline parallel: the layers are."""
    virtual_stages: int = 1
    """Stretches of layers of each pipeline rank; more than one: the interleaved schedule."""
    order: str = ORDER
    """Which kind of parallelism numbers the ranks fastest."""
    data_parallel: Literal["buckets", "torch"] = "buckets"
    """Gradients by BucketedDataParallel, or by torch's DistributedDataParallel (tp = pp = 1)."""
    optimizer: Literal["replicated", "sharded", "zero"] = "replicated"
    """State on every rank; divided by ShardedOptimizer; or by torch's ZeroRedundancyOptimizer (with
    data_parallel = "torch").
    """
    bucket_size: int | None = None
    """Elements of a gradient bucket; default max(40M, 1M x ranks)."""
    sequence_parallel: bool = True
    """With tp: between the split layers each rank keeps and norms a tp-th of its tokens, which tp
    divides; losses are equal.
    """

    def __post_init__(self) -> None:
        check_numbers("parallel", self, {})
        without_pipeline = self.pp == 1
        if self.virtual_stages < 1 or (self.virtual_stages > 1 and without_pipeline):
            raise ConfigError(
                f"parallel.virtual_stages is {self.virtual_stages}; "
                f"more than one needs parallel.pp of two or more"
            )
        is_known = self.data_parallel in ("buckets", "torch")
        if not is_known or self.optimizer not in ("replicated", "sharded", "zero"):
            raise ConfigError(
                "parallel.data_parallel is buckets or torch, "
                "parallel.optimizer is replicated, sharded or zero"
            )
        by_torch = self.data_parallel == "torch"
        splits_the_model = self.tp > 1 or self.pp > 1
        if by_torch and (splits_the_model or self.optimizer == "sharded"):
            raise ConfigError(
                "parallel.data_parallel = torch goes with tp = pp = 1 "
                "and a replicated or zero optimizer"
            )
        if self.optimizer == "zero" and not by_torch:
            raise ConfigError(
                "parallel.optimizer = zero goes with parallel.data_parallel = torch; "
                "with buckets take sharded"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batches, optimizer, intervals. Intervals and lengths in iterations; a zero interval
    means never.
    """

    iters: int
    """Optimizer steps of the whole run; the learning-rate schedule ends here."""
    micro_batch_size: int
    """Samples of one pass of one rank."""
    global_batch_size: int
    """Samples of one optimizer step over all ranks."""
    rampup: tuple[int, int, int] | None = None
    """(start, increment, samples): the global batch grows from start to global_batch_size over so
    many samples.
    """
    out_dir: str
    """Where checkpoints and metrics go: one folder for all ranks, or a URL such as
    s3://bucket/run.
    """
    lr: float = 1e-3
    """The learning rate after the warmup: the largest."""
    min_lr: float | None = None
    """What the learning rate falls to by the last step. None: a tenth of lr."""
    warmup_iters: int = 0
    """Steps in which the learning rate rises to lr."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate goes from lr to min_lr after the warmup."""
    decay_by: Literal["steps", "samples", "tokens"] = "steps"
    """What the decay is even over: the steps, or the samples or tokens that they take, which differ
    where batches ramp up, or phases change their size or the length of samples.
    """
    weight_decay: float = 0.1
    """Of matrices; vectors have none."""
    beta1: float = 0.9
    """Of AdamW: how much of the former mean of gradients is kept."""
    beta2: float = 0.95
    """Of AdamW: how much of the former mean of their squares is kept."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    largest_gradient: float | None = None
    """A gradient with a larger element ends the run, with the parameter's name; of a rank's sum
    over its tokens, with parallel.data_parallel = buckets. One that is not finite always does.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters and activations; the narrow ones with fp32 main parameters, of
    parallel.optimizer = sharded.
    """
    seed: int = 1234
    """Of the model's initial weights."""
    recompute: Literal["none", "full"] | int = "none"
    """Layers whose activations are not kept for backward but computed again: none, all, or so many
    on each pipeline stage. Memory for a third more compute in those layers; losses and gradients
    are the same to the bit.
    """
    tf32: bool = False
    """On CUDA, multiply float32 matrices by TF32: faster, with 10 bits of mantissa."""
    deterministic: bool = False
    """Only algorithms of torch that give the same bits every time; an operation that has none is an
    error. Slower on CUDA.
    """
    save_interval: int = 0
    """Steps from one checkpoint to the next; the last step is saved too.

    0: no checkpoints, of the last step neither, but after SIGTERM or Ctrl-C; the run says so as it
    begins.
    """
    keep_checkpoints: int = 3
    """The last so many are kept."""
    async_save: bool = True
    """Train on while a checkpoint is written, or uploaded."""
    rewind: int | None = None
    """Resume from the last checkpoint at or before this step; later ones are set aside, under
    *.rewound. It is done once: what was trained after it is gone on with.
    """
    eval_interval: int = 0
    """Steps from one evaluation to the next; the last step is evaluated too."""
    eval_iters: int = 0
    """Global batches of one evaluation."""
    log_interval: int = 10
    """Steps from one line of the log to the next; metrics.jsonl has every step."""
    hash_batches: bool = False
    """Write a hash of every global batch to metrics.jsonl: the proof that a resume is exact."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too; needs `pip install 'streammega[tensorboard]'`."""
    timeout: float = 600.0
    """Seconds after which a collective that does not end ends the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is. auto: CUDA where every rank has a GPU to itself; the CPU where none has,
    or ranks outnumber GPUs.
    """
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How ranks talk. auto: NCCL for CUDA where torch has it, else gloo. gloo with device = cuda
    lets ranks share a GPU.
    """

    def __post_init__(self) -> None:
        self._check_recompute()
        check_numbers("train", self, RANGES)
        if self.lowest_lr > self.lr and self.decay != "constant":
            raise ConfigError(
                f"train.min_lr is {self.lowest_lr:g}, more than train.lr {self.lr:g}: "
                f"the rate would rise; lower min_lr"
            )
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"train.{name} is {value!r}; it must be one of {', '.join(allowed)}"
                )
        if self.device == "cpu" and self.backend == "nccl":
            raise ConfigError(
                "train.backend = nccl goes with GPUs, and train.device is cpu: "
                "set backend to auto or gloo"
            )

    def _check_recompute(self) -> None:
        recompute = self.recompute
        if recompute in ("none", "full"):
            return
        # true is an int to Python.
        is_int = isinstance(recompute, int) and not isinstance(recompute, bool)
        if not is_int or int(recompute) < 0:
            raise ConfigError(
                f"train.recompute is {recompute!r}; it must be none, full or a number of layers"
            )

    @property
    def lowest_lr(self) -> float:
        """What the learning rate falls to by the last step."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    @property
    def schedule(self) -> BatchSchedule:
        """The global batch size of every step of the first phase."""
        return batch_schedule(self.global_batch_size, self.rampup)


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
    """Name -> blend, each evaluated by itself, besides the valid split of [data]; they are read
    from their start every time.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        self._set_follow_record()
        self._set_phase_starts()
        self._check_vocabulary()
        if self.train.dtype != "float32" and self.parallel.optimizer != "sharded":
            raise ConfigError(
                f"train.dtype = {self.train.dtype} needs fp32 main parameters: "
                f"set parallel.optimizer = sharded"
            )
        if self.train.largest_gradient is not None and self.parallel.data_parallel == "torch":
            raise ConfigError(
                "train.largest_gradient is of gradients before they are averaged, which torch's "
                "DDP shows to nobody: set parallel.data_parallel = buckets"
            )
        for name, blend in self.validation.items():
            _check_blend(name, blend)
            letters = name.replace("_", "").replace("-", "")
            if not letters.isalnum():
                raise ConfigError(f"validation set {name!r}: names are letters, digits, - and _")

    def _set_follow_record(self) -> None:
        """What a run takes in is written beside its checkpoints, unless it says where."""
        follow = self.data.follow
        if follow is None or follow.record is not None:
            return
        out_dir = self.train.out_dir.rstrip("/")
        data = replace(self.data, follow=replace(follow, record=f"{out_dir}/follow"))
        # the way to set a field of what is frozen
        object.__setattr__(self, "data", data)

    def _set_phase_starts(self) -> None:
        """Every phase is told by its first sample, as all that reads it wants it."""
        data = in_samples(self.data, self.train.global_batch_size, self.train.rampup)
        object.__setattr__(self, "data", data)

    def _check_vocabulary(self) -> None:
        of_data = self.data.vocab_size
        of_model = self.model.vocab_size
        if of_data is not None and of_data > of_model:
            raise ConfigError(
                f"data.vocab_size is {of_data}, more than model.vocab_size {of_model}: the model "
                f"has no embedding for the ids between; leave data.vocab_size out, "
                f"or raise model.vocab_size"
            )

    @property
    def schedule(self) -> BatchSchedule:
        """The global batch size of every step, over all phases."""
        return replace(self.train.schedule, changes=self.data.batch_changes("train"))

    @property
    def every_stage(self) -> bool:
        """Whether every pipeline stage is given batches: positions or bounds of documents are then
        other ones in each sample, and the attention of every layer needs them.
        """
        return self.data.reset_position_ids or self.data.reset_attention_mask

    def num_samples(self) -> tuple[int, int, int]:
        """Samples the run asks of train, valid and test, as Megatron counts them."""
        train = self.train
        evaluations = 0
        if train.eval_interval:
            evaluations = train.iters // train.eval_interval + 1
        train_samples = self.schedule.samples_after(train.iters)
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
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give the path of the run's TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no valid TOML ({error})") from None
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
    known = [item.name for item in fields(kind)]
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"unknown setting {path}{name}; {_hint(name, known, path)}")
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            _check_names(value, hints[name], f"{path}{name}.")
    if kind is RunConfig:
        for section in ("data", "model", "train"):
            if section not in table:
                raise ConfigError(f"the run has no [{section}] section")


def _hint(name: str, known: Sequence[str], path: str) -> str:
    nearest = difflib.get_close_matches(name, known, 1)
    if nearest:
        return f"did you mean {path}{nearest[0]}?"
    names = [path + other for other in known]
    return f"known: {', '.join(names)}"


def _fill_defaults(table: dict[str, Any]) -> None:
    data = table["data"]
    model = table["model"]
    if isinstance(data, dict) and isinstance(model, dict) and "vocab_size" in model:
        data.setdefault("vocab_size", model["vocab_size"])
