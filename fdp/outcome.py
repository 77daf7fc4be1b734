"""What a share of the batch came to, besides gradients: loss, weight, use, aux, model state.

Without weights, a loss is a mean, and so is the mean of equal shares. With weights it is a sum that comes with what it
is to be divided by (tokens, examples), and everything stays a sum until the end:

    loss = sum over replicas and microbatches of loss_sum  /  sum over replicas and microbatches of weight

Gradients follow the same rule, but cross as means, which cannot overflow where the true mean does not; multiplied
afterwards by replicas / total weight they are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fdp import scalars
from fdp.compat import AxisName


class Outcome(NamedTuple):
    """Everything but gradients.

    Attributes:
      loss: mean over microbatches; with weights the sum.
      weight: floating scalar of at least 32 bits; None without weights.
      held_weight: weight of what ``no_sync_step`` held back; None without.
      use: float32 ``[trainable leaves]``; None unless asked for, see ``fdp.used``.
      aux: floating leaves like the loss, the others added up.
      model_state: after the last microbatch.
    """

    loss: jax.Array
    weight: Any
    held_weight: Any
    use: Any
    aux: Any
    model_state: Any

    @property
    def gradient_weight(self) -> Any:
        """Weight of what is in the gradients: this step's, and what was held back; None without weights."""
        return self.weight if self.held_weight is None else self.weight + self.held_weight


def of_microbatches(loss: jax.Array, weights: Any, use: Any, aux: Any, model_state: Any) -> Outcome:
    """Joins microbatches: ``weights`` and the leaves of ``aux`` are stacked, ``[microbatches, ...]``."""
    if weights is None:
        joined = jax.tree.map(scalars.over_microbatches, aux)
        return Outcome(loss, None, None, use, joined, model_state)
    joined = jax.tree.map(
        lambda x: jnp.sum(x, 0) if _is_floating(x) else scalars.over_microbatches(x), aux
    )
    return Outcome(loss, jnp.sum(weights), None, use, joined, model_state)


def over_replicas(
    outcome: Outcome, policies: Any, *, op: str, axis_name: AxisName, size: int
) -> Outcome:
    """One small reduction; with weights the result is divided by them.

    Args:
      outcome: this replica's.
      policies: for every leaf of ``model_state`` ``"mean"``, ``"max"`` or ``"first"``. With weights, a mean counts each
        replica by the weight of what its state has seen.
      op: ``"mean"`` or ``"sum"``, for a loss without weights.
      axis_name: mesh axis or axes.
      size: number of replicas.
    """
    if outcome.weight is None:
        rules = jax.tree.map(scalars.mean_or_sum, outcome.aux)
        how = Outcome(op, None, None, _sum_of(outcome.use), rules, policies)  # pyright: ignore[reportArgumentType]
        return scalars.reduce_small(outcome, how, axis_name, size)
    mine = outcome.gradient_weight
    terms = outcome._replace(
        loss=_wide(outcome.loss),
        aux=jax.tree.map(lambda x: _wide(x) if _is_floating(x) else x, outcome.aux),
        # A replica without examples may have made NaN of them.
        model_state=jax.tree.map(
            lambda x, policy: jnp.where(mine == 0, 0, _wide(x) * mine) if policy == "mean" else x,
            outcome.model_state,
            policies,
        ),
    )
    sums = jax.tree.map(lambda _: "sum", terms)
    states = jax.tree.map(lambda policy: "sum" if policy == "mean" else policy, policies)
    total: Outcome = scalars.reduce_small(terms, sums._replace(model_state=states), axis_name, size)
    loss, aux = metrics(total)
    model_state = jax.tree.map(
        lambda x, like, policy: (
            divided(x, total.gradient_weight).astype(like.dtype) if policy == "mean" else x
        ),
        total.model_state,
        outcome.model_state,
        policies,
    )
    like = outcome.aux
    aux = jax.tree.map(lambda x, y: x.astype(y.dtype) if _is_floating(y) else x, aux, like)
    return total._replace(loss=loss.astype(outcome.loss.dtype), aux=aux, model_state=model_state)


def metrics(outcome: Outcome) -> tuple[jax.Array, Any]:
    """Loss and aux as they are reported: with weights, what is a sum is divided by the weight."""
    if outcome.weight is None:
        return outcome.loss, outcome.aux
    aux = jax.tree.map(
        lambda x: divided(x, outcome.weight).astype(x.dtype) if _is_floating(x) else x, outcome.aux
    )
    return divided(outcome.loss, outcome.weight).astype(outcome.loss.dtype), aux


def divided(total: jax.Array, weight: jax.Array) -> jax.Array:
    """``total / weight``; 0 where the weight is."""
    return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))


def has_weight(outcome: Outcome) -> Any:
    """Whether the gradients have any weight; None without weights."""
    return None if outcome.weight is None else outcome.gradient_weight != 0


def unless_empty(outcome: Outcome, new: Any, old: Any) -> Any:
    """``new``, or ``old`` bit for bit where there are weights and all of them are zero."""
    if outcome.weight is None:
        return new
    return jax.tree.map(lambda n, o: jnp.where(outcome.gradient_weight == 0, o, n), new, old)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _sum_of(x: Any) -> Any:
    return None if x is None else "sum"
