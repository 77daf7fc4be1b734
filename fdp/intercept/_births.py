"""Which gradients are reduced in the loop they are born in.

A gradient whose slices can be reduced in the loop still waits until after it when anybody else reads the values on
the way: whoever does must see them unreduced and whole.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

from fdp.intercept._flatten import Program, Value
from fdp.intercept._slices import Birth, Graph, NotInLoop, name_of


def find_births(
    program: Program, grads: Mapping[int, Value], min_slice_bytes: float
) -> tuple[dict[int, Birth], dict[int, str]]:
    """Decides for every gradient.

    Args:
      program: the gradient computation.
      grads: leaf -> its gradient.
      min_slice_bytes: loops whose slices together are smaller are left alone.

    Returns:
      Births of the leaves that are reduced in a loop, and for all others the reason why not.
    """
    graph = Graph(program)
    births: dict[int, Birth] = {}
    reasons: dict[int, str] = {}
    for leaf, value in grads.items():
        try:
            births[leaf] = graph.birth(value)
        except NotInLoop as reason:
            reasons[leaf] = str(reason)
    # One refusal can be the reason of another, so until all that remain can stay.
    while True:
        refused = _small(births, min_slice_bytes) or _read_elsewhere(graph, grads, births)
        if not refused:
            return births, reasons
        for leaf, reason in refused.items():
            del births[leaf]
            reasons[leaf] = reason


def _small(births: Mapping[int, Birth], min_slice_bytes: float) -> dict[int, str]:
    """Births in loops that make less than ``min_slice_bytes`` an iteration."""
    total: collections.Counter[int] = collections.Counter()
    for birth in births.values():
        total[birth.step] += math.prod(birth.shape) * birth.dtype.itemsize
    return {
        leaf: f"an iteration makes {total[birth.step]:,} bytes of gradients, less than {min_slice_bytes:,}"
        for leaf, birth in births.items()
        if total[birth.step] < min_slice_bytes
    }


def _read_elsewhere(
    graph: Graph, grads: Mapping[int, Value], births: Mapping[int, Birth]
) -> dict[int, str]:
    """Births whose values are also read by something that is not on the way to a gradient of that loop."""
    ways: dict[int, set[Value]] = {}
    for birth in births.values():
        ways.setdefault(birth.step, set()).update(birth.way)
    needed = {value for birth in births.values() for value in birth.needs}
    returned = collections.Counter(graph.program.outputs)
    returned.subtract(grads[leaf] for leaf in births)
    refused: dict[int, str] = {}
    for leaf, birth in births.items():
        for value in birth.way:
            if value in needed:
                refused[leaf] = "a gradient of a later loop is made from it"
            elif returned[value]:
                refused[leaf] = "it is also returned as something else than this gradient"
            else:
                readers = (graph.program.steps[i] for i in graph.readers.get(value, ()))
                others = [step for step in readers if not set(step.outputs) <= ways[birth.step]]
                if others:
                    refused[leaf] = f"{name_of(others[0])!r} also reads it, before it is reduced"
    return refused
