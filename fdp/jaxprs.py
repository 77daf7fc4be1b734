"""Jaxprs, read the same way on every supported JAX.

jax 0.10 has open and closed jaxprs and counts a scan's constants and carries in its parameters; jax 0.12 has one
kind of jaxpr and keeps the counts in private structures. Everything here goes by what both have: variables,
equations, shapes. Nothing private is imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import core, lax
from jax.extend.core import DropVar, Literal

from fdp import compat

# Equations that stand for the body they carry, run once: looking through them changes nothing.
_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "checkpoint",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    }
)
_REMATS = frozenset({"checkpoint", "remat2"})


class Body(NamedTuple):
    """A jaxpr inside an equation; its inputs and outputs are the equation's, one to one.

    Attributes:
      jaxpr: the body.
      consts: values of the body's constants.
    """

    jaxpr: Any
    consts: tuple[Any, ...]


class Scan(NamedTuple):
    """What a ``lax.scan`` equation says.

    Attributes:
      body: one iteration: ``(*consts, *carry, *xs slices) -> (*carry, *ys slices)``.
      num_consts: inputs that are the same in every iteration.
      num_carry: values handed from one iteration to the next.
      length: iterations.
      reverse: whether it runs from the last slice to the first.
      unroll: iterations per trip of the compiled loop.
    """

    body: Body
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def body_of(jaxpr: Any) -> Body:
    """An open or closed jaxpr as a ``Body``."""
    return Body(jaxpr, tuple(getattr(jaxpr, "consts", ())))


def primitive_name(eqn: Any) -> str:
    """Name of the primitive an equation applies, such as ``"dot_general"``."""
    return eqn.primitive.name


def call_body(eqn: Any) -> Body | None:
    """The body of a call-like equation (jit, remat, custom derivatives, ...); None for any other."""
    if primitive_name(eqn) not in _CALLS:
        return None
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))
    if (
        jaxpr is None
        or len(jaxpr.invars) != len(eqn.invars)
        or len(jaxpr.outvars) != len(eqn.outvars)
    ):
        return None
    return body_of(jaxpr)


def is_remat(eqn: Any) -> bool:
    """Whether an equation recomputes what ``jax.checkpoint`` did not keep."""
    return primitive_name(eqn) in _REMATS


def scan_of(eqn: Any) -> Scan | None:
    """Reads a ``lax.scan`` equation; None for any other.

    Carries come first among the outputs and have the shape the body gives them; stacked outputs have one more
    dimension, and the same holds for the inputs. So shapes alone tell the three kinds apart.
    """
    if primitive_name(eqn) != "scan":
        return None
    body = body_of(eqn.params["jaxpr"])
    carried = [_ndim(a) == _ndim(b) for a, b in zip(eqn.outvars, body.jaxpr.outvars, strict=True)]
    whole = [_ndim(a) == _ndim(b) for a, b in zip(eqn.invars, body.jaxpr.invars, strict=True)]
    return Scan(
        body=body,
        num_consts=sum(whole) - sum(carried),
        num_carry=sum(carried),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=int(eqn.params["unroll"]),
    )


def branches_of(eqn: Any) -> tuple[Body, ...]:
    """The branches of a ``lax.cond`` or ``lax.switch`` equation; empty for any other."""
    if primitive_name(eqn) != "cond":
        return ()
    return tuple(body_of(branch) for branch in eqn.params["branches"])


def bodies_of(eqn: Any) -> tuple[Any, ...]:
    """Every open jaxpr in the parameters of an equation: of calls, loops, branches, kernels."""
    held = [
        part
        for value in eqn.params.values()
        for part in (value if isinstance(value, (list, tuple)) else [value])
    ]
    plain = [getattr(part, "jaxpr", part) for part in held]
    return tuple(part for part in plain if hasattr(part, "eqns"))


def is_dropped(var: Any) -> bool:
    """Whether nobody reads this output of an equation."""
    return isinstance(var, DropVar)


def is_literal(atom: Any) -> bool:
    """Whether this input of an equation is written into it as a number."""
    return isinstance(atom, Literal)


def nbytes(aval: Any) -> int:
    """Bytes of an array of this abstract value."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def run_eqn(jaxpr: Any, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Applies one equation of ``jaxpr`` to values under the current trace; None for outputs nobody reads.

    Goes through a jaxpr of that one equation, so that JAX itself restores source lines, names and the context
    the equation was traced in, whatever this release keeps there.
    """
    reads = [atom for atom in eqn.invars if not is_literal(atom)]
    kept = [var for var in eqn.outvars if not is_dropped(var)]
    plain = getattr(jaxpr, "jaxpr", jaxpr)
    single = plain.replace(
        constvars=[], invars=list(dict.fromkeys(reads)), outvars=kept, eqns=[eqn]
    )
    given = [value for atom, value in zip(eqn.invars, inputs, strict=True) if not is_literal(atom)]
    values = iter(core.eval_jaxpr(single, (), *dict(zip(reads, given, strict=True)).values()))
    return [None if is_dropped(var) else next(values) for var in eqn.outvars]


def run_body(body: Body, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates a body on values under the current trace."""
    outputs = core.eval_jaxpr(getattr(body.jaxpr, "jaxpr", body.jaxpr), body.consts, *inputs)
    return [
        as_array(x, atom.aval) if is_literal(atom) else x
        for atom, x in zip(body.jaxpr.outvars, outputs, strict=True)
    ]


def as_array(x: Any, aval: Any) -> Any:
    """A literal's value as an array of type ``aval``.

    JAX keeps the constant that a function returns in types of its own, which are no arrays.
    """
    return as_varying_as(jnp.asarray(x, aval.dtype), aval)


def as_varying_as(x: Any, aval: Any) -> Any:
    """``x``, marked as differing per replica wherever values of type ``aval`` may."""
    missing = tuple(compat.aval_varying_axes(aval) - compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _ndim(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))
