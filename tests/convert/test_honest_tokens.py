"""What is stored is what was meant: ends of documents, ids, special tokens, formats told by what
files hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from streammega import IndexedDataset, IndexedDatasetWriter
from streammega.cli.render import as_text
from streammega.convert import Task, convert, convert_task, merge_tasks
from streammega.convert.options import digest_of_bytes
from streammega.convert.tokenize.tokenizer_files import PATTERNS
from streammega.convert.tokenize.tokenizers import HuggingFaceTokenizer, load_tokenizer
from streammega.dataset.verify import verify
from streammega.errors import ConvertError, StreammegaError
from tests.support.builders import convert_bytes, convert_files, stored_ids, write_jsonl


@pytest.fixture
def words(tmp_path: Path) -> str:
    """Words, </s> a special token that ends documents, <s> one that may begin them."""
    model = Tokenizer(
        models.WordLevel(
            {"[UNK]": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}, unk_token="[UNK]"
        )
    )
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    model.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


@pytest.mark.parametrize("settings", [{"max_tokens": 8}, {"keep_modes": (0,)}], ids=["cut", "mode"])
def test_cut_tokens_keep_the_end_of_their_documents(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", ({"q": "ask " * n, "a": "tell"} for n in range(1, 9))
    )
    convert_bytes(tmp_path / "tokens", source, text_keys=("q", "a:1"))
    convert([str(tmp_path / "tokens")], str(tmp_path / "out"), workers=1, **settings)
    found = verify(str(tmp_path / "out"))
    assert not found.problems
    indexed = IndexedDataset(str(tmp_path / "out"))
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    ends = [stored_ids(tmp_path / "out")[last - 1][-1] for last in indexed.document_indices[1:]]
    assert manifest["eod_id"] is None or set(ends) == {256}


def test_llm_c_files_are_told_by_their_headers(tmp_path: Path) -> None:
    header = np.zeros(256, "<i4")
    ids = np.array([1, 70_000, 128_000, 5], "<u4")
    header[:3] = 20240801, 7, len(ids)
    (tmp_path / "llama.bin").write_bytes(header.tobytes() + ids.tobytes())
    convert_files(tmp_path / "out", tmp_path / "llama.bin")
    assert stored_ids(tmp_path / "out") == [ids.tolist()]
    assert IndexedDataset(str(tmp_path / "out")).dtype == np.int32
    header[:2] = 20240999, 1
    (tmp_path / "other.bin").write_bytes(header.tobytes() + ids.tobytes())
    with pytest.raises(ConvertError, match=r"other\.bin.*header of llm\.c.*20240999"):
        convert_files(tmp_path / "no", tmp_path / "other.bin")


def test_ids_of_32_bits_are_read_from_npy_where_they_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 128_000, 5], "<u4"))
    convert_files(tmp_path / "out", tmp_path / "ids.npy")
    assert stored_ids(tmp_path / "out") == [[1, 128_000, 5]]
    np.save(tmp_path / "large.npy", np.array([1, 1 << 31], "<u4"))
    with pytest.raises(ConvertError, match=r"2147483648.*cannot hold"):
        convert_files(tmp_path / "no", tmp_path / "large.npy")


def test_a_bin_that_lost_its_idx_is_not_taken_for_narrow_ids(tmp_path: Path) -> None:
    with IndexedDatasetWriter(str(tmp_path / "m"), np.int32) as writer:
        for n in range(40):
            writer.add_document(np.arange(100 + n, 200 + n), [100])
    (tmp_path / "m.idx").unlink()
    with pytest.raises(ConvertError, match=r"m\.bin.*every second.*save them as \.npy"):
        convert_files(tmp_path / "no", tmp_path / "m.bin")
    np.save(tmp_path / "m.npy", np.fromfile(tmp_path / "m.bin", np.int32))
    convert_files(tmp_path / "out", tmp_path / "m.npy")
    assert stored_ids(tmp_path / "out")[0][:3] == [100, 101, 102]


def test_texts_without_a_token_are_no_documents(words: str, tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"text": "hello"}, {"text": " "}, {"text": "\n"}, {"text": "world"}]
    )
    report = convert_files(tmp_path / "out", source, tokenizer=words)
    assert stored_ids(tmp_path / "out") == [[3, 2], [4, 2]]
    assert report.dropped["empty"] == 2


@pytest.mark.parametrize(
    ("special", "ids"),
    [(None, [3, 2, 4, 2]), ("parse", [3, 2, 4, 2]), ("text", [3, 0, 0, 0, 4, 2])],
)
def test_special_tokens_in_texts_are_parsed_or_not_as_asked(
    words: str, tmp_path: Path, special: Any, ids: list[int]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "hello </s> world"}])
    report = convert_files(
        tmp_path / "out", source, tokenizer=words, special_tokens_in_text=special
    )
    own = stored_ids(tmp_path / "out")[0]
    assert own == ids if special != "text" else own.count(2) == 1 and own[-1] == 2
    assert report.eod_in_texts == (special != "text")


def test_ends_that_texts_spell_are_counted_and_those_that_are_added_are_not(
    words: str, tmp_path: Path
) -> None:
    texts = ["hello", "hello </s> world", "</s>", "</s></s> hello"] * 25
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    report = convert_files(tmp_path / "out", source, tokenizer=words)
    assert report.eod_in_texts == 100
    assert "eod_in_texts: 100" in as_text(report.summary())
    chats = [{"messages": [{"role": "assistant", "content": text}]} for text in texts]
    source = write_jsonl(tmp_path / "chats.jsonl", chats)
    report = convert_files(tmp_path / "chats", source, tokenizer=words, chat=True)
    assert report.eod_in_texts == 100
    options: dict[str, Any] = {"tokenizer": words, "work_dir": str(tmp_path / "work")}
    for number in range(2):
        convert_task(
            [source], str(tmp_path / "merged"), Task(number=number, of=2), chat=True, **options
        )
    report = merge_tasks([source], str(tmp_path / "merged"), chat=True, **options)
    assert report.eod_in_texts == 100


def test_special_tokens_are_parsed_or_a_tokenizer_says_that_it_cannot(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a<|endoftext|>b"}])
    convert_bytes(tmp_path / "out", source, special_tokens_in_text="parse")
    assert stored_ids(tmp_path / "out") == [[97, 256, 98, 256]]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words here"] * 20), model_prefix=str(tmp_path / "sp"),
        vocab_size=20, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    options: dict[str, Any] = {"tokenizer": f"{tmp_path}/sp.model"}
    convert_files(tmp_path / "sp", source, special_tokens_in_text="text", **options)
    with pytest.raises(ConvertError, match=r"sp\.model: .*--special-tokens-in-text"):
        convert_files(tmp_path / "no", source, special_tokens_in_text="parse", **options)


@pytest.mark.parametrize("name", ["bytes", "tiktoken:gpt2"])
def test_a_pattern_is_of_a_file_of_byte_pairs(name: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(ConvertError, match=f"{name}: .*leave out --tiktoken-pattern"):
        convert_files(tmp_path / "out", source, tokenizer=name, tiktoken_pattern="gpt2")


def test_an_answer_without_text_is_a_sequence_with_the_end_of_its_document(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"q": "a", "a": ""}, {"q": "", "a": "b"}, {"q": "", "a": ""}]
    )
    report = convert_bytes(tmp_path / "out", source, text_keys=("q", "a:1"))
    indexed = IndexedDataset(str(tmp_path / "out"))
    assert stored_ids(tmp_path / "out") == [[97], [256], [98, 256]]
    assert indexed.sequence_modes is not None
    assert indexed.sequence_modes.tolist() == [0, 1, 1]
    assert report.dropped["empty"] == 1


def test_a_beginning_of_documents_is_added_where_it_is_asked_for(
    words: str, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "hello"}, {"text": "world hello"}])
    convert_files(tmp_path / "out", source, tokenizer=words, bos="<s>")
    assert stored_ids(tmp_path / "out") == [[1, 3, 2], [1, 4, 3, 2]]
    convert_files(tmp_path / "post", source, tokenizer=words, add_special_tokens=True)
    assert stored_ids(tmp_path / "post") == [[1, 3, 2], [1, 4, 3, 2]]
    with pytest.raises(ConvertError, match="no token '<b>'"):
        convert_files(tmp_path / "no", source, tokenizer=words, bos="<b>")


def test_ids_below_zero_are_refused_and_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"input_ids": pa.array([[1, 2], [5, -1, 3]], pa.list_(pa.int32()))}),
        tmp_path / "t.parquet",
    )
    with pytest.raises(ConvertError, match=r"t\.parquet:2: holds the id -1") as caught:
        convert_files(tmp_path / "out", tmp_path / "t.parquet", text_keys=("input_ids",))
    assert "is the file whole" not in str(caught.value), "nothing is wrong with the file"


def test_nulls_in_lists_of_ids_are_named_with_their_file(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"ids": pa.array([[1, None, 3]], pa.list_(pa.int32()))}), tmp_path / "t.parquet"
    )
    with pytest.raises(ConvertError, match=r"^\S*t\.parquet:1: .* null; [^;]*$"):
        convert_files(tmp_path / "out", tmp_path / "t.parquet", text_keys=("ids",))


def test_how_a_tiktoken_file_cuts_text_is_asked_for_and_never_guessed(tmp_path: Path) -> None:
    import base64

    import tiktoken

    ranks = {bytes([n]): n for n in range(256)} | {b"12": 256, b"34": 257, b"1234": 258}
    pairs = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "it's 1234 ok"}])
    for file in ("own.tiktoken", "own.model"):
        path = tmp_path / file
        path.write_text(pairs)
        with pytest.raises(ConvertError, match=rf"{file}: .*--tiktoken-pattern"):
            convert_files(tmp_path / "no", source, tokenizer=str(path))
        with pytest.raises(ConvertError, match=r"cuts text is not 'gpt'; .*gpt2"):
            convert_files(tmp_path / "no", source, tokenizer=str(path), tiktoken_pattern="gpt")
        for number, pattern in enumerate(("gpt2", r"\w+|\W+")):
            expression = PATTERNS[pattern].expression if pattern in PATTERNS else pattern
            settings: dict[str, Any] = {"pat_str": expression, "special_tokens": {}}
            theirs = tiktoken.Encoding("own", mergeable_ranks=ranks, **settings)
            expected = [[*theirs.encode_ordinary("it's 1234 ok"), 259]]
            out = tmp_path / f"{file}{number}"
            convert_files(out, source, tokenizer=str(path), tiktoken_pattern=pattern)
            assert stored_ids(out) == expected
            # Commands without that option take it with the name.
            named = load_tokenizer(f"{path},{pattern}")
            assert named.digest == load_tokenizer(str(path), pattern=pattern).digest
            assert named.decode(expected[0]) == "it's 1234 ok<|endoftext|>"


EMPTY = [{"text": ""}, {"text": None}, {"text": []}, {"text": [""]}, {"text": " "}]


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet", "in.csv"])
def test_empty_texts_and_nulls_are_left_out_in_every_format(
    words: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name == "in.jsonl":
        write_jsonl(path, EMPTY)
    elif name == "in.parquet":
        pq.write_table(pa.table({"text": ["", None, "", "", " "]}), path)
    else:
        path.write_text("text,id\n" + ",1\n" * 4 + " ,1\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    inputs = [str(path), str(tmp_path / "empty.txt")]
    settings: dict[str, Any] = {"tokenizer": words, "workers": 1}
    with pytest.raises(ConvertError, match=r"hold no text and no tokens.*; empty: 6"):
        convert(inputs, str(tmp_path / "dropped"), **settings)


@pytest.mark.guarantee("conversations-without-answer")
@pytest.mark.parametrize("template", [None, "chatml"])
def test_conversations_without_an_answer_are_left_out_and_counted(
    template: str | None, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": "world"}
    unanswered = [asked, {"role": "assistant", "content": ""}]
    chats: list[Any] = [[asked], [asked, answer], [asked, asked], [], unanswered]
    source = write_jsonl(tmp_path / "in.jsonl", [{"messages": chat} for chat in chats])
    report = convert_bytes(tmp_path / 'out', source, chat=True, chat_template=template)  # fmt: skip
    assert report.documents == 2
    assert report.dropped == {"without an answer": 2, "empty": 1}
    options: dict[str, Any] = {"chat": True, "chat_template": template, "keep_modes": (1,)}
    dropped = convert_bytes(tmp_path / "answers", source, **options).dropped
    assert dropped.pop("sequences of other modes") > 0
    assert dropped == {"without an answer": 2, "empty": 1}, "each document has one reason"


def bpe(**options: Any) -> Tokenizer:
    """A BPE model of `ab` and `abab`."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "abab": 3}
    return Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")], **options))


