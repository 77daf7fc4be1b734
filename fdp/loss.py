"""One calling convention for every loss function the step builder accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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
        out = loss_fn(params, batch, **keywords)
        if len(returns) > 1 and not (isinstance(out, tuple) and len(out) == len(returns)):
            raise TypeError(
                f"expected loss_fn to return {form} ({options}), got {_kind(out)}: return that tuple, or change the "
                "options."
            )
        value, *rest = out if len(returns) > 1 else (out,)
        aux = rest.pop() if has_aux else None
        new_model_state = rest.pop() if has_model_state else model_state
        weight = _check_weight(rest.pop(), form) if weighted else None
        return check_scalar_loss(value, form), (weight, new_model_state, aux)

    return loss


def check_scalar_loss(value: Any, form: str = "loss") -> jax.Array:
    """``value``, if it is a real floating-point scalar.

    Raises:
      TypeError: it is not; the message says what to return instead.
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, float):
        return jnp.asarray(value)
    if shape is None or dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.floating):
        hint = "return jnp.mean(per_example_loss)"
        if isinstance(value, tuple):
            hint = "pass has_aux=True (or has_model_state=True) if it returns more than the loss"
        raise TypeError(
            f"expected loss_fn to return {form} with a loss that is a floating-point scalar, got {_kind(value)}: "
            f"{hint}."
        )
    return value


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
