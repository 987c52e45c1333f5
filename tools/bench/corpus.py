"""What the benches of conversions convert: a corpus, its tokenizer, a pair of its tokens, shards.

The corpus is Python's own sources, again and again, each document marked with its number; the
tokenizer is trained on them. Everything is made once, when a figure first asks for it, and kept
under a name that tells its size; what was interrupted is made anew.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path("/tmp/streammega-bench/convert")
VOCAB_SIZE = 32_000
TRAINED_ON = 24 << 20
"""Characters that the tokenizer is trained on: the ids of more would hardly be others."""
SHARDS_OF_A_PAIR = 4


def tell(message: str) -> None:
    """What goes on, beside the table: the first line of it can take a minute."""
    print(message, file=sys.stderr, flush=True)


def made(path: Path, make: Callable[[Path], Any]) -> str:
    """A file that `make` writes, once; under another name until it is whole."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tell(f"preparing {path.name} ...")
        began = time.perf_counter()
        unfinished = path.with_name(f".{os.getpid()}.{path.name}")
        make(unfinished)
        os.replace(unfinished, path)
        tell(f"prepared {path.name} in {time.perf_counter() - began:.0f} s")
    return str(path)


@cache
def sources() -> list[str]:
    """Python files of this installation."""
    paths = sysconfig.get_paths()
    texts = []
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"])):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if 200 < len(text) < 100_000:
                texts.append(text)
    return texts


def tokenizer() -> str:
    """A byte-level BPE of those."""
    return made(FOLDER / "tokenizer.json", _train)


def _train(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False
    )
    texts = sources()
    step = max(1, sum(map(len, texts)) // TRAINED_ON)
    model.train_from_iterator(texts[::step], trainer)
    model.save(str(path))


def corpus(mib: int) -> str:
    """JSON lines of so many MiB."""
    return made(FOLDER / f"corpus-{mib}.jsonl", lambda path: _write_lines(path, mib << 20))


def _write_lines(path: Path, size: int) -> None:
    texts = sources()
    with open(path, "w", encoding="utf-8") as file:
        for number in itertools.count():
            if file.tell() >= size:
                return
            text = texts[number * 7919 % len(texts)]
            file.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")


def once(mib: int) -> str:
    """The pair of a corpus, by its prefix."""
    prefix = FOLDER / f"once-{mib}"

    def convert_corpus(note: Path) -> None:
        convert_into(prefix, [corpus(mib)], tokenizer=tokenizer())

    return _made_dataset(prefix, convert_corpus)


def pair(mib: int, corpus_mib: int) -> str:
    """A pair of so many MiB of tokens: those of a corpus, again and again."""
    prefix = FOLDER / f"pair-{mib}"

    def repeat(note: Path) -> None:
        from streammega.dataset import IndexedDatasetWriter

        part = once(corpus_mib)
        part_bytes = os.stat(f"{part}.bin").st_size
        with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
            for _ in range((mib << 20) // part_bytes + 1):
                writer.add_index(part)

    return _made_dataset(prefix, repeat)


def shards(mib: int, corpus_mib: int, kind: str = "bin") -> str:
    """The pair in a few shards, by their prefix."""
    prefix = FOLDER / f"{kind}-{mib}" / kind
    most = (mib << 20) // SHARDS_OF_A_PAIR

    def reshape(note: Path) -> None:
        convert_into(prefix, [pair(mib, corpus_mib)], kind=kind, shard_bytes=most, eod_id=0)

    return _made_dataset(prefix, reshape)


def _made_dataset(prefix: Path, make: Callable[[Path], None]) -> str:
    """A dataset that `make` writes, once."""

    def make_and_note(note: Path) -> None:
        make(note)
        note.touch()

    made(prefix.with_name(f"{prefix.name}.done"), make_and_note)
    return str(prefix)


def convert_into(prefix: Path, inputs: list[str], **settings: Any) -> None:
    """A conversion that replaces what an interrupted one left."""
    from streammega.convert import convert

    shutil.rmtree(prefix.with_name(f".{prefix.name}.convert"), ignore_errors=True)
    convert(inputs, str(prefix), overwrite=True, **settings)


def document(name: str, size: int) -> str:
    """A file that holds one text of so many bytes, in the form that its suffix tells."""
    return made(FOLDER / name, lambda path: _write_document(path, size))


def _write_document(path: Path, size: int) -> None:
    """One text, written without being held; for Parquet it has to be."""
    pieces = _until(size, itertools.cycle(sources()))
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": pa.array(["".join(pieces)], pa.large_string())}), path)
        return
    before, behind = {
        ".txt": ("", ""),
        ".jsonl": ('{"text": "', '"}\n'),
        ".json": ('[\n{"text": "', '"}\n]\n'),
    }[path.suffix]
    with open(path, "w", encoding="utf-8") as file:
        file.write(before)
        for text in pieces:
            file.write(json.dumps(text)[1:-1] if before else text)
        file.write(behind)


def _until(size: int, texts: Iterator[str]) -> Iterator[str]:
    """Texts up to so many bytes."""
    while size > 0:
        text = next(texts)
        size -= len(text.encode())
        yield text
