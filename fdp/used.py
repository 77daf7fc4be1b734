"""Leaves that a step did not use: divided by those who did, or left as they are, optimizer state included.

How can a replica know what it used? Three ways:

- ``any(gradient != 0)``: reads every gradient once more, is known only after the backward pass, so that its reduction
  comes last and alone, and takes a gradient that is zero by its numbers (a dead ReLU, a masked loss) for unused.
- A mask that the loss function returns: exact if it is right, and one more thing to get wrong in every model.
- The branches that were taken, from the trace (``fdp.probe``): reads no gradient, exists with the loss and so joins the
  small reduction that goes first anyway, and a zero gradient of a leaf that was used counts as use.

The third is used here. Where it cannot look inside (functions with a derivative of their own) it says "used", which is
what happens without it. ``jnp.where`` computes both sides: both count as used.

*Use* is one number a leaf. Without weights 1 where any microbatch, or any step held back, used the leaf, and 0
elsewhere: its sum over replicas counts users. With weights, the weight of the microbatches that used it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fdp.outcome import Outcome

UNUSED = ("zero", "skip")
MEAN_OVER = ("all", "users")


def of_microbatches(masks: Any, weights: Any) -> Any:
    """Use of every trainable leaf, float ``[leaves]``, from masks ``[microbatches, leaves]``; None from None."""
    if masks is None:
        return None
    if weights is None:
        return jnp.any(masks, axis=0).astype(jnp.float32)
    return jnp.sum(masks * weights[:, None], axis=0)


def together(use: Any, held: Any, zeros: Collection[int], *, weighted: bool) -> Any:
    """Use of this step and of what was held back.

    Args:
      use: of this step; None if nobody asks.
      held: of the steps held back; None without.
      zeros: positions whose gradient is zero by the program in this step.
      weighted: whether use is a weight, and so adds up.
    """
    if use is None:
        return None
    if zeros:
        program = np.ones(use.shape, bool)
        program[list(zeros)] = False
        use = jnp.where(program, use, 0)
    if held is None:
        return use
    return held + use if weighted else jnp.maximum(held, use)


def divide_by_weight_or_users(
    gradients: Mapping[int, jax.Array],
    total: Outcome,
    planned: Sequence[int],
    *,
    size: int,
    mean_over: str,
) -> dict[int, jax.Array]:
    """Makes means over ``size`` replicas what is wanted in their place.

    Args:
      gradients: reduced gradients by leaf index, means over replicas.
      total: outcome of all replicas.
      planned: leaf indices in the order of ``total.use``.
      size: number of replicas.
      mean_over: ``"users"`` divides by the use of each leaf, ``"all"`` by the total weight, or the number of replicas.
    """
    if mean_over == "all" and total.weight is None:
        return dict(gradients)
    place = {leaf: position for position, leaf in enumerate(planned)}

    def scaled(leaf: int, gradient: jax.Array) -> jax.Array:
        by = total.use[place[leaf]] if mean_over == "users" else total.gradient_weight
        # In float32 at least: replicas / weight may be less than float16 can hold.
        wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
        return (wide * jnp.where(by == 0, 0, size / jnp.where(by == 0, 1, by))).astype(
            gradient.dtype
        )

    return {leaf: scaled(leaf, gradient) for leaf, gradient in gradients.items()}


def keep_unused(
    optimizer: optax.GradientTransformation,
    use: jax.Array,
    zeros: Collection[int],
    new: tuple[Any, Any],
    old: tuple[Any, Any],
) -> tuple[Any, Any]:
    """Parameters and optimizer state, those of unused leaves as they were, bit for bit.

    What the optimizer does not keep per parameter (Adam's count, a schedule's) is the new one.

    Args:
      optimizer: whose state it is.
      use: of every trainable leaf, over all replicas.
      zeros: positions that are unused by the program: no need to look at run time.
      new: trainable parameters and optimizer state after the update.
      old: the same before it.
    """
    leaves, treedef = jax.tree.flatten(new[0])
    flags = [False if i in zeros else use[i] > 0 for i in range(len(leaves))]
    params_used = jax.tree.unflatten(treedef, flags)
    state_used = optax.tree_utils.tree_map_params(
        optimizer, lambda _, used: used, old[1], params_used, transform_non_params=lambda _: True
    )

    def choose(used: Any, n: Any, o: Any) -> Any:
        if isinstance(used, bool):
            return n if used else o
        return jnp.where(used, n, o)

    return (
        jax.tree.map(choose, params_used, new[0], old[0]),
        jax.tree.map(choose, state_used, new[1], old[1]),
    )


def by_leaf(use: Any, planned: Sequence[int], count: int) -> Any:
    """Use as bools for all ``count`` leaves, false for those that are not trainable; None from None."""
    if use is None:
        return None
    place = np.zeros(count, np.int32)
    place[list(planned)] = np.arange(len(planned))
    trainable = np.zeros(count, bool)
    trainable[list(planned)] = True
    return jnp.logical_and(use[place] > 0, trainable)
