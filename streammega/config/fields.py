"""Which fields are made of the ids of a sample."""

from __future__ import annotations

from dataclasses import dataclass

from streammega.config.setting_checks import set_whole_numbers
from streammega.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FieldsConfig:
    """Which fields are made of the ids of a sample: what `batch_fields` needs of a DataConfig, for
    ids from elsewhere.
    """

    sequence_length: int
    """Tokens of a sample, S."""
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
    reset_attention_mask: bool = False
    """Tokens do not attend over an eod_id: the loader adds "cu_seqlens", and an attention mask that
    is made says so.
    """
    create_attention_mask: bool = False
    """Add "attention_mask", bool [batch, 1, S, S], True where attention is forbidden."""
    vocab_size: int | None = None
    """When given, a token id at or past it is an error."""

    def __post_init__(self) -> None:
        set_whole_numbers(self, ("sequence_length", "eod_id", "pad_id", "vocab_size"))
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length is {self.sequence_length}; it must be at least 1")
        if self.eod_id is not None and self.eod_id < 0:
            raise ConfigError(
                f"eod_id is {self.eod_id}, which no stored id is; leave it out if the data has none"
            )
        vocab_size = self.vocab_size
        if self.eod_id is not None and vocab_size is not None and self.eod_id >= vocab_size:
            raise ConfigError(
                f"eod_id is {self.eod_id}, outside of the vocabulary of {vocab_size}: no document "
                f"would ever end; give the id that ends documents in the data"
            )
        asks_for_documents = (
            self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask
        )
        if asks_for_documents and self.eod_id is None:
            raise ConfigError(
                "eod_mask_loss, reset_position_ids and reset_attention_mask need eod_id, "
                "the id that ends documents"
            )

    @property
    def effective_pad_id(self) -> int:
        """The padding id in use: -1 when there is none, or when it collides with eod_id and that is
        not allowed.
        """
        if self.pad_id is None:
            return -1
        if self.pad_id == self.eod_id and not self.allow_ambiguous_pad_tokens:
            # ends of documents would be masked and zeroed as padding
            return -1
        return self.pad_id
