"""fdp against what torch's DistributedDataParallel did: ``oracle_torch/recorded.json``. torch itself is not needed.

Where the two differ, the test says so with ``departs``, asserts both sides, and ``docs/torch_departures.md`` gives the
reason under the same name. Buckets are in ``test_torch_oracle_plans``, what is kept from step to step in
``test_torch_oracle_state``.
"""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fdp
from fdp import hooks
from fdp.hooks import CommHook
from tests.torch_recorded import (
    RATE,
    RECORDED,
    WORLDS,
    arrays,
    close,
    departs,
    examples,
    moved,
    plane,
    plane_loss,
    recorded,
    trainer,
)

DOC = Path(__file__).parent.parent / "docs" / "torch_departures.md"


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
@pytest.mark.parametrize("world", WORLDS)
def test_averaged_gradients(world, via):
    the = trainer(world, plane_loss, optax.sgd(1.0), via=via)
    state, _ = the.train_step(the.init(plane()), examples(world))
    for rank in recorded("average", world):
        close(moved(plane(), state), arrays(rank), tolerance=0)


@pytest.mark.parametrize("world", WORLDS)
def test_three_steps_of_sgd(world):
    """Momentum 0.5 and weight decay 0.25, as torch's SGD has them."""
    sgd = optax.chain(optax.add_decayed_weights(0.25), optax.sgd(RATE, momentum=0.5))
    the = trainer(world, plane_loss, sgd)
    state = the.init(plane())
    for step in range(3):
        state, _ = the.train_step(state, examples(world, step))
    for rank in recorded("training", world):
        close(state.params, arrays(rank))


@pytest.fixture(scope="module")
def window():
    """Two steps without communication, one with, for 2 and 4 replicas."""
    found = {}
    for world in WORLDS:
        the = trainer(world, plane_loss, optax.sgd(1.0))
        state = the.init(plane())
        for step in range(2):
            state, _ = the.no_sync_step(state, examples(world, step))
        held = jax.tree.map(np.asarray, state.unreduced.grads)
        state, _ = the.train_step(state, examples(world, 2))
        found[world] = held, moved(plane(), state)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_no_sync_adds(window, world):
    held, reduced = window[world]
    for r, rank in enumerate(recorded("no_sync", world)):
        close(jax.tree.map(lambda x: x[r], held), arrays(rank["local"]), tolerance=0)  # noqa: B023
        close(reduced, arrays(rank["reduced"]), tolerance=0)


@departs("microbatches-are-averaged")
def test_microbatches_are_averaged():
    the = trainer(2, plane_loss, optax.sgd(1.0), num_microbatches=3)
    batches = [examples(2, step).reshape(2, 2, 3) for step in range(3)]
    batch = np.concatenate(batches, axis=1).reshape(
        -1, 3
    )  # each replica's three, one after the other
    state, _ = the.train_step(the.init(plane()), batch)
    summed = arrays(recorded("no_sync")[0]["reduced"])
    close(moved(plane(), state), {name: x / 3 for name, x in summed.items()})


DTYPES = ["float32", "float16", "bfloat16", "complex64"]


def typed_loss(params, by):
    def term(x):
        scale = by[0].astype(x.dtype) * jnp.asarray(1 + 2j if jnp.iscomplexobj(x) else 1, x.dtype)
        return jnp.real(x * scale).sum().astype(jnp.float32)

    return sum(term(x) for x in params.values())


@departs("complex-gradients-are-jaxs")
@pytest.mark.parametrize("world", WORLDS)
def test_p33_p37_every_dtype_is_averaged_in_its_own_bucket(world):
    """The complex gradient is the conjugate of torch's: JAX's convention, the same on one device."""
    params = {name: jnp.ones(2, name) for name in DTYPES}
    the = trainer(world, typed_loss, optax.sgd(1.0))
    batch = 1 + np.arange(world, dtype=np.float32)
    state = the.init(params)
    assert {b.dtype.name for b in the.plan(state, batch).buckets} == set(DTYPES)
    state, _ = the.train_step(state, batch)
    grads = moved(params, state)
    for rank in recorded("dtypes", world):
        for name in DTYPES[:3]:
            close(grads[name], np.array(rank[name]), tolerance=0)
        torchs = np.array(rank["complex64"]) @ [1, 1j]
        close(grads["complex64"], np.conj(torchs), tolerance=0)
        assert np.abs(torchs.imag).min() > 0


def sent(name, world):
    """The gradients of the scenario: one value a rank, the last for all the others."""
    dtype, values = {
        "none, large": ("float16", [3e4]),
        "none, one large": ("float32", [1e5, 0.0]),
        "fp16, one large": ("float32", [1e5, 0.0]),
        "bf16, one large": ("float32", [1e5, 0.0]),
        "fp16, digits": ("float32", [1 + 2.0**-12]),
        "bf16, digits": ("float32", [1 + 2.0**-9]),
        "none, huge": ("float32", [3e38]),
        "none, undivided": ("float32", [3.0, 5.0]),
    }[name]
    padded = (values + values[-1:] * world)[:world]
    return jnp.repeat(jnp.array(padded, dtype)[:, None], 2, axis=1)


