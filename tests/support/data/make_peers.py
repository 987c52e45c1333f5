"""Writes the small MDS and litdata datasets beside this file, by their own libraries
(mosaicml-streaming 0.13.0, litdata 0.2.76).

Run it where both are installed (`make bench-peers` makes such an environment); the tests read what
it wrote.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent / "peers"
TEXTS = [f"document {n} " + "wörd " * (n * 3 % 11) for n in range(12)]


def tokens(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 60_000, 5 + number * 7 % 30).astype(np.uint16)


def main() -> None:
    from litdata.streaming import Cache, TokensLoader

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tools.bench.sides import stub_torchvision

    stub_torchvision()
    from streaming import MDSWriter

    shutil.rmtree(HERE, ignore_errors=True)
    with MDSWriter(
        out=str(HERE / "mds_text"), columns={"id": "int", "text": "str"}, size_limit=300
    ) as out:
        for number, text in enumerate(TEXTS):
            out.write({"id": number, "text": text})
    columns = {"tokens": "ndarray:uint16"}
    with MDSWriter(
        out=str(HERE / "mds_tokens"), columns=columns, compression="zstd", size_limit=300
    ) as out:
        for number in range(12):
            out.write({"tokens": tokens(number)})
    with MDSWriter(out=str(HERE / "mds_bytes"), columns={"tokens": "bytes"}, size_limit=300) as out:
        for number in range(12):
            out.write({"tokens": tokens(number).tobytes()})
    cache = Cache(
        str(HERE / "litdata_tokens"), chunk_bytes="300B", item_loader=TokensLoader(block_size=8)
    )
    for number in range(12):
        cache[number] = torch.from_numpy(tokens(number).astype(np.int32))
    cache.done()
    cache.merge()
    cache = Cache(str(HERE / "litdata_text"), chunk_bytes=300)
    for number, text in enumerate(TEXTS):
        cache[number] = {"text": text, "id": number}
    cache.done()
    cache.merge()
    # dicts within dicts: an Arrow file in each chunk
    cache = Cache(str(HERE / "litdata_rows"), chunk_bytes="8KB")
    for number, text in enumerate(TEXTS):
        cache[number] = {"text": text, "meta": {"id": number, "tags": ["a", "b"]}}
    cache.done()
    cache.merge()


if __name__ == "__main__":
    main()
