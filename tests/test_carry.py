"""Buckets that are carried over: the same training, with reductions beneath the next forward pass."""

from __future__ import annotations

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from memory_waits import operations, waits_through_memory

import fdp
from fdp import carry
from tests import models
from tests.models import batches, mlp_loss, mlp_params, one_device_run, relative_difference

DATA = batches(6)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def run(trainer, data=DATA, params=None, **init):
    return models.run(trainer, data, params, **init)


def small(optimizer=None, loss=mlp_loss, **options):
    optimizer = optax.sgd(0.1, momentum=0.9) if optimizer is None else optimizer
    sizes = {"bucket_bytes": 1, "first_bucket_bytes": 1}  # a bucket a leaf
    return fdp.data_parallel(loss, optimizer, **{**sizes, **options})


def equal(got, expected):
    """To the last bits: XLA may fuse an update into one program that stands alone in another."""

    def close(a, b):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-5, atol=1e-6)
        elif not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)

    jax.tree.map(lambda a, b: close(jnp.asarray(a), jnp.asarray(b)), got, expected)


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), CLIPPED], ids=["sgd", "clip"])
@pytest.mark.parametrize("count", [2, 99])
def test_the_training_is_the_same(via, optimizer, count):
    expected, losses = run(small(optimizer, via=via))
    trainer = small(optimizer, via=via, carry_over=count)
    state, found = run(trainer)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert state.carried is not None
    finished = trainer.finish(state)
    assert finished.carried is None
    equal(finished, expected)


def test_it_is_that_of_one_device():
    optimizer = optax.adam(1e-2)
    params, _, losses = one_device_run(mlp_loss, optimizer, mlp_params(), DATA)
    trainer = small(optimizer, carry_over=2)
    state, found = run(trainer)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert relative_difference(trainer.finish(state).params, params) < 1e-4


