"""Which examples a process reads in an epoch: arithmetic, no state, nothing but NumPy.

    one order of all examples, the same in every process      7 3 0 9 4 1 8 2 5 6 (0 0)     (0): padding, mask False
    steps of 2 processes x 3 examples                          step 0        step 1
    process 0                                                  7 3 0         8 2 5
    process 1                                                        9 4 1         6 (0 0)

A step reads consecutive places of the order, whatever the number of processes it is divided over: as long as
``process_count * batch_size`` stays, so does what every step trains on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_WORD = 2**32  # NumPy's entropy is a row of words of 32 bits


class EpochIndices(NamedTuple):
    """What one process reads in one epoch.

    Attributes:
      indices: int64, ``[steps, batch_size]``, or ``[count]`` without a batch size. Padding is 0: valid to read.
      mask: bool, the same shape: False for padding.
    """

    indices: NDArray[np.int64]
    mask: NDArray[np.bool_]


def epoch_indices(
    size: int,
    *,
    epoch: int,
    process: int,
    process_count: int,
    seed: int = 0,
    batch_size: int | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
) -> EpochIndices:
    """Indices of the examples that one process reads in one epoch; every process gets equally many.

    A pure function of its arguments: the same on every host, after a restart, and in every version of NumPy (the order
    sorts raw 64-bit numbers of ``PCG64(SeedSequence([seed, epoch]))``, two streams whose compatibility NumPy promises;
    that of ``Generator.permutation`` it does not). Epoch 0 of a seed from ``2**32`` on has ``[seed, 0, 1]`` there:
    NumPy takes ``[2**32, 0]`` for ``[0, 1]``. Over all processes, every example occurs exactly once where ``mask`` is
    True; with ``drop_last``, at most once.

    Matches torch ``DistributedSampler`` (shuffle by seed and epoch; strided without a batch size), with three
    departures: padding is marked and not made of repeated examples, which torch trains and evaluates on twice;
    ``epoch`` has no default, so it cannot be forgotten (torch's ``set_epoch``); the end is padded to whole batches.

    Args:
      size: number of examples.
      epoch: number of the epoch, from 0, below ``2**32``.
      process: this process, ``jax.process_index()``.
      process_count: how many there are, ``jax.process_count()``.
      seed: from 0, below ``2**64``.
      batch_size: examples per step and process; without one, one row of all.
      shuffle: another order every epoch; otherwise the order of the data, in all.
      drop_last: leave out the last, partial step (without batch size: the last, partial round) instead of padding it.

    Raises:
      ValueError, TypeError: an argument is not a whole number in its range, or ``drop_last`` leaves nothing.

    Example:
      >>> from fdp.data import epoch_indices
      >>> for process in range(2):
      ...     indices, mask = epoch_indices(
      ...         5, epoch=0, process=process, process_count=2, shuffle=False
      ...     )
      ...     print(indices, mask)
      [0 2 4] [ True  True  True]
      [1 3 0] [ True  True False]
    """
    size = _whole("size", size, 1)
    epoch, seed = _whole("epoch", epoch, 0), _whole("seed", seed, 0)
    entropy = _entropy(seed, epoch)
    process_count = _whole("process_count", process_count, 1)
    process = _whole("process", process, 0)
    if process >= process_count:
        raise ValueError(
            f"expected process to be below process_count={process_count}, got {process}: pass "
            "process=jax.process_index(), process_count=jax.process_count()."
        )
    share = 1 if batch_size is None else _whole("batch_size", batch_size, 1)
    unit = process_count * share
    steps = size // unit if drop_last else -(-size // unit)
    if not steps:
        raise ValueError(
            f"expected at least {process_count} processes x {share} examples = {unit} examples for one whole step "
            f"with drop_last=True, got {size}: pass drop_last=False, which pads, or a smaller batch_size."
        )
    order = np.arange(size)
    if shuffle:
        stream = np.random.PCG64(np.random.SeedSequence(entropy))
        order = np.argsort(stream.random_raw(size), kind="stable")
    padding = max(0, steps * unit - size)
    indices = np.pad(order[: steps * unit], (0, padding)).astype(np.int64)
    mask = np.arange(steps * unit) < size
    shape = (steps, process_count, share)
    mine, counts = indices.reshape(shape)[:, process], mask.reshape(shape)[:, process]
    if batch_size is None:
        return EpochIndices(mine.reshape(-1), counts.reshape(-1))
    return EpochIndices(mine, counts)


def _entropy(seed: int, epoch: int) -> list[int]:
    """Entropy that is another for every seed and epoch, zeros at its end aside, which NumPy does not see."""
    for name, value, bits in (("seed", seed, 64), ("epoch", epoch, 32)):
        if value >= 2**bits:
            raise ValueError(
                f"expected {name} to be below 2**{bits}, got {value}: pass {name} % 2**{bits}."
            )
    # The words of (seed, epoch) are [s, e], or [s, s', e] with s' > 0: alike where that e is 0 and the other is s'.
    return [seed, epoch] if epoch or seed < _WORD else [seed, 0, 1]


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"expected {name} to be a whole number, got {value!r} of type {type(value).__name__}: pass an int."
        )
    if value < least:
        raise ValueError(
            f"expected {name} to be at least {least}, got {value}: pass a whole number from {least}."
        )
    return int(value)
