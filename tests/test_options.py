"""Compiler options: the table, what is chosen from it, and compilers that do not know all of it."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fdp
from fdp import options, schedules
from fdp.inspect import collectives
from fdp.options import suggested_bucket_bytes, suggested_compiler_options, usable_options

GPU_LIMIT = "xla_gpu_all_reduce_combine_threshold_bytes"
TPU_LIMIT = "xla_jf_crs_combiner_threshold_in_bytes"
TPU_COUNT = "xla_jf_crs_combiner_threshold_count"
TPU_ASYNC = {
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}
CPU_ORDER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
CPU_APART = {**CPU_ORDER, "xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
MIB = 2**20


def plan(*leaf_mib, bucket_mib):
    """Leaves of so many MiB."""
    leaves = [jax.ShapeDtypeStruct((mib * MIB // 4,), jnp.float32) for mib in leaf_mib]
    return fdp.plan_buckets(
        leaves, bucket_bytes=bucket_mib * MIB, first_bucket_bytes=bucket_mib * MIB
    )


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("cpu", CPU_ORDER), ("gpu", {}), ("cuda", {}), ("rocm", {}), ("tpu", TPU_ASYNC)],
)
@pytest.mark.parametrize(
    "schedule",
    [None, schedules.ordered(1), schedules.serialized()],
    ids=["default", "ordered", "serialized"],
)
def test_a_chain_needs_no_option_to_stay_apart(platform, expected, schedule):
    assert suggested_compiler_options(platform, schedule=schedule) == expected
    made = suggested_compiler_options(platform, plan(8, 8, 8, bucket_mib=8), schedule=schedule)
    assert made == expected


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("cpu", CPU_APART), ("gpu", {GPU_LIMIT: "0"}), ("tpu", {**TPU_ASYNC, TPU_LIMIT: "0"})],
)
@pytest.mark.parametrize("schedule", [schedules.unordered(), schedules.ordered(2)])
def test_independent_launches_are_not_joined(platform, expected, schedule):
    assert suggested_compiler_options(platform, schedule=schedule) == expected
    one_leaf_a_bucket = plan(8, 8, 8, bucket_mib=8)
    assert suggested_compiler_options(platform, one_leaf_a_bucket, schedule=schedule) == expected


def test_independent_launches_of_several_buffers_are_joined_up_to_the_largest():
    given = {"schedule": schedules.unordered(), "pack": fdp.pack.leaves()}
    buckets = plan(8, 4, 4, 2, bucket_mib=12)
    assert [b.nbytes // MIB for b in buckets.buckets] == [10, 8]
    assert suggested_compiler_options("gpu", buckets, **given) == {GPU_LIMIT: str(10 * MIB)}
    assert suggested_compiler_options("tpu", buckets, **given) == {
        **TPU_ASYNC,
        TPU_LIMIT: str(10 * MIB),
    }
    assert suggested_compiler_options("cpu", buckets, **given) == CPU_APART
    # Flat packing makes one buffer of each bucket, whatever the size: nothing to join.
    flat = {"schedule": schedules.unordered(), "pack": fdp.pack.flat()}
    assert suggested_compiler_options("gpu", buckets, **flat) == {GPU_LIMIT: "0"}


def test_a_launch_of_several_buffers_is_joined_whole():
    leaves = {"pack": fdp.pack.leaves()}
    small, large, huge = (plan(size, size, bucket_mib=2 * size) for size in (8, 20, 70))
    assert suggested_compiler_options("gpu", small, **leaves) == {}
    assert suggested_compiler_options("gpu", large, **leaves) == {GPU_LIMIT: str(40 * MIB)}
    assert suggested_compiler_options("gpu", large) == {}
    assert suggested_compiler_options("tpu", large) == TPU_ASYNC
    assert suggested_compiler_options("tpu", huge) == {**TPU_ASYNC, TPU_LIMIT: str(140 * MIB)}
    fused = suggested_compiler_options(
        "tpu", plan(8, 70, 70, bucket_mib=70), schedule=schedules.fused()
    )
    assert fused == {**TPU_ASYNC, TPU_LIMIT: str(148 * MIB)}
    many = fdp.plan_buckets([jax.ShapeDtypeStruct((2048,), jnp.float32)] * 300)
    assert [len(b.paths) for b in many.buckets] == [128, 172]
    assert suggested_compiler_options("tpu", many) == TPU_ASYNC
    many = fdp.plan_buckets([jax.ShapeDtypeStruct((2048,), jnp.float32)] * 500)
    assert suggested_compiler_options("tpu", many) == {**TPU_ASYNC, TPU_COUNT: "372"}


@pytest.mark.parametrize("function", [suggested_compiler_options, suggested_bucket_bytes])
def test_an_unknown_platform_is_named(function):
    message = (
        "expected platform to be one of cpu, gpu, tpu, got 'Metal': pass jax.default_backend()"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        function("Metal")


def test_bucket_caps():
    assert suggested_bucket_bytes("tpu") == MIB
    assert suggested_bucket_bytes("cpu") == 8 * MIB
    assert suggested_bucket_bytes("gpu") == suggested_bucket_bytes("cuda") == 25 * MIB


def test_every_row_says_why_and_was_checked():
    assert len({(row.name, row.platform, row.when) for row in options.OPTIONS}) == len(
        options.OPTIONS
    )
    for row in options.OPTIONS:
        assert row.platform in options.PLATFORMS
        assert row.when in (options.ALWAYS, options.APART, options.TOGETHER)
        assert row.reason.endswith(".")
        assert row.checked
        assert row.name.startswith("xla_")


def reduce_unordered(mesh, buckets, pack, **jit):
    """The all-reduces of a step of eight leaves in ``buckets`` buckets."""
    leaves = [jax.ShapeDtypeStruct((8, 16), jnp.float32)] * 8
    local = [jax.ShapeDtypeStruct((16,), jnp.float32)] * 8
    cap = 64 * 8 // buckets
    the_plan = fdp.plan_buckets(local, bucket_bytes=cap, first_bucket_bytes=cap)
    assert len(the_plan.buckets) == buckets
    schedule = schedules.unordered()

    def reduce(grads):
        mine = [g[0] for g in grads]
        return fdp.reduce_gradients(mine, "data", plan=the_plan, schedule=schedule, pack=pack)

    step = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
    chosen = suggested_compiler_options("cpu", the_plan, schedule=schedule, pack=pack)
    for compiler_options in ({}, chosen):
        lowered = jax.jit(step, compiler_options=compiler_options, **jit).lower(leaves)
        yield collectives(lowered.compile())


@pytest.mark.parametrize("buckets", [2, 4, 8])
def test_on_cpu_unordered_buckets_stay_apart_with_the_options(buckets, mesh):
    without, with_options = reduce_unordered(mesh, buckets, fdp.pack.flat())
    assert len(without) == 1
    assert len(with_options) == buckets


def test_usable_options_drops_what_the_compiler_does_not_know():
    given = {
        "xla_future_a": "1",
        **CPU_APART,
        "xla_future_b": True,
        "xla_cpu_enable_fast_math": False,
    }
    message = (
        f"the {jax.__version__} compiler does not know xla_future_a, xla_future_b: left out. "
        "Reductions may overlap less; the numbers do not change."
    )
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        usable = usable_options(given)
    assert caught[0].filename == __file__
    assert usable == {**CPU_APART, "xla_cpu_enable_fast_math": False}
    doubled = jax.jit(lambda x: 2 * x, compiler_options=usable)(np.float32(2))
    assert doubled == 4


def test_usable_options_says_it_each_time_and_compiles_once():
    options._unknown.cache_clear()
    for _ in range(2):
        with pytest.warns(UserWarning, match="does not know xla_future_c"):
            assert usable_options({"xla_future_c": "1"}) == {}
    assert options._unknown.cache_info().misses == 1


def test_what_this_compiler_knows_passes_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert usable_options({}) == {}
        assert usable_options(CPU_APART, jax.devices("cpu")[3]) == CPU_APART
        # jaxlib knows the GPU's options on every platform.
        assert usable_options({GPU_LIMIT: "0"}) == {GPU_LIMIT: "0"}


def test_a_value_that_the_compiler_refuses_is_left_to_it():
    given = {"xla_cpu_enable_fast_math": "maybe"}
    assert usable_options(given) == given
    with pytest.raises(jax.errors.JaxRuntimeError, match="'maybe' is not a valid bool"):
        jax.jit(lambda x: x, compiler_options=given)(1.0)
    with pytest.warns(UserWarning, match="does not know xla_future_d: left out"):
        assert usable_options({**given, "xla_future_d": "1"}) == given


@pytest.mark.parametrize("wrong", [["xla_a"], "xla_a=1", {1: "true"}, 7])
def test_options_are_a_mapping(wrong):
    with pytest.raises(TypeError, match="expected compiler options as a mapping from XLA's names"):
        usable_options(wrong)


def test_a_step_inside_jit_and_scan_leaves_the_options_to_them():
    """JAX takes compiler options at the top only; on CPU a trainer has one."""
    assert suggested_compiler_options("cpu")
    batches = np.random.default_rng(0).normal(size=(3, 16, 4)).astype(np.float32)
    trainer = fdp.data_parallel(lambda w, x: jnp.mean((x @ w - 1) ** 2), optax.sgd(0.1))
    state = trainer.init(np.ones((4, 1), np.float32))
    scanned, info = jax.jit(lambda s, xs: jax.lax.scan(trainer.train_step, s, xs))(state, batches)
    losses = []
    for batch in batches:
        state, one = trainer.train_step(state, batch)
        losses.append(one.loss)
    np.testing.assert_allclose(info.loss, losses, rtol=1e-6)
    np.testing.assert_allclose(scanned.params, state.params, rtol=1e-6)
