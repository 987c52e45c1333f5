"""Who is where: every rank tells the others what it is doing, so that a job that stops can say which rank stopped it."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between two signs of life."""


class Watch:
    """Signs of life of this rank in the store of the job, and what those of the others say when a collective failed.

    `phase` is cheap: it sets two attributes. A thread writes them.

    Args:
        store: that all ranks joined; None: a rank by itself, which nobody watches.
    """

    def __init__(self, store: Store | None, rank: int, world: int) -> None:
        self._store, self.rank, self.world = store, rank, world
        self.step, self._phase, self._since, self._beats = 0, "starting", time.monotonic(), 0
        self._ended = threading.Event()
        if store is not None:
            threading.Thread(target=self._run, name="streammega-watch", daemon=True).start()

    def phase(self, name: str, step: int | None = None) -> None:
        """This rank is now doing something else."""
        self._phase, self._since = name, time.monotonic()
        self.step = self.step if step is None else step

    def fail(self, cause: str) -> None:
        """Let the others know why this rank ends the job; the first cause is kept."""
        if self._store is None:
            return
        try:
            if self._store.add("streammega/failures", 1) == 1:
                self._store.set("streammega/cause", json.dumps({"rank": self.rank, "cause": cause[:2000]}))
        except Exception as error:  # the store went with its host: its end is in that log
            log.debug("the cause could not be told: %s", error)

    def explain(self) -> str:
        """What the others say after a collective failed: who failed first, who gives no sign of life, what each was doing."""
        if self._store is None:
            return ""
        try:
            before = self._read()
            time.sleep(2.5 * BEAT)
            after, cause = self._read(), self._cause()
        except Exception as error:
            return f"rank {self.rank} cannot ask the others ({error}): the host of the job's store is gone, see its log"
        if cause is not None and cause["rank"] != self.rank:
            return f"rank {cause['rank']} ended the job: {cause['cause']}"
        silent = [r for r in after if r != self.rank and after[r].get("beats") == before.get(r, {}).get("beats")]
        lines = [f"rank {r} gives no sign of life; {_describe(after[r])}" for r in silent]
        waiting = after.get(self.rank, {}).get("phase")
        others = [
            r for r in after if r not in (self.rank, *silent) and (after[r]["phase"], after[r]["step"]) != (waiting, self.step)
        ]
        lines += [f"rank {r} is elsewhere; {_describe(after[r])}" for r in others]
        return "; ".join(lines) or f"no other rank says why; this one was in step {self.step} ({self._phase})"

    def close(self) -> None:
        """End the signs of life."""
        self._ended.set()

    def _run(self) -> None:
        while True:
            self._beats += 1
            seconds = time.monotonic() - self._since
            status = {"beats": self._beats, "step": self.step, "phase": self._phase, "seconds": round(seconds, 1)}
            try:
                assert self._store is not None
                self._store.set(f"streammega/rank/{self.rank}", json.dumps(status))
            except Exception as error:
                log.debug("no sign of life could be given: %s", error)
                return
            if self._ended.wait(BEAT):
                return

    def _read(self) -> dict[int, dict[str, Any]]:
        assert self._store is not None
        names = {rank: f"streammega/rank/{rank}" for rank in range(self.world)}
        return {rank: json.loads(self._store.get(name)) for rank, name in names.items() if self._store.check([name])}

    def _cause(self) -> dict[str, Any] | None:
        assert self._store is not None
        if not self._store.check(["streammega/cause"]):
            return None
        found: dict[str, Any] = json.loads(self._store.get("streammega/cause"))
        return found


def _describe(status: dict[str, Any]) -> str:
    return f"last heard of in step {status['step']} ({status['phase']}, for {status['seconds']} s)"
