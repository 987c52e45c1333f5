"""The stages of the model on a rank: cut out of the whole model, split over groups of ranks, and filled
with the first weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from streammega.errors import ConfigError
from streammega.gradients.buffers import local_part
from streammega.parallel import Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.train.attention import ContextParallel
from streammega.train.config import RunConfig
from streammega.train.losses import VocabPart
from streammega.train.model import GPT, TIED, hidden_size
from streammega.train.sharding import DATA, TENSOR, make_mesh, shard


def make_stages(
    config: RunConfig, ranks: Ranks, num_stages: int, stage_ids: Sequence[int], device: torch.device
) -> tuple[list[GPT], Mapping[str, torch.Size]]:
    """(the stages of this rank, the shapes of the parameters of the whole model, by name)."""
    dtype: torch.dtype = getattr(torch, config.train.dtype)
    is_sharded = config.parallel.optimizer == "sharded"
    mesh = make_mesh(ranks, device.type) if is_sharded else None
    tensor_group = ranks.group(TENSOR)
    context_group = ranks.group("cp")
    # On the meta device first: memory is made only for what this rank keeps.
    with torch.device("meta"):
        full_model = GPT(config.model)
        chunks = [GPT(config.model) for _ in stage_ids]
    for chunk, stage in zip(chunks, stage_ids, strict=True):
        chunk.keep_stage(stage, num_stages)
        if config.train.recompute == "full":
            chunk.recompute()
        # Split on the meta device, so that memory is made for this rank's parts alone.
        if tensor_group is not None:
            of_tensor = mesh[TENSOR] if mesh is not None else None
            chunk.parallelize(
                of_tensor or DeviceMesh.from_group(tensor_group, device.type),
                sequence_parallel=config.parallel.sequence_parallel,
            )
        if context_group is not None:
            chunk.use_context(ContextParallel(context_group, ranks.at["cp"], ranks.layout.cp))
        if mesh is not None:
            shard(chunk, mesh[DATA], dtype)
        chunk.to_empty(device=device)
        chunk.tie()
    _initialize(chunks, full_model, config.train.seed)
    shapes = {canonical(name): parameter.shape for name, parameter in full_model.named_parameters()}
    return chunks, shapes


def canonical(name: str) -> str:
    """The name of a parameter in the whole model. The weight of a head is the embedding's there."""
    return "embedding.weight" if name == TIED else name


def vocab_part(vocab_size: int, ranks: Ranks) -> VocabPart | None:
    """The part of the vocabulary whose logits this rank computes; None: all."""
    group = ranks.group(TENSOR)
    if group is None:
        return None
    share = math.ceil(vocab_size / ranks.layout.tp)
    start = ranks.at["tp"] * share
    return VocabPart(group, start, min(share, vocab_size - start))


def check_layout(config: RunConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError for steps with too few micro-batches for the pipeline stages, and for sizes that
    do not divide over tensor-parallel ranks.
    """
    tp = layout.tp
    pp = layout.pp
    model = config.model
    is_interleaved = config.parallel.virtual_pipeline_stages > 1
    config.schedule.check(config.train.micro_batch_size, 0, layout.dp)
    for _, batch_samples in config.schedule.stages:
        micro_batches = batch_samples // (config.train.micro_batch_size * layout.dp)
        # The interleaved schedule takes pp micro-batches at a time through each stage.
        if micro_batches < pp or (is_interleaved and micro_batches % pp != 0):
            needs = "a multiple of" if is_interleaved else "at least"
            raise ConfigError(
                f"a step of {batch_samples} samples has {micro_batches} micro-batches on each rank, and "
                f"parallel.pp {pp} needs {needs} {pp}; change train.global_batch_size or "
                f"train.micro_batch_size"
            )
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
    # torch gives every rank the same number of entries, rounded up. The last ranks get the rest.
    share = math.ceil(model.vocab_size / tp)
    of_all_but_the_last = share * (tp - 1)
    if of_all_but_the_last >= model.vocab_size:
        raise ConfigError(
            f"model.vocab_size {model.vocab_size} in parts of {share} leaves some of parallel.tp "
            f"{tp} ranks without any; lower tp, or raise vocab_size"
        )
    for segment in config.data.segments("train"):
        kept = segment.sequence_length // layout.cp
        if config.parallel.sequence_parallel and kept % tp:
            raise ConfigError(
                f"parallel.tp {tp} does not divide the {kept} tokens of a sequence that a rank "
                f"keeps; change data.sequence_length or tp, or set parallel.sequence_parallel=false"
            )


@torch.no_grad()
def _initialize(chunks: Sequence[nn.Module], full_model: GPT, seed: int) -> None:
    """Give the parameters of stages their first values, the same on every layout of ranks.

    Every rank draws all parameters of the whole model, one at a time, and keeps its own part. So no
    rank needs memory for the whole model.

    Args:
        chunks: modules whose parameters have memory; they may be DTensors.
        full_model: the complete model, on the meta device.
        seed: of the generator.
    """
    parameters_of: dict[str, list[nn.Parameter]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameters_of.setdefault(canonical(name), []).append(parameter)
    for name, values in full_model.initial_values(seed):
        for parameter in parameters_of.get(canonical(name), ()):
            part = values
            if isinstance(parameter, DTensor):
                sizes, offsets = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
                    part = part.narrow(dim, offset, size)
            local_part(parameter).copy_(part)
