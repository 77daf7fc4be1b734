"""Reducing gradients that exist: the drop-in for ``pmean``, and the same as an optax transformation.

``reduce_gradients`` and ``bucketed`` are ``make_reducer``: a plan and a wire (``fdp.wire``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from fdp import compat, schedules, wire
from fdp.compat import AxisName
from fdp.hooks import CommHook
from fdp.match import flatten_like_plan
from fdp.pack import Packing
from fdp.plan import BucketPlan, plan_buckets
from fdp.schedules import Schedule
from fdp.wire import HookStates

Tree = TypeVar("Tree")


class Reducer(NamedTuple):
    """Functions that reduce gradients over an axis, in the shape of an optax transformation.

    Attributes:
      init: ``params -> state``: one hook state per launch; call it anywhere. All empty for hooks without state.
      update: ``(grads, state, *, after=None) -> (grads, state)``: call it where the axis is bound. ``after`` is a
        token (``fdp.dependency``) that the first launches wait for.
      plan: ``params -> BucketPlan``: the plan these functions use for such a tree.
    """

    init: Callable[[Any], HookStates]
    update: Callable[..., tuple[Any, HookStates]]
    plan: Callable[[Any], BucketPlan]


def make_reducer(
    axis_name: AxisName,
    *,
    plan: BucketPlan | None = None,
    hook: CommHook | None = None,
    schedule: Schedule | None = None,
    pack: Packing | None = None,
    op: str = "mean",
) -> Reducer:
    """Puts plan, hook, schedule and packing together. Arguments and errors as for ``reduce_gradients``."""
    the_wire = wire.make_wire(axis_name, hook=hook, schedule=schedule, pack=pack, op=op)
    check_plan(plan)

    def plan_for(params: Any) -> BucketPlan:
        return plan_buckets(params) if plan is None else plan

    def init(params: Any) -> HookStates:
        launches = schedules.check_launches(the_wire.schedule, plan_for(params))
        return tuple(the_wire.hook.init(launch.bucket) for launch in launches)

    def update(
        grads: Any, state: HookStates, *, after: jax.Array | None = None
    ) -> tuple[Any, HookStates]:
        size = compat.axis_size(axis_name)
        the_plan = plan_for(grads)
        leaves = flatten_like_plan(the_plan, grads)
        gradients = {i: leaves[i] for bucket in the_plan.buckets for i in bucket.leaf_indices}
        wire.refuse_already_summed(the_wire, the_plan, gradients)
        launches = schedules.check_launches(the_wire.schedule, the_plan)
        if len(state) != len(launches):
            raise ValueError(
                f"expected one hook state per launch ({len(launches)} under schedule "
                f"{the_wire.schedule.name!r}), got {len(state)}: make the state with init(params) of the same "
                "reducer, plan and schedule."
            )
        if size == 1:
            reduced = wire.alone(the_wire, gradients)
        else:
            sent = wire.send(the_wire, launches, gradients, wire.nothing_sent(state), after=after)
            reduced, state = sent.reduced, sent.states
        out = [reduced.get(index, leaf) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(the_plan.treedef, out), state

    return Reducer(init, update, plan_for)


def check_plan(plan: Any) -> None:
    """Raises unless ``plan`` is a plan, or None."""
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(
            f"expected plan to be a BucketPlan, got {type(plan).__name__}: make it with fdp.plan_buckets(params)."
        )


def reduce_gradients(
    grads: Tree,
    axis_name: AxisName,
    *,
    plan: BucketPlan | None = None,
    hook: CommHook | None = None,
    schedule: Schedule | None = None,
    pack: Packing | None = None,
    op: str = "mean",
) -> Tree:
    """Reduces gradients over a mesh axis in buckets: the drop-in for ``jax.lax.pmean(grads, axis_name)``.

    Call it inside ``jax.shard_map`` (check on or off), ``jax.pmap`` or ``jax.vmap(axis_name=...)``, on the gradients
    that this replica computed. Inside a checked ``shard_map``, differentiate with respect to
    ``fdp.varying(params, axis_name)``, or JAX has summed the gradients before they get here.

    Args:
      grads: pytree of this replica's gradients, any shapes.
      axis_name: mesh axis, or tuple of axes.
      plan: from ``plan_buckets(params)``; made from ``grads`` with its defaults if not given. Leaves the plan
        leaves out are returned as they came.
      hook: how a bucket crosses the axis; ``fdp.hooks.all_reduce()`` by default. Hooks with state need
        ``bucketed`` or ``data_parallel``.
      schedule: when each bucket crosses; ``fdp.schedules.ordered()`` by default.
      pack: how leaves become buffers; by platform if not given (``fdp.pack.auto()``).
      op: ``"mean"`` (divides by the number of replicas before the sum) or ``"sum"``.

    Returns:
      Gradients of the same structure, shapes and dtypes, equal on all replicas (bit for bit), replicated by type
      where JAX tracks that. With one replica: ``grads``.

    Raises:
      NameError: the axis is not bound.
      ValueError: ``grads`` do not match ``plan``, were already summed by JAX, ``op`` is unknown, or the hook
        has state.
      TypeError: an argument of the wrong kind.

    Source: paper section 3.2; torch ``DistributedDataParallel``'s reducer.

    Example:
      >>> import jax, jax.numpy as jnp, fdp
      >>> grads = {"w": jnp.arange(4.0)}  # one gradient on each of four replicas
      >>> jax.vmap(lambda g: fdp.reduce_gradients(g, "data"), axis_name="data")(grads)["w"]
      Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    reducer = make_reducer(axis_name, plan=plan, hook=hook, schedule=schedule, pack=pack, op=op)
    state = reducer.init(grads)
    if jax.tree.leaves(state):
        hook_name = hook.name if hook is not None else "all_reduce"
        raise ValueError(
            f"expected a hook without state, got {hook_name!r}, whose state would be lost: use "
            "fdp.bucketed(...) as an optax transformation, or fdp.data_parallel(..., hook=...), which carry it."
        )
    return reducer.update(grads, state)[0]


class BucketedState(NamedTuple):
    """State of ``bucketed``: one hook state per launch. Belongs to one replica."""

    hook_states: HookStates


def bucketed(
    axis_name: AxisName,
    *,
    plan: BucketPlan | None = None,
    hook: CommHook | None = None,
    schedule: Schedule | None = None,
    pack: Packing | None = None,
    op: str = "mean",
) -> optax.GradientTransformation:
    """``reduce_gradients`` as an optax transformation, to stand first in ``optax.chain``.

    ``init`` may be called anywhere, ``update`` where the axis is bound. The state of a stateful hook belongs to one
    replica: shard it over the axis, never replicate it. Arguments and errors as for ``reduce_gradients``.
    """
    reducer = make_reducer(axis_name, plan=plan, hook=hook, schedule=schedule, pack=pack, op=op)

    def init(params: Any) -> BucketedState:
        return BucketedState(reducer.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, BucketedState]:
        reduced, hook_states = reducer.update(updates, state.hook_states)
        return reduced, BucketedState(hook_states)

    return optax.GradientTransformation(init, update)
