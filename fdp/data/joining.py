"""Iterators of different length on different processes.

    process 0    batch batch batch              (three batches)
    process 1    batch batch batch batch batch  (five)
    join         1     1     1     0,1   0,1    every process makes five steps; masks are 0 where data is out

torch's ``Join`` shadows the collectives of processes that are out of data and has to know every one of them, so it
throws for what it does not know. Here such a process runs the same step on a batch of weight zero: whatever the step
communicates, it communicates.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fdp import exchange
from fdp.data.batches import count_examples
from fdp.data.padding import pad_batch

Masked = tuple[Any, NDArray[np.float32]]


def join(
    batches: Iterable[Any],
    *,
    size: int | None = None,
    like: Any = None,
    lookahead: int = 1,
    timeout: float = exchange.DEFAULT_TIMEOUT,
    name: str = "join",
) -> Iterator[Masked]:
    """Goes on in every process until all of them are out of data.

    Before each step processes tell each other, from host to host, whether they have a batch; devices stay busy
    meanwhile. That costs some milliseconds; ``lookahead`` lets it happen once for several steps. In one process
    nothing is exchanged.

    Args:
      batches: this process's batches, pytrees of arrays ``[examples, ...]``.
      size: fill smaller batches (the last one) up to so many examples, see ``pad_batch``.
      like: a batch of the shapes of the others, or ``jax.ShapeDtypeStruct`` leaves, for a process that may have no
        batch at all. Where a process has had one, its last batch serves.
      lookahead: batches that are read ahead, and steps between two exchanges.
      timeout: seconds to wait for the other processes.
      name: tells joins apart that different threads run at the same time.

    Yields:
      ``(batch, mask)``, the same number of times in every process. The float32 mask ``[examples]`` is 1 for examples of
      this process, 0 for padding and everywhere once its data is out. It is what a weighted loss has for weights.

    Raises:
      ValueError: in every process, when the batches of one step differ in structure, shapes or dtypes between
        processes, or a process has nothing to make a batch of weight zero from.
      RuntimeError: in the others, at their next exchange, when a process's iterator raises or it leaves the loop early.
      TimeoutError: a process did not come in time; names it.

    Source: torch ``Join`` and ``DistributedDataParallel.join``; gradients there are divided by the number of processes,
    by a weighted mean here.

    Example:
      >>> import numpy as np
      >>> from fdp.data import join
      >>> for batch, mask in join([np.arange(2), np.arange(1)], size=2):
      ...     print(batch, mask)
      [0 1] [1. 1.]
      [0 0] [1. 0.]
    """
    if isinstance(lookahead, bool) or not isinstance(lookahead, int) or lookahead < 1:
        raise ValueError(
            f"expected lookahead to be a whole number of steps from 1, got {lookahead!r}: write lookahead=1."
        )
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"expected batches to be an iterable of batches, got {batches!r}: pass a list or a generator of them."
        )
    # Numbered when it is made, so that one that is left half way cannot be mistaken for the next.
    place = f"fdp.data.join {name!r} {exchange.count(f'join {name}')}"
    return _join(iter(batches), size, like, lookahead, timeout, place)


def _join(
    batches: Iterator[Any], size: int | None, like: Any, lookahead: int, timeout: float, name: str
) -> Iterator[Masked]:
    spare = None if like is None else _without_weight(like)
    taken = 0
    while True:
        ahead: list[Masked] = []
        try:
            for batch in itertools.islice(batches, lookahead):
                ahead.append(_with_mask(batch, size))
        except BaseException as error:
            # The others are waiting for this process's word. They get it, and stop: also where this one is told to
            # exit, which is no Exception.
            what = f": {error}" if str(error) else ""
            said = f"its iterator raised {type(error).__name__}{what}"
            exchange.leave_note(name, json.dumps({"gone": said}))
            raise
        if ahead:
            spare = _without_weight(ahead[-1][0])
        reports = _exchange(name, ahead, spare, timeout)
        _refuse_the_gone(reports)
        steps = max(len(report["batches"]) for report in reports)
        _refuse_different(reports, steps, taken)
        for step in range(steps):
            at_hand = ahead[step] if step < len(ahead) else spare
            assert at_hand is not None  # refused above
            try:
                yield at_hand
            except GeneratorExit:
                said = f"it left the loop after {taken + step + 1} steps"
                exchange.leave_note(name, json.dumps({"gone": said}))
                raise
        taken += steps
        if steps < lookahead:
            return


def _with_mask(batch: Any, size: int | None) -> Masked:
    if size is not None:
        return pad_batch(batch, size)
    return batch, np.ones(count_examples(batch), np.float32)


def _without_weight(batch: Any) -> Masked:
    """A batch that counts nothing: any values that occur will do, where there are none ones (see ``pad_batch``)."""

    def fill(x: Any) -> Any:
        return np.ones(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

    batch = jax.tree.map(fill, batch)
    return batch, np.zeros(count_examples(batch), np.float32)


def _exchange(
    name: str, ahead: list[Masked], spare: Masked | None, timeout: float
) -> list[dict[str, Any]]:
    """What every process has to say: descriptions of its next batches, and of its batch of weight zero."""
    report = {
        "batches": [exchange.describe(batch) for batch, _ in ahead],
        "spare": None if spare is None else exchange.describe(spare[0]),
    }
    texts = exchange.gather(name, json.dumps(report), timeout=timeout)
    return [json.loads(text) for text in texts]


def _refuse_the_gone(reports: list[dict[str, Any]]) -> None:
    for process, report in enumerate(reports):
        if "gone" in report:
            raise RuntimeError(
                f"expected process {process} to go on with fdp.data.join until all processes are out of data, but "
                f"{report['gone']}. Let every process run the whole loop."
            )


def _refuse_different(reports: list[dict[str, Any]], steps: int, taken: int) -> None:
    """Raises, in every process alike, where a step's batches would not fit together."""
    for step in range(steps):
        described = [
            report["batches"][step] if step < len(report["batches"]) else report["spare"]
            for report in reports
        ]
        empty = [process for process, lines in enumerate(described) if lines is None]
        if empty:
            raise ValueError(
                f"expected an example batch in processes that have no data, but {exchange.these_processes(empty)} "
                "had no batch at all: pass fdp.data.join(batches, like=example_batch)."
            )
        if any(lines != described[0] for lines in described):
            found = exchange.first_difference(described)
            spare = " (out of data)" if step >= len(reports[found.process]["batches"]) else ""
            raise ValueError(
                f"expected batches of the same structure, shapes and dtypes in every process, but at step "
                f"{taken + step} process 0 has {found.reference!r} and process {found.process}{spare} has "
                f"{found.line!r}: pad the batches, fdp.data.join(batches, size=...), or drop partial ones."
            )
