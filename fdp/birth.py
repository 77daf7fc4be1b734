"""Reductions where gradients are born: traces a gradient computation, plans its buckets, places their reductions.

    local_fn --trace--> jaxpr --ready order--> plan
                          |---loops?---> loop bodies reduce last iteration's slices while they compute this one's
                          +---evaluate-> outputs, gradients --finish--> all other buckets, in ready order

In straight code a reduction written after the gradient compiles to the same schedule as one written inside the
backward (XLA sees the same graph), so only loops are rewritten; a loop is a wall that XLA does not look through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdp import carry, compat, dependency, intercept, jaxprs, schedules, wire
from fdp import pack as packings
from fdp.intercept import Interception
from fdp.order import Births, read_births
from fdp.plan import Bucket, BucketPlan, plan_buckets, without
from fdp.schedules import Launch
from fdp.wire import HookStates, Sent, Wire

# Below this a loop's reductions cost more in launches than they could hide; one reduction after the loop is better.
MIN_SLICE_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class Born:
    """A gradient computation that has run, with what is reduced so far.

    Attributes:
      outputs: everything the computation returned besides gradients.
      grads: this replica's gradients by leaf index, those that are not reduced yet.
      in_loops: gradients that were reduced inside loops, by leaf index.
      plan: the plan of all gradients that are not zero by the program.
      zeros: the others, by leaf index: zeros, equal everywhere, that nobody has to send.
      carried: what is left for the next step, see ``fdp.carry``; in ``grads``, and in no launch.
      launches: what is sent outside of loops, and in this step.
      sent: what of that is sent already.
      after_loops: token; exists once the last loop's reductions do, or what ``compute`` was told to wait for.
      interception: what was found and decided about loops.
    """

    outputs: Any
    grads: Mapping[int, Any]
    in_loops: Mapping[int, Any]
    plan: BucketPlan
    zeros: Mapping[int, Any]
    carried: tuple[Bucket, ...]
    launches: tuple[Launch, ...]
    sent: Sent
    after_loops: Any
    interception: Interception


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Decisions:
    """What a trace decided: nothing of it is an array, so that it leaves a traced function beside its results.

    Attributes:
      plan: as in ``Born``.
      unused: leaves whose gradient is zero by the program.
      carried: as in ``Born``.
      carry_over: how many buckets were to be carried.
      loops: the table of what was decided about loops.
    """

    plan: BucketPlan
    unused: tuple[int, ...]
    carried: tuple[Bucket, ...]
    carry_over: int
    loops: str


def compute(
    the_wire: Wire,
    local_fn: Callable[..., tuple[Any, Any]],
    args: Sequence[Any],
    plan_for: Callable[[Births], BucketPlan],
    states: HookStates | None,
    *,
    in_loops: bool,
    carry_over: int = 0,
    after: jax.Array | None = None,
) -> Born:
    """Runs ``local_fn``, reducing inside its loops.

    Args:
      the_wire: how gradients cross.
      local_fn: ``(*args) -> (outputs, grads)``; ``grads`` is a list, the gradients of the planned leaves by leaf index.
      args: its arguments, varying over the axis where JAX tracks that.
      plan_for: given what the trace says of the gradients, as positions among the planned leaves, the plan.
      states: hook states, one per launch of the plan; None for a hook without state. With them everything in the plan
        is launched, gradients that are zero by the program too: the states were made before there was a program.
      in_loops: whether to look for loops.
      carry_over: how many buckets are not to be sent.
      after: token that reductions wait for.

    Raises:
      ValueError: the plan has a leaf in no bucket, and its gradient is not zero.
    """
    closed, shapes = jax.make_jaxpr(local_fn, return_shape=True)(*args)
    out_tree = jax.tree.structure(shapes[0])
    positions = range(out_tree.num_leaves, len(closed.out_avals))
    births = read_births(closed, positions)
    plan = plan_for(births)
    planned = [i for i, spec in enumerate(plan.leaves) if spec.planned]
    unused = {planned[i] for i in births.zero} if states is None else set[int]()
    plan = without(plan, unused)
    _check_covered(plan, planned, unused)
    leaf_at = {p: leaf for p, leaf in zip(positions, planned, strict=True) if leaf not in unused}
    alone = compat.axis_size(the_wire.axis_name) == 1
    look = in_loops and the_wire.schedule.in_loops and states is None and not alone
    interception = intercept.analyze(
        closed, leaf_at, min_slice_bytes=MIN_SLICE_BYTES if look else float("inf")
    )
    handled = {leaf for loop in interception.loops for leaf in loop.leaves}
    carried = () if alone else carry.choose(without(plan, handled), carry_over)
    elsewhere = {*handled, *(leaf for bucket in carried for leaf in bucket.leaf_indices)}
    launches = schedules.check_launches(the_wire.schedule, without(plan, elsewhere))
    if states is None:
        states = tuple(the_wire.hook.init(launch.bucket) for launch in launches)
    progress = [wire.nothing_sent(states)]

    def reduce_ready(gradients: dict[int, Any], token: Any) -> tuple[dict[int, Any], Any]:
        wire.refuse_already_summed(the_wire, plan, gradients)
        before = progress[0]
        progress[0] = now = wire.send(the_wire, launches, gradients, before, after=token)
        return {}, now.token if len(now.tokens) > len(before.tokens) else token

    flat_args = jax.tree.leaves(args)
    evaluation = intercept.evaluate(
        interception,
        flat_args,
        reduce_slices=_slice_reducer(the_wire, plan),
        copied=_copied(the_wire, plan),
        reduce_ready=reduce_ready,
        token=jnp.zeros((), jnp.float32) if after is None else after,
        # On GPU what is sent before a loop overlaps only with an iteration outside of it; on TPU with the loop as it
        # is, and one copy of the body less is compiled.
        peel=compat.platform() != "tpu",
    )
    outputs = jax.tree.unflatten(out_tree, evaluation.outputs[: out_tree.num_leaves])
    gradients = {leaf: evaluation.outputs[p] for p, leaf in leaf_at.items()}
    zeros = {i: jnp.zeros(plan.leaves[i].shape, plan.leaves[i].dtype) for i in sorted(unused)}
    reduced = {leaf: g for leaf, g in gradients.items() if leaf in evaluation.reduced}
    local = {leaf: g for leaf, g in gradients.items() if leaf not in evaluation.reduced}
    after = evaluation.token if interception.loops else after
    return Born(
        outputs, local, reduced, plan, zeros, carried, launches, progress[0], after, interception
    )


def compute_unreduced(
    local_fn: Callable[..., tuple[Any, Any]], args: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """(outputs, gradients) of a ``local_fn`` as for ``compute``; None for gradients that are zero by the program."""
    closed, shapes = jax.make_jaxpr(local_fn, return_shape=True)(*args)
    out_tree = jax.tree.structure(shapes[0])
    positions = range(out_tree.num_leaves, len(closed.out_avals))
    zero = set(read_births(closed, positions).zero)
    values = jaxprs.run_body(jaxprs.body_of(closed), jax.tree.leaves(args))
    gradients = [None if i in zero else values[p] for i, p in enumerate(positions)]
    return jax.tree.unflatten(out_tree, values[: out_tree.num_leaves]), gradients


def finish(
    the_wire: Wire, born: Born, *, after: jax.Array | None = None
) -> tuple[dict[int, Any], HookStates]:
    """Reduces what is left, in launch order.

    Args:
      the_wire: as for ``compute``.
      born: its result.
      after: token that the first launches wait for.

    Returns:
      Reduced gradients by leaf index, without those that are carried over, and the hook states.
    """
    wire.refuse_already_summed(the_wire, born.plan, born.grads)
    if compat.axis_size(the_wire.axis_name) == 1:
        return {**born.zeros, **wire.alone(the_wire, born.grads)}, born.sent.states
    first = dependency.join([after, born.after_loops])
    sent = wire.send(the_wire, born.launches, born.grads, born.sent, after=first)
    return {**born.zeros, **born.in_loops, **sent.reduced}, sent.states


def decisions(born: Born, carry_over: int) -> Decisions:
    """What of a computation is known without running it."""
    loops = born.interception.report([leaf.path for leaf in born.plan.leaves])
    return Decisions(born.plan, tuple(born.zeros), born.carried, carry_over, loops)


def explain(decided: Decisions) -> str:
    """The plan as a table, leaves whose gradient is zero by the program, then what was decided about loops."""
    lines = [str(decided.plan), decided.loops]
    if decided.unused:
        named = ", ".join(decided.plan.leaves[i].path for i in decided.unused)
        lines.insert(
            1,
            f"{len(decided.unused)} leaves unused by the loss, gradient zero, not reduced: {named}",
        )
    if decided.carried:
        named = "; ".join(", ".join(bucket.paths) for bucket in decided.carried)
        number = "1 bucket" if len(decided.carried) == 1 else f"{len(decided.carried)} buckets"
        lines.insert(1, f"{number} carried over to the next step, in this order: {named}")
    elif decided.carry_over:
        lines.insert(
            1,
            f"carry_over={decided.carry_over} carries nothing: outside of loops there is one bucket at most, and it "
            "crosses at once. The update waits for the next step all the same: use smaller buckets, or carry_over=0",
        )
    return "\n".join(lines)


def _check_covered(plan: BucketPlan, planned: Sequence[int], unused: set[int]) -> None:
    """Raises where a gradient is in no bucket: it would stay what this replica made of it."""
    bucketed = {i for bucket in plan.buckets for i in bucket.leaf_indices}
    missing = [plan.leaves[i].path for i in planned if i not in bucketed and i not in unused]
    if missing:
        raise ValueError(
            f"expected a plan with every trainable leaf that the loss uses in a bucket, got one without "
            f"{missing[0]!r}: it was made for a loss that does not use it. Make the plan anew "
            "(fdp.plan_buckets(params), or trainer.plan of a trainer without plan=)."
        )


def _slice_plan(plan: BucketPlan, loop: intercept.Loop) -> tuple[BucketPlan, tuple[int, ...]]:
    """Buckets of one iteration's slices, by the caps of the plan; and its leaves as leaves of ``plan``."""
    by_path = {
        plan.leaves[leaf].path: one for leaf, one in zip(loop.leaves, loop.slices, strict=True)
    }
    slice_plan = plan_buckets(
        by_path, bucket_bytes=plan.bucket_bytes, first_bucket_bytes=plan.bucket_bytes
    )
    leaf_of = {plan.leaves[leaf].path: leaf for leaf in loop.leaves}
    return slice_plan, tuple(leaf_of[spec.path] for spec in slice_plan.leaves)


