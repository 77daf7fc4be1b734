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

from fdp.loss import check_scalar_loss
from fdp.readiness import Value, read_outputs


class Births(NamedTuple):
    """What a traced gradient says about its leaves, by position among them.

    Attributes:
      order: the one whose gradient is ready first in front.
      zero: those whose gradient is zero by the program.
      unhidden: those whose gradient is ready no earlier than the last matmul of the backward.
    """

    order: tuple[int, ...]
    zero: tuple[int, ...]
    unhidden: tuple[int, ...]

    def at(self, leaves: Sequence[int], others: Sequence[int] = ()) -> Births:
        """The same by leaf index, where position ``i`` is ``leaves[i]``; ``others`` come last in the order."""
        order, zero, unhidden = (tuple(leaves[i] for i in positions) for positions in self)
        return Births((*order, *others), zero, unhidden)


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
    return _births(_trace(loss_fn, params, args, kwargs, has_aux, axis_sizes)).order


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
    return _births(_trace(loss_fn, params, args, kwargs, has_aux, axis_sizes)).zero


def unhidden_leaves(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    axis_sizes: Mapping[Any, int] | None = None,
    **kwargs: Any,
) -> tuple[int, ...]:
    """Indices of the leaves of ``params`` whose reduction no matmul of the backward can hide.

    Their gradients are ready no earlier than the last matmul, convolution or loop with one in it: the first layer's
    kernel, an embedding. ``plan_buckets(..., unhidden=...)`` keeps other gradients from waiting for them. Arguments
    and errors as for ``gradient_ready_order``. Torch has nothing like it: its last bucket is what the cap leaves.
    """
    return _births(_trace(loss_fn, params, args, kwargs, has_aux, axis_sizes)).unhidden


def ready_order(closed_jaxpr: Any, grad_outputs: Sequence[int]) -> tuple[int, ...]:
    """``gradient_ready_order`` of a gradient that is traced already.

    Args:
      closed_jaxpr: as ``jax.make_jaxpr`` returns it.
      grad_outputs: for each leaf, in tree order, which output of the jaxpr is its gradient.

    Returns:
      A permutation of ``range(len(grad_outputs))``.
    """
    return read_births(closed_jaxpr, grad_outputs).order


def read_births(closed_jaxpr: Any, grad_outputs: Sequence[int]) -> Births:
    """All that a gradient that is traced already says; arguments as for ``ready_order``."""
    values = read_outputs(closed_jaxpr)
    return _births([values[position] for position in grad_outputs])


def _births(values: Sequence[Value]) -> Births:
    last = max((value.matmul for value in values), default=0)
    return Births(
        tuple(sorted(range(len(values)), key=lambda index: (values[index].time, -index))),
        tuple(index for index, value in enumerate(values) if value.zero),
        tuple(index for index, value in enumerate(values) if 0 < last <= value.time),
    )


def _trace(
    loss_fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool,
    axis_sizes: Mapping[Any, int] | None,
) -> list[Value]:
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
    values = [Value(0, True)] * count
    for index, value in zip(differentiable, read_outputs(closed), strict=True):
        values[index] = value
    return values


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(
        leaf.dtype if _is_array(leaf) else np.result_type(type(leaf)), jnp.inexact
    )
