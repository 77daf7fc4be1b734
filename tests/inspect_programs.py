"""Small data parallel steps in plain JAX, for the tests of `fdp.inspect`: no fdp in them.

Each is a function of (params, x) for one replica, to be put into `jax.shard_map`; `lower` does that for any mesh.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAYERS, WIDTH, ROWS = 4, 1024, 256

# DESIGN: all-reduces on TPU are synchronous unless these weave them into the matmuls.
TPU_OPTIONS = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_reduce": "true",
}


def unrolled_loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def apply(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def naive(weights, x):
    """One psum per gradient, independent of each other."""
    return apply(weights, [lax.psum(g, "data") for g in jax.grad(unrolled_loss)(weights, x)])


def chained(weights, x):
    """One psum per gradient, last layer first, each in need of the one before: `where(token > inf, 0, g)`."""
    reduced, token = [], None
    for g in reversed(jax.grad(unrolled_loss)(weights, x)):
        g = g if token is None else jnp.where(token > jnp.inf, 0, g)
        reduced.append(lax.psum(g, "data"))
        token = reduced[-1][0, 0]
    return apply(weights, reduced[::-1])


def chained_flat(weights, x):
    """The same with an extra lane: every buffer is flat and carries an element of the one before."""
    reduced, lane = [], jnp.zeros(1)
    for g in reversed(jax.grad(unrolled_loss)(weights, x)):
        flat = lax.psum(jnp.concatenate([g.ravel(), lane]), "data")
        reduced.append(flat[:-1].reshape(g.shape))
        lane = flat[:1] / lax.axis_size("data")
    return apply(weights, reduced[::-1])


def local(weights, x):
    """No communication at all."""
    return apply(weights, jax.grad(unrolled_loss)(weights, x))


def scanned(stacked, x):
    """A scan over layers, one psum after it."""

    def loss(stacked):
        y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, stacked)
        return jnp.mean(y**2)

    return stacked - 0.1 * lax.psum(jax.grad(loss)(stacked), "data")


def scanned_delayed(stacked, x):
    """A scan over layers whose backward reduces the gradient of the layer before while it computes the next."""

    def forward(y, w):
        z = jnp.tanh(y @ w)
        return z, (y, z)

    def backward(carry, saved):
        ct, before = carry
        w, y, z = saved
        reduced = lax.psum(before, "data")
        d = ct * (1 - z * z)
        return (d @ w.T, y.T @ d), reduced

    top, (ys, zs) = lax.scan(forward, x, stacked)
    start = (2 * top / top.size, jnp.zeros_like(stacked[0]))
    (_, last), reduced = lax.scan(backward, start, (stacked, ys, zs), reverse=True)
    grads = jnp.concatenate([lax.psum(last, "data")[None], reduced[:-1]])
    return stacked - 0.1 * grads


def kinds(x, _):
    """One of each kind of collective, each in need of the one before."""
    n = lax.axis_size("data")
    x = lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
    x = lax.all_gather(x * 2, "data", tiled=True)
    x = lax.ppermute(x @ x.T, "data", [(i, (i + 1) % n) for i in range(n)])
    x = lax.all_to_all(x, "data", 0, 0, tiled=True)
    return lax.psum(lax.pmax(x, "data").astype(jnp.bfloat16), "data")


def convolutional(kernels, x):
    """Convolutions with stride and padding, and a mean at the end."""

    def conv(x, kernel, stride):
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dims)

    def loss(kernels):
        y = jax.nn.relu(conv(x, kernels["stem"], 2))
        y = jax.nn.relu(y + conv(y, kernels["same"], 1))
        y = conv(y, kernels["down"], 2).mean((1, 2))
        return jnp.mean((y @ kernels["head"]) ** 2)

    grads = jax.grad(loss)(kernels)
    return apply(kernels, jax.tree.map(lambda g: lax.psum(g, "data"), grads))


_UNROLLED = [(WIDTH, WIDTH)] * LAYERS
_STACKED = (LAYERS, WIDTH, WIDTH)
_KERNELS = {
    "stem": (7, 7, 3, 64),
    "same": (3, 3, 64, 64),
    "down": (1, 1, 64, 128),
    "head": (128, 16),
}

# name: (step, shapes of the parameters, shape of one replica's batch)
PROGRAMS = {
    "naive": (naive, _UNROLLED, (ROWS, WIDTH)),
    "chained": (chained, _UNROLLED, (ROWS, WIDTH)),
    "chained_flat": (chained_flat, _UNROLLED, (ROWS, WIDTH)),
    "local": (local, _UNROLLED, (ROWS, WIDTH)),
    "scanned": (scanned, _STACKED, (ROWS, WIDTH)),
    "scanned_delayed": (scanned_delayed, _STACKED, (ROWS, WIDTH)),
    "kinds": (kinds, (WIDTH, WIDTH), (1,)),
    "convolutional": (convolutional, _KERNELS, (4, 32, 32, 3)),
}


def lower(name: str, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers a program for the devices of a mesh with one axis, "data"; nothing is allocated."""
    step, params, batch = PROGRAMS[name]
    return lower_step(step, params, batch, mesh)


def lower_step(step: Callable, params, batch: tuple[int, ...], mesh: Mesh) -> jax.stages.Lowered:
    """The same for any step. `params` is a pytree of shapes (tuples of ints)."""
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    arguments = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=replicated),
        params,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    rows = (batch[0] * mesh.size, *batch[1:])
    x = jax.ShapeDtypeStruct(rows, np.float32, sharding=split)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped).lower(arguments, x)
