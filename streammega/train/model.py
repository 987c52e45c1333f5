"""The example GPT: RoPE, RMSNorm, SDPA, SwiGLU, tied embeddings. Small, plain, fast enough for a
laptop.

A rank has all of its layers, or some as a pipeline stage. `stages` splits the linear layers over
tensor-parallel ranks, and `attention.attend` works on sequences that are split over context-parallel
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streammega.order.sharding import zigzag_bounds
from streammega.train.attention import ALONE, ContextParallel, Visibility, attend
from streammega.train.config import ModelConfig

ROPE_BASE = 10_000.0
INITIAL_STD = 0.02


class GPT(nn.Module):
    """Token ids [batch, S] and positions [batch, S] to logits [batch, S, vocab_size].

    A stage without the embedding takes activations [batch, S, dim], and one without the head returns
    them. Split over tensor-parallel ranks, the logits are of this rank's part of the vocabulary, and
    with sequence parallelism activations are of its part of S.

    Args:
        config: of the whole model.
        stage, num_stages: the pipeline stage to make.
        context: the ranks over which sequences are split.
        recompute: layers keep only their input for backward, and compute activations again.
    """

    def __init__(
        self,
        config: ModelConfig,
        stage: int = 0,
        num_stages: int = 1,
        *,
        context: ContextParallel = ALONE,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        dim = config.dim
        vocab_size = config.vocab_size
        is_last = stage == num_stages - 1
        start = config.layers * stage // num_stages
        stop = config.layers * (stage + 1) // num_stages
        self.head_dim = dim // config.heads
        self.context = context
        self.recompute = recompute
        self.embedding = nn.Embedding(vocab_size, dim) if stage == 0 else None
        # Keys are numbers, so that the parameters of a stage have the names of the whole model.
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, context, recompute) for layer in range(start, stop)}
        )
        self.norm = nn.RMSNorm(dim) if is_last else None
        self.head = nn.Linear(dim, vocab_size, bias=False) if is_last else None
        self.tie()

    def tie(self) -> None:
        """Share the weight of embedding and head, also again after both were changed separately."""
        if self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

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
        longest: int | None = None,
    ) -> Tensor:
        """Logits or activations.

        x: token ids, or activations of the stage before. cu_seqlens: int32 [batch, n], bounds of
        documents in whole samples; None: a sample is one document. longest: at least the tokens of the
        longest document; None: it is read from the device.
        """
        rotation = rope(position_ids, self.head_dim)
        length = position_ids.shape[1] * self.context.size
        parts = zigzag_bounds(length, self.context.rank, self.context.size)
        visibility = Visibility(parts, length, cu_seqlens, longest)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            if self.recompute:
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


class Block(nn.Module):
    """Attention, then a gated feed-forward, each on a normed residual stream."""

    def __init__(self, config: ModelConfig, context: ContextParallel, recompute: bool) -> None:
        super().__init__()
        dim = config.dim
        hidden = hidden_size(dim)
        self.head_dim = dim // config.heads
        self.context = context
        # A forward that is computed again gathers keys and values then.
        self.gather_again = not recompute
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
