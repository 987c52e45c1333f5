"""Fine-tuning samples: loss on answers only, conversations kept apart, every one of them there
once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammega import DataConfig, SFTDataset
from streammega.errors import ConfigError, FormatError
from streammega.samples.sft import pack
from tests.support.builders import write_jsonl

EOD = 0


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def config(size: int = 64, **options: Any) -> DataConfig:
    return DataConfig(blend="unused", sequence_length=size, **({"eod_id": EOD} | options))


def chat(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.mark.guarantee("sftdataset-whole-conversations")
def test_one_conversation_by_hand(tmp_path: Path) -> None:
    dataset = SFTDataset(
        [write_jsonl(tmp_path / "a.jsonl", [chat("hi", "yo")])], encode, config(40)
    )
    sample = dataset[0]
    text = [*encode("<|user|>\nhi"), EOD, *encode("<|assistant|>\nyo"), EOD]
    size = len(text)
    assert sample["tokens"].tolist() == text + [0] * (40 - size)
    assert sample["labels"][: size - 1].tolist() == text[1:]
    learned = [i for i, m in enumerate(sample["loss_mask"].tolist()) if m]
    assert [sample["labels"][i].item() for i in learned] == [*encode("yo"), EOD]
    assert sample["cu_seqlens"].tolist() == [0, size, 40]
    assert sample["position_ids"].tolist() == [*range(size), *range(40 - size)]


@pytest.mark.guarantee("sftdataset-whole-conversations")
def test_every_conversation_is_there_once_and_the_order_is_the_seeds(tmp_path: Path) -> None:
    records = [chat(f"q{n}", f"answer {n}") for n in range(50)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    datasets = [SFTDataset([path], encode, config(128, seed=seed)) for seed in (1, 1, 2)]
    texts = []
    for dataset in datasets:
        found = []
        for k in range(len(dataset)):
            sample = dataset[k]
            for low, high in zip(sample["cu_seqlens"][:-1], sample["cu_seqlens"][1:], strict=True):
                found.append("".join(chr(t) for t in sample["tokens"][low:high].tolist() if t))
        texts.append([text for text in found if text])
    assert texts[0] == texts[1] != texts[2]
    assert (
        sorted(texts[0])
        == sorted(texts[2])
        == sorted(f"<|user|>\nq{n}<|assistant|>\nanswer {n}" for n in range(50))
    )


def test_both_spellings_and_several_turns(tmp_path: Path) -> None:
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "human", "value": "c"},
        ]
    }
    openai = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    }
    samples = [
        SFTDataset([write_jsonl(tmp_path / f"{n}.jsonl", [r])], encode, config())[0]
        for n, r in enumerate((sharegpt, openai))
    ]
    assert all(samples[0][name].equal(samples[1][name]) for name in samples[0])
    assert samples[0]["loss_mask"].sum() == 2


@pytest.mark.guarantee("sftdataset-whole-conversations")
def test_long_conversations_are_cut_and_counted(tmp_path: Path) -> None:
    dataset = SFTDataset(
        [write_jsonl(tmp_path / "a.jsonl", [chat("q", "x" * 500), chat("q", "y")])],
        encode,
        config(64),
    )
    assert dataset.num_cut == 1
    assert {len(dataset[k]["tokens"]) for k in range(len(dataset))} == {64}


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_keeps_order_and_never_overflows(lengths: list[int]) -> None:
    firsts = pack(np.array(lengths), 20).tolist()
    assert firsts[0] == 0
    assert firsts[-1] == len(lengths)
    for low, high in zip(firsts[:-1], firsts[1:], strict=True):
        assert 0 < sum(lengths[low:high]) <= 20
        assert high == len(lengths) or sum(lengths[low : high + 1]) > 20


@pytest.mark.guarantee("sftdataset-whole-conversations")
def test_samples_of_several_lengths_make_one_batch(tmp_path: Path) -> None:
    dataset = SFTDataset(
        [write_jsonl(tmp_path / "a.jsonl", [chat("q" * n, "a" * n) for n in range(1, 30)])],
        encode,
        config(64),
    )
    batch = next(
        iter(
            torch.utils.data.DataLoader(
                dataset, batch_size=len(dataset), collate_fn=SFTDataset.collate
            )
        )
    )
    assert batch["tokens"].shape == (len(dataset), 64)
    assert (batch["cu_seqlens"][:, -1] == 64).all()
    assert (batch["cu_seqlens"].diff(dim=1) >= 0).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: broken JSON"),
        ('{"text": "x"}', r"a\.jsonl:2: has neither"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "not 'robot'"),
        ('{"messages": ["x"]}', "not None"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "nothing to learn"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")])
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(FormatError, match=message):
        SFTDataset([path], encode, config())


def test_ids_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a", "\u65e5")])
    SFTDataset([path], encode, config(vocab_size=2**16))
    with pytest.raises(
        FormatError,
        match=f"{path}: token id {ord(chr(0x65E5))} is outside of the vocabulary of 300",
    ):
        SFTDataset([path], encode, config(vocab_size=300))


def test_fine_tuning_needs_an_end_of_document(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eod_id"):
        SFTDataset(
            [write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")])], encode, config(eod_id=None)
        )