def _copied(the_wire: Wire, plan: BucketPlan) -> Callable[[intercept.Loop], frozenset[int]]:
    """Which of a loop's leaves packing copies: a cast on the way costs them nothing.

    The others cross as they lie in memory. Were they to wait in another dtype, the cast would be a pass of its own
    over them (on a TPU, which else casts within the matmul, 10 to 14 % more memory traffic in the scanned transformer).
    """

    def copied(loop: intercept.Loop) -> frozenset[int]:
        slice_plan, leaf_of = _slice_plan(plan, loop)
        return frozenset(
            leaf_of[i]
            for launch in the_wire.schedule.launches(slice_plan)
            if packings.count_buffers(the_wire.packing, launch.bucket) < len(launch.bucket.shapes)
            for i in launch.bucket.leaf_indices
        )

    return copied


def _slice_reducer(the_wire: Wire, plan: BucketPlan) -> Callable[..., Any]:
    """Reduces one iteration's slices, bucket by bucket."""

    def reduce_slices(
        loop: intercept.Loop, slices: dict[int, Any], index: Any, token: Any, state: Any
    ) -> tuple[dict[int, Any], Any, Any]:
        wire.refuse_already_summed(the_wire, plan, slices)
        slice_plan, leaf_of = _slice_plan(plan, loop)
        leaves = {i: slices[leaf] for i, leaf in enumerate(leaf_of)}
        launches = the_wire.schedule.launches(slice_plan)
        states = tuple(the_wire.hook.init(launch.bucket) for launch in launches)
        # Also behind what was sent before the loop: its last bucket then overlaps the first iteration.
        sent = wire.send(the_wire, launches, leaves, wire.nothing_sent(states), after=token)
        reduced = {leaf: sent.reduced[i] for i, leaf in enumerate(leaf_of)}
        new_token = sent.token
        return reduced, token if new_token is None else new_token, state

    return reduce_slices
