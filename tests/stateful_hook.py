"""A hook with state that sees leaf shapes: quantization with error feedback, one scale per leaf.

Not a hook to train with (it sends floats that hold integers); it shows what the hook protocol admits.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from fdp.hooks import CommHook


def error_feedback(levels: int = 8) -> CommHook:
    """Rounds every leaf to ``levels`` steps of its largest element, and adds what was lost to the next gradient.

    State: the residual of the whole bucket, flat, whatever the packing: ``init`` sees the bucket only.
    """

    def init(bucket):
        return {"residual": jnp.zeros((sum(bucket.sizes),), bucket.dtype)}

    def reduce(buffers, state, view):
        flat = jnp.concatenate([jnp.ravel(x) for x in buffers])
        wanted = flat[: sum(view.bucket.sizes)] + state["residual"]
        sent, start = [], 0
        for size in view.bucket.sizes:
            sent.append(quantized(wanted[start : start + size], levels))
            start += size
        rounded = jnp.concatenate(sent)
        # A packing may pad its buffer at the end.
        padded = jnp.concatenate([rounded, jnp.zeros_like(flat[rounded.size :])])
        divided = padded / view.axis_size if view.op == "mean" else padded
        total = lax.psum(divided, view.axis_name)
        reduced, start = [], 0
        for x in buffers:
            size = math.prod(x.shape)
            reduced.append(total[start : start + size].reshape(x.shape))
            start += size
        return tuple(reduced), {"residual": wanted - rounded}

    return CommHook("error_feedback", init, reduce)


def quantized(leaf: jax.Array, levels: int) -> jax.Array:
    """``leaf`` rounded to multiples of its largest element over ``levels``."""
    if not leaf.size:
        return leaf
    step = jnp.max(jnp.abs(leaf)) / levels
    safe = jnp.where(step > 0, step, 1)
    return (jnp.round(leaf / safe) * safe).astype(leaf.dtype)
