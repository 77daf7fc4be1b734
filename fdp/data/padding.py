"""Partial batches, filled up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fdp.data.batches import count_examples


def pad_batch(
    batch: Any, size: int | None = None, *, multiple_of: int | None = None
) -> tuple[Any, NDArray[np.float32]]:
    """Fills the leading axis of every leaf up, and says which examples are real.

    Padding repeats the batch's first example. Zeros could make a loss NaN (a norm, a logarithm, a division by a
    length), and NaN times a weight of zero is NaN; a repeated example is as finite as the example is.

    Args:
      batch: pytree of arrays ``[examples, ...]``, at least one example; NumPy arrays stay NumPy arrays.
      size: examples to fill up to; or
      multiple_of: fill up to the next multiple of this, such as replicas x microbatches.

    Returns:
      The batch, and a float32 mask ``[padded examples]``: 1 for the examples given, 0 for padding. Multiply the
      per-example losses by it and divide by its sum over all replicas; ``mask > 0`` is the same as booleans.

    Raises:
      ValueError: the batch is empty, its leaves disagree or it is larger than ``size``.
      TypeError: not exactly one of ``size`` and ``multiple_of`` is given, as a whole number.

    Example:
      >>> import numpy as np
      >>> from fdp.data import pad_batch
      >>> pad_batch({"x": np.array([5, 6, 7])}, multiple_of=4)
      ({'x': array([5, 6, 7, 5])}, array([1., 1., 1., 0.], dtype=float32))
    """
    if (size is None) == (multiple_of is None):
        raise TypeError(
            f"expected one of size= and multiple_of=, got size={size!r} and multiple_of={multiple_of!r}: write "
            "pad_batch(batch, 64), or pad_batch(batch, multiple_of=8)."
        )
    name, wanted = ("size", size) if multiple_of is None else ("multiple_of", multiple_of)
    if isinstance(wanted, bool) or not isinstance(wanted, (int, np.integer)) or wanted < 1:
        raise TypeError(
            f"expected {name} to be a whole number from 1, got {wanted!r}: write for example {name}=8."
        )
    examples = count_examples(batch)
    if not examples:
        raise ValueError(
            "expected a batch of at least one example, got 0: there is none to fill it up with. Leave the batch out, "
            "or let fdp.data.join(batches, like=example_batch) make one of weight zero."
        )
    target = int(wanted) if multiple_of is None else -(-examples // int(wanted)) * int(wanted)
    if examples > target:
        raise ValueError(
            f"expected a batch of at most size={target} examples, got {examples}: raise size, or split the batch."
        )

    def pad(x: Any) -> Any:
        if target == examples:
            return x
        xp = jnp if isinstance(x, jax.Array) else np
        return xp.concatenate([x, xp.repeat(x[:1], target - examples, axis=0)])

    return jax.tree.map(pad, batch), (np.arange(target) < examples).astype(np.float32)
