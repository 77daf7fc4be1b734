"""Python constants where a loss function returns values: JAX hands them on in types of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import fdp
from fdp import intercept, probe
from fdp.checks import check_init

X = np.arange(8, dtype=np.float32)
MEAN = 3.5
OPTIONS = [
    {},
    {"via": "pmap", "num_microbatches": 2},
    {"unused": "skip", "num_microbatches": 2},
    {"weighted": True, "num_microbatches": 2},
]


def trainer_of(loss, **options):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return fdp.data_parallel(loss, optax.sgd(0.5), mesh=mesh, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_constant_loss_and_constant_gradient(options):
    weighted = options.get("weighted", False)
    for loss, value, moved in ((lambda w: 3.0, 3.0, 2.0), (lambda w: 1.0 * w, 2.0, 1.5)):
        trainer = trainer_of(lambda w, x, f=loss: (f(w), 1) if weighted else f(w), **options)
        state, info = trainer.train_step(trainer.init(jnp.float32(2)), X)
        assert float(info.loss) == value
        assert float(state.params) == moved


@pytest.mark.parametrize("options", OPTIONS)
def test_constant_model_state_keeps_its_dtype(options):
    weighted = options.get("weighted", False)

    def loss(w, x, *, model_state):
        new = {"calls": 7, "low": 1.5, "seen": True, "mean": jnp.mean(x)}
        return (jnp.sum(w * x), len(x), new) if weighted else (jnp.mean(w * x), new)

    start = {"calls": 0, "low": jnp.bfloat16(0), "seen": False, "mean": 0.0}
    trainer = trainer_of(loss, has_model_state=True, **options)
    state = trainer.init(jnp.float32(2), model_state=start)
    held, _ = trainer.no_sync_step(state, X)
    new, info = trainer.train_step(held, X)
    assert float(new.params) == 2 - 0.5 * MEAN * (1 if weighted else 2)  # held gradients add up
    assert {k: float(v) for k, v in new.model_state.items() if k != "mean"} == {
        "calls": 7,
        "low": 1.5,
        "seen": 1,
    }
    assert {k: v.dtype for k, v in new.model_state.items()} == {
        k: jnp.asarray(v).dtype for k, v in start.items()
    }
    # With microbatches the last of each replica counts: [2, 3] and [6, 7].
    assert float(new.model_state["mean"]) == (4.5 if "num_microbatches" in options else MEAN)
    assert float(info.loss) == 2 * MEAN


def test_masks_of_constants():
    def run(x):
        weights = {"a": 2.0, "b": 1.0}
        return probe.with_use(lambda w, x: (2.0, (3, w["a"] * x)), "data")(weights, x)

    outputs, mask = jax.vmap(run, axis_name="data")(jnp.arange(2.0))
    value, (count, product) = outputs
    assert (value.tolist(), count.tolist(), product.tolist()) == ([2, 2], [3, 3], [0, 2])
    assert not mask.any()


def test_constants_beside_a_loop_that_reduces():
    def model(w, x):
        return lax.scan(lambda h, one: (jnp.tanh(h * one), None), x, w)[0].sum()

    def computation(w, x):
        return 2.0, 3, jax.grad(model)(w, x)

    w, x = jnp.linspace(0.5, 1, 4), jnp.arange(3.0)
    interception = intercept.analyze(jax.make_jaxpr(computation)(w, x), {2: 0})
    assert len(interception.loops) == 1
    evaluation = intercept.evaluate(
        interception,
        (w, x),
        reduce_slices=lambda loop, slices, index, token, state: (slices, token, state),
    )
    loss, count, grad = evaluation.outputs
    assert (loss.dtype, count.dtype, float(loss), int(count)) == (jnp.float32, jnp.int32, 2.0, 3)
    np.testing.assert_allclose(grad, jax.grad(model)(w, x), rtol=1e-6)


def test_a_trainer_with_keys_from_shapes():
    """Of a key, of its older form, and the key itself: the same program; and a log of a state that has not run."""
    trainer = trainer_of(
        lambda w, x, *, rng: jnp.mean(w * x * jax.random.normal(rng)), has_rng=True
    )
    shape, batch = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    of_shapes = trainer.init(shape, rng=key)
    text = trainer.lower(of_shapes, batch).as_text()
    assert text == trainer.lower(trainer.init(jnp.float32(1), rng=jax.random.key(0)), X).as_text()
    raw = trainer.init(shape, rng=jax.ShapeDtypeStruct((2,), jnp.uint32))
    assert "tensor<2xui32>" in trainer.lower(raw, batch).as_text()
    assert fdp.log_data(trainer, of_shapes, batch)["iteration"] is None
    with pytest.raises(ValueError, match=r"a state of arrays with profile_steps.*leave profile_"):
        fdp.log_data(trainer, of_shapes, batch, profile_steps=1)


@pytest.mark.parametrize("rng", [jax.random.PRNGKey(0), np.zeros(2, np.uint32)])
def test_older_keys_are_keys(rng):
    check_init(False, None, True, rng)


@pytest.mark.parametrize(
    "rng", [0, jnp.zeros(2), jax.random.split(jax.random.key(0)), jnp.zeros(3, jnp.uint32)]
)
def test_what_is_no_key(rng):
    with pytest.raises(TypeError, match="expected rng to be a key such as"):
        check_init(False, None, True, rng)
