"""The example GPT: RoPE, RMSNorm, SDPA, SwiGLU, tied embeddings. Small, plain, fast enough for a laptop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streammega.train.config import ModelConfig

ROPE_BASE = 10_000.0


class GPT(nn.Module):
    """Token ids [batch, S] and positions [batch, S] to logits [batch, S, vocab_size]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head_dim = config.dim // config.heads
        self.apply(_initialize)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Logits; the output projection is the embedding's transpose."""
        rotation = rope(position_ids, self.head_dim)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Attention, then a gated feed-forward, each on a normed residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = -(-config.dim * 8 // 3 // 16) * 16
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.project = nn.Linear(config.dim, config.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.gate_up = nn.Linear(config.dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [batch, S, dim] -> the same shape."""
        x = x + self.project(self._attend(self.attention_norm(x), rotation))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        mlp: Tensor = self.down(F.silu(gate) * up)
        return x + mlp

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, dim)


def rope(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of the rotary angles, each [batch, 1, S, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids.float()[:, None, :, None] * (ROPE_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of the last dimension by their angles."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
