"""One training step as one replica sees it: pure, inside the mesh axis, the same under shard_map and pmap.

state.params --varying--> params that belong to this replica
batch share  --accumulate--> loss, aux, model state, gradients          local, in ready order
loss, aux, model state --reduce_small--> replicated                     one small collective, behind the forward
gradients --wire, bucket by bucket--> replicated                        overlapping the backward, in loops too
replicated gradients --optimizer--> new params
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fdp import birth, compat, dependency, scalars
from fdp.accumulate import accumulate_with_carry
from fdp.birth import Born
from fdp.compat import AxisName
from fdp.loss import CanonicalLoss
from fdp.plan import BucketPlan, path_string
from fdp.state import StepInfo, Unreduced
from fdp.wire import Wire


class Replicated(NamedTuple):
    """The part of a ``TrainState`` that is equal on all replicas."""

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    rng: Any


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Everything a step closes over."""

    loss: CanonicalLoss
    optimizer: optax.GradientTransformation
    axis_name: AxisName
    num_microbatches: int
    accumulate_dtype: Any
    op: str
    wire: Wire
    plan_for: Callable[[Any, Any], BucketPlan]
    in_loops: bool | None
    record: Callable[[Born], Any] = lambda born: None


def synced_step(
    config: StepConfig, state: Replicated, hook_state: Any, unreduced: Unreduced | None, batch: Any
) -> tuple[Replicated, Any, StepInfo]:
    """Reduces this step's gradients, plus what ``unreduced`` holds, and updates the parameters."""
    base = config.plan_for(state.params, None)
    trainable = select_trainable(base, state.params)
    _check_opt_state(config.optimizer, trainable, state.opt_state)
    planned = [i for i, spec in enumerate(base.leaves) if spec.planned]

    def plan_for(order: tuple[int, ...]) -> BucketPlan:
        ready = [planned[i] for i in order]
        return config.plan_for(state.params, [*ready, *base.excluded])

    stateful = bool(jax.tree.leaves(hook_state))
    born = birth.compute(
        config.wire,
        lambda *args: _local_gradients(config, base, *args),
        _local_arguments(config, state, unreduced, batch),
        (lambda order: base) if stateful else plan_for,
        hook_state if stateful else None,
        in_loops=compat.platform() != "cpu" if config.in_loops is None else config.in_loops,
    )
    config.record(born)
    loss, aux, model_state = born.outputs
    size = compat.axis_size(config.axis_name)
    how = (
        config.op,
        jax.tree.map(scalars.mean_or_sum, aux),
        jax.tree.map(scalars.mean_or_first, model_state),
    )
    # The loss exists before the backward starts: its reduction goes first, hidden behind the backward, and
    # is part of the one order in which all replicas communicate. Where loops have reduced, it follows them:
    # XLA would join it with a bucket in front of a loop, and then copy that bucket (GPU) or not overlap it (TPU).
    (loss,) = dependency.tie([loss], born.after_loops)
    small = (loss, aux, model_state)
    loss, aux, model_state = scalars.reduce_small(small, how, config.axis_name, size)
    reduced, new_hook_state = birth.finish(
        config.wire, born, after=dependency.token_of([loss]) if size > 1 else None
    )
    grads = jax.tree.unflatten(base.treedef, [reduced.get(i) for i in range(len(base.leaves))])
    updates, opt_state = optax.with_extra_args_support(config.optimizer).update(
        grads, state.opt_state, trainable, value=loss
    )
    params = merge_frozen(base, optax.apply_updates(trainable, updates), state.params)
    new_state = Replicated(state.step + 1, params, opt_state, model_state, state.rng)
    return new_state, new_hook_state if stateful else hook_state, StepInfo(loss, aux)


def unsynced_step(
    config: StepConfig, state: Replicated, unreduced: Unreduced | None, batch: Any
) -> tuple[Unreduced, StepInfo]:
    """Adds this step's gradients to what is held back. No collective."""
    base = config.plan_for(state.params, None)
    arguments = _local_arguments(config, state, unreduced, batch)
    (loss, aux, model_state), leaves = _local_gradients(config, base, *arguments)
    planned = iter(leaves)
    grads = jax.tree.unflatten(
        base.treedef, [next(planned) if spec.planned else None for spec in base.leaves]
    )
    count = jnp.ones((), jnp.int32) + (0 if unreduced is None else unreduced.count)
    return Unreduced(count, grads, model_state), StepInfo(loss, aux)


