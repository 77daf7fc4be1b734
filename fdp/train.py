"""``data_parallel``: a loss function and an optimizer in, a data parallel trainer out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fdp import birth, drivers, schedules
from fdp import pack as packings
from fdp.birth import Born
from fdp.checks import check_arguments, check_init, check_state
from fdp.compat import AxisName
from fdp.data import check_batch, global_batch, replica_count
from fdp.hooks import CommHook
from fdp.loss import canonical_loss
from fdp.match import flatten_like_plan
from fdp.options import suggested_bucket_bytes, suggested_compiler_options, usable_options
from fdp.pack import Packing
from fdp.plan import (
    DEFAULT_FIRST_BUCKET_BYTES,
    BucketPlan,
    plan_buckets,
)
from fdp.replicate import make, replicate
from fdp.schedules import Schedule
from fdp.state import StepInfo, TrainState
from fdp.step import Replicated, StepConfig, select_trainable, synced_step, unsynced_step
from fdp.wire import Wire, make_wire


class Trainer(NamedTuple):
    """Functions that train data parallel. All pure, except that ``train_step`` donates the state it is given.

    Attributes:
      init: ``(params, *, model_state=None, rng=None) -> TrainState``. Copies process 0's values to every device, after
        verifying that every process holds the same structure, shapes and dtypes. Of shapes (``jax.ShapeDtypeStruct``)
        it makes a state of shapes, to ``lower`` for devices that are not there.
      train_step: ``(state, batch) -> (TrainState, StepInfo)``. Batch leaves are ``[examples, ...]``: the whole batch
        in one process, this process's share with several. The state passed in is consumed.
      no_sync_step: ``(state, batch) -> (TrainState, StepInfo)``. Computes gradients and holds them back on each
        replica; no communication. The next ``train_step`` reduces their sum together with its own and updates once, as
        torch's ``no_sync`` does: gradients are added, not averaged, over the steps of the window.
      lower: ``(state, batch, *, sync=True) -> jax.stages.Lowered`` of ``train_step`` (or ``no_sync_step``).
      plan: ``(state, batch) -> BucketPlan`` that ``train_step`` uses for such arguments. Traces, runs nothing.
      explain: ``(state, batch) -> str``: that plan as a table, and which gradients are reduced inside loops, or why
        not.
      mesh: the mesh it runs on.
      axis_name: the axis (or axes) it reduces over.
    """

    init: Callable[..., TrainState]
    train_step: Callable[[TrainState, Any], tuple[TrainState, StepInfo]]
    no_sync_step: Callable[[TrainState, Any], tuple[TrainState, StepInfo]]
    lower: Callable[..., jax.stages.Lowered]
    plan: Callable[[TrainState, Any], BucketPlan]
    explain: Callable[[TrainState, Any], str]
    mesh: Mesh
    axis_name: AxisName


def data_parallel(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = "data",
    via: str = "shard_map",
    num_microbatches: int = 1,
    accumulate_dtype: Any = None,
    plan: BucketPlan | None = None,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    trainable: Callable[[str, Any], bool] | Any | None = None,
    hook: CommHook | None = None,
    schedule: Schedule | None = None,
    pack: Packing | None = None,
    op: str = "mean",
    has_aux: bool = False,
    has_model_state: bool = False,
    has_rng: bool = False,
    order: str | Sequence[int] = "ready",
    in_loops: bool | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> Trainer:
    """Builds a data parallel trainer.

    Mathematically the trainer is the one-device step on the joined batch, for a loss that is a mean over examples:
    every replica holds the same parameters, computes the gradient of its share, and applies the same mean gradient.

    Args:
      loss_fn: ``loss_fn(params, batch) -> loss``, a scalar. Given the options below it is called with keywords
        ``model_state=`` and ``rng=`` and returns ``(loss, aux)``, ``(loss, model_state)`` or
        ``(loss, model_state, aux)``.
      optimizer: an optax optimizer. It sees reduced gradients: ``optax.clip_by_global_norm`` needs nothing more.
      mesh: mesh with ``axis_name``; all devices of all processes in one axis if not given.
      axis_name: mesh axis, or tuple of axes, that replicas are laid out along.
      via: ``"shard_map"``, or ``"pmap"`` (one-axis meshes; no compiler options). Same numbers.
      num_microbatches: slices each replica's share of the batch is run in, one reduction for all.
      accumulate_dtype: dtype of the sums over microbatches; the gradients' own if not given.
      plan: a plan made for the same params; otherwise made with the three options below.
      bucket_bytes: cap of a bucket in bytes; ``suggested_bucket_bytes`` for the mesh's platform if not given.
      first_bucket_bytes, trainable: as for ``plan_buckets``. Frozen leaves are not differentiated, not reduced, not
        seen by the optimizer.
      hook, schedule, pack, op: as for ``reduce_gradients``.
      has_aux: ``loss_fn`` returns auxiliary output; see ``StepInfo`` for how it is reduced.
      has_model_state: ``loss_fn`` takes and returns model state. After each ``train_step`` its floating-point leaves
        are averaged over replicas, all others are replica 0's; torch takes replica 0's for all and so discards the
        other replicas' statistics.
      has_rng: ``loss_fn`` takes a key, different for each step, replica and microbatch:
        ``fold_in(fold_in(fold_in(fold_in(rng, step), no-sync steps held back), replica), microbatch)``.
      order: ``"ready"`` (read from the traced gradient), ``"reverse"``, or a permutation of leaf indices. A hook with
        state needs its buckets before there is a batch to trace with: there "ready" means "reverse".
      in_loops: reduce gradients inside the loops that make them, see ``value_and_grad``; by default on GPU and TPU.
        Hooks with state reduce after the loop.
      compiler_options: XLA options for the compiled step; ``suggested_compiler_options`` for platform, schedule and
        packing if not given, those that the compiler knows. ``{}`` asks for none.

    Returns:
      A ``Trainer``.

    Raises:
      ValueError, TypeError: an argument is wrong; the message says what was expected, what came, and the edit to make.
        What depends on params or batch is raised by ``init`` and by the first step.

    Source: paper sections 3 and 4; torch ``DistributedDataParallel``.

    Example:
      >>> import jax.numpy as jnp, optax, fdp
      >>> loss = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> trainer = fdp.data_parallel(loss, optax.sgd(0.1))
      >>> state = trainer.init({"w": jnp.zeros((3, 1))})
      >>> state, info = trainer.train_step(state, {"x": jnp.ones((16, 3)), "y": jnp.ones((16, 1))})
      >>> float(info.loss), int(state.step)
      (1.0, 1)
    """
    check_arguments(loss_fn, optimizer, via, num_microbatches, plan, compiler_options)
    mesh = _default_mesh(axis_name) if mesh is None else mesh
    replicas = replica_count(mesh, axis_name)
    share = _process_share(mesh, replicas)
    if via == "pmap" and (not isinstance(axis_name, str) or mesh.devices.size != replicas):
        raise ValueError(
            f'expected a mesh of one axis for via="pmap", got axes {dict(mesh.shape)} and axis_name={axis_name!r}: '
            'use via="shard_map".'
        )

    the_wire = make_wire(axis_name, hook=hook, schedule=schedule, pack=pack, op=op)
    cap = suggested_bucket_bytes(_platform(mesh)) if bucket_bytes is None else bucket_bytes
    if compiler_options is None and via == "shard_map":
        compiler_options = _suggested(mesh, plan, cap, the_wire)

    def plan_for(params: Any, ready: Sequence[int] | None) -> BucketPlan:
        if plan is not None:
            flatten_like_plan(plan, params, "params")
            return plan
        wanted = ("reverse" if ready is None else ready) if order == "ready" else order
        return plan_buckets(
            params,
            bucket_bytes=cap,
            first_bucket_bytes=first_bucket_bytes,
            order=wanted,
            trainable=trainable,
        )

    config = StepConfig(
        loss=canonical_loss(
            loss_fn, has_aux=has_aux, has_model_state=has_model_state, has_rng=has_rng
        ),
        optimizer=optimizer,
        axis_name=axis_name,
        num_microbatches=num_microbatches,
        accumulate_dtype=accumulate_dtype,
        op=op,
        wire=the_wire,
        plan_for=plan_for,
        in_loops=in_loops,
    )

    def synced(replicated: Any, hook_state: Any, unreduced: Any, batch: Any) -> Any:
        new, hook_state, info = synced_step(config, replicated, hook_state, unreduced, batch)
        return (new, info), hook_state

    def unsynced(replicated: Any, hook_state: Any, unreduced: Any, batch: Any) -> Any:
        return (), unsynced_step(config, replicated, unreduced, batch)

    # The held-back gradients of a synced step have no output to live on in, the replicated state of an unsynced one
    # is not changed: donating either would only draw a warning, or take the parameters away.
    def driver(fn: drivers.ReplicaFn, donate: tuple[int, ...]) -> drivers.Driver:
        if via == "pmap":
            return drivers.pmap_driver(fn, mesh, axis_name, donate=donate)
        return drivers.shard_map_driver(
            fn, mesh, axis_name, donate=donate, compiler_options=compiler_options
        )

    synced_driver = driver(synced, donate=(0, 1))
    unsynced_driver = driver(unsynced, donate=(2,))

    def arguments(state: TrainState, batch: Any) -> tuple[Any, Any, Any, Any]:
        check_state(state)
        check_batch(batch, share, num_microbatches, jax.process_count())
        if via == "pmap":
            batch = drivers.split_over_replicas(batch, share)
        else:
            batch = global_batch(batch, mesh, axis_name)
        replicated = Replicated(
            state.step, state.params, state.opt_state, state.model_state, state.rng
        )
        return replicated, state.hook_state, state.unreduced, batch

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        (new, info), hook_state = synced_driver.run(*arguments(state, batch))
        return TrainState(*new, hook_state=hook_state, unreduced=None), info

    def no_sync_step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        _, (unreduced, info) = unsynced_driver.run(*arguments(state, batch))
        return state._replace(unreduced=unreduced), info

    def lower(state: TrainState, batch: Any, *, sync: bool = True) -> jax.stages.Lowered:
        return (synced_driver if sync else unsynced_driver).lower(*arguments(state, batch))

    def init(params: Any, *, model_state: Any = None, rng: Any = None) -> TrainState:
        check_init(has_model_state, model_state, has_rng, rng)
        the_plan = plan_for(params, None)
        given = replicate(
            {"params": params, "model_state": model_state, "rng": rng}, mesh, "init arguments"
        )
        params, model_state, rng = given["params"], given["model_state"], given["rng"]
        everywhere = NamedSharding(mesh, PartitionSpec())
        trainable_params = select_trainable(the_plan, params)
        opt_state = _init_optimizer(optimizer, trainable_params, mesh)
        step = make(lambda _: jnp.zeros((), jnp.int32), everywhere, params)

        def stacked_hook_state(_: Any) -> Any:
            launches = schedules.check_launches(the_wire.schedule, the_plan)
            one = tuple(the_wire.hook.init(launch.bucket) for launch in launches)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), one)

        if via == "pmap":  # takes and returns this process's replicas only
            count, holders = share, Mesh(np.array(mesh.local_devices), (axis_name,))
        else:
            count, holders = replicas, mesh
        per_replica = NamedSharding(holders, PartitionSpec(axis_name))
        hook_state = make(stacked_hook_state, per_replica, params)
        return TrainState(step, params, opt_state, model_state, rng, hook_state, None)

    def traced(state: TrainState, batch: Any) -> Born:
        recorded: list[Born] = []
        recording = dataclasses.replace(config, record=recorded.append)

        def synced(replicated: Any, hook_state: Any, unreduced: Any, batch: Any) -> Any:
            new, hook_state, info = synced_step(recording, replicated, hook_state, unreduced, batch)
            return (new, info), hook_state

        driver(synced, donate=()).lower(*arguments(state, batch))
        return recorded[-1]

    def plan_of(state: TrainState, batch: Any) -> BucketPlan:
        return traced(state, batch).plan

    def explain(state: TrainState, batch: Any) -> str:
        return birth.explain(traced(state, batch))

    return Trainer(init, train_step, no_sync_step, lower, plan_of, explain, mesh, axis_name)


def _init_optimizer(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """The optimizer's state; what it keeps per parameter is laid out like the parameter."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, param: param.sharding,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return make(optimizer.init, shardings, params)


