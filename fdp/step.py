"""One training step as one replica sees it: pure, inside the mesh axis, the same under shard_map and pmap.

what the last step carried over --wire, optimizer--> state.params       beneath the forward, with ``carry_over``
state.params --varying--> params that belong to this replica
batch share  --accumulate--> outcome, gradients                         local, in ready order
outcome (loss, aux, model state ...) --over_replicas--> replicated      one small collective, behind the forward
gradients --wire, bucket by bucket--> replicated                        overlapping the backward, in loops too
means over replicas --divide_by_weight_or_users--> what was asked for   nothing, without such options; with weights
                                                                        before the wire, where that can be
replicated gradients --optimizer--> new params                          except what stays as it was; or carried over
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fdp import birth, carry, compat, dependency, outcome, probe, scalars, used
from fdp.accumulate import accumulate_with_carry
from fdp.birth import Decisions
from fdp.checks import check_opt_state
from fdp.compat import AxisName
from fdp.finite import count_nonfinite
from fdp.loss import CanonicalLoss
from fdp.model_state import merge, split_by_policy
from fdp.order import Births
from fdp.outcome import Outcome
from fdp.plan import BucketPlan
from fdp.state import Carried, Own, Replicated, StepInfo, Unreduced
from fdp.trees import by_leaf, merge_frozen, select_trainable, tree_of
from fdp.wire import Wire


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Everything a step closes over; the options are those of ``data_parallel``."""

    loss: CanonicalLoss
    optimizer: optax.GradientTransformation
    axis_name: AxisName
    num_microbatches: int
    accumulate_dtype: Any
    op: str
    wire: Wire
    plan_for: Callable[[Any, Births | None], BucketPlan]
    in_loops: bool | None
    weighted: bool
    unused: str
    mean_over: str
    model_state_policy: Any
    count_nonfinite: bool
    rng_per_replica: bool
    carry_over: int

    @property
    def asks_for_use(self) -> bool:
        """Whether anything depends on which leaves were used."""
        return self.unused == "skip" or self.mean_over == "users"


