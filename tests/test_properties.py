"""Random parameter trees: what holds for every plan, every packing and every reduction."""

import dataclasses
import itertools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fdp
from fdp import pack, schedules
from fdp.plan import plan_buckets

DTYPES = [np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64)]
SHAPES = [(), (0,), (1,), (3,), (2, 3), (0, 4), (5, 1, 2), (17,)]
SCHEDULES = [schedules.ordered(), schedules.ordered(2), schedules.serialized(), schedules.fused()]


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    kernel: Any
    rest: Any
    name: str = dataclasses.field(metadata={"static": True}, default="block")


def tree_of(leaves: list[Any], chance: random.Random) -> Any:
    """A tree that holds ``leaves``, in containers that ``chance`` picks."""
    if len(leaves) == 1:
        return leaves[0]
    kind = chance.choice(["dict", "list", "tuple", "pair", "block"])
    parts = 2 if kind in ("pair", "block") else chance.randint(2, min(len(leaves), 12))
    cuts = sorted(chance.sample(range(1, len(leaves)), parts - 1))
    children = [
        tree_of(leaves[start:stop], chance)
        for start, stop in itertools.pairwise([0, *cuts, len(leaves)])
    ]
    if kind == "dict":
        if chance.random() < 0.2:
            children.append(None)
        return {f"layer_{i}": child for i, child in enumerate(children)}
    return {"list": list, "tuple": tuple, "pair": lambda c: Pair(*c), "block": lambda c: Block(*c)}[
        kind
    ](children)


@st.composite
def trees(draw, max_leaves=300, shapes=SHAPES, dtypes=DTYPES):
    """A tree of ShapeDtypeStructs. The container structure comes from a seed, so that 300 leaves are drawn fast."""
    count = draw(st.integers(1, max_leaves) | st.integers(1, min(8, max_leaves)))
    chance = random.Random(draw(st.integers(0, 2**32)))
    mixed = draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=4, unique=True))
    leaves = [
        jax.ShapeDtypeStruct(chance.choice(shapes), chance.choice(mixed)) for _ in range(count)
    ]
    return tree_of(leaves, chance)


CAPS = st.integers(1, 40) | st.sampled_from([64, 200, 1000, 2**20])


@st.composite
def plan_arguments(draw, **kwargs):
    params = draw(trees(**kwargs))
    count = len(jax.tree.leaves(params))
    chance = random.Random(draw(st.integers(0, 2**32)))
    options = {"bucket_bytes": draw(CAPS), "first_bucket_bytes": draw(CAPS)}
    if draw(st.booleans()):
        options["order"] = chance.sample(range(count), count)
    if draw(st.booleans()):
        options["trainable"] = jax.tree.map(lambda _: chance.random() < 0.7, params)
    return params, options


