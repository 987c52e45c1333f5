"""The example GPT: RoPE, RMSNorm, SDPA, SwiGLU, tied embeddings. Small, plain, fast enough for a
laptop.

Whole on one rank, or a stretch of its layers as a pipeline stage; its linear layers split over
tensor-parallel ranks by `parallelize` and its sequences over context-parallel ones by
`attention.attend`.
"""

from __future__ import annotations

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
from streammega.order.rank_samples import zigzag_bounds
from streammega.train.attention import ContextParallel, attend
from streammega.train.config import ModelConfig
from streammega.train.visibility import Visibility

ROPE_BASE = 10_000.0
INITIAL_STD = 0.02
TIED = "head.weight"
"""The output projection, which is the embedding's weight; by itself on a last stage that has no
embedding.
"""


class GPT(nn.Module):
    """Token ids [batch, S] and positions [batch, S] to logits [batch, S, vocab_size].

    As a stage without the embedding it takes, and without the head it gives, activations [batch, S,
    dim]. Split over tensor-parallel ranks it gives this rank's part of the vocabulary; if it is
    sequence-parallel, activations of its part of S.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in range(config.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim)
        self.head: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.context: ContextParallel | None = None
        self.recomputed = 0
        """The first so many layers keep their input for backward, and compute the rest of their
        activations again.
        """
        self.apply(_initialize)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        longest: Tensor | None = None,
    ) -> Tensor:
        """Logits or activations.

        cu_seqlens: int32 [batch, n], bounds of documents in whole samples; None: samples are one
        document each. longest: int32 [batch] on the host, the tokens of the longest document at
        least; None: looked up.
        """
        rotation = rope(position_ids, self.head_dim)
        visibility = self._visibility(position_ids.shape[1], cu_seqlens, longest)
        if self.embedding is not None:
            x = self.embedding(x)
        for number, block in enumerate(self.blocks.values()):
            if number < self.recomputed:
                # Nothing in a block is random: there is no state of generators to bring back.
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
                f"{stages} pipeline stages for {layers} layers: lower parallel.pp, or add model.layers"
            )
        first = layers * stage // stages
        last = layers * (stage + 1) // stages
        self.blocks = nn.ModuleDict(
            {str(number): self.blocks[str(number)] for number in range(first, last)}
        )
        if stage > 0:
            self.embedding = None
        if stage < stages - 1:
            self.norm = self.head = None

    def use_context(self, context: ContextParallel | None) -> None:
        """Let attention reach the tokens of other context-parallel ranks."""
        self.context = context
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.context = context

    def recompute(self, layers: int | str) -> None:
        """Compute activations again in backward: of "full" all layers, of "none" none, or of the
        first so many.
        """
        named = {"none": 0, "full": len(self.blocks)}
        self.recomputed = named[layers] if isinstance(layers, str) else layers
        for number, block in enumerate(self.blocks.values()):
            assert isinstance(block, Block)
            block.gather_again = number >= self.recomputed

    def _visibility(
        self, kept: int, cu_seqlens: Tensor | None, longest: Tensor | None
    ) -> Visibility:
        context = self.context
        rank, size = (context.rank, context.size) if context is not None else (0, 1)
        most = None if longest is None else int(longest.max())
        return Visibility(zigzag_bounds(kept * size, rank, size), kept * size, cu_seqlens, most)

    def parallelize(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        """Split the linear layers over a one-dimensional mesh, by torch's parallelize_module. The
        head gives part of the logits.

        sequence_parallel: between them a rank keeps only its part of the sequence. Norms then
        gather what they have normed, once for all layers that take it.
        """
        whole = Replicate()
        between = Shard(1) if sequence_parallel else Replicate()
        plan: dict[str, ParallelStyle] = {"head": ColwiseParallel(output_layouts=Shard(-1))}
        plan |= {"embedding": RowwiseParallel(input_layouts=whole, output_layouts=between)}
        plan |= {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {
            f"blocks.*.{name}": RowwiseParallel(output_layouts=between)
            for name in ("project", "down")
        }
        norms = (
            ("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm") if sequence_parallel else ()
        )
        plan |= {name: SequenceParallel() for name in norms}
        gather = PrepareModuleOutput(
            output_layouts=between, desired_output_layouts=whole, use_local_output=False
        )
        gathers: dict[str, ParallelStyle] = dict.fromkeys(norms, gather)
        dropped = [name for name in ("embedding", "norm", "head") if getattr(self, name) is None]
        for styles in (plan, gathers):
            parallelize_module(
                self, mesh, {name: style for name, style in styles.items() if name not in dropped}
            )
        self.tie()

    def tie(self) -> None:
        """Share the weight of embedding and head again, after something that treats
        each by itself.
        """
        if self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Attention, then a gated feed-forward, each on a normed residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = -(-config.dim * 8 // 3 // 16) * 16
        self.head_dim = config.dim // config.heads
        self.context: ContextParallel | None = None
        self.gather_again = True
        self.attention_norm = nn.RMSNorm(config.dim)
        self.q, self.k, self.v, self.project = (
            nn.Linear(config.dim, config.dim, bias=False) for _ in range(4)
        )
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.gate, self.up = (nn.Linear(config.dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], visibility: Visibility) -> Tensor:
        """x: [batch, S, dim] -> the same shape."""
        x = x + self.project(self._attend(self.attention_norm(x), rotation, visibility))
        normed = self.mlp_norm(x)
        mlp: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + mlp

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], visibility: Visibility) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v)
        )
        mixed = attend(
            rotate(q, rotation),
            rotate(k, rotation),
            v,
            visibility,
            self.context,
            gather_again=self.gather_again,
        )
        return mixed.flatten(2)


def rope(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of the rotary angles, each [batch, S, 1, head_dim / 2]."""
    exponents = (
        torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    )
    angles = position_ids.float()[:, :, None, None] * (ROPE_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of the last dimension by their angles."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INITIAL_STD)
