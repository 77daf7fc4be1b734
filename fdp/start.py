"""The state that training starts from: process 0's values on every device."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdp import schedules
from fdp.model_state import resolve, split
from fdp.plan import BucketPlan
from fdp.replicate import is_abstract, make, replicate
from fdp.state import TrainState
from fdp.trees import select_trainable
from fdp.used import NotPerParameterError, check_can_skip, map_per_parameter
from fdp.wire import Wire


def initial_state(
    given: dict[str, Any],
    plan: BucketPlan,
    optimizer: optax.GradientTransformation,
    wire: Wire,
    model_state_policy: Any,
    mesh: Mesh,
    per_replica: NamedSharding,
    count: int,
    unused: str = "zero",
) -> TrainState:
    """A ``TrainState`` before the first step.

    Args:
      given: ``params``, ``model_state`` and ``rng``, as the user has them.
      plan: of the params.
      optimizer: makes its state of the trainable params.
      wire: its hook makes one state for each launch.
      model_state_policy: as for ``data_parallel``.
      mesh: where replicated leaves go.
      per_replica: where leaves with a replica axis go.
      count: how long that axis is.
      unused: as for ``data_parallel``.

    Raises:
      ValueError: the optimizer cannot skip unused leaves, and ``unused`` asks for it.
    """
    _warn_of_ties(plan, given["params"])
    placed = replicate(given, mesh, "init arguments")
    params, model_state, rng = placed["params"], placed["model_state"], placed["rng"]
    everywhere = NamedSharding(mesh, PartitionSpec())
    trainable = select_trainable(plan, params)
    opt_state = _init_optimizer(optimizer, trainable, mesh)
    if unused == "skip":
        check_can_skip(optimizer, trainable, opt_state)
    step = make(lambda _: jnp.zeros((), jnp.int32), everywhere, params)

    def stacked(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)

    def stacked_hook_state(_: Any) -> Any:
        launches = schedules.check_launches(wire.schedule, plan)
        return stacked(tuple(wire.hook.init(launch.bucket) for launch in launches))

    hook_state = make(stacked_hook_state, per_replica, params)
    model_state, local = split(resolve(model_state_policy, model_state), model_state)
    if local is not None:
        local = make(stacked, per_replica, _on_holders(local, mesh, per_replica))
    return TrainState(step, params, opt_state, model_state, rng, hook_state, None, local)


def _init_optimizer(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """The optimizer's state; what it keeps per parameter is laid out like the parameter."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(optimizer.init, params)
    try:
        shardings = map_per_parameter(
            optimizer,
            # Of another shape are factors (Adafactor) and memories of several values (L-BFGS).
            lambda x, param: param.sharding if x.shape == param.shape else everywhere,
            shapes,
            params,
            otherwise=lambda _: everywhere,
        )
    except NotPerParameterError:  # replicated is right for all, if not the smallest
        shardings = everywhere
    return make(optimizer.init, shardings, params)


def _on_holders(tree: Any, mesh: Mesh, per_replica: NamedSharding) -> Any:
    """Replicated arrays on the devices that hold the replica axis: under pmap, this process's only."""
    if per_replica.mesh == mesh or is_abstract(tree):
        return tree
    here = NamedSharding(per_replica.mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x.addressable_data(0), here), tree)


def _warn_of_ties(plan: BucketPlan, params: Any) -> None:
    """Warns where one array is two parameters: they are trained apart, and do not stay equal."""
    seen: dict[int, str] = {}
    for spec, leaf in zip(plan.leaves, plan.treedef.flatten_up_to(params), strict=True):
        if not spec.planned or not isinstance(leaf, (jax.Array, np.ndarray)) or not leaf.size:
            continue
        first = seen.setdefault(id(leaf), spec.path)
        if first != spec.path:
            warnings.warn(
                f"params hold one array twice, at {first!r} and at {spec.path!r}: they are two parameters with a "
                "gradient each, and drift apart. If they are tied, keep one of them in params and use it twice in "
                "loss_fn; if not, copy one.",
                UserWarning,
                stacklevel=4,
            )
