"""Which leaf goes into which bucket, and what a plan is: data."""

import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdp.match import flatten_like_plan
from fdp.plan import BucketPlan, make_bucket, plan_buckets

KIB = 1024


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def paths(plan: BucketPlan) -> list[tuple[str, ...]]:
    return [bucket.paths for bucket in plan.buckets]


def test_the_drawing_in_the_module():
    params = {name: f32(1) for name in "abcde"}
    plan = plan_buckets(params, bucket_bytes=8, first_bucket_bytes=4)
    assert paths(plan) == [("e",), ("d", "c"), ("b", "a")]
    assert [bucket.nbytes for bucket in plan.buckets] == [4, 8, 8]
    assert plan.nbytes == 20


def test_defaults_are_25_mib_and_a_first_bucket_of_1_mib():
    plan = plan_buckets([f32(256, KIB)] * 60)  # 1 MiB each
    assert [len(bucket.paths) for bucket in plan.buckets] == [1, 25, 25, 9]
    assert (plan.bucket_bytes, plan.first_bucket_bytes) == (25 * 2**20, 2**20)


def test_order_is_reverse_tree_order_or_a_permutation():
    params = [f32(1)] * 4
    assert plan_buckets(params).buckets[0].leaf_indices == (3, 2, 1, 0)
    for order in ([2, 0, 3, 1], (2, 0, 3, 1), np.array([2, 0, 3, 1]), jnp.array([2, 0, 3, 1])):
        assert plan_buckets(params, order=order).buckets[0].leaf_indices == (2, 0, 3, 1)
        each = plan_buckets(params, order=order, bucket_bytes=1)
        assert [b.leaf_indices for b in each.buckets] == [(2,), (0,), (3,), (1,)]


def test_the_cap_is_met_but_never_exceeded_where_torch_overshoots():
    # torch closes a bucket after adding: with this cap it makes buckets of 526,336 bytes.
    cap = KIB * KIB // 2
    params = [f32(512, 256), f32(512)] * 3  # 524,288 and 2,048 bytes
    plan = plan_buckets(params, bucket_bytes=cap, first_bucket_bytes=cap)
    # The small leaves share a bucket, which is launched where its last one is ready.
    assert [bucket.nbytes for bucket in plan.buckets] == [cap, cap, 3 * 2048, cap]
    assert plan_buckets([f32(1)] * 2, bucket_bytes=8, first_bucket_bytes=8).buckets[0].nbytes == 8
    assert len(plan_buckets([f32(1)] * 2, bucket_bytes=7, first_bucket_bytes=7).buckets) == 2


def test_a_leaf_over_the_cap_is_alone_and_leaves_the_open_bucket_open():
    params = [f32(1), f32(100), f32(1), f32(100), f32(1)]
    plan = plan_buckets(params, bucket_bytes=12, first_bucket_bytes=12)
    assert [b.leaf_indices for b in plan.buckets] == [(3,), (1,), (4, 2, 0)]


def test_only_the_bucket_opened_first_is_small():
    params = [f32(1)] * 5
    plan = plan_buckets(params, bucket_bytes=8, first_bucket_bytes=4)
    assert [len(b.paths) for b in plan.buckets] == [1, 2, 2]
    # The other dtype's first bucket is not small: communication has started by then.
    mixed = plan_buckets([bf16(1)] * 4 + [f32(1)] * 3, bucket_bytes=8, first_bucket_bytes=4)
    assert [(b.dtype.name, len(b.paths)) for b in mixed.buckets] == [
        ("float32", 1),
        ("float32", 2),
        ("bfloat16", 4),
    ]


def test_a_first_cap_above_the_cap_counts_as_the_cap():
    plan = plan_buckets([f32(1)] * 4, bucket_bytes=8, first_bucket_bytes=2**30)
    assert [len(b.paths) for b in plan.buckets] == [2, 2]
    assert plan.first_bucket_bytes == 8


def test_a_cap_of_one_byte_gives_every_leaf_its_own_bucket():
    plan = plan_buckets({"a": f32(3), "b": f32(), "c": f32(2)}, bucket_bytes=1)
    assert paths(plan) == [("c",), ("b",), ("a",)]


def test_p37_mixed_precision_has_one_dtype_a_bucket():
    params = [f32(2), bf16(2), f32(2), bf16(2), jax.ShapeDtypeStruct((2,), jnp.complex64)]
    plan = plan_buckets(params)
    found = {b.dtype.name: b.leaf_indices for b in plan.buckets}
    assert found == {"complex64": (4,), "bfloat16": (3, 1), "float32": (2, 0)}
    assert all(plan.leaves[i].dtype == b.dtype for b in plan.buckets for i in b.leaf_indices)


