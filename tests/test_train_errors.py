"""What people get wrong with a trainer: the messages, and that nothing is lost by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import fdp
from tests.models import batches, mlp_loss, mlp_params

BATCH = batches(1)[0]


def trainer_of(loss=mlp_loss, optimizer=None, **options):
    return fdp.data_parallel(loss, optimizer or optax.sgd(0.1), **options)


def raises(kind, *parts):
    return pytest.raises(kind, match=".*".join(parts))


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_j17_batch_that_does_not_divide(via):
    trainer = trainer_of(via=via, num_microbatches=3)
    state = trainer.init(mlp_params())
    with raises(
        ValueError,
        r"divides by 8 replicas x 3 microbatches = 24, got 64 examples",
        r"nearest sizes are 48 or 72",
    ):
        trainer.train_step(state, BATCH)
    # Nothing is lost: the state was not donated.
    good = jax.tree.map(lambda x: x[:48], BATCH)
    state, _ = trainer.train_step(state, good)
    assert int(state.step) == 1


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ({}, ["at least one array, got an empty tree"]),
        ({**BATCH, "rate": 0.1}, ["leading axis of examples, got a scalar at 'rate'"]),
        ({**BATCH, "y": BATCH["y"][:8]}, ["same number of examples, got 64 at 'x' and 8 at 'y'"]),
        (jax.tree.map(lambda x: x[:5], BATCH), ["got 5 examples: the nearest sizes are 8"]),
    ],
)
def test_batches_that_are_none(batch, parts):
    trainer = trainer_of()
    with raises(ValueError, *parts):
        trainer.train_step(trainer.init(mlp_params()), batch)


def test_plan_of_other_params():
    plan = fdp.plan_buckets({"w": jnp.ones(3)})
    with raises(ValueError, "params do not match the bucket plan", "expects a leaf 'w'"):
        trainer_of(plan=plan).init(mlp_params())
    wide = mlp_params()
    wide["layer_5"]["bias"] = jnp.zeros(13)
    with raises(ValueError, "at 'layer_5/bias': the plan expects float32.12., got float32.13."):
        trainer_of(plan=fdp.plan_buckets(mlp_params())).init(wide)


def test_state_of_another_optimizer():
    state = trainer_of(optimizer=optax.adam(1e-3)).init(mlp_params())
    with raises(ValueError, "state of this trainer's optimizer", "restore the checkpoint"):
        trainer_of(optimizer=optax.sgd(0.1, momentum=0.9)).train_step(state, BATCH)


def test_state_that_is_none():
    with raises(TypeError, "expected a TrainState, got dict", r"trainer\.init\(params\)"):
        trainer_of().train_step(mlp_params(), BATCH)


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (lambda p, b: (b["x"] - b["y"]) ** 2, ["a floating-point scalar", "got float32"]),
        (lambda p, b: jnp.int32(3), ["a floating-point scalar", "got int32"]),
        (lambda p, b: (mlp_loss(p, b), {}), ["a tuple of 2", "pass has_aux=True"]),
        (lambda p, b: None, ["a floating-point scalar", "got None"]),
    ],
)
def test_losses_that_are_no_scalar(via, loss, parts):
    trainer = trainer_of(loss, via=via)
    with raises(TypeError, *parts):
        trainer.train_step(trainer.init(mlp_params()), BATCH)


@pytest.mark.parametrize("params", [{}, [], {"a": None}])
def test_empty_params(params):
    with raises(ValueError, "at least one array leaf, got an empty tree"):
        trainer_of().init(params)


def test_arguments_that_are_wrong_by_themselves():
    with raises(ValueError, 'via to be "shard_map" or "pmap", got \'xmap\''):
        trainer_of(via="xmap")
    with raises(TypeError, "an optax optimizer", r"call it, for example optax\.sgd\(0\.1\)"):
        trainer_of(optimizer=optax.sgd)
    with raises(TypeError, r"loss_fn to be a function \(params, batch\) -> loss, got 3"):
        trainer_of(3)
    with raises(TypeError, "plan to be a BucketPlan, got int"):
        trainer_of(plan=3)
    with raises(ValueError, "num_microbatches to be at least 1, got 0"):
        trainer_of(num_microbatches=0)
    with raises(ValueError, "bucket_bytes to be at least 1 byte, got 0"):
        trainer_of(bucket_bytes=0).init(mlp_params())
    with raises(TypeError, "bucket_bytes to be a whole number of bytes, got True"):
        trainer_of(bucket_bytes=True).init(mlp_params())
    with raises(ValueError, "compiler_options need via=.shard_map."):
        trainer_of(via="pmap", compiler_options={"a": "b"})
    with raises(ValueError, 'expected op to be "mean" or "sum", got \'max\''):
        trainer_of(op="max")
    with raises(
        TypeError, "expected schedule to be a Schedule", r"call it: fdp\.schedules\.ordered\(\)"
    ):
        trainer_of(schedule=fdp.schedules.ordered)


def test_meshes_without_the_axis():
    mesh = Mesh(np.array(jax.devices()), ("replicas",))
    with raises(ValueError, "expected a mesh with axis 'data', got axes .'replicas',"):
        trainer_of(mesh=mesh)
    with raises(ValueError, "expected a mesh for axis_name="):
        trainer_of(axis_name=("hosts", "data"))


def test_init_is_given_what_the_loss_takes():
    with raises(ValueError, r"expected init\(params, rng=...\), since has_rng=True; got none"):
        trainer_of(has_rng=True).init(mlp_params())
    with raises(ValueError, "got model_state=... in init", "pass has_model_state=True"):
        trainer_of().init(mlp_params(), model_state={"mean": jnp.zeros(3)})
    with raises(TypeError, "expected rng to be a key", "got 0"):
        trainer_of(has_rng=True).init(mlp_params(), rng=0)


def test_unknown_xla_options_are_named_and_dropped():
    with pytest.warns(UserWarning, match="xla_no_such_option"):
        assert fdp.usable_options({"xla_no_such_option": "1"}) == {}