def synced_step(
    config: StepConfig, state: Replicated, own: Own, unreduced: Unreduced | None, batch: Any
) -> tuple[Replicated, Own, StepInfo, Decisions]:
    """Reduces this step's gradients, plus what ``unreduced`` holds, and updates the parameters.

    With ``carry_over`` it first does that with the gradients of the last step, and leaves its own to the next.
    Of the ``StepInfo``, ``nonfinite`` is this replica's; the last result is static.
    """
    base = config.plan_for(state.params, None)
    check_opt_state(config.optimizer, select_trainable(base, state.params), state.opt_state)
    state, own, crossed = _finished(config, base, state, own)
    planned = [i for i, spec in enumerate(base.leaves) if spec.planned]

    def plan_for(births: Births) -> BucketPlan:
        return config.plan_for(state.params, births.at(planned, base.excluded))

    stateful = bool(jax.tree.leaves(own.hook_state))
    born = birth.compute(
        config.wire,
        lambda *args: _local_gradients(config, base, *args),
        _local_arguments(config, state, own, unreduced, batch),
        (lambda births: base) if stateful else plan_for,
        own.hook_state if stateful else None,
        in_loops=_looks_into_loops(config),
        carry_over=config.carry_over,
        after=crossed,
    )
    zeros = {place for place, leaf in enumerate(planned) if leaf in born.zeros}
    local = _with_held(config, born.outputs, unreduced, zeros)
    shared, local_model_state, policies = split_by_policy(
        config.model_state_policy, local.model_state, state.model_state
    )
    size = compat.axis_size(config.axis_name)
    # The loss exists before the backward starts: its reduction goes first, hidden behind the backward, and
    # is part of the one order in which all replicas communicate. Where loops have reduced, it follows them:
    # XLA would join it with a bucket in front of a loop, and then copy that bucket (GPU) or not overlap it (TPU).
    (loss,) = dependency.tie([local.loss], born.after_loops)
    total = outcome.over_replicas(
        local._replace(loss=loss, model_state=shared),
        policies,
        op=config.op,
        axis_name=config.axis_name,
        size=size,
    )

    def divided(gradients: Mapping[int, Any]) -> dict[int, Any]:
        return used.divide_by_weight_or_users(
            gradients, total, planned, size=size, mean_over=config.mean_over
        )

    # With weights, gradients are divided before they are sent: a narrow wire that holds their mean need not hold
    # their sums. What was sent earlier, in loops and in front of them, is divided now.
    early = set(born.grads) & set(born.sent.reduced)
    grads_to_send = born.grads
    if config.weighted:
        grads_to_send = dict(born.grads) | divided(
            {k: g for k, g in born.grads.items() if k not in early}
        )
    reduced, hook_state = birth.finish(
        config.wire,
        dataclasses.replace(born, grads=grads_to_send),
        after=dependency.token_of([total.loss]) if size > 1 else None,
    )
    late = {*early, *born.in_loops} if config.weighted else set(reduced)
    reduced |= divided({k: g for k, g in reduced.items() if k in late})
    local_model_state = outcome.unless_empty(local, local_model_state, own.model_state)
    new_own = Own(hook_state if stateful else own.hook_state, local_model_state)
    if config.carry_over:
        here = Carried(total.loss, tree_of(base, reduced), ())
        new = state._replace(model_state=total.model_state, carried=here)
        new_own = new_own._replace(
            carried=carry.buckets_of(born.grads, born.carried, config.wire.op)
        )
    else:
        # Fused with an operation of the backward that reads the same parameter, an update makes that operation wait.
        before = dependency.detach(select_trainable(base, state.params))
        moved, opt_state = _updated(config, base, before, state.opt_state, reduced, total.loss)
        if config.unused == "skip":
            moved, opt_state = used.keep_unused(
                config.optimizer, total.use, zeros, (moved, opt_state), (before, state.opt_state)
            )
        params = merge_frozen(base, moved, state.params)
        new = Replicated(state.step + 1, params, opt_state, total.model_state, state.rng)
        old = state._replace(params=merge_frozen(base, before, state.params))
        new, new_own = outcome.unless_empty(total, (new, new_own), (old, own))
    info = StepInfo(
        total.loss,
        total.aux,
        total.weight,
        updated=outcome.has_weight(total),
        used=used.by_leaf(total.use, planned, len(base.leaves)),
        nonfinite=count_nonfinite(born.grads, born.plan) if config.count_nonfinite else None,
    )
    return new, new_own, info, birth.decisions(born, config.carry_over)


def unsynced_step(
    config: StepConfig, state: Replicated, own: Own, unreduced: Unreduced | None, batch: Any
) -> tuple[Unreduced, StepInfo]:
    """Adds this step's gradients to what is held back. No collective."""
    base = config.plan_for(state.params, None)
    mine, leaves = birth.compute_unreduced(
        lambda *args: _local_gradients(config, base, *args),
        _local_arguments(config, state, own, unreduced, batch),
    )
    zeros = {place for place, leaf in enumerate(leaves) if leaf is None}
    mine = _with_held(config, mine, unreduced, zeros)
    planned = iter(leaves)
    grads = jax.tree.unflatten(
        base.treedef, [next(planned) if spec.planned else None for spec in base.leaves]
    )
    count = jnp.ones((), jnp.int32) + (0 if unreduced is None else unreduced.count)
    held = Unreduced(count, grads, mine.model_state, mine.gradient_weight, mine.use)
    return held, StepInfo(*outcome.metrics(mine), mine.weight)


def finish_step(config: StepConfig, state: Replicated, own: Own) -> tuple[Replicated, Own]:
    """Reduces what the last step carried over, and updates the parameters with its gradients."""
    base = config.plan_for(state.params, None)
    check_opt_state(config.optimizer, select_trainable(base, state.params), state.opt_state)
    state, own, _ = _finished(config, base, state, own)
    return state, own


def _finished(
    config: StepConfig, base: BucketPlan, state: Replicated, own: Own
) -> tuple[Replicated, Own, jax.Array | None]:
    """The same, and a token: it exists once everything that was carried over has crossed."""
    if state.carried is None:
        return state, own, None
    carry.check_carried(base, state.carried.reduced, own.carried, config.wire.op)
    reduced, token = carry.cross(config.wire, base, own.carried)
    reduced |= by_leaf(base, state.carried.reduced)
    before = select_trainable(base, state.params)
    moved, opt_state = _updated(config, base, before, state.opt_state, reduced, state.carried.loss)
    # As the step's own outputs are: XLA would let the forward pass read 16-bit parameters before they are rounded.
    moved = jax.tree.map(
        lambda x: lax.optimization_barrier(x) if x.dtype.itemsize < 4 else x, moved
    )
    params = merge_frozen(base, moved, state.params)
    new = Replicated(state.step + 1, params, opt_state, state.model_state, state.rng)
    return new, own._replace(carried=()), token


