"""Long texts have the ids of the whole, whatever the tokenizer: by one call, or in windows, whose
memory does not grow with them.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from streammega import IndexedDataset
from streammega.convert import convert
from streammega.convert.tokenize import encode, long_text, tokenizers
from streammega.convert.tokenize.long_text import encode_long, encode_long_with_spans
from streammega.convert.tokenize.tokenizer_files import PATTERNS
from streammega.convert.tokenize.tokenizers import load_tokenizer
from streammega.errors import ConvertError
from tests.support.builders import write_tokenizer
from tests.support.examples import examples

SENTENCES = [
    "Hello world, it's 3.14 o'clock; don't WAIT for  two   blanks\n\nand lines.",
    "Ça va très bien être où naïve ﬁn ﬀ İstanbul ΣΑΣ straße",
    "今天天气很好，我们去公园。日本語が話せます、はい。",
    "안녕하세요 세계 한국어 텍스트 Привет мир, как дела",
    "def f(x):\n    return x+1  # note\n\tif x == 2: pass\r\n",
]
PATTERN = {name: pattern.expression for name, pattern in PATTERNS.items()}
HAN = "[一-龥\u0800-一가-퟿]+"
WORDS = st.sampled_from(
    [
        *" ".join(SENTENCES).split(),
        " ",
        "  ",
        "\n",
        "\r\n",
        "\u3000",
        "，",
        "。",
        "<s>",
        "<sep>",
        "x",
        "é",
        "e\u0301",
    ]
)
PIECES = st.lists(
    WORDS | st.text(st.sampled_from("ab 1.,'\n，。中한é\u0301İΣ_<>|"), max_size=4),
    min_size=1,
    max_size=25,
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Texts of some thousand characters, many of which repeat themselves."""
    pieces = draw(PIECES)
    chosen = random.Random(draw(st.integers(0, 99))).choices(pieces, k=draw(st.integers(1, 900)))
    blanks = draw(st.integers(1, 4))
    return "".join(word if n % blanks else f"{word} " for n, word in enumerate(chosen))


def pairs(normalizer: Any, pre_tokenizer: Any, *added: AddedToken, **options: Any) -> Tokenizer:
    """A tokenizer.json of a BPE model."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", **options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in repr(pre_tokenizer) else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>"], initial_alphabet=alphabet
    )
    whole = pre_tokenizer is None or not getattr(pre_tokenizer, "split", True)
    if whole:  # words are to be cut while it learns, or it learns whole sentences
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    if whole:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="first")
    if pre_tokenizer is None:
        tokenizer = Tokenizer.from_str(
            json.dumps(json.loads(tokenizer.to_str()) | {"pre_tokenizer": None})
        )
    tokenizer.add_tokens(list(added) or [AddedToken("<sep>")])
    return tokenizer


def split(expression: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(expression), behavior, invert)


def steps(*own: Any) -> Any:
    return pre_tokenizers.Sequence(list(own))


def raw_bytes() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = steps(pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace())
    tokenizer.train_from_iterator(
        SENTENCES * 3,
        trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"]),
    )
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        SENTENCES * 3, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"])
    )
    return tokenizer


LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
MAKERS: dict[str, Any] = {
    "gpt2": lambda: pairs(None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with a prefix": lambda: pairs(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "qwen": lambda: pairs(normalizers.NFC(), steps(split(PATTERN["qwen"]), raw_bytes())),
    "llama3": lambda: pairs(None, steps(split(PATTERN["llama3"]), raw_bytes())),
    "matches": lambda: pairs(
        None, steps(split(PATTERN["o200k_base"], "removed", invert=True), raw_bytes())
    ),
    "deepseek": lambda: pairs(
        None,
        steps(
            split(r"[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split(HAN),
            split(r"\p{N}+"),
            split(r"\s+"),
            raw_bytes(),
        ),
    ),
    "digits": lambda: pairs(
        None, steps(pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False))
    ),
    "metaspace": lambda: pairs(None, pre_tokenizers.Metaspace()),
    "metaspace at first": lambda: pairs(
        normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first")
    ),
    "llama2": lambda: pairs(LLAMA2, None, fuse_unk=True),
    "metaspace without words": lambda: pairs(
        None, pre_tokenizers.Metaspace(split=False, prepend_scheme="first")
    ),
    "words": lambda: pairs(normalizers.Lowercase(), pre_tokenizers.Whitespace()),
    "folded": lambda: pairs(
        normalizers.Sequence(
            [normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents()]
        ),
        steps(pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel()),
    ),
    "added tokens that eat blanks": lambda: pairs(
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        AddedToken("<sep>", lstrip=True, rstrip=True),
        AddedToken("x", rstrip=True, single_word=True),
        AddedToken("  "),
        AddedToken("a b"),
    ),
    "unigram": unigram,
    "bert": bert,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "WINDOW", 800)
    monkeypatch.setattr(long_text, "OVERLAPS", 2)


def ids_in_windows(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = encode_long(tokenizer, text, "a.txt").tolist()
    return ids


def compare(tokenizer: Any, number: int) -> None:
    @given(text=texts())
    @settings(max_examples=number, deadline=None)
    def check_text(text: str) -> None:
        assert ids_in_windows(tokenizer, text) == [*map(int, tokenizer.encode([text])[0])]
        if isinstance(tokenizer, tokenizers.SentencePieceTokenizer):  # of no chats
            return
        (whole,) = tokenizer.encode_with_spans([text])
        spans = encode_long_with_spans(tokenizer, text, "a.txt")
        for name in spans._fields:
            assert getattr(spans, name).tolist() == getattr(whole, name).tolist()

    check_text()


def check_windows_stay_small(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of what people write agree, so that none is made wider."""
    monkeypatch.setattr(long_text, "MAX_WINDOW", 800)
    text = " ".join(SENTENCES * 30)
    assert ids_in_windows(tokenizer, text) == [*map(int, tokenizer.encode([text])[0])]