OPTIONS = {
    "microbatches": {"num_microbatches": 4},
    "window": {"schedule": fdp.schedules.ordered(window=2)},
    "serialized": {"schedule": fdp.schedules.serialized()},
    "fused": {"schedule": fdp.schedules.fused()},
    "unordered": {"schedule": fdp.schedules.unordered()},
    "leaves": {"pack": fdp.pack.leaves()},
    "compressed": {"hook": fdp.hooks.compress(jnp.bfloat16)},
    "sum": {"op": "sum"},
    "large buckets": {"bucket_bytes": 1300, "first_bucket_bytes": 300},
    "frozen": {"trainable": lambda path, leaf: not path.endswith("bias") and "b" not in path},
    "in loops": {"in_loops": True},
    "counted": {"count_nonfinite": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_whatever_else_is_asked_for(options):
    expected, losses = run(small(**options))
    trainer = small(**options, carry_over=2)
    state, found = run(trainer)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    equal(trainer.finish(state), expected)


def test_16_bit_parameters_are_rounded_before_the_forward_pass_reads_them():
    """Without a barrier behind the update XLA leaves that out (`xla_allow_excess_precision`)."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), mlp_params())

    def loss(params, batch):  # reads them in float32
        return mlp_loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), batch)

    expected, losses = run(small(loss=loss), params=params)
    trainer = small(loss=loss, carry_over=2)
    state, found = run(trainer, params=params)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert relative_difference(trainer.finish(state).params, expected.params) < 1e-3


def test_layer_norms_and_large_buckets_differ_in_the_last_bits():
    """XLA fuses an update with unpacking in one program, and not in the other."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(4):
                x = nn.tanh(nn.Dense(16)(nn.LayerNorm()(x)))
            return nn.Dense(1)(x)

    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((4, 12)))["params"]

    def loss(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"][:, :1]) ** 2)

    sizes = {"bucket_bytes": 5000, "first_bucket_bytes": 5000}
    expected, losses = run(small(loss=loss, **sizes), params=params)
    trainer = small(loss=loss, **sizes, carry_over=2)
    state, found = run(trainer, params=params)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, trainer.finish(state).params, expected.params)


def test_a_bucket_crosses_in_its_own_order():
    """The place in a flat buffer decides in which order a ring adds up, and what a hook puts together."""

    def bundle(seen):
        def reduce(buffers, state, view):
            seen.append(view.bucket.leaf_indices)
            return fdp.hooks.all_reduce().reduce(buffers, state, view)

        return fdp.hooks.CommHook("seen", fdp.hooks.all_reduce().init, reduce)

    seen = []
    sizes = {"bucket_bytes": 1300, "first_bucket_bytes": 300}
    trainer = small(**sizes, hook=bundle(seen), carry_over=2)
    state, _ = run(trainer, DATA[:1])
    seen.clear()
    plan = trainer.plan(state, DATA[0])  # traces the second step
    chosen = [bucket.leaf_indices for bucket in carry.choose(plan, 2)]
    assert seen[:2] == chosen
    assert any(list(indices) != sorted(indices) for indices in chosen)


def test_a_carried_gradient_of_another_trainer_is_named():
    state, _ = run(small(carry_over=2), DATA[:1])
    frozen = small(optax.sgd(0.1), trainable=lambda path, leaf: "bias" not in path, carry_over=2)
    state = state._replace(opt_state=frozen.init(mlp_params()).opt_state)
    for call in (frozen.finish, lambda s: frozen.train_step(s, DATA[1])):
        with pytest.raises(
            ValueError,
            match=r"state.carried to hold .* at 'layer_1/bias' it has one and needs none",
        ):
            call(state)
    other = small(optax.adam(0.1), carry_over=2)
    with pytest.raises(ValueError, match="expected the state of this trainer's optimizer"):
        other.finish(run(small(carry_over=2), DATA[:1])[0])


def test_a_gradient_carried_for_another_operation_is_named():
    """Half of it is a mean already: that the other half becomes a sum nobody would see."""
    state, _ = run(small(carry_over=2), DATA[:1])
    for options in ({"carry_over": 2}, {}):
        summed = small(op="sum", **options)
        for call in (summed.finish, lambda s, t=summed: t.train_step(s, DATA[1])):
            with pytest.raises(ValueError, match=r"for op='sum', .* '\w+/\w+' are for op='mean'"):
                call(state)
    summed = small(op="sum", carry_over=2)
    before, _ = run(summed, DATA[:1])
    after = summed.finish(before)
    plain, _ = run(small(op="sum"), DATA[:1])
    equal(after, plain)


def test_a_scan_over_steps_starts_behind_the_first():
    trainer = small(carry_over=2)
    expected, _ = run(trainer)
    state, _ = run(trainer, DATA[:1])
    rest = jax.tree.map(lambda *leaves: np.stack(leaves), *DATA[1:])
    state, _ = jax.jit(lambda s, data: jax.lax.scan(trainer.train_step, s, data))(state, rest)
    equal(trainer.finish(state), trainer.finish(expected))


def test_a_trainer_without_takes_over():
    state, _ = run(small(carry_over=2), DATA[:3])
    trainer = small()
    for batch in DATA[3:]:
        state, _ = trainer.train_step(state, batch)
    expected, _ = run(trainer)
    equal(state, expected)


def test_between_steps_params_and_step_are_one_update_behind_together():
    before, _ = run(small(), DATA[:3])
    trainer = small(carry_over=2)
    state, _ = run(trainer, DATA[:4])
    assert int(state.step) == 3
    equal(state.params, before.params)
    equal(state.opt_state, before.opt_state)
    crossed, waiting = state.carried.reduced, state.carried.unreduced
    assert len(waiting) == 2
    # Each leaf once: in one bucket that waits, with an axis of replicas, or reduced.
    places = [len(jax.tree.leaves(tree)) for tree in (crossed, *waiting)]
    assert sum(places) == len(jax.tree.leaves(state.params))
    assert all(leaf.shape[0] == 8 for leaf in jax.tree.leaves(waiting))


def test_finish_leaves_the_state_usable():
    trainer = small(carry_over=2)
    state, _ = run(trainer, DATA[:3])
    looked_at = trainer.finish(state)
    assert trainer.finish(looked_at) is looked_at
    through = [trainer.train_step(s, DATA[3]) for s in (state, looked_at)]
    equal(*(trainer.finish(s).params for s, _ in through))


def test_no_sync_steps_finish_the_last_step_first():
    expected = None
    for count in (0, 2):
        trainer = small(carry_over=count)
        state = trainer.init(mlp_params())
        for batch, sync in zip(DATA, [True, False, False, True, True, False], strict=True):
            step = trainer.train_step if sync else trainer.no_sync_step
            state, _ = step(state, batch)
        state = trainer.finish(state)
        assert state.unreduced.count.tolist() == [1] * 8
        expected = state if expected is None else expected
        equal(state, expected)


def test_statistics_dropout_and_a_key_go_on_as_they_do_without():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))
                x = nn.Dropout(0.5, deterministic=False)(x)
            return nn.Dense(1)(x)

    model = Model()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    made = model.init(keys, jnp.ones((4, 8)))

    def loss(params, batch, *, model_state, rng):
        variables = {"params": params, "batch_stats": model_state}
        out, new = model.apply(
            variables, batch["x"], rngs={"dropout": rng}, mutable=["batch_stats"]
        )
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    rows = np.random.default_rng(0).standard_normal((4, 32, 9)).astype(np.float32)
    data = [{"x": x[:, :8], "y": x[:, 8:]} for x in rows]
    found = []
    for count in (0, 3):
        trainer = small(loss=loss, has_model_state=True, has_rng=True, carry_over=count)
        init = {"model_state": made["batch_stats"], "rng": jax.random.key(2)}
        state, losses = run(trainer, data, made["params"], **init)
        state = trainer.finish(state)
        found.append((losses, state.params, state.model_state))
    equal(*(jax.tree.map(np.asarray, x) for x in found))


