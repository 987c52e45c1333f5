"""A dataset keeps a copy of its tokenizer, by which commands show its text wherever it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streammega import StorageConfig
from streammega.cli.main import main
from streammega.convert import convert, load_tokenizer, tokenizer_of
from streammega.convert.read.inputs import SkippedFiles, find_inputs
from streammega.convert.write.gc import find_leftovers
from streammega.dataset import IndexedDataset
from tests.convert.test_long_texts import sentencepiece_of, tiktoken_of
from tests.support.builders import convert_files, write_run_file, write_tokenizer

TEXT = "hello world, hello to all of the world"


def words(folder: Path, *more: str) -> str:
    return write_tokenizer(folder / "words.json", ["</s>", "hello", "world", *more], ["</s>"])


def pieces(folder: Path) -> str:
    sentencepiece_of(folder, vocab_size=110)
    (path,) = folder.glob("*.model")
    return str(path)


def ranks(folder: Path) -> str:
    tiktoken_of(folder, "gpt2")
    return str(folder / "own.tiktoken")


KINDS: dict[str, tuple[Callable[[Path], str], dict[str, Any]]] = {
    "hugging face": (words, {}),
    "sentencepiece": (pieces, {}),
    "tiktoken": (ranks, {"tiktoken_pattern": "gpt2"}),
}


def made(folder: Path, kind: str = "hugging face", **options: Any) -> tuple[str, str]:
    """(the prefix of a dataset, its text), whose tokenizer is gone."""
    (folder / "tokenizer").mkdir(parents=True)
    make, settings = KINDS[kind]
    name = make(folder / "tokenizer")
    source = folder / "in.txt"
    source.write_text(TEXT)
    convert_files(folder / "web", source, tokenizer=name, **settings, **options)
    pattern = settings.get("tiktoken_pattern")
    (ids,) = load_tokenizer(name, pattern=pattern).encode([TEXT])
    text = load_tokenizer(name, pattern=pattern).decode(list(map(int, ids)))
    shutil.rmtree(folder / "tokenizer")
    return str(folder / "web"), text


def shown(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert main([*command]) == 0
    return capsys.readouterr().out


@pytest.mark.guarantee("tokenizer-copy")
@pytest.mark.parametrize("kind", KINDS)
def test_commands_show_text_by_the_copy(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text = made(tmp_path / "made", kind)
    shutil.copytree(tmp_path / "made", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "made")
    name = name.replace("made", "elsewhere")
    assert text in shown(capsys, "cat", f"{name}#0")
    assert text in shown(capsys, "describe", name, "--tokens", "1000")
    indexed = IndexedDataset(name)
    model, problem = tokenizer_of(indexed.manifest, StorageConfig())
    assert problem == ""
    assert {model.digest} == {label.digest for label in indexed.tokenizers}  # type: ignore[union-attr]


@pytest.mark.guarantee("tokenizer-copy")
def test_a_text_is_found_by_the_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, _ = made(tmp_path)
    data = {"blend": [name], "sequence_length": 4, "split": "1,0,0"}
    run = write_run_file(tmp_path, data=data, train={"train_iters": 2, "global_batch_size": 2})
    assert "web" in shown(capsys, "trace", run, "--find", "hello world")


@pytest.mark.guarantee("tokenizer-copy")
def test_merges_carry_the_copy(
    tmp_path: Path, bucket: str, s3_storage: StorageConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [made(tmp_path / folder)[0] for folder in ("a", "b")]
    url = f"s3://{bucket}/copies/merged"
    convert(names, url, storage=s3_storage, format="zst")
    convert([url], str(tmp_path / "back"), storage=s3_storage, shard_bytes=1)
    for folder in ("a", "b"):
        shutil.rmtree(tmp_path / folder)
    assert "hello world" in shown(capsys, "cat", f"{tmp_path}/back#1")


@pytest.mark.guarantee("tokenizer-copy")
def test_what_replaces_a_dataset_has_its_own_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _ = made(tmp_path)
    (former,) = tmp_path.glob("*.tokenizer")
    (tmp_path / "in.txt").write_text("hello all world")
    convert_files(name, tmp_path / "in.txt", tokenizer=words(tmp_path, "all"), overwrite=True)
    (copy,) = tmp_path.glob("*.tokenizer")
    assert copy != former
    assert "hello all world" in shown(capsys, "cat", f"{name}#0")
    former.write_bytes(b"{}")
    assert [Path(info.key).name for info in find_leftovers(name)] == [former.name]


@pytest.mark.guarantee("tokenizer-copy")
def test_a_damaged_copy_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, _ = made(tmp_path)
    (copy,) = tmp_path.glob("*.tokenizer")
    copy.write_bytes(copy.read_bytes()[:-9])
    assert main(["cat", f"{name}#0"]) == 1
    error = capsys.readouterr().err
    assert "the copy of this tokenizer is damaged" in error
    assert "--tokenizer" in error
    assert main(["describe", name]) == 0


@pytest.mark.guarantee("tokenizer-copy")
def test_a_copy_is_no_input(tmp_path: Path) -> None:
    name, _ = made(tmp_path / "in")
    skipped = SkippedFiles()
    (tmp_path / "in" / "in.txt").unlink()
    (item,) = find_inputs(str(tmp_path / "in"), skipped=skipped)
    assert item.path == f"{name}.idx"
    assert not skipped.counts
    assert any(part.endswith(".tokenizer") for part in item.parts)


@pytest.mark.guarantee("tokenizer-copy")
@pytest.mark.parametrize(
    "output", ["a-00001-of-00002", "b-gen0123456789ab", "c.d", "e-00001-of-00001"]
)
@pytest.mark.parametrize("options", [{}, {"shard_bytes": 1}])
def test_a_copy_is_there_by_every_name_of_a_dataset(
    output: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text = made(tmp_path)
    copied = str(tmp_path / "out" / output)
    (tmp_path / "out").mkdir()
    convert(name, copied, workers=1, **options)
    assert text in shown(
        capsys, "cat", f"{copied}#0" if not options else f"{copied}.manifest.json#0"
    )


@pytest.mark.guarantee("tokenizer-copy")
def test_a_copy_of_another_tokenizer_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _ = made(tmp_path)
    (copy,) = tmp_path.glob("*.tokenizer")
    copy.write_bytes(load_tokenizer(words(tmp_path, "all")).stored())
    assert main(["cat", f"{name}#0"]) == 1
    assert "the copy of its tokenizer 'words.json' is another one" in capsys.readouterr().err
