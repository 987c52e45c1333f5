#!/usr/bin/env python3
"""The main job, end to end, on one machine: corpus, tokenizer, S3 server, training, kills, resumes,
proof.

Everything it makes goes under one folder; nothing outside of it is touched, and no network but
loopback is used.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# torch takes seconds, and moto too: both are imported where they are used.
from streammega.cli.plotting import pyplot, sparkline  # noqa: E402
from streammega.cli.progress import ProgressDisplay  # noqa: E402
from streammega.convert import ConvertOptions, convert  # noqa: E402
from streammega.dataset import IndexedDataset  # noqa: E402
from streammega.dataset.verify import verify  # noqa: E402
from streammega.errors import StreammegaError  # noqa: E402
from streammega.errors.logs import set_log_level  # noqa: E402
from streammega.train.run_log import read_metrics  # noqa: E402
from tools.s3_server import S3Server, kill  # noqa: E402

CORPUS_BYTES = 8_000_000
VOCAB_SIZE = 4096
BUCKET = "streammega-demo"
SHARD_BYTES = 1_000_000
EOD = "<|endoftext|>"
NEXT = f"""
Next, with texts of your own:
    {{bin}}/streammega convert TEXTS mine/texts --tokenizer {{work}}/tokenizer.json --eod '{EOD}' --shuffle
    {{bin}}/streammega train {{work}}/run.toml data.blend=mine/texts train.out_dir=mine/run"""
RUN_TOML = """\
[data]
blend = ["s3://{bucket}/corpus"]
sequence_length = 256
split = "98,2,0"
seed = 1234
eod_id = {eod_id}

[model]
vocab_size = {vocab_size}
dim = 128
layers = 2
heads = 4

[train]
train_iters = {iters}
micro_batch_size = 4
global_batch_size = 16
lr = 3e-3
warmup_iters = 10
save_interval = 10
eval_interval = {eval_interval}
eval_iters = 2
log_interval = 10
log_batch_hash = true
device = "cpu"
out_dir = "{out_dir}"
"""


def main() -> int:
    """Run the demo; the exit code says whether the proof held."""
    arguments = parse_arguments()
    work = Path(arguments.work)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    began = time.monotonic()
    # As an exception: what was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with S3Server() as server:
            passed = run_demo(arguments, work, server)
    except StreammegaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the server and the ranks are stopped", file=sys.stderr)
        return 130
    finally:
        # A signal may come before `train` has the process that it starts.
        kill(psutil.Process().children(recursive=True))
    print(
        f"\n{'The demo passed' if passed else 'THE DEMO FAILED'} in {time.monotonic() - began:.0f} s; everything is in {work}/"
    )
    if passed:
        print(NEXT.format(bin=os.path.relpath(Path(sys.executable).parent), work=work))
    return 0 if passed else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        help="folders or .jsonl files to train on (default: Python's own sources)",
    )
    parser.add_argument(
        "--work",
        default="demo-run",
        help="folder for everything the demo makes (default: %(default)s)",
    )
    parser.add_argument(
        "--iters", type=int, default=80, help="training iterations (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.iters < 60:
        parser.error("--iters must be at least 60: the run is killed twice on its way")
    return arguments


def run_demo(arguments: argparse.Namespace, work: Path, server: S3Server) -> bool:
    """The six steps; True when the proof held and the model learned."""
    multiprocessing.get_context("spawn").Process(target=compile_kernels, daemon=True).start()
    say(1, "collecting the corpus")
    inputs = arguments.inputs or python_sources()
    include = () if arguments.inputs else ("*.py",)
    say(2, "training a tokenizer")
    train_tokenizer(inputs, include, work / "tokenizer.json")
    say(
        3,
        f"converting into s3://{BUCKET} at {server.endpoint}: shuffled, in zstd shards, with a manifest",
    )
    os.environ.update(server.environment(), XDG_CACHE_HOME=str((work / "cache").resolve()))
    server.make_bucket(BUCKET)
    options = ConvertOptions(
        tokenizer=str(work / "tokenizer.json"),
        eod=EOD,
        format="zst",
        shard_bytes=SHARD_BYTES,
        shuffle_seed=1,
        include=include,
    )
    with ProgressDisplay("converting") as progress:
        report = convert(inputs, f"s3://{BUCKET}/corpus", options=options, progress=progress)
    size = f"{report.text_bytes / 1e6:.1f} MB of text, {report.tokens:,} tokens in {report.shards} shards"
    print(f"\n    {report.documents:,} documents, {size}")
    checked = verify(f"s3://{BUCKET}/corpus")
    print(f"    {checked.documents:,} documents, {len(checked.problems)} problems")
    if checked.problems:
        return False
    entropy = unigram_entropy()
    text = RUN_TOML.format(
        bucket=BUCKET,
        eod_id=report.eod_id,
        vocab_size=report.vocab_size,
        iters=arguments.iters,
        eval_interval=arguments.iters // 2,
        out_dir=(work / "run").resolve(),
    )
    (work / "run.toml").write_text(text, encoding="utf-8")
    train_with_kills(work, arguments.iters)
    return prove(work, entropy)


def compile_kernels() -> None:
    """Take a batch of a small dataset. The loader's kernels are in numba's cache then, before the ranks
    need them, compiled on a core that has nothing to do yet.
    """
    from streammega import DataConfig, IndexedDatasetWriter, StorageConfig, StreamLoader

    set_log_level("ERROR")  # the conversion says that kernels are compiled
    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetWriter(f"{folder}/small", np.uint16) as writer:
            for _ in range(100):
                writer.add_document(np.arange(20), [20])
        data = DataConfig(
            blend=[f"{folder}/small"],
            sequence_length=16,
            split="98,2,0",
            num_samples=(8, 2, 0),
            eod_id=0,
            vocab_size=VOCAB_SIZE,
            storage=StorageConfig(cache_dir=folder),
        )
        with StreamLoader(data, micro_batch_size=4, global_batch_size=4) as loader:
            next(iter(loader))


def say(step: int, text: str) -> None:
    print(f"\n[{step}/6] {text}", flush=True)


def python_sources() -> list[str]:
    """The first sources of this Python's library, some megabytes."""
    found: list[str] = []
    size = 0
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            if size < CORPUS_BYTES and is_text(path):
                found.append(str(path))
                size += path.stat().st_size
    print(f"    {len(found):,} files of Python {sys.version.split()[0]}, {size / 1e6:.1f} MB")
    return found


