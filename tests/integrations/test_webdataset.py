"""webdataset: a loader in its pipelines, and texts of its shards that are tokenised as they come."""

from __future__ import annotations

import copy
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError, StateError
from streammega.integrations.webdataset import TextStream, loader_stage, webdataset_texts
from tests.support.builders import tar_with_holes
from tests.support.examples import examples
from tests.support.feeds import StageFeed, TextFeed, check_kills, rows_of
from tests.support.gang import Gang
from tests.support.processes import in_child
from tests.support.servers import S3
from tests.support.texts import FIELDS, corpus, encode, rows, samples_of, stream_of

PAGE = Path(__file__).parents[2] / "docs" / "webdataset.md"
# A stage of a pipeline.


@pytest.mark.guarantee("loader-first-stage")
def test_a_loader_is_the_first_stage_of_a_pipeline(config: DataConfig) -> None:
    sizes: Any = {"micro_batch_size": 4, "global_batch_size": 8}
    with StreamLoader(config, **sizes) as loader, StreamLoader(config, **sizes) as bare:
        pipeline = webdataset.DataPipeline(loader_stage(loader), webdataset.map(rows_of))
        batches = iter(pipeline)
        expected = [rows_of(bare.take()) for _ in range(6)]
        assert all(torch.equal(next(batches), rows) for rows in expected[:3])
        state = json.loads(json.dumps(loader.state_dict()))
        next(batches)
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="load_state_dict moved its loader"):
            next(batches)
        assert all(map(torch.equal, iter(pipeline), expected[3:]))


@pytest.mark.guarantee("loader-first-stage")
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*p, marks=pytest.mark.soak) for p in ((1, 1), (2, 2)))],
)
def test_a_killed_run_behind_a_pipeline_goes_on_exactly(
    gang: Gang, config: DataConfig, tmp_path: Path, before: int, after: int
) -> None:
    endless = replace(config, order="stream", shuffle_lanes=16, num_samples=None)
    check_kills(gang, StageFeed, endless, tmp_path / "run", before, after)


# Texts.


