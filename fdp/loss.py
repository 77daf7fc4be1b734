"""One calling convention for every loss function the step builder accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fdp import compat
from fdp.leaves import path_string

_ALSO_RETURNS = "pass has_aux=True (or has_model_state=True) if it returns more than the loss"

CanonicalLoss = Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Any, Any]]]


def canonical_loss(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool,
    has_model_state: bool,
    has_rng: bool,
    weighted: bool = False,
) -> CanonicalLoss:
    """``loss_fn`` as ``(params, batch, model_state, rng) -> (loss, (weight, model_state, aux))``, checked when traced.

    Args:
      loss_fn: called as ``loss_fn(params, batch)``, with ``model_state=`` and ``rng=`` as keywords where those are
        asked for. Returns ``loss``; ``(loss, aux)``; ``(loss, model_state)``; or ``(loss, model_state, aux)``.
        Weighted, the weight stands behind the loss: ``(loss, weight)``, ``(loss, weight, aux)`` and so on.
      has_aux: whether the last element returned is auxiliary output.
      has_model_state: whether it takes and returns model state.
      has_rng: whether it takes a key.
      weighted: whether the loss is a sum that comes with a weight; the weight is None otherwise.
    """
    returns = ["loss_sum", "weight"] if weighted else ["loss"]
    returns += ["model_state"] * has_model_state + ["aux"] * has_aux
    options = f"has_model_state={has_model_state}, has_aux={has_aux}"
    options += ", weighted=True" if weighted else ""
    form = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"

    def loss(
        params: Any, batch: Any, model_state: Any, rng: Any
    ) -> tuple[jax.Array, tuple[Any, Any, Any]]:
        keywords: dict[str, Any] = {}
        if has_model_state:
            keywords["model_state"] = model_state
        if has_rng:
            keywords["rng"] = rng
        out = _call(loss_fn, params, batch, **keywords)
        if len(returns) > 1 and not (isinstance(out, tuple) and len(out) == len(returns)):
            more = _more_than(out, len(returns), weighted) or "change the options"
            raise TypeError(
                f"expected loss_fn to return {form} ({options}), got {_kind(out)}: return that tuple, or {more}."
            )
        value, *rest = out if len(returns) > 1 else (out,)
        aux = rest.pop() if has_aux else None
        _check_aux(aux)
        new_model_state = _like_the_old(rest.pop(), model_state) if has_model_state else model_state
        weight = _check_weight(rest.pop(), form) if weighted else None
        value = check_scalar_loss(value, form, _more_than(value, 1, weighted) or _ALSO_RETURNS)
        return value, (weight, new_model_state, aux)

    return loss


def check_scalar_loss(
    value: Any, form: str = "loss", about_tuples: str = _ALSO_RETURNS
) -> jax.Array:
    """``value``, if it is a real floating-point scalar.

    Args:
      value: what came as loss.
      form: what the function is to return, for the message.
      about_tuples: what to do where a tuple came.

    Raises:
      TypeError: it is not; the message says what to return instead.
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, float):
        return jnp.asarray(value)
    if shape is None or dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.floating):
        hint = f"return jnp.{'sum' if 'loss_sum' in form else 'mean'}(per_example_loss)"
        if isinstance(value, tuple):
            hint = about_tuples
        raise TypeError(
            f"expected loss_fn to return {form} with a loss that is a floating-point scalar, got {_kind(value)}: "
            f"{hint}."
        )
    return value


def _call(loss_fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What the user's function returns; says more where JAX only says that branches differ in their axes.

    Raises:
      TypeError: one branch of a ``lax.cond`` computes from the batch, the other returns a constant.
    """
    try:
        return loss_fn(*args, **keywords)
    except TypeError as error:
        said = str(error)
        if not (
            "branches must have equal output types" in said
            and "manual axis types do not match" in said
        ):
            raise
        raise TypeError(
            "expected branches of lax.cond and lax.switch in loss_fn that all differ between replicas, got one that "
            "is computed from this replica's batch or parameters and one that is the same everywhere, such as the "
            "constant 0.0: derive the constant from data too, for example 0.0 * x.sum(), or mark it with "
            f'fdp.varying(0.0, axis_name). JAX says: "{said.splitlines()[0]}".'
        ) from error


def _like_the_old(new: Any, old: Any) -> Any:
    """A returned model state, its constants as arrays of the type of the leaves that they take the place of."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return jax.tree.map(jnp.asarray, new)

    def convert(x: Any, before: Any) -> Any:
        dtype = jnp.result_type(before)
        plain = isinstance(x, (bool, int, float, complex))
        keeps = plain and jnp.result_type(before, x) == dtype
        # Sorted: the axes are a set, and every host must trace the same program.
        axes = tuple(sorted(compat.varying_axes(before), key=str))
        return compat.varying(jnp.asarray(x, dtype if keeps else None), axes)

    return jax.tree.map(convert, new, old)


def _check_aux(aux: Any) -> None:
    """Raises TypeError where aux cannot be joined over replicas."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        number = isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype")
        if not number or jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            raise TypeError(
                f"expected aux of numbers, which are averaged or added up over replicas, got {_kind(leaf)} at "
                f"{path_string(path)!r}: leave it out, or return it as model state if it is a key."
            )


def _more_than(out: Any, expected: int, weighted: bool) -> str:
    """What to do about more elements than the options say; empty if there are none."""
    if not isinstance(out, tuple) or len(out) <= expected:
        return ""
    if weighted:
        return _ALSO_RETURNS
    # Weights first: with has_aux=True alone, a sum and its weight would pass, and a mean of sums be trained on.
    return (
        "pass weighted=True to fdp.data_parallel if the loss is a sum and next comes what to divide it by (tokens, "
        "examples); pass has_aux=True (or has_model_state=True) if the loss is a mean already and next comes "
        "something else"
    )


def _check_weight(weight: Any, form: str) -> jax.Array:
    """``weight`` as a floating-point scalar of at least 32 bits: counts of tokens exceed what 16 bits hold."""
    plain = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    dtype = jnp.result_type(weight) if plain or hasattr(weight, "dtype") else None
    floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    whole = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    if dtype is None or not (floating or whole) or jnp.shape(weight) != ():
        raise TypeError(
            f"expected loss_fn to return {form} with a weight that is a real scalar, got {_kind(weight)}: return what "
            "the sum is to be divided by, for example jnp.sum(mask) or the number of examples."
        )
    wide = jnp.promote_types(dtype, jnp.float32) if floating else jnp.result_type(float)
    return jnp.asarray(weight).astype(wide)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return f"{value!r} of type {type(value).__name__}"