def test_a_checkpoint_with_what_is_carried_goes_on():
    trainer = small(carry_over=2)
    state, _ = run(trainer, DATA[:3])
    leaves, structure = jax.tree.flatten(state)
    saved = [np.asarray(leaf) for leaf in leaves]
    state, _ = trainer.train_step(state, DATA[3])
    restored = jax.tree.unflatten(structure, saved)
    restored, _ = trainer.train_step(restored, DATA[3])
    equal(trainer.finish(restored), trainer.finish(state))


def test_replicas_are_checked_without_what_is_each_ones_own():
    state, _ = run(small(carry_over=2), DATA[:2])
    fdp.check_replicas(state)


def test_one_replica_carries_nothing():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    state, _ = run(small(mesh=mesh, carry_over=2), DATA[:2])
    assert state.carried is None
    assert int(state.step) == 2


def test_explain_names_them():
    trainer = small(carry_over=2)
    text = trainer.explain(trainer.init(mlp_params()), DATA[0])
    (line,) = [x for x in text.splitlines() if "carried over" in x]
    plan = trainer.plan(trainer.init(mlp_params()), DATA[0])
    named = [", ".join(bucket.paths) for bucket in carry.choose(plan, 2)]
    assert line == f"2 buckets carried over to the next step, in this order: {'; '.join(named)}"


def test_explain_says_so_where_there_is_nothing_to_carry():
    trainer = small(carry_over=2, bucket_bytes=2**20, first_bucket_bytes=2**20)
    text = trainer.explain(trainer.init(mlp_params()), DATA[0])
    (line,) = [x for x in text.splitlines() if "carr" in x]
    assert line == (
        "carry_over=2 carries nothing: outside of loops there is one bucket at most, and it crosses at once. The "
        "update waits for the next step all the same: use smaller buckets, or carry_over=0"
    )


@given(st.integers(1, 40), st.integers(0, 50))
def test_what_is_carried_is_spread_over_all_but_the_first_to_be_ready(buckets, count):
    params = {f"{i:02}": jax.ShapeDtypeStruct((4,), jnp.float32) for i in range(buckets)}
    plan = fdp.plan_buckets(params, bucket_bytes=1, first_bucket_bytes=1)
    chosen = carry.choose(plan, count)
    places = [plan.buckets.index(bucket) for bucket in chosen]
    assert len(places) == min(count, buckets - 1)
    assert 0 not in places
    assert places == sorted(
        set(places), reverse=True
    )  # the forward pass needs the last ready first
    gaps = [a - b for a, b in itertools.pairwise([buckets, *places])]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


WIDTH, LAYERS = 64, 12


def deep_loss(params, batch):
    x = batch["x"]
    for layer in params:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


@functools.cache
def steady(count):
    """The lowered step that follows another, and its plan."""
    params = [{"w": (WIDTH, WIDTH), "b": (WIDTH,)}] * LAYERS
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    cap = WIDTH * (WIDTH + 1) * 4
    trainer = small(
        optax.sgd(0.1),
        deep_loss,
        mesh=mesh,
        bucket_bytes=cap,
        first_bucket_bytes=cap,
        carry_over=count,
    )
    shape = jax.ShapeDtypeStruct((160, WIDTH), jnp.float32)
    batch = {"x": shape, "y": shape}
    state = trainer.init(params)
    plan = trainer.plan(state, batch)
    state, _ = jax.eval_shape(trainer.train_step, state, batch)
    return trainer.lower(state, batch), plan


def test_every_bucket_is_one_reduction_those_carried_over_first():
    lowered, plan = steady(3)
    sizes = [c.nbytes for c in fdp.inspect.collectives(fdp.inspect.load(lowered.compile()))]
    carried = carry.choose(plan, 3)
    others = [bucket for bucket in plan.buckets if bucket not in carried]
    assert len(carried) == 3
    assert sizes == [*(b.nbytes for b in carried), 4, *(b.nbytes for b in others)]


def test_the_forward_pass_waits_for_no_more_than_it_reads():
    """Matmuls in front of a carried layer do not wait for its reduction, neither by data nor through memory."""
    program = operations(steady(3)[0])
    matmuls = [name for name, op in program.items() if op.kind == "dot" or "ynn" in name]
    reductions = [name for name, op in program.items() if op.kind == "all-reduce"][:3]
    waits = waits_through_memory(program)
    assert not [name for name in matmuls if waits[name] & set(reductions)]
    data = by_data(program)
    ahead = [sum(not data[name] & {reduction} for name in matmuls) for reduction in reductions]
    # Of a forward pass of 12 matmuls, those before layers 3, 7 and 10 can run while these are on the wire.
    assert ahead == [3, 7, 10]


def by_data(program):
    @functools.cache
    def before(name):
        direct = program[name].data & program.keys()
        return direct.union(*(before(other) for other in direct))

    return {name: before(name) for name in program}