def _updated(
    config: StepConfig,
    base: BucketPlan,
    before: Any,
    opt_state: Any,
    reduced: Mapping[int, Any],
    loss: jax.Array,
) -> tuple[Any, Any]:
    """The trainable parameters ``before`` and the optimizer's state, after its update with ``reduced``."""
    updates, opt_state = optax.with_extra_args_support(config.optimizer).update(
        tree_of(base, reduced), opt_state, before, value=loss
    )
    return optax.apply_updates(before, updates), opt_state


def _with_held(
    config: StepConfig, mine: Outcome, unreduced: Unreduced | None, zeros: Collection[int]
) -> Outcome:
    """This replica's outcome, with the weight and the use of what it held back."""
    held_weight, held_use = outcome.of_held_back(
        unreduced, weighted=config.weighted, asks_for_use=config.asks_for_use
    )
    use = used.together(mine.use, held_use, zeros, weighted=config.weighted)
    return mine._replace(held_weight=held_weight, use=use)


def _looks_into_loops(config: StepConfig) -> bool:
    if config.count_nonfinite:  # what a loop has reduced, nobody can count any more
        return False
    return compat.platform() != "cpu" if config.in_loops is None else config.in_loops


def _local_arguments(
    config: StepConfig, state: Replicated, own: Own, unreduced: Unreduced | None, batch: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Arguments of ``_local_gradients``, all of them this replica's own."""
    axis = config.axis_name
    held_back = 0 if unreduced is None else unreduced.count
    held_grads = None if unreduced is None else unreduced.grads
    model_state = merge(state.model_state, own.model_state)
    if unreduced is not None:
        model_state = unreduced.model_state
    rng = None
    if state.rng is not None:
        rng = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), held_back)
        if config.rng_per_replica:
            rng = jax.random.fold_in(rng, lax.axis_index(axis))
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
) -> tuple[Outcome, list[Any]]:
    """Outcome and gradients of this replica's share of the batch; what was held back is added to the gradients."""

    def loss(trainable: Any, microbatch: Any, model_state: Any, rng: Any) -> Any:
        return config.loss(merge_frozen(plan, trainable, params), microbatch, model_state, rng)

    def noted(*args: Any) -> tuple[Any, tuple[Any, Any]]:
        if config.asks_for_use:
            (value, rest), mask = probe.with_use(loss, config.axis_name)(*args)
        else:
            (value, rest), mask = loss(*args), None
        return value, (mask, rest)

    def grad_fn(trainable: Any, microbatch: Any, model_state: Any, key: Any) -> Any:
        args = (trainable, microbatch, model_state, key if config.rng_per_replica else rng)
        (value, (mask, rest)), grads = jax.value_and_grad(noted, has_aux=True)(*args)
        weight, model_state, aux = rest
        kind = None
        if config.weighted:
            kind, value = jnp.zeros((0,), value.dtype), scalars.wide(value)
            value, aux, grads = outcome.with_weight_only(weight, (value, aux, grads))
        return (value, (mask, weight, aux, kind), model_state), grads

    accumulated = accumulate_with_carry(
        grad_fn,
        config.num_microbatches,
        op="sum" if config.weighted else "mean",
        dtype=config.accumulate_dtype,
    )
    (value, (masks, weights, aux, kind), model_state), grads = accumulated(
        select_trainable(plan, params), batch, model_state, rng if config.rng_per_replica else None
    )
    use = used.of_microbatches(masks, weights)
    if held_grads is not None:
        grads = jax.tree.map(
            lambda held, g: g if held is None else held + g,
            held_grads,
            grads,
            is_leaf=lambda x: x is None,
        )
    mine = outcome.of_microbatches(value, kind, weights, use, aux, model_state)
    return mine, jax.tree.leaves(grads)
