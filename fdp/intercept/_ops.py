"""Equations that may stand between a loop and a gradient without tying the slices together.

    slice by slice   an elementwise equation, a sum or a move within each slice   done on the slice, then reduced
    moves            the same numbers elsewhere, across slices                    reduced, then done on the whole

The first kind must come before the reduction where it changes the numbers that are summed (a cast, a scale, an added
weight decay term), and gives the same bits per slice as on the whole. The second changes no number, so it commutes
with the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fdp import jaxprs

# All of these accept any shape with unchanged parameters.
_ELEMENTWISE = frozenset(
    "abs add add_any and clamp conj convert_element_type copy copy_p cos div eq exp ge gt imag integer_pow "
    "is_finite le log log1p logistic lt max min mul name ne neg not one_minus_square or pow real reduce_precision "
    "rsqrt select_n sign sin sqrt square sub tanh xor".split()
)
_MOVES = frozenset("broadcast_in_dim reshape rev sharding_constraint squeeze transpose".split())


def is_elementwise(eqn: Any) -> bool:
    """Whether slicing the inputs slices the output, and scalars may take the place of inputs."""
    return jaxprs.primitive_name(eqn) in _ELEMENTWISE


def is_move(eqn: Any) -> bool:
    """Whether the output holds the numbers of the one array input, in other places."""
    arrays = [atom for atom in eqn.invars if not jaxprs.is_literal(atom)]
    return jaxprs.primitive_name(eqn) in _MOVES and len(arrays) == len(eqn.invars) == 1


def is_followed(eqn: Any) -> bool:
    """Whether a loop may be looked for behind this equation."""
    return is_elementwise(eqn) or is_move(eqn) or slice_params(eqn) is not None


def slice_params(eqn: Any) -> dict[str, Any] | None:
    """Parameters with which an equation works on one slice, where the first axis counts slices; None if it cannot."""
    params = dict(eqn.params)
    name = jaxprs.primitive_name(eqn)
    if name in _ELEMENTWISE:
        return params
    shape = getattr(eqn.invars[0].aval, "shape", ()) if eqn.invars else ()
    if not shape or len(eqn.invars) != 1:
        return None
    if name == "reduce_sum" and 0 not in params["axes"] and _is_trivial(params["out_sharding"]):
        return params | {"axes": _less_one(params["axes"]), "out_sharding": None}
    if name == "transpose" and params["permutation"][0] == 0:
        return params | {"permutation": _less_one(params["permutation"][1:])}
    if name == "squeeze" and 0 not in params["dimensions"]:
        return params | {"dimensions": _less_one(params["dimensions"])}
    if (
        name == "reshape"
        and params["new_sizes"][:1] == shape[:1]
        and params["dimensions"] is None
        and _is_trivial(params["sharding"])
    ):
        return params | {"new_sizes": params["new_sizes"][1:], "sharding": None}
    if name == "broadcast_in_dim" and params["broadcast_dimensions"][:1] == (0,):
        # Only what adds axes of size one: copies are better made after the reduction than sent.
        grows = math.prod(params["shape"]) != math.prod(shape)
        if params["shape"][0] == shape[0] and not grows and _is_trivial(params["sharding"]):
            dimensions = _less_one(params["broadcast_dimensions"][1:])
            more = {"shape": params["shape"][1:], "broadcast_dimensions": dimensions}
            return params | more | {"sharding": None}
    return None


def apply_to_slice(eqn: Any, inputs: Sequence[Any]) -> Any:
    """The equation on one slice. ``inputs`` are slices, or scalars that are the same for every slice."""
    return eqn.primitive.bind(*inputs, **(slice_params(eqn) or {}))


def apply_to_whole(eqn: Any, whole: Any) -> Any:
    """A move on reduced values: the same shape as traced, but perhaps another dtype and type of replication."""
    return eqn.primitive.bind(whole, **eqn.params)


def _less_one(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis - 1 for axis in axes)


def _is_trivial(sharding: Any) -> bool:
    """Autodiff writes down that an array is sharded along no axis; then its slices are not either."""
    return sharding is None or all(axis is None for axis in sharding.spec)
