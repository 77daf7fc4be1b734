"""``value_and_grad`` whose gradients come back reduced, each reduction placed where its gradients are born."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fdp import birth, compat, wire
from fdp.compat import AxisName
from fdp.hooks import CommHook
from fdp.loss import check_scalar_loss
from fdp.match import flatten_like_plan
from fdp.order import Births
from fdp.pack import Packing
from fdp.plan import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_FIRST_BUCKET_BYTES,
    BucketPlan,
    plan_buckets,
)
from fdp.reduce import check_plan
from fdp.schedules import Schedule
from fdp.wire import Wire


@dataclasses.dataclass(frozen=True)
class ReducedGrad:
    """A gradient function that reduces; call it like the one it is made of.

    Attributes:
      local: ``(params, *args, **keywords) -> (value, grads)`` without reduction.
      wire: how gradients cross the axis.
      plan_for: ``(params, births) -> BucketPlan``.
      in_loops: whether to look into loops.
    """

    local: Callable[..., Any]
    wire: Wire
    plan_for: Callable[[Any, Births | None], BucketPlan]
    in_loops: bool

    def __call__(self, params: Any, *args: Any, **keywords: Any) -> Any:
        """What ``local`` returns, with reduced gradients. Call it where the axis is bound."""
        base = self.plan_for(params, None)
        planned = [i for i, spec in enumerate(base.leaves) if spec.planned]

        def local_fn(params: Any, args: Any, keywords: Any) -> tuple[Any, list[Any]]:
            value, grads = self.local(params, *args, **keywords)
            leaves = flatten_like_plan(base, grads)
            rest = [
                None if spec.planned else g for spec, g in zip(base.leaves, leaves, strict=True)
            ]
            return (value, rest), [leaves[i] for i in planned]

        born = birth.compute(
            self.wire,
            local_fn,
            (compat.varying(params, self.wire.axis_name), args, keywords),
            lambda births: self.plan_for(params, births.at(planned)),
            None,
            in_loops=self.in_loops,
        )
        value, rest = born.outputs
        reduced, _ = birth.finish(self.wire, born)
        leaves = [reduced.get(index, rest[index]) for index in range(len(rest))]
        return value, jax.tree.unflatten(base.treedef, leaves)

    def with_local(self, local: Callable[..., Any]) -> ReducedGrad:
        """The same reduction of another gradient function: what ``accumulate`` makes of it."""
        return dataclasses.replace(self, local=local)


def value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: AxisName,
    *,
    plan: BucketPlan | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    hook: CommHook | None = None,
    schedule: Schedule | None = None,
    pack: Packing | None = None,
    op: str = "mean",
    has_aux: bool = False,
    in_loops: bool | None = None,
) -> ReducedGrad:
    """``jax.value_and_grad`` for replicated params inside ``shard_map``, ``pmap`` or ``vmap``, with reduced gradients.

    Traces the gradient once, reads from it the order in which gradients become ready, buckets them in that order, and
    reduces each bucket as soon as its last gradient exists. Where gradients come out of a ``lax.scan`` one slice an
    iteration (models that scan over their layers), the reduction moves into the loop, one iteration late: layer k + 1
    is on the wire while layer k is computed. The model is not changed, the result is what reducing afterwards gives.
    Casts replicated params to local ones by itself (``fdp.varying``).

    Args:
      loss_fn: ``loss_fn(params, *args, **keywords) -> loss``, or ``(loss, aux)``.
      axis_name: mesh axis, or tuple of axes.
      plan: a plan for ``params``; otherwise made from the ready order with the two caps below. Leaves it leaves out
        come back unreduced.
      bucket_bytes, first_bucket_bytes: as for ``plan_buckets``.
      hook, schedule, pack, op: as for ``reduce_gradients``; hooks with state need ``data_parallel``.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      in_loops: whether to reduce inside loops; by default on GPU and TPU, not on CPU, where loop bodies run without
        concurrency and nothing would be hidden.

    Returns:
      A function ``(params, *args, **keywords) -> (loss, grads)`` or ``((loss, aux), grads)``. Loss and aux are this
      replica's own, the gradients are reduced. ``fdp.accumulate`` of it reduces once for all microbatches.

    Raises:
      NameError, ValueError, TypeError: as for ``reduce_gradients`` and ``plan_buckets``, when called; also where the
        loss is no floating-point scalar.

    Source: paper section 3.2.3; torch DDP's autograd hooks, of which there are none here.

    Example:
      >>> import jax, jax.numpy as jnp, fdp
      >>> grad_fn = fdp.value_and_grad(lambda w, x: jnp.mean(w * x), "data")
      >>> x = jnp.arange(8.0).reshape(4, 2)  # four replicas
      >>> losses, grads = jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")(jnp.float32(2), x)
      >>> grads
      Array([3.5, 3.5, 3.5, 3.5], dtype=float32)
    """
    the_wire = wire.make_wire(axis_name, hook=hook, schedule=schedule, pack=pack, op=op)
    check_plan(plan)

    def checked_loss(params: Any, *args: Any, **keywords: Any) -> Any:
        out = loss_fn(params, *args, **keywords)
        if not has_aux:
            return check_scalar_loss(out)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"expected loss_fn to return (loss, aux), as has_aux=True says, got {type(out).__name__}."
            )
        return check_scalar_loss(out[0], "(loss, aux)"), out[1]

    def plan_for(params: Any, births: Births | None) -> BucketPlan:
        if plan is not None:
            flatten_like_plan(plan, params, "params")
            return plan
        return plan_buckets(
            params,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            order="reverse" if births is None else births.order,
            unhidden=() if births is None else births.unhidden,
        )

    local = jax.value_and_grad(checked_loss, has_aux=has_aux)
    return ReducedGrad(local, the_wire, plan_for, _resolve_in_loops(in_loops))


def _resolve_in_loops(in_loops: bool | None) -> bool:
    return compat.platform() != "cpu" if in_loops is None else in_loops