def test_buckets_are_launched_in_the_order_their_last_leaf_comes_up():
    # The bfloat16 bucket is opened first but complete last; launching it first would hold all others up.
    params = [bf16(1), f32(1), f32(1), bf16(1)]
    plan = plan_buckets(params, bucket_bytes=8, first_bucket_bytes=8)
    assert [b.leaf_indices for b in plan.buckets] == [(2, 1), (3, 0)]


def test_unhidden_leaves_keep_no_other_bucket_waiting():
    """Six leaves of 400 bytes, a cap of four, a first cap of one; "b" and "a" are born when all else is done."""
    params = {name: jax.ShapeDtypeStruct((100,), jnp.float32) for name in "abcdef"}
    caps = {"bucket_bytes": 1600, "first_bucket_bytes": 400}
    plain = plan_buckets(params, **caps)
    assert [b.paths for b in plain.buckets] == [("f",), ("e", "d", "c", "b"), ("a",)]
    plan = plan_buckets(params, unhidden=(0, 1), **caps)
    assert [b.paths for b in plan.buckets] == [("f",), ("e", "d", "c"), ("b", "a")]
    # A bucket smaller than the first one may be is not worth a launch of its own.
    few = plan_buckets(params, unhidden=(0, 1), bucket_bytes=4000, first_bucket_bytes=2000)
    assert [b.paths for b in few.buckets] == [("f", "e", "d", "c", "b"), ("a",)]
    # Unhidden in front of the order (torch's first guess may be wrong): the next ones join.
    plan = plan_buckets(params, unhidden=(5,), bucket_bytes=1600, first_bucket_bytes=1600)
    assert [b.paths for b in plan.buckets] == [("f", "e", "d", "c"), ("b", "a")]


def test_p35_zero_size_leaves_are_kept_with_their_shape():
    params = {"a": f32(0, 3), "b": f32(2), "c": bf16(4, 0)}
    plan = plan_buckets(params)
    assert sorted(path for bucket in paths(plan) for path in bucket) == ["a", "b", "c"]
    (bucket,) = (b for b in plan.buckets if b.dtype == jnp.float32)
    assert dict(zip(bucket.paths, bucket.shapes, strict=True)) == {"a": (0, 3), "b": (2,)}
    assert (bucket.sizes, bucket.nbytes) == ((2, 0), 8)


def test_none_leaves_pass_through():
    plan = plan_buckets({"a": f32(2), "bias": None})
    assert paths(plan) == [("a",)]
    assert plan == plan_buckets({"a": f32(2), "bias": None})
    assert plan != plan_buckets({"a": f32(2)})


class Layer(NamedTuple):
    kernel: Any
    bias: Any


def test_paths_are_written_as_people_write_them():
    plan = plan_buckets({"layers": [Layer(f32(2), f32(1))]})
    assert paths(plan) == [("layers/0/bias", "layers/0/kernel")]
    assert paths(plan_buckets(f32(2))) == [("<root>",)]


def test_p50_the_trainable_filter_belongs_to_the_plan():
    params = {"body": {"w": f32(4), "b": f32(1)}, "head": f32(2)}
    by_path = plan_buckets(params, trainable=lambda path, leaf: path.startswith("head"))
    by_tree = plan_buckets(params, trainable={"body": {"w": False, "b": False}, "head": True})
    assert by_path == by_tree
    assert (paths(by_path), by_path.nbytes) == ([("head",)], 8)
    assert by_path.excluded == (0, 1)
    by_leaf = plan_buckets(params, trainable=lambda path, leaf: leaf.shape == (4,))
    assert paths(by_leaf) == [("body/w",)]
    assert (
        len({by_path.fingerprint(), by_leaf.fingerprint(), plan_buckets(params).fingerprint()}) == 3
    )


def test_p40_integers_keys_and_other_things_are_fine_once_left_out():
    params = {
        "count": jnp.zeros((), jnp.int32),
        "key": jax.random.key(0),
        "name": "resnet",
        "w": jnp.zeros(2),
    }
    plan = plan_buckets(params, trainable=lambda path, leaf: path == "w")
    assert paths(plan) == [("w",)]
    assert plan.excluded == (0, 1, 2)
    assert flatten_like_plan(plan, params)[2] == "resnet"


def test_a_tree_of_flags_may_itself_be_callable():
    class Module(NamedTuple):
        w: Any
        b: Any

        def __call__(self, x):
            raise AssertionError("a tree of flags, not a predicate")

    plan = plan_buckets(Module(f32(1), f32(1)), trainable=Module(True, False))
    assert paths(plan) == [("w",)]
    assert paths(plan_buckets(f32(1), trainable=lambda path, leaf: True)) == [("<root>",)]


def test_all_frozen_is_a_plan_without_buckets():
    plan = plan_buckets({"a": f32(2)}, trainable={"a": False})
    assert (plan.buckets, plan.nbytes, plan.excluded) == ((), 0, (0,))
    assert "0 buckets, 0 leaves, 0 bytes" in str(plan)


