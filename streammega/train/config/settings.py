"""The sections of a run: [model], [parallel] and [train]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from streammega.config.validate import Ge, Le, Lt, check_fields
from streammega.errors import ConfigError
from streammega.storage.open import resolved


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
        check_fields(self, "model.")
        smallest = min(self.vocab_size, self.dim, self.layers, self.heads)
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
