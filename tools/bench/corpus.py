"""What the benches of conversions convert: a corpus, its tokenizer, a pair of its tokens, shards.

The corpus is Python's own sources, again and again, each document marked with its number; the
tokenizer is trained on them. Everything is made once, when a figure first asks for it, and kept
under a name with its size. After an interruption it is made again.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path("/tmp/streammega-bench/convert")
VOCAB_SIZE = 32_000
TRAINED_ON = 24 << 20
"""Characters that the tokenizer is trained on: the ids of more would hardly be others."""
SHARDS_OF_A_PAIR = 4
LOGNORMAL_MEAN = 1810
LOGNORMAL_SIGMA = 1.3
"""Tokens of a document of the web, and how their logarithms spread."""
EOD = 0
SOURCES = 6000
"""Python files that are looked at, spread over all."""
AT_ONCE = 64
"""Files that are tokenised together: what the library holds of a text is many times its size."""


def log(message: str) -> None:
    """Print progress to stderr: the first line of a table can take a minute."""
    print(message, file=sys.stderr, flush=True)


def made(path: Path, make: Callable[[Path], Any]) -> str:
    """A file that `make` writes, once; under another name until it is whole."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        log(f"preparing {path.name} ...")
        began = time.perf_counter()
        unfinished = path.with_name(f".{os.getpid()}.{path.name}")
        make(unfinished)
        os.replace(unfinished, path)
        log(f"prepared {path.name} in {time.perf_counter() - began:.0f} s")
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
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # of every byte a token
        show_progress=False,
    )
    texts = sources()
    step = max(1, sum(map(len, texts)) // TRAINED_ON)
    model.train_from_iterator(texts[::step], trainer)
    model.save(str(path))


def corpus(mib: int) -> str:
    """JSON lines of so many MiB."""
    return made(FOLDER / f"corpus-{mib}.jsonl", lambda path: _write_lines(path, mib << 20))


def corpus_as(form: str, mib: int) -> str:
    """The corpus of so many MiB of JSON lines in another form: jsonl.zst, parquet, csv."""
    lines = corpus(mib)
    if form == "jsonl":
        return lines
    return made(FOLDER / f"corpus-{mib}.{form}", lambda path: _write_form(path, form, lines))


def _write_form(path: Path, form: str, lines: str) -> None:
    if form == "jsonl.zst":
        import zstandard

        with open(lines, "rb") as source, open(path, "wb") as file:
            zstandard.ZstdCompressor().copy_stream(source, file)
        return
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    table = pyarrow.json.read_json(lines)
    if form == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path, row_group_size=1000)


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
    shard_bytes = (mib << 20) // SHARDS_OF_A_PAIR

    def reshape(note: Path) -> None:
        convert_into(
            prefix, [pair(mib, corpus_mib)], format=kind, shard_bytes=shard_bytes, eod_id=0
        )

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


@cache
def lengths_of_sources() -> NDArray[np.int64]:
    """Tokens of Python files of this installation, with the one that ends each."""
    lengths: NDArray[np.int64] = np.load(made(FOLDER / "lengths.npy", _write_lengths))
    return lengths


def _write_lengths(path: Path) -> None:
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(tokenizer())
    texts = sources()
    texts = texts[:: max(1, len(texts) // SOURCES)]
    lengths = []
    for first in range(0, len(texts), AT_ONCE):
        encodings = model.encode_batch_fast(texts[first : first + AT_ONCE])
        lengths += [len(encoding) + 1 for encoding in encodings]
    with open(path, "wb") as file:
        np.save(file, np.array(lengths, np.int64))


def sample_lengths(name: str, documents: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths of so many documents of "sources" or of "lognormal", shuffled."""
    rng = np.random.default_rng(seed)
    if name == "lognormal":
        center = np.log(LOGNORMAL_MEAN) - LOGNORMAL_SIGMA**2 / 2
        drawn = rng.lognormal(center, LOGNORMAL_SIGMA, documents)
        return np.maximum(2, drawn.astype(np.int64))
    # each file as often as the others, to within one
    lengths = lengths_of_sources()
    times = -(-documents // len(lengths))
    return rng.permutation(np.tile(lengths, times))[:documents]


def write_random(prefix: str, lengths: NDArray[np.int64], vocab_size: int = 1000) -> None:
    """A pair of random documents of these lengths, each ended by EOD."""
    from streammega.dataset import IndexedDatasetWriter

    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for part in np.array_split(lengths, max(1, len(lengths) // 4096)):
            tokens = rng.integers(1, vocab_size, int(part.sum()), dtype=np.uint16)
            tokens[np.cumsum(part) - 1] = EOD
            ones = np.ones(len(part), np.int64)
            writer.add_documents(tokens.view(np.uint8).data, part.astype(np.int32), ones)
