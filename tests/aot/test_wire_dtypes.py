"""The type that crosses the wire on TPU and GPU is the one that was asked for: read from the compiled program.

XLA's CPU backend widens 16-bit sums, so that only these compilers can say. Two TPU habits: 16-bit floats other than
bfloat16 travel in pairs as one uint32, and complex numbers as their two parts.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fdp
from fdp import hooks, options, pack
from fdp.inspect import collectives, load

WIDTH, ROWS, LAYERS = 256, 64, 4


@pytest.fixture(params=["tpus", "gpus"])
def small_target(request):
    return request.getfixturevalue(request.param)


def loss_fn(params, batch):
    x = batch.astype(params[0].dtype)
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def trained(target, dtype, wire, packing, chosen):
    """Gradient reductions of a whole step: two buckets of two layers, made by matmuls, used by an update."""
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)] * LAYERS
    cap = 2 * WIDTH * WIDTH * jnp.dtype(dtype).itemsize
    plan = fdp.plan_buckets(params, bucket_bytes=cap, first_bucket_bytes=cap)
    trainer = fdp.data_parallel(
        loss_fn,
        optax.sgd(0.1),
        mesh=target.mesh,
        plan=plan,
        pack=packing,
        hook=hooks.compress(wire),
        compiler_options=options.suggested_compiler_options(target.platform, plan)
        if chosen
        else {},
    )
    batch = jax.ShapeDtypeStruct((target.mesh.size * ROWS, WIDTH), jnp.float32)
    program = load(trainer.lower(trainer.init(params), batch).compile())
    return [c for c in collectives(program) if c.nbytes > 4]


def alone(target, fn, shape, dtype):
    """Reductions of one gradient that comes from nowhere and goes nowhere: nothing around it to fuse a cast into."""
    mesh = target.mesh
    mapped = jax.shard_map(lambda g: fn(g[0]), mesh=mesh, in_specs=P("data"), out_specs=P())
    split = NamedSharding(mesh, P("data"))
    grads = jax.ShapeDtypeStruct((mesh.size, *shape), dtype, sharding=split)
    return collectives(load(jax.jit(mapped).lower(grads).compile()))


def wire_name(target, wire):
    packed = target.platform == "tpu" and wire == jnp.float16
    return "uint32" if packed else jnp.dtype(wire).name


PAIRS = [
    (jnp.float32, jnp.bfloat16),
    (jnp.float32, jnp.float16),
    (jnp.bfloat16, jnp.float32),
    (jnp.float16, jnp.float32),
    (jnp.float16, jnp.bfloat16),
    (jnp.bfloat16, jnp.bfloat16),
]


@pytest.mark.parametrize("chosen", [False, True], ids=["plain", "overlapping"])
@pytest.mark.parametrize("packing", [pack.flat(), pack.leaves()], ids=lambda p: p.name)
@pytest.mark.parametrize(("dtype", "wire"), PAIRS[:3], ids=str)
def test_a_step_sends_every_bucket_in_the_wires_type(small_target, dtype, wire, packing, chosen):
    sent = trained(small_target, dtype, wire, packing, chosen)
    assert [c.dtype for c in sent] == [wire_name(small_target, wire)] * 2
    assert [c.nbytes for c in sent] == [2 * WIDTH * WIDTH * jnp.dtype(wire).itemsize] * 2


def test_a_loop_sends_its_slices_in_the_wires_type(small_target):
    """Layers in a scan: reduced in the loop, one iteration late; the last slice behind it."""

    def scanned(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
        return jnp.mean(x**2)

    trainer = fdp.data_parallel(
        scanned, optax.sgd(0.1), mesh=small_target.mesh, hook=hooks.compress(jnp.bfloat16)
    )
    params = jax.ShapeDtypeStruct((LAYERS, 2 * WIDTH, 2 * WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((small_target.mesh.size * ROWS, 2 * WIDTH), jnp.float32)
    program = load(trainer.lower(trainer.init(params), batch).compile())
    sent = [c for c in collectives(program) if c.nbytes > 4]
    assert any(c.in_loop for c in sent)
    assert {(c.dtype, c.nbytes) for c in sent} == {("bfloat16", 4 * WIDTH * WIDTH * 2)}


@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=str)
def test_the_cast_is_neither_moved_nor_dropped(small_target, dtype, wire):
    def fn(g):
        return fdp.reduce_gradients(g, "data", hook=hooks.compress(wire))

    (sent,) = alone(small_target, fn, (WIDTH, WIDTH), dtype)
    assert sent.dtype == wire_name(small_target, wire)
    assert sent.nbytes == WIDTH * WIDTH * jnp.dtype(wire).itemsize


def test_p33_complex_gradients_need_no_help_of_ours(small_target):
    """NCCL has no complex type, and XLA gives it twice as many real numbers; its TPU compiler sends the two parts."""

    def fn(g):
        return fdp.reduce_gradients(g, "data")

    (sent,) = alone(small_target, fn, (WIDTH, WIDTH), jnp.complex64)
    assert sent.nbytes == WIDTH * WIDTH * 8
    assert sent.dtype == ("complex64" if small_target.platform == "gpu" else "float32")


@pytest.mark.parametrize("wire", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_p33_compressed_complex_gradients_are_pairs(small_target, wire):
    def fn(g):
        return fdp.reduce_gradients(g, "data", hook=hooks.compress(wire))

    (sent,) = alone(small_target, fn, (WIDTH, WIDTH), jnp.complex64)
    assert sent.dtype == jnp.dtype(wire).name
    assert sent.nbytes == 2 * WIDTH * WIDTH * jnp.dtype(wire).itemsize
