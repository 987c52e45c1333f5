"""torchtitan: its Trainer takes batches from here, is killed, and goes on on other ranks; and, without
it, what its configs become.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from streammega import StreamLoader
from streammega.errors import ConfigError, StateError
from streammega.integrations.torchtitan import (
    IGNORE_INDEX,
    TitanBatch,
    TitanLoader,
    TitanPairs,
    titan_batch,
    titan_data,
)
from tests.support.builders import (
    convert_bytes,
    write_dataset,
    write_jsonl,
    write_random_pair,
)
from tests.support.gang import Gang

PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"
ROWS = TitanBatch(length=16, rows=2, flat=False)
EOD = 5


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """Of few ids, so that documents end in every sample."""
    write_random_pair(str(tmp_path / "pair"), vocab=20)
    return str(tmp_path / "pair")


def config_of(**given: Any) -> SimpleNamespace:
    """A StreamDataLoader.Config, of which torchtitan would make the class."""
    defaults: dict[str, Any] = {
        "blend": "",
        "part": "train",
        "split": "1,0,0",
        "order": "stream",
        "seed": 1234,
        "global_batch_size": -1,
        "num_samples": -1,
        "positions": "documents",
        "eod_id": EOD,
        "infinite": True,
        "repeat": True,
        "prefetch": 4,
        "settings": {},
    }
    return SimpleNamespace(**(defaults | given))


def open_loader(config: Any) -> StreamLoader:
    """The loader that torchtitan's would be of, on one rank."""
    sizes: Any = {"seq_len": ROWS.length, "local_batch_size": ROWS.rows}
    return TitanLoader(config, dp_world_size=1, dp_rank=0, **sizes).loader


def pairs_of(loader: StreamLoader, **given: Any) -> TitanPairs:
    return TitanPairs(loader, **({"flat": False, "positions": True, "repeat": False} | given))


# What torchtitan asks for.


@pytest.mark.guarantee("torchtitan-two-contracts")
def test_both_contracts_ask_for_the_same_samples() -> None:
    assert titan_batch({"seq_len": 16, "local_batch_size": 2, "other": 3}) == ROWS
    unset = {"seq_len": None, "local_batch_size": None}
    flat = {"max_context_length": 16, "num_tokens_per_batch": 32}
    assert (
        titan_batch(unset | flat) == titan_batch(flat) == TitanBatch(length=16, rows=2, flat=True)
    )
    for tokens in (8, 40):
        with pytest.raises(ConfigError, match="not whole samples of 16"):
            titan_batch(flat | {"num_tokens_per_batch": tokens})
    with pytest.raises(ConfigError, match=r"neither seq_len .* nor"):
        titan_batch({"seq_len": 16})


@pytest.mark.guarantee("torchtitan-two-contracts")
def test_fields_of_the_config_become_those_of_the_data() -> None:
    storage = {"cache_dir": "/nvme", "max_concurrent_requests": 7}
    config = config_of(
        blend="0.7 a 0.3 b", eod_id=-1, settings={"shuffle_lanes": 64, "storage": storage}
    )
    data = titan_data(config, ROWS, 3)
    assert data.blend == "0.7 a 0.3 b"
    assert (data.sequence_length, data.eod_id, data.reset_position_ids) == (16, 3, True)
    assert (data.shuffle_lanes, data.storage.max_concurrent_requests, data.num_samples) == (
        64,
        7,
        None,
    )
    data = titan_data(config_of(blend="a", positions="samples", eod_id=-1), ROWS, None)
    assert (data.eod_id, data.reset_position_ids) == (None, False)
    data = titan_data(config_of(blend="a", part="valid", num_samples=80), ROWS, 3)
    assert data.num_samples == (0, 80, 0)
    whole = config_of(blend="a", part="valid", infinite=False)
    assert titan_data(whole, ROWS, 3).order == "sequential", "all of it once, in any order"


