"""What people may get wrong when they build or call a trainer, said before JAX says it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fdp.accumulate import check_num_microbatches
from fdp.compat import AxisName
from fdp.leaves import path_string
from fdp.plan import BucketPlan, plan_buckets
from fdp.state import TrainState


def check_arguments(
    loss_fn: Any, optimizer: Any, via: Any, num_microbatches: Any, plan: Any, compiler_options: Any
) -> None:
    """Arguments of ``data_parallel`` that are wrong by themselves.

    Raises:
      TypeError, ValueError: what was expected, what came, the edit to make.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"expected loss_fn to be a function (params, batch) -> loss, got {loss_fn!r}."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        hint = (
            "call it, for example optax.sgd(0.1)"
            if callable(optimizer)
            else "for example optax.sgd(0.1)"
        )
        raise TypeError(
            f"expected an optax optimizer with init and update, got {optimizer!r}: {hint}."
        )
    if via not in ("shard_map", "pmap"):
        raise ValueError(f'expected via to be "shard_map" or "pmap", got {via!r}.')
    if via == "pmap" and compiler_options:
        raise ValueError('compiler_options need via="shard_map": jax.pmap takes none.')
    check_num_microbatches(num_microbatches)
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(
            f"expected plan to be a BucketPlan, got {type(plan).__name__}: fdp.plan_buckets(params)."
        )


def check_options(
    weighted: bool, op: str, unused: str, mean_over: str, has_model_state: bool, policy: Any
) -> None:
    """Options of ``data_parallel`` that are unknown, or do not go together.

    Raises:
      TypeError, ValueError: what was expected, what came, the edit to make.
    """
    check_flags(weighted=weighted, has_model_state=has_model_state)
    if unused not in ("zero", "skip"):
        raise ValueError(f'expected unused to be "zero" or "skip", got {unused!r}.')
    if mean_over not in ("all", "users"):
        raise ValueError(f'expected mean_over to be "all" or "users", got {mean_over!r}.')
    if op == "sum" and (weighted or mean_over == "users"):
        option = "weighted=True" if weighted else 'mean_over="users"'
        raise ValueError(
            f'expected op="mean" with {option}, which says what to divide by, got op="sum", which does not divide: '
            "leave one of them out."
        )
    if policy is not None and not has_model_state:
        raise ValueError(
            "got model_state_policy=..., but loss_fn has no model state: pass has_model_state=True, or leave it out."
        )


def check_carry_over(carry_over: Any, *, weighted: bool, unused: str, mean_over: str) -> None:
    """Whether ``carry_over`` is a number of buckets, and goes together with the other options.

    Raises:
      TypeError, ValueError: what was expected, what came, the edit to make.
    """
    if isinstance(carry_over, bool) or not isinstance(carry_over, int):
        raise TypeError(
            f"expected carry_over to be a whole number of buckets, got {carry_over!r}: write for example carry_over=3."
        )
    if carry_over < 0:
        raise ValueError(f"expected carry_over to be at least 0, got {carry_over}.")
    others = (
        ("weighted=True", weighted),
        ('unused="skip"', unused == "skip"),
        ('mean_over="users"', mean_over == "users"),
    )
    for option, given in others:
        if carry_over and given:
            raise ValueError(
                f"got carry_over={carry_over} with {option}, which decides at the end of a step what is updated, and "
                "with carry_over the update is the next step's: leave one of them out."
            )


def check_can_carry(carry_over: int, hook: str, hook_state: Any) -> None:
    """Raises ValueError where a hook's state belongs to all buckets of a step, and some are to be carried over."""
    if carry_over and jax.tree.leaves(hook_state):
        raise ValueError(
            f"expected a hook without state with carry_over={carry_over}, got {hook!r}, which keeps one for each "
            "bucket of a step: use another hook, or leave carry_over out."
        )


