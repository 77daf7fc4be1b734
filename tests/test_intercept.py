"""Gradients reduced where they are born equal gradients reduced afterwards, bit for bit, and the report is true."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from intercept_cases import BORN, CASES, LAYERS, WIDTH, end, layer, over_layers, weights
from intercept_helpers import (
    MODES,
    intercepted,
    integers,
    paths,
    reduced_afterwards,
    run,
    sharded,
    where,
)
from jax import lax
from jax.sharding import PartitionSpec as P

from fdp import compat, intercept

BATCH = integers(100, 32, WIDTH)


def assert_same(got, expected):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


@pytest.mark.parametrize("name", CASES)
def test_placements_and_values(name):
    loss, params, expected = CASES[name]()
    seen = []
    got = run(intercepted(loss, seen=seen), "shard_map", params, BATCH)
    assert_same(got, run(reduced_afterwards(loss), "shard_map", params, BATCH))
    found = where(seen[0], params)
    assert found.keys() == expected.keys()
    for path, words in expected.items():
        assert words in found[path], f"{path}: {found[path]}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "peel"),
    [
        ("remat, all of it", True),
        ("weight decay in the loss, after", True),
        ("layers stacked along another axis", True),
        ("two loops", False),
    ],
)
def test_every_way_to_have_an_axis(name, peel, mode):
    loss, params, _ = CASES[name]()
    seen = []
    got = run(intercepted(loss, seen=seen, peel=peel), mode, params, BATCH)
    assert seen[0].loops
    assert_same(got, run(reduced_afterwards(loss), mode, params, BATCH))


@pytest.mark.parametrize("variant", ["unroll 2", "unroll 3", "unroll all"])
def test_zeros_in_the_first_iteration_of_an_unrolled_loop(variant):
    loss, params, _ = CASES[f"layers in a scan, {variant}"]()
    got = run(intercepted(loss, peel=False), "shard_map", params, BATCH)
    assert_same(got, run(reduced_afterwards(loss), "shard_map", params, BATCH))


@pytest.mark.parametrize("peel", [True, False], ids=["peel", "zeros"])
def test_rounded_numbers(peel):
    """Real numbers: the same up to what another fusion of the same operations may round otherwise."""

    def loss(p, x):
        h = over_layers(x, p, lambda h, one: jnp.tanh(h @ one["w"] + one["b"]))
        return jnp.mean(h**2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "b": jax.random.normal(keys[0], (LAYERS, WIDTH)),
        "w": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)),
    }
    x = jax.random.normal(keys[2], (32, WIDTH))
    got = run(intercepted(loss, peel=peel), "shard_map", params, x)
    expected = run(reduced_afterwards(loss), "shard_map", params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), got, expected)


def simple_loss(p, x):
    return end(over_layers(x, p))


def both(fun):
    """``fun(reduce_here, p, x)`` with the interceptor and with the sum afterwards, under a checked shard_map."""

    def here(p, x):
        return fun(True, compat.varying(p, "data"), x)

    def afterwards(p, x):
        return fun(False, compat.varying(p, "data"), x)

    params = weights()
    return run(here, "shard_map", params, BATCH), run(afterwards, "shard_map", params, BATCH)


def evaluated(fun, args, grads, seen, **options):
    """Outputs of ``fun(*args)``, where ``grads`` says which of them are gradients, all summed over the axis."""
    closed = jax.make_jaxpr(fun)(*args)
    seen.append(intercept.analyze(closed, grads))

    def sum_slices(loop, slices, index, token, state):
        return {leaf: lax.psum(one, "data") for leaf, one in slices.items()}, token, state

    options.setdefault("reduce_slices", sum_slices)
    done = intercept.evaluate(seen[0], jax.tree.leaves(args), **options)
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
    assert where(seen[0], {"b": 0, "w": 0})["b"] == "loop 0"
    assert "'reduce_sum' also reads it" in where(
        seen[0], {"b": 0, "w": 0}
    )["w"] or "'integer_pow' also reads it" in where(seen[0], {"b": 0, "w": 0})["w"]


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
        zeros = {leaf: jnp.zeros((LAYERS, *one.shape)) for leaf, one in enumerate(found.loops[0].slices)}
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

    params = {"first": integers(7, WIDTH, WIDTH), "head": integers(9, WIDTH, 2), "layers": weights()}

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


def test_arguments_may_be_closed_over():
    def closing(p, x):
        return intercepted(lambda p: simple_loss(p, x))(p)

    got = run(closing, "shard_map", weights(), BATCH)
    assert_same(got, run(reduced_afterwards(simple_loss), "shard_map", weights(), BATCH))


def test_effects_in_the_loop_happen_once_per_iteration():
    calls = []

    def loss(p, x):
        def body(h, one):
            jax.debug.callback(lambda _: calls.append(1), h[0, 0])
            return layer(h, one)

        return end(over_layers(x, p, jax.checkpoint(body)))

    run(reduced_afterwards(loss), "shard_map unchecked", weights(), BATCH)
    jax.effects_barrier()
    expected = len(calls)
    calls.clear()
    run(intercepted(loss), "shard_map unchecked", weights(), BATCH)
    jax.effects_barrier()
    assert len(calls) == expected > 0


def test_without_jit():
    params = weights()
    got = sharded(intercepted(simple_loss))(params, BATCH)
    assert_same(got, run(reduced_afterwards(simple_loss), "shard_map", params, BATCH))


def test_gradients_of_gradients_pass_through():
    """The rewritten program is differentiable like the original."""

    def outer(reducing):
        def norm(p, x):
            return end(reducing(simple_loss)(p, x)[1]["b"])

        return lambda p, x: lax.psum(jax.grad(norm)(p, x)["b"], "data")

    params = weights()
    got = run(outer(intercepted), "vmap", params, BATCH)
    assert_same(got, run(outer(reduced_afterwards), "vmap", params, BATCH))


@pytest.mark.parametrize("constrained", [False, True])
def test_a_mesh_with_an_axis_left_to_the_partitioner(constrained):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "model"))

    def loss(p, x):
        layers = dict(p)
        if constrained:
            spec = P(None, None, "model")
            layers["w"] = lax.with_sharding_constraint(layers["w"], jax.NamedSharding(mesh, spec))
        return end(over_layers(x, layers))

    def program(fun):
        return jax.jit(
            jax.shard_map(
                fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
            )
        )

    seen = []
    params = weights()
    got = program(intercepted(loss, seen=seen))(params, BATCH)
    assert where(seen[0], params) == {"b": "loop 0", "w": "loop 0"}
    assert_same(got, program(reduced_afterwards(loss))(params, BATCH))


def test_a_jit_with_shardings_of_its_own_stays_closed():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "model"))
    sharding = jax.NamedSharding(jax.sharding.AbstractMesh((2,), ("model",)), P())
    scanned = jax.jit(over_layers, in_shardings=sharding) if mesh.size == 0 else jax.jit(
        over_layers, compiler_options={"xla_embed_ir_in_executable": False}
    )
    del sharding

    seen = []
    closed = jax.make_jaxpr(jax.grad(lambda p, x: end(scanned(x, p))))(weights(), BATCH)
    seen.append(intercept.analyze(closed, {0: 0, 1: 1}))
    assert {place.reason for place in seen[0].placements} == {"it is made by 'jit', not by a loop"}


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
        lambda *args: intercept.evaluate(
            found, args, reduce_slices=never, reduce_ready=never
        ).outputs
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
        assert place.reason == "each iteration makes a slice of it in a loop of its own, which is reduced whole"


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


def test_cases_cover_both_decisions():
    decisions = [words.startswith("loop") for build in CASES.values() for words in build()[2].values()]
    assert any(decisions)
    assert not all(decisions)
    assert set(BORN.values()) == {"loop 0"}
