"""Writes release_0_2 beside this file: what version 0.2 writes, which every later 0.x must read.

    python -m tests.support.data.make_release

Until 0.2.0 is released, a change of a format runs it again. From then on the folder stays as it is,
and a new format gets a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import numpy as np

from streammega import (
    DataConfig,
    FieldsConfig,
    IndexedDataset,
    PhaseConfig,
    Provenance,
    StorageConfig,
    StreamLoader,
)
from streammega.config.validate import settings_of
from streammega.convert import convert
from streammega.integrations.webdataset import TextStream
from streammega.train.config import ModelConfig, ParallelConfig, TrainConfig
from streammega.train.run_log import read_metrics

FOLDER = Path(__file__).parent / "release_0_2"
DIGEST = FOLDER.with_suffix(".sha256")
DATASETS = ("web", "web-more", "code", "chat", "bins")
SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "data.storage": StorageConfig,
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
}
REQUIRED: dict[str, dict[str, Any]] = {
    "data": {"blend": ["web"], "sequence_length": 16, "order": "stream", "seed": 3},
    "model": {"vocab_size": 257, "dim": 4, "layers": 1, "heads": 2},
    "train": {
        "train_iters": 4,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "out_dir": "run",
        "lr_decay_style": "constant",
        "log_interval": 1,
        "save_interval": 2,
        "log_batch_hash": True,
        "eval_interval": 0,
        "device": "cpu",
    },
}
"""Settings of the run file that have no default, or another value than that."""
BATCHES = 6
"""Batches of each state that are compared."""


def config(blend: Any, **settings: Any) -> DataConfig:
    defaults: dict[str, Any] = {
        "sequence_length": 16,
        "seed": 7,
        "storage": StorageConfig(cache_dir="cache"),
    }
    return DataConfig(blend=blend, **(defaults | settings))


LANES: dict[str, Any] = {"order": "stream", "shuffle_lanes": 4, "shuffle_block_bytes": 64}
CONFIGS: dict[str, Callable[[], DataConfig]] = {
    "megatron": lambda: config(
        [("web", 0.7), ("code", 0.3)], num_samples=(60, 10, 0), split="90,10,0"
    ),
    "sequential": lambda: config(["code"], order="sequential"),
    "stream": lambda: config([("web", 0.7), ("code", 0.3)], **LANES),
    "many datasets": lambda: config([("web", 1 + n) for n in range(40)], **LANES),
    "phases": lambda: config(
        [("web", 0.5), ("code", 0.5)],
        eod_id=256,
        **LANES,
        phases=[
            PhaseConfig(first_sample=8, blend=["web", "web-more"], sequence_length=8),
            PhaseConfig(
                first_sample=32, global_batch_size=8, shuffle_lanes=8, exclude_documents=("code#1",)
            ),
        ],
    ),
    "conversations": lambda: config(["chat"], eod_id=256, **LANES),
    "bins": lambda: config(["bins"], sequence_length=64, **LANES),
}


def open_loader(name: str) -> StreamLoader:
    return StreamLoader(CONFIGS[name](), micro_batch_size=2, global_batch_size=4)


def open_text_stream() -> TextStream:
    return TextStream(
        ["one", "two"],
        lambda text: list(text.encode()),
        FieldsConfig(sequence_length=8, eod_id=256),
        texts=lambda shard: [f"{shard} {number}" * (number % 5) for number in range(40)],
        micro_batch_size=2,
        global_batch_size=4,
        seed=5,
    )


def next_batches(batches: Iterator[Any]) -> str:
    """A digest of all fields of the next batches."""
    digest = hashlib.sha256()
    for _ in range(BATCHES):
        batch = next(batches)
        for field in sorted(batch):
            array = np.asarray(batch[field])
            digest.update(f"{field} {array.shape}".encode() + array.astype("<f8").tobytes())
    return digest.hexdigest()


def describe_dataset(prefix: str) -> dict[str, Any]:
    """Numbers and a digest of a dataset's ids and modes."""
    indexed = IndexedDataset(prefix)
    digest = hashlib.sha256()
    for item in indexed[:]:
        ids, mode = item if isinstance(item, tuple) else (item, 0)
        digest.update(np.asarray(ids).astype("<i8").tobytes() + bytes([int(mode)]))
    return {
        "documents": len(indexed.document_indices) - 1,
        "sequences": len(indexed),
        "dtype": str(indexed.dtype),
        "ids": digest.hexdigest(),
    }


