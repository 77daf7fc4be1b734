"""Leaves that a step does not use: found in the trace, not sent, averaged over those who did, left alone on request."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fdp
from fdp.probe import with_use
from tests.models import assert_replicas_bit_equal
from tests.stateful_hook import error_feedback

# Momentum, moments, weight decay, and a counter for all: everything that moves a parameter without a gradient.
OPTIMIZER = optax.chain(optax.trace(0.9), optax.adamw(1e-2, weight_decay=0.1))
PARAMS = {
    "left": jnp.full((2, 3), 0.5),
    "never": {"w": jnp.ones(300), "stopped": jnp.ones(5)},
    "right": jnp.full((2, 3), -0.25),
    "shared": jnp.linspace(0.5, 1.5, 2),
}
NAMES = ["left", "never/stopped", "never/w", "right", "shared"]  # in jax.tree.leaves order
LEFT, RIGHT = 0, 3


def loss_fn(params, batch):
    """Each replica looks at its first example only to choose a side, so a batch is 8 x 2 examples of one side each."""
    hidden = batch["x"] * params["shared"] + 0.0 * jnp.sum(
        lax.stop_gradient(params["never"]["stopped"])
    )
    out = lax.cond(
        batch["go_left"][0] > 0, lambda: hidden @ params["left"], lambda: hidden @ params["right"]
    )
    return jnp.mean((out - batch["y"]) ** 2)


def make_batch(sides, seed=0):
    """``sides``: of each microbatch of two examples, 1 for left."""
    rng = np.random.default_rng(seed)
    count = 2 * len(sides)
    return {
        "x": rng.normal(size=(count, 2)).astype(np.float32),
        "y": rng.normal(size=(count, 3)).astype(np.float32),
        "go_left": np.repeat(np.asarray(sides, np.float32), 2),
    }


@functools.cache
def trainer_of(via="shard_map", microbatches=1, unused="zero", mean_over="all"):
    return fdp.data_parallel(
        loss_fn,
        OPTIMIZER,
        via=via,
        num_microbatches=microbatches,
        unused=unused,
        mean_over=mean_over,
        pack=fdp.pack.flat(),
    )


def gradients(params, *windows):
    """One gradient for each window, replica and microbatch: (grads stacked [microbatches, ...], side of each)."""
    chunks = [jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), batch) for batch in windows]
    grads = [jax.vmap(jax.grad(loss_fn), (None, 0))(params, chunk) for chunk in chunks]
    return [(jax.device_get(g), c["go_left"][:, 0] > 0) for g, c in zip(grads, chunks, strict=True)]


def oracle(params, opt_state, windows, *, microbatches, mean_over, unused):
    """The step in plain NumPy and optax: windows add up, microbatches are averaged, replicas as ``mean_over`` says."""
    local, used = 0, {}
    for grads, left in gradients(params, *windows):
        split = jax.tree.map(
            lambda g: g.reshape(8, microbatches, *g.shape[1:]).astype(np.float64), grads
        )
        mine = jax.tree.map(lambda g: g.mean(1), split)
        local = mine if local == 0 else jax.tree.map(np.add, local, mine)
        sides = left.reshape(8, microbatches)
        used["left"] = used.get("left", False) | sides.any(1)
        used["right"] = used.get("right", False) | (~sides).any(1)
    divide_by = {"left": 8, "right": 8, "shared": 8, "never": 8}
    if mean_over == "users":
        divide_by |= {name: max(int(users.sum()), 1) for name, users in used.items()}
    mean = {
        name: jax.tree.map(
            lambda g, n=divide_by[name]: jnp.asarray(g.sum(0) / n, jnp.float32), tree
        )
        for name, tree in local.items()
    }
    updates, new_opt_state = OPTIMIZER.update(mean, opt_state, params)
    new = optax.apply_updates(params, updates)
    if unused == "zero":
        return new, new_opt_state
    untouched = [name for name, users in used.items() if not users.any()] + ["never"]

    def keep(path, n, o):
        names = {getattr(key, "key", None) for key in path}
        return o if names & set(untouched) else n

    return tuple(
        jax.tree_util.tree_map_with_path(keep, n, o)
        for n, o in ((new, params), (new_opt_state, opt_state))
    )


SOME = [1, 0, 0, 1, 1, 0, 1, 1]
NOBODY_LEFT = [0] * 8


@pytest.mark.parametrize(
    ("via", "microbatches", "unused", "mean_over"),
    [
        ("shard_map", 1, "zero", "all"),
        ("shard_map", 1, "skip", "all"),
        ("shard_map", 2, "skip", "users"),
        ("pmap", 1, "zero", "users"),
        ("pmap", 2, "skip", "all"),
    ],
)
def test_p2_partly_used_leaves_equal_the_oracle(via, microbatches, unused, mean_over):
    trainer = trainer_of(via, microbatches, unused, mean_over)
    state = trainer.init(PARAMS)
    params, opt_state = PARAMS, OPTIMIZER.init(PARAMS)
    asked = unused == "skip" or mean_over == "users"
    steps = [SOME * microbatches, NOBODY_LEFT * microbatches, [1] * 8 * microbatches]
    for seed, sides in enumerate(steps):
        batch = make_batch(sides, seed)
        before = jax.device_get(state)
        params, opt_state = oracle(
            params,
            opt_state,
            [batch],
            microbatches=microbatches,
            mean_over=mean_over,
            unused=unused,
        )
        state, info = trainer.train_step(state, batch)
        for got, want in zip(
            jax.tree.leaves((state.params, state.opt_state)),
            jax.tree.leaves((params, opt_state)),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)
        if asked:
            assert info.used.tolist() == [1 in sides, False, False, 0 in sides, True]
        else:
            assert info.used is None
        if unused == "skip":  # bit for bit, optimizer state included
            moments = [
                (s.params, s.opt_state[0].trace, s.opt_state[1][0].mu, s.opt_state[1][0].nu)
                for s in (before, state)
            ]
            for old, new in zip(*moments, strict=True):
                for name in ["never"] + (["left"] if 1 not in sides else []):
                    jax.tree.map(np.testing.assert_array_equal, old[name], new[name])
            assert int(state.opt_state[1][0].count) == seed + 1  # shared by all: goes on
    assert_replicas_bit_equal((state.params, state.opt_state))


@pytest.mark.parametrize(("via", "mean_over"), [("shard_map", "users"), ("pmap", "all")])
def test_use_anywhere_in_a_window_is_use(via, mean_over):
    trainer = trainer_of(via, 2 if via == "shard_map" else 1, "skip", mean_over)
    repeat = 2 if via == "shard_map" else 1
    windows = [
        make_batch(sides * repeat, seed)
        for seed, sides in enumerate([NOBODY_LEFT, SOME, NOBODY_LEFT])
    ]
    state = trainer.init(PARAMS)
    state, _ = trainer.no_sync_step(state, windows[0])
    assert state.unreduced.use.tolist() == [[0, 0, 0, 1, 1]] * 8
    # What is zero by the program is not even held back.
    assert state.unreduced.grads["never"] == {"w": None, "stopped": None}
    state, _ = trainer.no_sync_step(state, windows[1])
    state, info = trainer.train_step(state, windows[2])
    assert info.used.tolist() == [True, False, False, True, True]
    expected = oracle(
        PARAMS,
        OPTIMIZER.init(PARAMS),
        windows,
        microbatches=repeat,
        mean_over=mean_over,
        unused="skip",
    )
    for got, want in zip(
        jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)


def test_p1_p7_static_leaves_are_named_and_cost_nothing():
    trainer = trainer_of()
    state = trainer.init(PARAMS)
    batch = make_batch(SOME)
    plan = trainer.plan(state, batch)
    assert sorted(path for bucket in plan.buckets for path in bucket.paths) == [
        "left",
        "right",
        "shared",
    ]
    assert plan.nbytes == 4 * (6 + 6 + 2)
    assert (
        "2 leaves unused by the loss, gradient zero, not reduced: never/stopped, never/w"
        in trainer.explain(state, batch)
    )
    text = trainer.lower(state, batch).as_text()
    assert text.count("stablehlo.all_reduce") == len(plan.buckets) + 1
    # In a window too.
    state, _ = trainer.no_sync_step(state, batch)
    assert trainer.plan(state, batch).nbytes == plan.nbytes


def test_asking_adds_one_number_a_leaf_to_the_small_reduction():
    trainer = trainer_of(unused="skip")
    state = trainer.init(PARAMS)
    batch = make_batch(SOME)
    text = trainer.lower(state, batch).as_text()
    assert text.count("stablehlo.all_reduce") == len(trainer.plan(state, batch).buckets) + 1
    assert "(tensor<6xf32>) -> tensor<6xf32>" in text  # the loss and five leaves


def test_a_plan_made_without_a_leaf_is_refused_where_the_leaf_is_used():
    trainer = trainer_of()
    state = trainer.init(PARAMS)
    plan = trainer.plan(state, make_batch(SOME))
    other = fdp.data_parallel(
        lambda p, b: jnp.sum(p["never"]["w"]) * jnp.mean(b["x"]), OPTIMIZER, plan=plan
    )
    with pytest.raises(
        ValueError, match="without 'never/w': it was made for a loss that does not use it"
    ):
        other.train_step(state, make_batch(SOME))


def test_a_loop_does_not_send_what_it_does_not_use():
    """Layers of a scan, of which one parameter is never used; large enough to be reduced inside the loop."""
    rng = np.random.default_rng(0)
    params = {
        "idle": np.ones((2, 256, 256), "f"),
        "w": rng.normal(size=(2, 256, 256)).astype("f") / 16,
    }
    batch = rng.normal(size=(8, 256)).astype(np.float32)

    def loss(params, x):
        def layer(h, one):
            return jnp.tanh(h @ one["w"]) + lax.stop_gradient(one["idle"][0]), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    states = []
    for in_loops in (True, False):
        trainer = fdp.data_parallel(loss, optax.sgd(1.0), in_loops=in_loops, pack=fdp.pack.flat())
        state = trainer.init(params)
        text = trainer.explain(state, batch)
        assert "1 leaves unused by the loss, gradient zero, not reduced: idle" in text
        assert ("w: in loop 0" in text) == in_loops
        assert "idle: " not in text
        assert trainer.plan(state, batch).nbytes == 4 * 2 * 256 * 256
        states.append(trainer.train_step(state, batch)[0].params)
    # atol: w less its gradient cancels, so what is left carries the rounding of both.
    np.testing.assert_allclose(states[0]["w"], states[1]["w"], rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(states[0]["idle"], params["idle"])


def test_a_hook_with_state_sends_everything_it_was_made_for():
    trainer = fdp.data_parallel(
        loss_fn, OPTIMIZER, hook=error_feedback(2**20), unused="skip", bucket_bytes=1
    )
    state = trainer.init(PARAMS)
    batch = make_batch(NOBODY_LEFT)
    assert len(trainer.plan(state, batch).buckets) == len(state.hook_state) == 5
    assert "unused" not in trainer.explain(state, batch)
    state, info = trainer.train_step(state, batch)
    assert info.used.tolist() == [False, False, False, True, True]
    expected = oracle(
        PARAMS, OPTIMIZER.init(PARAMS), [batch], microbatches=1, mean_over="all", unused="skip"
    )
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_everything_unused():
    trainer = fdp.data_parallel(
        lambda params, x: jnp.mean(x), optax.sgd(0.1, momentum=0.9), unused="skip"
    )
    state = trainer.init({"w": jnp.ones(3)})
    state, info = trainer.train_step(state, np.arange(8, dtype=np.float32))
    assert float(info.loss) == 3.5
    assert info.used.tolist() == [False]
    np.testing.assert_array_equal(state.params["w"], np.ones(3))


# What the probe sees. Three leaves; the answer is which of them were used.
ABC = (jnp.float32(2), jnp.float32(3), jnp.float32(5))


def scanned(abc, x):
    def body(carry, flag):
        return lax.cond(flag > 0, lambda c: c * abc[0], lambda c: c + abc[1], carry), None

    return lax.scan(body, x, jnp.stack([x, x]))[0]


@jax.custom_vjp
def own_rule(a, b, x):
    return lax.cond(x > 0, lambda: a * x, lambda: b * x)


own_rule.defvjp(lambda a, b, x: (own_rule(a, b, x), (a, b, x)), lambda res, g: (g, g, g))

PROBED = {
    "straight": (lambda abc, x: abc[0] * x, [True, False, False], [True, False, False]),
    "a branch": (
        lambda abc, x: lax.cond(x > 0, lambda: abc[0] * x, lambda: abc[1] + abc[2]),
        [True, False, False],
        [False, True, True],
    ),
    "in jit": (
        lambda abc, x: jax.jit(lambda a, b: lax.cond(x > 0, lambda: a, lambda: b))(abc[0], abc[1]),
        [True, False, False],
        [False, True, False],
    ),
    "nested": (
        lambda abc, x: lax.cond(
            x > 0, lambda: abc[0], lambda: lax.cond(x < -5, lambda: abc[1], lambda: abc[2])
        ),
        [True, False, False],
        [False, False, True],
    ),
    "switch": (
        lambda abc, x: lax.switch(jnp.int32(x) + 1, [lambda i=i: abc[i] * x for i in range(3)]),
        [False, False, True],
        [True, False, False],
    ),
    "in a scan": (scanned, [True, False, False], [False, True, False]),
    "in remat": (
        lambda abc, x: jax.checkpoint(lambda a, b: lax.cond(x > 0, lambda: a * x, lambda: b * x))(
            *abc[:2]
        ),
        [True, False, False],
        [False, True, False],
    ),
    "no gradient through comparisons": (
        lambda abc, x: abc[0] * (abc[1] > 0) + lax.stop_gradient(abc[2]),
        [True, False, False],
        [True, False, False],
    ),
    # A zero by its numbers is no absence: any(gradient != 0) would call both of these unused.
    "a dead relu": (
        lambda abc, x: jax.nn.relu(-abc[0] * abs(x)),
        [True, False, False],
        [True, False, False],
    ),
    "a masked loss": (lambda abc, x: abc[0] * 0.0 * x, [True, False, False], [True, False, False]),
    # Not looked into: everything in there counts as used.
    "where": (
        lambda abc, x: jnp.where(x > 0, abc[0], abc[1]),
        [True, True, False],
        [True, True, False],
    ),
    "own derivative": (
        lambda abc, x: own_rule(abc[0], abc[1], x),
        [True, True, False],
        [True, True, False],
    ),
    "a loop of known length": (
        lambda abc, x: lax.fori_loop(
            0, 2, lambda i, c: lax.cond(x > 0, lambda: c * abc[0], lambda: c * abc[1]), x
        ),
        [True, False, False],
        [False, True, False],
    ),
}


@pytest.mark.parametrize("name", PROBED)
def test_the_probe_sees_which_branch_was_taken(name):
    fn, positive, negative = PROBED[name]

    def probed(abc, x):
        return jax.value_and_grad(lambda abc: with_use(fn, ())(abc, x), has_aux=True)(abc)

    for x, expected in ((jnp.float32(1.5), positive), (jnp.float32(-1.5), negative)):
        (value, mask), grads = jax.jit(probed)(ABC, x)
        want, want_grads = jax.value_and_grad(fn)(ABC, x)
        assert mask.tolist() == expected
        np.testing.assert_allclose(value, want, rtol=1e-6)
        np.testing.assert_allclose(grads, want_grads, rtol=1e-6)
        # Too much is allowed, too little is not.
        assert all(used or g == 0 for used, g in zip(expected, want_grads, strict=True))


def test_unknown_options():
    with pytest.raises(ValueError, match='expected unused to be "zero" or "skip", got \'keep\''):
        fdp.data_parallel(loss_fn, OPTIMIZER, unused="keep")
    with pytest.raises(ValueError, match='expected mean_over to be "all" or "users", got True'):
        fdp.data_parallel(loss_fn, OPTIMIZER, mean_over=True)
    with pytest.raises(ValueError, match='expected op="mean" with mean_over="users"'):
        fdp.data_parallel(loss_fn, OPTIMIZER, mean_over="users", op="sum")
