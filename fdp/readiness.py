"""When each value of a jaxpr is ready, and whether it is zero whatever the inputs are.

See `fdp.order` for what a clock is here, and why cheap equations do not move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fdp import jaxprs

# Equations that move or rescale values at memory speed and that XLA fuses into their neighbours.
_CHEAP = frozenset(
    "add add_any and abs broadcast_in_dim clamp concatenate conj convert_element_type copy copy_p cos div eq exp "
    "expand_dims ge gt imag integer_pow iota is_finite le log log1p logistic lt max min mul name ne neg not "
    "one_minus_square optimization_barrier or pad pcast pow pvary real reduce_precision reshape reshard rev rsqrt "
    "select_n sharding_constraint sign sin slice sqrt square squeeze stop_gradient sub tanh transpose xor".split()
)
# Zero in, zero out: for these one zero input is enough, ...
_ANNIHILATED = frozenset({"mul", "dot_general", "conv_general_dilated"})
# ... for these the first input decides (a divisor or a broadcast shape does not), ...
_LINEAR = frozenset(
    "broadcast_in_dim conj convert_element_type copy copy_p cumsum div dynamic_slice expand_dims gather imag name neg "
    "pcast psum psum_invariant pvary real reduce_precision reduce_sum reshape reshard rev sharding_constraint slice "
    "squeeze transpose".split()
)
# ... and for these all inputs must be zero.
_SUMS = frozenset({"add", "add_any", "concatenate", "pad", "sub"})


# Equations that keep the device busy long enough to hide a reduction behind.
_MATMULS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"})


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
      time: when it is ready, in expensive equations since the start.
      zero: whether it is zero whatever the inputs are.
      matmul: the time of the last matmul, convolution or loop with one in it that it depends on.
    """

    time: int
    zero: bool
    matmul: int = 0


def read_outputs(closed_jaxpr: Any) -> list[Value]:
    """What is known of each output of a jaxpr as ``jax.make_jaxpr`` returns it; its inputs are ready at time 0."""
    body = jaxprs.body_of(closed_jaxpr)
    return _walk(body, [Value(0, False)] * len(body.jaxpr.invars), [0])


def _walk(body: jaxprs.Body, inputs: Sequence[Value], clock: list[int]) -> list[Value]:
    """Runs through a jaxpr, bodies of calls included, and says of each output what is known.

    ``clock`` holds one number: the expensive equations so far.
    """
    known: dict[Any, Value] = dict.fromkeys(body.jaxpr.constvars, Value(0, False))
    known.update(zip(body.jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Value:
        return Value(0, bool(np.all(atom.val == 0))) if jaxprs.is_literal(atom) else known[atom]

    for eqn in body.jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        call = jaxprs.call_body(eqn)
        if call is not None:
            results = _walk(call, given, clock)
        else:
            zeros = _zeros(eqn, given)
            if jaxprs.primitive_name(eqn) in _CHEAP or all(zeros):
                time = max((value.time for value in given), default=0)
            else:
                clock[0] += 1
                time = clock[0]
            matmul = max((value.matmul for value in given), default=0)
            matmul = time if _holds_matmul(eqn) else matmul
            results = [Value(0, True) if zero else Value(time, False, matmul) for zero in zeros]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.jaxpr.outvars]


def _holds_matmul(eqn: Any) -> bool:
    return jaxprs.primitive_name(eqn) in _MATMULS or any(
        _holds_matmul(inner) for body in jaxprs.bodies_of(eqn) for inner in body.eqns
    )


def _zeros(eqn: Any, given: Sequence[Value]) -> list[bool]:
    """For each output of an equation that is no call: whether it is zero by the program."""
    name = jaxprs.primitive_name(eqn)
    zero = [value.zero for value in given]
    if name in _ANNIHILATED:
        return [any(zero)]
    if name in _LINEAR and len(eqn.outvars) == 1:
        return [zero[0]]
    if name in _SUMS:
        return [all(zero)]
    if name == "select_n":
        return [all(zero[1:])]
    scan = jaxprs.scan_of(eqn)
    if scan is not None:
        return _scan_zeros(scan, zero)
    branches = jaxprs.branches_of(eqn)
    if branches:
        outcomes = [[v.zero for v in _walk(b, given[1:], [0])] for b in branches]
        return [all(column) for column in zip(*outcomes, strict=True)]
    return [False] * len(eqn.outvars)


def _scan_zeros(scan: jaxprs.Scan, zero: Sequence[bool]) -> list[bool]:
    """A carry stays zero if it starts as zero and one iteration keeps it so; repeated until that holds."""
    first = scan.num_consts
    consts, carry, xs = (
        zero[:first],
        list(zero[first : first + scan.num_carry]),
        zero[first + scan.num_carry :],
    )
    while True:
        inputs = [Value(0, z) for z in (*consts, *carry, *xs)]
        out = [value.zero for value in _walk(scan.body, inputs, [0])]
        kept = [
            before and after for before, after in zip(carry, out[: scan.num_carry], strict=True)
        ]
        if kept == carry:
            return [*carry, *out[scan.num_carry :]]
        carry = kept
