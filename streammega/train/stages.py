"""The stages of the model on a rank: cut out of the whole model, split over tensor-parallel ranks, sharded
over data-parallel ranks by torch's fully_shard, and filled with the first weights.

An optimizer that divided its state by itself was faster than fully_shard with gloo, but gave wrong numbers
without an error. With fully_shard parameters stay in fp32 and are gathered in the dtype of the computation.
Gradients are summed over ranks in fp32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from streammega.errors import ConfigError
from streammega.gradients.buffers import local_part
from streammega.parallel import Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.train.attention import ContextParallel
from streammega.train.config import RunConfig
from streammega.train.losses import VocabPart
from streammega.train.model import GPT, hidden_size

DATA = "dp-cp"
TENSOR = "tp"


@dataclass(frozen=True)
class Stages:
    """The stages of the model that this rank holds.

    chunks: the modules, as virtual pipeline stages are called in torch and Megatron. ids: their numbers
    among the `num_stages` of all pipeline ranks. parameter_shapes: of the whole model, by name.
    """

    chunks: list[GPT]
    ids: Sequence[int]
    num_stages: int
    parameter_shapes: Mapping[str, torch.Size]

    @property
    def has_first(self) -> bool:
        """Whether this rank has the stage that takes tokens."""
        return self.ids[0] == 0

    @property
    def has_last(self) -> bool:
        """Whether this rank has the stage that computes the loss."""
        return self.ids[-1] == self.num_stages - 1


def make_stages(config: RunConfig, ranks: Ranks, device: torch.device) -> Stages:
    """Make the stages of this rank. Memory is made only for its own parts of their parameters."""
    parallel = config.parallel
    mesh = make_mesh(ranks, device.type) if parallel.optimizer == "sharded" else None
    tensor_group = ranks.group(TENSOR)
    context = ContextParallel(ranks.group("cp"), ranks.at["cp"], ranks.layout.cp)
    recompute = config.train.recompute == "full"
    # Interleaved: pipeline rank r has the stages r, r + pp, r + 2 * pp and so on.
    pp = ranks.layout.pp
    num_stages = pp * parallel.virtual_pipeline_stages
    ids = range(ranks.at["pp"], num_stages, pp)
    # On the meta device, until only this rank's parts are left.
    with torch.device("meta"):
        full_model = GPT(config.model)
        chunks = [
            GPT(config.model, stage, num_stages, context=context, recompute=recompute)
            for stage in ids
        ]
    for chunk in chunks:
        if tensor_group is not None:
            tensor_mesh = (
                DeviceMesh.from_group(tensor_group, device.type, mesh_dim_names=(TENSOR,))
                if mesh is None
                else mesh[TENSOR]
            )
            split_layers(chunk, tensor_mesh, sequence_parallel=parallel.sequence_parallel)
        if mesh is not None:
            shard(chunk, mesh[DATA], getattr(torch, config.train.dtype))
        chunk.to_empty(device=device)
        chunk.tie()
    _initialize(chunks, full_model, config.train.seed)
    shapes = {canonical(name): parameter.shape for name, parameter in full_model.named_parameters()}
    return Stages(chunks, ids, num_stages, shapes)


def canonical(name: str) -> str:
    """The name of a parameter in the whole model. There the head shares the embedding's weight; a last
    stage without an embedding has a copy.
    """
    return "embedding.weight" if name == "head.weight" else name


def split_layers(chunk: GPT, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split the linear layers of a stage over a one-dimensional mesh, by torch's parallelize_module. The
    head then returns a part of the logits.

    sequence_parallel: between the layers a rank keeps only its part of the sequence. Norms then gather
    their output, once for all layers that take it.
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
    plans = [plan]
    if sequence_parallel:
        gather = PrepareModuleOutput(
            output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False
        )
        norms = ("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm")
        # A plan has one style for a module, and these have two.
        plans += [dict.fromkeys(norms, SequenceParallel()), dict.fromkeys(norms, gather)]
    for styles in plans:
        # A stage may be without embedding, norm and head.
        here = {
            name: style
            for name, style in styles.items()
            if getattr(chunk, name.partition(".")[0]) is not None
        }
        parallelize_module(chunk, mesh, here)
    chunk.tie()


def vocab_part(vocab_size: int, ranks: Ranks) -> VocabPart | None:
    """The part of the vocabulary whose logits this rank computes; None: all."""
    group = ranks.group(TENSOR)
    if group is None:
        return None
    share = math.ceil(vocab_size / ranks.layout.tp)
    start = ranks.at["tp"] * share
    return VocabPart(group, start, min(share, vocab_size - start))


def make_mesh(ranks: Ranks, device_type: str) -> DeviceMesh:
    """The mesh of this rank's pipeline stage, of the groups of `ranks`: [dp-cp], or [dp-cp, tp] with
    tensor parallelism. `make_stages` gives the first to fully_shard, the second to tensor parallelism.

    `ranks.group` gives no group where this rank is alone, and knows the names of GROUPS in
    parallel/groups.py.
    """
    data_group = ranks.group(DATA) or _group_of_one(ranks.rank)
    tensor_group = ranks.group(TENSOR)
    if tensor_group is None:
        return DeviceMesh.from_group(data_group, device_type, mesh_dim_names=(DATA,))
    layout = ranks.layout
    of_stage = layout.grid(("pp", "dp", "cp", "tp"))[ranks.at["pp"]].reshape(-1, layout.tp)
    return DeviceMesh.from_group(
        [data_group, tensor_group],
        device_type,
        torch.from_numpy(of_stage),
        mesh_dim_names=(DATA, TENSOR),
    )


def _group_of_one(rank: int) -> dist.ProcessGroup:
    """A group of this rank alone: fully_shard needs one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def shard(chunk: GPT, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Divide a stage over the ranks of a mesh, block by block. It computes in `dtype`."""
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # angles of rotary embeddings stay in fp32
    )
    # Logits of a part of the vocabulary are a view. They are not changed in place here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in (*chunk.blocks.values(), chunk):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        assert isinstance(module, FSDPModule)
        # Plain sums: they are divided by the tokens of all ranks later, and gloo has no scaled sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _initialize(chunks: Sequence[GPT], full_model: GPT, seed: int) -> None:
    """Give the parameters of stages their first values, the same on every layout of ranks.

    Every rank draws all parameters of the whole model, one at a time, and keeps its own part. So no
    rank needs memory for the whole model.

    Args:
        chunks: modules whose parameters have memory; they may be DTensors.
        full_model: the complete model, on the meta device.
        seed: of the generator.
    """
    parameters = {
        canonical(name): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }
    for name, values in full_model.initial_values(seed):
        if name not in parameters:
            continue
        parameter = parameters[name]
        if isinstance(parameter, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
                values = values.narrow(dim, offset, size)
        local_part(parameter).copy_(values)


def check_vocab_parts(vocab_size: int, tp: int) -> None:
    """Raise ConfigError for a vocabulary that leaves some tensor-parallel ranks without ids."""
    # torch gives every rank the same number of entries, rounded up. The last ranks get the rest.
    share = math.ceil(vocab_size / tp)
    if share * (tp - 1) >= vocab_size:
        raise ConfigError(
            f"model.vocab_size {vocab_size} in parts of {share} leaves some of parallel.tp "
            f"{tp} ranks without any; lower tp, or raise vocab_size"
        )


def check_layout(config: RunConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError for too few layers or micro-batches for the pipeline stages, and for sizes that do
    not divide over tensor-parallel ranks.
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
    num_stages = pp * config.parallel.virtual_pipeline_stages
    if num_stages > model.layers:
        raise ConfigError(
            f"{num_stages} pipeline stages for {model.layers} layers: "
            f"lower parallel.pp, or add model.layers"
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
    if model.vocab_size:  # else it is known when the data is open
        check_vocab_parts(model.vocab_size, tp)
    for segment in config.data.segments("train"):
        kept = segment.sequence_length // layout.cp
        if config.parallel.sequence_parallel and kept % tp:
            raise ConfigError(
                f"parallel.tp {tp} does not divide the {kept} tokens of a sequence that a rank "
                f"keeps; change data.sequence_length or tp, or set parallel.sequence_parallel=false"
            )
