"""Loss, metrics and model state cross the axis in one small reduction; one calling convention for losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replicas import on_replicas

from fdp import scalars
from fdp.loss import canonical_loss

TREE = {
    "loss": jnp.arange(8.0),
    "half": jnp.arange(8, dtype=jnp.bfloat16),
    "count": jnp.arange(8, dtype=jnp.int32),
    "hit": jnp.arange(8) > 5,
    "table": jnp.arange(16.0).reshape(8, 2),
    "empty": jnp.zeros((8, 0)),
}
HOW = {
    "loss": "mean",
    "half": "mean",
    "count": "sum",
    "hit": "sum",
    "table": "first",
    "empty": "mean",
}


@pytest.mark.parametrize("where", ["vmap", "pmap", "shard_map checked"])
def test_each_leaf_by_its_rule(where, mesh):
    got = on_replicas(lambda t: scalars.reduce_small(t, HOW, "data", 8), where, mesh)(TREE)
    assert {name: (x.shape, x.dtype.name) for name, x in got.items()} == {
        "loss": ((), "float32"),
        "half": ((), "bfloat16"),
        "count": ((), "int32"),
        "hit": ((), "int32"),
        "table": ((2,), "float32"),
        "empty": ((0,), "float32"),
    }
    assert (got["loss"], got["half"], got["count"], got["hit"]) == (3.5, 3.5, 28, 2)
    np.testing.assert_array_equal(got["table"], [0.0, 1.0])


@pytest.mark.parametrize(
    ("dtype", "value", "wide"),
    [
        ("uint8", 200, "uint32"),
        ("int8", -100, "int32"),
        ("int16", 30000, "int32"),
        ("uint16", 60000, "uint32"),
        ("int32", 7, "int32"),
    ],
)
def test_small_integers_do_not_wrap(dtype, value, wide):
    x = jnp.full(8, value, dtype)
    got = jax.vmap(
        lambda x: scalars.reduce_small([x] * 3, ["sum", "first", "max"], "data", 8),
        axis_name="data",
    )(x)
    assert [(int(y[0]), y.dtype.name) for y in got] == [
        (8 * value, wide),
        (value, dtype),
        (value, dtype),
    ]
    over = scalars.over_microbatches(x)
    assert (int(over), over.dtype.name) == (8 * value, wide)


def test_the_first_may_be_another_replica():
    x = jnp.arange(4.0)
    got = jax.vmap(
        lambda x: scalars.reduce_small([x], ["first"], "data", 4, first=2), axis_name="data"
    )(x)
    np.testing.assert_array_equal(got[0], [2.0] * 4)


def test_keys_are_replica_zeros(mesh):
    keys = jax.random.split(jax.random.key(0), 8)
    for where in ("vmap", "shard_map checked"):
        got = on_replicas(lambda k: scalars.reduce_small([k], ["first"], "data", 8), where, mesh)(
            keys
        )
        assert jax.random.key_data(got[0]).tolist() == jax.random.key_data(keys[0]).tolist()


def test_p43_state_is_averaged_only_where_an_average_has_a_meaning():
    state = [jnp.float32(1), jnp.int32(1), jnp.bool_(True), jax.random.key(0)]
    assert [scalars.mean_or_first(x) for x in state] == ["mean", "first", "first", "first"]
    assert [scalars.mean_or_sum(x) for x in state[:3]] == ["mean", "sum", "sum"]


def test_replica_zeros_value_survives_a_nan_elsewhere():
    x = jnp.asarray([7.0, jnp.nan])
    got = jax.vmap(lambda x: scalars.reduce_small([x], ["first"], "data", 2), axis_name="data")(x)
    np.testing.assert_array_equal(got[0], [7.0, 7.0])


def test_one_collective_a_wire_dtype():
    one = jax.tree.map(lambda x: x[0], TREE)
    jaxpr = jax.make_jaxpr(
        lambda t: scalars.reduce_small(t, HOW, "data", 8), axis_env=[("data", 8)]
    )(one)
    # All floats travel as float32, all counts as int32.
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("psum") == 2


def test_one_replica_communicates_nothing_and_keeps_the_dtypes():
    one = jax.tree.map(lambda x: x[3], TREE)
    jaxpr = jax.make_jaxpr(lambda t: scalars.reduce_small(t, HOW, "data", 1))(one)
    assert "psum" not in str(jaxpr)
    got = scalars.reduce_small(one, HOW, "data", 1)
    assert (got["loss"], got["count"], got["hit"], got["hit"].dtype) == (3.0, 3, 0, jnp.int32)


def test_aux_of_microbatches_follows_the_same_rule():
    assert float(scalars.over_microbatches(jnp.asarray([1.0, 3.0]))) == 2.0
    assert int(scalars.over_microbatches(jnp.asarray([1, 3]))) == 4
    hits = scalars.over_microbatches(jnp.asarray([True, True]))
    assert (int(hits), hits.dtype) == (2, jnp.int32)


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("has_model_state", [False, True])
@pytest.mark.parametrize("has_rng", [False, True])
def test_every_form_of_loss_function(has_aux, has_model_state, has_rng):
    def loss_fn(params, batch, **keywords):
        assert set(keywords) == {
            n for n, on in (("model_state", has_model_state), ("rng", has_rng)) if on
        }
        out = [jnp.sum(params * batch)]
        if has_model_state:
            out.append(keywords["model_state"] + 1)
        if has_aux:
            out.append(0.25)
        return tuple(out) if len(out) > 1 else out[0]

    loss = canonical_loss(
        loss_fn, has_aux=has_aux, has_model_state=has_model_state, has_rng=has_rng
    )
    value, (weight, model_state, aux) = loss(jnp.ones(2), jnp.arange(2.0), 10, "key")
    assert float(value) == 1.0
    assert weight is None
    assert model_state == (11 if has_model_state else 10)
    assert aux == (0.25 if has_aux else None)


def test_a_constant_loss_is_a_loss():
    loss = canonical_loss(
        lambda params, batch: 0.5, has_aux=False, has_model_state=False, has_rng=False
    )
    assert loss(None, None, None, None)[0] == 0.5
