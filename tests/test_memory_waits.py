"""On CPU nothing waits for the wire, and the wire for nothing, because of shared memory."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from memory_waits import operations, waits_through_memory

import fdp
from fdp import held

WIDTHS = {
    "equal": [64] * 9,
    "unequal": [49, 128, 64, 96, 32, 128, 48, 64, 10],
}
ROWS = 80


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - batch["y"]) ** 2)


def lower(widths, **options):
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = [{"w": shape(a, b), "b": shape(b)} for a, b in itertools.pairwise(widths)]
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    trainer = fdp.data_parallel(
        loss_fn,
        optax.sgd(0.1),
        mesh=mesh,
        bucket_bytes=16 * 2**10,
        first_bucket_bytes=16 * 2**10,
        **options,
    )
    batch = {"x": shape(2 * ROWS, widths[0]), "y": shape(2 * ROWS, widths[-1])}
    return trainer.lower(trainer.init(params), batch)


def kinds(program):
    """Names of the matmuls, and of the all-reduces of gradients; the loss is reduced first and is tiny."""
    reductions = [name for name, op in program.items() if op.kind == "all-reduce"][1:]
    matmuls = [name for name, op in program.items() if op.kind == "dot" or "ynn" in name]
    assert len(reductions) > 4
    assert len(matmuls) >= 3 * 8 - 1
    return matmuls, reductions


def crossing_waits(lowered):
    """(matmul -> reductions it waits for, reduction -> matmuls it waits for), through memory alone."""
    program = operations(lowered)
    matmuls, reductions = kinds(program)
    waits = waits_through_memory(program)
    held_up = {name: waits[name] & set(reductions) for name in matmuls}
    late = {name: waits[name] & set(matmuls) for name in reductions}
    return [{name: found for name, found in x.items() if found} for x in (held_up, late)]


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("hook", [fdp.hooks.all_reduce(), fdp.hooks.compress(jnp.float16)])
def test_no_matmul_waits_for_a_reduction_and_no_reduction_for_a_matmul(widths, hook):
    assert crossing_waits(lower(widths, hook=hook)) == [{}, {}]


def test_without_the_option_reductions_wait():
    matmuls, reductions = crossing_waits(lower(WIDTHS["unequal"], compiler_options={}))
    assert matmuls == {}
    assert len(reductions) > 1


def test_held_in_front_of_the_hook_instead_matmuls_wait(monkeypatch):
    def run(function, args, hold):
        buffers, state = args
        return function(hold(buffers), state)

    monkeypatch.setattr(held, "run", run)
    matmuls, _ = crossing_waits(lower(WIDTHS["unequal"]))
    assert len(matmuls) > 1


@pytest.mark.parametrize("name", ["data", ("data",), frozenset({"data"})], ids=repr)
def test_a_collective_is_held_whatever_its_axis_is_called(name):
    seen = []

    def hold(read):
        seen.append(len(read))
        return read

    def reduce(x):
        return jax.lax.psum(
            x.sum() + jax.lax.axis_index("data" if name == ("data",) else name), name
        )

    axis = "data" if name == ("data",) else name
    jax.vmap(lambda x: held.run(reduce, (x,), hold), axis_name=axis)(jnp.ones((2, 3)))
    assert seen == [1]
