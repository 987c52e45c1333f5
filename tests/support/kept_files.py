"""Files of the node cache, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash

CHECKSUM_BYTES = 8


def write_kept(path: Path, body: bytes) -> None:
    """A file that ends with the checksum of its bytes."""
    path.unlink(missing_ok=True)  # what is mapped stays as it was
    path.write_bytes(body + xxhash.xxh3_64_digest(body))


def save_kept(path: Path, array: Any) -> None:
    """An array, as `np.save` writes it, and its checksum."""
    path.unlink(missing_ok=True)
    np.save(path, array, allow_pickle=True)
    write_kept(path, path.read_bytes())


def seal(path: Path) -> None:
    """The checksum again, of a file that was changed in place."""
    write_kept(path, path.read_bytes()[:-CHECKSUM_BYTES])
