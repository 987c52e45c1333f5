"""Supervised fine-tuning: conversations from JSON lines in samples, with loss on answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.config.columns import refuse_columns
from streammega.dataset.conversations import Message, load_record, messages_of, turns_of
from streammega.dataset.labels import list_names
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError
from streammega.kernels.shuffle import LegacyShuffler
from streammega.samples.fields import Batch
from streammega.samples.host_fields import scan_padding


@runtime_checkable
class ConversationEncoder(Protocol):
    """Conversations to tokens by a chat template: `streammega.convert.ChatEncoder`."""

    def conversation(self, record: Any, where: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids of a record, and which of them are the assistant's."""


class SFTDataset(torch.utils.data.Dataset[Batch]):
    """Samples of whole conversations end to end, which do not see each other.

    A line holds {"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"},
    ...]}. A message becomes `<|role|>` and a newline, its text, and eod_id; loss is on the text and
    eod of assistant messages. With a `ChatEncoder`, the chat template writes them, and says what
    the assistant writes. Conversations are shuffled by the seed, and fill a sample until the next
    one does not fit. A conversation longer than a sample is cut (`num_cut` counts them).

    `dataset[k]` has tokens, labels, position_ids int64 [S] (positions restart with each
    conversation), loss_mask float32 [S], and cu_seqlens int32 [conversations + 1 (+ 1 for
    padding)], from 0 to S. `SFTDataset.collate` stacks samples.

    Args:
        paths: JSON-lines files.
        encode: text to token ids, without special tokens added; or a
            `streammega.convert.ChatEncoder`.
        config: sequence_length, seed, eod_id (needed without a ChatEncoder), pad_id.

    Raises ConfigError without eod_id, FormatError naming file and line, or an id at or past
    vocab_size, ObjectNotFoundError.
    """

    def __init__(
        self,
        paths: Sequence[str],
        encode: Callable[[str], Sequence[int]] | ConversationEncoder,
        config: DataConfig,
    ) -> None:
        if config.exclusions_of("train"):
            raise ConfigError(
                "exclude_documents names documents of converted datasets, but these conversations are lines "
                "of files; delete the lines there"
            )
        refuse_columns(config, "these conversations are lines of files, which have no columns")
        self.config = config
        conversations = list(_encoded(paths, encode, config))
        if not conversations:
            raise FormatError(f"{', '.join(paths)}: hold no conversations")
        longest = config.sequence_length
        self.num_cut = 0
        kept_tokens = []
        kept_answers = []
        for tokens, answers in conversations:
            self.num_cut += len(tokens) > longest
            kept_tokens.append(tokens[:longest])
            kept_answers.append(answers[:longest])
        lengths = np.array([len(tokens) for tokens in kept_tokens], np.int64)
        # all conversations end to end: conversation c is tokens [starts[c], starts[c + 1])
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._tokens = np.concatenate(kept_tokens)
        self._answers = np.concatenate(kept_answers)
        try:
            scan_padding(self._tokens[None], config)
        except FormatError as error:
            raise FormatError(f"{list_names(paths)}: {error}") from None
        self._order = np.arange(len(conversations))
        LegacyShuffler(config.seed).shuffle(self._order)
        self._samples = pack(lengths[self._order], longest)

    def __len__(self) -> int:
        return len(self._samples) - 1

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self.config.sequence_length
        pad = max(self.config.effective_pad_id, 0)  # without a pad_id, 0: there is no loss on it
        tokens = np.full(length, pad, np.int64)
        labels = np.full(length, pad, np.int64)
        loss_mask = np.zeros(length, np.float32)
        position_ids = np.zeros(length, np.int64)
        bounds = [0]
        begin = 0  # of a conversation, in the sample
        for conversation in self._order[self._samples[index] : self._samples[index + 1]]:
            first = self._starts[conversation]
            stop = self._starts[conversation + 1]
            end = begin + int(stop - first)
            tokens[begin:end] = self._tokens[first:stop]
            # no loss on a conversation's last token: its label would be of another conversation
            labels[begin : end - 1] = self._tokens[first + 1 : stop]
            loss_mask[begin : end - 1] = self._answers[first + 1 : stop]
            position_ids[begin:end] = np.arange(end - begin)
            bounds.append(end)
            begin = end
        # padding is a document of its own
        position_ids[begin:] = np.arange(length - begin)
        if begin < length:
            bounds.append(length)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(position_ids),
            "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        }

    @staticmethod
    def collate(samples: Sequence[Batch]) -> Batch:
        """Stack samples; cu_seqlens become [samples, longest], filled up with S
        (empty sequences).
        """
        batch = {}
        for name in samples[0]:
            if name != "cu_seqlens":
                batch[name] = torch.stack([sample[name] for sample in samples])
        bounds_of_sample = [sample["cu_seqlens"] for sample in samples]
        longest = max(len(bounds) for bounds in bounds_of_sample)
        length = int(bounds_of_sample[0][-1])
        rows = torch.full((len(samples), longest), length, dtype=torch.int32)
        for row, bounds in zip(rows, bounds_of_sample, strict=True):
            row[: len(bounds)] = bounds
        batch["cu_seqlens"] = rows
        return batch


def pack(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """First item of each sample, and one past the last: items in order, a new sample when one does
    not fit; int64.
    """
    firsts = [0]
    filled = 0
    for number, length in enumerate(lengths.tolist()):
        if filled and filled + length > size:
            firsts.append(number)
            filled = 0
        filled += length
    return np.array([*firsts, len(lengths)], np.int64)


def _encoded(
    paths: Sequence[str],
    encode: Callable[[str], Sequence[int]] | ConversationEncoder,
    config: DataConfig,
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Token ids of each conversation, and 1.0 where a token belongs to an answer."""
    if isinstance(encode, ConversationEncoder):
        for record, where in _records(paths):
            roles = [turn["role"] for turn in turns_of(record, where)]
            _check_answered(roles, where)
            tokens, answers = encode.conversation(record, where)
            yield tokens, answers.astype(np.float32)
        return
    if config.eod_id is None:
        raise ConfigError("fine-tuning needs eod_id, which ends every message")
    for record, where in _records(paths):
        messages = messages_of(record, where)
        _check_answered([message.role for message in messages], where)
        yield _encode(messages, encode, config.eod_id)


def _records(paths: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """The record of each line, and where it is."""
    for path in paths:
        try:
            with open(path, "rb") as file:
                for line, data in enumerate(file, 1):
                    if data.strip():
                        where = f"{path}:{line}"
                        yield load_record(data, where), where
        except FileNotFoundError:
            raise ObjectNotFoundError(f"{path}: no such file; check the path") from None


def _check_answered(roles: Sequence[str], where: str) -> None:
    if "assistant" not in roles:
        raise FormatError(
            f"{where}: has no message of the assistant, so there is nothing to learn; delete the record"
        )


def _encode(
    messages: Sequence[Message], encode: Callable[[str], Sequence[int]], eod: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Token ids of a conversation, and 1.0 where a token belongs to an answer."""
    tokens: list[int] = []
    answers: list[float] = []
    for message in messages:
        header = list(encode(message.header))
        body = [*encode(message.text), eod]
        tokens += header + body
        answers += [0.0] * len(header) + [float(message.is_answer)] * len(body)
    return np.array(tokens, np.int32), np.array(answers, np.float32)
