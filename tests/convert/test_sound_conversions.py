"""Whatever a conversion is asked for, `verify` finds what it made sound, and the report tells of
every document.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import IndexedDatasetWriter
from streammega.convert import convert
from streammega.dataset.verify import verify
from streammega.errors import ConvertError
from tests.support.examples import examples

words = st.text(st.sampled_from("ab \n"), max_size=30)
turn = st.tuples(st.sampled_from(["user", "assistant", "system"]), words)
asked = st.fixed_dictionaries(
    {
        "format": st.sampled_from(["bin", "zst", "tar"]),
        "shard_bytes": st.sampled_from([None, 1, 60, 400]),
        "shuffle_seed": st.sampled_from([None, 3]),
        "dedup": st.booleans(),
        "min_tokens": st.sampled_from([0, 5]),
        "max_tokens": st.sampled_from([None, 5, 20]),
        "max_tokens_policy": st.sampled_from(["cut", "drop"]),
        "keep_modes": st.sampled_from([None, None, (0,), (1,), (0, 1)]),
    }
).filter(lambda options: options["max_tokens"] or options["max_tokens_policy"] == "cut")
token_corpus = st.lists(
    st.lists(
        st.tuples(st.lists(st.integers(0, 60_000), min_size=1, max_size=30), st.integers(0, 2)),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=25,
)


def check(inputs: list[str], folder: Path, options: dict[str, Any], segment_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streammega.convert.job.SEGMENT_BYTES", segment_bytes)
        try:
            report = convert(inputs, str(folder / "out"), workers=1, **options)
        except ConvertError as error:
            assert "hold no text and no tokens" in str(error)  # noqa: PT017  every document was left out
            assert not list(folder.glob("out*"))
            return
    found = verify(str(folder / "out"))
    assert found.problems == []
    assert (found.documents, found.sequences, found.tokens) == (
        report.documents,
        report.sequences,
        report.tokens,
    )
    assert sum(report.histogram) >= report.documents


@pytest.mark.many_examples
@pytest.mark.guarantee("conversion-sound-verify")
@given(
    corpus=token_corpus,
    multimodal=st.booleans(),
    eod=st.booleans(),
    options=asked,
    cut=st.sampled_from([50, 1 << 20]),
)
@settings(max_examples=examples(12))
def test_every_conversion_of_tokens_is_sound(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: Any,
    multimodal: bool,
    eod: bool,
    options: dict[str, Any],
    cut: int,
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    end = 60_001
    with IndexedDatasetWriter(str(folder / "in"), np.uint16, multimodal) as writer:
        for document in corpus:
            for number, (tokens, mode) in enumerate(document):
                closing = [end] if eod and number == len(document) - 1 else []
                writer.add_item(np.array([*tokens, *closing], np.int64), mode)
            writer.end_document()
    check([str(folder / "in")], folder, options | ({"eod_id": end} if eod else {}), cut)


@pytest.mark.many_examples
@pytest.mark.guarantee("conversion-sound-verify")
@given(
    texts=st.lists(words, min_size=1, max_size=25),
    options=asked,
    cut=st.sampled_from([50, 1 << 20]),
    append=st.booleans(),
)
@settings(max_examples=examples(12))
def test_every_conversion_of_text_is_sound(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    options: dict[str, Any],
    cut: int,
    append: bool,
) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"text": text, "answer": text[:3]}) + "\n" for text in texts)
    )
    keys = ("text", "answer:1") if options["keep_modes"] else ("text",)
    check([str(folder / "in.jsonl")], folder, options | {
        "tokenizer": "bytes", "text_keys": keys, "append_eod": append,
    }, cut)  # fmt: skip


@pytest.mark.many_examples
@pytest.mark.guarantee("conversion-sound-verify")
@given(
    chats=st.lists(st.lists(turn, min_size=1, max_size=4), min_size=1, max_size=15), options=asked
)
@settings(max_examples=examples(12))
def test_every_conversion_of_chats_is_sound(
    tmp_path_factory: pytest.TempPathFactory,
    chats: list[list[tuple[str, str]]],
    options: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    records = [
        {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    check([str(folder / "in.jsonl")], folder, options | {"tokenizer": "bytes", "chat": True}, 50)
