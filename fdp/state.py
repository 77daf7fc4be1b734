"""What a training run carries from step to step: plain pytrees of ordinary arrays, nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Unreduced(NamedTuple):
    """What ``no_sync_step`` holds back. Every leaf has a leading replica axis, sharded over the mesh axis.

    Attributes:
      count: int32 ``[replicas]``, number of steps held back.
      grads: sum of their gradients, ``[replicas, *leaf shape]``.
      model_state: each replica's own model state after them, ``[replicas, *leaf shape]``.
    """

    count: jax.Array
    grads: Any
    model_state: Any


class TrainState(NamedTuple):
    """State of training.

    Any checkpointer saves it; it restores onto any number of replicas while ``unreduced`` is None and the hook has no
    state.

    Attributes:
      step: int32 scalar, number of optimizer steps taken.
      params: the user's tree, replicated: ``state.params`` is the trained model.
      opt_state: the optimizer's state, replicated.
      model_state: the user's model state (batch statistics), replicated; None without.
      rng: the key given to ``init``, replicated; None without. Step, replica and microbatch are folded into it.
      hook_state: one state per launch, with a leading replica axis; no leaves for hooks without state.
      unreduced: None, unless the last step was a ``no_sync_step``.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    rng: Any
    hook_state: Any
    unreduced: Unreduced | None


class StepInfo(NamedTuple):
    """What a step reports.

    Attributes:
      loss: mean over replicas and microbatches (sum over replicas with ``op="sum"``), a scalar; from
        ``no_sync_step``, which communicates nothing, one per replica, ``[replicas]``.
      aux: the loss function's aux: floating leaves averaged over replicas and microbatches, integer and bool leaves
        added up (counts); from ``no_sync_step`` per replica, with a leading replica axis.
    """

    loss: jax.Array
    aux: Any
