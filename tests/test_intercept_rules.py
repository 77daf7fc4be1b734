"""What a reduction inside a loop may not change: who else reads a gradient, state, tokens, the order of things."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from intercept_cases import CASES, LAYERS, WIDTH, end, layer, over_layers, simple_loss, weights
from intercept_helpers import (
    assert_same,
    integers,
    intercepted,
    reduced_afterwards,
    run,
    sum_slices,
)
from jax import lax

from fdp import compat, intercept

BATCH = integers(100, 32, WIDTH)


def both(fun):
    """``fun(reduce_here, p, x)`` with the interceptor and with the sum afterwards, under a checked shard_map."""

    def here(p, x):
        return fun(True, compat.varying(p, "data"), x)

    def afterwards(p, x):
        return fun(False, compat.varying(p, "data"), x)

    params = weights()
    return run(here, "shard_map", params, BATCH), run(afterwards, "shard_map", params, BATCH)


def evaluated(fun, args, grads, seen):
    """Outputs of ``fun(*args)``, where ``grads`` says which of them are gradients, all summed over the axis."""
    closed = jax.make_jaxpr(fun)(*args)
    seen.append(intercept.analyze(closed, grads))

    done = intercept.evaluate(seen[0], jax.tree.leaves(args), reduce_slices=sum_slices)
    return [
        lax.psum(out, "data") if i not in grads or grads[i] not in done.reduced else out
        for i, out in enumerate(done.outputs)
    ]


def test_who_reads_a_gradient_sees_it_unreduced():
    """Its own local norm is an output beside the gradient of the weights: those wait until after the loop."""
    seen = []

    def gradient_and_norm(p, x):
        grads = jax.grad(simple_loss)(p, x)
        return grads["b"], grads["w"], jnp.sum(grads["w"] ** 2)

    def fun(reduce_here, p, x):
        if reduce_here:
            return evaluated(gradient_and_norm, (p, x), {0: 0, 1: 1}, seen)
        return list(lax.psum(gradient_and_norm(p, x), "data"))

    assert_same(*both(fun))
    bias, weight = seen[0].placements
    assert bias.loop == 0
    assert weight.loop is None
    assert weight.reason.endswith("also reads it, before it is reduced")


def test_a_gradient_that_is_also_returned_unreduced_waits():
    seen = []

    def twice(p, x):
        grads = jax.grad(simple_loss)(p, x)
        return grads["b"], grads["w"], grads["w"]

    def fun(reduce_here, p, x):
        if reduce_here:
            return evaluated(twice, (p, x), {0: 0, 1: 1}, seen)
        return list(lax.psum(twice(p, x), "data"))

    assert_same(*both(fun))
    assert "returned as something else" in seen[0].placements[1].reason


def test_one_gradient_for_two_leaves_is_reduced_for_both():
    seen = []

    def tied(p, x):
        grads = jax.grad(simple_loss)(p, x)
        return grads["b"], grads["w"], 2 * grads["w"]

    def fun(reduce_here, p, x):
        if reduce_here:
            return evaluated(tied, (p, x), {0: 0, 1: 1, 2: 2}, seen)
        return list(lax.psum(tied(p, x), "data"))

    assert_same(*both(fun))
    assert seen[0].loops[0].leaves == (0, 1, 2)


def test_a_gradient_made_from_an_earlier_loops_gradient():
    """The first loop's gradient is needed whole by the second loop's, so only the second is reduced inside."""
    seen = []

    def chained(p, x):
        first = jax.grad(simple_loss)(p, x)
        second = jax.grad(lambda p: simple_loss(p, x + jnp.sum(first["b"])))(p)
        return first["w"], first["w"] + second["w"], first["b"]

    def fun(reduce_here, p, x):
        if reduce_here:
            return evaluated(chained, (p, x), {0: 0, 1: 1}, seen)
        return list(lax.psum(chained(p, x), "data"))

    assert_same(*both(fun))
    assert [place.loop for place in seen[0].placements] == [None, 0]
    assert "gradient of a later loop is made from it" in seen[0].placements[0].reason


def test_other_stacked_outputs_of_the_loop_are_kept():
    """Gradients with respect to the inputs of each layer come out of the same loop and belong to no leaf."""
    seen = []

    def with_inputs(p, x):
        extra = jnp.zeros((LAYERS, *x.shape)) + 0 * x

        def loss(p, extra):
            def body(h, one):
                return layer(h, one[0]) + one[1], None

            return end(lax.scan(body, x, (p, extra))[0])

        grads, per_layer = jax.grad(loss, argnums=(0, 1))(p, extra)
        return grads["b"], grads["w"], per_layer

    def fun(reduce_here, p, x):
        if reduce_here:
            return evaluated(with_inputs, (p, x), {0: 0, 1: 1}, seen)
        return list(lax.psum(with_inputs(p, x), "data"))

    assert_same(*both(fun))
    assert seen[0].loops[0].leaves == (0, 1)


@pytest.mark.parametrize("peel", [True, False], ids=["peel", "zeros"])
def test_state_and_index_of_each_iteration(peel):
    """A hook's state: one entry per iteration, seen and replaced exactly once."""
    seen = []

    def fun(reduce_here, p, x):
        def count(loop, slices, index, token, state):
            new = {"calls": state["calls"] + 1, "index": state["index"] + index}
            reduced = {leaf: lax.psum(one, "data") for leaf, one in slices.items()}
            return reduced, token, new

        closed = jax.make_jaxpr(jax.grad(simple_loss))(p, x)
        seen.append(intercept.analyze(closed, {0: 0, 1: 1}))
        state = {"calls": jnp.zeros(LAYERS, jnp.int32), "index": jnp.zeros(LAYERS, jnp.int32)}
        done = intercept.evaluate(
            seen[0],
            [p["b"], p["w"], x],
            reduce_slices=count,
            loop_states=[state],
            peel=peel,
        )
        return done.loop_states[0]

    got, _ = both(fun)
    np.testing.assert_array_equal(got["calls"], np.ones(LAYERS))
    np.testing.assert_array_equal(got["index"], np.arange(LAYERS))


