"""What the compilers make of buckets: how many reductions, in what order, beside what, and at what cost."""

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fdp
from benchmarks import models
from fdp import dependency, options, schedules
from fdp.inspect import collectives, load, overlap, report

MIB = 2**20
LIMIT = 1.05


@pytest.fixture(params=["tpus", "gpus"])
def small_target(request):
    return request.getfixturevalue(request.param)


def mlp(widths, bias=True):
    """Shapes of kernels, and of biases; layer names sort as the layers do."""
    return {
        f"layer_{i:02d}": {
            "kernel": jax.ShapeDtypeStruct((inputs, outputs), jnp.float32),
            **({"bias": jax.ShapeDtypeStruct((outputs,), jnp.float32)} if bias else {}),
        }
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths))
    }


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer.get("bias", 0))
    return jnp.mean(x**2)


def plan_of(params, cap):
    return fdp.plan_buckets(params, bucket_bytes=cap, first_bucket_bytes=cap)


def one_bucket_a_layer(params):
    """A cap that one layer fits and two do not."""
    sizes = [sum(x.size * 4 for x in layer.values()) for layer in params.values()]
    plan = plan_of(params, max(sizes))
    assert len(plan.buckets) == len(params)
    return plan


def sgd(reduce):
    def step(params, x):
        grads = reduce(jax.grad(loss_fn)(fdp.varying(params, "data"), x))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def ordered(plan, **how):
    return lambda grads: fdp.reduce_gradients(grads, "data", plan=plan, **how)


def plain(grads):
    return lax.pmean(grads, "data")


def compiled(target, params, reduce, chosen=None, *, rows=512, via="shard_map"):
    """A step of SGD, as each of the devices of the target would run it."""
    mesh, width = target.mesh, params["layer_00"]["kernel"].shape[0]
    x = jax.ShapeDtypeStruct((mesh.size * rows, width), jnp.float32)
    if via == "pmap":
        step = jax.pmap(
            sgd(reduce),
            axis_name="data",
            in_axes=(None, 0),
            out_axes=None,
            devices=list(mesh.devices.flat),
        )
        x = jax.ShapeDtypeStruct((mesh.size, rows, width), jnp.float32)
        return load(step.lower(params, x).compile())
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = jax.shard_map(sgd(reduce), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    jitted = jax.jit(
        step, in_shardings=(replicated, split), out_shardings=replicated, donate_argnums=0
    )
    return load(jitted.lower(params, x).compile(compiler_options=chosen))


def suggested(target, plan, **how):
    return options.suggested_compiler_options(target.platform, plan, **how)


def sizes_sent(program):
    return [c.nbytes for c in collectives(program)]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 20])
def test_every_bucket_is_one_reduction_in_plan_order(small_target, count):
    params = mlp([512 + 8 * i for i in range(count + 1)])
    plan = one_bucket_a_layer(params)
    program = compiled(small_target, params, ordered(plan), suggested(small_target, plan), rows=64)
    wanted = [bucket.nbytes for bucket in plan.buckets]
    assert len(set(wanted)) == count
    assert sizes_sent(program) == wanted


def test_so_it_is_under_pmap(gpus, monkeypatch):
    params = mlp([512 + 8 * i for i in range(9)])
    plan = one_bucket_a_layer(params)
    # pmap has no mesh to tell the platform by, and compiles for the default backend's when not told otherwise.
    monkeypatch.setattr("fdp.compat.platform", lambda: "gpu")
    program = compiled(gpus, params, ordered(plan), rows=64, via="pmap")
    assert sizes_sent(program) == [bucket.nbytes for bucket in plan.buckets]


def test_plain_reductions_are_merged(small_target):
    """What the tests above would say of buckets that do not hold."""
    params = mlp([512 + 8 * i for i in range(5)])
    assert len(sizes_sent(compiled(small_target, params, plain, rows=64))) < 4


@pytest.mark.parametrize("bias", [False, True], ids=["kernels", "kernels and biases"])
def test_a_matmul_runs_beside_every_bucket_but_the_last(small_target, bias):
    params = mlp([1024] * 7, bias)
    # A TPU overlaps what is one buffer: large kernels alone, all biases in one small bucket.
    cap = options.suggested_bucket_bytes(small_target.platform)
    plan = plan_of(params, min(cap, 5 * MIB))
    program = compiled(small_target, params, ordered(plan), suggested(small_target, plan))
    assert sizes_sent(program) == [bucket.nbytes for bucket in plan.buckets]
    hidden = [found.flops > 0 for found in overlap(program)]
    # After the kernel of the first layer nothing is left to compute.
    last = 1 + (bias and small_target.platform == "tpu")
    assert hidden == [True] * (len(hidden) - last) + [False] * last
    assert hidden.count(True) == 5


def test_a_tie_does_not_make_the_next_matmul_wait(small_target):
    """Both matmuls of a layer, for its input and its kernel, run beside the bucket of the layer behind it."""
    params = mlp([1024] * 6, bias=False)
    plan = one_bucket_a_layer(params)
    program = compiled(small_target, params, ordered(plan), suggested(small_target, plan))
    assert [len(found.matmuls) for found in overlap(program)][:3] == [2, 2, 2]


