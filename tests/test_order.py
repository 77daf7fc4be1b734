"""The order in which gradients become ready, read from the traced gradient."""

import jax
import jax.numpy as jnp
import pytest
from intercept_helpers import paths
from jax import lax

import fdp
from fdp.order import gradient_ready_order, ready_order, unhidden_leaves, unused_leaves

DEPTH, WIDTH = 12, 8


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


X = shape(4, WIDTH)
# As dict keys, "layer_10" and "layer_11" come before "layer_2".
MLP = {f"layer_{i}": {"b": shape(WIDTH), "w": shape(WIDTH, WIDTH)} for i in range(DEPTH)}
BACKWARDS = [f"layer_{i}" for i in reversed(range(DEPTH))]


def ordered(loss, params, *args, **keywords):
    """Paths in ready order."""
    names = paths(params)
    return [names[i] for i in gradient_ready_order(loss, params, *args, **keywords)]


def dense(h, one):
    return jnp.tanh(h @ one["w"] + one["b"])


@jax.custom_vjp
def custom(h, one):
    return dense(h, one)


custom.defvjp(lambda h, one: jax.vjp(dense, h, one), lambda pullback, ct: pullback(ct))


def mlp(layer=dense, cast=None):
    def loss(p, x):
        if cast is not None:
            p, x = jax.tree.map(lambda a: a.astype(cast), (p, x))
        for i in range(DEPTH):
            x = layer(x, p[f"layer_{i}"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


@pytest.mark.parametrize(
    "loss",
    [
        mlp(),
        jax.jit(mlp()),
        mlp(jax.jit(dense)),
        mlp(jax.checkpoint(dense)),
        jax.checkpoint(mlp()),
        jax.jit(jax.checkpoint(mlp(jax.jit(dense)))),
        mlp(custom),
        mlp(jax.jit(custom)),
        mlp(cast=jnp.bfloat16),
        jax.jit(mlp(jax.checkpoint(dense), cast=jnp.bfloat16)),
    ],
)
def test_last_layer_first_whatever_it_is_wrapped_in(loss):
    found = [path.split("/")[0] for path in ordered(loss, MLP, X)]
    assert found == [layer for layer in BACKWARDS for _ in range(2)]


def test_a_cast_in_one_place_does_not_hide_the_order():
    """The casts of the gradients stand together at the end of the program, in tree order backwards."""
    found = ordered(mlp(cast=jnp.bfloat16), MLP, X)
    tree_order_backwards = paths(MLP)[::-1]
    assert found[:2] != tree_order_backwards[:2]
    assert found[0].startswith("layer_11")
    assert tree_order_backwards[0].startswith("layer_9")


def test_a_scan_makes_its_gradients_together():
    def loss(p, x):
        h = x @ p["a_first"]
        h, _ = lax.scan(lambda h, one: (dense(h, one), None), h, p["layers"])
        return jnp.sum(h @ p["z_head"])

    params = {
        "a_first": shape(WIDTH, WIDTH),
        "layers": {"b": shape(3, WIDTH), "w": shape(3, WIDTH, WIDTH)},
        "z_head": shape(WIDTH, 2),
    }
    assert ordered(loss, params, X) == ["z_head", "layers/w", "layers/b", "a_first"]


def test_a_parameter_of_all_iterations_comes_with_its_loop():
    def loss(p, x):
        h, _ = lax.scan(
            lambda h, w: (jnp.tanh(h @ w @ p["shared"]), None), x @ p["a"], p["stacked"]
        )
        return jnp.sum(h @ p["z"])

    square = shape(WIDTH, WIDTH)
    params = {"a": square, "shared": square, "stacked": shape(3, WIDTH, WIDTH), "z": square}
    assert ordered(loss, params, X) == ["z", "stacked", "shared", "a"]


def test_a_conditional_makes_its_gradients_together():
    def loss(p, x):
        h = lax.cond(jnp.sum(x) > 0, lambda: x @ p["b"] @ p["c"], lambda: x @ p["d"])
        return jnp.sum(jnp.tanh(h) @ p["z"]) + jnp.sum(x @ p["a"]) * 0.5

    square = shape(WIDTH, WIDTH)
    found = ordered(loss, dict.fromkeys("abcdz", square), X)
    assert found.index("z") < found.index("d")
    assert found[found.index("d") :][:3] == ["d", "c", "b"]


def test_a_tied_parameter_is_ready_at_its_last_use():
    """Used by the head, ready first, and by the embedding, ready last."""

    def loss(p, tokens):
        h = jnp.tanh(p["tied"][tokens] @ p["middle"])
        return jnp.sum(h @ p["tied"].T @ p["head"])

    params = {"head": shape(32, 2), "middle": shape(WIDTH, WIDTH), "tied": shape(32, WIDTH)}
    assert ordered(loss, params, shape(4, dtype=jnp.int32)) == ["head", "middle", "tied"]


def test_ties_are_in_reverse_tree_order():
    def loss(p, x):
        return jnp.sum(lax.scan(lambda h, one: (h + sum(one.values()), None), x, p)[0])

    params = {name: shape(3, WIDTH) for name in "cab"}
    assert ordered(loss, params, X) == ["c", "b", "a"]


def test_gradients_that_wait_for_nothing_come_first():
    def loss(p, x):
        return jnp.sum(p["constant"]) + p["literal"] + jnp.sum(x @ p["w"])

    params = {
        "constant": shape(3),
        "index": shape(3, dtype=jnp.int32),
        "literal": shape(),
        "unused": shape(5),
        "w": shape(WIDTH, 2),
    }
    assert ordered(loss, params, X) == ["unused", "literal", "index", "constant", "w"]


def unused(loss, params, *args, **keywords):
    names = paths(params)
    return {names[i] for i in unused_leaves(loss, params, *args, **keywords)}


def test_unused_leaves():
    def loss(p, x):
        def body(h, one):
            return jnp.tanh(h @ one["w"]), jnp.sum(one["w"])

        layers = {"w": p["stacked"], "u": p["never_in_scan"]}
        h, sums = lax.scan(body, x @ lax.stop_gradient(p["frozen"]), layers)
        picked = lax.cond(jnp.sum(x) > 0, lambda: jnp.sum(p["one_branch"]), lambda: 0.0)
        return jnp.sum(h) + jnp.sum(sums) + picked + 0.0 * jnp.sum(p["times_zero"])

    square = shape(WIDTH, WIDTH)
    params = {
        "frozen": square,
        "index": shape(3, dtype=jnp.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "never": square,
        "never_in_scan": shape(3, 2),
        "one_branch": square,
        "stacked": shape(3, WIDTH, WIDTH),
        "times_zero": square,
    }
    expected = {"frozen", "index", "key", "never", "never_in_scan", "times_zero"}
    assert unused(loss, params, X) == expected
    assert unused(jax.jit(loss), params, X) == expected
    assert unused(jax.checkpoint(loss), params, X) == expected


def test_unused_inside_the_loop_only():
    """Gradients that a loop carries or stacks, and that no iteration adds anything to."""

    def loss(p, x):
        def body(h, one):
            kept = lax.stop_gradient(p["shared"]) * one["frozen"].sum()
            return jnp.tanh(h @ one["w"] + lax.stop_gradient(kept)), None

        return jnp.sum(lax.scan(body, x, {"w": p["w"], "frozen": p["frozen"]})[0])

    params = {"frozen": shape(3, 2), "shared": shape(WIDTH), "w": shape(3, WIDTH, WIDTH)}
    assert unused(loss, params, X) == {"frozen", "shared"}


def test_zero_data_does_not_make_a_leaf_unused():
    """Zero by the program, whatever the data, not zero by the data of one step."""
    loss = mlp()
    params = jax.tree.map(lambda s: jnp.zeros(s.shape), MLP)
    assert unused(loss, params, jnp.zeros(X.shape)) == set()


def test_nothing_is_allocated():
    huge = 2**22
    params = {"a": shape(huge, huge), "b": shape(huge, huge)}
    found = ordered(lambda p, x: jnp.sum(x @ p["a"] @ p["b"]), params, shape(huge, huge))
    assert found == ["b", "a"]


def test_arrays_and_shapes_give_the_same_order():
    arrays = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (MLP, X))
    assert gradient_ready_order(mlp(), *arrays) == gradient_ready_order(mlp(), MLP, X)


def test_aux_keywords_and_static_arguments():
    def loss(p, x, kind, *, scale):
        assert kind == "sum"
        assert isinstance(scale, float)
        return scale * jnp.sum(x @ p["a"] @ p["b"]), {"kind": 1}

    params = {"a": shape(WIDTH, WIDTH), "b": shape(WIDTH, WIDTH)}
    assert ordered(loss, params, X, "sum", has_aux=True, scale=2.0) == ["b", "a"]


def test_a_loss_with_collectives():
    def loss(p, x):
        return jnp.sum(lax.pmean(x @ p["a"], "data") @ p["b"])

    params = {"a": shape(WIDTH, WIDTH), "b": shape(WIDTH, WIDTH)}
    assert ordered(loss, params, X, axis_sizes={"data": 4}) == ["b", "a"]
    with pytest.raises(NameError, match=r'pass their sizes, for example axis_sizes=\{"data": 8\}'):
        gradient_ready_order(loss, params, X)


def test_a_gradient_that_is_traced_already():
    params = {"a": shape(WIDTH, WIDTH), "b": shape(WIDTH, WIDTH), "c": shape(WIDTH, WIDTH)}

    def value_and_grads(p, x):
        value, grads = jax.value_and_grad(lambda p: jnp.sum(x @ p["a"] @ p["b"] @ p["c"]))(p)
        return grads["c"], value, grads["a"], grads["b"]

    closed = jax.make_jaxpr(value_and_grads)(params, X)
    assert ready_order(closed, [2, 3, 0]) == (2, 1, 0)
    assert ready_order(closed, [0, 2]) == (0, 1)


def test_the_plan_takes_the_order():
    order = gradient_ready_order(mlp(), MLP, X)
    nbytes = 4 * (WIDTH * WIDTH + WIDTH)
    plan = fdp.plan_buckets(MLP, bucket_bytes=nbytes, first_bucket_bytes=nbytes, order=order)
    assert [bucket.paths[0].split("/")[0] for bucket in plan.buckets] == BACKWARDS


def test_no_leaves():
    with pytest.raises(ValueError, match=r"expected params with at least one leaf, got \{\}"):
        gradient_ready_order(lambda p: 0.0, {})


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda h: h, r"floating-point scalar, got float32\[4,8\]: return jnp.mean"),
        (lambda h: jnp.int32(1), r"floating-point scalar, got int32\[\]"),
        (lambda h: (jnp.sum(h), h), "a tuple of 2: pass has_aux=True"),
    ],
)
def test_a_loss_that_is_no_scalar(out, words):
    with pytest.raises(TypeError, match=words):
        gradient_ready_order(lambda p, x: out(x @ p), shape(WIDTH, WIDTH), X)


