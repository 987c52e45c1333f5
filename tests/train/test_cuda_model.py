"""What only a CUDA device can show of the trainer's model: which kernels attention takes, what they
keep, and equal numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from streammega.train import attention
from streammega.train.attention import Visibility, _attend_to_all
from tests.support.cuda_support import NEEDS_CUDA
from tests.support.model_programs import steps_of
from tests.train.test_attention import reference
from tests.train.test_model import write_run
from tests.train.test_numerics import _switches_as_before  # noqa: F401 - a fixture

pytestmark = NEEDS_CUDA

WHOLE = 512
PARTS = [[(0, 512)], [(0, 128), (384, 512)], [(128, 256), (256, 384)]]
BOUNDS: dict[str, Any] = {
    "one": None,
    "several": [[0, 5, 100, 300, 512, 512], [0, 120, 130, 256, 384, 512]],
    "tokens": [list(range(513)), [0] + [512] * 512],
}
DOCUMENTS = [[0, 5, 30, 64], [0, 13, 64, 64]]


def tensors(lengths: tuple[int, int, int], dtype: torch.dtype, rows: int = 2) -> list[torch.Tensor]:
    """q, k and v of so many tokens, for 8 heads of 64."""
    generator = torch.Generator("cuda").manual_seed(1)
    made = (
        torch.randn(rows, length, 8, 64, generator=generator, device="cuda") for length in lengths
    )
    return [tensor.to(dtype).requires_grad_() for tensor in made]


@pytest.mark.guarantee("cuda-long-sequences")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=str,
)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("name", BOUNDS)
def test_kernels_see_what_all_pairs_with_a_mask_see(
    name: str, parts: list[tuple[int, int]], dtype: torch.dtype, tolerance: float
) -> None:
    bounds = None if BOUNDS[name] is None else torch.tensor(BOUNDS[name], dtype=torch.int32)
    kept = sum(stop - start for start, stop in parts)
    q, k, v = tensors((kept, WHOLE, WHOLE), dtype)
    visibility = Visibility(parts, WHOLE, None if bounds is None else bounds.cuda())
    mixed = _attend_to_all(q, k, v, visibility)
    weights = torch.arange(64, device="cuda") / 64
    got = [mixed, *torch.autograd.grad((mixed * weights).sum(), (q, k, v))]
    exact_q, exact_k, exact_v = (
        tensor.detach().double().cpu().requires_grad_() for tensor in (q, k, v)
    )
    wanted = reference(exact_q, exact_k, exact_v, bounds, parts)
    gradients = torch.autograd.grad((wanted * weights.cpu()).sum(), (exact_q, exact_k, exact_v))
    truth = [wanted, *gradients]
    for one, other in zip(got, truth, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(
            one.double().cpu(), other, atol=tolerance * scale, rtol=tolerance
        )


def kernels_and_bytes(run: Callable[[], torch.Tensor]) -> tuple[list[str], int]:
    """The kernels of a forward and backward, and how much more memory than before was in use at its
    height.
    """
    run().sum().backward()  # libraries take their workspaces once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        run().sum().backward()
        torch.cuda.synchronize()
    return [
        event.key for event in profile.key_averages()
    ], torch.cuda.max_memory_allocated() - before


@pytest.mark.guarantee("cuda-long-sequences")
@pytest.mark.parametrize("length", [8192, 32768, 65536])
@pytest.mark.parametrize("documents", [False, True], ids=["one", "several"])
def test_long_parts_take_a_flash_kernel_and_memory_of_their_tokens(
    length: int, documents: bool
) -> None:
    part = length // 4
    parts = [(part, 2 * part), (2 * part, 3 * part)]  # of the second of two context-parallel ranks
    q, k, v = tensors((2 * part, length, length), torch.bfloat16, rows=1)
    bounds = (
        torch.arange(0, length + 1, length // 16, dtype=torch.int32, device="cuda")[None]
        if documents
        else None
    )
    longest = length // 16 if documents else None
    kernels, height = kernels_and_bytes(
        lambda: _attend_to_all(q, k, v, Visibility(parts, length, bounds, longest))
    )
    assert any("flash" in name.lower() for name in kernels), kernels
    of_tokens = sum(tensor.nbytes for tensor in (q, k, v))
    # a mask of booleans alone would be part * length bytes for each part
    assert height < 8 * of_tokens + (64 << 20)


def test_documents_go_through_one_kernel_in_16_bits_and_one_by_one_in_32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.dtype] = []
    kernel = varlen_attn

    def counted(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(q.dtype)
        return kernel(q, *arguments, **options)

    monkeypatch.setattr(attention, "varlen_attn", counted)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = tensors((WHOLE, WHOLE, WHOLE), dtype)
        bounds = torch.tensor(BOUNDS["several"], dtype=torch.int32, device="cuda")
        _attend_to_all(q, k, v, Visibility([(0, WHOLE)], WHOLE, bounds))
    assert calls == [torch.bfloat16, torch.float16]


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    return write_run(tmp_path)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
def test_a_step_is_that_of_the_cpu(run_file: str, documents: Any) -> None:
    on_cpu = steps_of(0, run_file, [], documents)
    on_cuda = steps_of(0, run_file, [], documents, device="cuda")
    assert on_cuda["loss"] == pytest.approx(on_cpu["loss"], rel=1e-5)
    for name, grad in on_cpu["grads"].items():
        np.testing.assert_allclose(on_cuda["grads"][name], grad, atol=1e-6, rtol=1e-3, err_msg=name)


@pytest.mark.usefixtures("_switches_as_before")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
def test_activations_computed_again_and_deterministic_steps_are_equal_to_the_bit(
    run_file: str, documents: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    settings = [f"train.dtype={dtype}", "parallel.optimizer=sharded"]
    results = [
        steps_of(0, run_file, [*settings, f"train.recompute={recompute}"], documents, device="cuda")
        for recompute in ("none", "none", "full")
    ]
    for one, other in itertools.pairwise(results):
        assert one["loss"] == other["loss"]
        for name, grad in one["grads"].items():
            assert np.array_equal(other["grads"][name], grad), name
