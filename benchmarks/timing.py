"""Steps of several ways, timed in turns within one process a rank, and checked to be steps of the same program."""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import fdp
from benchmarks.machine import sent_bytes
from benchmarks.ways import Setting, Way
from fdp import exchange

LOSS_TOLERANCE = 1e-4
PATIENCE = 1800.0  # seconds to wait for another rank, which may be compiling


class DifferentPrograms(RuntimeError):
    """Two ways do not compute the same, so their times must not be compared."""


class Timed(NamedTuple):
    """One way's turn in one round, as this rank saw it.

    Attributes:
      seconds: of each step, from its call until it is done here.
      sent: bytes that left through the shaped wire during these steps; None without one.
      loss: after the last step.
    """

    seconds: list[float]
    sent: int | None
    loss: float


def gather(name: str, value: Any) -> list[Any]:
    """Every rank's value, through JSON. No device takes part, and no rank goes on before all are here."""
    return [json.loads(text) for text in exchange.gather(name, json.dumps(value), timeout=PATIENCE)]


def check(ways: Mapping[str, Way], setting: Setting, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Takes one step of every way from the same weights, which compiles them too.

    Args:
      ways: by name.
      setting: what they were built for.
      batch: this rank's, placed, by framework.

    Returns:
      ``{"loss": {name: mean over ranks}, "update_difference": {name: relative difference from the first way that
      communicates}}``, the same on all ranks.

    Raises:
      DifferentPrograms: on all ranks; losses or updates differ, and between which ways.
    """
    given, model_state = setting.pair.init()
    before = setting.pair.named(given)
    losses: dict[str, float] = {}
    differences: dict[str, float] = {}
    reference: tuple[str, dict[str, np.ndarray]] | None = None
    for name, way in ways.items():
        fdp.barrier("before a way is checked", timeout=PATIENCE)
        state, loss = way.step(way.init(given, model_state), batch[name])
        mean = statistics.fmean(gather("losses of the first step", way.wait(state, loss)))
        losses[name] = mean
        first, expected = next(iter(losses.items()))
        if not abs(mean - expected) <= LOSS_TOLERANCE * abs(expected):
            raise DifferentPrograms(
                f"expected the loss of the first step to be the same to {LOSS_TOLERANCE:g}, got {expected!r} from "
                f"{first!r} and {mean!r} from {name!r}: they are not the same program, nothing was timed"
            )
        if not way.communicates:
            continue
        after = way.params(state)
        del state, loss
        moved = {key: after[key] - before[key] for key in before}
        if reference is None:
            reference = name, moved
        mine = relative_difference(moved, reference[1])
        differences[name] = max(gather("differences of the first update", mine))
        if not differences[name] <= setting.pair.update_tolerance:
            raise DifferentPrograms(
                f"expected the first update to be the same to {setting.pair.update_tolerance:g}, got a relative "
                f"difference of {differences[name]:.2g} between {reference[0]!r} and {name!r}: they do not reduce the "
                "same gradients, nothing was timed"
            )
    return {"loss": losses, "update_difference": differences}


def relative_difference(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Norm of a - b over norm of b, over all arrays; inf where b is zero and a is not, or something is not finite."""
    difference = math.sqrt(sum(_square(a[key] - b[key]) for key in b))
    whole = math.sqrt(sum(_square(x) for x in b.values()))
    found = difference / whole if whole else (math.inf if difference else 0.0)
    return found if math.isfinite(found) else math.inf


def _square(x: np.ndarray) -> float:
    return float(np.sum(np.square(x, dtype=np.float64)))


def time_way(way: Way, weights: Any, batch: Any, warm_up: int, steps: int) -> Timed:
    """One turn: a fresh state, steps that are not counted, and ``steps`` that are.

    All ranks begin together, and meet only in the way's own reductions until the last step is done. The exchange
    around the turn is between hosts, over a connection that is idle while steps run.
    """
    state = way.init(*weights)
    gc.collect()  # not in the middle of a step
    for _ in range(warm_up):
        state, loss = way.step(state, batch)
        way.wait(state, loss)
    fdp.barrier("before a turn", timeout=PATIENCE)
    before = sent_bytes()
    seconds: list[float] = []
    value = math.nan
    for _ in range(steps):
        start = time.perf_counter()
        state, loss = way.step(state, batch)
        value = way.wait(state, loss)
        seconds.append(time.perf_counter() - start)
    fdp.barrier("after a turn", timeout=PATIENCE)
    if before is None:
        return Timed(seconds, None, value)
    time.sleep(0.1)  # what this rank sent last may still wait for the wire
    after = sent_bytes()
    return Timed(seconds, None if after is None else after - before, value)


def every(way: Way, count: int) -> Way:
    """A way whose step is ``count`` iterations on the same batch, of which the last one reduces and updates for all.

    Raises:
      ValueError: the way cannot put off reducing.
    """
    no_sync_step = way.no_sync_step
    if no_sync_step is None or count < 1:
        raise ValueError(
            f"expected a way that can put off reducing, and a count of at least 1, got {way.name!r} and {count}"
        )

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        for _ in range(count - 1):
            state, _loss = no_sync_step(state, batch)
        return way.step(state, batch)

    return way._replace(name=f"{way.name} every={count}", step=step, no_sync_step=None)


def windows(ways: Mapping[str, Way], counts: Sequence[int]) -> dict[str, tuple[Way, int]]:
    """`every` way that can put off reducing, by name, and how many iterations its step is: counts above 1."""
    return {
        f"{name} every={count}": (every(way, count), count)
        for name, way in ways.items()
        if way.no_sync_step is not None and way.communicates
        for count in counts
        if count > 1
    }


def summary(turns: Sequence[Sequence[Timed]]) -> dict[str, Any]:
    """Statistics of one way.

    Args:
      turns: ``[rounds][ranks]``.

    Returns:
      Plain data. A step takes as long as it does on the slowest rank: ``steps_s`` holds those, ``[rounds][steps]``, and
      ``median_s``, ``q1_s``, ``q3_s``, ``min_s``, ``max_s`` are over all of them. ``ranks_steps_s`` is
      ``[rounds][ranks][steps]``. ``sent_bytes_per_step`` is the mean over ranks and steps, None without a shaped wire.
    """
    steps = [
        [max(of_step) for of_step in zip(*(t.seconds for t in turn), strict=True)] for turn in turns
    ]
    every = [seconds for turn in steps for seconds in turn]
    quartiles = (
        statistics.quantiles(every, n=4, method="inclusive") if len(every) > 1 else every * 3
    )
    sent = [t.sent for turn in turns for t in turn if t.sent is not None]
    count = len(sent) * len(turns[0][0].seconds)
    return {
        "median_s": quartiles[1],
        "q1_s": quartiles[0],
        "q3_s": quartiles[2],
        "min_s": min(every),
        "max_s": max(every),
        "sent_bytes_per_step": sum(sent) // count if sent else None,
        "last_loss": statistics.fmean(t.loss for t in turns[-1]),
        "steps_s": [[round(s, 5) for s in turn] for turn in steps],
        "ranks_steps_s": [[[round(s, 5) for s in t.seconds] for t in turn] for turn in turns],
    }
