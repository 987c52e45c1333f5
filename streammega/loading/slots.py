"""The slots of holdings, and their one owner.

A *slot* is the number under which kernels find the bytes of a holding. It goes one way:

    | state    | by         | when                                                            |
    |----------|------------|-----------------------------------------------------------------|
    | free     |            | nothing refers to it                                            |
    | taken    | `take`     | the planner numbers a holding                                   |
    | expected | `expect`   | it is known how many rows the holding serves (`uses`)           |
    | held     | `hold`     | its reads go to the fetcher                                     |
    | filled   | `fill`     | its bytes are there: kernels may follow `addresses`             |
    | free     | `serve`    | the last of its rows was gathered                               |
    | free     | `cancel`   | its other rows will not come, and those planned were gathered   |
    | free     | `put_back` | it was taken, and not needed after all                          |

Everything here runs in the thread that plans and gathers, so there is no lock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.plan import count_down
from streammega.storage.fetch.requests import FetchGroup
from streammega.storage.store import address_of

Integers = NDArray[np.int64]
ENDLESS = 1 << 60
"""Uses of a slot that is never freed: more rows than any run gathers."""


class Slots:
    """Slots of `files` files, numbered as they are, one of address 0, and those of holdings.

    uses, addresses: int64 [slots]: the rows that each has still to serve, and where its bytes lie.
    Both are replaced by longer arrays when slots run out: do not keep them.
    """

    def __init__(self, files: int) -> None:
        self.zero = files
        """The slot of address 0: rows that refer to it have their address as offset."""
        never_freed = files + 1
        self.uses: Integers = np.full(never_freed, ENDLESS, np.int64)
        self.addresses: Integers = np.zeros(never_freed, np.int64)
        self.holdings: dict[int, FetchGroup] = {}
        """Those that were not given back yet, by slot."""
        self._free: list[int] = []

    def map_files(self, addresses: list[int]) -> None:
        """The addresses of mapped files, 0 where one is not mapped, by number of the file."""
        self.addresses[: len(addresses)] = addresses

    def take(self, count: int) -> Integers:
        """That many free slots. Those not needed are put back by `put_back`."""
        if len(self._free) < count:
            self._grow(count)
        kept = len(self._free) - count
        taken = self._free[kept:]
        del self._free[kept:]
        return np.array(taken, np.int64)

    def _grow(self, count: int) -> None:
        """Add at least `count` slots, and as many as there are: arrays are copied seldom."""
        first = len(self.uses)
        more = max(count, first)
        unused = np.zeros(more, np.int64)
        self.uses = np.concatenate([self.uses, unused])
        self.addresses = np.concatenate([self.addresses, unused])
        # the lowest last, so that it is taken first
        self._free += range(first + more - 1, first - 1, -1)

    def put_back(self, slots: Integers) -> None:
        """These slots, in the order in which they were taken, are not needed after all."""
        self._free += slots[::-1].tolist()

    def expect(self, slots: Integers, rows: Integers) -> None:
        """Slot slots[i] will serve rows[i] rows."""
        self.uses[slots] = rows

    def hold(self, holding: FetchGroup) -> None:
        """Keep a holding whose bytes will come."""
        self.holdings[holding.slot] = holding

    def fill(self, holding: FetchGroup) -> None:
        """The bytes of a holding are there."""
        assert holding.buffer is not None
        self.addresses[holding.slot] = address_of(holding.buffer)

    def serve(self, slot_of_row: Integers, tokens_of_row: Integers) -> list[FetchGroup]:
        """These rows were gathered: the holdings that serve no other, whose slots are free now."""
        most = np.empty(len(self.holdings), np.int64)
        freed = count_down(self.uses, slot_of_row, tokens_of_row, most)
        return self._release(most[:freed].tolist())

    def cancel(self, slots: Integers, rows: Integers) -> list[FetchGroup]:
        """Rows[i] of the rows that slots[i] was to serve will not come: the holdings that serve no
        other.
        """
        self.uses[slots] -= rows
        return self._release(slots[self.uses[slots] == 0].tolist())

    def _release(self, slots: list[int]) -> list[FetchGroup]:
        self._free += slots
        return [self.holdings.pop(slot) for slot in slots]

    def forget(self) -> None:
        """Reading has ended: refer to no holding any more."""
        self.holdings.clear()