def _default_mesh(axis_name: AxisName) -> Mesh:
    if not isinstance(axis_name, str):
        raise ValueError(
            f"expected a mesh for axis_name={axis_name!r}: without one, all devices form one axis with one name."
        )
    return jax.make_mesh((jax.device_count(),), (axis_name,), axis_types=(AxisType.Auto,))


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def _suggested(mesh: Mesh, plan: BucketPlan | None, cap: int, wire: Wire) -> dict[str, Any]:
    """Compiler options for buckets of up to ``cap`` bytes, where there is no plan to go by yet."""
    if plan is None:
        size = 2**40 if wire.schedule.name == "fused" else cap
        halves = [jax.ShapeDtypeStruct((max(size // 2, 1),), jnp.float8_e4m3fn)] * 4
        plan = plan_buckets(halves, bucket_bytes=max(size, 1), first_bucket_bytes=max(size, 1))
    platform = _platform(mesh)
    options = suggested_compiler_options(
        platform,
        plan,
        schedule=wire.schedule,
        pack=packings.auto(platform) if wire.packing.name == "auto" else wire.packing,
    )
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return usable_options(options, (local or list(mesh.devices.flat))[0])


def _process_share(mesh: Mesh, replicas: int) -> int:
    """Replicas that this process's batch is split over."""
    if jax.process_count() == 1:
        return replicas
    mine = jax.process_index()
    processes = {device.process_index for device in mesh.devices.flat}
    if mine not in processes:
        raise ValueError(
            f"expected process {mine} to own devices of the mesh, which are all on {sorted(processes)}."
        )
    return max(1, replicas // len(processes))
