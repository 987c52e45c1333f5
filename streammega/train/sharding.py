"""Parameters, gradients and optimizer state divided over data-parallel ranks, by torch's
fully_shard.

Parameters stay in fp32 and are gathered in the dtype of the computation. Gradients are summed over
ranks in fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streammega.errors import GradientError
from streammega.gradients.buffers import local_part
from streammega.gradients.grad_checks import MEND
from streammega.parallel import Ranks
from streammega.train.model import GPT

DATA = "dp-cp"
TENSOR = "tp"


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


def reshard(chunk: nn.Module) -> None:
    """Free the gathered parameters after a forward that has no backward."""
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_gradients(grads: Mapping[str, Tensor], norm: Tensor, names: Sequence[str]) -> None:
    """Raise GradientError on every rank if a gradient is not finite. Call it on all ranks together.

    grads: this rank's parts, by the names of their parameters. norm: of all gradients of all ranks,
    and equal on all: it decides who takes part in the search. names: of the whole model's parameters.
    """
    if norm.isfinite():
        return
    bad = [names.index(name) for name, grad in grads.items() if not grad.isfinite().all()]
    first = torch.tensor(min(bad, default=len(names)), device=norm.device)
    if dist.is_initialized():
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
    # The norm of finite gradients may overflow: who calls `clip_grad_norm_` raises for that.
    if first < len(names):
        raise GradientError(
            f"the gradient of {names[int(first)]} is not finite, summed over the ranks; {MEND}"
        )


def is_split_over_tensor(parameter: nn.Parameter) -> bool:
    """Whether tensor-parallel ranks have different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or (TENSOR,)
    for name, placement in zip(names, parameter.placements, strict=True):
        if name == TENSOR and not placement.is_replicate():
            return True
    return False


def local_grads(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """This rank's parts of the gradients, of parameters that have one."""
    grads: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            grads[name] = local_part(parameter.grad)
    return grads