def test_aux_that_is_not_there():
    with pytest.raises(TypeError, match=r"\(loss, aux\) as has_aux=True says, got \w*Tracer"):
        gradient_ready_order(lambda p: jnp.sum(p), shape(3), has_aux=True)


def test_other_name_errors_are_left_alone():
    def loss(p):
        return jnp.sum(p) + undefined_name  # noqa: F821

    with pytest.raises(NameError, match="undefined_name"):
        gradient_ready_order(loss, shape(3))


def unhidden(loss, params, *args, **keywords):
    names = paths(params)
    return {names[i] for i in unhidden_leaves(loss, params, *args, **keywords)}


def test_the_first_layer_has_no_matmul_left_to_hide_behind():
    assert unhidden(mlp(), MLP, X) == {"layer_0/w"}
    assert unhidden(mlp(jax.checkpoint(dense)), MLP, X) == {"layer_0/w"}
    assert "layer_0/w" in unhidden(mlp(cast=jnp.bfloat16), MLP, X)
    # What the last matmul of the backward makes is for the input here: all weights are ready before it.
    params = {"inputs": shape(4, WIDTH), **MLP}
    assert unhidden(lambda p: mlp()(p, jnp.sin(p["inputs"])), params) == {"inputs"}


def test_embeddings_and_scanned_layers_are_unhidden():
    params = {
        "embedding": shape(10, WIDTH),
        "head": shape(WIDTH, 3),
        "layers": {"b": shape(DEPTH, WIDTH), "w": shape(DEPTH, WIDTH, WIDTH)},
    }

    def loss(p, tokens):
        h, _ = lax.scan(lambda h, one: (dense(h, one), None), p["embedding"][tokens], p["layers"])
        return jnp.mean((h @ p["head"]) ** 2)

    tokens = shape(4, dtype=jnp.int32)
    assert unhidden(loss, params, tokens) == {"embedding", "layers/b", "layers/w"}


def test_matmuls_that_no_gradient_needs_and_losses_without_any():
    def logs(p, x):
        value = mlp()(p, x)
        return value, lax.stop_gradient(x @ x.T @ p["layer_3"]["w"][:4])

    assert unhidden(logs, MLP, X, has_aux=True) == {"layer_0/w"}
    assert unhidden(lambda p, x: jnp.sum(p["a"] * x), {"a": shape(4, WIDTH)}, X) == set()
