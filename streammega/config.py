"""Settings, checked once. Frozen and keyword-only; units in the name or beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streammega.errors import ConfigError

Transport = Literal["auto", "obstore", "fsspec"]

MiB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """How bytes are fetched. Nothing here changes what is read, only how fast and from where."""

    transport: Transport = "auto"
    """`auto` takes obstore for s3, gs, az and http(s), fsspec for every other scheme."""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Credentials, endpoint and so on, as fsspec takes them (`key`, `secret`, `endpoint_url`, `anon`, ...)."""
    part_bytes: int = 8 * MiB
    """Largest single range request."""
    max_requests: int = 32
    """Range requests in flight at once."""
    coalesce_bytes: int = 64 * 1024
    """Ranges with at most this gap between them are fetched as one."""
    timeout: float = 60.0
    """Seconds one request may take."""
    retries: int = 5
    """Times a failed request is tried again, with growing pauses."""

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "obstore", "fsspec"):
            raise ConfigError(f"transport is {self.transport!r}; it must be 'auto', 'obstore' or 'fsspec'")
        for name, least in (("part_bytes", 4096), ("max_requests", 1), ("coalesce_bytes", 0), ("retries", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.timeout > 0:
            raise ConfigError(f"timeout is {self.timeout}; it must be a positive number of seconds")


Order = Literal["megatron", "sequential"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and in which order."""

    blend: Sequence[str]
    """The dataset: one prefix (`.../web` for `web.bin` + `web.idx`), a path or URL."""
    sequence_length: int
    """Tokens of a sample, S."""
    split: str = "1,0,0"
    """Shares of train, valid and test, cut by sequence."""
    seed: int = 1234
    order: Order = "megatron"
    """`megatron`: Megatron's shuffle, bit for bit. `sequential`: as the file lies."""
    num_samples: tuple[int, int, int] | None = None
    """Samples asked of train, valid and test; they define the Megatron order, epochs included."""
    eod_id: int | None = None
    """The id that ends documents."""
    pad_id: int | None = None
    """The tokenizer's padding id; None: there is none."""
    allow_ambiguous_pad_tokens: bool = False
    """Accept a pad_id that equals eod_id; otherwise such a pad_id is ignored."""
    eod_mask_loss: bool = False
    """No loss where the token is eod_id."""
    reset_position_ids: bool = False
    """Positions restart after every eod_id."""
    add_extra_token: bool = True
    """Samples carry S + 1 tokens, so that every position has a label."""
    drop_last_partial_validation_sequence: bool = True
    """Drop the last, partial sample of valid (train and test always do)."""
    vocab_size: int | None = None
    """When given, a token id at or past it is an error that names the sample."""
    index_cache_dir: str | Path | None = None
    """Where `.idx` copies and built indices go; default ~/.cache/streammega."""
    storage: StorageConfig = field(default_factory=StorageConfig)

    def __post_init__(self) -> None:
        if isinstance(self.blend, str):
            object.__setattr__(self, "blend", [self.blend])
        if len(self.blend) != 1 or not all(isinstance(prefix, str) and prefix for prefix in self.blend):
            raise ConfigError(f"blend is {list(self.blend)!r}; it takes one prefix, such as ['s3://bucket/web']")
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length is {self.sequence_length}; it must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}; it must lie in [0, 2**32)")
        if self.order not in ("megatron", "sequential"):
            raise ConfigError(f"order is {self.order!r}; it must be 'megatron' or 'sequential'")
        if (self.eod_mask_loss or self.reset_position_ids) and self.eod_id is None:
            raise ConfigError("eod_mask_loss and reset_position_ids need eod_id, the id that ends documents")
        if self.num_samples is not None and (len(self.num_samples) != 3 or min(self.num_samples) < 0):
            raise ConfigError(f"num_samples is {self.num_samples}; it takes three counts: (train, valid, test)")

    @property
    def effective_pad_id(self) -> int:
        """The padding id in use: -1 when there is none, or when it collides with eod_id and that is not allowed."""
        if self.pad_id is None or (self.pad_id == self.eod_id and not self.allow_ambiguous_pad_tokens):
            return -1
        return self.pad_id