def is_text(path: Path) -> bool:
    """Whether a file is UTF-8. A few of Python's own test files are not, on purpose."""
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def train_tokenizer(inputs: list[str], include: tuple[str, ...], path: Path) -> None:
    """A byte-level BPE tokenizer from every third batch of the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from streammega.config import StorageConfig
    from streammega.convert.documents import RawDocument
    from streammega.convert.read.formats import read_slice
    from streammega.convert.read.inputs import find_inputs
    from streammega.convert.read.source import Skipped, Slice
    from streammega.convert.tokenize.encode import BatchEncoder
    from streammega.convert.tokenize.tokenizers import load_tokenizer

    options = ConvertOptions(include=include)
    encoder = BatchEncoder(load_tokenizer("bytes"), options, StorageConfig())

    def texts() -> Iterator[str]:
        for number, item in enumerate(find_inputs(inputs, options=options)):
            if number % 3 == 0:
                for document in read_slice(Slice(input=item), options, StorageConfig(), Skipped()):
                    assert isinstance(document, RawDocument), "the demo converts text"
                    yield from (
                        text for text, _, _ in encoder.parts(document) if isinstance(text, str)
                    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOD],
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))
    print(f"    byte-level BPE with {tokenizer.get_vocab_size():,} ids")


def unigram_entropy() -> float:
    """Entropy of the token frequencies, in nats: the loss of a model that knows only these."""
    counts = np.zeros(VOCAB_SIZE, np.int64)
    for tokens in IndexedDataset(f"s3://{BUCKET}/corpus")[:]:
        counts += np.bincount(np.asarray(tokens), minlength=VOCAB_SIZE)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def train_with_kills(work: Path, iters: int) -> None:
    """Two ranks, SIGKILL; one rank, SIGKILL; two ranks to the end."""
    say(4, "training on two ranks straight from s3://")
    train(work, ranks=2, kill_at=iters * 4 // 10 + 3)
    say(5, "resuming on one rank")
    train(work, ranks=1, kill_at=iters * 6 // 10 + 3)
    print("    ... and on two ranks again, to the end")
    train(work, ranks=2, kill_at=None)


def train(work: Path, ranks: int, kill_at: int | None) -> None:
    """Run training; kill all of its processes with SIGKILL once step `kill_at` is
    in the metrics.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else [])]
    command += ["-m", "streammega.train", str(work / "run.toml")]
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",  # two threads wait for each other, on a busy machine for long
        "PYTHONPATH": root,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    log_path = work / f"train-{ranks}-ranks.log"
    with open(log_path, "ab") as log:
        process = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        try:
            follow(process, work / "run" / "metrics.jsonl", kill_at)
        finally:
            kill_tree(process)
    if kill_at is None and process.returncode != 0:
        tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise StreammegaError(
            f"training ended with code {process.returncode}; the end of {log_path}:\n"
            + "\n".join(tail)
        )