def check_flags(**flags: Any) -> None:
    """Raises TypeError unless all of them are bools: ``"no"`` would be taken for a yes."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(
                f"expected {name} to be True or False, got {flag!r}: write {name}=True or {name}=False."
            )


def check_trainable(plan: BucketPlan, params: Any, trainable: Any) -> None:
    """Whether ``plan`` was made with this ``trainable``.

    Raises:
      ValueError: it was not; the message names the first leaf that differs.
    """
    if trainable is None:
        return
    for old, new in zip(plan.leaves, plan_buckets(params, trainable=trainable).leaves, strict=True):
        if old.planned != new.planned:
            words = {True: "trains it", False: "leaves it out"}
            raise ValueError(
                f"expected a plan made with the same trainable=, but at {old.path!r} the plan {words[old.planned]} and "
                f"trainable= {words[new.planned]}: make the plan anew, fdp.plan_buckets(params, trainable=...), and a "
                "new state with init."
            )


def check_state(state: Any, replicas: int) -> None:
    """Whether ``state`` is a ``TrainState`` of this many replicas.

    Args:
      state: what a step is given.
      replicas: leading size of what each replica keeps for itself.

    Raises:
      TypeError: it is something else.
      ValueError: it was made for another number of replicas. ``shard_map`` would give each device several of theirs,
        and a step would go on with the first.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"expected a TrainState, got {type(state).__name__}: make it with trainer.init(params), and pass the state "
            "that the last step returned."
        )
    kept = (
        ("unreduced", state.unreduced, "end the window with train_step before you save"),
        ("carried", _unreduced(state), "call trainer.finish(state) before you save"),
        ("hook_state", state.hook_state, "take the hook_state of trainer.init(params)"),
        ("local_model_state", state.local_model_state, "take that of trainer.init(params, ...)"),
    )
    for name, tree, edit in kept:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shape = np.shape(leaf)
            if not shape or shape[0] != replicas:
                raise ValueError(
                    f"expected state.{name}, which each replica keeps for itself, to have {replicas} replicas as its "
                    f"first axis, got shape {list(shape)} at {path_string(path)!r}: a state from another number of "
                    f"replicas goes on without it. {edit[0].upper()}{edit[1:]}."
                )


def _unreduced(state: TrainState) -> Any:
    return None if state.carried is None else state.carried.unreduced


def check_mesh(via: str, mesh: Mesh, axis_name: AxisName, replicas: int) -> None:
    """Raises unless ``via`` can run on the mesh."""
    if via == "pmap" and (not isinstance(axis_name, str) or mesh.devices.size != replicas):
        raise ValueError(
            f'expected a mesh of one axis for via="pmap", got axes {dict(mesh.shape)} and axis_name={axis_name!r}: '
            'use via="shard_map".'
        )


def check_init(has_model_state: bool, model_state: Any, has_rng: bool, rng: Any) -> None:
    """Whether ``init`` is given what the loss function takes, no more and no less.

    Raises:
      ValueError: something is missing or too much.
      TypeError: ``rng`` is no key.
    """
    for name, wanted, value in (
        ("model_state", has_model_state, model_state),
        ("rng", has_rng, rng),
    ):
        if wanted and value is None:
            raise ValueError(f"expected init(params, {name}=...), since has_{name}=True; got none.")
        if not wanted and value is not None:
            raise ValueError(
                f"got {name}=... in init, but loss_fn does not take it: pass has_{name}=True to data_parallel."
            )
    if rng is not None and not _is_key(rng):
        raise TypeError(f"expected rng to be a key such as jax.random.key(0), got {rng!r}.")


def _is_key(rng: Any) -> bool:
    """One key or its shape, of JAX's key type or in the older form of uint32 words."""
    if not isinstance(rng, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return False
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng.shape == ()
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return (rng.shape, rng.dtype) == (words.shape, words.dtype)


def check_opt_state(
    optimizer: optax.GradientTransformation, trainable: Any, opt_state: Any
) -> None:
    """Whether the optimizer state was made by this optimizer for these parameters.

    Raises:
      ValueError: it was not; the message names the first difference.
    """
    expected = jax.eval_shape(optimizer.init, trainable)
    want = {path_string(p): x for p, x in jax.tree_util.tree_leaves_with_path(expected)}
    have = {path_string(p): x for p, x in jax.tree_util.tree_leaves_with_path(opt_state)}
    for path in [*want, *have]:
        w, h = want.get(path), have.get(path)
        same = w is not None and h is not None and (w.shape, w.dtype) == (jnp.shape(h), h.dtype)
        if not same:
            raise ValueError(
                f"expected the state of this trainer's optimizer, which at {path!r} has {_show(w)}; the train state "
                f"has {_show(h)}: make it with init(params) of the same trainer, or restore the checkpoint with the "
                "optimizer it was saved with."
            )
    if jax.tree.structure(expected) != jax.tree.structure(opt_state):
        raise ValueError(
            f"expected the state of this trainer's optimizer, with structure {jax.tree.structure(expected)}, got "
            f"{jax.tree.structure(opt_state)}: make it with init(params) of the same trainer."
        )


def _show(x: Any) -> str:
    return "nothing" if x is None else f"{x.dtype}[{','.join(map(str, jnp.shape(x)))}]"