class Convolutions(nn.Module):
    """A stage of ResNet-50."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = models.Bottleneck(64, 1)(x)
        return x.mean((1, 2))


def hidden_convolutions(target, detach):
    """For each bucket of the stage, whether convolutions run beside it."""
    module = Convolutions()
    shape = (8, 16, 16, 256)
    made = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))

    def loss(params, x):
        state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), made["batch_stats"])
        variables = {"params": params, "batch_stats": state}
        y, _ = module.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(y.astype(jnp.float32) ** 2)

    params = made["params"]
    local = jax.ShapeDtypeStruct(shape, jnp.float32)
    order = fdp.gradient_ready_order(loss, params, local)
    plan = fdp.plan_buckets(
        params, bucket_bytes=MIB // 4 + 32768, first_bucket_bytes=MIB // 4 + 32768, order=order
    )

    def step(params, x):
        grads = ordered(plan)(jax.grad(loss)(fdp.varying(params, "data"), x))
        old = dependency.detach(params) if detach else params
        return jax.tree.map(lambda p, g: p - 0.1 * g, old, grads)

    mesh = target.mesh
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    jitted = jax.jit(
        mapped, in_shardings=(replicated, split), out_shardings=replicated, donate_argnums=0
    )
    x = jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), jnp.float32)
    return [found.flops > 0 for found in overlap(jitted.lower(params, x).compile())]


def test_an_update_that_is_not_detached_makes_the_backward_wait(gpus):
    *buckets, last = hidden_convolutions(gpus, detach=True)
    assert len(buckets) >= 3
    assert all(buckets)
    assert not last
    assert not all(hidden_convolutions(gpus, detach=False)[:-1])


def test_default_packing_costs_no_more_than_pmean(small_target):
    params = mlp([2048] * 7)
    reference = report(compiled(small_target, params, plain))
    cap = options.suggested_bucket_bytes(small_target.platform)
    found = report(compiled(small_target, params, ordered(plan_of(params, cap))))
    assert found.bytes_accessed <= LIMIT * reference.bytes_accessed
    assert found.temp_bytes <= LIMIT * reference.temp_bytes


def test_several_leaves_that_stay_where_they_are_cost_no_more_either(tpus):
    params = mlp([2048] * 7)
    reference = report(compiled(tpus, params, plain))
    plan = plan_of(params, 25 * MIB)
    assert {len(bucket.paths) for bucket in plan.buckets} == {2}
    found = report(compiled(tpus, params, ordered(plan)))
    assert found.bytes_accessed <= LIMIT * reference.bytes_accessed
    assert found.temp_bytes <= LIMIT * reference.temp_bytes


def reduced_alone(target, leaf_mib, cap_mib, use_options=True, **how):
    """Bytes of the reductions of leaves that are there already, and of the buckets they are in."""
    mesh = target.mesh
    shapes = [(mib * MIB // 4096, 1024) for mib in leaf_mib]
    plan = plan_of([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], cap_mib * MIB)
    grads = [
        jax.ShapeDtypeStruct(
            (mesh.size * rows, width), jnp.float32, sharding=NamedSharding(mesh, P("data"))
        )
        for rows, width in shapes
    ]
    step = jax.shard_map(ordered(plan, **how), mesh=mesh, in_specs=P("data"), out_specs=P())
    chosen = suggested(target, plan, **how) if use_options else None
    program = load(jax.jit(step).lower(grads).compile(compiler_options=chosen))
    return sizes_sent(program), [bucket.nbytes for bucket in plan.buckets]


@pytest.mark.parametrize("pack", [fdp.pack.flat(), fdp.pack.leaves()], ids=lambda pack: pack.name)
def test_a_bucket_above_the_limit_of_the_compiler_is_one_reduction(small_target, pack):
    size = {"gpu": 16, "tpu": 40}[small_target.platform]
    sent, buckets = reduced_alone(small_target, [size] * 6, 4 * size, pack=pack)
    assert sent == buckets == [4 * size * MIB, 2 * size * MIB]


def test_without_the_options_it_is_not(small_target):
    size = {"gpu": 16, "tpu": 40}[small_target.platform]
    how = {"pack": fdp.pack.leaves(), "use_options": False}
    sent, buckets = reduced_alone(small_target, [size] * 6, 4 * size, **how)
    assert len(sent) > len(buckets)


@pytest.mark.parametrize(
    "schedule",
    [schedules.unordered(), schedules.ordered(2)],
    ids=lambda schedule: schedule.name,
)
def test_independent_buckets_stay_apart_with_the_options(small_target, schedule):
    sent, buckets = reduced_alone(small_target, [2] * 8, 2, schedule=schedule)
    assert len(sent) == len(buckets) == 8
    merged, _ = reduced_alone(small_target, [2] * 8, 2, use_options=False, schedule=schedule)
    assert len(merged) < 8


def test_this_compiler_knows_all_options(small_target, recwarn):
    device = small_target.mesh.devices.flat[0]
    rows = [row for row in options.OPTIONS if row.platform == small_target.platform]
    known = {row.name: row.value.format(bytes=1, buffers=1) for row in rows}
    assert options.usable_options(known, device) == known
    assert not recwarn.list
    with pytest.warns(UserWarning, match=re.escape("does not know xla_from_the_future: left out")):
        assert options.usable_options({**known, "xla_from_the_future": "1"}, device) == known
