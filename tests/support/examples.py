"""How many examples tests of random cases try: few in `make test`, ten times as many in `make
soak`.
"""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("STREAMMEGA_EXAMPLES", "1"))


def examples(number: int) -> int:
    """The examples to try where `make test` tries `number`; for tests marked `many_examples`."""
    return number * FACTOR
