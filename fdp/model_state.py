"""How model state (batch statistics, counters; torch: buffers) becomes equal on all replicas, leaf by leaf.

    "mean"    average over replicas, with weights the weighted one    statistics
    "max"     largest value                                           running maxima
    "first"   replica 0's ("from_rank0": torch's only one)            counters, keys
    "local"   stays each replica's own                                what no other replica should see

torch broadcasts rank 0's buffers and so discards what the others have seen.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fdp import scalars
from fdp.leaves import path_string
from fdp.state import TrainState

POLICIES = ("mean", "max", "first", "local")


def resolve(policy: Any, model_state: Any) -> Any:
    """A policy for every leaf.

    Args:
      policy: None (floating-point leaves ``"mean"``, others ``"first"``), one policy for all leaves, a tree of
        policies, or a function ``(path, leaf) -> policy`` (None for the default there too).
      model_state: the tree; only paths, shapes and dtypes are read.

    Returns:
      A tree of ``POLICIES`` with the structure of ``model_state``.

    Raises:
      ValueError: a policy is unknown, the tree has another structure, or a policy cannot be for a leaf's dtype.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(model_state)
    if policy is None or isinstance(policy, str):
        given = [policy] * len(with_paths)
    elif callable(policy):
        given = [policy(path_string(path), leaf) for path, leaf in with_paths]
    else:
        given, structure = jax.tree.flatten(policy)
        if structure != treedef:
            raise ValueError(
                "expected model_state_policy to be one policy, a function (path, leaf) -> policy, or a tree with the "
                f"structure of the model state ({treedef}), got {structure}."
            )
    chosen = [_check(path, leaf, p) for (path, leaf), p in zip(with_paths, given, strict=True)]
    return jax.tree.unflatten(treedef, chosen)


def _check(path: Any, leaf: Any, policy: Any) -> str:
    if policy is None:
        return scalars.mean_or_first(leaf)
    policy = _known(policy, f"model state {path_string(path)!r}")
    floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if policy == "mean" and not floating:
        raise ValueError(
            f"expected floating-point model state for the policy 'mean', got {leaf.dtype} at {path_string(path)!r}: "
            "integers are never averaged; use 'first' or 'max' there, for example model_state_policy=lambda path, "
            "leaf: None, which averages floating-point leaves only."
        )
    if policy == "max" and (key or jnp.issubdtype(leaf.dtype, jnp.complexfloating)):
        raise ValueError(
            f"expected model state that has an order for the policy 'max', got {leaf.dtype} at "
            f"{path_string(path)!r}: use 'first'."
        )
    return policy


def _known(policy: Any, what: str) -> str:
    policy = "first" if policy == "from_rank0" else policy
    if policy not in POLICIES:
        raise ValueError(
            f'expected a policy of "mean", "max", "first" or "local" for {what}, got {policy!r}.'
        )
    return policy


def split(policies: Any, model_state: Any) -> tuple[Any, Any]:
    """(leaves that are made equal, leaves that stay local), None in the gaps; the second is None if none is local."""
    if "local" not in jax.tree.leaves(policies):
        return model_state, None
    shared = jax.tree.map(lambda p, x: None if p == "local" else x, policies, model_state)
    return shared, jax.tree.map(lambda p, x: x if p == "local" else None, policies, model_state)


def merge(shared: Any, local: Any) -> Any:
    """The opposite of ``split``."""
    if local is None:
        return shared
    return jax.tree.map(
        lambda s, x: x if s is None else s, shared, local, is_leaf=lambda x: x is None
    )


def split_by_policy(policy: Any, new: Any, shared: Any) -> tuple[Any, Any, Any]:
    """``split`` of a new model state, and the policies of its shared part.

    Args:
      policy: as for ``resolve``.
      new: a replica's model state, whole.
      shared: the shared part of the old one.

    Returns:
      (shared part, local part, policies of the shared part).

    Raises:
      ValueError: other leaves were local than the policy says.
    """
    policies = resolve(policy, new)
    new_shared, local = split(policies, new)
    expected, got = jax.tree.structure(new_shared), jax.tree.structure(shared)
    if local is not None and expected != got:
        raise ValueError(
            "expected a train state with the local model state that model_state_policy asks for, which leaves "
            f"{expected} to be shared, got {got}: make the state with init of the same trainer."
        )
    return new_shared, local, split(policies, policies)[0]


def consistent_model_state(state: TrainState, policy: Any = None) -> Any:
    """Model state in one piece, equal everywhere: for evaluation, for saving, and to start again from.

    ``TrainState.model_state`` is equal everywhere after each ``train_step`` already; this adds the leaves whose policy
    is ``"local"``. With several processes all must call it.

    Args:
      state: from ``train_step``.
      policy: how local leaves become one: as ``model_state_policy`` of ``data_parallel``, anything but ``"local"``.
        Floating-point leaves are averaged and others are replica 0's if not given.

    Returns:
      The tree that was given to ``init``, of arrays without a replica axis, replicated.

    Raises:
      TypeError: ``state`` is no ``TrainState``.
      ValueError: a policy is unknown, ``"local"``, or not for such a dtype.

    Example:
      >>> import jax.numpy as jnp, optax, fdp
      >>> def loss_fn(params, batch, *, model_state):
      ...     return jnp.mean(batch * params), {"seen": model_state["seen"] + jnp.sum(batch)}
      >>> trainer = fdp.data_parallel(
      ...     loss_fn, optax.sgd(0.1), has_model_state=True, model_state_policy="local"
      ... )
      >>> state = trainer.init(jnp.ones(()), model_state={"seen": jnp.zeros(())})
      >>> state, info = trainer.train_step(state, jnp.arange(8.0))
      >>> state.local_model_state["seen"].shape == (trainer.mesh.size,)
      True
      >>> float(fdp.consistent_model_state(state)["seen"]) == 28.0 / trainer.mesh.size
      True
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"expected a TrainState, got {type(state).__name__}: pass the state that train_step returned."
        )
    # Before asking whether anything is local: a misspelt policy would stay unseen until something is.
    if isinstance(policy, str) and _known(policy, "local model state") == "local":
        raise _still_local()
    local = state.local_model_state
    if local is None:
        return state.model_state
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), local)
    policies = resolve(policy, shapes)
    if "local" in jax.tree.leaves(policies):
        raise _still_local()
    joined = jax.tree.map(_join_on_host, policies, local)
    return merge(state.model_state, jax.device_put(joined, state.step.sharding))


def _still_local() -> ValueError:
    return ValueError(
        "expected a policy that makes local model state one, got 'local': pass 'mean', 'max' or 'first'."
    )


def _join_on_host(policy: str, stacked: jax.Array) -> Any:
    """One value of ``[replicas, ...]``, also where this process holds some of the replicas only."""
    is_key = jnp.issubdtype(stacked.dtype, jax.dtypes.prng_key)
    values = jax.random.key_data(stacked) if is_key else stacked
    if jax.process_count() > 1:
        values = multihost_utils.process_allgather(values, tiled=True)
    values = np.asarray(values)
    if policy == "mean":
        wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        return np.mean(wide, axis=0).astype(values.dtype)
    one = values[0] if policy == "first" else np.max(values, axis=0)
    return jax.random.wrap_key_data(one, impl=jax.random.key_impl(stacked)) if is_key else one
