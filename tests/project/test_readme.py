"""The README's code and commands, run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers

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


AROUND = """
import json, os, sys
import torch

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device, model, state = "cpu", None, json.loads(sys.argv[2])
seen, evaluated, saved = [], [], []

class Fourth:
    def __bool__(self):
        return len(seen) == 4

time_to_save = Fourth()

def train_step(batch):
    assert {name: tuple(field.shape) for name, field in batch.items()} == {
        "tokens": (4, 4096), "labels": (4, 4096)
    }
    seen.append(batch["tokens"].clone())
    if len(seen) == 6:
        raise KeyboardInterrupt

def evaluate(batch):
    evaluated.append(batch["tokens"].clone())
    return 0.0

def save(model, state):
    saved.append(json.dumps(state))

try:
    exec(compile(open("ten_lines.py").read(), "ten_lines.py", "exec"))
except KeyboardInterrupt:
    pass
assert len(losses) == len(evaluated)
result = {"seen": torch.stack(seen), "evaluated": torch.cat(evaluated), "state": saved[-1]}
torch.save(result, f"{sys.argv[1]}/rank-{rank}.pt")
"""
"""What a user's program has around the ten lines: a checkpoint and a validation after the fourth step,
and an end in the sixth.
"""


def ten_lines(folder: Path, ranks: int, state: str = "null", without: str = "") -> list[Any]:
    """What each rank saw of the ten lines as they stand. without: a part that is left out."""
    (code,) = blocks(section("Ten lines"), "python")
    assert without in code
    folder.mkdir()
    (folder / "ten_lines.py").write_text(code.replace(without, ""))
    program = f"import os\nos.chdir({str(folder)!r})\n{AROUND}"
    launched = launch(folder, ranks, ["-c", program, str(folder), state])
    codes = launched.ended(*range(ranks), within=120)
    if without:
        assert codes == [1] * ranks
        return [launched.log(rank) for rank in range(ranks)]
    assert codes == [0] * ranks, "".join(launched.log(rank) for rank in range(ranks))
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


@pytest.fixture
def _web_and_code(_surroundings: None) -> None:
    put_dataset("web", 2_400_000)
    put_dataset("code", 2_400_000)


def rows(ranks: list[Any], step: int) -> list[Any]:
    """The samples of a step over all ranks."""
    return sorted(row for rank in ranks for row in rank["seen"][step].tolist())


@pytest.mark.guarantee("code-commands-readme")
@pytest.mark.usefixtures("_web_and_code")
def test_the_ten_lines_train_evaluate_save_and_resume_on_one_rank_and_two(tmp_path: Path) -> None:
    """They are run as they stand. Every sample comes once, on one rank; validation ends, and has all
    whole global batches of its split.
    """
    alone = ten_lines(tmp_path / "alone", 1)
    both = ten_lines(tmp_path / "both", 2)
    for ranks in (alone, both):
        assert len({rank["state"] for rank in ranks}) == 1
        assert len(ranks[0]["state"]) < 1024
        valid = [tuple(row) for rank in ranks for row in rank["evaluated"].tolist()]
        assert len(set(valid)) == len(valid) == 8, "of the ten that the split has"
    for step in range(3):
        assert rows(both, step) == sorted(rows(alone, 2 * step) + rows(alone, 2 * step + 1))
    for number, (count, state) in enumerate(
        ((1, alone[0]["state"]), (2, both[0]["state"]), (2, alone[0]["state"]))
    ):
        resumed = ten_lines(tmp_path / f"resumed-{number}", count, state)
        first = both if state == both[0]["state"] else alone
        if len(resumed) == len(first):
            assert rows(resumed, 0) == rows(first, 4), "four batches were handed out before"
        else:
            assert rows(resumed, 0) == sorted(rows(alone, 4) + rows(alone, 5))


@pytest.mark.guarantee("code-commands-readme")
@pytest.mark.usefixtures("_web_and_code")
def test_the_ten_lines_without_their_ranks_are_refused_on_several(tmp_path: Path) -> None:
    without = ', "dp_rank": rank, "dp_size": world'
    for log in ten_lines(tmp_path / "unsaid", 2, without=without):
        assert "WORLD_SIZE is 2 in the environment, and nothing says which rank" in log


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
        '[data]\nblend = ["s3://bucket/code"]\nsequence_length = 64\norder = "megatron"\n'
        "[model]\nvocab_size = 300\n[train]\ntrain_iters = 4\n"
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
