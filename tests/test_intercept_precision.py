"""Slices that wait for their reduction in the dtype they were computed in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from intercept_helpers import integers, intercepted, reduced_afterwards, run, sharded
from jax import lax
from test_intercept_program import PSUMS, bodies

import fdp
from fdp import jaxprs
from fdp.intercept import _precision

LAYERS, WIDTH = 4, 8
BATCH = integers(1, 32, WIDTH)


def computed_in(fun, *args):
    """What is said of the first output of a function."""
    closed = jax.make_jaxpr(fun)(*args)
    return str(_precision.computed_in(closed.jaxpr, closed.jaxpr.outvars[0]))


def f32(x):
    return x.astype(jnp.float32)


@pytest.mark.parametrize(
    ("fun", "dtype", "expected"),
    [
        (f32, "bfloat16", "bfloat16"),
        (f32, "float16", "float16"),
        (f32, "float8_e4m3fn", "float8_e4m3fn"),
        (lambda x: x.astype(jnp.bfloat16), "float8_e5m2", "float8_e5m2"),
        # Moves, calls and their nesting are looked through.
        (lambda x: f32(x).T.reshape(-1)[None], "bfloat16", "bfloat16"),
        (jax.jit(lambda x: jax.checkpoint(f32)(x).T), "bfloat16", "bfloat16"),
        # What narrows, or has no room for the exponent, the fraction or the sign, is the program's own rounding.
        (lambda x: x.astype(jnp.bfloat16), "float32", "bfloat16"),
        (lambda x: x.astype(jnp.bfloat16), "float16", "bfloat16"),
        (lambda x: x.astype(jnp.float16), "bfloat16", "float16"),
        (lambda x: x.astype(jnp.float16), "float8_e4m3fn", "float8_e4m3fn"),
        (f32, "int8", "float32"),
        # Anything that computes does so in its own dtype.
        (lambda x: f32(x) + 1, "bfloat16", "float32"),
        (lambda x: f32(x).sum(0), "bfloat16", "float32"),
        (lambda x: f32(x) * f32(x), "bfloat16", "float32"),
        # No equation: an argument, a constant.
        (lambda x: x, "bfloat16", "bfloat16"),
        (lambda x: 1.0, "bfloat16", "float32"),
    ],
)
def test_where_a_value_was_last_widened(fun, dtype, expected):
    assert computed_in(fun, jnp.ones((2, 3), dtype)) == expected


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        *(
            (narrow, "float32")
            for narrow in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
        ),
        *((narrow, "bfloat16") for narrow in ("float8_e4m3fn", "float8_e5m2")),
        *((narrow, "float16") for narrow in ("float8_e4m3fn", "float8_e5m2")),
    ],
)
def test_every_value_comes_back(narrow, wide):
    """What is said to widen does: all 256 or 65,536 values, there and back."""
    codes = np.arange(2 ** (8 * jnp.dtype(narrow).itemsize))
    values = codes.astype(f"uint{8 * jnp.dtype(narrow).itemsize}").view(jnp.dtype(narrow))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        back = values.astype(jnp.dtype(wide)).astype(jnp.dtype(narrow))
    same = (values == back) | (np.isnan(values) & np.isnan(back))
    assert same.all()
    assert computed_in(lambda x: x.astype(wide), values) == narrow


def in_halves(params, x):
    """Mixed precision as flax's ``dtype=`` does it: parameters are cast where they are used."""

    def layer(h, one):
        w, b = (one[name].astype(jnp.bfloat16) for name in ("w", "b"))
        return jnp.tanh(h @ w + b), None

    h, _ = lax.scan(layer, x.astype(jnp.bfloat16), params)
    return h.astype(jnp.float32).sum()


def params():
    return {
        "w": integers(2, LAYERS, WIDTH, WIDTH),
        "b": integers(3, LAYERS, WIDTH),
    }


def reduces(jaxpr):
    return any(eqn.primitive.name in PSUMS for part, _ in bodies(jaxpr) for eqn in part.eqns)


def waiting(closed):
    """dtypes of the one-layer kernels that the rewritten loop hands on."""
    found = [jaxprs.scan_of(eqn) for jaxpr, _ in bodies(closed.jaxpr) for eqn in jaxpr.eqns]
    (loop,) = [loop for loop in found if loop is not None and reduces(loop.body.jaxpr)]
    carried = loop.body.jaxpr.outvars[: loop.num_carry]
    return {str(v.aval.dtype) for v in carried if v.aval.shape == (WIDTH, WIDTH)}


@pytest.mark.parametrize("peel", [True, False])
@pytest.mark.parametrize(("copied", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_only_what_is_copied_waits_in_halves(peel, copied, expected):
    step = intercepted(
        in_halves,
        peel=peel,
        copied=lambda loop: frozenset(loop.leaves if copied else ()),
    )
    assert waiting(jax.make_jaxpr(sharded(step))(params(), BATCH)) == {expected}


@pytest.mark.parametrize(("mode", "peel"), [("shard_map", True), ("pmap", False)])
def test_waiting_in_halves_changes_no_bit(mode, peel):
    step = intercepted(in_halves, peel=peel, copied=lambda loop: frozenset(loop.leaves))
    _, got = run(step, mode, params(), BATCH)
    _, expected = run(reduced_afterwards(in_halves), mode, params(), BATCH)
    for name, leaf in expected.items():
        assert leaf.dtype == got[name].dtype == jnp.float32
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


@pytest.mark.parametrize(
    ("pack", "expected"), [(fdp.pack.flat(), "bfloat16"), (fdp.pack.leaves(), "float32")]
)
def test_the_step_says_what_is_copied(monkeypatch, pack, expected):
    """A flat buffer is a copy, leaves are reduced where they lie."""
    monkeypatch.setattr(fdp.birth, "MIN_SLICE_BYTES", 0)

    def step(params, x):
        loss, grads = fdp.value_and_grad(in_halves, "data", pack=pack, in_loops=True)(params, x)
        return lax.pmean(loss, "data"), grads

    assert waiting(jax.make_jaxpr(sharded(step))(params(), BATCH)) == {expected}
