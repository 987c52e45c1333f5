"""The pages that show how to begin, run as they stand there: commands, files and programs."""

from __future__ import annotations

import dataclasses
import glob
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streammega
from streammega.cli.main import main
from streammega.order.sharding import rank_samples
from tests.project.test_help import COMMANDS
from tests.support.builders import write_dataset, write_jsonl, write_tar
from tests.support.servers import S3
from tools.settings import SECTIONS as SETTINGS_SECTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PEERS = ROOT / "tests" / "support" / "data" / "peers"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.M | re.S)


@pytest.fixture
def _bucket(moto: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moto.client().create_bucket(Bucket="bucket")
    moto.objects("bucket").clear()  # of a test before
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def run_line(line: str) -> str:
    """What a command of a page prints; it must end well."""
    program, *words = shlex.split(line, comments=True)
    words = [path for word in words for path in sorted(glob.glob(word)) or [word]]
    if program == "streammega":
        assert main(words) == 0, line
        return ""
    assert program == "python", f"{line}: a program that this test does not run"
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.guarantee("first-pages-run")
def test_the_start_page_trains_and_resumes(tmp_path: Path) -> None:
    """All of it within the server that the page gives to whom a bucket is missing."""
    (tmp_path / "texts").mkdir()
    texts = [{"text": f"document {n} has some words " * 30} for n in range(300)]
    write_jsonl(tmp_path / "texts" / "a.jsonl", texts)
    page = (DOCS / "start.md").read_text()
    names = re.findall(r"^Save this as `(\S+)`:$", page, re.M)
    commands = []
    for _, language, body in BLOCK.findall(page):
        if language != "sh":
            (tmp_path / names.pop(0)).write_text(body)
        elif body.startswith(("streammega", "python")):
            commands.append(body)
    server = [sys.executable, str(ROOT / "tools" / "s3_server.py")]
    done = subprocess.run(
        [*server, "--", "bash", "-evc", "".join(commands)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    said = iter(done.stdout.splitlines())
    for expected in ("has some words", "160 samples", "320 samples", "step 3"):
        assert any(expected in line for line in said), f"{expected}\n{done.stdout}"
    assert (tmp_path / "runs/start/checkpoints/step-00000020.json").exists()


@pytest.mark.guarantee("first-pages-run")
@pytest.mark.usefixtures("_bucket")
def test_the_loops_of_the_page_run(tmp_path: Path) -> None:
    """Its blocks are one program, each of which goes on from those before it."""
    for name in ("web", "code"):
        write_dataset(f"s3://bucket/{name}", [np.arange(n) for n in range(200, 400)])
    blocks = BLOCK.findall((DOCS / "loops.md").read_text())
    program = "\n".join(body for _, language, body in blocks if language == "python")
    (tmp_path / "program.py").write_text(program)
    names = runpy.run_path("program.py")
    names["loader"].close()
    assert names["state"]["consumed_samples"] == 160 + 10 * 4
    assert tuple(names["batch"]["tokens"].shape) == (4, 64)


@pytest.mark.guarantee("first-pages-run")
@pytest.mark.usefixtures("_bucket")
def test_the_columns_of_the_page_are_written_and_read(tmp_path: Path) -> None:
    write_dataset("s3://bucket/web", [np.arange(n) for n in range(200, 300)])
    blocks = BLOCK.findall((DOCS / "columns.md").read_text())
    (tmp_path / "program.py").write_text("\n".join(body for _, _, body in blocks))
    batch = runpy.run_path("program.py")["batch"]
    assert batch["teacher_ids"].dtype == torch.uint16
    assert bool((batch["teacher_logprobs"] < 0).all())


def megatron_pair(folder: Path) -> None:
    write_dataset(folder / "web", [np.arange(n % 50, 90) for n in range(200)])


def peers(folder: Path) -> None:
    for source in PEERS.iterdir():
        shutil.copytree(source, folder / source.name)


def tars(folder: Path) -> None:
    for shard in range(2):
        members = [
            (f"{n:06d}.txt", f"a text of shard {shard}, number {n}".encode()) for n in range(9)
        ]
        write_tar(folder / f"texts-{shard:03d}.tar", *members)


TITAN = """
import dataclasses

class BaseDataLoader:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        pass
"""
"""Of torchtitan's main branch, what a data loader is derived from."""
NEXT_TITAN_BATCH = """
from types import SimpleNamespace

asked = {"max_context_length": 16, "num_tokens_per_batch": 32, "tokenizer": SimpleNamespace(eos_id=256)}
loader = StreamDataLoader(dataloader, dp_world_size=1, dp_rank=0, **asked)
print(len(next(iter(loader))[1]), "labels")
loader.close()
"""


def books(folder: Path) -> None:
    (folder / "books").mkdir()
    rows = [{"title": "one", "body": f"the text of book {n} " * 9} for n in range(200)]
    write_jsonl(folder / "books" / "a.jsonl", rows)
    (folder / "torchtitan" / "components" / "data").mkdir(parents=True)
    (folder / "torchtitan" / "components" / "data" / "loader.py").write_text(TITAN)


def raw_ids(folder: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50257, 20_000).astype(np.uint16)
    ids[::100] = 50256
    ids.tofile(folder / "train.bin")


SECTIONS: dict[str, Callable[[Path], None]] = {
    "Megatron-LM": megatron_pair,
    "mosaicml-streaming": peers,
    "litdata and litgpt": peers,
    "torchtitan": books,
    "webdataset and Energon": tars,
    "nanoGPT": raw_ids,
}
"""What each section of the page begins with."""


def sections(page: str) -> list[tuple[str, str]]:
    parts = re.split(r"^## (.*)\n", (DOCS / page).read_text(), flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.guarantee("first-pages-run")
@pytest.mark.usefixtures("_bucket")
@pytest.mark.parametrize(("title", "text"), sections("coming-from.md"), ids=list(SECTIONS))
def test_what_others_wrote_is_converted_and_read(title: str, text: str, tmp_path: Path) -> None:
    SECTIONS[title](tmp_path)
    blocks = BLOCK.findall(text)
    assert [language for _, language, _ in blocks] == ["sh", "python"]
    for _, language, body in blocks:
        if language == "sh":
            for line in body.splitlines():
                run_line(line)
            continue
        assert len(body.splitlines()) <= 16
        if title == "torchtitan":  # whose place a class of this test takes, in no other process
            (tmp_path / "program.py").write_text(body + NEXT_TITAN_BATCH)
            assert run_line("python program.py") == "32 labels\n"
        else:
            (tmp_path / "program.py").write_text(body)
            names: dict[str, Any] = runpy.run_path("program.py")
            for name in ("loader", "stream"):
                if name in names:
                    names[name].close()


SETTINGS = {
    name
    for settings in SETTINGS_SECTIONS
    for name in (field.name for field in dataclasses.fields(settings))
} | {
    name
    for function in (streammega.StreamLoader, streammega.StreamingDataset)
    for name in inspect.signature(function).parameters
}
OTHER_WORDS = {"train", "valid", "test", "loader", "bin", "idx", "nv", "meta"}
"""What cells have in addition: splits, variables, suffixes, folders."""
PUBLIC = {
    *COMMANDS,
    *streammega.__all__,
    *dir(streammega.StreamLoader),
    *dir(streammega.StreamingDataset),
}


def names_in(code: str) -> tuple[set[str], set[str]]:
    """The names and the options of a cell's code that must be ours."""
    text = re.sub(r"\"[^\"]*\"", "''", code)
    options = set(re.findall(r"(?<!\S)--[\w-]+", text))
    if text.startswith(("streammega ", "convert ", "-")) or options:
        return set(), options
    return set(re.findall(r"\b[A-Za-z]\w*[A-Za-z]\b", text)), options


@pytest.mark.guarantee("first-pages-run")
@pytest.mark.parametrize(
    "text", [text for _, text in sections("coming-from.md")], ids=list(SECTIONS)
)
def test_what_a_table_names_of_ours_exists(text: str) -> None:
    """Settings, functions, commands and options of the column "here"."""
    options = {name for option in COMMANDS["convert"].params for name in option.opts}
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row[-1])]
    assert len(codes) >= 5
    for code in codes:
        names, asked = names_in(code)
        assert asked <= options, code
        assert names - SETTINGS - PUBLIC <= OTHER_WORDS, code
        command = code.removeprefix("streammega ").split()[0]
        assert not code.startswith("streammega ") or command in COMMANDS, code


def test_the_figure_of_ranks_is_what_the_library_does() -> None:
    page = (DOCS / "concepts.md").read_text()
    rows = re.findall(r"^ (\d) ranks?(?:, (\w+) order)? +rank +((?:\d ? ?)+)", page, re.M)
    assert [order for _, order, _ in rows] == ["", "stream", "Megatron"]
    for ranks, order, figure in rows:
        drawn = np.array(figure.split(), int)
        consumed = np.arange(0, drawn.size, 4 * int(ranks))
        for rank in range(int(ranks)):
            samples = rank_samples(consumed, 4, rank, int(ranks), contiguous=order == "Megatron")
            assert samples.ravel().tolist() == np.flatnonzero(drawn == rank).tolist()


@pytest.mark.guarantee("commands-of-pages")
@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_settings_files_and_pods_of_the_pages_are_parsed(page: str) -> None:
    for _, language, body in BLOCK.findall((DOCS / page).read_text()):
        if language == "toml":
            assert tomllib.loads(body)
        if language == "yaml":
            yaml: Any = pytest.importorskip("yaml", reason="mkdocs brings it")
            assert all(file["kind"] and file["spec"] for file in yaml.safe_load_all(body))


TESTED_IN = {
    "README.md": "project/test_readme.py",
    "columns.md": "project/test_page_programs.py",
    "coming-from.md": "project/test_page_programs.py",
    "loops.md": "project/test_page_programs.py",
    "phases.md": "loading/test_phased_runs.py",
    "provenance.md": "project/test_provenance_page.py",
    "start.md": "project/test_page_programs.py",
    "torchdata.md": "integrations/test_torchdata.py",
    "torchtitan.md": "integrations/test_torchtitan.py",
    "trainers.md": "integrations/test_trainers_page.py",
    "webdataset.md": "integrations/test_webdataset.py",
}
"""Pages whose Python programs a test of their own runs. Those of all others are run here."""
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->\n```python\n(?:.*\n)*?```$", re.M)
WITH_PYTHON = {
    path.name: path.read_text()
    for path in sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
    if re.search(r"^ *```python$", path.read_text(), re.M)
}


@pytest.mark.guarantee("programs-of-pages")
@pytest.mark.filterwarnings("ignore")  # of megatron-core, when it is imported
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_every_python_program_of_a_page_runs_or_says_why_not(page: str) -> None:
    if page in TESTED_IN:
        assert page in (ROOT / "tests" / TESTED_IN[page]).read_text()
        assert not NOT_RUN.findall(WITH_PYTHON[page])
        return
    names: dict[str, Any] = {}
    for _, language, body in BLOCK.findall(NOT_RUN.sub("", WITH_PYTHON[page])):
        if language == "python":
            exec(compile(body, page, "exec"), names)


@pytest.mark.guarantee("programs-of-pages")
def test_one_program_of_the_pages_is_not_run() -> None:
    """What cannot run here is marked with its reason, and counted: it should stay rare."""
    counts = {page: len(NOT_RUN.findall(text)) for page, text in WITH_PYTHON.items()}
    assert {page: count for page, count in counts.items() if count} == {"megatron.md": 1}


def shell_blocks() -> list[tuple[str, str]]:
    """The blocks of all pages that are for a shell, by their pages."""
    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    blocks = [
        (page.name, language, body)
        for page in sorted(pages)
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    ]
    return [
        (page, body)
        for page, language, body in blocks
        if language in ("sh", "bash")
        or (not language and re.match(r"(streammega|torchrun|make|python|pip) ", body))
    ]


@pytest.mark.guarantee("commands-of-pages")
@pytest.mark.parametrize(("page", "block"), shell_blocks())
def test_commands_of_the_pages_have_commands_and_options_that_there_are(
    page: str, block: str
) -> None:
    parsed = subprocess.run(
        ["bash", "-n", "-c", block], capture_output=True, text=True, check=False
    )
    assert parsed.returncode == 0, f"{page}: {parsed.stderr}"
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["streammega"]:
            typed = [name for name in COMMANDS if " ".join(words[1:]).startswith(name)]
            assert typed, f"{page}: {line}"
            options = {name for option in COMMANDS[typed[0]].params for name in option.opts}
            asked = {word.split("=")[0] for word in words if word.startswith("--")}
            assert asked <= options, f"{page}: {line}"


@pytest.mark.guarantee("comparison-benchmarks")
def test_versions_of_the_comparison_are_those_of_the_benchmarks() -> None:
    benchmarks = (DOCS / "benchmarks.md").read_text()
    page = (DOCS / "comparison.md").read_text()
    measured = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", page, re.M)
    words = " ".join(benchmarks.split())
    assert {name for name, _ in measured} >= {"litdata", "mosaicml-streaming", "megatron-core"}
    assert not [name for name, version in measured if f"{name} {version}" not in words]
