"""What a run does, as a plain dict for a log: ``log_data``.

torch DDP's ``_get_ddp_logging_data`` is the model. What DDP observes while it trains (ready order, rebuilt buckets)
is known here before the first step, from the traced program; times are measured, and only when asked for.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdp import drivers
from fdp import pack as packings
from fdp.compat import axis_names, varying
from fdp.data import global_batch, replica_count
from fdp.plan import BucketPlan
from fdp.reduce import reduce_gradients
from fdp.state import TrainState
from fdp.step import StepConfig
from fdp.train import Trainer

_PACKAGES = ("fdp", "jax", "jaxlib", "numpy", "optax", "flax")


def log_data(
    trainer: Trainer, state: TrainState, batch: Any, *, profile_steps: int = 0
) -> dict[str, Any]:
    """What ``trainer.train_step(state, batch)`` does, in JSON types. Traces it; runs nothing unless asked to measure.

    Args:
      trainer: from ``data_parallel``.
      state: its state; not consumed.
      batch: as for ``train_step``.
      profile_steps: how many steps to time; with several processes, all must ask for the same. Needs memory for a
        second state.

    Returns:
      A dict with the keys

      - ``world_size``, ``process``, ``processes``, ``backend``, ``device_kind``, ``mesh``, ``axis_names``,
        ``iteration`` (None for a state of shapes);
      - ``num_parameter_tensors``, ``total_parameter_size_bytes``, ``dtypes``;
      - ``bucket_cap_bytes``, ``first_bucket_cap_bytes``, ``bucket_sizes`` (bytes), ``bucket_dtypes``, ``bucket_paths``,
        ``per_bucket_param_indices`` and ``grad_order`` (leaf indices in launch order), ``bytes_reduced`` per step and
        replica, ``plan_fingerprint``;
      - ``frozen_paths``, ``unused_paths`` (in the program, but without influence on the loss) and
        ``unused_parameter_size`` in bytes;
      - ``schedule``, ``hook``, ``pack``, and ``options``, the trainer's others that are numbers, names or flags;
      - ``versions``;
      - ``times``, if measured: medians of ``profile_steps`` steps in seconds. ``step``; ``compute``, forward and
        backward (``no_sync_step``); ``forward``; ``backward``, their difference; ``communication``, all buckets alone;
        ``communication_exposed``, step minus compute, which has the optimizer's update in it; ``overlap``, the rest of
        the communication. What cannot be measured (hooks with state, local model state) is None.

      Differences of separately compiled programs are estimates: a program alone is fused and scheduled otherwise than
      as a part of another, and a small difference of large times can be noise, even negative.

    Raises:
      TypeError: ``trainer`` is none.
      ValueError: ``profile_steps`` is negative, or the state is of shapes and cannot run; and what ``train_step``
        raises for such arguments.

    Source: torch ``DDPLoggingData`` (PyTorch 2.13).
    """
    config = getattr(trainer, "config", None)
    if not isinstance(config, StepConfig):
        raise TypeError(
            f"expected a Trainer, got {type(trainer).__name__}: pass what fdp.data_parallel(...) returned."
        )
    if isinstance(profile_steps, bool) or not isinstance(profile_steps, int) or profile_steps < 0:
        raise ValueError(
            f"expected profile_steps to be a number of steps from 0, got {profile_steps!r}: write profile_steps=10, or "
            "leave it out to measure nothing."
        )
    if profile_steps and isinstance(getattr(state, "step", None), jax.ShapeDtypeStruct):
        raise ValueError(
            "expected a state of arrays with profile_steps, which runs steps, got one of shapes: make it with "
            "trainer.init of the parameters themselves, or leave profile_steps out."
        )
    plan = trainer.plan(state, batch)
    data = {
        **_where(trainer, state),
        **_plan(plan),
        **_how(config, trainer.mesh.devices.flat[0].platform),
        "versions": _versions(),
    }
    if profile_steps:
        data["times"] = _times(trainer, config, plan, state, batch, profile_steps)
    return data


def _where(trainer: Trainer, state: TrainState) -> dict[str, Any]:
    device = trainer.mesh.devices.flat[0]
    return {
        "world_size": replica_count(trainer.mesh, trainer.axis_name),
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "backend": device.platform,
        "device_kind": device.device_kind,
        "mesh": {str(name): size for name, size in trainer.mesh.shape.items()},
        "axis_names": [str(name) for name in axis_names(trainer.axis_name)],
        # A state of shapes, made to look at a program ahead of time, has not come anywhere.
        "iteration": None if isinstance(state.step, jax.ShapeDtypeStruct) else int(state.step),
    }


def _plan(plan: BucketPlan) -> dict[str, Any]:
    """The plan of the traced step: leaves that were to be reduced but are in no bucket do not influence the loss."""
    per_bucket = [list(bucket.leaf_indices) for bucket in plan.buckets]
    reduced = {index for indices in per_bucket for index in indices}
    unused = [i for i, leaf in enumerate(plan.leaves) if leaf.planned and i not in reduced]
    return {
        "num_parameter_tensors": len(plan.leaves),
        "total_parameter_size_bytes": sum(leaf.nbytes for leaf in plan.leaves),
        "dtypes": sorted({leaf.dtype.name for leaf in plan.leaves}),
        "bucket_cap_bytes": plan.bucket_bytes,
        "first_bucket_cap_bytes": plan.first_bucket_bytes,
        "bucket_sizes": [bucket.nbytes for bucket in plan.buckets],
        "bucket_dtypes": [bucket.dtype.name for bucket in plan.buckets],
        "bucket_paths": [list(bucket.paths) for bucket in plan.buckets],
        "per_bucket_param_indices": per_bucket,
        "grad_order": [index for indices in per_bucket for index in indices],
        "bytes_reduced": plan.nbytes,
        "plan_fingerprint": plan.fingerprint(),
        "frozen_paths": [plan.leaves[i].path for i in plan.excluded],
        "unused_paths": [plan.leaves[i].path for i in unused],
        "unused_parameter_size": sum(plan.leaves[i].nbytes for i in unused),
    }


def _how(config: StepConfig, platform: str) -> dict[str, Any]:
    packing = config.wire.packing
    resolved = packings.auto(platform) if packing.name == "auto" else packing
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        "schedule": config.wire.schedule.name,
        "hook": config.wire.hook.name,
        "pack": resolved.name,
        "options": {
            name: value
            for name, value in values.items()
            if value is None or isinstance(value, (bool, int, str))
        },
    }


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # fdp itself, where it runs from a clone
    return versions


def _times(
    trainer: Trainer,
    config: StepConfig,
    plan: BucketPlan,
    state: TrainState,
    batch: Any,
    steps: int,
) -> dict[str, float | None]:
    state = state._replace(unreduced=None)
    own = jax.tree.map(jnp.copy, state)  # train_step consumes its state

    def step() -> Any:
        nonlocal own
        own, info = trainer.train_step(own, batch)
        return own, info

    if config.carry_over:  # the first step is another program than those behind it
        step()
        state = trainer.finish(state)  # or every no-sync step would
    whole = _median(step, steps)
    compute = _median(lambda: trainer.no_sync_step(state, batch), steps)
    forward, communication = (
        _forward(trainer, config, state, batch),
        _buckets(trainer, config, plan, state),
    )
    forward = None if forward is None else _median(forward, steps)
    communication = None if communication is None else _median(communication, steps)
    exposed = whole - compute
    return {
        "step": whole,
        "compute": compute,
        "forward": forward,
        "backward": None if forward is None else compute - forward,
        "communication": communication,
        "communication_exposed": exposed,
        "overlap": None if communication is None else max(0.0, communication - exposed),
    }


def _median(run: Callable[[], Any], steps: int) -> float:
    """Seconds of one call, results waited for; the first call, which compiles, does not count."""
    seconds: list[float] = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _forward(
    trainer: Trainer, config: StepConfig, state: TrainState, batch: Any
) -> Callable[[], Any] | None:
    """The loss alone, microbatch by microbatch, without communication."""
    if getattr(state, "local_model_state", None) is not None:
        return None  # the loss would need each replica's own

    def local(replicated: Any, own: Any, unreduced: Any, batch: Any) -> tuple[Any, Any]:
        (params, model_state), rng = varying(replicated[:2], config.axis_name), replicated[2]

        def one(microbatch: Any) -> list[jax.Array]:
            return jax.tree.leaves(config.loss(params, microbatch, model_state, rng)[0])

        parts = config.num_microbatches
        if parts == 1:  # a loop of one pass is a loop still
            return (), one(batch)
        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        return (), jax.lax.map(one, split)

    driver = _driver(local, trainer)
    placed = global_batch(batch, trainer.mesh, trainer.axis_name)
    return lambda: driver.run((state.params, state.model_state, state.rng), (), (), placed)


def _buckets(
    trainer: Trainer, config: StepConfig, plan: BucketPlan, state: TrainState
) -> Callable[[], Any] | None:
    """All buckets reduced, with nothing to hide behind."""
    wire = config.wire
    if jax.tree.leaves([wire.hook.init(bucket) for bucket in plan.buckets]):
        return None  # its state would be changed by the measurement
    planned = [i for bucket in plan.buckets for i in bucket.leaf_indices]

    def local(params: Any, own: Any, unreduced: Any, batch: Any) -> tuple[Any, Any]:
        leaves = dict(enumerate(jax.tree.leaves(params)))
        leaves.update(zip(planned, own, strict=True))
        grads = jax.tree.unflatten(plan.treedef, [leaves[i] for i in range(len(leaves))])
        grads = reduce_gradients(
            grads,
            wire.axis_name,
            plan=plan,
            hook=wire.hook,
            schedule=wire.schedule,
            pack=wire.packing,
            op=wire.op,
        )
        reduced = jax.tree.leaves(grads)
        return [reduced[i] for i in planned], ()

    # Each replica's own, as gradients are: XLA would not reduce what it can see to be the same everywhere.
    count = replica_count(trainer.mesh, trainer.axis_name)
    shapes = [(count, *plan.leaves[i].shape) for i in planned]
    dtypes = [plan.leaves[i].dtype for i in planned]
    per_replica = NamedSharding(trainer.mesh, PartitionSpec(trainer.axis_name))
    make = jax.jit(lambda: list(map(jnp.zeros, shapes, dtypes)), out_shardings=per_replica)
    own = make()
    driver = _driver(local, trainer)
    return lambda: driver.run(state.params, own, (), ())


def _driver(fn: drivers.ReplicaFn, trainer: Trainer) -> drivers.Driver:
    return drivers.shard_map_driver(
        fn, trainer.mesh, trainer.axis_name, donate=(), compiler_options=None
    )
