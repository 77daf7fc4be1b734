"""Errors about ``fdp.hooks.compress``. Run by ``test_messages``."""

import jax.numpy as jnp
from message_cases_plan import Case

from fdp import hooks

CASES = {
    "the wire's dtype is no type": Case(
        lambda: hooks.compress("fast"),
        TypeError,
        ("expected dtype to be a floating-point type, got 'fast'", "compress(jnp.bfloat16)"),
    ),
    "the wire's dtype is an integer": Case(
        lambda: hooks.compress(jnp.int8),
        TypeError,
        ("expected dtype to be a floating-point type", "int8", "round gradients to whole numbers"),
    ),
    "the wire's dtype is complex": Case(
        lambda: hooks.compress(jnp.complex64),
        TypeError,
        ("expected dtype to be a floating-point type", "sent as pairs of the type given here"),
    ),
    "the wire has eight bits": Case(
        lambda: hooks.compress(jnp.float8_e4m3fn),
        ValueError,
        ("expected dtype to have 16 bits or more, got float8_e4m3fn", "Use jnp.bfloat16"),
    ),
    "the wire has more bits than JAX holds": Case(
        lambda: hooks.compress("float64"),
        ValueError,
        ("expected a dtype that JAX holds as it is, got float64", "jax_enable_x64"),
    ),
    "the hook inside compress is not called": Case(
        lambda: hooks.compress(jnp.bfloat16, hook=hooks.all_reduce),
        TypeError,
        ("expected hook to be a CommHook, got <function all_reduce", "hook=fdp.hooks.all_reduce()"),
    ),
    "compress's predivide is negative": Case(
        lambda: hooks.compress(jnp.bfloat16, predivide=-1.0),
        ValueError,
        ("expected predivide to be more than 0 and finite, got -1.0",),
    ),
}
