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

``unused="skip"`` is exact for optimizers that update each leaf from its own state (SGD, Adam). One that makes a leaf's
update of all leaves (L-BFGS's inner products, a global norm) sees the zero gradients of skipped leaves, and an L-BFGS
memory from steps of which a leaf has kept its part and the others have not. What cannot be told apart by leaf
(``optax.flatten``), or must not be (``optax.MultiSteps``), is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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

    Raises:
      ValueError: see ``check_can_skip``.
    """
    check_can_skip(optimizer, *old)
    leaves, treedef = jax.tree.flatten(new[0])
    flags = [False if i in zeros else use[i] > 0 for i in range(len(leaves))]
    params_used = jax.tree.unflatten(treedef, flags)
    state_used = map_per_parameter(
        optimizer, lambda _, used: used, old[1], params_used, otherwise=lambda _: True
    )

    def choose(used: Any, n: Any, o: Any) -> Any:
        if isinstance(used, bool):
            return n if used else o
        return jnp.where(used, n, o)

    return (
        jax.tree.map(choose, params_used, new[0], old[0]),
        jax.tree.map(choose, state_used, new[1], old[1]),
    )


def check_can_skip(optimizer: optax.GradientTransformation, params: Any, opt_state: Any) -> None:
    """Checks that ``unused="skip"`` can leave alone what this optimizer keeps for a leaf.

    Raises:
      ValueError: it accumulates gradients over steps, or does not say which parameter its state belongs to.
    """
    if _accumulates(opt_state):
        raise ValueError(
            'expected an optimizer that updates at every step with unused="skip", got optax.MultiSteps: the gradients '
            "that it holds belong to several steps, and a step that does not use a leaf would lose or misplace those "
            "of the others. Pass the optimizer in it, and num_microbatches=k to data_parallel (the mean of k slices) "
            "or call trainer.no_sync_step for all steps of a window but the last (their sum)."
        )
    try:
        map_per_parameter(optimizer, lambda *_: 0, opt_state, params, otherwise=lambda _: 0)
    except NotPerParameterError as error:
        raise ValueError(
            'expected an optimizer that keeps its state per parameter with unused="skip", got one whose init '
            f"fails for the placeholder by which optax finds such state ({error}). Leave optax.flatten away, "
            "give optax.partition and optax.multi_transform a tree of labels in place of a function, "
            'or pass unused="zero".'
        ) from error


class NotPerParameterError(Exception):
    """Nobody can tell which parameter a part of an optimizer's state belongs to."""


def map_per_parameter(
    optimizer: optax.GradientTransformation,
    fn: Callable[[Any, Any], Any],
    opt_state: Any,
    params: Any,
    *,
    otherwise: Callable[[Any], Any],
) -> Any:
    """``optax.tree_utils.tree_map_params``, also where parts of the params are masked out.

    Args:
      optimizer: whose state it is.
      fn: of a leaf of the state that is kept for a parameter, and the leaf of ``params`` there.
      opt_state: a tree of arrays or shapes.
      params: a tree with the structure of the trainable params.
      otherwise: of every other leaf of the state.

    Returns:
      A tree with the structure of ``opt_state``.

    Raises:
      NotPerParameterError: the optimizer's init needs real parameters.
    """

    def fn_or_masked(value: Any, param: Any) -> Any:
        return value if _is_masked(value) else fn(value, param)

    try:
        return optax.tree_utils.tree_map_params(
            optimizer,
            fn_or_masked,
            opt_state,
            params,
            transform_non_params=otherwise,
            # optax.masked has a node without leaves in place of what it leaves out: params differ in structure there.
            is_leaf=_is_masked,
        )
    # optax calls init with a node without leaves in place of params. What an init that needs to see them (flatten, or
    # functions of labels) makes of it, is not for it to say: an error of any type.
    except Exception as error:
        raise NotPerParameterError(f"{type(error).__name__}: {error}") from error


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _accumulates(opt_state: Any) -> bool:
    def is_multi_steps(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState)

    return any(map(is_multi_steps, jax.tree.leaves(opt_state, is_leaf=is_multi_steps)))


def by_leaf(use: Any, planned: Sequence[int], count: int) -> Any:
    """Use as bools for all ``count`` leaves, false for those that are not trainable; None from None."""
    if use is None:
        return None
    place = np.zeros(count, np.int32)
    place[list(planned)] = np.arange(len(planned))
    trainable = np.zeros(count, bool)
    trainable[list(planned)] = True
    return jnp.logical_and(use[place] > 0, trainable)
