"""The example GPT: RoPE, RMSNorm, SDPA, SwiGLU, tied embeddings. Small, plain, fast enough for a
laptop.

A rank has all of its layers, or some as a pipeline stage. `parallelize` splits the linear layers over
tensor-parallel ranks, and `attention.attend` works on sequences that are split over context-parallel
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from streammega.errors import ConfigError
from streammega.order.sharding import zigzag_bounds
from streammega.train.attention import ContextParallel, Visibility, attend
from streammega.train.config import ModelConfig

ROPE_BASE = 10_000.0
INITIAL_STD = 0.02
TIED = "head.weight"
"""The output projection. It shares the embedding's weight, or has a copy on a last stage without an
embedding.
"""


class GPT(nn.Module):
    """Token ids [batch, S] and positions [batch, S] to logits [batch, S, vocab_size].

    A stage without the embedding takes activations [batch, S, dim], and one without the head returns
    them. Split over tensor-parallel ranks, the logits are of this rank's part of the vocabulary, and
    with sequence parallelism activations are of its part of S.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.dim
        vocab_size = config.vocab_size
        self.head_dim = dim // config.heads
        self.embedding: nn.Embedding | None = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in range(config.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(dim)
        self.head: nn.Linear | None = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.context: ContextParallel | None = None
        self.recomputes = False
        """Whether layers keep only their input for backward, and compute activations again."""

    def initial_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """(name, first values) of each parameter, one at a time: matrices are drawn, norms begin
        with 1. The parameters may be on any device.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            values = torch.ones(parameter.shape)
            if parameter.dim() > 1:
                values.normal_(0.0, INITIAL_STD, generator=generator)
            yield name, values

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Give a whole model its first values."""
        parameters = dict(self.named_parameters())
        for name, values in self.initial_values(seed):
            parameters[name].copy_(values)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        longest: Tensor | None = None,
    ) -> Tensor:
        """Logits or activations.

        x: token ids, or activations of the stage before. cu_seqlens: int32 [batch, n], bounds of
        documents in whole samples; None: a sample is one document. longest: int64 [batch] on the host,
        at least the tokens of the longest document; None: it is read from the device.
        """
        rotation = rope(position_ids, self.head_dim)
        context = self.context
        cp_rank = 0 if context is None else context.rank
        cp_size = 1 if context is None else context.size
        length = position_ids.shape[1] * cp_size
        parts = zigzag_bounds(length, cp_rank, cp_size)
        longest_tokens = None if longest is None else int(longest.max())
        visibility = Visibility(parts, length, cu_seqlens, longest_tokens)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            if self.recomputes:
                # Nothing in a block is random, so no state of a generator has to be restored.
                x = checkpoint(
                    block, x, rotation, visibility, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(x, rotation, visibility)
        if self.head is None or self.norm is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits

    def keep_stage(self, stage: int, stages: int) -> None:
        """Become one of `stages` pipeline stages: drop the layers of the others.

        Raises ConfigError if there are too many.
        """
        layers = len(self.blocks)
        if stages > layers:
            raise ConfigError(
                f"{stages} pipeline stages for {layers} layers: "
                f"lower parallel.pp, or add model.layers"
            )
        first = layers * stage // stages
        last = layers * (stage + 1) // stages
        # Keys are numbers, so that the parameters of a stage have the names of the whole model.
        names = [str(number) for number in range(first, last)]
        self.blocks = nn.ModuleDict({name: self.blocks[name] for name in names})
        if stage > 0:
            self.embedding = None
        if stage < stages - 1:
            self.norm = None
            self.head = None

    def use_context(self, context: ContextParallel | None) -> None:
        """Let attention reach the tokens of other context-parallel ranks."""
        self.context = context
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.context = context

    def recompute(self) -> None:
        """Compute the activations of all layers again in backward."""
        self.recomputes = True
        for block in self.blocks.values():
            assert isinstance(block, Block)
            # Forward is computed again, and gathers keys and values then.
            block.gather_again = False

    def parallelize(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        """Split the linear layers over a one-dimensional mesh, by torch's parallelize_module. The head
        then returns a part of the logits.

        sequence_parallel: between the layers a rank keeps only its part of the sequence. Norms then
        gather their output, once for all layers that take it.
        """
        between = Shard(1) if sequence_parallel else Replicate()
        plan: dict[str, ParallelStyle] = {
            "head": ColwiseParallel(output_layouts=Shard(-1)),
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        }
        for name in ("q", "k", "v", "gate", "up"):
            plan[f"blocks.*.{name}"] = ColwiseParallel()
        for name in ("project", "down"):
            plan[f"blocks.*.{name}"] = RowwiseParallel(output_layouts=between)
        self._apply_styles(plan, mesh)
        if sequence_parallel:
            gather = PrepareModuleOutput(
                output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False
            )
            norms = ("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm")
            # Two styles for each norm: a plan has one style for a module, so there are two plans.
            self._apply_styles({name: SequenceParallel() for name in norms}, mesh)
            self._apply_styles(dict.fromkeys(norms, gather), mesh)
        self.tie()

    def _apply_styles(self, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
        """Apply styles by the names of modules, except those that this stage has dropped."""
        kept: dict[str, ParallelStyle] = {}
        for name, style in styles.items():
            is_dropped = name in ("embedding", "norm", "head") and getattr(self, name) is None
            if not is_dropped:
                kept[name] = style
        parallelize_module(self, mesh, kept)

    def tie(self) -> None:
        """Share the weight of embedding and head again, after both were changed separately."""
        if self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Attention, then a gated feed-forward, each on a normed residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.dim
        hidden = hidden_size(dim)
        self.head_dim = dim // config.heads
        self.context: ContextParallel | None = None
        self.gather_again = True
        self.attention_norm = nn.RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.project = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], visibility: Visibility) -> Tensor:
        """x: [batch, S, dim] -> the same shape."""
        mixed = self._attend(self.attention_norm(x), rotation, visibility)
        x = x + self.project(mixed)
        normed = self.mlp_norm(x)
        gated = F.silu(self.gate(normed)) * self.up(normed)
        mlp: Tensor = self.down(gated)
        return x + mlp

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], visibility: Visibility) -> Tensor:
        """x: [batch, S, dim] -> the same shape, of heads end to end."""
        heads = (-1, self.head_dim)
        q = self.q(x).unflatten(-1, heads)
        k = self.k(x).unflatten(-1, heads)
        v = self.v(x).unflatten(-1, heads)
        q = rotate(q, rotation)
        k = rotate(k, rotation)
        mixed = attend(q, k, v, visibility, self.context, gather_again=self.gather_again)
        return mixed.flatten(2)


def hidden_size(dim: int) -> int:
    """Width of the feed-forward: 8/3 of the model's, rounded up to a multiple of 16. Its three matrices
    then have as many parameters as the usual two of width 4.
    """
    sixteens = math.ceil(dim * 8 / (3 * 16))
    return sixteens * 16


def rope(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of the rotary angles, each [batch, S, 1, head_dim / 2]."""
    device = position_ids.device
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = ROPE_BASE**-exponents
    positions = position_ids.float()[:, :, None, None]
    angles = positions * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of the last dimension by their angles."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return rotated.to(x.dtype)
