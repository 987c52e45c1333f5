"""The stages of the model that a rank holds: cut out of the whole, split over its groups, with the
first weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from streammega.errors import ConfigError
from streammega.parallel import Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.train.attention import ContextParallel
from streammega.train.config import RunConfig
from streammega.train.first_weights import fill_with_first_weights
from streammega.train.model import GPT, TIED, hidden_size
from streammega.train.sharding import DATA, TENSOR, make_mesh, shard
from streammega.train.vocab_loss import VocabPart


def make_stages(
    config: RunConfig, ranks: Ranks, num_stages: int, stage_ids: Sequence[int], device: torch.device
) -> tuple[list[GPT], Mapping[str, torch.Size]]:
    """Stages of the model that one rank alone would make, and the shapes of all its parameters."""
    check_tensor_parallel(config, ranks.layout)
    dtype: torch.dtype = getattr(torch, config.train.dtype)
    is_sharded = config.parallel.optimizer == "sharded"
    mesh = make_mesh(ranks, device.type) if is_sharded else None
    # Shapes only: memory is for what this rank keeps.
    with torch.device("meta"):
        whole = GPT(config.model)
        chunks = [GPT(config.model) for _ in stage_ids]
    for chunk, stage in zip(chunks, stage_ids, strict=True):
        chunk.keep_stage(stage, num_stages)
        chunk.recompute(config.train.recompute)
        # Split before there is memory, so that memory is made for this rank's parts alone.
        _split(chunk, config, ranks, device, mesh)
        if mesh is not None:
            shard(chunk, mesh[DATA], dtype)
        chunk.to_empty(device=device)
        chunk.tie()
    fill_with_first_weights(chunks, whole, config.train.seed, canonical)
    shapes = {canonical(name): parameter.shape for name, parameter in whole.named_parameters()}
    return chunks, shapes


def canonical(name: str) -> str:
    """The name of a parameter in the whole model: the head of a last stage is the embedding."""
    return "embedding.weight" if name == TIED else name


def vocab_part(vocab_size: int, ranks: Ranks) -> VocabPart | None:
    """The part of the vocabulary of which this rank computes logits; None: all."""
    group = ranks.group(TENSOR)
    if group is None:
        return None
    share = math.ceil(vocab_size / ranks.layout.tp)
    start = ranks.at["tp"] * share
    return VocabPart(group, start, min(share, vocab_size - start))


def check_tensor_parallel(config: RunConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError for sizes that do not divide over tensor-parallel ranks."""
    tp = layout.tp
    model = config.model
    if model.heads % tp:
        raise ConfigError(
            f"model.heads {model.heads} do not divide over parallel.tp {tp}; change one of them"
        )
    width = hidden_size(model.dim)
    if width % tp:
        raise ConfigError(
            f"model.dim {model.dim} makes feed-forward layers {width} wide, which parallel.tp {tp} "
            f"does not divide; change one of them"
        )
    # torch gives every rank as many entries, rounded up, and the last ones what is left.
    share = math.ceil(model.vocab_size / tp)
    of_all_but_the_last = share * (tp - 1)
    if of_all_but_the_last >= model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {model.vocab_size} in parts of {share} leaves some of parallel.tp "
            f"{tp} ranks without any; lower tp, or raise vocab_size"
        )
    for length in sorted(config.data.lengths_of("train")):
        kept = length // layout.cp
        if config.parallel.sequence_parallel and kept % tp:
            raise ConfigError(
                f"parallel.tp {tp} does not divide the {kept} tokens of a sequence that a rank "
                f"keeps; change data.sequence_length or tp, or set parallel.sequence_parallel=false"
            )


def _split(
    chunk: GPT, config: RunConfig, ranks: Ranks, device: torch.device, mesh: DeviceMesh | None
) -> None:
    """Divide a stage over tensor- and context-parallel ranks.

    mesh: of all ranks of the stage, if its parameters are sharded too.
    """
    tensor_group = ranks.group(TENSOR)
    context_group = ranks.group("cp")
    if tensor_group is not None:
        of_tensor = mesh[TENSOR] if mesh is not None else None
        chunk.parallelize(
            of_tensor or DeviceMesh.from_group(tensor_group, device.type),
            sequence_parallel=config.parallel.sequence_parallel,
        )
    if context_group is not None:
        chunk.use_context(ContextParallel(context_group, ranks.at["cp"], ranks.layout.cp))