def tiktoken_of(folder: Path, pattern: str) -> Any:
    ranks = {bytes([n]): n for n in range(256)}
    for word in " ".join(SENTENCES).replace(" ", "\0 ").split("\0"):
        data = word.encode()
        for size in range(2, len(data) + 1):
            ranks.setdefault(data[:size], len(ranks))
    path = folder / "own.tiktoken"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {n}\n" for t, n in ranks.items()))
    return load_tokenizer(str(path), pattern=pattern, special_tokens_in_text="parse")


def sentencepiece_of(folder: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model_type": "bpe", "vocab_size": 380}
    with open(folder / "sp.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 3),
            model_writer=file,
            minloglevel=2,
            **defaults | options,
        )
    return load_tokenizer(str(folder / "sp.model"))


def hugging_face_of(folder: Path) -> Any:
    model = MAKERS["gpt2"]()
    model.decoder = decoders.ByteLevel()
    model.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder / "tokenizer.json"))


LOADERS: dict[type, Callable[[Path], Any]] = {
    tokenizers.BytesTokenizer: lambda folder: load_tokenizer("bytes"),
    tokenizers.TiktokenTokenizer: partial(tiktoken_of, pattern="cl100k_base"),
    tokenizers.SentencePieceTokenizer: partial(
        sentencepiece_of, normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    tokenizers.HuggingFaceTokenizer: hugging_face_of,
}


@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", tokenizers.Tokenizer.__subclasses__())
def test_every_kind_of_tokenizer_keeps_the_contract(
    kind: type[tokenizers.Tokenizer], tmp_path: Path
) -> None:
    tokenizer = LOADERS[kind](tmp_path)
    assert type(tokenizer) is kind
    assert tokenizer.digest == LOADERS[kind](tmp_path).digest
    text, *_ = SENTENCES[0].splitlines()
    ids = [int(token) for token in tokenizer.encode([text], bare=True)[0]]
    assert tokenizer.decode(ids) == text
    assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size
    if kind is not tokenizers.SentencePieceTokenizer:
        (spans,) = tokenizer.encode_with_spans([text])
        assert spans.ids.tolist() == ids
        assert spans.starts[0] == 0
        assert (spans.starts <= spans.stops).all()
        assert spans.stops[-1] == len(text.encode() if tokenizer.spans_in_bytes else text)
    compare(tokenizer, 10)


@pytest.mark.parametrize("call", ["encode", "encode_with_spans"])
def test_few_characters_are_encoded_together(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes some 110 bytes of memory for each until all of them are encoded."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json", ["word", "other"]))
    texts = ["word " * size for size in (30, 30, 1, 2, 90, 3, 1)] + ["other"] * 40
    encode_texts: Any = getattr(tokenizer, call)
    expected = encode_texts(texts)
    batches: list[list[str]] = []
    library = tokenizers.HuggingFaceTokenizer._call

    def noting(self: Any, encode: Any, some: list[str], **options: Any) -> Any:
        batches.append(some)
        return library(self, encode, some, **options)

    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    monkeypatch.setattr(tokenizers, "CHARS_AT_ONCE", 200)
    monkeypatch.setattr(tokenizers.HuggingFaceTokenizer, "_call", noting)
    for ids, whole in zip(encode_texts(texts), expected, strict=True):
        assert np.array_equal(ids, whole)
    assert [len(batch) for batch in batches] == [1, 3, 1, 16, 16, 10]


