"""The order of samples: pure functions of sizes, seed and config.

Integers only; no I/O, torch or clock.
"""

from streammega.order.extents import Extents

__all__ = ["Extents"]
