"""By which units, shards and conversions are known again: digests of all that they depend on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIGEST_BYTES = 12
"""Of each: 96 bits, so that no two of a corpus's units are ever alike by chance."""


def digest_of_json(value: Any) -> str:
    """Equal for values that are equal as JSON."""
    text = json.dumps(value, sort_keys=True)
    return digest_of_bytes(text.encode())


def digest_of_bytes(data: bytes) -> str:
    """Equal for equal bytes."""
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES)
    return digest.hexdigest()