@pytest.mark.many_examples
@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", MAKERS)
def test_windows_have_the_ids_of_the_whole_with_tokenizers_of_hugging_face(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MAKERS[name]().save(str(tmp_path / "tokenizer.json"))
    for special in ("parse", "text"):
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), special_tokens_in_text=special)

        compare(tokenizer, examples(12))
        with monkeypatch.context() as patch:
            check_windows_stay_small(tokenizer, patch)


@pytest.mark.many_examples
@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "byte_fallback": True,
        },
        {
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": False,
        },
        {"user_defined_symbols": ["<sep>", "a b"]},
    ],
    ids=["usual", "llama", "no prefix", "symbols"],
)
def test_windows_have_the_ids_of_the_whole_with_sentencepiece(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = sentencepiece_of(tmp_path, **options)

    compare(tokenizer, examples(12))
    check_windows_stay_small(tokenizer, monkeypatch)


@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.parametrize("name", [*PATTERN, "unigram"])
def test_texts_that_take_little_memory_are_encoded_by_one_call(name: str, tmp_path: Path) -> None:
    """Windows of a unigram model would have others: its library adds up scores in float32."""
    if name == "unigram":
        tokenizer = sentencepiece_of(tmp_path, model_type="unigram", vocab_size=110)
    else:
        tokenizer = tiktoken_of(tmp_path, name)
    words = " ".join(SENTENCES).split()
    text = " ".join(random.Random(7).choices(words, k=300_000))
    assert len(text) > long_text.LONG
    texts: list[str] = []
    encode_all = tokenizer.encode

    def noting(some: list[str], **options: bool) -> Any:
        texts.extend(some)
        return encode_all(some, **options)

    tokenizer.encode = noting
    assert ids_in_windows(tokenizer, text) == encode_all([text])[0].tolist()
    assert texts == [text]


def test_a_run_of_blanks_on_which_tiktoken_gives_up_is_named_and_left_out(tmp_path: Path) -> None:
    tiktoken_of(tmp_path, "llama3")
    for name, blanks in (("a", 2_000_000), ("b", 20)):
        (tmp_path / f"{name}.txt").write_text("a" + " " * blanks + "b")
    options: dict[str, Any] = {"tokenizer": f"{tmp_path}/own.tiktoken,llama3", "workers": 1}
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    with pytest.raises(ConvertError, match=r"a\.txt: own\.tiktoken: cannot encode a text"):
        convert(inputs, str(tmp_path / "no"), **options)
    report = convert(inputs, str(tmp_path / "out"), on_error="skip", **options)
    assert (report.documents, report.dropped) == (1, {"broken record": 1})


@pytest.mark.many_examples
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "normalizer", [normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")], ids=str
)
def test_windows_have_the_ids_of_the_whole_with_any_normalizer(
    normalizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs(normalizer, pre_tokenizers.ByteLevel()).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    compare(tokenizer, examples(12))
    check_windows_stay_small(tokenizer, monkeypatch)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("word", ["x", "ab", " ", "é1", "\n \n", "한국어", "x\u0301"])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2", "metaspace", "bert", "unigram"])
def test_words_that_are_longer_than_a_window_have_the_ids_of_the_whole(
    name: str, word: str, tmp_path: Path
) -> None:
    MAKERS[name]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for before in (0, 3, 40):
        text = " ".join(SENTENCES * before) + word * 4001 + " ".join(SENTENCES * 9)
        assert ids_in_windows(tokenizer, text) == [*map(int, tokenizer.encode([text])[0])]


@pytest.mark.guarantee("long-texts-ids")
def test_what_cannot_be_cut_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(long_text, "WINDOW", 1 << 12)
    monkeypatch.setattr(long_text, "OVERLAPS", 4)
    monkeypatch.setattr(long_text, "MAX_WINDOW", 1 << 16)
    MAKERS["bert"]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "words and " * 2000 + "x" * (1 << 17) + " ends"
    message = r"a\.txt: the text cannot be cut into windows between characters 1\d,\d{3} and"
    with pytest.raises(ConvertError, match=message):
        ids_in_windows(tokenizer, text)


TEXT = " ".join(SENTENCES * 30)


def template(single: str) -> Any:
    return processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("<sep>", 3), ("<end>", 2_000_000)]
    )


