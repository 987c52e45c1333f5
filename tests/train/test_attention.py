"""Attention over documents and parts of sequences: exact, without masks, and with little kept for
backward.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega.train import attention
from streammega.train.attention import Visibility, _attend_to_all
from tests.support.builders import write_run_file
from tests.support.gang import Gang
from tests.support.model_programs import collectives_of_backward, gathered_again, steps_of

DOCUMENTS = [[0, 5, 100, 130, 260, 261, 400, 512, 512]]
"""Of one sample: within a part, over several parts, of one token; and a bound that only fills the
row.
"""


@pytest.fixture
def run_files(tmp_path: Path) -> dict[int, str]:
    """Run files by their number of layers."""
    found = {}
    for layers in (1, 3):
        (tmp_path / str(layers)).mkdir()
        found[layers] = write_run_file(
            tmp_path / str(layers),
            data={"blend": ["mock://random"], "sequence_length": 512, "split": "1,0,0"},
            model={"vocab_size": 50, "layers": layers},
            train={
                "train_iters": 1,
                "micro_batch_size": 1,
                "global_batch_size": 4,
                "log_batch_hash": None,
            },
        )
    return found


def largest(saved: list[int], limit: int) -> list[int]:
    return [size for size in saved if size > limit]


ACTIVATIONS = 60_000
"""Bytes: more than any activation of the tokens that a rank keeps (256 of 512, of at most 50
float32 values), less than the keys and values of a whole sequence together (65,536) and than any
mask (128 x 512 x 4).
"""


@pytest.mark.guarantee("layer-keeps-mask")
def test_parts_of_a_sequence_keep_no_mask_and_no_gathered_keys_for_each_layer(
    gang: Gang, run_files: dict[int, str]
) -> None:
    saved = {
        layers: gang.run(2, steps_of, file, ["parallel.cp=2"], None, 1)[1]["saved"]
        for layers, file in run_files.items()
    }
    # of rank 1, whose parts are the second and the third of four
    assert largest(saved[3], ACTIVATIONS) == [128 * 384 * 4]
    assert largest(saved[1], ACTIVATIONS) == largest(saved[3], ACTIVATIONS)


@pytest.mark.guarantee("layer-keeps-mask")
def test_documents_keep_no_mask_of_a_sample(gang: Gang, run_files: dict[int, str]) -> None:
    whole = steps_of(0, run_files[3], [], DOCUMENTS, 1)["saved"]
    assert largest(whole, 2 * ACTIVATIONS) == []
    for part in gang.run(2, steps_of, run_files[3], ["parallel.cp=2"], DOCUMENTS, 1):
        # for the documents that began before a part: the longest
        assert largest(part["saved"], ACTIVATIONS) == [128 * 139 * 4]


@pytest.mark.guarantee("attention-over-documents")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
def test_parts_of_a_sequence_give_the_losses_and_gradients_of_the_whole(
    gang: Gang, run_files: dict[int, str], documents: Any
) -> None:
    whole = steps_of(0, run_files[3], [], documents)
    parts = gang.run(2, steps_of, run_files[3], ["parallel.cp=2"], documents)
    together = np.sum([part["loss"] for part in parts], 0)
    assert together == pytest.approx(whole["loss"], rel=1e-5)
    for name, grad in whole["grads"].items():
        for part in parts:
            np.testing.assert_allclose(
                part["grads"][name], grad, atol=1e-6, rtol=1e-4, err_msg=name
            )


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Any, parts: list[tuple[int, int]]
) -> torch.Tensor:
    """Attention by all pairs, of the kept queries [samples, kept, heads, head_dim], in float64."""
    place = torch.cat([torch.arange(a, b) for a, b in parts])
    key = torch.arange(k.shape[1])
    seen = (key <= place[:, None]).expand(len(q), -1, -1)
    if cu_seqlens is not None:
        document = torch.stack([torch.searchsorted(row, key, right=True) for row in cu_seqlens])
        seen = seen & (document[:, place][:, :, None] == document[:, None])
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen[:, None], -torch.inf)
    mixed: torch.Tensor = scores.softmax(-1) @ v
    return mixed.transpose(1, 2)


def packed_kernel(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, most_q: int, most_k: int, **causal: Any
) -> torch.Tensor:
    """What varlen_attn does, in the words of its documentation, and what it needs."""
    assert causal in ({"window_size": (-1, 0)}, {"is_causal": True})
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
    mixed = []
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True
    ):
        queries = q1 - q0
        keys = k1 - k0
        assert 0 <= queries <= min(keys, most_q)
        assert keys <= most_k
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) / q.shape[-1] ** 0.5
        mixed.append(
            torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[k0:k1]
            )
        )
    return torch.cat(mixed)


WHOLE = 48
BOUNDS: dict[str, Any] = {
    "one": None,
    "several": [[0, 5, 7, 30, 48, 48], [0, 12, 13, 24, 36, 48]],
    "tokens": [list(range(49)), [0] + [48] * 48],
}


@pytest.mark.guarantee("attention-over-documents")
@pytest.mark.parametrize("kernel", ["calls", "packed"])
@pytest.mark.parametrize(
    "parts", [[(0, 48)], [(0, 12), (36, 48)], [(12, 24), (24, 36)], [(8, 16), (32, 40)]], ids=str
)
@pytest.mark.parametrize("name", BOUNDS)
def test_queries_see_the_keys_before_them_of_their_document(
    name: str, parts: list[tuple[int, int]], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "packed":
        monkeypatch.setattr(attention, "varlen_attn", packed_kernel)
        monkeypatch.setattr(attention, "_has_packed_kernel", lambda *_: True)
    bounds = None if BOUNDS[name] is None else torch.tensor(BOUNDS[name], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    kept = sum(stop - start for start, stop in parts)
    q, k, v = (
        torch.randn(2, length, 2, 8, generator=generator, requires_grad=True)
        for length in (kept, WHOLE, WHOLE)
    )
    visibility = Visibility(parts, WHOLE, bounds)
    results = []
    for mixed in (_attend_to_all(q, k, v, visibility), reference(q, k, v, bounds, parts)):
        grads = torch.autograd.grad((mixed * torch.arange(8)).sum().float(), (q, k, v))
        results.append([mixed, *grads])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), atol=2e-5, rtol=1e-4)


@pytest.mark.guarantee("layer-keeps-mask")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
def test_keys_that_are_gathered_again_are_those_of_forward(gang: Gang, documents: Any) -> None:
    assert gang.run(2, gathered_again, documents) == [[0, 1, 1], [0, 1, 1]]


def test_backward_sends_each_rank_the_gradients_of_its_own_keys_alone(gang: Gang) -> None:
    assert gang.run(2, collectives_of_backward) == [{"c10d.reduce_scatter_": 1}] * 2
