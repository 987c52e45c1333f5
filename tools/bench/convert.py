#!/usr/bin/env python3
"""Conversion, side by side with what it is measured against, in one run: a Megatron-style
preprocess, datatrove, `cat`; and training from what it makes.

Sides take turns, several runs each; ratios are those of medians. What a figure needs is made when
it is first needed, and kept: see `corpus.py`. Each figure can be run alone
(`--figures zst`), and the table is printed line by line; what goes on meanwhile goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import corpus, costs, harness
from tools.bench.corpus import FOLDER, VOCAB_SIZE, log
from tools.bench.object_server import running

BLOCK_BYTES = 1 << 18
"""Stored tokens of a block of the stream order."""
WARM_UP_SAMPLES = 1 << 16
"""Samples of the loader alone before its clock starts: as many as the open pieces of all lanes and the
plan ahead hold. They are decompressed before they are handed out.
"""


TOKENIZER = str(FOLDER / "tokenizer.json")


class Scale(argparse.Namespace):
    """How much is measured: runs of each side, MiB of text, MiB of tokens."""

    runs: int
    corpus: int
    pair: int

    @property
    def text(self) -> str:
        """The corpus."""
        return corpus.corpus(self.corpus)

    @property
    def tokens(self) -> str:
        """The pair of tokens."""
        return corpus.pair(self.pair, self.corpus)

    def shards(self, kind: str = "bin") -> str:
        """The same tokens in shards."""
        return corpus.shards(self.pair, self.corpus, kind)


def main() -> int:
    parser = harness.parser(__doc__, FIGURES)
    parser.add_argument("--corpus", type=int, default=100, metavar="MIB", help="of text")
    parser.add_argument("--pair", type=int, default=1024, metavar="MIB", help="of tokens")
    scale = parser.parse_args(namespace=Scale())
    harness.print_head(
        ("tokenizers", "datatrove", "zstandard", "numpy", "torch", "xxhash"), scale.runs
    )
    harness.table("figure", "other side", "streammega", "ratio")
    return harness.print_figures(FIGURES, scale)


def run_side(side: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """A side in a process of its own, after the disk has come to rest."""
    os.sync()
    result = harness.in_process(side, **arguments)
    log(f"{side.__name__} {arguments}: {result['rate']:,.0f} a second")
    return result


def rate_of(side: Callable[..., dict[str, Any]], **arguments: Any) -> Callable[[], float]:
    """Runs a side, for its rate."""
    return lambda: float(run_side(side, **arguments)["rate"])


# --- sides, each in a process of its own ---------------------------------------------------------------------------------


def side_ours(corpus: str) -> dict[str, Any]:
    from streammega.convert import convert

    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        return timed(lambda: convert([corpus], f"{folder}/out", tokenizer=TOKENIZER).tokens)


def side_inputs(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second, and CPU seconds of all processes for 10^9 tokens."""
    from streammega import StorageConfig
    from streammega.convert import convert

    storage = StorageConfig(storage_options=options)
    before = sum(os.times()[:4])
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        settings: dict[str, Any] = {"tokenizer": TOKENIZER, "input_storage": storage}
        result = timed(lambda: convert([name], f"{folder}/out", **settings).tokens)
    tokens = result["rate"] * result["seconds"]
    return {**result, "cpu": (sum(os.times()[:4]) - before) / tokens * 1e9}


def timed(work: Callable[[], float]) -> dict[str, Any]:
    """Tokens or bytes a second of what makes or reads so many."""
    began = time.perf_counter()
    count = work()
    seconds = time.perf_counter() - began
    return {"rate": count / seconds, "seconds": seconds}


