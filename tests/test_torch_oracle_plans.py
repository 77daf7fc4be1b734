"""fdp's buckets against torch's, as ``oracle_torch/recorded.json`` has them."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import fdp
from tests.torch_recorded import (
    RECORDED,
    coefficients,
    departs,
    leaves_loss,
    recorded,
    three,
    trainer,
)

MIB = 2**20


def leaves(name):
    shapes, dtypes = RECORDED["models"][name]
    return [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in zip(shapes, dtypes, strict=True)]


CAPS = {
    "default": (25 * MIB, MIB),
    "half": (MIB // 2,) * 2,
    "two leaves": (32768,) * 2,
    "zero": (1, 1),
}


def groups(plan):
    return [list(bucket.leaf_indices) for bucket in plan.buckets]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def planned(case):
    """torch's record of "model/cap", and the plan with the same caps."""
    model, cap = case.split("/")
    bucket_bytes, first = CAPS[cap]
    plan = fdp.plan_buckets(leaves(model), bucket_bytes=bucket_bytes, first_bucket_bytes=first)
    return recorded("buckets")[0][case], plan


@pytest.mark.parametrize(
    "case",
    [
        "six layers/zero",
        "equal leaves/default",
        "equal leaves/half",
        "equal leaves/two leaves",
        "equal leaves/zero",
        "one large/zero",
        "mixed/zero",
    ],
)
def test_the_same_buckets_where_none_overshoots(case):
    torchs, plan = planned(case)
    assert groups(plan) == torchs["rebuilt_indices"]
    assert [bucket.nbytes for bucket in plan.buckets] == torchs["rebuilt"]


OVERSHOOT = ["six layers/default", "six layers/half", "six layers/two leaves", "one large/half"]


@departs("a-cap-holds")
@pytest.mark.parametrize("case", [*OVERSHOOT, "one large/two leaves"])
def test_a_cap_holds(case):
    torchs, plan = planned(case)
    cap, first = CAPS[case.split("/")[1]]
    # torch closes a bucket once it has reached the cap: all but the last of a type are over it.
    assert torchs["rebuilt"][0] > first
    for k, bucket in enumerate(plan.buckets):
        assert bucket.nbytes <= (cap if k else first) or len(bucket.leaf_indices) == 1
        assert list(bucket.leaf_indices) == sorted(bucket.leaf_indices, reverse=True)
    assert sorted(flat(groups(plan))) == sorted(flat(torchs["rebuilt_indices"]))


@departs("the-first-cap-is-an-argument")
def test_the_first_cap_is_an_argument():
    """torch's first bucket is 1 MiB by default and, where a cap is given, as large as the others."""
    torchs = recorded("buckets")[0]
    assert torchs["six layers/default"]["rebuilt"] == [MIB + 4096, 526336]
    assert torchs["six layers/half"]["rebuilt"] == [526336] * 3
    plan = fdp.plan_buckets(leaves("six layers"), bucket_bytes=MIB // 2, first_bucket_bytes=2**16)
    assert groups(plan)[0] == [11]
    assert max(bucket.nbytes for bucket in plan.buckets[1:]) <= MIB // 2


@departs("what-nothing-hides-goes-alone")
def test_what_nothing_hides_goes_alone():
    """torch's last bucket has the first layer's kernel beside others; fdp's has that alone."""
    torchs = recorded("buckets")[0]["six layers/default"]["rebuilt_indices"][-1]
    assert 0 in torchs
    assert len(torchs) > 1
    params = [jnp.zeros(x.shape) for x in leaves("six layers")]

    def loss(params, x):
        for w, b in zip(params[::2], params[1::2], strict=True):
            x = jnp.tanh(x @ w + b)
        return x.mean()

    the = trainer(2, loss, optax.sgd(0.1), bucket_bytes=25 * MIB, first_bucket_bytes=MIB // 2)
    plan = the.plan(the.init(params), jnp.zeros((4, params[0].shape[0])))
    assert groups(plan)[-1] == [0]
    assert sorted(flat(groups(plan))) == list(range(12))


@departs("no-first-iteration")
def test_no_first_iteration():
    """torch reduces everything in one bucket in its first iteration, then rebuilds; a plan is there before."""
    torchs = recorded("buckets")[0]["six layers/half"]
    assert torchs["initial"] == [sum(torchs["rebuilt"])]
    params = [jnp.zeros(x.shape) for x in leaves("six layers")]

    def loss(params, x):
        for w, b in zip(params[::2], params[1::2], strict=True):
            x = jnp.tanh(x @ w + b)
        return x.mean()

    the = trainer(2, loss, optax.sgd(0.1), bucket_bytes=MIB // 2, first_bucket_bytes=MIB // 2)
    state, batch = the.init(params), jnp.ones((2, 256))
    before = the.plan(state, batch)
    assert len(before.buckets) > 1
    # The order in which this loss makes its gradients, last layer first; torch needs a step to see it.
    assert [i // 2 for i in flat(groups(before))] == [i // 2 for i in range(11, -1, -1)]
    state, _ = the.train_step(state, batch)
    assert the.plan(state, batch) == before


@departs("unused-parameters-do-not-change-the-plan")
def test_unused_parameters_do_not_change_the_plan():
    """With find_unused_parameters torch keeps its first buckets: the small one, of the first layers, stands last."""
    torchs = recorded("buckets")[0]["six layers/find_unused"]
    assert (torchs["initial"], torchs["rebuilt"]) == ([527360, 1051648], [])
    assert torchs["initial"][0] < MIB < torchs["initial"][-1]

    def plan(**options):
        the = trainer(2, leaves_loss, optax.sgd(0.1), bucket_bytes=16, **options)
        return the.plan(the.init(three()), coefficients(2, [True, True]))

    assert groups(plan(unused="skip")) == groups(plan())
    assert len(plan().buckets) == 2


@departs("buckets-go-in-the-order-they-fill")
def test_buckets_go_in_the_order_they_fill():
    """Ready in the order 5, 4, 3, 2, 1, 0, (5, 3) is full first. torch's order of types is that of a hash table."""
    torchs, plan = planned("mixed/default")
    assert torchs["rebuilt_indices"] == [[2, 0], [4, 1], [5, 3]]
    assert groups(plan) == [[5, 3], [4, 1], [2, 0]]