@pytest.mark.guarantee("torchtitan-would-ignored")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "has no data: give it blend="),
        ({"blend": "a", "dataset": "c4"}, "dataset belongs to torchtitan's loaders"),
        ({"blend": "a", "part": "validation"}, "one of train, valid, test"),
        ({"blend": "a", "positions": "all"}, "one of documents, samples, none"),
        (
            {"blend": "a", "settings": {"storage_by_prefix": None}},
            "storage_by_prefix is None; it must be a mapping",
        ),
        ({"blend": "a", "infinite": False}, "an end, which the stream order has only"),
        ({"blend": "a", "repeat": False}, "an end, which the stream order has only"),
        ({"blend": "a", "settings": {"seed": 3}}, "settings of the dataloader config name seed"),
        (
            {"blend": "a", "settings": {"fields": [..., "dataset_id"]}},
            "torchtitan's batches have no place",
        ),
    ],
)
def test_what_would_be_ignored_or_meant_otherwise_is_refused(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        titan_data(config_of(**given), ROWS, None)


@pytest.mark.guarantee("ids-of-manifest")
def test_without_an_eos_id_documents_end_as_the_manifest_of_the_data_says(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "in.jsonl", ["a text of some words"] * 40)
    converted = str(tmp_path / "web")
    convert_bytes(converted, texts)
    raw = write_dataset(tmp_path / "raw", [np.arange(90) for _ in range(40)])
    sizes: Any = {"eod_id": -1, "global_batch_size": 2}
    loader = open_loader(config_of(blend=converted, **sizes))
    assert loader.dataset.config.eod_id == 256
    loader.close()
    with pytest.raises(ConfigError, match="no manifest of the data names it; set eod_id"):
        open_loader(config_of(blend=raw, **sizes))


@pytest.mark.guarantee("torchtitan-would-ignored")
def test_samples_one_after_another_need_positions() -> None:
    flat = TitanBatch(length=16, rows=2, flat=True)
    with pytest.raises(ConfigError, match="attend to other samples"):
        titan_data(config_of(blend="a", positions="none"), flat, EOD)


# What it takes.


@pytest.mark.guarantee("torchtitan-two-contracts")
@pytest.mark.parametrize("flat", [False, True])
def test_pairs_are_the_batches_of_the_loader(pair: str, flat: bool) -> None:
    given = config_of(
        blend=pair,
        num_samples=12,
        settings={"shuffle_lanes": 4, "eod_mask_loss": True},
        infinite=False,
    )
    with open_loader(given) as loader, open_loader(given) as bare:
        assert len(loader) == 6
        seen = list(pairs_of(loader, flat=flat))
        for (inputs, labels), batch in zip(seen, bare, strict=True):
            expected = batch["labels"].clone()
            expected[batch["loss_mask"] == 0] = IGNORE_INDEX
            assert labels.shape == ((32,) if flat else (2, 16))
            assert torch.equal(labels.view(2, 16), expected)
            assert torch.equal(inputs["input"].view(2, 16), batch["tokens"])
            assert torch.equal(inputs["positions"].view(2, 16), batch["position_ids"])
        assert any((labels == IGNORE_INDEX).any() for _, labels in seen)
        assert any((inputs["positions"].view(2, 16)[:, 1:] == 0).any() for inputs, _ in seen)
        assert set(next(pairs_of(bare, positions=False))[0]) == {"input"}


@pytest.mark.guarantee("torchtitan-two-contracts")
def test_passes_follow_each_other_and_a_loader_that_moved_is_no_end_of_data(pair: str) -> None:
    given = config_of(blend=pair, num_samples=8, settings={"shuffle_lanes": 4})
    with open_loader(given) as loader:
        pairs = pairs_of(loader, repeat=True)
        first = [next(pairs)[1].clone() for _ in range(4)]
        again = [next(pairs)[1].clone() for _ in range(4)]
        assert all(map(torch.equal, first, again))
        state = loader.state_dict()
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(StateError, match="load_state_dict"):
                next(pairs)


# The real one.


def titan() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    pytest.importorskip("tyro", reason="what torchtitan needs is not installed")


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {"<|endoftext|>": EOD, **{chr(97 + n): n for n in range(5)}}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return str(folder)


def noted(folder: Path, size: int, run: int) -> list[list[Any]]:
    """By global batch, the samples of all ranks of a run: (tokens, labels, positions)."""
    ranks = []
    for rank in range(size):
        lines = (folder / f"rank-{rank}-of-{size}-run-{run}").read_text().splitlines(True)
        ranks.append([json.loads(line) for line in lines if line.endswith("\n")])
    micro_batches = 4 // size
    steps = []
    for step in range(min(map(len, ranks)) // micro_batches):
        rows = []
        for lines_of_rank in ranks:
            for line in lines_of_rank[step * micro_batches : (step + 1) * micro_batches]:
                fields = [torch.tensor(line[name]) for name in ("input", "labels", "positions")]
                rows += torch.stack([field.view(2, 16) for field in fields], 1).tolist()
        steps.append(sorted(rows))
    return steps


@pytest.mark.guarantee("torchtitan-own-trainer")
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 2)])
def test_torchtitans_trainer_is_killed_and_goes_on_exactly(
    gang: Gang, pair: str, tokenizer: str, tmp_path: Path, before: int, after: int
) -> None:
    """Of its own configs by --module, its accumulation and its checkpoints."""
    titan()
    from tests.support.titan_programs import titan_train

    folder = tmp_path / "run"
    folder.mkdir()
    checkpoint = folder / "checkpoint"
    log = folder / f"rank-0-of-{before}-run-0"

    def due() -> bool:
        saved = (checkpoint / "step-2" / ".metadata").exists()
        return saved and log.read_bytes().count(b"\n") >= 3 * 4 // before

    assert gang.run_until(due, before, titan_train, pair, tokenizer, folder, 1000)
    step = max(int(path.parent.name[5:]) for path in checkpoint.glob("*/.metadata"))
    gang.run(after, titan_train, pair, tokenizer, folder, step + 3)
    given = config_of(blend=pair, global_batch_size=8, settings={"shuffle_lanes": 16})
    with open_loader(given) as loader:
        whole = []
        pairs = pairs_of(loader)
        for _ in range(step + 3):
            rows = []
            for _ in range(4):
                inputs, labels = next(pairs)
                rows += torch.stack([inputs["input"], labels, inputs["positions"]], 1).tolist()
            whole.append(sorted(rows))
    first = noted(folder, before, 0)
    assert len(first) >= step
    assert first[: len(whole)] == whole[: len(first)]
    assert noted(folder, after, 1) == whole[step:]


