"""How gradients cross an axis, and the one place where they do.

leaf gradients --pack--> buffers --tie--> (wait for earlier launches) --hook--> reduced buffers --unpack--> leaves
                                                    ^                                 |
                                                    +------------- token -------------+
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from fdp import compat, dependency, held, hooks, schedules
from fdp import pack as packings
from fdp.compat import AxisName
from fdp.hooks import BucketView, CommHook
from fdp.pack import Packing
from fdp.plan import BucketPlan
from fdp.schedules import Launch, Schedule

HookStates = tuple[Any, ...]


class Wire(NamedTuple):
    """Everything about crossing an axis but the plan.

    Attributes:
      axis_name: mesh axis, or tuple of axes.
      hook: how a bucket crosses.
      schedule: when.
      packing: how leaves become buffers.
      op: ``"mean"`` or ``"sum"``.
    """

    axis_name: AxisName
    hook: CommHook
    schedule: Schedule
    packing: Packing
    op: str


def make_wire(
    axis_name: AxisName,
    *,
    hook: CommHook | None = None,
    schedule: Schedule | None = None,
    pack: Packing | None = None,
    op: str = "mean",
) -> Wire:
    """A ``Wire`` with defaults filled in and arguments checked.

    Raises:
      TypeError: an argument is not of its family.
      ValueError: ``op`` is unknown.
    """
    if op not in ("mean", "sum"):
        raise ValueError(f'expected op to be "mean" or "sum", got {op!r}.')
    return Wire(
        axis_name,
        _member("hook", hook, CommHook, hooks.all_reduce, "fdp.hooks.all_reduce()"),
        _member("schedule", schedule, Schedule, schedules.ordered, "fdp.schedules.ordered()"),
        _member("pack", pack, Packing, packings.auto, "fdp.pack.flat()"),
        op,
    )


class Sent(NamedTuple):
    """What has crossed so far.

    Attributes:
      reduced: leaf index -> reduced gradient.
      tokens: one per launch so far, in launch order.
      states: one hook state per launch of the plan; those of the launches so far are new.
    """

    reduced: dict[int, jax.Array]
    tokens: tuple[jax.Array | None, ...]
    states: HookStates

    @property
    def token(self) -> jax.Array | None:
        """Exists once everything sent so far is reduced."""
        return dependency.join(self.tokens)


def send(
    wire: Wire,
    launches: Sequence[Launch],
    gradients: Mapping[int, jax.Array],
    sent: Sent,
    *,
    after: jax.Array | None = None,
    used_at_once: bool = False,
) -> Sent:
    """Launches in order, from where ``sent`` stands, as long as all gradients of a launch are there.

    Args:
      wire: how.
      launches: all launches of the plan.
      gradients: leaf index -> this replica's gradient, for the leaves that exist by now.
      sent: what previous calls have sent; ``nothing_sent(states)`` at first.
      after: token that launches wait for which wait for no launch of this call.
      used_at_once: whether something waits for each bucket, rather than for all. On CPU, memory is not held on to then:
        what is reduced would not be usable before the last is.

    Returns:
      ``sent``, and what was launched now.
    """
    size = compat.axis_size(wire.axis_name)
    reduced, tokens, states = dict(sent.reduced), list(sent.tokens), list(sent.states)
    here = len(tokens)
    overlaps = not any(launch.after_backward for launch in launches)
    holds_on = overlaps and not used_at_once
    gave: list[Sequence[jax.Array]] = []  # of each launch of this call: what crossed the axis
    got: list[Sequence[jax.Array]] = []  # and what came back
    ends: list[jax.Array | None] = []  # tokens of launches that no later one waits for
    for k in range(here, len(launches)):
        bucket, waits_for, after_backward = launches[k]
        if any(index not in gradients for index in bucket.leaf_indices):
            break
        leaves = [gradients[index] for index in bucket.leaf_indices]
        waited_for = [tokens[j] for j in waits_for]
        if all(j < here for j in waits_for):
            waited_for.append(after)
        if after_backward:
            waited_for.append(dependency.token_of(list(gradients.values())))
        token = dependency.join(waited_for)
        buffers = wire.packing.pack(bucket, leaves)
        is_end = not any(k in later.after for later in launches[k + 1 :])
        view = BucketView(bucket, k, k == len(launches) - 1, wire.axis_name, size, wire.op)
        passed = None
        if overlaps and compat.platform() == "cpu":
            before = _all_before(launches, k) if is_end and holds_on else ()
            earlier = [buffer for j in before if j >= here for buffer in gave[j - here]]
            (out, states[k]), crossed = _reduce_kept(
                wire.hook, buffers, states[k], view, token, earlier
            )
            gave.append(crossed)
        else:
            if is_end:
                buffers = dependency.tie(buffers, token)
            else:
                buffers, passed = dependency.thread(buffers, token)
            out, states[k] = wire.hook.reduce(buffers, states[k], view)
        _check_reduced(wire.hook, view, buffers, out)
        got.append(out)
        new_token = dependency.join([dependency.token_of(out), passed])
        # A bucket without elements has no token of its own, and must not break the chain it is a link of.
        tokens.append(token if new_token is None else new_token)
        if is_end:
            ends.append(tokens[-1])
    for launch, token, out in zip(launches[here:], tokens[here:], got, strict=False):
        if holds_on and not any(token is end for end in ends):
            out = dependency.keep(out, dependency.join(ends))
        unpacked = wire.packing.unpack(launch.bucket, tuple(out))
        reduced.update(zip(launch.bucket.leaf_indices, unpacked, strict=True))
    return Sent(reduced, tuple(tokens), tuple(states))


def _reduce_kept(
    hook: CommHook,
    buffers: packings.Buffers,
    state: hooks.HookState,
    view: BucketView,
    token: jax.Array | None,
    earlier: Sequence[jax.Array],
) -> tuple[tuple[packings.Buffers, hooks.HookState], list[jax.Array]]:
    """``hook.reduce`` after ``token``; also returns what its collectives read, whose memory is nobody else's.

    On CPU alone, where shared memory is a dependency: see ``dependency.tie`` for ``earlier``.
    """
    crossed: list[jax.Array] = []

    def hold(read: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The first bucket waits for nothing but itself: untied, XLA would keep the arrays that it is computed from.
        first = dependency.token_of(read) if token is None else token
        tied = dependency.tie(read, first, earlier)
        crossed.extend(tied)
        return tied

    reduced = held.run(lambda x, s: hook.reduce(x, s, view), (buffers, state), hold)
    return reduced, crossed


def _all_before(launches: Sequence[Launch], k: int) -> list[int]:
    """Launches that must be done before launch ``k`` starts."""
    found: set[int] = set()
    waiting = [k]
    while waiting:
        new = set(launches[waiting.pop()].after) - found
        found |= new
        waiting += new
    return sorted(found)


def nothing_sent(states: HookStates) -> Sent:
    """Where ``send`` starts."""
    return Sent({}, (), states)


def alone(wire: Wire, gradients: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    """One replica: nothing to reduce and nothing to pack; only the type may have to say "replicated"."""
    if not compat.tracks_varying(wire.axis_name):
        return dict(gradients)
    return {index: lax.psum(gradient, wire.axis_name) for index, gradient in gradients.items()}


def refuse_already_summed(wire: Wire, plan: BucketPlan, gradients: Mapping[int, jax.Array]) -> None:
    """Raises where JAX's own type says that a gradient no longer differs between replicas.

    Raises:
      ValueError: it was summed already; the message gives the edit.
    """
    axis_name = wire.axis_name
    names = set(compat.tracked_axes(axis_name))
    summed = [
        plan.leaves[index].path
        for index, gradient in sorted(gradients.items())
        if not names <= compat.varying_axes(gradient)
    ]
    if summed:
        raise ValueError(
            f"expected gradients that differ per replica over axis {axis_name!r}, but JAX has already summed "
            f"{len(summed)} of them, the first at {summed[0]!r}: inside a checked jax.shard_map the gradient of "
            "replicated params is summed over the axis by JAX itself, and reducing it again would make it "
            f"wrong. Differentiate with respect to local params: params = fdp.varying(params, {axis_name!r}) "
            "before jax.grad. (Already reduced gradients need no second reduction.)"
        )


def _check_reduced(
    hook: CommHook, view: BucketView, given: Sequence[Any], reduced: Sequence[Any]
) -> None:
    """Raises where a hook returned other shapes or dtypes than it got: they would go on into the gradients."""
    expected = [f"{x.dtype.name}{list(x.shape)}" for x in given]
    got = [f"{x.dtype.name}{list(x.shape)}" for x in reduced]
    if expected != got:
        raise ValueError(
            f"expected hook {hook.name!r} to return the shapes and dtypes it was given, {expected} for bucket "
            f"{view.index} (first leaf {view.bucket.paths[0]!r}), got {got}: let reduce cast and reshape them back."
        )


def _member(name: str, value: Any, kind: Any, default: Callable[[], Any], example: str) -> Any:
    """An argument of an open family; the likeliest slip is to pass the factory instead of its result."""
    if value is None:
        return default()
    if isinstance(value, kind):
        return value
    hint = f"call it: {example}" if callable(value) else f"for example {example}"
    raise TypeError(f"expected {name} to be a {kind.__name__}, got {value!r}: {hint}.")
