"""What a training run carries from step to step: plain pytrees of ordinary arrays, and which part of it lives where."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Unreduced(NamedTuple):
    """What ``no_sync_step`` holds back. Every leaf has a leading replica axis, sharded over the mesh axis.

    Attributes:
      count: int32 ``[replicas]``, number of steps held back.
      grads: sum of their gradients, ``[replicas, *leaf shape]``.
        None for a leaf whose gradient was zero by the program in all of them.
      model_state: each replica's own model state after them, ``[replicas, *leaf shape]``.
      weight: their weight, ``[replicas]``; None without ``weighted``.
      use: how much each leaf was used, ``[replicas, leaves]``; None unless asked for. See ``fdp.used``.
    """

    count: jax.Array
    grads: Any
    model_state: Any
    weight: jax.Array | None = None
    use: jax.Array | None = None


class Carried(NamedTuple):
    """The gradients of the last step, which the next one finishes reducing; with ``carry_over``.

    Attributes:
      loss: the loss that they are of, replicated: for optimizers that are given it.
      reduced: those that have crossed the axis, replicated, structured like the params; None in place of the others.
      unreduced: those that have not: a dict a bucket, in the order in which they will cross, by place in the bucket and
        index of the leaf: ``{"0000_17": [replicas, *leaf shape], ...}``.
    """

    loss: jax.Array
    reduced: Any
    unreduced: tuple[dict[str, jax.Array], ...]


class TrainState(NamedTuple):
    """State of training.

    Any checkpointer saves it; it restores onto any number of replicas while ``unreduced``, ``carried`` and
    ``local_model_state`` are None and the hook has no state.

    Attributes:
      step: int32 scalar, number of optimizer steps taken.
      params: the user's tree, replicated: ``state.params`` is the trained model.
      opt_state: the optimizer's state, replicated.
      model_state: the user's model state (batch statistics), replicated; None without. Leaves whose policy is
        ``"local"`` are None here: ``consistent_model_state`` puts everything together.
      rng: the key given to ``init``, replicated; None without. Step, replica and microbatch are folded into it.
      hook_state: one state per launch, with a leading replica axis; no leaves for hooks without state.
      unreduced: None, unless the last step was a ``no_sync_step``.
      local_model_state: model state that each replica keeps for itself, ``[replicas, *leaf shape]``, None in place of
        all other leaves; None where there is none.
      carried: with ``carry_over``, the gradients that ``params`` and ``step`` do not have in them yet; None otherwise,
        before the first step, and after ``finish``.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    rng: Any
    hook_state: Any
    unreduced: Unreduced | None
    local_model_state: Any = None
    carried: Carried | None = None


class StepInfo(NamedTuple):
    """What a step reports. Everything is of this step's batch; None where it was not asked for.

    Attributes:
      loss: mean over replicas and microbatches (sum over replicas with ``op="sum"``), a scalar; from
        ``no_sync_step``, which communicates nothing, one per replica, ``[replicas]``. With ``weighted``: the sum of
        losses over the sum of weights, 0 where that is 0.
      aux: the loss function's aux: floating leaves averaged over replicas and microbatches, integer and bool leaves
        added up (counts); from ``no_sync_step`` per replica, with a leading replica axis. With ``weighted``, floating
        leaves are sums like the loss, and are divided by the same weight.
      weight: with ``weighted``, the weight of the batch: floating scalar, ``[replicas]`` from ``no_sync_step``.
      updated: with ``weighted``, from ``train_step``: bool scalar, false where the weight of this step and of what was
        held back is zero together: nothing was changed then.
      used: bool ``[leaves]``, by leaf of params: whether a replica used it in this step or in what was held back. With
        ``unused="skip"`` or ``mean_over="users"``, from ``train_step``.
      nonfinite: with ``count_nonfinite``, from ``train_step``: int32 ``[replicas, buckets]``, NaN and Inf in each
        replica's own gradients. ``describe_nonfinite`` words it.
    """

    loss: jax.Array
    aux: Any
    weight: jax.Array | None = None
    updated: jax.Array | None = None
    used: jax.Array | None = None
    nonfinite: jax.Array | None = None


class Replicated(NamedTuple):
    """The part of a ``TrainState`` that is equal on all replicas."""

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    rng: Any
    carried: Carried | None = None  # but for what is unreduced


class Own(NamedTuple):
    """The part that belongs to one replica."""

    hook_state: Any
    model_state: Any
    carried: tuple[Any, ...] = ()  # ``Carried.unreduced``


def split_state(state: TrainState) -> tuple[Replicated, Own]:
    """A state without what ``no_sync_step`` held back, by where it lives."""
    carried = state.carried
    replicated = Replicated(
        state.step,
        state.params,
        state.opt_state,
        state.model_state,
        state.rng,
        None if carried is None else carried._replace(unreduced=()),
    )
    unreduced = () if carried is None else carried.unreduced
    return replicated, Own(state.hook_state, state.local_model_state, unreduced)


def join_state(replicated: Replicated, own: Own, unreduced: Unreduced | None) -> TrainState:
    """The state that ``split_state`` takes apart, and ``unreduced``."""
    carried = replicated.carried
    return TrainState(
        replicated.step,
        replicated.params,
        replicated.opt_state,
        replicated.model_state,
        replicated.rng,
        own.hook_state,
        unreduced,
        own.model_state,
        None if carried is None else carried._replace(unreduced=own.carried),
    )