POST_PROCESSORS: dict[str, Callable[[], Any]] = {
    "template": lambda: template("<s> $A <sep> <s>"),
    "template, before": lambda: template("<s> <end> $A"),
    "template, behind": lambda: template("$A:0 <end>:0"),
    "bytes": lambda: processors.ByteLevel(trim_offsets=True),
    "bert": lambda: processors.BertProcessing(("<sep>", 3), ("<s>", 1)),
    "roberta": lambda: processors.RobertaProcessing(("<sep>", 3), ("<s>", 1)),
    "several": lambda: processors.Sequence([processors.ByteLevel(), template("<s> $A <end>")]),
}


def letters_of(text: str) -> Tokenizer:
    """A BPE model of the letters of a text, which has no token for others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=200))
    return tokenizer


@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [*MAKERS, "without a"])
def test_what_a_post_processor_adds_is_added_once_and_in_its_place(
    name: str, tmp_path: Path
) -> None:
    some = f"{TEXT} a", "a" * 2000
    if name == "without a":
        some = TEXT.replace("a", ""), "b" * 2000
    model = letters_of("".join(some)) if name == "without a" else MAKERS[name]()
    for make in POST_PROCESSORS.values():
        model.post_processor = make()
        model.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), add_special_tokens=True)
        for text in some:
            whole = model.encode(text).ids
            assert ids_in_windows(tokenizer, text) == whole
            assert [*map(int, tokenizer.encode([text])[0])] == whole


@pytest.mark.usefixtures("small")
def test_a_tokenizer_that_refuses_what_it_does_not_know_encodes_long_texts(tmp_path: Path) -> None:
    model = Tokenizer(models.WordLevel({"word": 0, "<s>": 1}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.post_processor = template("<s> $A")
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), add_special_tokens=True)
    assert ids_in_windows(tokenizer, "word " * 2000) == [1, *[0] * 2000]


@pytest.mark.usefixtures("small")
def test_a_post_processor_that_repeats_a_text_is_refused_for_long_ones(tmp_path: Path) -> None:
    model = MAKERS["gpt2"]()
    model.post_processor = template("$A <s> $A")
    model.save(str(tmp_path / "tokenizer.json"))
    for add in (True, False):
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), add_special_tokens=add)
        with pytest.raises(ConvertError, match=r"tokenizer\.json: .*post-processor.* 2 times"):
            ids_in_windows(tokenizer, TEXT)


def write_texts(folder: Path) -> None:
    """Files of one text each."""
    words = " ".join(SENTENCES).split()
    for number, count in enumerate((900, 3, 1500, 900, 0, 1500, 40, 700)):
        rng = np.random.default_rng(number % 3)
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(words, count)))
    (folder / "blank.txt").write_text(" " * 5000)
    with gzip.open(folder / "c.txt.gz", "wt") as file:
        file.write("\ufeff" + " ".join(np.random.default_rng(2).choice(words, 2000)))


def write_records(folder: Path) -> None:
    """Records of several texts each."""
    rng = np.random.default_rng(4)
    words = " ".join(SENTENCES).split()

    def text(count: int) -> str:
        return " ".join(rng.choice(words, count))

    found = [
        {"text": text(900), "b": text(5), "list": [text(3), text(700), "", text(800)]},
        {"text": text(3), "b": text(4), "list": [text(5)]},
        {"text": text(4), "b": text(900), "list": ["", " " * 900, text(4)]},
        {"text": " " * 900, "b": "", "list": [" " * 900, ""]},
        {"text": "", "b": "", "list": [], "else": text(900)},
        {"text": text(50), "b": " " * 900, "list": [text(900), text(900)]},
    ]
    lines = [json.dumps(record) + "\n" for record in [*found, found[0], found[2]]]
    (folder / "in.jsonl").write_text("".join(lines))


SETTINGS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "plain": (write_texts, {}),
    "cut": (write_texts, {"max_tokens": 700}),
    "cut without an end": (write_texts, {"max_tokens": 700, "append_eod": False}),
    "dropped": (write_texts, {"max_tokens": 2500, "max_tokens_policy": "drop"}),
    "short": (write_texts, {"min_tokens": 3000}),
    "duplicates": (write_texts, {"dedup": True, "shuffle_seed": 3}),
    "shuffled": (write_texts, {"shuffle_seed": 3, "bos": "<s>"}),
    "another mode": (
        write_texts,
        {"text_keys": ("text:1",), "keep_modes": (1,), "on_error": "skip"},
    ),
    "two keys": (write_records, {"text_keys": ("b", "text")}),
    "modes": (write_records, {"text_keys": ("text", "b:1")}),
    "modes, begun": (write_records, {"text_keys": ("text", "b:1"), "bos": "<s>"}),
    "one mode": (write_records, {"text_keys": ("text", "b:1"), "keep_modes": (1,)}),
    "the other mode": (
        write_records,
        {"text_keys": ("text", "b:1"), "keep_modes": (0,), "max_tokens": 300},
    ),
    "sentences": (write_records, {"text_keys": ("list",)}),
    "sentences, begun": (write_records, {"text_keys": ("list",), "bos": "<s>"}),
    "sentences, cut": (write_records, {"text_keys": ("list",), "max_tokens": 600, "dedup": True}),
    "no end": (write_records, {"text_keys": ("list",), "max_tokens": 600, "append_eod": False}),
}


@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", SETTINGS)
def test_long_documents_become_what_they_are_when_they_are_encoded_as_a_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, settings = SETTINGS[name]
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder)
    MAKERS["words"]().save(str(tmp_path / "tokenizer.json"))
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "eod": "<sep>"}
    reports: list[Any] = []
    for kind, size in (("whole", 1 << 30), ("long", 512)):
        monkeypatch.setattr(encode, "LONG", size)
        try:
            report = convert([str(folder)], str(tmp_path / kind), workers=1, **options, **settings)
        except ConvertError as error:  # of a mode that no text has
            assert name == "another mode"
            reports.append(str(error))
        else:
            reports.append(report)
    whole, long = reports
    if name == "another mode":
        assert whole == long
        return
    for figure in ("tokens", "documents", "sequences", "dropped", "histogram", "text_bytes"):
        assert getattr(whole, figure) == getattr(long, figure), figure
    for suffix in (".bin", ".idx"):
        stored = [(tmp_path / f"{kind}{suffix}").read_bytes() for kind in ("whole", "long")]
        assert stored[0] == stored[1]


def test_long_files_that_are_no_text_are_named_or_left_out(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"words " * 200 + b"\xff" + b"more " * 200)
    (folder / "b.txt").write_text("words " * 200)
    packed = gzip.compress(("words and more " * 20000).encode())
    (folder / "c.txt.gz").write_bytes(packed[: len(packed) // 2])
    for name, message in (
        ("a.txt", r"a\.txt: is not UTF-8 text \(byte 1200\)"),
        ("c.txt.gz", r"c\.txt\.gz: cannot be read"),
    ):
        with pytest.raises(ConvertError, match=message):
            convert([str(folder / name)], str(tmp_path / "no"), tokenizer="bytes", workers=1)
    report = convert(
        [str(folder)], str(tmp_path / "out"), tokenizer="bytes", workers=1, on_error="skip"
    )
    assert report.documents == 1
    assert report.dropped == {"broken record": 1, "unreadable file": 1}


MEASURED = """
import json, resource, sys
from streammega.convert import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert([sys.argv[1]], sys.argv[2], eod="<s>", workers=1, **json.loads(sys.argv[3]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.guarantee("long-texts-ids")
@pytest.mark.parametrize(
    "options",
    [{}, {"chat": True}, {"chat": True, "chat_template": TEMPLATE}],
    ids=["text", "chat", "chat by a template"],
)
def test_memory_does_not_grow_with_a_document(tmp_path: Path, options: dict[str, Any]) -> None:
    MAKERS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    text = " ".join(SENTENCES * 8) * (6_000_000 // len((" ".join(SENTENCES) * 8).encode()))
    source = tmp_path / ("long.jsonl" if options else "long.txt")
    record = {"messages": [{"role": "assistant", "content": text}]}
    source.write_text(json.dumps(record) if options else text)
    options = options | {"tokenizer": str(tmp_path / "tokenizer.json")}
    arguments = [str(source), str(tmp_path / "out"), json.dumps(options)]
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300, "MiB; the library alone would take 700 MiB for all of it"
    indexed = IndexedDataset(str(tmp_path / "out"))
    is_chat = "chat" in options
    assert len(indexed) == 1 + is_chat
    tokens = indexed[1][0] if is_chat else indexed[0]
    assert (
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<s>")
        == np.asarray(tokens)[-1]
    )
