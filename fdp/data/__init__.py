"""Input of several processes: which examples each reads, batches of one size, and the end that all reach together.

Read your data with whatever you like. ``epoch_indices`` says which examples a process reads in an epoch, ``pad_batch``
fills a partial batch up and says which of its examples count, ``join`` lets processes with more data go on without
those that have run out, and ``global_batch`` puts the processes' shares together on a mesh. The last three give a mask
that is 0 for what is only there to fill a shape: multiply per-example losses by it, and divide by its sum.
"""

from fdp.data.batches import check_batch, count_examples, global_batch, replica_count
from fdp.data.indices import EpochIndices, epoch_indices
from fdp.data.joining import join
from fdp.data.padding import pad_batch

__all__ = [
    "EpochIndices",
    "check_batch",
    "count_examples",
    "epoch_indices",
    "global_batch",
    "join",
    "pad_batch",
    "replica_count",
]
