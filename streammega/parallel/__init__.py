"""How the ranks of a layout get their batches: process groups, one broadcast of ids, the parts of
context parallelism.
"""

from streammega.parallel.column_writer import ColumnWriter
from streammega.parallel.groups import Ranks, device_mesh
from streammega.parallel.opening import open_together
from streammega.parallel.rank_batches import RankBatches, get_batch, open_loader

__all__ = [
    "ColumnWriter",
    "RankBatches",
    "Ranks",
    "device_mesh",
    "get_batch",
    "open_loader",
    "open_together",
]
