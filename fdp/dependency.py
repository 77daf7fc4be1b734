"""Data dependencies between collectives that survive every XLA backend.

XLA merges independent all-reduces and reorders what it may. What no compiler can undo is a value that is needed:
``token_of`` makes a scalar out of buffers that exist, ``tie`` makes other buffers need that scalar, without changing
one bit of them. How it is done decides what it costs, so each platform has its own form:

=======  =========  ==================================================================================================
form     where      what it is
=======  =========  ==================================================================================================
corner   CPU, GPU   ``g[0] <- where(token > inf, 0, g[0])``, written in place. Never true, also for NaN, and XLA does
                    not know it. The matmul or copy that makes ``g`` does not wait, only what reads ``g`` does.
barrier  TPU, one   ``g, token = optimization_barrier(g, token)``: moves no byte and waits for nothing but the
         buffer     collective. It holds only while its token is needed too: ``thread`` hands it to the next tie.
where    TPU, else  ``where(token > inf, 0, g)`` on all of ``g``. XLA fuses it into the matmul that makes ``g``: nothing
                    is read or written again, but that matmul waits for the token.
=======  =========  ==================================================================================================

The barrier is erased on CPU before collectives are merged. The corner's in-place write stops XLA's TPU compiler from
reusing memory. ``where`` is a kernel of its own on GPU. On TPU, several buffers are one synchronous all-reduce that
no matmul can run beside, so there is no overlap for ``where`` to lose. Figures: ``fdp.pack``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fdp import compat

Tree = TypeVar("Tree")


def token_of(buffers: Sequence[jax.Array]) -> jax.Array | None:
    """A float32 scalar that exists only once all of ``buffers`` do; None when they hold no elements.

    Every buffer takes part: were one left out, XLA's combiner could merge it with a later bucket.
    """
    return join([_first(buffer) for buffer in buffers if buffer.size])


def join(tokens: Sequence[jax.Array | None]) -> jax.Array | None:
    """One token for several: it exists once all of them do."""
    there = [token for token in tokens if token is not None]
    return functools.reduce(operator.add, there) if there else None


def tie(
    buffers: Sequence[jax.Array], token: jax.Array | None, earlier: Sequence[jax.Array] = ()
) -> tuple[jax.Array, ...]:
    """``buffers``, bit for bit, but not before ``token`` exists.

    Args:
      buffers: what must wait.
      token: what they wait for; None: nothing.
      earlier: what was sent before; on CPU its memory is not used again before ``token`` exists. XLA gives the memory
        of a buffer that is used up to the next matmul, which its CPU runtime then takes for a dependency: that matmul
        waits for the reduction, and the next reduction for that matmul. A buffer that is still to be read is given to
        nobody. ``keep`` does the same for what comes back. Figures: ``benchmarks/NOTES.md``.
    """
    if token is None:
        return tuple(buffers)
    never = token > jnp.inf
    # One buffer may be reduced asynchronously, and its matmul must not wait for the token.
    write = _where if compat.platform() == "tpu" and len(buffers) > 1 else _corner
    held = [write(buffer, never) if buffer.size else buffer for buffer in buffers]
    read = join([_pair(x) for x in earlier if x.size]) if compat.platform() == "cpu" else None
    filled = [i for i, buffer in enumerate(buffers) if buffer.size]
    if read is not None and filled:
        held[filled[0]] = _corner(buffers[filled[0]], never, read)
    return tuple(held)


def thread(
    buffers: Sequence[jax.Array], token: jax.Array | None
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """``tie`` for a link of a chain with another after it; costs less where a barrier can be used.

    Args:
      buffers, token: as for ``tie``.

    Returns:
      The buffers, and a token that must become part of the token of a later ``tie`` or ``thread`` (``join`` it), or the
      compiler drops this dependency; None where there is nothing to hand on.
    """
    if token is None or compat.platform() != "tpu" or sum(1 for b in buffers if b.size) != 1:
        return tie(buffers, token), None
    *held, passed = lax.optimization_barrier((*buffers, token))
    return tuple(held), passed


def keep(buffers: Sequence[jax.Array], token: jax.Array | None) -> tuple[jax.Array, ...]:
    """``buffers``, bit for bit; on CPU not usable, and so not overwritten, before ``token`` exists: see ``tie``."""
    return tie(buffers, token) if compat.platform() == "cpu" else tuple(buffers)


def detach(tree: Tree) -> Tree:
    """``tree``, bit for bit, as arrays that XLA does not take for the same: for parameters about to be updated.

    XLA fuses operations that read the same array. An update reads a parameter and its reduced gradient; an operation of
    the backward pass reads the parameter too. Where both are small (the scale of a batch norm) they become one, and the
    backward pass waits for the reduction: in ResNet-50 on 8 H100, 2 of 6 buckets had a convolution beside them, with
    ``detach`` all but the last. Give ``optimizer.update`` and ``apply_updates`` the result of ``detach(params)``.
    """
    return lax.optimization_barrier(tree)


def _first(buffer: jax.Array) -> jax.Array:
    corner = lax.slice(buffer, (0,) * buffer.ndim, (1,) * buffer.ndim).reshape(())
    return jnp.real(corner).astype(jnp.float32)


def _pair(buffer: jax.Array) -> jax.Array:
    """A float32 scalar that needs ``buffer`` itself.

    Two elements, one of them the corner: what was written in place and nothing else, or nothing of it, XLA (0.12) takes
    from where the write took it, and the buffer's memory is free.
    """
    sizes = [1] * buffer.ndim
    wide = [axis for axis, size in enumerate(buffer.shape) if size > 1]
    if wide:
        sizes[wide[-1]] = 2
    pair = lax.slice(buffer, (0,) * buffer.ndim, sizes)
    return jnp.real(pair).astype(jnp.float32).sum()


def _corner(buffer: jax.Array, never: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
    corner = lax.slice(buffer, (0,) * buffer.ndim, (1,) * buffer.ndim)
    other = jnp.zeros_like(corner)
    if otherwise is not None:
        other += otherwise.astype(corner.dtype)
    kept = jnp.where(never, other, corner)
    return lax.dynamic_update_slice(buffer, kept, (0,) * buffer.ndim)


def _where(buffer: jax.Array, never: jax.Array) -> jax.Array:
    return jnp.where(never, jnp.zeros_like(buffer), buffer)