def test_what_makes_tokens_random_is_off(tmp_path: Path) -> None:
    """As truncation and padding are, which a tokenizer.json may ask for too."""
    plain, random = str(tmp_path / "plain.json"), str(tmp_path / "random.json")
    bpe().save(plain)
    bpe(dropout=0.5).save(random)
    texts = ["abab" * 50] * 20
    assert all(list(ids) == [3] * 50 for ids in load_tokenizer(random).encode(texts))
    (spans,) = load_tokenizer(random).parsing_special_tokens().encode_with_spans(texts[:1])
    assert spans.ids.tolist() == [3] * 50
    assert load_tokenizer(random).digest == load_tokenizer(plain).digest
    assert load_tokenizer(plain).digest == digest_of_bytes(bpe().to_str().encode(), 16)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    for name, tokenizer in (("one", random), ("two", random), ("three", plain)):
        convert([path], str(tmp_path / name), tokenizer=tokenizer, append_eod=False, workers=1)
    assert stored_ids(tmp_path / "one") == stored_ids(tmp_path / "two") == [[3] * 50] * 20
    first, *others = [(tmp_path / f"{name}.bin").read_bytes() for name in ("one", "two", "three")]
    assert others == [first, first]


@pytest.mark.skipif(not hasattr(models.Unigram, "alpha"), reason="versions before 0.23")
@pytest.mark.parametrize("sampling", [{"alpha": 0.1}, {"alpha": 0.1, "nbest_size": 4}])
def test_a_unigram_model_does_not_sample(sampling: dict[str, Any]) -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -1.1), ("ab", -1.2), ("abab", -2.0)]
    model = Tokenizer(models.Unigram(pieces, 0, False, **sampling))
    assert len({tuple(model.encode("abab").ids) for _ in range(200)}) > 1
    tokenizer = HuggingFaceTokenizer("unigram", model)
    assert {tuple(map(int, ids)) for ids in tokenizer.encode(["abab"] * 200)} == {(4,)}


@pytest.mark.parametrize("source", ["{{ [1, 2] | random }}", "{{ lipsum(1) }}"])
def test_a_chat_template_that_would_write_at_random_is_refused(source: str, tmp_path: Path) -> None:
    answers = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(answers + source)
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"messages": [{"role": "assistant", "content": "a"}]}]
    )
    with pytest.raises(StreammegaError, match=r"random|lipsum"):
        convert_bytes(tmp_path / "out", path, chat=True, chat_template=str(tmp_path / "t.jinja"))
