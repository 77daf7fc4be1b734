"""In how few bits a value waits without losing any.

Mixed precision computes a gradient in bfloat16 and widens it to the float32 of its parameter at the very end. Until it
is reduced, the narrow form is the same number in half the memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fdp import jaxprs
from fdp.intercept import _ops

_UNCHANGED = frozenset({"copy", "copy_p", "name", "pvary"})


def computed_in(jaxpr: Any, atom: Any) -> np.dtype:
    """The dtype from which ``atom`` of ``jaxpr`` was last widened, or its own.

    Looks through what only moves numbers, and into calls. Every value of ``atom`` is one of the dtype returned, so a
    cast to it and back gives the same bits; where a compiler keeps excess precision between two casts, the first rounds
    it as the program says.
    """
    own = np.dtype(atom.aval.dtype)
    if jaxprs.is_literal(atom):
        return own
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    while atom in makers:
        eqn = makers[atom]
        call = jaxprs.call_body(eqn)
        if call is not None:
            return computed_in(call.jaxpr, call.jaxpr.outvars[eqn.outvars.index(atom)])
        if widens(eqn):
            return np.dtype(eqn.invars[0].aval.dtype)
        if not _ops.is_move(eqn) and jaxprs.primitive_name(eqn) not in _UNCHANGED:
            break
        atom = eqn.invars[0]
    return own


def widens(eqn: Any) -> bool:
    """Whether an equation casts to a floating dtype that has every value of the one it casts from."""
    if jaxprs.primitive_name(eqn) != "convert_element_type":
        return False
    narrow, wide = (np.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (narrow, wide)):
        return False
    less, more = jnp.finfo(narrow), jnp.finfo(wide)
    return (
        narrow.itemsize < wide.itemsize
        and less.nmant <= more.nmant
        and less.maxexp <= more.maxexp
        and less.minexp - less.nmant >= more.minexp - more.nmant
    )
