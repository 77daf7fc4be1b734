"""Data dependencies between collectives that survive every XLA backend.

XLA merges independent all-reduces and reorders what it may. ``lax.optimization_barrier`` is erased on CPU before
the combiner runs, and dropped elsewhere when its extra output is unused. What no compiler can undo is a value that
is needed: ``token_of`` makes a scalar out of buffers, ``tie`` makes other buffers need that scalar, without changing
one bit of them:

    g[0] <- where(token > inf, 0, g[0])         never true, also for NaN, and XLA does not know it

Only one element per buffer is touched: the buffer's producer (a matmul, the packing copy) does not wait for the
token, only the collective that reads the buffer does, and nothing but that element is read or written again.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def token_of(buffers: Sequence[jax.Array]) -> jax.Array | None:
    """A float32 scalar that exists only once all of ``buffers`` do; None when they hold no elements.

    Every buffer takes part: were one left out, XLA's combiner could merge it with a later bucket.
    """
    scalars = [_first(buffer) for buffer in buffers if buffer.size]
    if not scalars:
        return None
    return scalars[0] if len(scalars) == 1 else jnp.sum(jnp.stack(scalars))


def tie(buffers: Sequence[jax.Array], token: jax.Array | None) -> tuple[jax.Array, ...]:
    """``buffers``, bit for bit, but not before ``token`` exists."""
    if token is None:
        return tuple(buffers)
    never = token > jnp.inf
    return tuple(_tie_one(buffer, never) for buffer in buffers)


def join(tokens: Sequence[jax.Array | None]) -> jax.Array | None:
    """One token for several."""
    there = [token for token in tokens if token is not None]
    if not there:
        return None
    return there[0] if len(there) == 1 else jnp.sum(jnp.stack(there))


def _first(buffer: jax.Array) -> jax.Array:
    corner = lax.slice(buffer, (0,) * buffer.ndim, (1,) * buffer.ndim).reshape(())
    return jnp.real(corner).astype(jnp.float32)


def _tie_one(buffer: jax.Array, never: jax.Array) -> jax.Array:
    if not buffer.size:
        return buffer
    corner = lax.slice(buffer, (0,) * buffer.ndim, (1,) * buffer.ndim)
    kept = jnp.where(never, jnp.zeros_like(corner), corner)
    return lax.dynamic_update_slice(buffer, kept, (0,) * buffer.ndim)
