"""The schedule as a string: do reductions overlap with matmuls?"""

from __future__ import annotations

import re

from fdp.inspect.program import Inspectable, Program, load
from fdp.inspect.schedule import Op, is_reduction, operations

# A fusion of fewer elements is done before a reduction has left the chip: the test of a token, a counter.
SIGNIFICANT_ELEMENTS = 1024


def interleaving(
    compiled: Inspectable, *, min_elements: int = SIGNIFICANT_ELEMENTS, min_bytes: int = 0
) -> str:
    """The schedule of the entry computation, as a string such as ``"GfG[GfG][GfG]f"``.

    ======  =====================================================================================
    ``G``   a matrix product or convolution, alone, in a fusion, or as a library call
    ``f``   other compute; runs of it are written once
    ``[``   an all-reduce or reduce-scatter starts
    ``]``   and ends: something waits for it
    ``{}``  another collective starts, ends
    ``W``   a loop; what is in it has a string of its own, see ``interleavings``
    ``C``   a conditional, likewise
    ======  =====================================================================================

    ``[GfG]`` is a reduction that two matmuls hide; ``[]`` is one during which nothing runs. On TPU, a matmul that
    carries a reduction along (async collective fusion) stands between its brackets like any other. On CPU every
    reduction is written ``[]``, because the text does not say what runs meanwhile: ask ``overlap``.

    Args:
      compiled: a ``jax.stages.Compiled`` or its text.
      min_elements: other compute that computes fewer elements is left out.
      min_bytes: collectives of fewer bytes are left out (the mean of a loss has 4).

    Returns:
      The string; empty for a program that does nothing of significance.

    Raises:
      ValueError: the text is no compiled program of a backend that is known.
    """
    program = load(compiled)
    return _letters(operations(program, program.module.entry), min_elements, min_bytes)


def interleavings(
    compiled: Inspectable, *, min_elements: int = SIGNIFICANT_ELEMENTS, min_bytes: int = 0
) -> dict[str, str]:
    """The same for every computation that holds a schedule, loop bodies for instance.

    Args:
      compiled: as for ``interleaving``.
      min_elements: as for ``interleaving``.
      min_bytes: as for ``interleaving``.

    Returns:
      Strings by name of the computation, in the order in which a step first reaches them, the entry first;
      computations without anything of significance, such as the tests of loops, are left out.

    Raises:
      ValueError: as for ``interleaving``.
    """
    program = load(compiled)
    entry = program.module.entry.name
    strings = {
        name: _letters(operations(program, site.computation), min_elements, min_bytes)
        for name, site in program.sites.items()
        if not _is_called(program, name)
    }
    return {name: text for name, text in strings.items() if text or name == entry}


def _is_called(program: Program, name: str) -> bool:
    """Whether a plain call runs it; then it is part of its caller's string."""
    return any(
        name in instruction.called.get("to_apply", ())
        for site in program.sites.values()
        for instruction in site.computation.instructions
        if instruction.opcode == "call"
    )


def _letters(ops: tuple[Op, ...], min_elements: int, min_bytes: int) -> str:
    text = "".join(_letter(op, min_elements, min_bytes) for op in ops)
    return re.sub("f+", "f", text)


def _letter(op: Op, min_elements: int, min_bytes: int) -> str:
    if op.collective is not None:
        if op.collective.nbytes < min_bytes:
            return ""
        brackets = "[]" if is_reduction(op.collective) else "{}"
        return brackets[op.kind == "done"]
    if op.kind == "compute":
        return "f" if op.cost.elements >= min_elements else ""
    return {"matmul": "G", "loop": "W", "branch": "C"}.get(op.kind, "")
