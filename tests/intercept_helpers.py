"""Gradients through the interceptor with the simplest reduction there is, and the same without it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from fdp import compat, intercept

REPLICAS = 8
# Values are the same at every level, and compiling is most of the time these tests take.
QUICK = {"xla_backend_optimization_level": 0}
MODES = ("shard_map", "shard_map unchecked", "pmap", "vmap")


def paths(params: Any) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]


def integers(key: int, *shape: int, low: int = -1, high: int = 2) -> jax.Array:
    """Small whole numbers: their sums are exact, so any order of summation gives the same bits."""
    return jax.random.randint(jax.random.key(key), shape, low, high).astype(jnp.float32)


def sum_slices(loop, slices, index, token, state):
    return {leaf: lax.psum(one, "data") for leaf, one in slices.items()}, token, state


def intercepted(
    loss: Callable[..., Any],
    *,
    seen: list[intercept.Interception] | None = None,
    min_slice_bytes: float = 0,
    **options: Any,
) -> Callable[..., Any]:
    """``(params, *args) -> (summed loss, summed gradients)``, reduced where they are born."""

    def value_and_grad(params, *args):
        params = compat.varying(params, "data")
        leaves, treedef = jax.tree.flatten(params)
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(params, *args)
        found = intercept.analyze(
            closed, {1 + i: i for i in range(len(leaves))}, min_slice_bytes=min_slice_bytes
        )
        if seen is not None:
            seen.append(found)
        options.setdefault("reduce_slices", sum_slices)
        done = intercept.evaluate(found, [*leaves, *jax.tree.leaves(args)], **options)
        value, *grads = done.outputs
        grads = [g if i in done.reduced else lax.psum(g, "data") for i, g in enumerate(grads)]
        return lax.psum(value, "data"), jax.tree.unflatten(treedef, grads)

    return value_and_grad


def reduced_afterwards(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The oracle: the whole backward pass, then one psum."""

    def value_and_grad(params, *args):
        value, grads = jax.value_and_grad(loss)(compat.varying(params, "data"), *args)
        return lax.psum((value, grads), "data")

    return value_and_grad


def run(fun: Callable[..., Any], mode: str, params: Any, batch: Any) -> Any:
    """``fun(params, its part of the batch)`` on eight replicas; what replica 0 returns."""
    split = jax.tree.map(lambda x: x.reshape(REPLICAS, -1, *x.shape[1:]), batch)
    if mode == "pmap":
        out = jax.pmap(fun, axis_name="data", in_axes=(None, 0))(params, split)
        return jax.tree.map(lambda x: x[0], out)
    if mode == "vmap":
        out = jax.jit(jax.vmap(fun, axis_name="data", in_axes=(None, 0)), compiler_options=QUICK)(
            params, split
        )
        return jax.tree.map(lambda x: x[0], out)
    program = sharded(fun, check_vma=mode == "shard_map")
    return jax.jit(program, compiler_options=QUICK)(params, batch)


def sharded(fun: Callable[..., Any], *, check_vma: bool = True) -> Callable[..., Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:REPLICAS]), ("data",))
    return jax.shard_map(
        fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )


def assert_same(got: Any, expected: Any) -> None:
    """Bit for bit."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


def where(found: intercept.Interception, params: Any) -> dict[str, str]:
    """Path -> "loop 0", or the reason why the gradient is reduced outside of loops."""
    names = paths(params)
    return {
        names[leaf]: reason if loop is None else f"loop {loop}"
        for leaf, loop, reason in found.placements
    }
