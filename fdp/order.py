"""The order in which gradients become ready, read from the traced gradient before the first step.

PyTorch has to run one step, watch its hooks fire and rebuild its buckets. A JAX gradient is a jaxpr: a list of
equations in an order that autodiff chose, last layer first. A gradient is ready at the last *expensive* equation it
depends on (a matmul, a convolution, a reduction, a loop):

    equation                     clock   what becomes ready
    dy   = ...                     7
    dW2  = dot_general dy h1       8     W2
    dh1  = dot_general dy W2       9
    dW1  = dot_general dh1 x      10     W1
    g2   = convert dW2             8     (cheap equations are ready with their inputs, wherever they stand)

Looking through cheap equations matters: mixed precision casts all parameters in one place, so all casts of the
gradients stand together at the end, in an order that says nothing. Tree order says nothing either: ``jax.tree`` sorts
keys as strings, ``layer_10`` before ``layer_2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdp import jaxprs
from fdp.loss import check_scalar_loss

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


class _Value(NamedTuple):
    """What is known of a value: when it is ready, and whether it is zero whatever the inputs are."""

    time: int
    zero: bool


def gradient_ready_order(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    axis_sizes: Mapping[Any, int] | None = None,
    **kwargs: Any,
) -> tuple[int, ...]:
    """Indices of the leaves of ``params``, the one whose gradient is ready first in front.

    For ``plan_buckets(params, order=...)``. Looks through nested ``jit``, ``remat`` and custom derivatives. All
    gradients that leave a ``lax.scan``, ``while_loop`` or ``cond`` are born together; a shared leaf is ready at its
    last accumulation. Ties are in reverse tree order. Leaves without a gradient to wait for come first, where the
    wire is idle: ``unused_leaves`` names them.

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)``, a floating-point scalar, or a pair of it and anything with
        ``has_aux``.
      params: parameters; ``jax.ShapeDtypeStruct`` leaves are as good as arrays.
      *args: further arguments, likewise. Values without shape and dtype are passed on as they are.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      axis_sizes: for a loss with collectives: its mesh axes and their sizes, ``{"data": 8}``.
      **kwargs: keyword arguments of ``loss_fn``.

    Returns:
      A permutation of ``range(number of leaves)``. Nothing is computed or allocated.

    Raises:
      ValueError: ``params`` has no leaves.
      TypeError: the loss is no floating-point scalar.
      NameError: the loss uses a mesh axis that ``axis_sizes`` does not have.

    Source: paper section 6 (gradient order prediction), torch ``Reducer::rebuild_buckets``.
    """
    times = [value.time for value in _trace(loss_fn, params, args, kwargs, has_aux, axis_sizes)]
    return _by_time(times)


def unused_leaves(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    axis_sizes: Mapping[Any, int] | None = None,
    **kwargs: Any,
) -> tuple[int, ...]:
    """Indices of the leaves of ``params`` whose gradient is zero by the program, for any data.

    Leaves the loss never reads, reads only through ``stop_gradient`` or only as integers. JAX gives them exact zeros,
    never "no gradient": momentum and weight decay still move them, and reducing them sends zeros. Arguments, errors
    and source as for ``gradient_ready_order``; torch finds these at run time (``find_unused_parameters``).
    """
    values = _trace(loss_fn, params, args, kwargs, has_aux, axis_sizes)
    return tuple(index for index, value in enumerate(values) if value.zero)


def ready_order(closed_jaxpr: Any, grad_outputs: Sequence[int]) -> tuple[int, ...]:
    """``gradient_ready_order`` of a gradient that is traced already.

    Args:
      closed_jaxpr: as ``jax.make_jaxpr`` returns it.
      grad_outputs: for each leaf, in tree order, which output of the jaxpr is its gradient.

    Returns:
      A permutation of ``range(len(grad_outputs))``.
    """
    return read_gradients(closed_jaxpr, grad_outputs)[0]


def read_gradients(
    closed_jaxpr: Any, grad_outputs: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``ready_order``, and which of the leaves have a gradient that is zero by the program."""
    values = _outputs(closed_jaxpr)
    gradients = [values[position] for position in grad_outputs]
    zero = tuple(index for index, value in enumerate(gradients) if value.zero)
    return _by_time([value.time for value in gradients]), zero


def _by_time(times: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(times)), key=lambda index: (times[index], -index)))


def _trace(
    loss_fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool,
    axis_sizes: Mapping[Any, int] | None,
) -> list[_Value]:
    """What is known of each leaf's gradient. Leaves that cannot have one count as zero."""
    count = len(jax.tree.leaves(params))
    if not count:
        raise ValueError(
            f"expected params with at least one leaf, got {params!r}: pass the parameters, for flax "
            'model.init(...)["params"].'
        )
    given, treedef = jax.tree.flatten((params, args, kwargs))
    differentiable = [index for index in range(count) if _has_gradient(given[index])]
    chosen = set(differentiable)
    others = [i for i, value in enumerate(given) if _is_array(value) and i not in chosen]

    def loss(leaves: list[Any], arrays: list[Any]) -> Any:
        inputs = list(given)
        for index, value in zip(differentiable + others, leaves + arrays, strict=True):
            inputs[index] = value
        the_params, positional, keywords = jax.tree.unflatten(treedef, inputs)
        out = loss_fn(the_params, *positional, **keywords)
        if not has_aux:
            return check_scalar_loss(out)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"expected loss_fn to return (loss, aux) as has_aux=True says, got "
                f"{type(out).__name__}: return that pair, or leave has_aux out."
            )
        return check_scalar_loss(out[0], "(loss, aux)")

    try:
        trace = jax.make_jaxpr(jax.grad(loss), axis_env=list((axis_sizes or {}).items()))
        closed = trace([given[i] for i in differentiable], [given[i] for i in others])
    except NameError as error:
        if "axis" not in str(error):
            raise
        raise NameError(
            "expected to know every mesh axis that loss_fn reduces over: pass their sizes, for example "
            f'axis_sizes={{"data": 8}}. JAX says: {error}'
        ) from error
    values = [_Value(0, True)] * count
    for index, value in zip(differentiable, _outputs(closed), strict=True):
        values[index] = value
    return values


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(
        leaf.dtype if _is_array(leaf) else np.result_type(type(leaf)), jnp.inexact
    )


def _outputs(closed_jaxpr: Any) -> list[_Value]:
    body = jaxprs.body_of(closed_jaxpr)
    return _walk(body, [_Value(0, False)] * len(body.jaxpr.invars), [0])


def _walk(body: jaxprs.Body, inputs: Sequence[_Value], clock: list[int]) -> list[_Value]:
    """Runs through a jaxpr, bodies of calls included, and says of each output what is known.

    ``clock`` holds one number: the expensive equations so far.
    """
    known: dict[Any, _Value] = dict.fromkeys(body.jaxpr.constvars, _Value(0, False))
    known.update(zip(body.jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Value:
        return _Value(0, bool(np.all(atom.val == 0))) if jaxprs.is_literal(atom) else known[atom]

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
            results = [_Value(0 if zero else time, zero) for zero in zeros]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.jaxpr.outvars]


def _zeros(eqn: Any, given: Sequence[_Value]) -> list[bool]:
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
        inputs = [_Value(0, z) for z in (*consts, *carry, *xs)]
        out = [value.zero for value in _walk(scan.body, inputs, [0])]
        kept = [
            before and after for before, after in zip(carry, out[: scan.num_carry], strict=True)
        ]
        if kept == carry:
            return [*carry, *out[scan.num_carry :]]
        carry = kept
