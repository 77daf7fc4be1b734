"""``unused="skip"``, and init, with optimizers whose state is not simply one tree like the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fdp
from fdp.start import initial_state
from fdp.wire import make_wire
from tests.models import assert_replicas_bit_equal

# "b" is used in some steps only.
BRANCHED = {"a": jnp.ones(2), "b": {"v": jnp.full((2,), 2.0), "w": jnp.full((3,), -1.0)}}
LABELS = {"a": "first", "b": {"v": "first", "w": "second"}}
PARTS = {"first": optax.adamw(0.1, weight_decay=0.1), "second": optax.sgd(0.1, momentum=0.9)}
STRUCTURED = {
    "multi_transform": optax.multi_transform(PARTS, LABELS),
    "masked": optax.masked(optax.adam(0.1), {"a": True, "b": {"v": True, "w": False}}),
    "masked subtree, by a function": optax.chain(
        optax.trace(0.9), optax.masked(optax.adam(0.1), lambda p: {"a": True, "b": False})
    ),
    # What optax cannot map to parameters: nothing to skip by, everything else works.
    "labels from a function": optax.multi_transform(
        PARTS, lambda p: {name: "first" if name == "a" else "second" for name in p}
    ),
    "flatten": optax.flatten(optax.adam(0.1)),
}
UNMAPPED = ("labels from a function", "flatten")


def branched_loss(params, x):
    uses_b = lax.cond(
        x[0, 1] > 0,
        lambda b: jnp.sum(b["v"] ** 2) + jnp.sum(jnp.sin(b["w"])),
        lambda b: 0.0 * x[0, 0],
        params["b"],
    )
    return jnp.mean(x[:, 0]) * jnp.sum(params["a"] ** 3) + uses_b


@pytest.mark.parametrize(
    ("name", "unused"),
    [(name, "skip") for name in STRUCTURED] + [(name, "zero") for name in UNMAPPED],
)
def test_state_of_another_structure_than_the_parameters(name, unused):
    optimizer = STRUCTURED[name]
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    trainer = fdp.data_parallel(branched_loss, optimizer, unused=unused, mesh=mesh)
    if unused == "skip" and name in UNMAPPED:
        with pytest.raises(ValueError, match=r'state per parameter with unused="skip".*tree of'):
            init_and_step(trainer)
        return

    @jax.jit
    def one_device_step(params, opt_state, x):
        grads = jax.grad(branched_loss)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = trainer.init(BRANCHED)
    params, opt_state = BRANCHED, optimizer.init(BRANCHED)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(opt_state)
    for on in (1, 0, 0, 1):
        x = np.stack([np.linspace(0.5, 1.5, 8), np.full(8, on)], axis=1).astype(np.float32)
        old = (params, opt_state)
        params, opt_state = one_device_step(params, opt_state, x)
        if unused == "skip" and not on:
            params, opt_state = jax.tree_util.tree_map_with_path(
                lambda path, n, o: o if jax.tree_util.DictKey("b") in path else n,
                (params, opt_state),
                old,
            )
        before = jax.device_get(state.params["b"])
        state, _ = trainer.train_step(state, x)
        for got, want in zip(
            jax.tree.leaves((state.params, state.opt_state)),
            jax.tree.leaves((params, opt_state)),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        if unused == "skip" and not on:
            jax.tree.map(np.testing.assert_array_equal, state.params["b"], before)
    assert_replicas_bit_equal((state.params, state.opt_state))


def init_and_step(trainer):
    x = np.ones((8, 2), np.float32)
    trainer.train_step(trainer.init(BRANCHED), x)


def test_state_is_laid_out_like_sharded_parameters_where_it_has_their_shape():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("model"))
    params = {"a": jax.device_put(np.arange(8.0, dtype="f"), split), "b": jnp.ones(3)}
    for optimizer, shape in (
        (optax.masked(optax.adam(0.1), {"a": True, "b": False}), (8,)),
        (
            optax.multi_transform(
                {"x": optax.adam(0.1), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}
            ),
            (8,),
        ),
        (
            optax.lbfgs(memory_size=3, linesearch=None),
            (3, 8),
        ),  # three do not divide over four devices
    ):
        state = fdp.data_parallel(lambda p, x: 0.0, optimizer, mesh=mesh).init(params)
        kept = [
            x
            for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
            if jax.tree_util.DictKey("a") in path
        ]
        assert shape in {x.shape for x in kept}
        for x in kept:
            assert x.sharding.is_equivalent_to(
                split if x.shape == (8,) else NamedSharding(mesh, PartitionSpec()), x.ndim
            )


def test_p2_gradients_of_several_steps_in_the_optimizer_are_refused_a_window_takes_their_place():
    """A leaf used in the first step of two: its gradient belongs to the update after the second."""
    says = r'every step with unused="skip", got optax.MultiSteps.*num_microbatches=k.*no_sync_step'
    inner = optax.sgd(0.5)
    steps = optax.MultiSteps(inner, 2, use_grad_mean=False)
    with pytest.raises(ValueError, match=says):
        init_and_step(fdp.data_parallel(branched_loss, steps, unused="skip"))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    given = {"params": BRANCHED, "model_state": None, "rng": None}
    wire = make_wire("data", hook=None, schedule=None, pack=None, op="mean")
    everything = (given, fdp.plan_buckets(BRANCHED), steps, wire, None, mesh)
    with pytest.raises(ValueError, match=says):
        initial_state(*everything, NamedSharding(mesh, PartitionSpec("data")), 8, "skip")
    # A state that this trainer did not make: at the first step.
    other = fdp.data_parallel(branched_loss, steps)
    x = [np.tile(np.asarray([[1, on]], np.float32), (8, 1)) for on in (1, 0)]
    with pytest.raises(ValueError, match=says):
        fdp.data_parallel(branched_loss, steps, unused="skip").train_step(
            other.init(BRANCHED), x[0]
        )
    # What to do instead is what it was wanted for.
    params, opt_state = BRANCHED, steps.init(BRANCHED)
    for batch in x:
        grads = jax.grad(branched_loss)(params, batch)
        updates, opt_state = steps.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    window = fdp.data_parallel(branched_loss, inner, unused="skip")
    state, _ = window.no_sync_step(window.init(BRANCHED), x[0])
    state, info = window.train_step(state, x[1])
    assert info.used.tolist() == [True] * 3
    assert float(params["b"]["v"][0]) == 0.0  # 2 - 0.5 * 4: moved
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.params, params)
