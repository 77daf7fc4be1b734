"""Gradients reduced where they are born equal gradients reduced afterwards, bit for bit, and the report is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from intercept_cases import (
    BORN,
    CASES,
    LAYERS,
    WIDTH,
    end,
    layer,
    over_layers,
    simple_loss,
    weights,
)
from intercept_helpers import (
    MODES,
    assert_same,
    integers,
    intercepted,
    paths,
    reduced_afterwards,
    run,
    sharded,
    where,
)
from jax import lax
from jax.sharding import PartitionSpec as P

BATCH = integers(100, 32, WIDTH)


def check(loss, params, mode, **options):
    """Reduces in both ways, in one program: compiling is most of the time this takes. Returns the gradients."""
    here, afterwards = intercepted(loss, **options), reduced_afterwards(loss)
    got, expected = run(lambda *args: (here(*args), afterwards(*args)), mode, params, BATCH)
    assert_same(got, expected)
    return expected[1]


@pytest.mark.parametrize("name", CASES)
def test_placements_and_values(name):
    loss, params, expected = CASES[name]()
    seen = []
    grads = check(loss, params, "shard_map", seen=seen)
    # Zeros are equal to zeros whatever is done with them, so each slice must have a gradient.
    for path, grad in zip(paths(params), jax.tree.leaves(grads), strict=True):
        slices = np.asarray(grad) if expected[path].startswith("loop") else [np.asarray(grad)]
        assert path in ("unused", "empty") or all(np.any(one) for one in slices), path
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
    check(loss, params, mode, seen=seen, peel=peel)
    assert seen[0].loops


@pytest.mark.parametrize("variant", ["unroll 2", "unroll 3", "unroll all"])
def test_zeros_in_the_first_iteration_of_an_unrolled_loop(variant):
    loss, params, _ = CASES[f"layers in a scan, {variant}"]()
    check(loss, params, "shard_map", peel=False)


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
            layers["w"] = lax.with_sharding_constraint(layers["w"], P(None, None, "model"))
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


def test_cases_cover_both_decisions():
    decisions = [
        words.startswith("loop") for build in CASES.values() for words in build()[2].values()
    ]
    assert any(decisions)
    assert not all(decisions)
    assert set(BORN.values()) == {"loop 0"}