def origins() -> list[str]:
    """Where the documents of the first samples came from."""
    provenance = Provenance(CONFIGS["stream"](), "train", 4)
    found = [
        f"{run.name}: {run.origin}"
        for sample in provenance.trace(np.arange(4))
        for run in sample.runs
    ]
    return sorted(set(found))


def train(*overrides: str) -> list[dict[str, Any]]:
    """Number, loss and hash of the batches of each step that a run does now."""
    metrics = Path("run/metrics.jsonl")
    before = len(read_metrics(metrics)) if metrics.exists() else 0
    command = [sys.executable, "-m", "streammega", "train", "run.toml", *overrides]
    subprocess.run(command, check=True, capture_output=True, text=True)
    records = read_metrics(metrics)[before:]
    return [{name: step[name] for name in ("step", "loss", "batch_hash")} for step in records]


def write_datasets() -> None:
    rng = np.random.default_rng(1)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]

    def records(name: str, count: int) -> str:
        lines = [
            json.dumps({"id": f"{name}-{n}", "text": " ".join(rng.choice(words, 2 + n % 9))})
            for n in range(count)
        ]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return f"{name}.jsonl"

    bytes_of: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}
    convert(records("first", 24), "web", provenance=True, shard_bytes=500, **bytes_of)
    convert(records("second", 8), "web-more", provenance=True, **bytes_of)
    convert(records("third", 20), "code", format="zst", shuffle_seed=1, **bytes_of)
    convert("third.jsonl", "bins", pack_length=64, **bytes_of)
    turns = [
        [{"role": "user", "content": "what"}, {"role": "assistant", "content": f"answer {n}"}]
        for n in range(12)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    convert("chat.jsonl", "chat", chat=True, **bytes_of)
    for path in Path().glob("*.jsonl"):
        path.unlink()


def write_run_file() -> None:
    """Every setting that TOML can hold, by its default where it has one."""
    lines = []
    for section, kind in SECTIONS.items():
        lines.append(f"[{section}]")
        values = dict(REQUIRED.get(section, {}))
        for field in settings_of(kind):
            default = field.default
            if field.name in values or default is MISSING or isinstance(default, float):
                continue
            if isinstance(default, bool | int | str):
                values[field.name] = default
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    Path("run.toml").write_text("\n".join(lines) + "\n")


def folder_digest() -> str:
    """A digest of all files, which shows that none was changed."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(FOLDER).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    with chdir(FOLDER):
        write_datasets()
        write_run_file()
        expected: dict[str, Any] = {"datasets": {n: describe_dataset(n) for n in DATASETS}}
        states: dict[str, Any] = {}
        digests: dict[str, str] = {}
        for name in CONFIGS:
            with open_loader(name) as loader:
                batches = iter(loader)
                for _ in range(8):
                    next(batches)
                states[name] = loader.state_dict()
                digests[name] = next_batches(batches)
        with open_text_stream() as stream:
            batches = iter(stream)
            for _ in range(4):
                next(batches)
            states["texts"] = stream.state_dict()
            digests["texts"] = next_batches(batches)
        Path("states.json").write_text(json.dumps(states, indent=1))
        train("train.train_iters=2")
        shutil.copytree("run", "kept")
        expected |= {"states": digests, "origins": origins(), "steps": train()}
        shutil.rmtree("run")
        os.rename("kept", "run")
        Path("run/.lock").unlink()
        shutil.rmtree("cache", ignore_errors=True)
        Path("expected.json").write_text(json.dumps(expected, indent=1))
    DIGEST.write_text(folder_digest() + "\n")


if __name__ == "__main__":
    main()
