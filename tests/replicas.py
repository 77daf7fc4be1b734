"""One replica's function on several of them, in every way that JAX offers, and gradients to try it on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P


def gradients(seed=0, replicas=8):
    """One gradient tree per replica, stacked; mixed dtypes, a scalar and a leaf without elements."""
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(replicas, 5, 3)), jnp.float32),
        "layers": [jnp.asarray(rng.normal(size=(replicas, 7)), jnp.float32) for _ in range(3)],
        "half": jnp.asarray(rng.normal(size=(replicas, 4)), jnp.bfloat16),
        "z": jnp.asarray(rng.normal(size=(replicas, 2)) + 1j, jnp.complex64),
        "scalar": jnp.asarray(rng.normal(size=(replicas,)), jnp.float32),
        "empty": jnp.zeros((replicas, 0, 3)),
        "none": None,
    }


def on_replicas(fn, where, mesh, axis="data"):
    """``fn``, one replica's function, mapped over the leading axis; the result has one copy."""
    if where == "vmap":
        mapped = jax.vmap(fn, axis_name=axis)
        return lambda *args: jax.tree.map(lambda x: x[0], jax.jit(mapped)(*args))
    if where == "pmap":
        return jax.pmap(fn, axis_name=axis, out_axes=None)

    def local(*args):
        return fn(*jax.tree.map(lambda x: x[0], args))

    checked = where == "shard_map checked"
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=checked)
    )


WHERE = ["vmap", "pmap", "shard_map checked", "shard_map unchecked"]


def assert_close(got, want, rtol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        tol = 1e-2 if x.dtype == jnp.bfloat16 else rtol
        np.testing.assert_allclose(np.asarray(x, y.dtype), y, rtol=tol, atol=tol)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