def side_bare(corpus: str) -> dict[str, Any]:
    """The library's batch encoding on all cores, of texts that are in memory; the ids are not even
    looked at.
    """
    from tokenizers import Tokenizer

    with open(corpus, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    model = Tokenizer.from_file(TOKENIZER)

    def encode() -> int:
        tokens = 0
        for first in range(0, len(texts), 1000):
            some = texts[first : first + 1000]
            encodings = model.encode_batch_fast(some, add_special_tokens=False)
            tokens += sum(len(encoding) + 1 for encoding in encodings)
        return tokens

    return timed(encode)


_model: Any = None


def megatron_start(path: str) -> None:
    global _model
    from tokenizers import Tokenizer

    _model = Tokenizer.from_file(path)


def megatron_encode(line: str) -> list[int]:
    return [*_model.encode(json.loads(line)["text"]).ids, 0]


def side_megatron(corpus: str) -> dict[str, Any]:
    """One document at a time in each process, lines by imap, Megatron's own builder."""
    import multiprocessing
    import warnings

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def preprocess() -> int:
        tokens = 0
        builder = IndexedDatasetBuilder(f"{folder}/out.bin", dtype=np.uint16)
        with (
            multiprocessing.Pool(os.cpu_count(), megatron_start, (TOKENIZER,)) as pool,
            open(corpus) as file,
        ):
            for ids in pool.imap(megatron_encode, file, 32):
                builder.add_document(ids, [len(ids)])
                tokens += len(ids)
        builder.finalize(f"{folder}/out.idx")
        return tokens

    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        return timed(preprocess)


def side_datatrove(corpus: str) -> dict[str, Any]:
    """Its reader and DocumentTokenizer, a task for each core; files halved beforehand, as it works
    by files.
    """
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        os.mkdir(f"{folder}/in")
        lines = Path(corpus).read_bytes().splitlines(keepends=True)
        for core in range(cores):
            Path(f"{folder}/in/{core}.jsonl").write_bytes(b"".join(lines[core::cores]))
        del lines
        pipeline = LocalPipelineExecutor(
            pipeline=[
                JsonlReader(f"{folder}/in"),
                DocumentTokenizer(f"{folder}/out", tokenizer_name_or_path=TOKENIZER, eos_token="<|endoftext|>",
                                  shuffle_documents=False, save_filename="x"),
            ],
            tasks=cores, workers=cores, logging_dir=f"{folder}/log",
        )  # fmt: skip

        def tokens() -> float:
            pipeline.run()
            return sum(path.stat().st_size for path in Path(f"{folder}/out").rglob("*.ds")) / 2

        return timed(tokens)


def second(run: Callable[[str], int]) -> dict[str, Any]:
    """Bytes a second of the second of two runs: the first finds the page cache's memory, which can
    take longer than the copy.
    """
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            os.sync()
            result = timed(partial(run, folder))
    return result


def side_reshape(dataset: str, shard_bytes: int | None) -> dict[str, Any]:
    from streammega.convert import convert

    return second(
        lambda folder: convert([dataset], f"{folder}/out", shard_bytes=shard_bytes).stored_bytes
    )


def side_cp(prefix: str) -> dict[str, Any]:
    """cp of a pair, and sync to the disk, as a conversion is before it is published."""
    paths = [f"{prefix}.bin", f"{prefix}.idx"]

    def run(folder: str) -> int:
        subprocess.run(["cp", "--reflink=never", *paths, folder], check=True)
        copies = [f"{folder}/{os.path.basename(path)}" for path in paths]
        subprocess.run(["sync", *copies], check=True)
        return os.stat(paths[0]).st_size

    return second(run)


def side_verify(dataset: str, small: str) -> dict[str, Any]:
    from streammega.dataset.verify import verify
    from streammega.kernels.documents import id_range

    id_range(np.zeros(1, np.uint16))
    verify(small)  # what is compiled is compiled

    def checked() -> int:
        report = verify(dataset, eod_id=0)
        assert not report.problems, report.problems
        return report.checked_bytes

    return timed(checked)


def side_cat(dataset: str) -> dict[str, Any]:
    paths = sorted(Path(dataset).parent.glob("*.bin"))

    def cat() -> int:
        subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
        return sum(path.stat().st_size for path in paths)

    return timed(cat)


def side_shuffle(corpus: str) -> dict[str, Any]:
    from streammega.convert import convert

    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        settings: dict[str, Any] = {"shuffle_seed": 1, "shuffle_memory_bytes": 256 << 20}
        return timed(lambda: convert([corpus], f"{folder}/out", **settings).stored_bytes)


def side_train(
    blend: str,
    seconds: float,
    options: dict[str, Any] | None = None,
    model: bool = False,
    ids_only: bool = False,
    warm_up: int = 0,
) -> dict[str, Any]:
    """Tokens a second of the stream order, ids of int64 or as they are stored, after a second and
    `warm_up` samples; with `model`, the example GPT learns them. And the CPU seconds of each kind
    of thread.
    """
    from streammega import DataConfig, StorageConfig, StreamLoader

    config = DataConfig(
        blend=[blend],
        sequence_length=128 if model else 4096,
        storage=StorageConfig(storage_options=options or {}, cache_dir=FOLDER / "cache"),
    )
    learn = gpt_step() if model else lambda batch: None
    sample_tokens = config.sequence_length
    with StreamLoader(
        config, micro_batch_size=8, global_batch_size=64, ids_only=ids_only
    ) as loader:
        tokens = 0
        began = time.perf_counter()
        start = None
        threads_before: costs.Threads = {}
        for batch in loader:
            now = time.perf_counter()
            is_warm = now - began > 1.0 and tokens >= warm_up * sample_tokens
            if start is None and is_warm:
                start = now
                threads_before = costs.of_threads()
                tokens = 0
            tokens += 8 * sample_tokens
            learn(batch)
            if start is not None and now - start > seconds:
                kinds = costs.by_kind(threads_before, costs.of_threads())
                of_kind = {kind: spent.cpu / tokens * 1e9 for kind, spent in kinds.items()}
                cpu = sum(of_kind.values())
                return {"rate": tokens / (now - start), "cpu": cpu, "kinds": of_kind}
    raise AssertionError("the stream has no end")


def frames_of(dataset: str) -> tuple[Any, Path]:
    """The frames of a zstd shard, and its file."""
    from streammega import StorageConfig
    from streammega.storage import open_store
    from streammega.storage.seekable_zstd import read_frames

    path = min(Path(dataset).parent.glob("*.bin.zst"))
    store, key = open_store(str(path), StorageConfig())
    return read_frames(store, store.info(key)), path


def on_all_cores(decompress: Callable[[int], int]) -> dict[str, Any]:
    """Tokens a second of a thread on each core, and CPU seconds of 10^9. decompress: of the number
    of a thread the bytes that it has done.
    """

    def measured(number: int) -> tuple[int, float]:
        cpu_before = time.thread_time()
        done = decompress(number)
        return done, time.thread_time() - cpu_before

    cores = len(os.sched_getaffinity(0))
    began = time.perf_counter()
    with ThreadPoolExecutor(cores) as pool:
        counts = list(pool.map(measured, range(cores)))
    tokens = sum(done for done, _ in counts) / 2
    cpu = sum(spent for _, spent in counts)
    return {"rate": tokens / (time.perf_counter() - began), "cpu": cpu / tokens * 1e9}


def side_frames(dataset: str, seconds: float) -> dict[str, Any]:
    """Tokens a second that the zstandard library alone decompresses on all cores: the frames of a
    shard, as many in a call as a block of the stream order has, into one buffer of each thread.
    """
    import zstandard

    frames, path = frames_of(dataset)
    stored = memoryview(path.read_bytes())
    stop = time.perf_counter() + seconds

    def decompress(number: int) -> int:
        decompressor = zstandard.ZstdDecompressor()
        buffer = bytearray(BLOCK_BYTES)
        done = 0
        while time.perf_counter() < stop:
            start = done % (frames.size - BLOCK_BYTES) // BLOCK_BYTES * BLOCK_BYTES
            low, high = frames.stored_range(start, start + BLOCK_BYTES)
            reader = decompressor.stream_reader(stored[low:high], read_across_frames=True)
            done += reader.readinto(buffer)
        return done

    return on_all_cores(decompress)


HELD_BLOCKS = 1024
"""Blocks of 256 KiB: one for each lane of the stream order."""
PHASE_BYTES = 4096
"""At which byte of a frame a block begins: half the tokens of a sample, as on average an epoch's
do.
"""


def side_blocks(dataset: str, seconds: float, mode: str) -> dict[str, Any]:
    """The least that this design takes: as `side_frames`, by the loader's own kernel and into as
    much memory as its lanes hold, with the token behind each block, and blocks that begin within a
    frame, as those of an epoch do. Then made into what a batch is handed out as, "ids" or "int64",
    by bare kernels: without an order, batches and queues.
    """
    frames, path = frames_of(dataset)
    stored = np.memmap(path, np.uint8, "r")
    shuffle_block_bytes = BLOCK_BYTES + 2  # with the label of its last token
    cores = len(os.sched_getaffinity(0))
    # Kernels are compiled, or loaded, before the clock starts.
    costs.HandingOut(mode, BLOCK_BYTES).make([bytes(BLOCK_BYTES)])
    first = stored[slice(*frames.stored_range(0, 2))]
    frames.decode([np.asarray(first)], [(0, 2)], [np.empty(2, np.uint8)])
    stop = time.perf_counter() + seconds

    def decompress(number: int) -> int:
        """Bytes until the time is over, without those behind the blocks."""
        held = [np.empty(shuffle_block_bytes, np.uint8) for _ in range(HELD_BLOCKS // cores)]
        for block in held:
            block.fill(1)  # its pages are there: the loader's are, but for the first
        blocks = frames.size // BLOCK_BYTES - 1
        order = np.random.default_rng(number).integers(0, blocks, 1 << 20).tolist()
        making = costs.HandingOut(mode, BLOCK_BYTES)
        done = 0
        while time.perf_counter() < stop:
            spans = []
            outs = []
            for turn in range(done, done + costs.JOB):
                start = order[turn % len(order)] * BLOCK_BYTES + PHASE_BYTES
                spans.append((start, start + shuffle_block_bytes))
                outs.append(held[turn % len(held)])
            making.make(outs)  # what was held longest
            bodies = [np.asarray(stored[slice(*frames.stored_range(*span))]) for span in spans]
            frames.decode(bodies, spans, outs)
            done += costs.JOB
        return done * BLOCK_BYTES

    return on_all_cores(decompress)


def gpt_step() -> Callable[[dict[str, Any]], None]:
    """An optimizer step of the example GPT, made very small."""
    import torch

    from streammega.train.config import ModelConfig
    from streammega.train.model import GPT

    model = GPT(ModelConfig(vocab_size=VOCAB_SIZE, dim=32, layers=1, heads=2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(batch: dict[str, Any]) -> None:
        """Forward, backward, update."""
        logits = model(batch["tokens"], batch["position_ids"])
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten()
        ).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- figures -----------------------------------------------------------------------------------------------------------


def tokenize(scale: Scale, theirs: Callable[..., dict[str, Any]], title: str) -> None:
    """Our tokenizing, compared with another one of the same lines."""
    corpus.tokenizer()
    sides = {side.__name__: rate_of(side, corpus=scale.text) for side in (side_ours, theirs)}
    medians = harness.medians(scale.runs, sides)
    row(f"jsonl to tokens, {title}", medians[theirs.__name__], medians["side_ours"], 1, "tokens/s")


FORMS = ("jsonl", "jsonl.zst", "parquet", "csv")
"""The forms of the corpus that are converted."""


def inputs(scale: Scale) -> None:
    """Tokenizing of every form of the corpus, from the disk and from S3 on loopback."""
    corpus.tokenizer()
    objects = FOLDER / "objects"
    folder = objects / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    with running(objects) as server:
        for form in FORMS:
            path = corpus.corpus_as(form, scale.corpus)
            in_bucket = folder / os.path.basename(path)
            if not in_bucket.exists():
                os.link(path, in_bucket)
            url = f"s3://inputs/{in_bucket.name}"
            places = {"the disk": (path, {}), "S3": (url, server.storage_options)}
            sides = {
                place: partial(run_side, side_inputs, name=name, options=options)
                for place, (name, options) in places.items()
            }
            for place, results in harness.in_turns(scale.runs, sides).items():
                rate, cpu = (
                    statistics.median(result[key] for result in results) for key in ("rate", "cpu")
                )
                title = f"{form} to tokens, from {place}"
                harness.row(title, f"{cpu:,.0f} CPU s/10^9", f"{rate:,.0f} tokens/s", "")


def verification(scale: Scale) -> None:
    dataset = scale.shards()
    small = corpus.once(scale.corpus)
    sides = {
        "verify": rate_of(side_verify, dataset=dataset, small=small),
        "cat": rate_of(side_cat, dataset=dataset),
    }
    medians = harness.medians(scale.runs, sides)
    row("verify, cat > /dev/null", medians["cat"], medians["verify"], 1e6, "MB/s")


def memory(scale: Scale) -> None:
    corpus.tokenizer()
    sizes = (scale.corpus, 4 * scale.corpus)
    small, large = (run_side(side_ours, corpus=corpus.corpus(mib))["peak"] for mib in sizes)
    title = f"peak memory of a process, a corpus of {sizes[0]} and {sizes[1]} MiB"
    row(title, small, large, 1e6, "MB")
    sharded = run_side(side_reshape, dataset=scale.tokens, shard_bytes=256 << 20)["peak"]
    shuffled = run_side(side_shuffle, corpus=scale.tokens)["peak"]
    title = f"peak memory, {scale.pair} MiB of tokens sharded; shuffled in 256 MiB"
    row(title, sharded, shuffled, 1e6, "MB")


def shuffle(scale: Scale) -> None:
    medians = harness.medians(scale.runs, {"shuffle": rate_of(side_shuffle, corpus=scale.tokens)})
    title = f"shuffle {scale.pair} MiB of tokens in 256 MiB of memory"
    harness.row(title, "", f"{medians['shuffle'] / 1e6:,.0f} MB/s", "")


LEVELS = (1, 3, 6, 9, 19)
"""Levels of zstd that are measured."""


def zstd(scale: Scale) -> None:
    """Ratio, writing and reading speed of levels."""
    once = corpus.once(scale.corpus)
    for level in LEVELS:
        log(f"zstd level {level}")
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            write_and_read(once, folder, level, scale.runs)


def write_and_read(once: str, folder: str, level: int, runs: int) -> None:
    from streammega.convert import convert
    from streammega.dataset.indexed import IndexedDataset

    began = time.perf_counter()
    report = convert([once], f"{folder}/z", workers=1, format="zst", zstd_level=level)
    written = report.tokens * 2 / (time.perf_counter() - began)
    indexed = IndexedDataset(f"{folder}/z")
    size = indexed.bin_info.size
    rates = []
    for _ in range(runs):
        began = time.perf_counter()
        for start in range(0, size, 8 << 20):
            stop = min(start + (8 << 20), size)
            indexed.store.read(indexed.bin_key, [(start, stop)])
        rates.append(size / (time.perf_counter() - began))
    harness.row(
        f"zstd level {level}",
        f"written at {written / 1e6:,.0f} MB/s",
        f"read at {statistics.median(rates) / 1e6:,.0f} MB/s on one core",
        f"{report.compression:.2f}x smaller",
    )


def zst(scale: Scale) -> None:
    """CPU seconds of the loader alone on local zstd shards, of the zstandard library alone, and of
    the least that the design takes, as int64 and as ids.
    """
    dataset = scale.shards("zst")
    train = partial(run_side, side_train, blend=dataset, seconds=4, warm_up=WARM_UP_SAMPLES)
    library = partial(run_side, side_frames, dataset=dataset, seconds=4)
    sides: dict[str, Callable[[], dict[str, Any]]] = {"library": library}
    for mode in ("ids", "int64"):
        sides[mode] = partial(train, ids_only=mode == "ids")
        sides[f"{mode}, least"] = partial(
            run_side, side_blocks, dataset=dataset, seconds=4, mode=mode
        )
    by_side = harness.in_turns(scale.runs, sides)
    cpu = {
        side: statistics.median(result["cpu"] for result in results)
        for side, results in by_side.items()
    }
    for mode in ("ids", "int64"):
        title = f"local .zst, {mode}, CPU seconds per 10^9 tokens"
        row(f"{title}, the zstandard library alone", cpu["library"], cpu[mode], 1, "s")
        minimum = f"{title}, decompressing, and {mode} by bare kernels"
        row(minimum, cpu[f"{mode}, least"], cpu[mode], 1, "s")
        for thread in costs.KINDS.values():
            spent = [result["kinds"].get(thread, 0.0) for result in by_side[mode]]
            harness.row(f"of that, {thread}", "", f"{statistics.median(spent):.2f} s", "")


def train_beside_plain(
    scale: Scale, title: str, kind: str, blends: Mapping[str, str], name: str, **options: Any
) -> None:
    """The loader on shards of a kind, compared with plain ones. name: of the unit."""
    sides = {side: rate_of(side_train, blend=blends[side], **options) for side in ("bin", kind)}
    medians = harness.medians(scale.runs, sides)
    unit = 1e6 if name == "M tokens/s" else 1.0
    row(f"{title}, plain .bin", medians["bin"], medians[kind], unit, name)


def tar(scale: Scale) -> None:
    blends = {kind: scale.shards(kind) for kind in ("bin", "tar")}
    title = "local .tar, the loader alone"
    options = {"seconds": 4, "warm_up": WARM_UP_SAMPLES}
    train_beside_plain(scale, title, "tar", blends, "M tokens/s", **options)


def learning(scale: Scale) -> None:
    blends = {kind: scale.shards(kind) for kind in ("bin", "zst")}
    title = "training a small GPT from local .zst"
    train_beside_plain(scale, title, "zst", blends, "tokens/s", seconds=6, model=True)


def remote(scale: Scale, link: float, title: str) -> None:
    """Both kinds from the object server, over a link of so many bytes a second (0: as it is)."""
    objects = FOLDER / "objects"
    blends = {}
    for kind in ("bin", "zst"):
        bucket = objects / "data" / f"{kind}-{scale.pair}"
        bucket.parent.mkdir(parents=True, exist_ok=True)
        local = Path(scale.shards(kind)).parent
        if not bucket.exists():
            shutil.copytree(local, bucket, copy_function=os.link)
        blends[kind] = f"s3://data/{kind}-{scale.pair}/{kind}"
    with running(objects, link=link) as server:
        options = {"options": server.storage_options, "seconds": 6}
        title = f"training from zstd {title}"
        train_beside_plain(scale, title, "zst", blends, "M tokens/s", **options)


def row(title: str, theirs: float, ours: float, unit: float, name: str) -> None:
    """Both sides in a unit, and their ratio."""
    # Three digits of what is small.
    digits = max(0, 2 - int(np.log10(max(1.0, ours / unit))))
    cells = [f"{value / unit:,.{digits}f} {name}" for value in (theirs, ours)]
    harness.row(title, *cells, f"{ours / theirs:.2f}")


FIGURES = harness.Figures(
    megatron=partial(tokenize, theirs=side_megatron, title="Megatron-style preprocess"),
    datatrove=partial(tokenize, theirs=side_datatrove, title="datatrove"),
    inputs=inputs,
    verify=verification,
    memory=memory,
    shuffle=shuffle,
    zstd=zstd,
    zst=zst,
    tar=tar,
    learning=learning,
    link=partial(remote, link=100e6, title="on a link of 100 MB/s"),
    loopback=partial(remote, link=0.0, title="from object storage on loopback"),
)


if __name__ == "__main__":
    sys.exit(main())
