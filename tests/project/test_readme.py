"""The README's code and commands, run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers

from streammega import StreamLoader
from streammega.cli.main import main
from tests.support.builders import write_dataset
from tests.support.processes import launch
from tests.support.servers import S3

README = Path(__file__).parents[2] / "README.md"
RUN_IN_OTHER_TESTS = ("cache", "torchrun")
"""Commands of the README whose own tests start processes or fill a cache first: test_page_cache.py,
test_endings.py.
"""


@pytest.fixture
def _surroundings(moto: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has: a bucket, credentials in the environment, and files in the folder they work
    in.
    """
    client = moto.client()
    client.create_bucket(Bucket="bucket")
    for item in client.list_objects_v2(Bucket="bucket").get("Contents", ()):
        client.delete_object(Bucket="bucket", Key=item["Key"])
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text(), re.M | re.S)
    assert found, f"the README has no section {title!r}"
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, "" for those without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [body for named, body in fenced if named == language]


def put_dataset(name: str, tokens: int = 600_000) -> None:
    rng = np.random.default_rng(len(name))
    write_dataset(
        f"s3://bucket/{name}",
        [rng.integers(0, 200, 2000).astype(np.uint16) for _ in range(tokens // 2000)],
    )


class Stop(Exception):
    pass


@pytest.mark.guarantee("code-commands-readme")
@pytest.mark.usefixtures("_surroundings")
def test_the_ten_lines_train_save_and_resume() -> None:
    """The code block is run as it is, with a user's few names around it."""
    put_dataset("web")
    put_dataset("code")
    (code,) = blocks(section("Ten lines"), "python")
    saved: list[dict[str, Any]] = []
    seen: list[Any] = []

    def train_step(batch: dict[str, Any]) -> None:
        seen.append(batch["tokens"].clone())
        shapes = {name: tuple(field.shape) for name, field in batch.items()}
        assert shapes == {"tokens": (4, 4096), "labels": (4, 4096)}
        if len(seen) in (3, 5):
            raise Stop

    names: dict[str, Any] = {
        "rank": 0, "world": 2, "device": "cpu", "model": None, "time_to_save": True, "train_step": train_step,
        "save": lambda model, state: saved.append(state),
    }  # fmt: skip
    loop = code.rsplit("loader.load_state_dict(state)", 1)[0]
    resume = "loader.load_state_dict(state)"
    with pytest.raises(Stop):
        exec(compile(loop, "README", "exec"), names)
    state = json.loads(json.dumps(saved[-1]))
    assert len(json.dumps(state)) < 1024
    exec(compile(resume, "README", "exec"), names | {"state": state})
    batch = next(iter(names["loader"]))
    assert batch["tokens"].equal(seen[2]), "two batches were handed out before the state was saved"
    names["loader"].close()


RANK_OF_THE_TEN_LINES = """
import os, sys
import torch

rank, world, device, model, time_to_save = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "cpu", None, True
seen, saved = [], []

def train_step(batch):
    seen.append(batch["tokens"].clone())
    if len(seen) == 3:
        raise StopIteration

def save(model, state):
    saved.append(state)
"""
"""What a user's program has around the ten lines. Its third step ends it."""


@pytest.mark.guarantee("code-commands-readme")
@pytest.mark.usefixtures("_surroundings")
def test_the_ten_lines_under_torchrun_read_each_sample_on_one_rank(tmp_path: Path) -> None:
    """They stand as in the README. Without their word on ranks, every rank refuses to begin."""
    put_dataset("web")
    put_dataset("code")
    (code,) = blocks(section("Ten lines"), "python")
    loop = code.rsplit("loader.load_state_dict(state)", 1)[0]
    program = (
        f"{RANK_OF_THE_TEN_LINES}\ntry:\n{textwrap.indent(loop, '    ')}\nexcept StopIteration:\n    pass\n"
        "torch.save({'seen': torch.stack(seen), 'state': saved[-1]}, sys.argv[1] + f'/rank-{rank}.pt')\n"
    )
    ranks = launch(tmp_path, 2, ["-c", program, str(tmp_path)])
    assert ranks.ended(0, 1, within=120) == [0, 0], ranks.log(0) + ranks.log(1)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    assert first["state"] == second["state"]
    names: dict[str, Any] = {}
    exec(code.split("loader = ", 1)[0], names)
    with StreamLoader(names["data"], micro_batch_size=8, global_batch_size=1024) as whole:
        for step, batch in zip(range(3), whole, strict=False):
            both = torch.cat([first["seen"][step], second["seen"][step]])
            assert sorted(both.tolist()) == sorted(batch["tokens"].tolist())

    unsaid = program.replace(", dp_rank=rank, dp_size=world", "")
    assert unsaid != program
    (tmp_path / "unsaid").mkdir()
    ranks = launch(tmp_path / "unsaid", 2, ["-c", unsaid, str(tmp_path)])
    assert ranks.ended(0, 1, within=120) == [1, 1]
    for rank in range(2):
        assert "WORLD_SIZE is 2 in the environment, and nothing says which rank" in ranks.log(rank)


def commands() -> list[str]:
    text = README.read_text()
    lines = [line for block in blocks(text, "") for line in block.splitlines()]
    return [
        line.split("  #")[0].strip()
        for line in lines
        if line.startswith(("streammega ", "torchrun "))
    ]


@pytest.mark.guarantee("code-commands-readme")
@pytest.mark.usefixtures("_surroundings")
def test_the_commands_do_what_the_readme_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line is run on data of its own; settings of the torchrun line are checked by
    test_train.py.
    """
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    texts = [
        json.dumps({"text": f"document {n} " + "some words and more of them " * 40})
        for n in range(400)
    ]
    (corpus / "a.jsonl.zst").write_bytes(zstandard.compress("\n".join(texts).encode()))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({"<|endoftext|>": 0, **{symbol: i + 1 for i, symbol in enumerate(alphabet)}}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save("tokenizer.json")
    put_dataset("code")
    (tmp_path / "run.toml").write_text(
        '[data]\nblend = ["s3://bucket/code"]\nsequence_length = 64\n[model]\nvocab_size = 300\n[train]\ntrain_iters = 4\n'
        'micro_batch_size = 1\nglobal_batch_size = 2\nout_dir = "runs/one"\n'
    )
    (tmp_path / "runs" / "one").mkdir(parents=True)
    steps = [
        {
            "step": n,
            "loss": 2.0 - n / 10,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens_per_s": 9.0,
            "data_wait_s": 0.0,
        }
        for n in range(4)
    ]
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text(
        "".join(json.dumps(step) + "\n" for step in steps)
    )
    ran = []
    for line in commands():
        program, *arguments = shlex.split(line)
        arguments = [
            path
            for word in arguments
            for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
        ]
        if program == "torchrun" or arguments[0] in RUN_IN_OTHER_TESTS:
            continue
        if arguments[0] == "order-report":
            arguments += ["--sequence-length", "64"]  # the corpus of this test is small
        assert main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
        ran.append(arguments[0])
    assert {"convert", "verify", "describe", "order-report", "prepare", "plot"} <= set(ran)
    assert main(["verify", "s3://bucket/web"]) == 0
    assert "sound" in capsys.readouterr().out


def test_the_first_page_is_short() -> None:
    """Without the ten lines, which are as long as they are."""
    assert len(re.sub(r"```python\n.*?```", "", README.read_text(), flags=re.S).split()) <= 720