@pytest.mark.guarantee("trainers-batch-size")
def test_fewer_ranks_do_not_change_the_global_batch_without_a_word(pair: str) -> None:
    """Where the config leaves it to the number of ranks, as torchtitan's own default does."""
    asked: Any = {"seq_len": 16, "local_batch_size": 2}
    two = TitanLoader(config_of(blend=pair), dp_world_size=2, dp_rank=0, **asked)
    next(iter(two))
    state = two.state_dict()
    one = TitanLoader(config_of(blend=pair), dp_world_size=1, dp_rank=0, **asked)
    message = "a global batch of 4 samples, and this run has 2: to keep it, set training.* to 4. If"
    with pytest.raises(StateError, match=message):
        one.load_state_dict(state)
    for size in (4, 2):  # kept, or changed on purpose
        said = config_of(blend=pair, global_batch_size=size)
        loader = TitanLoader(said, dp_world_size=1, dp_rank=0, **asked)
        loader.load_state_dict(state)
        assert loader.loader.consumed_samples == 4
        loader.close()
    two.close()


@pytest.mark.guarantee("torchtitan-would-ignored")
@pytest.mark.filterwarnings("ignore")  # of what torchtitan imports
def test_the_code_of_the_page_is_a_module_for_torchtitan(
    pair: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titan()
    from tests.support.titan_programs import on_cpus

    on_cpus()
    from torchtitan.config import ConfigManager

    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_runs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["--module", "my_runs", "--config", "llama3_from_bucket"]
    words += ["--hf_assets_path", tokenizer, "--dataloader.blend", pair]
    config = ConfigManager().parse_args(words)
    json.dumps(config.dataloader.to_dict())
    if hasattr(config.training, "seq_len"):
        asked: dict[str, Any] = {"seq_len": 16, "local_batch_size": 2}
    else:
        asked = {"max_context_length": 16, "num_tokens_per_batch": 32}
    eos = SimpleNamespace(eos_id=EOD)
    loader = config.dataloader.build(dp_world_size=1, dp_rank=0, tokenizer=eos, **asked)
    taken = next(iter(loader))[1].clone()
    state = loader.state_dict()
    assert list(state) == ["streammega_state"]
    again = config.dataloader.build(dp_world_size=1, dp_rank=0, tokenizer=eos, **asked)
    for _ in range(2):
        again.load_state_dict(state)
    with pytest.raises(StateError, match="has no 'streammega_state'"):
        again.load_state_dict({"dp_rank_0": b"", "world_size": 1})
    assert torch.equal(next(iter(again))[1], next(iter(loader))[1])
    assert taken.numel() == 32
    loader.close()
    again.close()
