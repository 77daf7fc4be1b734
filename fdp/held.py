"""Runs a function whose collectives wait: what they read is held back where they read it.

Holding back the function's arguments would give the same order. But then what it does before it communicates
(dividing, casting to the wire's type) waits too, and the array that crosses the axis is one that nobody outside of the
function has in hand, so that nobody could see to its memory (``dependency.tie``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fdp import jaxprs

Hold = Callable[[tuple[jax.Array, ...]], Sequence[jax.Array]]

# Have a named axis among their parameters, and communicate nothing.
_LOCAL = frozenset({"axis_index", "pvary", "pcast"})


def run(function: Callable[..., Any], args: Sequence[Any], hold: Hold) -> Any:
    """``function(*args)``, but each collective reads ``hold`` of what it would read.

    Args:
      function: pure; traced once. What it calls (``jit``, loops, branches) is held back as a whole if there is a
        collective inside.
      args: pytrees of arrays.
      hold: arrays -> arrays of the same types, called once for each collective.

    Returns:
      What ``function`` returns.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    body = jaxprs.body_of(closed)
    plain = getattr(closed, "jaxpr", closed)
    values: dict[Any, Any] = dict(zip(plain.constvars, body.consts, strict=True))
    values.update(zip(plain.invars, jax.tree.leaves(tuple(args)), strict=True))

    def read(atom: Any) -> Any:
        return jaxprs.as_array(atom.val, atom.aval) if jaxprs.is_literal(atom) else values[atom]

    for eqn in plain.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if _communicates(eqn):
            arrays = [i for i, atom in enumerate(eqn.invars) if not jaxprs.is_literal(atom)]
            held = hold(tuple(inputs[i] for i in arrays))
            inputs = [dict(zip(arrays, held, strict=True)).get(i, x) for i, x in enumerate(inputs)]
        values.update(zip(eqn.outvars, jaxprs.run_eqn(plain, eqn, inputs), strict=True))
    return jax.tree.unflatten(jax.tree.structure(shapes), [read(atom) for atom in plain.outvars])


def _communicates(eqn: Any) -> bool:
    """Whether an equation is a collective, or has one in what it calls."""
    axes = eqn.params.get("axes", ())
    # jnp.sum has axes too, but they are numbers; a mesh axis may be named by anything.
    by_name = [x for x in (axes if isinstance(axes, tuple) else ()) if not isinstance(x, int)]
    if by_name or eqn.params.get("axis_name") is not None:
        return jaxprs.primitive_name(eqn) not in _LOCAL
    inside = jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")
    )
    return any(
        _communicates(inner)
        for x in inside
        for inner in getattr(getattr(x, "jaxpr", x), "eqns", ())
    )
