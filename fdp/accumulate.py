r"""Several microbatches, one reduction (paper section 3.2.4, ``no_sync``).

    microbatch      0     1     2   |     3
                 \__ lax.scan, local sums __/|  outside the loop: its gradients are born one by one, in ready
                                       order, so that their reduction can overlap this backward pass

Under automatic sharding XLA reduces every microbatch; here nothing inside the loop communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from fdp import compat
from fdp.leaves import path_string

CarryGradFn = Callable[[Any, Any, Any, Any], tuple[tuple[Any, Any, Any], Any]]


@runtime_checkable
class Reducing(Protocol):
    """A gradient function that reduces, and can do so with another one inside: what ``fdp.value_and_grad`` returns."""

    @property
    def local(self) -> Callable[..., Any]:
        """The gradient function without the reduction."""
        ...

    def with_local(self, local: Callable[..., Any]) -> Callable[..., Any]:
        """The reduction of another gradient function."""
        ...


def accumulate(
    value_and_grad_fn: Callable[..., Any],
    num_microbatches: int,
    *,
    has_aux: bool = False,
    op: str = "mean",
    dtype: Any = None,
) -> Callable[..., Any]:
    """Makes a gradient function run its batch in ``num_microbatches`` slices, one after the other.

    ``accumulate(jax.value_and_grad(loss_fn), k)`` called with a batch of ``k * b`` examples returns what
    ``jax.value_and_grad(loss_fn)`` returns for all of them at once, for a loss that is a mean over examples, with the
    activation memory of ``b``. It communicates nothing; reduce its result once.

    Args:
      value_and_grad_fn: ``(params, batch, **keywords) -> (value, grads)``, or ``((value, aux), grads)``.
      num_microbatches: k, at least 1.
      has_aux: whether the function returns aux.
      op: ``"mean"`` averages values and gradients over microbatches (a loss that is a mean), ``"sum"`` adds them
        (a loss that is a sum; also what torch's ``no_sync`` does).
      dtype: dtype of the local sums, for example float32 for bfloat16 gradients; the gradients' own if not given.
        Complex gradients keep their own. The result is cast back to the gradients' dtype. Values are always added up
        in 32 bits or more, and cast back to their own.

    Returns:
      A function of the same signature. Every batch leaf has shape ``[k * b, ...]``; aux leaves come back stacked,
      ``[k, ...]``. A keyword ``rng`` is folded with the number of the microbatch; all other keywords pass through.

    Raises:
      ValueError: ``num_microbatches`` is less than 1, ``op`` is unknown, or a batch leaf does not divide.
      TypeError: ``num_microbatches`` is no integer, ``dtype`` is not floating-point, or the function returns something
        else than ``has_aux`` says.

    Example:
      >>> import jax, jax.numpy as jnp, fdp
      >>> loss = lambda w, x: jnp.mean((w * x) ** 2)
      >>> value, grad = fdp.accumulate(jax.value_and_grad(loss), 4)(2.0, jnp.arange(8.0))
      >>> float(value), float(grad)
      (70.0, 70.0)
    """
    check_num_microbatches(num_microbatches)
    if op not in ("mean", "sum"):
        raise ValueError(f'expected op to be "mean" or "sum", got {op!r}.')
    _check_dtype(dtype)
    if isinstance(value_and_grad_fn, Reducing):
        # fdp.value_and_grad: accumulate what it does before it reduces, then reduce once.
        local = accumulate(
            value_and_grad_fn.local, num_microbatches, has_aux=has_aux, op=op, dtype=dtype
        )
        return value_and_grad_fn.with_local(local)

    def accumulated(params: Any, batch: Any, **keywords: Any) -> Any:
        def grad_fn(
            params: Any, microbatch: Any, carry: Any, rng: Any
        ) -> tuple[tuple[Any, Any, Any], Any]:
            extra = keywords if rng is None else {**keywords, "rng": rng}
            value, grads = value_and_grad_fn(params, microbatch, **extra)
            value, aux = _split_aux(value, has_aux)
            return (value, aux, carry), grads

        (value, aux, _), grads = accumulate_with_carry(
            grad_fn, num_microbatches, op=op, dtype=dtype
        )(params, batch, (), keywords.get("rng"))
        return ((value, aux) if has_aux else value), grads

    return accumulated


def accumulate_with_carry(
    grad_fn: CarryGradFn, num_microbatches: int, *, op: str, dtype: Any
) -> CarryGradFn:
    """``accumulate`` for functions ``(params, batch, carry, rng) -> ((value, aux, carry), grads)``.

    The carry (model state) goes from one microbatch to the next; ``rng`` may be None.
    """
    _check_dtype(dtype)
    if num_microbatches == 1:

        def single(
            params: Any, batch: Any, carry: Any, rng: Any
        ) -> tuple[tuple[Any, Any, Any], Any]:
            (value, aux, carry), grads = grad_fn(params, batch, carry, _fold(rng, 0))
            return (value, jax.tree.map(lambda x: jnp.asarray(x)[None], aux), carry), grads

        return single

    def accumulated(
        params: Any, batch: Any, carry: Any, rng: Any
    ) -> tuple[tuple[Any, Any, Any], Any]:
        batches = split_batch(batch, num_microbatches)
        # jit only so that the scan body and the last microbatch share one trace of the user's function.
        once = jax.jit(grad_fn, inline=True)
        last = num_microbatches - 1
        _, out_avals = _trace_shapes(once, params, _index(batches, 0), carry, _fold(rng, 0))
        (value_aval, _, carry_avals), grad_avals = out_avals
        # In 16 bits, a sum of many values stands still once a further one is less than half of its last digit.
        total = _zeros(value_aval, None)
        if jnp.issubdtype(total.dtype, jnp.inexact):
            total = total.astype(jnp.promote_types(total.dtype, jnp.float32))
        # The float0 "gradient" of an integer (allow_int=True) has nothing to add up: None stands for its sum.
        sums = jax.tree.map(
            lambda x: None if x.dtype == jax.dtypes.float0 else _zeros(x, dtype), grad_avals
        )
        carry = jax.tree.map(_match_varying, carry, carry_avals)

        def body(loop: Any, scanned: Any) -> tuple[Any, Any]:
            carry, total, sums = loop
            index, microbatch = scanned
            (value, aux, carry), grads = once(params, microbatch, carry, _fold(rng, index))
            return (carry, _add(total, value), _map_sums(_add, sums, grads)), aux

        scanned = (jnp.arange(last), _index(batches, slice(0, last)))
        (carry, total, sums), aux = lax.scan(body, (carry, total, sums), scanned)
        (value, last_aux, carry), grads = once(
            params, _index(batches, last), carry, _fold(rng, last)
        )
        aux = jax.tree.map(lambda many, one: jnp.concatenate([many, one[None]]), aux, last_aux)
        divide_by = num_microbatches if op == "mean" else 1
        grads = _map_sums(
            lambda s, g: g if s is None else ((s + g) / divide_by).astype(g.dtype), sums, grads
        )
        value = _add(total, value) / divide_by
        if jnp.issubdtype(value_aval.dtype, jnp.inexact):
            value = value.astype(value_aval.dtype)
        return (value, aux, carry), grads

    return accumulated


def check_num_microbatches(count: Any) -> None:
    """Raises unless ``count`` is a whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            f"expected num_microbatches to be a whole number, got {count!r} of type {type(count).__name__}."
        )
    if count < 1:
        raise ValueError(
            f"expected num_microbatches to be at least 1, got {count}: 1 does not accumulate."
        )


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"expected the dtype of the sums to be floating-point, got {dtype!r}: float32 suits bfloat16 and float16 "
            "gradients, None keeps the gradients' own."
        )