def test_a_plan_is_frozen_hashable_data_without_arrays():
    concrete = {"a": jnp.ones((2, 3)), "b": np.ones(4, np.float32)}
    plan = plan_buckets(concrete)
    abstract = plan_buckets({"a": f32(2, 3), "b": f32(4)})
    assert plan == abstract
    assert {plan: 1}[abstract] == 1
    with pytest.raises(AttributeError):
        plan.buckets = ()
    # Static under jit: equal plans do not trace again.
    traces = []

    def traced(x, plan):
        traces.append(plan)
        return x

    static = jax.jit(traced, static_argnums=1)
    static(1.0, plan)
    static(1.0, abstract)
    assert len(traces) == 1


def test_numpy_float64_is_planned_as_jax_will_hold_it():
    plan = plan_buckets({"w": np.ones(3)})
    assert plan.buckets[0].dtype == jnp.float32
    assert plan == plan_buckets({"w": jnp.ones(3)})
    assert flatten_like_plan(plan, {"w": np.ones(3)})[0].shape == (3,)


def test_numpy_integers_in_a_shape_do_not_change_the_fingerprint():
    odd = plan_buckets(jax.ShapeDtypeStruct((np.int64(3),), jnp.float32))
    assert odd.fingerprint() == plan_buckets(f32(3)).fingerprint()


DESCRIBE = """
import jax, jax.numpy as jnp
from fdp.plan import plan_buckets
dtypes = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64]
params = {f"layer_{i}": {"w": jax.ShapeDtypeStruct((i, 3), dtypes[i % 4]), "b": jnp.zeros(i)} for i in range(40)}
plan = plan_buckets(params, bucket_bytes=300, first_bucket_bytes=100)
described = plan.fingerprint() + "\\n" + str(plan)
"""


def test_two_processes_make_the_same_plan():
    here: dict[str, Any] = {}
    exec(DESCRIBE, here)
    # Another hash seed: an order that comes from a set of strings or dtypes would show.
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run(
        [sys.executable, "-c", DESCRIBE + "print(described)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here["described"].strip()


def test_fingerprint_sees_what_is_reduced_and_nothing_else():
    params = {"a": f32(2), "b": f32(2)}
    base = plan_buckets(params).fingerprint()
    assert len(base) == 64
    # Another cap that leads to the same buckets is no difference.
    assert plan_buckets(params, bucket_bytes=64).fingerprint() == base
    others = [
        plan_buckets({"a": f32(2), "c": f32(2)}),
        plan_buckets({"a": f32(2), "b": f32(2, 1)}),
        plan_buckets({"a": f32(2), "b": bf16(2)}),
        plan_buckets(params, bucket_bytes=1),
        plan_buckets(params, order=[0, 1]),
        plan_buckets(params, trainable={"a": True, "b": False}),
    ]
    assert len({base, *(plan.fingerprint() for plan in others)}) == 7


def test_a_plan_prints_as_a_table():
    params = {"dense": {"kernel": f32(300, 2), "bias": f32(2)}, "scale": bf16(1), "ema": f32(7)}
    plan = plan_buckets(params, bucket_bytes=2**20, trainable=lambda path, leaf: path != "ema")
    assert str(plan).splitlines() == [
        "bucket  leaves  bytes  dtype     first path    last path",
        "     0       1      2  bfloat16  scale         scale",
        "     1       2  2,408  float32   dense/kernel  dense/bias",
        "2 buckets, 3 leaves, 2,410 bytes; cap 1,048,576, first bucket 1,048,576; 1 leaves excluded",
    ]


def test_left_out_leaves_may_be_anything_when_gradients_come():
    plan = plan_buckets({"a": f32(2), "b": f32(3)}, trainable={"a": True, "b": False})
    grad = np.ones(2, np.float32)
    for other in (None, optax.MaskedNode(), {"c": 1}, np.ones(99), "text"):
        leaves = flatten_like_plan(plan, {"a": grad, "b": other})
        assert leaves[0] is grad
        assert leaves[1] is other


def test_paths_that_print_alike_are_told_apart():
    # Flax and haiku use "/" inside names: both leaves below print as "a/b".
    params = {"a": {"b": f32(2)}, "a/b": f32(2), "c": f32(1)}
    plan = plan_buckets(params, trainable={"a": {"b": True}, "a/b": True, "c": False})
    first, second = np.zeros(2, np.float32), np.ones(2, np.float32)
    leaves = flatten_like_plan(plan, {"a": {"b": first}, "a/b": second, "c": None})
    assert leaves[0] is first
    assert leaves[1] is second


def test_make_bucket_is_what_the_planner_makes():
    plan = plan_buckets({"a": f32(2), "b": f32(3, 2)})
    assert make_bucket(plan.leaves, (1, 0)) == plan.buckets[0]
