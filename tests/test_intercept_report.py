"""What the interceptor says about a traced gradient, and what it refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from intercept_cases import CASES, LAYERS, WIDTH, end, over_layers, simple_loss, weights
from intercept_helpers import integers, paths
from jax.sharding import PartitionSpec as P

from fdp import intercept

BATCH = integers(100, 32, WIDTH)


def test_a_jit_with_shardings_of_its_own_stays_closed():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    scanned = jax.jit(over_layers, in_shardings=jax.NamedSharding(mesh, P()))
    closed = jax.make_jaxpr(jax.grad(lambda p, x: end(scanned(x, p))))(weights(), BATCH)
    found = intercept.analyze(closed, {0: 0, 1: 1})
    reasons = {place.reason for place in found.placements}
    assert reasons == {"it is made by 'jit', not by a loop"}


def test_small_slices_are_left_alone():
    loss, params, _ = CASES["two loops"]()
    closed = jax.make_jaxpr(jax.grad(loss))(params, BATCH)
    grads = {i: i for i in range(5)}
    every = intercept.analyze(closed, grads)
    nbytes = (WIDTH * WIDTH + WIDTH) * 4
    assert [loop.slice_nbytes for loop in every.loops] == [nbytes, nbytes]
    assert [loop.length for loop in every.loops] == [LAYERS, 3]
    assert intercept.analyze(closed, grads, min_slice_bytes=nbytes).loops == every.loops
    none = intercept.analyze(closed, grads, min_slice_bytes=nbytes + 1)
    assert not none.loops
    assert f"makes {nbytes} bytes of gradients, less than {nbytes + 1}" in none.placements[1].reason
    assert not intercept.analyze(closed, grads, min_slice_bytes=math.inf).loops


def test_without_loops_nothing_is_rewritten():
    """Straight code is evaluated as it was traced, calls and all; reductions may come afterwards."""

    def loss(p, x):
        return jnp.sum(jax.jit(jnp.tanh)(x @ p))

    closed = jax.make_jaxpr(jax.value_and_grad(loss))(jnp.ones((WIDTH, 2)), BATCH)
    found = intercept.analyze(closed, {1: 0})
    assert found.loops == ()

    def never(*_):
        raise AssertionError

    again = jax.make_jaxpr(
        lambda *args: (
            intercept.evaluate(found, args, reduce_slices=never, reduce_ready=never).outputs
        )
    )(jnp.ones((WIDTH, 2)), BATCH)
    assert str(again) == str(closed)


def test_report():
    loss, params, _ = CASES["layers in a scan, forward"]()
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(params, BATCH)
    found = intercept.analyze(closed, {1 + i: i for i in range(3)})
    assert found.report(paths(params)) == (
        "loop 0: 4 iterations, 2 gradients, 80 bytes an iteration\n"
        "  head: outside of loops (it is made by 'dot_general', not by a loop)\n"
        "  layers/b: in loop 0 (each iteration makes a slice of it)\n"
        "  layers/w: in loop 0 (each iteration makes a slice of it)"
    )
    assert "  leaf 1: in loop 0" in str(found)
    nothing = intercept.analyze(closed, {0: 0})
    assert str(nothing).startswith("no loop makes gradients that can be reduced inside it")


def test_report_says_when_a_nested_loop_is_reduced_whole():
    loss, params, _ = CASES["nested scans, stacked twice"]()
    closed = jax.make_jaxpr(jax.grad(loss))(params, BATCH)
    found = intercept.analyze(closed, {0: 0, 1: 1})
    assert found.loops[0].length == 2
    assert found.loops[0].slices[1].shape == (2, WIDTH, WIDTH)
    for place in found.placements:
        assert (
            place.reason
            == "each iteration makes a slice of it in a loop of its own, which is reduced whole"
        )


def test_wrong_gradient_outputs():
    closed = jax.make_jaxpr(jax.grad(simple_loss))(weights(), BATCH)
    with pytest.raises(ValueError, match="outputs of the jaxpr, 0 to 1, got 2"):
        intercept.analyze(closed, {2: 0})
    with pytest.raises(ValueError, match=r"every leaf once, got leaves \[0, 0\]"):
        intercept.analyze(closed, {0: 0, 1: 0})


def test_wrong_number_of_states():
    closed = jax.make_jaxpr(jax.grad(simple_loss))(weights(), BATCH)
    found = intercept.analyze(closed, {0: 0, 1: 1})
    with pytest.raises(ValueError, match=r"one state per rewritten loop \(1\), got 0"):
        intercept.evaluate(found, [], reduce_slices=lambda *_: None, loop_states=[])
