#!/usr/bin/env python3
"""Conversion, side by side with what it is measured against, in one run: the tokenizer library
alone, a Megatron-style preprocess, datatrove, `cp`, `cat`; and training from what it makes.

Sides take turns, several runs each; ratios are those of medians. The corpus is Python's own
sources, again and again, each document marked with its number; the tokenizer is trained on them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import harness
from tools.bench.object_server import running

FOLDER = Path("/tmp/streammega-bench/convert")
VOCAB_SIZE = 32_000
CORPUS_BYTES = 100 << 20
PAIR_BYTES = 1 << 30
DOCUMENT_BYTES = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", nargs="*", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--before",
        type=Path,
        help="another checkout of streammega: its conversion beside this one's, and no more",
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", default="{}", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        result = SIDES[chosen.side](**json.loads(chosen.arguments))
        result["peak"] = peak_bytes()
        print(json.dumps(result))
        return 0
    if chosen.before:
        prepare_corpus()
        compare(chosen.before.resolve(), chosen.runs)
        return 0
    if chosen.figures == ["document"]:
        prepare_corpus()
    else:
        prepare()
    names = ("tokenizers", "datatrove", "zstandard", "numpy", "torch", "xxhash")
    packages = [name for name in names if harness.installed(name)]
    print(f"{harness.machine()}; {harness.versions(packages)}; {chosen.runs} runs, medians\n")
    harness.table("figure", "other side", "streammega", "ratio")
    for name in chosen.figures:
        FIGURES[name](chosen.runs)
    return 0


def peak_bytes() -> int:
    """Of this process (whose threads do the work, on few cores)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


# --- what is measured -------------------------------------------------------------------------------------------------


