"""Model state: a policy for every leaf, and one consistent copy for evaluation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import fdp
import fdp.plan
from fdp import model_state as policies
from tests.models import assert_replicas_bit_equal

START = {
    "average": jnp.zeros(2),
    "count": jnp.zeros((), jnp.int32),
    "key": jax.random.key(0),
    "largest": jnp.full((2,), -jnp.inf),
    "mine": {"sum": jnp.zeros(2, jnp.bfloat16), "steps": jnp.zeros((), jnp.int32)},
    "most": jnp.zeros((), jnp.int32),
    "seen": jnp.zeros((), bool),
}


def policy(path, leaf):
    assert leaf.shape == START_LEAVES[path].shape  # without a replica axis, wherever it is asked
    return {
        "largest": "max",
        "most": "max",
        "seen": "max",
        "count": "from_rank0",
        "mine/sum": "local",
        "mine/steps": "local",
    }.get(path)


START_LEAVES = {
    fdp.leaves.path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(START)
}


def loss_fn(params, batch, *, model_state):
    """A replica's share is one example; its number is what state is made of."""
    x = batch[0]
    new = {
        "average": model_state["average"] + x,
        "count": model_state["count"] + jnp.int32(x) + 1,
        "key": jax.random.fold_in(model_state["key"], lax.axis_index("data")),
        "largest": jnp.maximum(model_state["largest"], x),
        "mine": {
            "sum": model_state["mine"]["sum"] + x.astype(jnp.bfloat16),
            "steps": model_state["mine"]["steps"] + 1,
        },
        "most": jnp.maximum(model_state["most"], jnp.int32(x)),
        "seen": model_state["seen"] | (x > 6),
    }
    return jnp.mean(params * batch), new


@functools.cache
def trainer_of(via="shard_map"):
    return fdp.data_parallel(
        loss_fn, optax.sgd(0.1), via=via, has_model_state=True, model_state_policy=policy
    )


BATCH = np.asarray([3, 1, 4, 1, 5, 9, 2, 6], np.float32)
OTHER = np.asarray([2, 7, 1, 8, 2, 8, 1, 8], np.float32)


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_p43_every_leaf_by_its_policy(via):
    trainer = trainer_of(via)
    state = trainer.init(jnp.ones(()), model_state=START)
    assert state.model_state["mine"] == {"sum": None, "steps": None}
    assert state.local_model_state["mine"]["sum"].shape == (8, 2)
    for step, batch in enumerate((BATCH, OTHER)):
        state, _ = trainer.train_step(state, batch)
        total = (BATCH, BATCH + OTHER)[step]
        got = state.model_state
        np.testing.assert_allclose(got["average"], np.full(2, total.mean()), rtol=1e-6)
        assert int(got["count"]) == total[0] + step + 1
        np.testing.assert_array_equal(got["largest"], [9, 9])
        assert int(got["most"]) == 9
        assert bool(got["seen"])
        assert (got["seen"].dtype, got["most"].dtype) == (jnp.bool_, jnp.int32)
        mine = state.local_model_state["mine"]
        np.testing.assert_array_equal(mine["sum"].astype(jnp.float32), np.stack([total] * 2, 1))
        assert mine["steps"].tolist() == [step + 1] * 8
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)
    assert (
        jax.random.key_data(state.model_state["key"]).tolist() == jax.random.key_data(key).tolist()
    )
    assert_replicas_bit_equal({k: v for k, v in state.model_state.items() if k != "key"})
    whole = fdp.consistent_model_state(state)
    assert jax.tree.structure(whole) == jax.tree.structure(START)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), whole) == jax.tree.map(
        lambda x: (x.shape, x.dtype), START
    )
    np.testing.assert_allclose(
        whole["mine"]["sum"].astype(jnp.float32), np.full(2, (BATCH + OTHER).mean()), rtol=1e-2
    )
    assert int(whole["mine"]["steps"]) == 2
    largest = fdp.consistent_model_state(state, "max")
    np.testing.assert_array_equal(largest["mine"]["sum"].astype(jnp.float32), [17, 17])
    first = fdp.consistent_model_state(state, lambda path, leaf: "from_rank0")
    np.testing.assert_array_equal(first["mine"]["sum"].astype(jnp.float32), [5, 5])
    # It is what training can start from again.
    again = trainer.init(jnp.ones(()), model_state=whole)
    again, _ = trainer.train_step(again, BATCH)
    assert again.local_model_state["mine"]["steps"].tolist() == [3] * 8


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_p41_a_window_keeps_everything_local_and_loses_nothing(via):
    trainer = trainer_of(via)
    state = trainer.init(jnp.ones(()), model_state=START)
    state, _ = trainer.no_sync_step(state, BATCH)
    np.testing.assert_array_equal(state.unreduced.model_state["most"], BATCH)
    assert int(state.model_state["most"]) == 0
    state, _ = trainer.train_step(state, OTHER)
    np.testing.assert_allclose(state.model_state["average"], np.full(2, (BATCH + OTHER).mean()))
    assert int(state.model_state["most"]) == 9
    assert state.local_model_state["mine"]["steps"].tolist() == [2] * 8
    np.testing.assert_array_equal(
        state.local_model_state["mine"]["sum"][:, 0].astype(jnp.float32), BATCH + OTHER
    )


