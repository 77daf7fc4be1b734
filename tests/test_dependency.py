"""Ties: no bit changes, nothing leaks, and the compiled program keeps every bucket apart and in order."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from replicas import bits, on_replicas

import fdp
from fdp import dependency
from fdp.inspect import collectives, graph, load

FORMS = ("cpu", "gpu", "tpu")
TOKENS = (1.0, -0.0, np.nan, np.inf, -np.inf)
COUNTS = (1, 2, 4, 8, 20)


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """The form of each platform; all of them compute on the CPU what they compute elsewhere."""
    monkeypatch.setattr("fdp.compat.platform", lambda: request.param)
    return request.param


def special(dtype):
    """Numbers that arithmetic could change: signed zeros, infinities, NaN, the smallest and the largest."""
    info = jnp.finfo(dtype)
    numbers = [0.0, -0.0, np.inf, -np.inf, np.nan, info.tiny, info.max, 1.0]
    return jnp.asarray(numbers, dtype).reshape(2, 4)


def buffers(dtype=jnp.float32):
    whole = special(dtype)
    return whole, whole[0, 1], whole[:0], whole[1:]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_a_tie_changes_no_bit(form, dtype):
    given = buffers(dtype)
    tie, thread = jax.jit(dependency.tie), jax.jit(dependency.thread)
    for token in map(jnp.float32, TOKENS):
        tied = tie(given, token)
        assert bits(tied) == bits(given)
        assert [(x.shape, x.dtype) for x in tied] == [(x.shape, x.dtype) for x in given]
        assert bits(tie(given[:1], token)) == bits(given[:1])
        assert bits(thread(given, token)[0]) == bits(given)
        assert bits(thread(given[:1], token)[0]) == bits(given[:1])


def test_without_a_token_nothing_happens(form):
    given = buffers()
    assert all(x is y for x, y in zip(dependency.tie(given, None), given, strict=True))
    same, passed_on = dependency.thread(given, None)
    assert all(x is y for x, y in zip(same, given, strict=True))
    assert passed_on is None


def test_a_thread_hands_its_token_on_where_it_is_a_barrier(form):
    one = jnp.ones((2, 3))
    _, passed_on = dependency.thread((one, one[:0]), jnp.float32(7))
    assert (passed_on is not None) == (form == "tpu")
    assert passed_on is None or passed_on == 7
    _, passed_on = dependency.thread((one, one), jnp.float32(7))
    assert passed_on is None


def test_a_token_stands_for_every_buffer():
    assert dependency.token_of(()) is None
    assert dependency.token_of((jnp.zeros((0, 2)),)) is None
    assert dependency.join((None, None)) is None
    token = jax.jit(dependency.token_of)(
        (jnp.full((2, 2), 3.0), jnp.zeros((0,)), jnp.full((), 4 + 1j))
    )
    assert (token.dtype, token.shape) == (jnp.float32, ())
    assert token == 7
    jaxpr = jax.make_jaxpr(dependency.token_of)((jnp.ones(3), jnp.ones((2, 2))))
    assert all(any(var in eqn.invars for eqn in jaxpr.jaxpr.eqns) for var in jaxpr.jaxpr.invars)


def test_detach_changes_nothing(mesh):
    tree = {"a": buffers(), "b": [special(jnp.bfloat16)], "none": None}
    assert bits(jax.jit(dependency.detach)(tree)) == bits(tree)
    assert jax.tree.structure(dependency.detach(tree)) == jax.tree.structure(tree)
    assert dependency.detach({}) == {}
    # Replicated stays replicated: the check of shard_map passes.
    replicated = jax.shard_map(dependency.detach, mesh=mesh, in_specs=P(), out_specs=P())
    assert bits(jax.jit(replicated)(special(jnp.float32))) == bits(special(jnp.float32))


def gradients(count, seed=0):
    """Per replica, a kernel and a bias for each of ``count`` layers; no two layers are of one size."""
    rng = np.random.default_rng(seed)
    return {
        f"layer_{i:02d}": {
            "kernel": jnp.asarray(rng.normal(size=(8, 40 + i, 7)), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=(8, 7)), jnp.float32),
        }
        for i in range(count)
    }


def one_bucket_a_layer(grads):
    layers = jax.tree.map(lambda x: x[0], grads)
    largest = max(sum(x.nbytes for x in layer.values()) for layer in layers.values())
    plan = fdp.plan_buckets(layers, bucket_bytes=largest, first_bucket_bytes=largest)
    assert len(plan.buckets) == len(layers)
    assert {len(bucket.paths) for bucket in plan.buckets} == {2}
    return plan


def compiled(fn, via, mesh, grads):
    if via == "pmap":
        lowered = jax.pmap(fn, axis_name="data", out_axes=None).lower(grads)
    else:
        lowered = on_replicas(fn, via, mesh).lower(grads)
    return load(lowered.compile())


def chain(program):
    """The all-reduces, each in need of the one before; raises where two of them do not need each other."""
    entry = program.module.entry
    found = collectives(program)
    needs = {c.name: graph.dependencies(entry, c.name) for c in found}
    ordered = sorted(found, key=lambda c: sum(other.name in needs[c.name] for other in found))
    for before, after in itertools.pairwise(ordered):
        assert before.name in needs[after.name], f"{after.name} does not wait for {before.name}"
    return ordered


@pytest.mark.parametrize("pack", [fdp.pack.flat(), fdp.pack.leaves()], ids=lambda pack: pack.name)
@pytest.mark.parametrize("via", ["pmap", "shard_map checked", "shard_map unchecked"])
@pytest.mark.parametrize("count", COUNTS)
def test_ordered_buckets_stay_apart_and_in_order(via, count, pack, mesh):
    grads = gradients(count)
    plan = one_bucket_a_layer(grads)
    program = compiled(
        lambda g: fdp.reduce_gradients(g, "data", plan=plan, pack=pack), via, mesh, grads
    )
    assert [c.nbytes for c in chain(program)] == [bucket.nbytes for bucket in plan.buckets]


def test_without_a_dependency_xla_merges_them(mesh):
    """What the test above would say of a schedule that does not hold."""
    grads = gradients(4)
    plan = one_bucket_a_layer(grads)
    program = compiled(
        lambda g: fdp.reduce_gradients(
            g, "data", plan=plan, schedule=fdp.schedules.unordered(), pack=fdp.pack.flat()
        ),
        "shard_map checked",
        mesh,
        grads,
    )
    (everything,) = collectives(program)
    assert everything.nbytes == plan.nbytes


@pytest.mark.parametrize("window", [2, 3])
def test_a_window_waits_for_the_bucket_that_leaves_it(window, mesh):
    grads = gradients(8)
    plan = one_bucket_a_layer(grads)
    program = compiled(
        lambda g: fdp.reduce_gradients(
            g, "data", plan=plan, schedule=fdp.schedules.ordered(window), pack=fdp.pack.flat()
        ),
        "shard_map checked",
        mesh,
        grads,
    )
    sizes = [bucket.nbytes for bucket in plan.buckets]
    # XLA may merge what is in flight together, never what is not.
    assert sum(c.nbytes for c in collectives(program)) == sum(sizes)
    assert len(collectives(program)) >= len(sizes) / window
    chain(program)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(
    "schedule",
    [fdp.schedules.ordered(), fdp.schedules.ordered(2), fdp.schedules.serialized()],
    ids=lambda schedule: schedule.name,
)
@pytest.mark.parametrize("pack", [fdp.pack.flat(), fdp.pack.leaves()], ids=lambda pack: pack.name)
def test_what_is_wrong_in_one_bucket_stays_there(form, schedule, pack, poison, mesh):
    grads = gradients(4)
    plan = one_bucket_a_layer(grads)

    @jax.jit
    def run(grads):
        def reduce(g):
            return fdp.reduce_gradients(g, "data", plan=plan, schedule=schedule, pack=pack)

        return on_replicas(reduce, "shard_map checked", mesh)(grads)

    want = run(grads)
    sick = dict(grads, layer_02=jax.tree.map(lambda x: x.at[3].set(poison), grads["layer_02"]))
    got = run(sick)
    assert not np.isfinite(got["layer_02"]["kernel"]).any()
    assert not np.isfinite(got["layer_02"]["bias"]).any()
    for name in ("layer_00", "layer_01", "layer_03"):
        assert bits(got[name]) == bits(want[name])


def test_a_leaf_that_another_axis_shards_is_not_gathered():
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "model"))
    specs = {"up": P(None, "model"), "down": P("model", None)}
    grads = {
        name: jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    plan = fdp.plan_buckets(grads)
    assert len(plan.buckets) == 1

    def kinds(pack):
        def reduce(grads, x):
            local = jax.tree.map(lambda g: g * x.sum(), grads)
            return fdp.reduce_gradients(local, "data", plan=plan, pack=pack)

        step = jax.shard_map(
            reduce, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
        )
        return {c.kind for c in collectives(jax.jit(step).lower(grads, x).compile())}

    assert kinds(fdp.pack.auto()) == kinds(fdp.pack.leaves()) == {"all-reduce"}
    with pytest.raises(ValueError, match="flat packing would gather leaves that are sharded"):
        kinds(fdp.pack.flat())
