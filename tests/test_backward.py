"""An identity whose backward pass reduces."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from intercept_cases import LAYERS, WIDTH, end, layer, over_layers, weights
from intercept_helpers import MODES, assert_same, integers, reduced_afterwards, run, sharded
from jax import lax

from fdp import compat
from fdp.backward import reduce_in_backward

BATCH = integers(100, 32, WIDTH)


def sum_over_data(grads):
    return jax.tree.map(lambda g: lax.psum(g, "data"), grads)


def through(params):
    return reduce_in_backward(params, "data", sum_over_data)


def whole_tree(p, x):
    return end(over_layers(x, through(p)))


def slice_in_the_scan(p, x):
    return end(over_layers(x, p, lambda h, one: layer(h, through(one))))


def slice_in_a_remat(p, x):
    return end(over_layers(x, p, jax.checkpoint(lambda h, one: layer(h, through(one)))))


def loss_of(p, x):
    return end(over_layers(x, p))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", [whole_tree, slice_in_the_scan, slice_in_a_remat])
def test_gradients_come_back_reduced(loss, mode):
    def value_and_grad(p, x):
        value, grads = jax.value_and_grad(loss)(p, x)
        return lax.psum(value, "data"), grads

    params = weights()
    got = run(value_and_grad, mode, params, BATCH)
    assert_same(got, run(reduced_afterwards(loss_of), mode, params, BATCH))


def test_local_parameters_get_local_types_back():
    """Parameters that are marked as differing per replica already: reduced values, the type they came with."""

    def value_and_grad(p, x):
        p = compat.varying(p, "data")
        value, grads = jax.value_and_grad(whole_tree)(p, x)
        assert all("data" in compat.varying_axes(g) for g in jax.tree.leaves(grads))
        return lax.psum(value, "data"), lax.pmax(grads, "data"), lax.pmin(grads, "data")

    params = weights()
    value, largest, smallest = run(value_and_grad, "shard_map", params, BATCH)
    assert_same(largest, smallest)
    assert_same((value, largest), run(reduced_afterwards(loss_of), "shard_map", params, BATCH))


def test_flax_map_variables():
    class Layer(nn.Module):
        reduced: bool

        @nn.compact
        def __call__(self, h, _):
            def dense(module, h):
                return nn.Dense(WIDTH, kernel_init=nn.initializers.ones, name="dense")(h)

            if self.reduced:
                dense = nn.map_variables(
                    dense, "params", trans_in_fn=through, mutable=self.is_initializing()
                )
            return dense(self, h), None

    def model(reduced):
        return nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )(reduced)

    params = model(False).init(jax.random.key(0), BATCH, None)["params"]

    def loss(reduced):
        return lambda p, x: end(model(reduced).apply({"params": p}, x, None)[0])

    def value_and_grad(p, x):
        value, grads = jax.value_and_grad(loss(True))(p, x)
        return lax.psum(value, "data"), grads

    got = run(value_and_grad, "shard_map", params, BATCH)
    assert_same(got, run(reduced_afterwards(loss(False)), "shard_map", params, BATCH))


def test_the_forward_pass_is_the_identity():
    params = weights()
    again = run(lambda p, x: lax.pmax(through(p), "data"), "shard_map", params, BATCH)
    assert_same(again, params)


def test_one_reduction_for_the_tree_in_backward_order():
    """`reduce` sees the whole subtree at once, so it can put it into buckets."""
    seen = []

    def reduce(grads):
        seen.append(sorted(grads))
        return sum_over_data(grads)

    def grad(p, x):
        return jax.grad(lambda p: end(over_layers(x, reduce_in_backward(p, "data", reduce))))(p)

    jax.eval_shape(sharded(grad), weights(), BATCH)
    assert seen == [["b", "w"]]


def test_axis_that_is_not_bound():
    with pytest.raises(NameError, match="expected mesh axis 'data' to be bound"):
        through(weights())


@pytest.mark.parametrize("dtype", ["int32", "key"])
def test_leaves_without_a_gradient(dtype):
    leaf = jax.random.key(0) if dtype == "key" else jnp.arange(3)
    with pytest.raises(
        TypeError, match=r"floating-point parameters, got .* at 'layer/step': pass only"
    ):
        run(lambda p, x: through(p), "vmap", {"layer": {"step": leaf}}, BATCH)


@pytest.mark.parametrize(
    ("reduce", "words"),
    [
        (lambda g: list(g.values()), "return the structure it got"),
        (
            lambda g: g | {"w": g["w"].astype(jnp.bfloat16)},
            r"at 'w' it made bfloat16\[4, 4, 4\] of float32\[4, 4, 4\]",
        ),
        (lambda g: g | {"b": g["b"][0]}, r"at 'b' it made float32\[4\] of float32\[4, 4\]"),
    ],
)
def test_a_reduction_that_returns_something_else(reduce, words):
    def grad(p, x):
        return jax.grad(lambda p: end(over_layers(x, reduce_in_backward(p, "data", reduce))))(p)

    with pytest.raises(TypeError, match=words):
        run(grad, "vmap", weights(), BATCH)


def test_a_reduction_that_does_not_reduce():
    def grad(p, x):
        return jax.grad(lambda p: end(over_layers(x, reduce_in_backward(p, "data", lambda g: g))))(
            p
        )

    words = "equal on all replicas of axis 'data', but at 'b' they still differ: reduce them"
    with pytest.raises(TypeError, match=words):
        jax.eval_shape(sharded(grad), weights(), BATCH)