def prepare() -> None:
    """The corpus, its tokenizer, and a pair of tokens."""
    texts = prepare_corpus()
    write_corpus(FOLDER / "corpus4.jsonl", texts, 4 * CORPUS_BYTES)
    if not (FOLDER / "pair.idx").exists():
        from streammega.convert import convert
        from streammega.dataset import IndexedDatasetWriter
        from streammega.dataset.indexed import IndexedDataset

        convert(
            [str(FOLDER / "corpus4.jsonl")],
            str(FOLDER / "once"),
            tokenizer=str(FOLDER / "tokenizer.json"),
            overwrite=True,
        )
        once = IndexedDataset(str(FOLDER / "once"))
        with IndexedDatasetWriter(str(FOLDER / "pair"), np.uint16) as writer:
            for _ in range(PAIR_BYTES // once.bin_info.size + 1):
                writer.add_index(str(FOLDER / "once"))


def prepare_corpus() -> list[str]:
    """The corpus and its tokenizer; returns the texts they are made of."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = list(sources())
    if not (FOLDER / "tokenizer.json").exists():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False
        )
        model.train_from_iterator(texts[::2], trainer)
        model.save(str(FOLDER / "tokenizer.json"))
    write_corpus(FOLDER / "corpus.jsonl", texts, CORPUS_BYTES)
    return texts


def compare(before: Path, runs: int) -> None:
    """Speed and peak memory of two checkouts on the same corpus, in turns."""
    here = Path(__file__).resolve().parents[2]
    corpus = str(FOLDER / "corpus.jsonl")
    sides = {
        "after": partial(run_side, "ours", here, corpus=corpus),
        "before": partial(run_side, "ours", before, corpus=corpus),
    }
    measured = harness.in_turns(runs, sides)
    harness.table("figure", "before", "after", "after / before")
    for figure, title in (("rate", "text to tokens, tokens/s"), ("peak", "its peak memory, bytes")):
        old, new = (
            statistics.median(float(result[figure]) for result in measured[name])
            for name in ("before", "after")
        )
        harness.row(title, f"{old:,.0f}", f"{new:,.0f}", f"{new / old:.2f}")


def sources() -> Iterator[str]:
    """Python files of this installation."""
    paths = sysconfig.get_paths()
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"])):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if 200 < len(text) < 100_000:
                yield text


def write_corpus(path: Path, texts: list[str], size: int) -> None:
    if path.exists():
        return
    with open(path, "w", encoding="utf-8") as file:
        number = 0
        while file.tell() < size:
            text = texts[number * 7919 % len(texts)]
            file.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")
            number += 1


def run_side(name: str, checkout: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """A side in a process of its own, after the disk has come to rest; by the program of another
    checkout, if one is given.
    """
    os.sync()
    program = __file__ if checkout is None else str(checkout / "tools" / "bench" / "convert.py")
    command = [sys.executable, program, "--side", name, "--arguments", json.dumps(arguments)]
    # each side finds its own checkout
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def rate_of(name: str, **arguments: Any) -> Callable[[], float]:
    """Runs a side, for its rate."""
    return lambda: float(run_side(name, **arguments)["rate"])


# --- sides, each in a process of its own ---------------------------------------------------------------------------------


def side_ours(corpus: str) -> dict[str, Any]:
    from streammega.convert import convert

    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        began = time.perf_counter()
        report = convert([corpus], f"{folder}/out", tokenizer=str(FOLDER / "tokenizer.json"))
        return {"rate": report.tokens / (time.perf_counter() - began)}


def side_bare(corpus: str) -> dict[str, Any]:
    """The library's batch encoding on all cores, of texts that are in memory; the ids are not even
    looked at.
    """
    from tokenizers import Tokenizer

    with open(corpus, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    model = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokens = 0
    began = time.perf_counter()
    for at in range(0, len(texts), 1000):
        tokens += sum(
            len(encoding) + 1
            for encoding in model.encode_batch_fast(texts[at : at + 1000], add_special_tokens=False)
        )
    return {"rate": tokens / (time.perf_counter() - began)}


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

    tokens = 0
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        began = time.perf_counter()
        builder = IndexedDatasetBuilder(f"{folder}/out.bin", dtype=np.uint16)
        with (
            multiprocessing.Pool(
                os.cpu_count(), megatron_start, (str(FOLDER / "tokenizer.json"),)
            ) as pool,
            open(corpus) as file,
        ):
            for ids in pool.imap(megatron_encode, file, 32):
                builder.add_document(ids, [len(ids)])
                tokens += len(ids)
        builder.finalize(f"{folder}/out.idx")
        return {"rate": tokens / (time.perf_counter() - began)}


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
        began = time.perf_counter()
        LocalPipelineExecutor(
            pipeline=[
                JsonlReader(f"{folder}/in"),
                DocumentTokenizer(f"{folder}/out", tokenizer_name_or_path=str(FOLDER / "tokenizer.json"), eos_token="<|endoftext|>",
                                  shuffle_documents=False, save_filename="x"),
            ],
            tasks=cores, workers=cores, logging_dir=f"{folder}/log",
        ).run()  # fmt: skip
        taken = time.perf_counter() - began
        size = sum(path.stat().st_size for path in Path(f"{folder}/out").rglob("*.ds"))
        return {"rate": size / 2 / taken}


def second(run: Callable[[str], int]) -> dict[str, Any]:
    """Bytes a second of the second of two runs: the first finds the page cache's memory, which can
    take longer than the copy.
    """
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            os.sync()
            began = time.perf_counter()
            size = run(folder)
            taken = time.perf_counter() - began
    return {"rate": size / taken}


def side_reshape(shard_bytes: int | None) -> dict[str, Any]:
    from streammega.convert import convert

    inputs = [str(FOLDER / "pair")] if shard_bytes else [str(FOLDER / "halves.manifest.json")]
    return second(
        lambda folder: convert(inputs, f"{folder}/out", shard_bytes=shard_bytes).stored_bytes
    )


def side_cp(sync: bool) -> dict[str, Any]:
    """cp of the pair; with `sync`, to the disk, as a conversion is before it is published."""

    def run(folder: str) -> int:
        subprocess.run(
            ["cp", "--reflink=never", str(FOLDER / "pair.bin"), str(FOLDER / "pair.idx"), folder],
            check=True,
        )
        if sync:
            subprocess.run(["sync", f"{folder}/pair.bin", f"{folder}/pair.idx"], check=True)
        return (FOLDER / "pair.bin").stat().st_size

    return second(run)


def side_verify() -> dict[str, Any]:
    from streammega.dataset.verify import verify
    from streammega.kernels import check

    check.id_range(np.zeros(1, np.uint16))
    verify(str(FOLDER / "small"))  # what is compiled is compiled
    began = time.perf_counter()
    report = verify(str(FOLDER / "halves.manifest.json"), eod_id=0)
    assert not report.problems, report.problems
    return {"rate": report.checked_bytes / (time.perf_counter() - began)}


def side_cat() -> dict[str, Any]:
    paths = sorted(map(str, FOLDER.glob("halves-*.bin")))
    began = time.perf_counter()
    subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
    size = sum(os.stat(path).st_size for path in paths)
    to_null = time.perf_counter() - began
    began = time.perf_counter()
    subprocess.run(f"cat {' '.join(paths)} | cat > /dev/null", shell=True, check=True)
    return {"rate": size / to_null, "piped": size / (time.perf_counter() - began)}


def side_shuffle(corpus: str) -> dict[str, Any]:
    from streammega.convert import convert

    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        began = time.perf_counter()
        report = convert([corpus], f"{folder}/out", shuffle_seed=1, memory_bytes=256 << 20)
        return {"rate": report.stored_bytes / (time.perf_counter() - began)}


def side_train(
    blend: str, options: dict[str, Any], seconds: float, model: bool = False
) -> dict[str, Any]:
    """Tokens a second of the stream order, ids of int64, after a second to warm up; with `model`,
    the example GPT learns them.
    """
    from streammega import DataConfig, StorageConfig, StreamLoader

    config = DataConfig(
        blend=[blend], sequence_length=128 if model else 4096, order="stream", storage=StorageConfig(storage_options=options),
        index_cache_dir=FOLDER / "cache",
    )  # fmt: skip
    learn = gpt_step() if model else lambda batch: None
    with StreamLoader(config, micro_batch_size=8, global_batch_size=64) as loader:
        tokens = 0
        began = time.perf_counter()
        start = None
        for batch in loader:
            now = time.perf_counter()
            if start is None and now - began > 1.0:
                start = now
                tokens = 0
            tokens += batch["tokens"].numel()
            learn(batch)
            if start is not None and now - start > seconds:
                return {"rate": tokens / (now - start)}
    raise AssertionError("the stream has no end")


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


SIDES: dict[str, Callable[..., dict[str, Any]]] = {
    "ours": side_ours, "bare": side_bare, "megatron": side_megatron, "datatrove": side_datatrove, "reshape": side_reshape,
    "cp": side_cp, "verify": side_verify, "cat": side_cat, "shuffle": side_shuffle, "train": side_train,
}  # fmt: skip


# --- figures -----------------------------------------------------------------------------------------------------------


def tokenize(runs: int) -> None:
    corpus = str(FOLDER / "corpus.jsonl")
    sides = {name: rate_of(name, corpus=corpus) for name in ("ours", "bare", "megatron")}
    if harness.installed("datatrove"):
        sides["datatrove"] = rate_of("datatrove", corpus=corpus)
    found = harness.medians(runs, sides)
    for name, title in (
        ("bare", "bare batch encoding"),
        ("megatron", "Megatron-style preprocess"),
        ("datatrove", "datatrove"),
    ):
        if name in found:
            ratio = found["ours"] / found[name]
            harness.row(
                f"jsonl to tokens, {title}",
                f"{found[name]:,.0f} tokens/s",
                f"{found['ours']:,.0f} tokens/s",
                f"{ratio:.2f}",
            )


def reshape(runs: int) -> None:
    halves()
    sides = {
        "shard": rate_of("reshape", shard_bytes=256 << 20),
        "merge": rate_of("reshape", shard_bytes=None),
        "cp": rate_of("cp", sync=False),
        "cp, synced": rate_of("cp", sync=True),
    }
    found = harness.medians(runs, sides)
    for ours in ("shard", "merge"):
        for theirs in ("cp", "cp, synced"):
            ratio = found[ours] / found[theirs]
            harness.row(
                f"{ours} 1 GiB, {theirs}",
                f"{found[theirs] / 1e6:,.0f} MB/s",
                f"{found[ours] / 1e6:,.0f} MB/s",
                f"{ratio:.2f}",
            )


def halves() -> None:
    """The pair in shards of 256 MiB, and a small one."""
    from streammega.convert import convert

    if not (FOLDER / "halves.manifest.json").exists():
        convert(
            [str(FOLDER / "pair")],
            str(FOLDER / "halves"),
            shard_bytes=256 << 20,
            eod_id=0,
            overwrite=True,
        )
        convert([str(FOLDER / "once")], str(FOLDER / "small"), eod_id=0, overwrite=True)


def verification(runs: int) -> None:
    halves()
    cats = harness.medians(runs, {"cat": lambda: side_cat()["rate"]})["cat"]
    piped = harness.medians(runs, {"cat": lambda: side_cat()["piped"]})["cat"]
    ours = harness.medians(runs, {"ours": rate_of("verify")})["ours"]
    for title, theirs in (("cat > /dev/null", cats), ("cat | cat", piped)):
        harness.row(
            f"verify 1 GiB, {title}",
            f"{theirs / 1e6:,.0f} MB/s",
            f"{ours / 1e6:,.0f} MB/s",
            f"{ours / theirs:.2f}",
        )


def memory(runs: int) -> None:
    sizes = [
        run_side("ours", corpus=str(FOLDER / name))["peak"]
        for name in ("corpus.jsonl", "corpus4.jsonl")
    ]
    harness.row("peak memory of a process, a corpus of 100 and 400 MiB", f"{sizes[0] / 1e6:,.0f} MB", f"{sizes[1] / 1e6:,.0f} MB",
        f"{sizes[1] / sizes[0]:.2f}")  # fmt: skip
    sizes = [
        run_side("reshape", shard_bytes=256 << 20)["peak"],
        run_side("shuffle", corpus=str(FOLDER / "pair"))["peak"],
    ]
    harness.row(
        "peak memory, 1 GiB of tokens sharded; shuffled in 256 MiB",
        f"{sizes[0] / 1e6:,.0f} MB",
        f"{sizes[1] / 1e6:,.0f} MB",
        "",
    )
    shuffled = rate_of("shuffle", corpus=str(FOLDER / "pair"))
    rate = harness.medians(runs, {"shuffle": shuffled})["shuffle"]
    harness.row("shuffle 1 GiB of tokens in 256 MiB of memory", "", f"{rate / 1e6:,.0f} MB/s", "")


def document(runs: int) -> None:
    """Memory for one document of 1 GiB, by what it lies in."""
    texts = list(sources())
    for name in ("document.txt", "document.jsonl", "document.json", "document.parquet"):
        path = FOLDER / name
        if not path.exists():
            write_document(path, texts, DOCUMENT_BYTES)
        harness.row(
            f"peak memory, {name} of 1 GiB",
            "",
            f"{run_side('ours', corpus=str(path))['peak'] / 1e6:,.0f} MB",
            "",
        )


def write_document(path: Path, texts: list[str], size: int) -> None:
    """One text, written without being held; for Parquet it has to be."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pieces = until(size, itertools.cycle(texts))
    if path.suffix == ".parquet":
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


def until(size: int, texts: Iterator[str]) -> Iterator[str]:
    """Texts up to so many bytes."""
    while size > 0:
        text = next(texts)
        size -= len(text.encode())
        yield text


def zstd(runs: int) -> None:
    """Ratio, writing and reading speed of levels, and of frames."""
    from streammega.convert import convert
    from streammega.dataset.indexed import IndexedDataset

    for level, frame in (
        (1, 32),
        (3, 32),
        (6, 32),
        (9, 32),
        (19, 32),
        (3, 16),
        (3, 64),
        (3, 256),
        (3, 1024),
    ):
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            began = time.perf_counter()
            report = convert(
                [str(FOLDER / "once")],
                f"{folder}/z",
                kind="zst",
                level=level,
                frame_bytes=frame << 10,
                workers=1,
            )
            written = report.tokens * 2 / (time.perf_counter() - began)
            indexed = IndexedDataset(f"{folder}/z")
            rates = []
            for _ in range(runs):
                began = time.perf_counter()
                for at in range(0, indexed.bin_info.size, 8 << 20):
                    indexed.store.read_ranges(
                        indexed.bin_key, [at], [min(at + (8 << 20), indexed.bin_info.size)]
                    )
                rates.append(indexed.bin_info.size / (time.perf_counter() - began))
            harness.row(f"zstd level {level}, frames of {frame} KiB", f"written at {written / 1e6:,.0f} MB/s",
                f"read at {statistics.median(rates) / 1e6:,.0f} MB/s on one core", f"{report.compression:.2f}x smaller")  # fmt: skip


def training(runs: int) -> None:
    from streammega.convert import convert

    root = FOLDER / "objects" / "data"
    for kind in ("bin", "zst", "tar"):
        if not (root / f"{kind}.manifest.json").exists():
            shutil.rmtree(root, ignore_errors=True) if kind == "bin" else None
            convert(
                [str(FOLDER / "pair")],
                str(root / kind),
                kind=kind,
                shard_bytes=256 << 20,
                overwrite=True,
            )
    kinds = ("bin", "zst", "tar")
    local = {
        kind: rate_of("train", blend=str(root / kind), options={}, seconds=4) for kind in kinds
    }
    found = harness.medians(runs, local)
    for kind in ("zst", "tar"):
        harness.row(f"training from local .{kind}, plain .bin", f"{found['bin'] / 1e6:,.0f} M tokens/s", f"{found[kind] / 1e6:,.0f} M tokens/s",
            f"{found[kind] / found['bin']:.2f}")  # fmt: skip
    steps = {
        kind: rate_of("train", blend=str(root / kind), options={}, seconds=6, model=True)
        for kind in ("bin", "zst")
    }
    found = harness.medians(runs, steps)
    harness.row("training a small GPT from local .zst, plain .bin", f"{found['bin']:,.0f} tokens/s", f"{found['zst']:,.0f} tokens/s",
        f"{found['zst'] / found['bin']:.2f}")  # fmt: skip
    for link, title in ((100e6, "on a link of 100 MB/s"), (0.0, "from object storage on loopback")):
        with running(FOLDER / "objects") as server:
            server.behave(link=link)
            options = server.storage_options
            remote = {
                kind: rate_of("train", blend=f"s3://data/{kind}", options=options, seconds=6)
                for kind in ("bin", "zst")
            }
            found = harness.medians(runs, remote)
        harness.row(f"training from zstd {title}, plain .bin", f"{found['bin'] / 1e6:,.1f} M tokens/s", f"{found['zst'] / 1e6:,.1f} M tokens/s",
            f"{found['zst'] / found['bin']:.2f}")  # fmt: skip


FIGURES: dict[str, Callable[[int], None]] = {
    "tokenize": tokenize, "reshape": reshape, "verify": verification, "memory": memory, "document": document, "zstd": zstd, "training": training,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
