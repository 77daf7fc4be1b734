"""What a share of the batch came to, besides gradients: loss, weight, use, aux, model state.

Without weights, a loss is a mean, and so is the mean of equal shares. With weights it is a sum that comes with what it
is to be divided by (tokens, examples), and everything stays a sum until the end:

    loss = sum over replicas and microbatches of loss_sum  /  sum over replicas and microbatches of weight

Gradients follow the same rule. Each replica multiplies its own by replicas / total weight, which the small reduction
has brought by then, and what crosses are means that overflow on a narrow wire only where the true mean does. What loops
reduce crosses before the total is known, as a mean over replicas of gradient sums, and is multiplied afterwards: with
``compress`` to float16 pass ``in_loops=False``.

What has no weight has no say, whatever it is, NaN included (0/0 is what a mean over no examples is): of a microbatch
without weight the loss, floating aux and gradients count as 0; a replica without weight, held-back steps included, has
no part in model state, and keeps the ``"local"`` one it had. Within a
replica, microbatches without weight do pass their model state on to the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fdp import scalars
from fdp.compat import AxisName
from fdp.state import Unreduced


class Outcome(NamedTuple):
    """Everything but gradients.

    Attributes:
      loss: mean over microbatches; with weights the sum, in at least 32 bits, as are those in ``aux``.
      weight: floating scalar of at least 32 bits; None without weights.
      held_weight: weight of what ``no_sync_step`` held back; None without.
      use: float32 ``[trainable leaves]``; None unless asked for, see ``fdp.used``.
      aux: floating leaves like the loss, the others added up.
      model_state: after the last microbatch.
      kinds: empty arrays in the dtypes that loss and aux are reported in; None without weights.
    """

    loss: jax.Array
    weight: Any
    held_weight: Any
    use: Any
    aux: Any
    model_state: Any
    kinds: Any = None

    @property
    def gradient_weight(self) -> Any:
        """Weight of what is in the gradients: this step's, and what was held back; None without weights."""
        return self.weight if self.held_weight is None else self.weight + self.held_weight


def with_weight_only(weight: Any, tree: Any) -> Any:
    """Floating leaves, 0 where the weight of the microbatch they are of is; ``tree`` itself without weights."""
    if weight is None:
        return tree

    def masked(x: Any) -> Any:
        x = jnp.asarray(x)
        # A multiplication would keep NaN. A scalar predicate: what comes out of a loop is masked slice by slice.
        return lax.select(weight == 0, jnp.zeros_like(x), x) if _is_floating(x) else x

    return jax.tree.map(masked, tree)


def of_microbatches(
    loss: jax.Array, kind: Any, weights: Any, use: Any, aux: Any, model_state: Any
) -> Outcome:
    """Joins microbatches: ``weights`` and the leaves of ``aux`` are stacked, ``[microbatches, ...]``.

    With weights ``kind`` is an empty array in the dtype that the loss is reported in.
    """
    if weights is None:
        joined = jax.tree.map(scalars.over_microbatches, aux)
        return Outcome(loss, None, None, use, joined, model_state)
    joined = jax.tree.map(
        lambda x: jnp.sum(scalars.wide(x), 0) if _is_floating(x) else scalars.over_microbatches(x),
        aux,
    )
    kinds = jax.tree.map(
        lambda x: jnp.zeros((0,), x.dtype) if _is_floating(x) else None, (kind, aux)
    )
    return Outcome(loss, jnp.sum(weights), None, use, joined, model_state, kinds)


def of_held_back(
    unreduced: Unreduced | None, *, weighted: bool, asks_for_use: bool
) -> tuple[Any, Any]:
    """Weight and use of what ``no_sync_step`` held back; None without.

    Raises:
      ValueError: a trainer with other options held it back, and so it lacks one of them, or has one too many.
    """
    if unreduced is None:
        return None, None
    for option, wanted, got in (
        ("weighted=True", weighted, unreduced.weight is not None),
        ('unused="skip" or mean_over="users"', asks_for_use, unreduced.use is not None),
    ):
        if wanted != got:
            words = {True: "with", False: "without"}
            raise ValueError(
                f"expected what no_sync_step held back to be of a trainer {words[wanted]} {option}, like this one, got "
                f"it from one {words[got]}: call no_sync_step and train_step of the same trainer, or give both "
                "trainers the same weighted, unused and mean_over."
            )
    return unreduced.weight, unreduced.use


def over_replicas(
    outcome: Outcome, policies: Any, *, op: str, axis_name: AxisName, size: int
) -> Outcome:
    """One small reduction; with weights the result is divided by them.

    Args:
      outcome: this replica's.
      policies: for every leaf of ``model_state`` ``"mean"``, ``"max"`` or ``"first"``. With weights, a mean counts each
        replica by the weight of what its state has seen, and the largest and the first are of replicas with weight.
        Who is the first of them takes one more reduction, of one integer.
      op: ``"mean"`` or ``"sum"``, for a loss without weights.
      axis_name: mesh axis or axes.
      size: number of replicas.
    """
    if outcome.weight is None:
        rules = jax.tree.map(scalars.mean_or_sum, outcome.aux)
        how = Outcome(op, None, None, _sum_of(outcome.use), rules, policies)  # pyright: ignore[reportArgumentType]
        return scalars.reduce_small(outcome, how, axis_name, size)
    mine = outcome.gradient_weight
    first = None
    if size > 1 and "first" in jax.tree.leaves(policies):
        first = _first_with_weight(mine, axis_name, size)

    def term(x: Any, policy: str) -> Any:
        if policy == "mean":
            return jnp.where(mine == 0, 0, scalars.wide(x) * mine)
        return jnp.where(mine == 0, _least(x.dtype), x) if policy == "max" else x

    states = jax.tree.map(term, outcome.model_state, policies)
    terms = outcome._replace(model_state=states, kinds=None)
    sums = jax.tree.map(lambda _: "sum", terms)
    how = jax.tree.map(lambda policy: "sum" if policy == "mean" else policy, policies)
    total: Outcome = scalars.reduce_small(
        terms, sums._replace(model_state=how), axis_name, size, first=first
    )
    model_state = jax.tree.map(
        lambda x, like, policy: (
            divided(x, total.gradient_weight).astype(like.dtype) if policy == "mean" else x
        ),
        total.model_state,
        outcome.model_state,
        policies,
    )
    loss, aux = metrics(total._replace(kinds=outcome.kinds))
    return total._replace(loss=loss, aux=aux, model_state=model_state)


def metrics(outcome: Outcome) -> tuple[jax.Array, Any]:
    """Loss and aux as they are reported: with weights, what is a sum is divided by the weight."""
    if outcome.weight is None:
        return outcome.loss, outcome.aux
    return jax.tree.map(
        lambda x, kind: x if kind is None else divided(x, outcome.weight).astype(kind.dtype),
        (outcome.loss, outcome.aux),
        outcome.kinds,
    )


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


def _least(dtype: Any) -> Any:
    """What no maximum is decided by."""
    if dtype == jnp.bool_:
        return False
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.asarray(-jnp.inf if floating else jnp.iinfo(dtype).min, dtype)


def _first_with_weight(mine: jax.Array, axis_name: AxisName, size: int) -> jax.Array:
    """Index of the first replica that has weight; 0 if none has."""
    index = jnp.where(mine == 0, size, lax.axis_index(axis_name))
    return lax.pmin(index, axis_name) % size


def _sum_of(x: Any) -> Any:
    return None if x is None else "sum"