def values(tree, seed, replicas=None):
    """NumPy arrays for the leaves of ``tree``, with a leading replica axis if asked."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        shape = leaf.shape if replicas is None else (replicas, *leaf.shape)
        x = rng.normal(size=shape)
        if leaf.dtype.kind == "c":
            x = x + 1j * rng.normal(size=shape)
        return np.asarray(x).astype(leaf.dtype)

    return jax.tree.map(one, tree)


@given(plan_arguments())
def test_every_planned_leaf_is_in_exactly_one_bucket_of_its_dtype(arguments):
    params, options = arguments
    plan = plan_buckets(params, **options)
    leaves = jax.tree.leaves(params)
    flags = jax.tree.leaves(options.get("trainable", [True] * len(leaves)))
    held = [i for bucket in plan.buckets for i in bucket.leaf_indices]
    assert sorted(held) == [i for i, flag in enumerate(flags) if flag]
    assert list(plan.excluded) == [i for i, flag in enumerate(flags) if not flag]
    for bucket in plan.buckets:
        assert bucket.shapes == tuple(leaves[i].shape for i in bucket.leaf_indices)
        assert {leaves[i].dtype for i in bucket.leaf_indices} == {bucket.dtype}
        assert bucket.paths == tuple(plan.leaves[i].path for i in bucket.leaf_indices)
        assert bucket.nbytes == sum(
            leaves[i].size * leaves[i].dtype.itemsize for i in bucket.leaf_indices
        )
    assert plan.nbytes == sum(b.nbytes for b in plan.buckets)
    str(plan)


@given(plan_arguments())
def test_caps_hold_and_buckets_are_full(arguments):
    params, options = arguments
    plan = plan_buckets(params, **options)
    order = list(options.get("order", range(len(plan.leaves) - 1, -1, -1)))
    place = {index: position for position, index in enumerate(order)}
    cap, first_cap = (
        options["bucket_bytes"],
        min(options["first_bucket_bytes"], options["bucket_bytes"]),
    )
    planned = [i for i in order if plan.leaves[i].planned]
    for bucket in plan.buckets:
        limit = first_cap if planned[0] in bucket.leaf_indices else cap
        assert bucket.nbytes <= limit or len(bucket.leaf_indices) == 1
        # Ready order inside a bucket, and of the buckets by their last leaf.
        positions = [place[i] for i in bucket.leaf_indices]
        assert positions == sorted(positions)
    lasts = [place[b.leaf_indices[-1]] for b in plan.buckets]
    assert lasts == sorted(lasts)
    # P61: a bucket closes only for a leaf that did not fit. A leaf that fills the cap or exceeds it travels alone.
    for dtype in {b.dtype for b in plan.buckets}:
        ordinary = sorted(
            (
                b
                for b in plan.buckets
                if b.dtype == dtype and (b.nbytes < cap or len(b.leaf_indices) > 1)
            ),
            key=lambda b: place[b.leaf_indices[0]],
        )
        for bucket, following in itertools.pairwise(ordinary):
            if planned[0] not in bucket.leaf_indices:
                assert bucket.nbytes + plan.leaves[following.leaf_indices[0]].nbytes > cap


@given(plan_arguments(max_leaves=60))
def test_plans_are_deterministic_and_hashable(arguments):
    params, options = arguments
    plan, again = plan_buckets(params, **options), plan_buckets(params, **options)
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan.fingerprint() == again.fingerprint()
    concrete = plan_buckets(values(params, 0), **options)
    assert concrete == plan


@given(trees(max_leaves=6), plan_arguments(max_leaves=6), CAPS, st.integers(0, 2**32))
def test_fingerprints_are_equal_exactly_when_the_reductions_are(other, arguments, cap, seed):
    params, options = arguments
    plan = plan_buckets(params, **options)
    order = random.Random(seed).sample(range(len(plan.leaves)), len(plan.leaves))
    others = [
        plan_buckets(params, **{**options, "bucket_bytes": cap}),
        plan_buckets(params, **{**options, "order": order}),
        plan_buckets(params, **{**options, "trainable": None}),
        plan_buckets(other),
    ]
    for another in others:
        same = (plan.buckets, plan.leaves) == (another.buckets, another.leaves)
        assert (plan.fingerprint() == another.fingerprint()) == same


@settings(max_examples=12)
@given(plan_arguments(max_leaves=120), st.integers(0, 99))
def test_packings_round_trip_exactly(arguments, seed):
    params, options = arguments
    plan = plan_buckets(params, **options)
    leaves = jax.tree.leaves(values(params, seed))
    for packing in (pack.flat(), pack.leaves()):
        for bucket in plan.buckets[:6]:
            given_leaves = [jnp.asarray(leaves[i]) for i in bucket.leaf_indices]
            buffers = packing.pack(bucket, given_leaves)
            assert {x.dtype for x in buffers} == {bucket.dtype}
            for x, y in zip(given_leaves, packing.unpack(bucket, buffers), strict=True):
                assert (x.shape, x.dtype) == (y.shape, y.dtype)
                assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


TOLERANCE = {"float32": 1e-6, "complex64": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}


@settings(max_examples=15)
@given(
    plan_arguments(max_leaves=24),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([pack.flat(), pack.leaves()]),
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_reduction_equals_a_double_precision_oracle(
    arguments, op, packing, schedule, replicas, seed
):
    params, options = arguments
    plan = plan_buckets(params, **options)
    grads = values(params, seed, replicas)

    def replica(grads):
        return fdp.reduce_gradients(
            grads, "data", plan=plan, op=op, pack=packing, schedule=schedule
        )

    got = jax.jit(jax.vmap(replica, axis_name="data"))(grads)
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    for spec, x, y in zip(plan.leaves, jax.tree.leaves(grads), jax.tree.leaves(got), strict=True):
        y = np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not spec.planned:
            assert x.tobytes() == y.tobytes()
            continue
        wide = x.astype(np.complex128)
        want = wide.mean(0) if op == "mean" else wide.sum(0)
        tolerance = TOLERANCE[spec.dtype.name] * np.abs(wide).sum(0)
        assert (np.abs(y.astype(np.complex128) - want) <= tolerance).all()
        assert all(y[r].tobytes() == y[0].tobytes() for r in range(replicas))


def test_the_trees_reach_what_they_are_meant_to_reach():
    """Guards the strategy itself: large, mixed, with scalars, empty leaves and all containers."""
    chance = random.Random(0)
    tree = tree_of(
        [jax.ShapeDtypeStruct(chance.choice(SHAPES), chance.choice(DTYPES)) for _ in range(300)],
        chance,
    )
    leaves, treedef = jax.tree.flatten(tree)
    assert len(leaves) == 300
    assert {leaf.dtype for leaf in leaves} == set(DTYPES)
    assert {leaf.shape for leaf in leaves} == set(SHAPES)
    for name in ("Pair", "Block", "{'layer_0'", "[", "("):
        assert name in str(treedef)
    with pytest.raises(ValueError, match="empty tree"):
        plan_buckets({"only": None})
