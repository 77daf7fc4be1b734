"""What people may get wrong when they build or call a trainer, said before JAX says it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fdp.accumulate import check_num_microbatches
from fdp.plan import BucketPlan
from fdp.state import TrainState


def check_arguments(
    loss_fn: Any, optimizer: Any, via: Any, num_microbatches: Any, plan: Any, compiler_options: Any
) -> None:
    """Arguments of ``data_parallel`` that are wrong by themselves.

    Raises:
      TypeError, ValueError: what was expected, what came, the edit to make.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"expected loss_fn to be a function (params, batch) -> loss, got {loss_fn!r}."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        hint = (
            "call it, for example optax.sgd(0.1)"
            if callable(optimizer)
            else "for example optax.sgd(0.1)"
        )
        raise TypeError(
            f"expected an optax optimizer with init and update, got {optimizer!r}: {hint}."
        )
    if via not in ("shard_map", "pmap"):
        raise ValueError(f'expected via to be "shard_map" or "pmap", got {via!r}.')
    if via == "pmap" and compiler_options:
        raise ValueError('compiler_options need via="shard_map": jax.pmap takes none.')
    check_num_microbatches(num_microbatches)
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(
            f"expected plan to be a BucketPlan, got {type(plan).__name__}: fdp.plan_buckets(params)."
        )


def check_state(state: Any) -> None:
    """Raises TypeError unless ``state`` is a ``TrainState``."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"expected a TrainState, got {type(state).__name__}: make it with trainer.init(params), and pass the state "
            "that the last step returned."
        )


def check_init(has_model_state: bool, model_state: Any, has_rng: bool, rng: Any) -> None:
    """Whether ``init`` is given what the loss function takes, no more and no less.

    Raises:
      ValueError: something is missing or too much.
      TypeError: ``rng`` is no key.
    """
    for name, wanted, value in (
        ("model_state", has_model_state, model_state),
        ("rng", has_rng, rng),
    ):
        if wanted and value is None:
            raise ValueError(f"expected init(params, {name}=...), since has_{name}=True; got none.")
        if not wanted and value is not None:
            raise ValueError(
                f"got {name}=... in init, but loss_fn does not take it: pass has_{name}=True to data_parallel."
            )
    if rng is not None and not isinstance(rng, jax.Array) and not isinstance(rng, np.ndarray):
        raise TypeError(f"expected rng to be a key such as jax.random.key(0), got {rng!r}.")
