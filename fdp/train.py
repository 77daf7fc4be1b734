"""``data_parallel``: a loss function and an optimizer in, a data parallel trainer out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdp import birth, defaults, drivers
from fdp.agree import once as agree_once
from fdp.checks import (
    check_arguments,
    check_can_carry,
    check_carry_over,
    check_flags,
    check_init,
    check_mesh,
    check_options,
    check_state,
    check_trainable,
)
from fdp.compat import AxisName
from fdp.data import check_batch, global_batch, replica_count
from fdp.hooks import CommHook
from fdp.loss import canonical_loss
from fdp.match import flatten_like_plan
from fdp.options import suggested_bucket_bytes
from fdp.order import Births
from fdp.pack import Packing
from fdp.plan import DEFAULT_FIRST_BUCKET_BYTES, BucketPlan, plan_buckets
from fdp.schedules import Schedule
from fdp.start import initial_state
from fdp.state import StepInfo, TrainState, join_state, split_state
from fdp.step import (
    StepConfig,
    finish_step,
    synced_step,
    unsynced_step,
)
from fdp.wire import make_wire


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
      lower: ``(state, batch, *, sync=True) -> jax.stages.Lowered`` of ``train_step`` (or ``no_sync_step``). With
        ``carry_over`` the first step is another program than those behind it, of which the state is
        ``jax.eval_shape(train_step, state, batch)[0]``.
      plan: ``(state, batch) -> BucketPlan`` that ``train_step`` uses for such arguments. Traces, runs nothing.
      explain: ``(state, batch) -> str``: that plan as a table, and which gradients are reduced inside loops, or why
        not.
      mesh: the mesh it runs on.
      axis_name: the axis (or axes) it reduces over.
      config: what the steps close over; for ``fdp.log_data``.
      finish: ``state -> state``: with ``carry_over``, ends the last step: reduces what it carried over and updates the
        parameters. All processes call it. The state it is given stays usable: train on from either. Where nothing is
        carried, ``state`` itself, which the next ``train_step`` consumes.
    """

    init: Callable[..., TrainState]
    train_step: Callable[[TrainState, Any], tuple[TrainState, StepInfo]]
    no_sync_step: Callable[[TrainState, Any], tuple[TrainState, StepInfo]]
    lower: Callable[..., jax.stages.Lowered]
    plan: Callable[[TrainState, Any], BucketPlan]
    explain: Callable[[TrainState, Any], str]
    mesh: Mesh
    axis_name: AxisName
    config: StepConfig
    finish: Callable[[TrainState], TrainState]


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
    weighted: bool = False,
    unused: str = "zero",
    mean_over: str = "all",
    model_state_policy: Any = None,
    count_nonfinite: bool = False,
    rng_per_replica: bool = True,
    compiler_options: Mapping[str, str] | None = None,
    carry_over: int = 0,
) -> Trainer:
    """Builds a data parallel trainer.

    Mathematically the trainer is the one-device step on the joined batch, for a loss that is a mean over examples:
    every replica holds the same parameters, computes the gradient of its share, and applies the same mean gradient.

    Args:
      loss_fn: ``loss_fn(params, batch) -> loss``, a scalar. Given the options below it is called with keywords
        ``model_state=`` and ``rng=`` and returns ``(loss, aux)``, ``(loss, model_state)`` or
        ``(loss, model_state, aux)``; ``weighted``, the weight stands behind the loss.
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
        are averaged over replicas, all others are replica 0's; ``model_state_policy`` changes that.
      has_rng: ``loss_fn`` takes a key, different for each step, replica and microbatch:
        ``fold_in(fold_in(fold_in(fold_in(rng, step), no-sync steps held back), replica), microbatch)``.
        What is drawn depends on the number of replicas; see ``rng_per_replica``.
      order: ``"ready"`` (read from the traced gradient), ``"reverse"``, or a permutation of leaf indices. A hook with
        state needs its buckets before there is a batch to trace with: there "ready" means "reverse".
      in_loops: reduce gradients inside the loops that make them, see ``value_and_grad``; by default on GPU and TPU.
        Hooks with state reduce after the loop.
      weighted: ``loss_fn`` returns ``(loss_sum, weight, ...)``: a sum over examples (tokens) and what it is to be
        divided by, a real scalar that is not differentiated. Loss, gradients and floating aux are sums over
        microbatches and replicas (gradients: held-back steps too), divided once by the total weight. Weight zero on
        some replicas is fine; on all of them the step changes nothing, and ``StepInfo.updated`` is false.
      unused: what becomes of leaves that no replica used, in this step or in what was held back. ``"zero"``: their
        gradient is zero, and momentum and weight decay still move them. ``"skip"``: they and what the optimizer keeps
        for them stay as they are; counters that the optimizer keeps for all (Adam's) go on. A leaf counts as used if
        it is in a branch (``lax.cond``) that was taken, even where its gradient is zero; see ``fdp.used``. Either way
        a leaf that the program never uses is not reduced, and ``explain`` names it (not so with a stateful hook).
      mean_over: ``"all"`` replicas, of which those that did not use a leaf count as zero, or its ``"users"`` (by
        weight, with ``weighted``).
      model_state_policy: for each leaf of model state ``"mean"`` (``weighted``: by weight), ``"max"``, ``"first"``
        (``"from_rank0"``: torch's only one, which discards the other replicas' statistics) or ``"local"``; one for
        all, a tree, or a function ``(path, leaf) -> policy``. ``consistent_model_state`` joins local leaves.
      count_nonfinite: report NaN and Inf per replica and bucket in ``StepInfo.nonfinite``, without communication.
        Nothing is reduced inside loops then.
      rng_per_replica: False: one key a step, for all replicas and microbatches. Drawn by example,
        ``fold_in(rng, example_id)``, numbers do not depend on how many replicas and microbatches there are.
      compiler_options: XLA options for the compiled step; ``suggested_compiler_options`` for platform, schedule and
        packing if not given, those that the compiler knows. ``{}`` asks for none.
      carry_over: so many buckets cross in the next step, beneath its forward pass, where the wire is idle otherwise;
        see ``fdp.carry`` for which. The training is the same: each step finishes the last one's update before its
        forward pass reads a parameter. Between steps ``state.params`` and ``state.step`` are one update behind, what is
        missing is ``state.carried``, a gradient more in memory; ``finish`` before you save or evaluate. An optimizer
        that looks at all gradients at once (``clip_by_global_norm``) makes the forward pass wait for all of them. With
        one replica nothing is carried. In ``lax.scan``, start behind the first step: the state's structure changes. A
        hook that goes by ``BucketView.index`` or ``is_last`` sees two rows of buckets a step, first those carried over.

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
    check_carry_over(carry_over, weighted=weighted, unused=unused, mean_over=mean_over)
    check_options(weighted, op, unused, mean_over, has_model_state, model_state_policy)
    check_flags(
        has_aux=has_aux,
        has_rng=has_rng,
        count_nonfinite=count_nonfinite,
        rng_per_replica=rng_per_replica,
    )
    mesh = defaults.default_mesh(axis_name) if mesh is None else mesh
    replicas = replica_count(mesh, axis_name)
    share = defaults.process_share(mesh, replicas)
    check_mesh(via, mesh, axis_name, replicas)
    the_wire = make_wire(axis_name, hook=hook, schedule=schedule, pack=pack, op=op)
    platform = defaults.platform_of(mesh)
    cap = suggested_bucket_bytes(platform) if bucket_bytes is None else bucket_bytes
    if compiler_options is None and via == "shard_map":
        compiler_options = defaults.compiler_options(mesh, plan, cap, the_wire)

    holders, count = mesh, replicas
    if via == "pmap":  # takes and returns this process's replicas only
        holders, count = Mesh(np.array(mesh.local_devices), (axis_name,)), share
    per_replica = NamedSharding(holders, PartitionSpec(axis_name))

    def plan_for(params: Any, births: Births | None) -> BucketPlan:
        if plan is not None:
            flatten_like_plan(plan, params, "params")
            check_trainable(plan, params, trainable)
            return plan
        known = births if order == "ready" else None
        first_guess = "reverse" if order == "ready" else order
        return plan_buckets(
            params,
            bucket_bytes=cap,
            first_bucket_bytes=first_bucket_bytes,
            order=first_guess if known is None else known.order,
            unhidden=() if known is None else known.unhidden,
            trainable=trainable,
        )

    config = StepConfig(
        loss=canonical_loss(
            loss_fn,
            has_aux=has_aux,
            has_model_state=has_model_state,
            has_rng=has_rng,
            weighted=weighted,
        ),
        optimizer=optimizer,
        axis_name=axis_name,
        num_microbatches=num_microbatches,
        accumulate_dtype=accumulate_dtype,
        op=op,
        wire=the_wire,
        plan_for=plan_for,
        in_loops=in_loops,
        weighted=weighted,
        unused=unused,
        mean_over=mean_over,
        model_state_policy=model_state_policy,
        count_nonfinite=count_nonfinite,
        rng_per_replica=rng_per_replica,
        carry_over=carry_over if replicas > 1 else 0,
    )

    def synced(replicated: Any, own: Any, unreduced: Any, batch: Any) -> Any:
        new, own, info, decided = synced_step(config, replicated, own, unreduced, batch)
        return (new, info._replace(nonfinite=None), decided), (own, info.nonfinite)

    def unsynced(replicated: Any, own: Any, unreduced: Any, batch: Any) -> Any:
        return (), unsynced_step(config, replicated, own, unreduced, batch)

    def finishing(replicated: Any, own: Any, unreduced: Any, batch: Any) -> Any:
        return finish_step(config, replicated, own)

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
    finish_driver = driver(finishing, donate=())

    def arguments(state: TrainState, batch: Any) -> tuple[Any, Any, Any, Any]:
        check_state(state, count)
        check_batch(batch, share, num_microbatches, jax.process_count())
        if via == "pmap":
            batch = drivers.split_over_replicas(batch, share)
        else:
            batch = global_batch(batch, mesh, axis_name)
        return *split_state(state), state.unreduced, batch

    def facts(driver: drivers.Driver, state: TrainState, batch: Any) -> dict[str, Any]:
        return {
            "schedule": the_wire.schedule,
            "hook": the_wire.hook,
            "pack": the_wire.packing,
            "plan": plan_of(state, batch),
            "program": driver.lower(*arguments(state, batch)),
        }

    # Before its first collective: processes with different programs would wait for each other without end.
    agree_first = agree_once()

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        given = arguments(state, batch)
        agree_first("train_step", given, lambda: facts(synced_driver, state, batch))
        (new, info, _), (own, nonfinite) = synced_driver.run(*given)
        return join_state(new, own, None), info._replace(nonfinite=nonfinite)

    def finish(state: TrainState) -> TrainState:
        check_state(state, count)
        if state.carried is None:
            return state
        new, own = finish_driver.run(*split_state(state), None, None)
        return join_state(new, own, state.unreduced)

    def no_sync_step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        state = finish(state)
        given = arguments(state, batch)
        agree_first("no_sync_step", given, lambda: facts(unsynced_driver, state, batch))
        _, (unreduced, info) = unsynced_driver.run(*given)
        return state._replace(unreduced=unreduced), info

    def lower(state: TrainState, batch: Any, *, sync: bool = True) -> jax.stages.Lowered:
        return (synced_driver if sync else unsynced_driver).lower(*arguments(state, batch))

    def init(params: Any, *, model_state: Any = None, rng: Any = None) -> TrainState:
        check_init(has_model_state, model_state, has_rng, rng)
        given = {"params": params, "model_state": model_state, "rng": rng}
        the_plan = plan_for(params, None)
        state = initial_state(
            given,
            the_plan,
            optimizer,
            the_wire,
            model_state_policy,
            mesh,
            per_replica,
            count,
            unused,
        )
        check_can_carry(carry_over, the_wire.hook.name, state.hook_state)
        return state

    def decided(state: TrainState, batch: Any) -> birth.Decisions:
        (_, _, decisions), _ = synced_driver.structure(*arguments(state, batch))
        return decisions

    def plan_of(state: TrainState, batch: Any) -> BucketPlan:
        return decided(state, batch).plan

    def explain(state: TrainState, batch: Any) -> str:
        return birth.explain(decided(state, batch))

    return Trainer(
        init, train_step, no_sync_step, lower, plan_of, explain, mesh, axis_name, config, finish
    )
