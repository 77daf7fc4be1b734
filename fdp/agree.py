"""Do all processes run the same program? Asked before a collective would hang over it.

A process that sends other buckets, or in another order, makes the others wait without end, or reduce the wrong
numbers together. So processes compare what decides their collectives, as text, through the key-value store of
``jax.distributed``: it needs no device, it has a time-out, and it can say what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np

from fdp import exchange
from fdp.hooks import CommHook
from fdp.pack import Packing
from fdp.plan import BucketPlan
from fdp.schedules import Schedule

# What changes a traced program without appearing among its arguments.
_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def agree(
    facts: Mapping[str, Any], *, timeout: float = exchange.DEFAULT_TIMEOUT, name: str = "agree"
) -> None:
    """Raises in every process unless all of them hold the same facts. All processes call it; nothing else is sent.

    Versions of jax and NumPy and the settings that change programs are always compared. In one process it does nothing.

    Args:
      facts: by name: a ``BucketPlan``, schedule, hook or packing; ``jax.stages.Lowered``, of which the StableHLO
        text's sha256 is compared; strings, numbers, booleans and None; any other pytree of arrays or
        ``jax.ShapeDtypeStruct``, of which structure, shapes and dtypes are.
      timeout: seconds to wait for the other processes.
      name: what it is about, for messages; the same in every process.

    Raises:
      ValueError: in every process; names the processes that differ, and the first fact in which they do.
      TypeError: ``facts`` are no mapping, or one of them cannot be compared.
      TimeoutError: in every process that arrived; names those that did not.

    Source: torch ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` verifies each collective; one traced program is verified once.

    Example:
      >>> import jax, fdp
      >>> plan = fdp.plan_buckets({"w": jax.ShapeDtypeStruct((3, 4), "float32")})
      >>> fdp.agree({"plan": plan, "schedule": fdp.schedules.ordered()}, timeout=60)
    """
    found = exchange.compare(name, fact_lines(facts), timeout=timeout)
    if found:
        first = exchange.first_difference(found)
        raise ValueError(
            f"expected the same program in every process at {name!r}, but {exchange.these_processes(first.processes)} "
            f"differ{'s' * (len(first.processes) == 1)} from process 0, first in this: process 0 has "
            f"{first.reference!r}, process {first.process} has {first.line!r}. Run the same script with the same "
            "arguments and versions in every process."
        )


def barrier(name: str = "barrier", *, timeout: float = exchange.DEFAULT_TIMEOUT) -> None:
    """Waits until every process is here, or says which did not come. In one process it does nothing.

    Waits for hosts, not for devices: call ``jax.block_until_ready`` before it where that matters.

    Args:
      name: the same in every process.
      timeout: seconds to wait.

    Raises:
      TimeoutError: in every process that arrived; names those that did not, and where they were last seen.

    Source: torch ``monitored_barrier``.

    Example:
      >>> import fdp
      >>> fdp.barrier("data is on every disk", timeout=600)
    """
    exchange.gather(name, "here", timeout=timeout)


def once(*, timeout: float = exchange.DEFAULT_TIMEOUT) -> Callable[..., None]:
    """``ask(name, arguments, facts)``: ``agree`` on ``facts()``, once for each name and shapes of ``arguments``.

    For the front of a compiled function, which a change of shapes compiles anew: ``facts`` may trace and lower, and is
    called in several processes only.
    """
    asked: set[Hashable] = set()

    def ask(name: str, arguments: Any, facts: Callable[[], Mapping[str, Any]]) -> None:
        if exchange.processes() == 1:
            return
        leaves, structure = jax.tree.flatten(arguments)
        shapes = (name, structure, tuple((np.shape(x), jax.typeof(x).dtype) for x in leaves))
        if shapes not in asked:
            found = {"arguments": arguments, **facts()}
            # What says most about a difference first: a program's digest only says that there is one, and the state
            # among the arguments differs whenever the plan does.
            last = {key: isinstance(fact, jax.stages.Lowered) for key, fact in found.items()}
            order = sorted(found, key=lambda key: (last[key], key == "arguments"))
            agree({key: found[key] for key in order}, timeout=timeout, name=name)
            asked.add(shapes)

    return ask


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """What ``agree`` compares, as lines that a message can quote.

    Raises:
      TypeError: ``facts`` are no mapping, or one of them cannot be compared.
    """
    if not isinstance(facts, Mapping):
        raise TypeError(
            f"expected facts by name, got {type(facts).__name__}: pass a dict, for example {{'plan': plan}}."
        )
    always = {
        "jax": jax.__version__,
        "numpy": np.__version__,
        **{name: getattr(jax.config, name) for name in _CONFIG},
    }
    lines: list[str] = []
    for name, fact in {**facts, **always}.items():
        lines += [f"{name}: {line}" for line in _lines_of(name, fact)]
    return lines


def _lines_of(name: str, fact: Any) -> list[str]:
    if isinstance(fact, BucketPlan):
        buckets = [
            f"bucket {i} of {len(fact.buckets)}: {b.dtype.name}, {b.nbytes} bytes, {', '.join(b.paths)}"
            for i, b in enumerate(fact.buckets)
        ]
        return [*buckets, f"fingerprint {fact.fingerprint()}"]
    if isinstance(fact, (Schedule, CommHook, Packing)):
        return [fact.name]
    if isinstance(fact, jax.stages.Lowered):
        return [f"sha256 of its text {hashlib.sha256(fact.as_text().encode()).hexdigest()}"]
    if fact is None or isinstance(fact, (str, bool, int, float)):
        return [repr(fact)]
    for path, leaf in jax.tree_util.tree_leaves_with_path(fact):
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            where = jax.tree_util.keystr(path) or "itself"
            raise TypeError(
                f"expected fact {name!r} to be text, a number, a plan, a schedule, a hook, a packing, a lowered "
                f"program or a tree of arrays, got {leaf!r} of type {type(leaf).__name__} ({where}): pass what of it "
                "decides the program, as text."
            )
    return exchange.describe(fact)
