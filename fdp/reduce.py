"""Gradients, one bucket at a time: from the leaf to the wire and back.

    leaf gradients --pack--> buffers --tie--> (wait for earlier launches) --hook--> reduced buffers --unpack--> leaves
                                                        ^                                 |
                                                        +------------- token -------------+

``reduce_gradients`` is the drop-in for ``jax.lax.pmean``; ``bucketed`` is the same as an optax transformation;
``make_reducer`` is what both, and the step builder, are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import optax
from jax import lax

from fdp import compat, dependency, hooks, pack as packings, schedules
from fdp.compat import AxisName
from fdp.hooks import BucketView, CommHook
from fdp.pack import Packing
from fdp.plan import BucketPlan, flatten_like_plan, plan_buckets
from fdp.schedules import Schedule

Tree = TypeVar("Tree")
ReducerState = tuple[Any, ...]


class Reducer(NamedTuple):
    """Functions that reduce gradients over an axis, in the shape of an optax transformation.

    Attributes:
      init: ``params -> state``: one hook state per launch; call it anywhere. All empty for hooks without state.
      update: ``(grads, state, *, after=None) -> (grads, state)``: call it where the axis is bound. ``after`` is a
        token (``fdp.dependency``) that the first launches wait for.
      plan: ``params -> BucketPlan``: the plan these functions use for such a tree.
    """

    init: Callable[[Any], ReducerState]
    update: Callable[..., tuple[Any, ReducerState]]
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
    """Puts plan, hook, schedule and packing together. Arguments as for ``reduce_gradients``."""
    hook = _member("hook", hook, CommHook, hooks.all_reduce, "fdp.hooks.all_reduce()")
    schedule = _member("schedule", schedule, Schedule, schedules.ordered, "fdp.schedules.ordered()")
    if op not in ("mean", "sum"):
        raise ValueError(f'expected op to be "mean" or "sum", got {op!r}.')
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(
            f"expected plan to be a BucketPlan, got {type(plan).__name__}: make it with fdp.plan_buckets(params)."
        )
    packing = _member("pack", pack, Packing, packings.auto, "fdp.pack.flat()")

    def plan_for(params: Any) -> BucketPlan:
        return plan_buckets(params) if plan is None else plan

    def init(params: Any) -> ReducerState:
        launches = schedules.check_launches(schedule, plan_for(params))
        return tuple(hook.init(launch.bucket) for launch in launches)

    def update(
        grads: Tree, state: ReducerState, *, after: jax.Array | None = None
    ) -> tuple[Tree, ReducerState]:
        size = compat.axis_size(axis_name)
        the_plan = plan_for(grads)
        leaves = flatten_like_plan(the_plan, grads)
        _refuse_already_summed(the_plan, leaves, axis_name)
        launches = schedules.check_launches(schedule, the_plan)
        if len(state) != len(launches):
            raise ValueError(
                f"expected one hook state per launch ({len(launches)} under schedule {schedule.name!r}), got "
                f"{len(state)}: make the state with init(params) of the same reducer, plan and schedule."
            )
        if size == 1:
            return jax.tree.unflatten(the_plan.treedef, _alone(the_plan, leaves, axis_name)), state
        reduced, new_state = _run(launches, leaves, state, hook, packing, axis_name, size, op, after)
        return jax.tree.unflatten(the_plan.treedef, reduced), new_state

    return Reducer(init, update, plan_for)


def _run(
    launches: Sequence[schedules.Launch],
    leaves: Sequence[Any],
    states: ReducerState,
    hook: CommHook,
    packing: Packing,
    axis_name: AxisName,
    size: int,
    op: str,
    after: jax.Array | None,
) -> tuple[list[Any], ReducerState]:
    """Every launch in turn: pack, wait, cross the axis, unpack."""
    out = list(leaves)
    tokens: list[jax.Array | None] = []
    new_states: list[Any] = []
    for k, (launch, state) in enumerate(zip(launches, states, strict=True)):
        bucket = launch.bucket
        waits_for = [tokens[j] for j in launch.after] if launch.after else [after]
        if launch.after_backward:
            waits_for.append(dependency.token_of([leaves[i] for b in launches for i in b.bucket.leaf_indices]))
        buffers = packing.pack(bucket, [leaves[i] for i in bucket.leaf_indices])
        waited_for = dependency.join(waits_for)
        buffers = dependency.tie(buffers, waited_for)
        view = BucketView(bucket, k, k == len(launches) - 1, axis_name, size, op)
        reduced, new_state = hook.reduce(buffers, state, view)
        _check_reduced(hook, view, buffers, reduced)
        token = dependency.token_of(reduced)
        # A bucket without elements has no token of its own, and must not break the chain it is a link of.
        tokens.append(waited_for if token is None else token)
        new_states.append(new_state)
        for index, leaf in zip(bucket.leaf_indices, packing.unpack(bucket, reduced), strict=True):
            out[index] = leaf
    return out, tuple(new_states)


def _check_reduced(hook: CommHook, view: BucketView, given: Sequence[Any], reduced: Sequence[Any]) -> None:
    """Raises where a hook returned other shapes or dtypes than it got: they would go on into the gradients."""
    expected = [f"{x.dtype.name}{list(x.shape)}" for x in given]
    got = [f"{x.dtype.name}{list(x.shape)}" for x in reduced]
    if expected != got:
        raise ValueError(
            f"expected hook {hook.name!r} to return the shapes and dtypes it was given, {expected} for bucket "
            f"{view.index} (first leaf {view.bucket.paths[0]!r}), got {got}: let reduce cast and reshape them back."
        )


def _alone(plan: BucketPlan, leaves: Sequence[Any], axis_name: AxisName) -> list[Any]:
    """One replica: nothing to reduce and nothing to pack; only the type may have to say "replicated"."""
    out = list(leaves)
    if compat.tracks_varying(axis_name):
        for bucket in plan.buckets:
            for index in bucket.leaf_indices:
                out[index] = lax.psum(leaves[index], axis_name)
    return out


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

    hook_states: ReducerState


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

    def update(updates: Any, state: BucketedState, params: Any = None) -> tuple[Any, BucketedState]:
        reduced, hook_states = reducer.update(updates, state.hook_states)
        return reduced, BucketedState(hook_states)

    return optax.GradientTransformation(init, update)


def _member(name: str, value: Any, kind: Any, default: Callable[[], Any], example: str) -> Any:
    """An argument of an open family; the likeliest slip is to pass the factory instead of its result."""
    if value is None:
        return default()
    if isinstance(value, kind):
        return value
    hint = f"call it: {example}" if callable(value) else f"for example {example}"
    raise TypeError(f"expected {name} to be a {kind.__name__}, got {value!r}: {hint}.")


def _refuse_already_summed(plan: BucketPlan, leaves: Sequence[Any], axis_name: AxisName) -> None:
    """Raises where JAX's own type says that a gradient no longer differs between replicas."""
    if not compat.tracks_varying(axis_name):
        return
    names = set(compat.axis_names(axis_name))
    summed = [
        plan.leaves[i].path
        for bucket in plan.buckets
        for i in bucket.leaf_indices
        if not names <= compat.varying_axes(leaves[i])
    ]
    if summed:
        raise ValueError(
            f"expected gradients that differ per replica over axis {axis_name!r}, but JAX has already summed "
            f"{len(summed)} of them, the first at {summed[0]!r}: inside a checked jax.shard_map the gradient of "
            "replicated params is summed over the axis by JAX itself, and reducing it again would make it "
            f"wrong. Differentiate with respect to local params: params = fdp.varying(params, {axis_name!r}) "
            "before jax.grad. (Already reduced gradients need no second reduction.)"
        )
