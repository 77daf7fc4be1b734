"""Models that scan over their layers, compiled for GPU and TPU: what reducing inside the loop buys."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdp import compat, dependency, intercept
from fdp.inspect import interleavings

LAYERS, WIDTH, ROWS = 8, 1024, 1024


def loss_fn(params, x):
    def layer(h, one):
        return h + jax.nn.gelu(h @ one["up"]) @ one["down"], None

    h, _ = lax.scan(jax.checkpoint(layer), x @ params["first"], params["layers"])
    return jnp.mean((h @ params["head"]) ** 2)


def afterwards(params, x):
    params = compat.varying(params, "data")
    return lax.pmean(jax.grad(loss_fn)(params, x), "data")


def mean_each(gradients, token):
    """One reduction per array, each in need of the one before."""
    reduced = {}
    for leaf, gradient in gradients.items():
        tied = dependency.tie([gradient / lax.axis_size("data")], token)
        reduced[leaf] = lax.psum(tied[0], "data")
        token = dependency.token_of([reduced[leaf]])
    return reduced, token


def mean_slices(loop, slices, index, token, state):
    return *mean_each(slices, token), state


def in_loops(peel):
    def step(params, x):
        params = compat.varying(params, "data")
        leaves, treedef = jax.tree.flatten(params)
        closed = jax.make_jaxpr(jax.grad(loss_fn))(params, x)
        done = intercept.evaluate(
            intercept.analyze(closed, {i: i for i in range(len(leaves))}),
            [*leaves, x],
            reduce_slices=mean_slices,
            reduce_ready=mean_each,
            token=jnp.zeros(()),
            peel=peel,
        )
        rest = {i: g for i, g in enumerate(done.outputs) if i not in done.reduced}
        rest, _ = mean_each(rest, done.token)
        return treedef.unflatten([rest.get(i, g) for i, g in enumerate(done.outputs)])

    return step


def compiled(step, target):
    def shape(*dims, spec=None):
        return jax.ShapeDtypeStruct(
            dims, jnp.float32, sharding=NamedSharding(target.mesh, spec or P())
        )

    params = {
        "first": shape(WIDTH, WIDTH),
        "head": shape(WIDTH, WIDTH),
        "layers": {"down": shape(LAYERS, 2 * WIDTH, WIDTH), "up": shape(LAYERS, WIDTH, 2 * WIDTH)},
    }
    x = shape(ROWS * target.mesh.size, WIDTH, spec=P("data"))
    program = jax.shard_map(step, mesh=target.mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(program).lower(params, x).compile(compiler_options=target.options or None)


def schedules(program):
    """The schedule of the entry, and those of the loops that reduce."""
    entry, *loops = interleavings(program).values()
    return entry, [loop for loop in loops if "[" in loop]


def hidden(schedule):
    """For each reduction, whether a matmul runs while it is on the wire."""
    return ["G" in between for between in re.findall(r"\[([^\[\]]*)\]", schedule)]


@pytest.fixture(params=["gpus", "tpus"])
def small_target(request):
    return request.getfixturevalue(request.param)


def test_afterwards_nothing_overlaps(small_target):
    entry, loops = schedules(compiled(afterwards, small_target))
    assert not loops
    assert not any(hidden(entry.partition("W")[2].partition("W")[2]))


def test_inside_the_loop_every_reduction_is_hidden(small_target):
    _, loops = schedules(compiled(in_loops(peel=True), small_target))
    assert len(loops) == 1
    assert hidden(loops[0]) == [True, True]


def test_so_it_is_when_the_first_iteration_reduces_zeros(gpus):
    _, loops = schedules(compiled(in_loops(peel=False), gpus))
    assert [hidden(loop) for loop in loops] == [[True, True]]


def test_a_peeled_iteration_hides_what_was_ready_before_the_loop(gpus):
    """XLA's GPU scheduler keeps a reduction that is on the wire out of loops that reduce, so it needs the peel."""
    entry, _ = schedules(compiled(in_loops(True), gpus))
    before_backward_loop = entry.split("W")[1]
    assert hidden(before_backward_loop) == [True]


def test_memory(gpus):
    """The slice that waits for its reduction costs no more than the copies a reduction afterwards makes."""
    plain, ours = (
        compiled(step, gpus).memory_analysis().temp_size_in_bytes
        for step in (afterwards, in_loops(True))
    )
    assert ours <= 1.05 * plain
