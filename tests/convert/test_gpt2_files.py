"""A vocab.json with its merges.txt is Megatron's GPT2BPETokenizer: the same ids, the same end of
documents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from streammega import IndexedDataset
from streammega.cli.main import app
from streammega.convert.tokenize.tokenizer_files import PATTERNS
from streammega.convert.tokenize.tokenizers import load_tokenizer
from streammega.errors import ConvertError, ObjectNotFoundError
from tests.support.builders import convert_files

TEXT = ["Hello world, it's 3.14 o'clock; don't WAIT   for two\n\nlines. être 日本語 😀"] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as GPT-2's are: bytes in the order of the ones that are printed, then merges, then the
    end.
    """
    folder = tmp_path_factory.mktemp("gpt2")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    merges = ["".join(pair) for pair in json.loads(model.to_str())["model"]["merges"]]
    printed = [n for n in range(256) if chr(n).isprintable() and chr(n) != " "]
    order = [*printed, *(n for n in range(256) if n not in printed)]
    signs = [chr(n) if n in printed else chr(256 + order.index(n) - len(printed)) for n in order]
    tokens = [*signs, *merges, "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
    lines = [" ".join(pair) for pair in json.loads(model.to_str())["model"]["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    return folder


@pytest.mark.guarantee("vocab-json-merges")
def test_ids_are_those_of_gpt2(folder: Path) -> None:
    """Of tiktoken, which reads these very files for its gpt2."""
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "merges.txt"), str(folder / "vocab.json"))
    theirs = tiktoken.Encoding(
        "gpt2",
        pat_str=PATTERNS["gpt2"].expression,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )
    ours = load_tokenizer(f"{folder / 'vocab.json'},{folder / 'merges.txt'}")

    @given(text=st.text(max_size=40) | st.text(st.sampled_from("ab 1'tslre\n\té日😀"), max_size=40))
    def compare(text: str) -> None:
        assert list(ours.encode([text])[0]) == theirs.encode_ordinary(text)

    compare()
    assert ours.vocab_size == theirs.n_vocab
    assert ours.find("<|endoftext|>") == theirs.eot_token


def test_ids_come_as_small_arrays_those_of_an_empty_text_too(folder: Path) -> None:
    ours: Any = load_tokenizer(str(folder))
    empty, some = ours.encode(["", TEXT[0]])
    assert [type(ids).__name__ for ids in (empty, some)] == ["ndarray", "ndarray"]
    assert list(some) == ours.model.encode(TEXT[0]).ids != []
    assert (len(empty), np.asarray(some).itemsize) == (0, 4)


@pytest.mark.guarantee("vocab-json-merges")
def test_the_files_are_named_together_or_by_their_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": TEXT[0]}) + "\n")
    vocab = str(folder / "vocab.json")
    merges = str(folder / "merges.txt")
    source = str(tmp_path / "in.jsonl")
    convert_files(tmp_path / "pair", source, tokenizer=f"{vocab},{merges}")
    convert_files(tmp_path / "folder", source, tokenizer=str(folder))
    words = ["convert", source, str(tmp_path / "command"), "--tokenizer", vocab]
    done = CliRunner().invoke(app, [*words, "--merges", merges, "--workers", "1"])
    assert done.exit_code == 0, done.output
    found = [(tmp_path / f"{name}.bin").read_bytes() for name in ("pair", "folder", "command")]
    assert found[0] == found[1] == found[2]
    end = json.loads((folder / "vocab.json").read_text())["<|endoftext|>"]
    assert np.asarray(IndexedDataset(str(tmp_path / "pair"))[0])[-1] == end
    manifest = json.loads((tmp_path / "pair.manifest.json").read_text())
    assert (manifest["eod_id"], manifest["vocab_size"]) == (end, end + 1)
    assert manifest["tokenizer"]["name"] == "vocab.json,merges.txt"


def test_a_folder_with_a_tokenizer_json_is_that_tokenizer(folder: Path, tmp_path: Path) -> None:
    pair = load_tokenizer(str(folder))
    pair.model.save(str(tmp_path / "tokenizer.json"))  # type: ignore[attr-defined]
    of_folder = load_tokenizer(str(tmp_path)).encode(TEXT)
    assert [list(ids) for ids in of_folder] == [list(ids) for ids in pair.encode(TEXT)]


def test_files_that_do_not_belong_together_are_named(folder: Path, tmp_path: Path) -> None:
    vocab = folder / "vocab.json"
    merges = folder / "merges.txt"
    with pytest.raises(ObjectNotFoundError, match=r"nothing\.txt: no such tokenizer file"):
        load_tokenizer(f"{vocab},{tmp_path / 'nothing.txt'}")
    with pytest.raises(
        ObjectNotFoundError, match=r"without a tokenizer\.json, and without a vocab\.json"
    ):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConvertError, match=r"vocab\.json,merges\.txt"):
        load_tokenizer(str(vocab))
    (tmp_path / "other.txt").write_text("#version: 0.2\nq q\nqq qq\n")
    with pytest.raises(ConvertError, match=r"no vocabulary with its merges"):
        load_tokenizer(f"{vocab},{tmp_path / 'other.txt'}")
    few = {token: number for number, token in enumerate("abc")}
    (tmp_path / "few.json").write_text(json.dumps(few))
    (tmp_path / "none.txt").write_text("#version: 0.2\n")
    with pytest.raises(ConvertError, match=r"few\.json: has no token for 254 of the 256 bytes"):
        load_tokenizer(f"{tmp_path / 'few.json'},{tmp_path / 'none.txt'}")
    endless = json.loads(vocab.read_text())
    endless.pop("<|endoftext|>")
    (tmp_path / "endless.json").write_text(json.dumps(endless))
    with pytest.raises(ConvertError, match=r"endless\.json: has no token for 1 of .*endoftext"):
        load_tokenizer(f"{tmp_path / 'endless.json'},{merges}")