def _local_arguments(
    config: StepConfig, state: Replicated, unreduced: Unreduced | None, batch: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Arguments of ``_local_gradients``, all of them this replica's own."""
    axis = config.axis_name
    held_back = 0 if unreduced is None else unreduced.count
    model_state = state.model_state if unreduced is None else unreduced.model_state
    rng = None
    if state.rng is not None:
        per_step = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), held_back)
        rng = jax.random.fold_in(per_step, lax.axis_index(axis))
    held_grads = None if unreduced is None else unreduced.grads
    params, model_state = compat.varying((state.params, model_state), axis)
    return params, batch, model_state, rng, held_grads


def _local_gradients(
    config: StepConfig,
    plan: BucketPlan,
    params: Any,
    batch: Any,
    model_state: Any,
    rng: Any,
    held_grads: Any,
) -> tuple[tuple[Any, Any, Any], list[Any]]:
    """(loss, aux, model state) and gradients of this replica's share of the batch, plus what was held back."""

    def loss(trainable: Any, microbatch: Any, model_state: Any, rng: Any) -> Any:
        return config.loss(merge_frozen(plan, trainable, params), microbatch, model_state, rng)

    def grad_fn(trainable: Any, microbatch: Any, model_state: Any, rng: Any) -> Any:
        (value, (model_state, aux)), grads = jax.value_and_grad(loss, has_aux=True)(
            trainable, microbatch, model_state, rng
        )
        return (value, aux, model_state), grads

    accumulated = accumulate_with_carry(
        grad_fn, config.num_microbatches, op="mean", dtype=config.accumulate_dtype
    )
    (value, aux, model_state), grads = accumulated(
        select_trainable(plan, params), batch, model_state, rng
    )
    if held_grads is not None:
        grads = jax.tree.map(jnp.add, held_grads, grads)
    aux = jax.tree.map(scalars.over_microbatches, aux)
    return (value, aux, model_state), jax.tree.leaves(grads)


def select_trainable(plan: BucketPlan, params: Any) -> Any:
    """``params`` with None in place of every leaf the plan leaves out: what is differentiated and optimized."""
    if not plan.excluded:
        return params
    leaves = jax.tree.leaves(params)
    kept = [x if spec.planned else None for x, spec in zip(leaves, plan.leaves, strict=True)]
    return jax.tree.unflatten(plan.treedef, kept)


def merge_frozen(plan: BucketPlan, trainable: Any, params: Any) -> Any:
    """``trainable`` with its gaps filled from ``params``."""
    if not plan.excluded:
        return trainable
    trained = iter(jax.tree.leaves(trainable))
    leaves = jax.tree.leaves(params)
    merged = [
        next(trained) if spec.planned else x for x, spec in zip(leaves, plan.leaves, strict=True)
    ]
    return jax.tree.unflatten(plan.treedef, merged)


def _check_opt_state(
    optimizer: optax.GradientTransformation, trainable: Any, opt_state: Any
) -> None:
    """Raises where the optimizer state was not made by this optimizer for these parameters."""
    expected = jax.eval_shape(optimizer.init, trainable)
    want = {path_string(p): x for p, x in jax.tree_util.tree_leaves_with_path(expected)}
    have = {path_string(p): x for p, x in jax.tree_util.tree_leaves_with_path(opt_state)}
    for path in [*want, *have]:
        w, h = want.get(path), have.get(path)
        same = w is not None and h is not None and (w.shape, w.dtype) == (jnp.shape(h), h.dtype)
        if not same:
            raise ValueError(
                f"expected the state of this trainer's optimizer, which at {path!r} has {_show(w)}; the train state "
                f"has {_show(h)}: make it with init(params) of the same trainer, or restore the checkpoint with the "
                "optimizer it was saved with."
            )
    if jax.tree.structure(expected) != jax.tree.structure(opt_state):
        raise ValueError(
            f"expected the state of this trainer's optimizer, with structure {jax.tree.structure(expected)}, got "
            f"{jax.tree.structure(opt_state)}: make it with init(params) of the same trainer."
        )


def _show(x: Any) -> str:
    return "nothing" if x is None else f"{x.dtype}[{','.join(map(str, jnp.shape(x)))}]"
