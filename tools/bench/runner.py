"""What benches of reading share: the corpus on a local object server, and sides that run in processes
of their own.

The server is tools/bench/object_server.py, on the same cores as everything else: "unshaped" is as
fast as loopback goes, "shaped" sends the first byte after 20 ms and 90 MB/s per connection. Files
are made under a folder (about 10 GB with those of the other loaders).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import corpus, harness
from tools.bench.object_server import Running, running

HERE = Path(__file__).resolve().parents[2]
FOLDER = Path("/tmp/streammega-bench")
LOCAL = str(FOLDER / "objects" / "data" / "web")
S = 4096
CORPUS = 4 << 30
EQUAL_CORPUS = 1 << 30
"""Bytes of what is read by us and by the other loaders: the same tokens, each side in its format."""
EQUAL_TOKENS = EQUAL_CORPUS // 2 // (S + 1) // 256 * 256 * (S + 1)
EPOCH = EQUAL_TOKENS // S // 256 * 256
"""Samples of an epoch of it, whole global batches."""
SHAPES: dict[str, dict[str, float]] = {
    "unshaped": {},
    "shaped": {"latency": 0.02, "bandwidth": 90e6},
}
PACKAGES = (
    "numpy", "torch", "obstore", "megatron-core", "multi-storage-client", "litdata", "mosaicml-streaming", "s3torchconnector",
)  # fmt: skip
WIDE = {"shuffle_block_bytes": 1 << 20}
WHOLE_EPOCH: dict[str, Any] = {"prefix": "s3://data/equal", "num_samples": EPOCH, "seconds": 0}
OUR_WORKERS: dict[str, dict[str, Any]] = {
    "forked": {"method": "fork"},
    "spawned": {"method": "spawn"},
}
Result = dict[str, Any]


class Bench:
    """A server of the corpus, and sides that read from it, each in a process of its own."""

    def __init__(self, server: Running) -> None:
        self.server = server

    def side(self, name: str, checkout: Path = HERE, **arguments: Any) -> Result:
        """Run one side in a process of its own, with the library of a checkout.

        A side that fails is {} and says why on stderr.
        """
        arguments = {"index_cache": str(FOLDER / "idx"), **arguments}
        environment = os.environ | {
            "AWS_ENDPOINT_URL": self.server.endpoint, "S3_ENDPOINT_URL": self.server.endpoint, "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "MSC_CONFIG": str(FOLDER / "msc.json"), "TMPDIR": str(FOLDER / "tmp"),
        }  # fmt: skip
        script = str(checkout / "tools" / "bench" / "sides.py")
        try:
            timeout = arguments.get("seconds", 0) + 180
            return harness.run_side([script, name, json.dumps(arguments)], timeout, environment)
        except (SystemExit, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return {}
        finally:
            shutil.rmtree(FOLDER / "tmp", ignore_errors=True)
            (FOLDER / "tmp").mkdir()

    def ours(self, **arguments: Any) -> Result:
        """streammega from the server."""
        return self.side(
            "ours", **{"endpoint": self.server.endpoint, "prefix": "s3://data/web", **arguments}
        )


@contextlib.contextmanager
def serving(*, peers: bool = False) -> Iterator[Bench]:
    """Both corpora on a server, with `peers` the smaller in the formats of other loaders too."""
    prepare(peers)
    with running(FOLDER / "objects") as server:
        yield Bench(server)


# --- the files ------------------------------------------------------------------------------------------------------------------


def prepare(peers: bool) -> None:
    """Corpora of 4 GiB and of 1 GiB, in documents of a lognormal length; with `peers` the second in
    the formats of the other loaders.
    """
    data = FOLDER / "objects" / "data"
    data.mkdir(parents=True, exist_ok=True)
    (FOLDER / "tmp").mkdir(exist_ok=True)
    options = {"base_path": "data", "region_name": "us-east-1"}
    profile = {"storage_provider": {"type": "s3", "options": options}}
    (FOLDER / "msc.json").write_text(json.dumps({"profiles": {"data": profile}}))
    for name, tokens in (("web", CORPUS // 2), ("equal", EQUAL_TOKENS)):
        if not (data / f"{name}.idx").exists():
            write_pair(data / name, tokens)
    if not peers:
        return
    rows = np.memmap(data / "equal.bin", np.uint16, "r").reshape(-1, S + 1)
    for name, write in (("raw", write_raw), ("mds", write_mds), ("litdata", write_litdata)):
        if not (data / name).exists():
            print(f"writing {name} ...", file=sys.stderr)
            write(rows, data / name)


def write_pair(prefix: Path, tokens: int) -> None:
    """So many random tokens as `.bin` and `.idx`."""
    drawn = np.random.default_rng(0).lognormal(7.0, 1.0, 4_000_000)
    lengths = np.clip(drawn, 16, 200_000).astype(np.int64)
    ends = np.cumsum(lengths)
    lengths = lengths[: int(np.searchsorted(ends, tokens)) + 1]
    lengths[-1] -= ends[len(lengths) - 1] - tokens  # the last document is what is left
    corpus.write_random(str(prefix), lengths, 65_535)


def write_raw(rows: Any, folder: Path) -> None:
    folder.mkdir()
    for at in range(0, len(rows), 8192):
        rows[at : at + 8192].tofile(folder / f"{at // 8192:05d}.bin")


def write_mds(rows: Any, folder: Path) -> None:
    from tools.bench.sides import stub_torchvision

    stub_torchvision()
    from streaming import MDSWriter

    with MDSWriter(
        out=str(folder), columns={"tokens": f"ndarray:uint16:{S + 1}"}, size_limit=64 << 20
    ) as writer:
        for row in rows:
            writer.write({"tokens": np.array(row)})


def write_litdata(rows: Any, folder: Path) -> None:
    code = (
        "import sys, numpy as np, torch, litdata as ld\n"
        "path, out, count, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])\n"
        "rows = np.memmap(path, np.uint16, 'r')[: count * width].reshape(count, width)\n"
        "def some(n):\n    return torch.from_numpy(np.array(rows[n * 256 : n * 256 + 256]).reshape(-1))\n"
        "if __name__ == '__main__':\n"
        "    ld.optimize(fn=some, inputs=list(range(count // 256)), output_dir=out, chunk_bytes='64MB', num_workers=2,\n"
        "                item_loader=ld.TokensLoader(block_size=width))\n"
    )
    script = folder.with_name("litdata_write.py")
    script.write_text(code)
    arguments = [str(folder.with_name("equal.bin")), str(folder), str(len(rows)), str(S + 1)]
    subprocess.run([sys.executable, str(script), *arguments], check=True, capture_output=True)
    script.unlink()