def split_batch(batch: Any, parts: int) -> Any:
    """Every leaf ``[parts * b, ...]`` as ``[parts, b, ...]``.

    Raises:
      ValueError: a leaf has no leading axis, or one that does not divide; the message names it.
    """

    def split(path: Any, x: Any) -> jax.Array:
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] % parts:
            raise ValueError(
                f"expected batch leaf {path_string(path)!r} to have a leading axis that divides by "
                f"num_microbatches = {parts}, got shape {jnp.shape(x)}."
            )
        return jnp.reshape(x, (parts, jnp.shape(x)[0] // parts, *jnp.shape(x)[1:]))

    return jax.tree_util.tree_map_with_path(split, batch)


def _trace_shapes(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Abstract outputs of ``fn``, varying axes included (``jax.eval_shape`` forgets them on some versions)."""
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return jaxpr, jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.out_avals)


def _split_aux(value: Any, has_aux: bool) -> tuple[Any, Any]:
    pair = isinstance(value, tuple) and len(value) == 2
    if has_aux and not pair:
        raise TypeError(
            f"expected value_and_grad_fn to return ((value, aux), grads), as has_aux=True says, got {value!r} in place "
            "of (value, aux): pass has_aux=True to jax.value_and_grad too, or to neither."
        )
    if not has_aux and isinstance(value, tuple):
        raise TypeError(
            f"expected value_and_grad_fn to return (value, grads), got a tuple of {len(value)} as value: pass "
            "has_aux=True to accumulate too."
        )
    return value if has_aux else (value, None)


def _zeros(aval: Any, dtype: Any) -> jax.Array:
    own = dtype is None or jnp.issubdtype(aval.dtype, jnp.complexfloating)
    return _match_varying(jnp.zeros(aval.shape, aval.dtype if own else dtype), aval)


def _match_varying(x: Any, aval: Any) -> Any:
    # Sorted: the axes are a set, and every host must trace the same program.
    axes = tuple(sorted(compat.aval_varying_axes(aval) - compat.varying_axes(x), key=str))
    return lax.pcast(x, axes, to="varying") if axes else x


def _map_sums(fn: Callable[[Any, Any], Any], sums: Any, grads: Any) -> Any:
    return jax.tree.map(fn, sums, grads, is_leaf=lambda x: x is None)


def _add(total: Any, x: Any) -> Any:
    return None if total is None else total + x.astype(total.dtype)


def _index(tree: Any, at: Any) -> Any:
    return jax.tree.map(lambda x: x[at], tree)


def _fold(rng: Any, index: Any) -> Any:
    return None if rng is None else jax.random.fold_in(rng, index)
