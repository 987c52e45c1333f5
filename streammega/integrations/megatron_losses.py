"""Losses by source in the reports of Megatron-LM and Megatron-Bridge.

    from streammega.integrations.megatron_losses import with_source_losses

    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder,
             with_source_losses(forward_step), ...)

Which dataset a sample is of follows from the order, so that nothing is sent between ranks, and every
rank of the last stage has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from streammega.errors import ConfigError
from streammega.integrations.frameworks import import_framework
from streammega.integrations.megatron import MegatronBatches
from streammega.loading.source_losses import add_losses_by_source

KEY = "lm loss"
"""Megatron's own name of the loss; that of a dataset is "lm loss/NAME"."""


@dataclass
class _Count:
    """How far the forward steps of one iterator are.

    start: the sample it began at. consumed: what Megatron had counted then. at: what it had counted
    when the iteration began, whose first `number` micro-batches have gone forward.
    """

    start: int
    consumed: int
    at: int
    number: int = 0

    def next_position(self, batches: MegatronBatches, consumed: int, micro_batches: int) -> int:
        """The global sample at which the next micro-batch begins, by Megatron's own count of samples: a
        micro-batch that it replays is itself again.

        consumed: samples of training that Megatron has counted. micro_batches: of an iteration.
        """
        number = self.number
        base = self.start
        if batches.split == "train":
            if self.at != consumed:
                self.at = consumed
                number = 0
            base += consumed - self.consumed
            self.number = (number + 1) % micro_batches
        else:  # evaluation replays nothing
            self.number = number + 1
        return base + number * batches.step_samples


def with_source_losses(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """A forward step whose reports also have the loss of each dataset, "lm loss/NAME": its sum and
    its tokens, which Megatron adds up over micro-batches and ranks, and logs as its own loss. One
    that had no token in an iteration is NaN there.

    forward_step: as in Megatron's `pretrain_gpt` or Bridge's `gpt_step`: it returns the loss of each
    token and `partial(loss_func, loss_mask, ...)`. Batches of other loaders, and those of
    --full-validation, are reported as they are. Each dataset is one more small all-reduce in an
    iteration.
    """
    counts: WeakKeyDictionary[MegatronBatches, _Count] = WeakKeyDictionary()

    @wraps(forward_step)
    def reporting_step(*arguments: Any, **keywords: Any) -> Any:
        """The forward step, its loss function also telling losses by source."""
        batches = _batches_among((*arguments, *keywords.values()))
        if batches is None:
            return forward_step(*arguments, **keywords)
        consumed = _consumed(arguments)
        if batches not in counts:
            start = batches.consumed_samples
            counts[batches] = _Count(start=start, consumed=consumed, at=consumed)
        position = counts[batches].next_position(batches, consumed, _micro_batches())
        output, loss_func = forward_step(*arguments, **keywords)
        return output, partial(_reported, loss_func, batches, position)

    return reporting_step


def _reported(
    loss_func: Any,
    batches: MegatronBatches,
    position: int,
    output: Tensor,
    *rest: Any,
    **keywords: Any,
) -> Any:
    """What a loss function gives, with losses by source in its report, which comes last."""
    result = loss_func(output, *rest, **keywords)
    if not isinstance(result, tuple) or not isinstance(result[-1], dict):
        return result  # of what asks for no report
    mask = _mask_of(loss_func, output)
    dataset_ids = batches.open().dataset.dataset_ids(position)
    names = batches.source_names
    rows = len(dataset_ids)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=output.device)
    sources = torch.from_numpy(dataset_ids)
    add_losses_by_source(sums, sources, output.reshape(rows, -1), mask.reshape(rows, -1))
    report = result[-1] | {f"{KEY}/{name}": sums[number] for number, name in enumerate(names)}
    return (*result[:-1], report)


def _mask_of(loss_func: Any, output: Tensor) -> Tensor:
    """The loss mask that a loss function was made with. Raises ConfigError if it has no mask."""
    mask: Any = next(iter(getattr(loss_func, "args", ())), None)
    if isinstance(mask, Tensor) and mask.numel() == output.numel():
        return mask
    raise ConfigError(
        "losses by source need the loss mask of each token: have forward_step return the losses of "
        "tokens and partial(loss_func, loss_mask, ...), as Megatron's own does"
    )


def _batches_among(arguments: tuple[Any, ...]) -> MegatronBatches | None:
    """Our batches, behind Megatron's iterator that can replay; None: they are another's."""
    for argument in arguments:
        iterable = getattr(argument, "iterable", argument)
        iterable = getattr(iterable, "megatron_batches", iterable)  # of Bridge's
        if isinstance(iterable, MegatronBatches):
            return iterable
    return None


def _consumed(arguments: tuple[Any, ...]) -> int:
    """Samples of training that Megatron has counted: Bridge gives its state to the forward step."""
    for argument in arguments:
        train_state = getattr(argument, "train_state", None)
        if train_state is not None:
            return int(train_state.consumed_train_samples)
    args = import_framework("megatron.training", "megatron").get_args()
    return int(args.consumed_train_samples)


def _micro_batches() -> int:
    """Micro-batches of an iteration on each rank."""
    calculator = import_framework("megatron.core.num_microbatches_calculator", "megatron")
    return int(calculator.get_num_microbatches())
