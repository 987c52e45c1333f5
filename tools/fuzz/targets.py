"""All targets of the fuzzer: name -> what makes the target in a folder for its files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.fuzz import answers, corpora, stored
from tools.fuzz.common import Target

TARGETS: dict[str, Callable[[Path], Target]] = {
    "idx": stored.idx_target,
    "zst-shard": partial(stored.shard_target, kind="zst"),
    "tar-shard": partial(stored.shard_target, kind="tar"),
    "zstd": stored.zstd_target,
    "manifest": stored.manifest_target,
    "provenance": stored.provenance_target,
    "array": stored.array_target,
    "state": stored.state_target,
    "record": stored.record_target,
    "tensors": stored.tensors_target,
    "part": stored.part_target,
    "run-file": stored.run_file_target,
    "storage-file": stored.storage_file_target,
    "mds": partial(corpora.folder_target, format="mds"),
    "litdata": partial(corpora.folder_target, format="litdata"),
}
TARGETS |= {f"convert-{name}": partial(corpora.file_target, name=name) for name in corpora.FORMATS}
TARGETS |= {
    "tokenizer-json": partial(
        corpora.tokenizer_target, suffix=".json", seeds=corpora.tokenizer_json_seeds
    ),
    "tokenizer-tiktoken": partial(
        corpora.tokenizer_target, suffix=".tiktoken", seeds=corpora.tiktoken_seeds
    ),
}
TARGETS |= {
    f"{scheme}-{transport}": partial(answers.answers_target, scheme=scheme, transport=transport)
    for scheme in ("s3", "oss")
    for transport in ("obstore", "fsspec")
}