def follow(process: subprocess.Popen[bytes], metrics: Path, kill_at: int | None) -> None:
    """Print progress until the process ends or step `kill_at` is done."""
    before = len(read_metrics(metrics)) if metrics.exists() else 0
    shown = 0
    while process.poll() is None:
        time.sleep(0.1)
        records = read_metrics(metrics)[before:] if metrics.exists() else []
        last = records[-1] if records else {"step": 0}
        if last["step"] != shown and (last["step"] % 10 == 0 or shown == 0):
            shown = last["step"]
            print(
                f"    step {shown:4d}  loss {last['loss']:.3f}  {last['tokens_per_s']:,.0f} tokens/s  ranks {last['ranks']}",
                flush=True,
            )
        if kill_at is not None and last["step"] >= kill_at:
            print(f"    SIGKILL after step {last['step']}", flush=True)
            return
    if kill_at is not None:
        raise StreammegaError(
            f"training ended with code {process.returncode} before step {kill_at}; see the logs beside {metrics.parent}"
        )


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all of its descendants (torchrun's workers lead sessions of their
    own).
    """
    try:
        root = psutil.Process(process.pid)
        kill([*root.children(recursive=True), root])
    except psutil.NoSuchProcess:
        pass
    process.wait()


def prove(work: Path, entropy: float) -> bool:
    """Compare every global batch that training saw with an uninterrupted pass of the loader alone;
    plot the loss.
    """
    from streammega.train.config import load_run
    from tests.support.run_hashes import loader_hashes

    say(6, "proof: an uninterrupted pass over the loader alone")
    config = load_run(str(work / "run.toml"))
    records = read_metrics(work / "run" / "metrics.jsonl")
    expected = loader_hashes(config)
    seen = {record["step"] for record in records}
    equal = sum(expected[record["step"] - 1] == record["batch_hash"] for record in records)
    exact = equal == len(records) and seen == set(range(1, config.train.train_iters + 1))
    repeated = len(records) - len(seen)
    print(
        f"    {equal} of {len(records)} global batches ({len(seen)} steps, {repeated} of them repeated after kills) are equal,"
    )
    print(
        f"    token by token, to those of the uninterrupted pass; last hash {records[-1]['batch_hash']}"
    )
    losses = [record["loss"] for record in {record["step"]: record for record in records}.values()]
    final = float(np.mean(losses[-10:]))
    learned = final <= entropy - 0.3
    plot_loss(work / "loss.png", records, entropy)
    print(
        f"    loss {losses[0]:.2f} {sparkline(losses)} {final:.2f} nat; unigram entropy of the corpus {entropy:.2f} nat"
    )
    valid = [record["valid_loss"] for record in records if "valid_loss" in record]
    print(f"    validation loss {valid[-1]:.2f} nat; loss curve in {work / 'loss.png'}")
    (work / "proof.json").write_text(
        json.dumps(
            {"exact": exact, "final_loss": final, "unigram_entropy": entropy, "hashes": expected},
            indent=1,
        )
    )
    return exact and learned


def plot_loss(path: Path, records: list[dict[str, Any]], entropy: float) -> None:
    """Loss by step, coloured by the number of ranks, with the unigram entropy."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5))
    legs: list[list[dict[str, Any]]] = []
    for record in records:
        if not legs or record["step"] != legs[-1][-1]["step"] + 1:
            legs.append([])
        legs[-1].append(record)
    for number, leg in enumerate(legs, 1):
        label = f"run {number}: {leg[0]['ranks']} rank(s), steps {leg[0]['step']}–{leg[-1]['step']}"
        axes.plot([r["step"] for r in leg], [r["loss"] for r in leg], label=label, alpha=0.8)
    axes.axhline(entropy, color="gray", linestyle="--", label=f"unigram entropy {entropy:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nat per token)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