def through(hook, grads):
    def fn(g):
        return fdp.reduce_gradients(g, "data", hook=hook)

    return np.asarray(jax.vmap(fn, axis_name="data")(grads), np.float64)


@pytest.mark.parametrize("world", WORLDS)
def test_p26_hooks(world):
    fp16, bf16 = hooks.compress(jnp.float16), hooks.compress(jnp.bfloat16)
    for name, hook in {
        "none, large": hooks.all_reduce(),
        "none, one large": hooks.all_reduce(),
        "bf16, one large": bf16,
        "fp16, digits": fp16,
        "bf16, digits": bf16,
    }.items():
        got = through(hook, sent(name, world))
        for r, rank in enumerate(recorded("hooks", world)):
            np.testing.assert_array_equal(got[r], rank[name], err_msg=name)
    # Dividing after the sum overflows in both, from four ranks on.
    after = through(hooks.all_reduce(predivide=1.0), sent("none, large", 4))
    assert np.all(np.isinf(after))
    assert np.all(np.isinf(recorded("hooks", 4)[0]["sum first, large"]))


@departs("a-tpu-divides-after-the-sum")
def test_a_tpu_divides_after_the_sum(monkeypatch):
    """A sum of float32 overflows only for gradients within a factor of the number of replicas of the largest one."""
    name, world = "none, huge", 2
    grads = sent(name, world)
    for rank in recorded("hooks", world):
        np.testing.assert_allclose(rank[name], 3e38, rtol=1e-6)
    np.testing.assert_allclose(through(hooks.all_reduce(), grads), 3e38, rtol=1e-6)
    monkeypatch.setattr("fdp.compat.platform", lambda: "tpu")
    assert np.all(np.isinf(through(hooks.all_reduce(), grads)))
    np.testing.assert_allclose(through(hooks.all_reduce(predivide=world), grads), 3e38, rtol=1e-6)
    half = "none, large"  # but not where it would matter
    np.testing.assert_allclose(through(hooks.all_reduce(), sent(half, 4)), 3e4, rtol=1e-3)


@departs("compression-divides-before-the-cast")
def test_compression_divides_before_the_cast():
    """1e5 on one of two ranks: its mean, 5e4, is a float16, it is not."""
    name = "fp16, one large"
    assert np.all(np.isinf(recorded("hooks")[0][name]))
    got = through(hooks.compress(jnp.float16), sent(name, 2))
    np.testing.assert_allclose(got, 5e4, rtol=2**-11)


@departs("a-hook-is-told-the-operation")
def test_a_hook_is_told_the_operation():
    """Both give a hook undivided gradients; torch's must know that a mean is wanted."""
    seen = []

    def reduce(buffers, state, view):
        seen.append(view.op)
        return buffers, state

    got = through(CommHook("untouched", lambda bucket: (), reduce), sent("none, undivided", 2))
    for r, rank in enumerate(recorded("hooks")):
        np.testing.assert_array_equal(got[r], rank["none, undivided"])
    assert seen == ["mean"]


def test_p9_a_tied_leaf_is_reduced_once_and_a_frozen_one_not_at_all():
    """(by * (sum of leaf 0 + sum of leaf 1)) * sum of leaf 0, leaf 1 frozen: 16 bytes."""

    def loss(params, by):
        return by[0] * (params[0].sum() + params[1].sum()) * params[0].sum()

    the = trainer(2, loss, optax.sgd(1.0), trainable=[True, False])
    params, batch = [jnp.ones(4), jnp.ones(3)], np.array([1.0, 2.0], np.float32)
    state = the.init(params)
    plan = the.plan(state, batch)
    state, _ = the.train_step(state, batch)
    for rank in recorded("shared"):
        assert [bucket.nbytes for bucket in plan.buckets] == rank["bytes"]
        close(moved(params, state)[0], np.array(rank["grads"][0]), tolerance=0)
        assert rank["grads"][1] is None
    np.testing.assert_array_equal(state.params[1], params[1])


def departures():
    """Name -> file and test, of every test that is marked with ``departs``."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_torch_oracle*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for decorator in getattr(node, "decorator_list", []):
                if ast.unparse(decorator).startswith("departs("):
                    found[ast.literal_eval(decorator.args[0])] = f"{path.name}::{node.name}"
    return found


def entries():
    """Name -> text of each departure in the document."""
    parts = re.split(r"^## `([a-z0-9-]+)`$", DOC.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_departure_is_documented_and_every_document_tested():
    documented, tested = entries(), departures()
    assert sorted(documented) == sorted(tested)
    assert len(tested) >= 10
    for name, text in documented.items():
        for part in ("torch:", "fdp:", "Why:"):
            said = re.search(rf"^- {part} (.+)$", text, re.MULTILINE)
            assert said, f"{name} has no {part!r}"
            assert len(said.group(1)) > 20, name
        assert f"`{tested[name]}`" in text, name
    assert RECORDED["torch"] in DOC.read_text("utf-8")