def test_state_that_differs_per_replica():
    def fun(reduce_here, p, x):
        def feed_back(loop, slices, index, token, state):
            sent = {leaf: one + state[leaf] for leaf, one in slices.items()}
            reduced = {leaf: lax.psum(one, "data") for leaf, one in sent.items()}
            return reduced, token, sent

        closed = jax.make_jaxpr(jax.grad(simple_loss))(p, x)
        found = intercept.analyze(closed, {0: 0, 1: 1})
        zeros = {
            leaf: jnp.zeros((LAYERS, *one.shape)) for leaf, one in enumerate(found.loops[0].slices)
        }
        done = intercept.evaluate(
            found, [p["b"], p["w"], x], reduce_slices=feed_back, loop_states=[zeros]
        )
        local = jax.grad(simple_loss)(p, x)
        right = [jnp.all(done.loop_states[0][i] == local[name]) for i, name in enumerate("bw")]
        return lax.psum(jnp.stack(right).astype(jnp.int32), "data")

    got, _ = both(fun)
    np.testing.assert_array_equal(got, [8, 8])


def test_ready_gradients_and_the_token():
    """What exists before the loop is offered once; all reductions outside of the loop hang on one chain."""
    offered = []

    def loss(p, x):
        return end(over_layers(x @ p["first"], p["layers"]) @ p["head"])

    params = {
        "first": integers(7, WIDTH, WIDTH),
        "head": integers(9, WIDTH, 2),
        "layers": weights(),
    }

    def ready(gradients, token):
        offered.append(sorted(gradients))
        return {leaf: lax.psum(g, "data") for leaf, g in gradients.items()}, token + 1

    def slices(loop, slices, index, token, state):
        reduced = {leaf: lax.psum(one, "data") for leaf, one in slices.items()}
        return reduced, token + 100, state

    tokens = []

    def value_and_grad(p, x):
        p = compat.varying(p, "data")
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(p, x)
        found = intercept.analyze(closed, {1 + i: i for i in range(4)})
        done = intercept.evaluate(
            found,
            [*jax.tree.leaves(p), x],
            reduce_slices=slices,
            reduce_ready=ready,
            token=jnp.zeros(()),
        )
        tokens.append(sorted(done.reduced))
        return done.token

    token = run(value_and_grad, "shard_map", params, BATCH)
    assert offered == [[1]]  # the head: first and the layers do not exist before the loop
    assert tokens == [[1, 2, 3]]
    assert token == 101  # one ready call, and the last slices after the loop


def test_reduce_ready_may_leave_gradients_for_later():
    loss, params, _ = CASES["two loops"]()
    offered = []

    def ready(gradients, token):
        offered.append(sorted(gradients))
        return {}, token

    got = run(intercepted(loss, reduce_ready=ready), "shard_map", params, BATCH)
    assert_same(got, run(reduced_afterwards(loss), "shard_map", params, BATCH))
    assert offered == [[], [0]]


@pytest.mark.parametrize(("count", "loops"), [(60, 1), (250, 0)])
def test_long_ways_from_the_loop_to_the_gradient(count, loops):
    """Each value is read twice by the next: followed once, or 2**60 times. Very long ways are not followed."""
    seen = []

    def folded(p, x):
        grads = jax.grad(simple_loss)(p, x)
        w = grads["w"]
        for _ in range(count):
            w = w * 0.5 + w * 0.5
        return grads["b"], w

    def fun(reduce_here, p, x):
        if reduce_here:
            return evaluated(folded, (p, x), {1: 1}, seen)[1]
        return lax.psum(folded(p, x)[1], "data")

    assert_same(*both(fun))
    assert len(seen[0].loops) == loops
    if not loops:
        assert "more than 200 operations" in seen[0].placements[0].reason


def test_loops_over_mutable_arrays_are_left_alone():
    """Where autodiff hands the array on to the gradient's loop; newer releases of JAX do not."""

    def loss(p, x):
        count = jax.new_ref(jnp.zeros(()))

        def body(h, one):
            count[...] += 1
            return layer(h, one), None

        return end(lax.scan(body, x, p)[0]) + 0 * lax.stop_gradient(count[...])

    seen = []
    got = run(intercepted(loss, seen=seen), "shard_map unchecked", weights(), BATCH)
    expected = run(reduced_afterwards(simple_loss), "shard_map unchecked", weights(), BATCH)
    assert_same(got, expected)
    reasons = {place.reason for place in seen[0].placements}
    assert reasons <= {
        "the loop works on something else than arrays",
        "each iteration makes a slice of it",
    }