@pytest.mark.guarantee("textstream-number-ranks")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    passes=st.integers(1, 3),
    dp_size=st.sampled_from([1, 2, 4]),
    resumes=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 4])), max_size=3),
)
def test_any_ranks_take_the_same_global_batches_through_any_resumes(
    counts: list[int], passes: int, dp_size: int, resumes: list[tuple[int, int]]
) -> None:
    """Of texts of any number, packed one after the other; the state is that of all ranks."""
    shards = corpus([*counts, 9])
    whole = samples_of(shards, passes)
    whole = whole[: len(whole) // 4 * 4]
    got: list[list[int]] = []
    state = None
    for steps, size in [*resumes, (1_000, dp_size)]:
        micro = 4 // size
        ranks = [
            stream_of(shards, micro_batch_size=micro, dp_rank=rank, dp_size=size, passes=passes)
            for rank in range(size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        taken = 0
        while taken < steps:
            try:
                batches = [rows(next(rank)) for rank in ranks]
            except StopIteration:
                break
            # rank r has the samples r, r + size, ... of the micro-step
            got += [batches[n % size][n // size] for n in range(4)]
            taken += 1
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
        assert len(json.dumps(state)) < 1024
        for rank in ranks:
            rank.close()
    assert got == whole


@pytest.mark.guarantee("cursor-model")
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_of_a_stream_has_a_cursor_of_its_own(make: Callable[[Any], Any]) -> None:
    shards = corpus([30])
    whole = samples_of(shards)
    with stream_of(shards, micro_batch_size=1, global_batch_size=4) as stream:
        assert rows(next(stream)) == [whole[0]]
        with pytest.raises(StateError, match=r"while it has an iteration.*call close\(\) first"):
            make(stream)
        stream.close()
        with make(stream) as copied:
            assert [rows(next(copied)) for _ in range(2)] == [[whole[1]], [whole[2]]]
        assert rows(next(stream)) == [whole[1]]


@pytest.mark.guarantee("cursor-model")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")  # of Python 3.12 and newer
def test_a_forked_child_reads_on_with_a_stream_of_its_parent() -> None:
    shards = corpus([30])
    whole = samples_of(shards)
    with stream_of(shards, micro_batch_size=1, global_batch_size=4) as stream:
        next(stream)
        assert in_child(lambda: [rows(next(stream)) for _ in range(6)]) == [
            [row] for row in whole[1:7]
        ]
        assert rows(next(stream)) == [whole[1]]


@pytest.mark.guarantee("textstream-number-ranks")
def test_a_state_may_stop_within_a_global_batch() -> None:
    shards = corpus([30])
    whole = samples_of(shards)
    with stream_of(shards, micro_batch_size=1, global_batch_size=8) as stream:
        for number in range(11):
            assert rows(next(stream)) == [whole[number]]
        state = stream.state_dict()
    assert (state["consumed_samples"], state["batch_offset"]) == (11, 3)
    with stream_of(shards, micro_batch_size=4, global_batch_size=8) as again:
        with pytest.raises(StateError, match="no whole micro-steps of 4"):
            again.load_state_dict(state)
        assert again.consumed_samples == 0
        assert rows(next(again)) == whole[:4]
    with stream_of(shards, micro_batch_size=1, global_batch_size=8) as again:
        for _ in range(2):
            again.load_state_dict(state)
        assert rows(next(again)) == [whole[11]]


@pytest.mark.guarantee("textstream-number-ranks")
def test_shards_are_shuffled_pass_by_pass_and_nothing_is_lost() -> None:
    shards = {f"{n}": [f"{n:03d}"] * 4 for n in range(30)}  # two samples each
    with stream_of(shards, seed=7, passes=4, global_batch_size=2) as stream:
        seen = [tuple(row) for batch in stream for row in rows(batch)]
    per_pass = [[row[:3] for row in seen[n * 60 : (n + 1) * 60 : 2]] for n in range(3)]
    assert all(len(set(shards_seen)) == 30 for shards_seen in per_pass)
    assert per_pass[0] != per_pass[1] != per_pass[2]
    names = ["".join(map(chr, name)) for name in per_pass[0][:6]]
    assert names == ["009", "017", "019", "010", "028", "016"], "golden: saved states count in it"


@pytest.mark.guarantee("textstream-reads-texts")
def test_the_end_is_told_once_and_the_next_pass_begins_at_the_first_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shards = corpus([30])
    with stream_of(shards) as stream:
        first = [rows(batch) for batch in stream]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(stream)
        end = stream.state_dict()
        assert [rows(batch) for batch in stream] == first
    with stream_of(shards) as again:
        again.load_state_dict(end)
        assert list(again) == []
        assert "is the end of the texts" in caplog.text
        assert [rows(batch) for batch in again] == first


@pytest.mark.guarantee("textstream-reads-texts")
def test_an_iteration_that_is_held_says_why_it_is_over() -> None:
    shards = corpus([30])
    with stream_of(shards) as stream:
        held = iter(stream)
        next(held)
        state = stream.state_dict()
        stream.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(StateError, match="load_state_dict moved its stream"):
                next(held)
        held = iter(stream)
        iter(stream)
        with pytest.raises(StateError, match="another iteration of its stream"):
            next(held)


@pytest.mark.guarantee("textstream-reads-texts")
def test_a_load_under_a_thread_that_waits_for_a_batch_changes_nothing() -> None:
    stream = stream_of(corpus([12, 12]), micro_batch_size=2)
    state = stream.state_dict()
    iteration = stream._begin()
    next(iteration)
    taken = stream.consumed_samples
    with iteration._lock, pytest.raises(StateError, match="another thread waits"):
        stream.load_state_dict(state)
    assert stream.consumed_samples == taken
    next(iteration)
    stream.load_state_dict(state)
    with pytest.raises(StateError, match="load_state_dict moved its stream"):
        next(iteration)
    assert stream.consumed_samples == 0
    stream.close()


@pytest.mark.guarantee("textstream-reads-texts")
def test_a_text_that_cannot_be_read_is_told_and_asked_for_again() -> None:
    shards = corpus([30])
    broken = True

    def texts(name: str) -> Iterator[str]:
        for number, text in enumerate(shards[name]):
            if number == 20 and broken:
                raise FormatError("this text cannot be read")
            yield text

    whole = samples_of(shards)
    sizes: Any = {"micro_batch_size": 4, "global_batch_size": 4, "passes": 1}
    with TextStream(list(shards), encode, FIELDS, texts=texts, **sizes) as stream:
        got = []
        with pytest.raises(FormatError, match="cannot be read"):
            for batch in stream:
                got += rows(batch)
        broken = False
        got += rows(next(stream))
        for batch in iter(stream.__next__, None):
            got += rows(batch)
            if len(got) + 4 > len(whole):
                break
    assert got == whole[: len(got)]
    assert len(got) == len(whole) // 4 * 4


@pytest.mark.guarantee("textstream-reads-texts")
def test_states_of_other_texts_are_refused_and_change_nothing() -> None:
    shards = corpus([30, 30])
    with stream_of(shards) as stream:
        for _ in range(9):
            next(stream)
        state = stream.state_dict()
        for other, words in (
            ({}, "the data state is empty"),
            ({"version": 2, "consumed_samples": 3}, "the data state lacks"),
            (state | {"version": 2}, "version 2, this release reads version 1"),
            (state | {"positions": '{"0": [0, 0, -1, ""]}'}, "it is damaged"),
            (state | {"positions": '{"0": [0, true, 0, ""]}'}, "it is damaged"),
            (state | {"consumed_samples": True}, "True, not a count"),
            (state | {"batch_offset": -1}, "-1, not a count"),
            (state | {"order": "{"}, "is damaged"),
            (state | {"order": "[" * 100_000}, "is damaged"),
            (state | {"positions": "[" * 100_000}, "it is damaged"),
            (stream_of(shards, seed=3).state_dict(), "seed: the checkpoint has 3, this run null"),
            (stream_of(corpus([1])).state_dict(), "num_shards: the checkpoint has 1, this run 2"),
        ):
            with pytest.raises(StateError, match=words):
                stream.load_state_dict(other)
        assert stream.state_dict() == state
    others = {name: [text + "!" for text in texts] for name, texts in shards.items()}
    shorter = {name: texts[:2] for name, texts in shards.items()}
    for changed, words in ((others, "has other ids than when"), (shorter, "has no text number")):
        with stream_of(changed) as stream:
            stream.load_state_dict(state)
            with pytest.raises(StateError, match=words):
                next(stream)


@pytest.mark.guarantee("textstream-reads-texts")
def test_settings_and_texts_that_do_not_fit_are_refused() -> None:
    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 4}
    for shards, given_, words in (
        ("a.tar", {}, "takes a list of names"),
        ([], {}, "at least one"),
        (["a"], {"passes": 0}, "at least 1, or None"),
        (["a"], {"global_batch_size": 3}, "global_batch_size"),
    ):
        with pytest.raises(ConfigError, match=words):
            TextStream(shards, encode, FIELDS, **(sizes | given_))
    settings: dict[str, dict[str, Any]] = {
        "exclude_documents": {"exclude_documents": ["a#1"]},
        "exclude_samples": {"exclude_samples": [(4, 8)]},
        "dataset_id": {"fields": [..., "dataset_id"]},
    }
    for name, setting in settings.items():
        of_datasets = DataConfig(blend="a", sequence_length=4, eod_id=0, **setting)
        with pytest.raises(ConfigError, match=f"{name} is of datasets, .*give it a FieldsConfig"):
            TextStream(["a"], encode, of_datasets, **sizes)
    for made, words in (([[1]], "of shape"), ([0.5], "float64")):
        always: Any = partial(lambda made, text: made, made)
        stream = TextStream(["a"], always, FIELDS, texts=lambda name: ["x"], **sizes)
        with pytest.raises(ConfigError, match=words):
            next(stream)
    for passes in (1, None):
        with pytest.raises(FormatError, match=r"less than one global batch|has a text with an id"):
            next(stream_of({"a": [""], "b": []}, passes=passes))


# Shards of webdataset.


def test_ids_that_the_vocabulary_has_not_name_the_shards() -> None:
    shards = [f"web-{number}.tar" for number in range(7)]
    fields = replace(FIELDS, eod_id=0, vocab_size=98)
    texts = ["abcdefghijklmnop"] * 9
    with TextStream(
        shards, encode, fields, texts=lambda _: texts, micro_batch_size=1, global_batch_size=1
    ) as stream:
        expected = (
            "texts of web-0.tar, .*, web-4.tar and 2 others: token ids? .* outside of the voc"
        )
        with pytest.raises(FormatError, match=expected):
            next(stream)


def write_shards(folder: Path, shards: dict[str, list[str]]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in shards.items():
        with webdataset.TarWriter(str(folder / f"{name}.tar")) as tar:
            for number, text in enumerate(texts):
                tar.write(
                    {
                        "__key__": f"{number:05d}",
                        "txt": text,
                        "json": {"text": text, "n": number},
                        "cls": number,
                    }
                )
    return [str(folder / f"{name}.tar") for name in shards]


@pytest.mark.guarantee("textstream-reads-texts")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # files that webdataset leaves open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_texts_of_shards_are_those_that_webdataset_reads(tmp_path: Path, moto: S3) -> None:
    (path,) = write_shards(tmp_path, {"one": ["first", "", "zwölf", "last"]})
    theirs = [sample["txt"].decode() for sample in webdataset.WebDataset(path, shardshuffle=False)]
    bucket = moto.new_bucket()
    moto.objects(bucket)["one.tar"] = Path(path).read_bytes()
    storage = StorageConfig(storage_options=moto.options)
    for field in ("txt", "json"):
        assert list(webdataset_texts(field)(path)) == theirs
        assert list(webdataset_texts(field, storage=storage)(f"s3://{bucket}/one.tar")) == theirs
    with pytest.raises(FormatError, match=r"one\.tar: no texts in \.json"):
        list(webdataset_texts("json", key="body")(path))
    with pytest.raises(ObjectNotFoundError):
        list(webdataset_texts(storage=storage)(f"s3://{bucket}/two.tar"))


@pytest.mark.guarantee("textstream-reads-texts")
def test_a_shard_that_was_cut_or_is_damaged_anywhere_is_an_error(tmp_path: Path) -> None:
    """Also between two members, where tarfile takes what is left for the whole."""
    (path,) = write_shards(tmp_path, {"one": ["a" * 700, "b"]})
    whole = Path(path).read_bytes()
    content = whole.rstrip(b"\0")
    # behind the last member's block a block of zeros is the end
    end = -(-len(content) // 512) * 512 + 512
    damaged = tmp_path / "damaged.tar"
    for size in range(0, end, 256):
        damaged.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"damaged\.tar: no texts in \.txt members of a tar"):
            list(webdataset_texts()(str(damaged)))
    damaged.write_bytes(whole[:end])
    assert list(webdataset_texts()(str(damaged))) == ["a" * 700, "b"]
    for start in range(0, end - 512, 512):  # headers, what extends them, and contents
        damaged.write_bytes(whole[:start] + b"x" * 512 + whole[start + 512 :])
        try:
            texts = list(webdataset_texts()(str(damaged)))
        except FormatError:
            continue
        assert len(texts) == 2, "only the content of a member was another"
    damaged.write_bytes(whole * 2)
    with pytest.raises(FormatError, match="goes on after its end"):
        list(webdataset_texts()(str(damaged)))
    damaged.write_bytes(b"no tar at all" * 100)
    with pytest.raises(FormatError, match="no texts"):
        list(webdataset_texts()(str(damaged)))


@pytest.mark.guarantee("textstream-reads-texts")
def test_notes_and_folders_in_a_shard_are_no_texts(tmp_path: Path) -> None:
    contents = {
        "__meta__": b"a note",
        "__meta__/a.txt": b"a note",
        "folder/a.txt": b"one",
        "__b.txt": b"two",
        "folder/__c__.txt": b"three",
    }
    path = str(tmp_path / "a.tar.gz")
    with tarfile.open(path, "w:gz") as tar:
        folder = tarfile.TarInfo("folder.txt")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    texts = list(webdataset_texts()(path))
    assert texts == ["one", "two", "three"]
    with open(path, "rb") as file:
        theirs = list(webdataset.tariterators.tar_file_iterator(file))
    assert texts == [member["data"].decode() for member in theirs]


def test_a_member_with_holes_is_refused_and_not_filled(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_with_holes("a.txt"))
    with pytest.raises(FormatError, match=r"a\.txt claims 1,125,899,906,842,624 bytes"):
        list(webdataset_texts()(str(tmp_path / "a.tar")))


@pytest.mark.guarantee("textstream-number-ranks")
@pytest.mark.parametrize(
    ("before", "after"), [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.soak)]
)
def test_a_killed_run_goes_on_exactly(gang: Gang, tmp_path: Path, before: int, after: int) -> None:
    names = write_shards(tmp_path / "shards", corpus([50, 0, 70]))
    check_kills(gang, TextFeed, names, tmp_path / "run", before, after, reference=TextFeed)


@pytest.mark.guarantee("loader-first-stage")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path, {f"texts-{n:03d}": ["a few words of it all"] * 500 for n in range(2)})
    seen: list[Any] = []
    names: dict[str, Any] = {
        "rank": 0, "world": 1, "train_step": seen.append, "encode": encode, "to_device": lambda it: it
    }  # fmt: skip
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    assert seen
    names["lanes"].close()
    names["stream"].close()
    names["loader"].close()


@pytest.mark.guarantee("textstream-number-ranks")
def test_a_resumed_stream_does_not_tokenise_what_it_passes_over() -> None:
    shards = corpus([200])
    with stream_of(shards, passes=None) as stream:
        for _ in range(40):
            next(stream)
        state = stream.state_dict()
    encoded: list[str] = []

    def counted(text: str) -> list[int]:
        encoded.append(text)
        return encode(text)

    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 4}
    with TextStream(list(shards), counted, FIELDS, texts=shards.__getitem__, **sizes) as again:
        again.load_state_dict(state)
        next(again)
    _, text, _, _ = json.loads(state["positions"])["0"]
    assert encoded[0] == shards["shard-0"][text]
