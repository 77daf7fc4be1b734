"""Parameters that are tied, frozen or changed: one leaf used twice, two leaves that hold one array, an old plan."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fdp
from tests.models import one_device_run, relative_difference

BATCH = np.linspace(-1, 1, 16 * 4, dtype=np.float32).reshape(16, 4)


def tied_loss(params, batch):
    """The embedding is the output layer too."""
    return jnp.mean((jnp.tanh(batch @ params["table"]) @ params["table"].T - batch) ** 2)


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_p9_p12_a_leaf_that_is_used_twice_is_reduced_once(via):
    params = {"table": jnp.eye(4)[:, :3] + 0.1}
    optimizer = optax.sgd(0.5, momentum=0.9)
    trainer = fdp.data_parallel(tied_loss, optimizer, via=via)
    state = trainer.init(params)
    assert trainer.lower(state, BATCH).as_text().count("stablehlo.all_reduce") == 2
    for _ in range(2):
        state, _ = trainer.train_step(state, BATCH)
    expected, _, _ = one_device_run(tied_loss, optimizer, params, [BATCH] * 2)
    assert relative_difference(state.params, expected) <= 1e-6


def loss(params, batch):
    return jnp.mean(batch @ params["encoder"] @ params["decoder"]["w"])


@pytest.mark.parametrize("kind", [jnp.ones, np.ones])
def test_p9_one_array_in_two_leaves_draws_a_warning(kind):
    table = kind((4, 4))
    trainer = fdp.data_parallel(loss, optax.sgd(0.1))
    with pytest.warns(
        UserWarning, match=r"one array twice, at 'decoder/w' and at 'encoder'.*keep one"
    ):
        trainer.init({"encoder": table, "decoder": {"w": table}})


def test_no_warning_where_nothing_is_tied():
    table = jnp.ones((4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fdp.data_parallel(loss, optax.sgd(0.1)).init(
            {"encoder": table, "decoder": {"w": table + 0}}
        )
        # A frozen copy is not trained, and arrays without elements cannot drift.
        frozen = fdp.data_parallel(
            loss, optax.sgd(0.1), trainable=lambda path, leaf: path == "encoder"
        )
        frozen.init({"encoder": table, "decoder": {"w": table}})
        empty = jnp.ones((0, 4))
        fdp.data_parallel(loss, optax.sgd(0.1)).init({"encoder": empty, "decoder": {"w": empty}})


def test_p50_another_set_of_trainable_leaves_needs_another_plan():
    params = {"encoder": jnp.ones((4, 4)), "decoder": {"w": jnp.ones((4, 4))}}
    plan = fdp.plan_buckets(params)
    frozen = fdp.data_parallel(
        loss, optax.sgd(0.1), plan=plan, trainable=lambda path, leaf: path != "encoder"
    )
    with pytest.raises(
        ValueError, match="at 'encoder' the plan trains it and trainable= leaves it out"
    ):
        frozen.init(params)
    # The state of the old set is refused too: its momentum has a leaf too many.
    momentum = optax.sgd(0.1, momentum=0.9)
    state = fdp.data_parallel(loss, momentum).init(params)
    new = fdp.data_parallel(loss, momentum, trainable={"encoder": False, "decoder": {"w": True}})
    with pytest.raises(
        ValueError,
        match="state of this trainer's optimizer, which at '0/trace/encoder' has nothing",
    ):
        new.train_step(state, BATCH)


def test_p51_a_parameter_that_was_replaced_by_another_is_found():
    params = {"encoder": jnp.ones((4, 4)), "decoder": {"w": jnp.ones((4, 4))}}
    trainer = fdp.data_parallel(loss, optax.sgd(0.1), plan=fdp.plan_buckets(params))
    state = trainer.init(params)
    wide = {"encoder": jnp.ones((4, 5)), "decoder": {"w": jnp.ones((5, 4))}}
    with pytest.raises(
        ValueError, match=r"at 'decoder/w': the plan expects float32\[4,4\], got float32\[5,4\]"
    ):
        trainer.train_step(state._replace(params=wide), BATCH)