def test_local_state_costs_nothing_on_the_wire_and_maxima_one_reduction_a_dtype():
    trainer = trainer_of()
    text = trainer.lower(trainer.init(jnp.ones(()), model_state=START), BATCH).as_text()
    # One bucket; loss and average; count; key data; then the largest of floats and of integers.
    assert text.count("stablehlo.all_reduce") == 1 + 3 + 2


def test_policies_that_say_what_happens_anyway_change_no_program():
    def loss(params, batch, *, model_state):
        return jnp.mean(params * batch), {"a": model_state["a"] + 1, "n": model_state["n"] + 1}

    def text(policy):
        trainer = fdp.data_parallel(
            loss, optax.sgd(0.1), has_model_state=True, model_state_policy=policy
        )
        state = trainer.init(jnp.ones(()), model_state={"a": jnp.zeros(2), "n": jnp.int32(0)})
        return trainer.lower(state, BATCH).as_text()

    default = text(None)
    assert default == text({"a": "mean", "n": "first"})
    assert default == text(lambda path, leaf: "mean" if path == "a" else None)
    assert default != text("first")


def test_one_replica():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    trainer = fdp.data_parallel(
        loss_fn, optax.sgd(0.1), mesh=mesh, has_model_state=True, model_state_policy=policy
    )
    state = trainer.init(jnp.ones(()), model_state=START)
    assert "all_reduce" not in trainer.lower(state, BATCH[:1]).as_text()
    state, _ = trainer.train_step(state, BATCH[:1])
    assert state.local_model_state["mine"]["sum"].shape == (1, 2)
    assert (int(state.model_state["most"]), bool(state.model_state["seen"])) == (3, False)


def test_nothing_local_nothing_to_join():
    state = fdp.TrainState(0, {}, (), {"a": 1}, None, (), None)
    assert fdp.consistent_model_state(state) is state.model_state


TREE = {
    "mean": jnp.zeros(2),
    "steps": jnp.zeros((), jnp.int32),
    "key": jax.random.key(0),
    "z": jnp.zeros((), complex),
}
WRONG = {
    "average of integers": (
        "mean",
        ["for the policy 'mean'", "got int32 at 'steps'", "use 'first' or 'max' there"],
    ),
    "average of a key": (
        {**dict.fromkeys(TREE, "first"), "key": "mean"},
        ["for the policy 'mean'", "got key<fry> at 'key'"],
    ),
    "unknown": (
        lambda path, leaf: "sum",
        ['"mean", "max", "first" or "local"', "'key', got 'sum'"],
    ),
    "a number": (lambda path, leaf: 3, ["for model state 'key', got 3"]),
    "largest key": ("max", ["has an order for the policy 'max'", "got key<fry> at 'key'"]),
    "largest complex": (
        lambda path, leaf: "max" if path == "z" else None,
        ["got complex64 at 'z': use 'first'"],
    ),
    "another tree": (
        {"mean": "mean"},
        ["tree with the structure of the model state", "'steps'", "got PyTreeDef({'mean': *})"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_policies_that_cannot_be(name):
    policy, says = WRONG[name]
    leaves = {k: v for k, v in TREE.items() if name != "average of integers" or k != "key"}
    with pytest.raises(ValueError, match="expected") as caught:
        policies.resolve(policy, leaves)
    for part in says:
        assert part in str(caught.value)


def test_policies_and_states_that_do_not_belong_together():
    with pytest.raises(ValueError, match=r"got model_state_policy=.*pass has_model_state=True"):
        fdp.data_parallel(loss_fn, optax.sgd(0.1), model_state_policy="mean")
    other = fdp.data_parallel(loss_fn, optax.sgd(0.1), has_model_state=True)
    state = other.init(jnp.ones(()), model_state=START)
    with pytest.raises(ValueError, match="the local model state that model_state_policy asks for"):
        trainer_of().train_step(state, BATCH)
    mine = trainer_of().init(jnp.ones(()), model_state=START)
    with pytest.raises(ValueError, match="makes local model state one, got 'local': pass 'mean'"):
        fdp.consistent_model_state(mine, "local")
    with pytest.raises(ValueError, match="got int32 at 'mine/steps': integers are never averaged"):
        fdp.consistent_model_state(mine, "mean")
