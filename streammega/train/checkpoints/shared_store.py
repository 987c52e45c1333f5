"""Whether all ranks see one store, and for how long one waits to see what another wrote."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from streammega.errors import ConfigError
from streammega.train.all_ranks import AllRanks
from streammega.train.checkpoints.store import SIGN, CheckpointStore

SEEN_WITHIN = 60.0
"""Seconds after which what one rank wrote must be seen by the others: clients of NFS look again
after up to a minute.
"""

LOOK_EVERY = 0.2
"""Seconds between two looks: on a disk the first sees it, and a file system of the network is not
to be asked all the time.
"""


def check_shared(store: CheckpointStore, all_ranks: AllRanks) -> None:
    """Raise ConfigError unless all ranks see what the first one writes: else each would keep a part
    of every checkpoint.
    """
    if all_ranks.group is None:
        return

    def leave_sign() -> tuple[str, str]:
        """(name of the sign, the host that left it), of the first rank."""
        # A new name every time: one that an earlier start left would be seen by all.
        sign = f"{SIGN}{secrets.token_hex(6)}"
        store.leave_sign(sign)
        return sign, socket.gethostname()

    sign, first_host = all_ranks.from_first(leave_sign)
    all_ranks.work(lambda: _look_for(store, sign, first_host))
    all_ranks.from_first(lambda: store.remove_sign(sign))


def until_seen(look: Callable[[], None], unseen: type[Exception]) -> None:
    """`look()` until it raises nothing; its error after SEEN_WITHIN seconds."""
    deadline = time.monotonic() + SEEN_WITHIN
    while True:
        try:
            return look()
        except unseen:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOOK_EVERY)


def _look_for(store: CheckpointStore, sign: str, first_host: str) -> None:
    def look() -> None:
        """Raise while the sign is not seen."""
        if not store.sees(sign):
            raise ConfigError(
                f"{store.url}: {socket.gethostname()} does not see what rank 0 wrote there "
                f"on {first_host}; train.out_dir must be one folder for all ranks: "
                f"on a shared file system, or a URL such as s3://bucket/run"
            )

    until_seen(look, ConfigError)
