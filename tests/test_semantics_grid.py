"""Every option of the step together with every other, against an oracle of one device in plain JAX and float64.

accumulation x window x unused x mean_over x weighted x model state x via, and packing x schedule. The fast suite runs a
seeded cover in which every two values of two options meet; the slow one every combination, through which the pairs of
packing and schedule rotate.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import fdp

SCHEDULES = {
    "ordered": fdp.schedules.ordered(),
    "window": fdp.schedules.ordered(window=2),
    "serialized": fdp.schedules.serialized(),
    "fused": fdp.schedules.fused(),
    "unordered": fdp.schedules.unordered(),
}
PACKINGS = {"flat": fdp.pack.flat(), "leaves": fdp.pack.leaves()}


class Options(NamedTuple):
    """One point of the grid."""

    microbatches: int
    held_back: int  # steps before the one that reduces
    unused: str
    mean_over: str
    weighted: bool
    has_state: bool
    via: str
    pack: str
    schedule: str
    replicas: int = 8


LEVELS = {
    "microbatches": (1, 2),
    "held_back": (0, 1),
    "unused": ("zero", "skip"),
    "mean_over": ("all", "users"),
    "weighted": (False, True),
    "has_state": (False, True),
    "via": ("shard_map", "pmap"),
    "pack": tuple(PACKINGS),
    "schedule": tuple(SCHEDULES),
    "replicas": (8, 2),
}

# Clipping and decay, so that the norm of what was reduced and the absence of a gradient both show; momentum is state.
# Norms are 1.6 to 7: one of two updates is clipped and the other shows the size of its gradient.
CLIP = 2.9
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(CLIP), optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)
)
PARAMS = {
    "left": np.linspace(-1, 1, 6).reshape(2, 3),
    "never": np.ones(3),
    "right": np.linspace(1, -0.5, 6).reshape(2, 3),
    "shared": np.asarray([0.5, 1.5]),
}
STATE = {"count": np.int32(0), "largest": np.zeros(2), "mean": np.zeros(2), "mine": np.zeros(2)}
POLICY = {"count": "first", "largest": "max", "mean": "mean", "mine": "local"}
EXAMPLES = 32


def make_batch(seed, sides):
    """32 examples; ``sides``: for each of 16 pairs, which branch. One replica in eight has weight zero."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(1, 4, EXAMPLES) / 2
    mask[4:8] = 0
    return {
        "x": rng.normal(size=(EXAMPLES, 2)),
        "y": rng.normal(size=(EXAMPLES, 3)),
        "mask": mask,
        "left": np.repeat(np.asarray(sides, float), 2),
    }


MIXED = [1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0]
UPDATES = ((MIXED, MIXED[::-1]), ([0] * 16, [0] * 16))  # by nobody in the second update


def loss_parts(params, batch, state):
    """(loss sum, weight, state). State changes the loss, so that a wrong state is a wrong gradient."""
    bias = (
        0.0
        if state is None
        else 0.1 * state["mean"] + 0.05 * state["mine"] + 0.02 * state["largest"]
    )
    hidden = batch["x"] * params["shared"] + bias
    out = lax.cond(
        batch["left"][0] > 0, lambda: hidden @ params["left"], lambda: hidden @ params["right"]
    )
    mask, x = batch["mask"], batch["x"]
    if state is not None:
        state = {
            "count": state["count"] + 1,
            "largest": jnp.maximum(state["largest"], jnp.max(jnp.abs(x), 0)),
            "mean": 0.5 * state["mean"] + 0.5 * mask @ x / jnp.maximum(jnp.sum(mask), 1),
            "mine": 0.5 * state["mine"] + jnp.mean(x, 0),
        }
    return jnp.sum(mask[:, None] * (out - batch["y"]) ** 2), jnp.sum(mask), state


def loss_fn(options):
    def loss(params, batch, model_state=None):
        total, weight, state = loss_parts(params, batch, model_state)
        parts = (total, weight) if options.weighted else (total / len(batch["mask"]),)
        parts += (state,) if options.has_state else ()
        return parts if len(parts) > 1 else parts[0]

    return loss


@functools.cache
def trainer_of(options):
    return fdp.data_parallel(
        loss_fn(options),
        OPTIMIZER,
        mesh=Mesh(np.array(jax.devices()[: options.replicas]), ("data",)),
        via=options.via,
        num_microbatches=options.microbatches,
        unused=options.unused,
        mean_over=options.mean_over,
        weighted=options.weighted,
        has_model_state=options.has_state,
        model_state_policy=POLICY if options.has_state else None,
        pack=PACKINGS[options.pack],
        schedule=SCHEDULES[options.schedule],
        bucket_bytes=32,
    )


def float32(tree):
    return jax.tree.map(
        lambda x: np.asarray(x, np.int32 if np.asarray(x).dtype.kind == "i" else np.float32), tree
    )


def trained(options, updates=UPDATES):
    """(params, momentum, model state in one piece, what was reported) after the updates."""
    trainer = trainer_of(options)
    init = {"model_state": float32(STATE)} if options.has_state else {}
    state, reports = trainer.init(float32(PARAMS), **init), []
    for update, sides in enumerate(updates):
        for held in range(options.held_back):
            state, _ = trainer.no_sync_step(
                state, float32(make_batch(10 * update + held, sides[held]))
            )
        state, info = trainer.train_step(state, float32(make_batch(10 * update + 5, sides[1])))
        reports.append((info.loss, info.weight, info.used))
    model_state = fdp.consistent_model_state(state) if options.has_state else None
    return state.params, state.opt_state[2][0].trace, model_state, reports


@functools.cache
def slice_gradient(weighted):
    def value(params, batch, state):
        total, weight, state = loss_parts(params, batch, state)
        return (total if weighted else total / len(batch["mask"])), (weight, state)

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def one_device(options, updates=UPDATES):
    """What ``trained`` should give: every slice of every replica, one after the other, and the definitions in NumPy."""
    count, micro, size = (
        options.replicas,
        options.microbatches,
        EXAMPLES // options.replicas // options.microbatches,
    )
    params, moments = PARAMS, jax.tree.map(np.zeros_like, PARAMS)
    shared, mine, reports = STATE, [STATE["mine"]] * count, []
    for update, sides in enumerate(updates):
        grads, weights, states = [], np.zeros(count), []
        use = {name: np.zeros(count) for name in PARAMS}
        last_loss, last_weight = np.zeros(count), np.zeros(count)
        window = [make_batch(10 * update + held, sides[held]) for held in range(options.held_back)]
        window.append(make_batch(10 * update + 5, sides[1]))
        for replica in range(count):
            state = {**shared, "mine": mine[replica]} if options.has_state else None
            total = jax.tree.map(np.zeros_like, PARAMS)
            for batch in window:
                last_loss[replica] = last_weight[replica] = 0
                for m in range(micro):
                    start = (replica * micro + m) * size
                    part = {name: x[start : start + size] for name, x in batch.items()}
                    (loss, (weight, state)), g = slice_gradient(options.weighted)(
                        params, part, state
                    )
                    share = 1 if options.weighted else 1 / micro
                    total = jax.tree.map(lambda t, x, s=share: t + s * np.asarray(x), total, g)
                    last_loss[replica] += share * float(loss)
                    last_weight[replica] += float(weight)
                    weights[replica] += float(weight)
                    for name in ("shared", "left" if part["left"][0] > 0 else "right"):
                        add = float(weight) if options.weighted else 1
                        use[name][replica] += add
            grads.append(total)
            states.append(jax.device_get(state))
        if not options.weighted:
            use = {name: np.minimum(x, 1) for name, x in use.items()}
        everyone = weights.sum() if options.weighted else count
        by = {n: (use[n].sum() or 1) if options.mean_over == "users" else everyone for n in PARAMS}
        mean = {name: sum(g[name] for g in grads) / by[name] for name in PARAMS}
        norm = np.sqrt(sum((g**2).sum() for g in mean.values()))
        step = {n: g * min(1, CLIP / norm) + 0.1 * params[n] for n, g in mean.items()}
        skipped = [n for n in PARAMS if options.unused == "skip" and not use[n].sum()]
        moments = {n: moments[n] if n in skipped else step[n] + 0.9 * moments[n] for n in PARAMS}
        params = {n: p if n in skipped else p - 0.1 * moments[n] for n, p in params.items()}
        if options.has_state:
            each = weights if options.weighted else np.ones(count)
            seen = np.flatnonzero(each)  # no other replica has a say, or changes its own
            mine = [s["mine"] if e else m for s, e, m in zip(states, each, mine, strict=True)]
            shared = {
                "count": states[seen[0]]["count"],
                "largest": np.max([states[i]["largest"] for i in seen], 0),
                "mean": np.average([state["mean"] for state in states], 0, each),
            }
        if options.weighted:
            reports.append((last_loss.sum() / last_weight.sum(), last_weight.sum()))
        else:
            reports.append((last_loss.mean(), None))
        reports[-1] += ([bool(use[n].sum()) for n in PARAMS],)
    state = {**shared, "mine": np.mean(mine, 0)} if options.has_state else None
    return params, moments, state, reports


def assert_same(got, want, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=rtol, atol=2e-6)


def check(options):
    params, moments, state, reports = trained(options)
    with jax.enable_x64(True):
        want_params, want_moments, want_state, want_reports = one_device(options)
    assert_same(params, want_params)
    assert_same(moments, want_moments)
    assert_same(state, want_state)
    for (loss, weight, used), (want_loss, want_weight, want_used) in zip(
        reports, want_reports, strict=True
    ):
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        assert (None if weight is None else float(weight)) == want_weight
        if options.unused == "skip" or options.mean_over == "users":
            assert used.tolist() == want_used
        else:
            assert used is None


def pairs(options):
    return set(itertools.combinations(enumerate(options), 2))


@functools.cache
def cover():
    """Options in which every two values of two levels meet: greedily, the best of some random candidates."""
    dice = random.Random(0)
    wanted = set()
    for (i, first), (j, second) in itertools.combinations(enumerate(LEVELS.values()), 2):
        wanted |= {((i, a), (j, b)) for a in first for b in second}
    chosen = []
    while wanted:
        candidates = [Options(*map(dice.choice, LEVELS.values())) for _ in range(300)]
        best = max(candidates, key=lambda options: len(pairs(options) & wanted))
        wanted -= pairs(best)
        chosen.append(best)
    return chosen


def everything():
    """Every combination of what a step means; packing, schedule and number of replicas take turns."""
    names = ["microbatches", "held_back", "unused", "mean_over", "weighted", "has_state", "via"]
    wires = itertools.cycle(itertools.product(LEVELS["pack"], LEVELS["schedule"]))
    counts = itertools.cycle((8, 2, 4))
    for point in itertools.product(*(LEVELS[name] for name in names)):
        yield Options(*point, *next(wires), next(counts))


def name_of(options):
    return "-".join(map(str, options))


@pytest.mark.parametrize("options", cover(), ids=name_of)
def test_a_cover_of_the_grid_equals_one_device(options):
    check(options)


@pytest.mark.slow
@pytest.mark.parametrize("options", list(everything()), ids=name_of)
def test_the_grid_equals_one_device(options):
    check(options)


# All replicas of a step take one branch, so that nothing depends on how examples are dealt out.
TOGETHER = (([1] * 16, [1] * 16), ([0] * 16, [0] * 16))


def invariant(options):
    """Without ``mine``, which is each replica's own, and with what every number of replicas divides alike."""
    params, moments, _, reports = trained(options, TOGETHER)
    return params, moments, [(float(loss), weight) for loss, weight, _ in reports]


@functools.cache
def expected_on_one(options):
    with jax.enable_x64(True):
        params, moments, _, reports = one_device(options._replace(replicas=1), TOGETHER)
    return params, moments, [report[:2] for report in reports]


INVARIANT = [
    Options(1, 0, "zero", "all", False, False, "shard_map", "flat", "ordered"),
    Options(2, 1, "skip", "users", True, False, "pmap", "leaves", "unordered"),
]
ALL_INVARIANT = [
    o._replace(schedule=s)
    for o, s in zip(
        (Options(*point, False, "shard_map", "flat", "") for point in itertools.product(
            *(LEVELS[name] for name in list(LEVELS)[:5])
        )),
        itertools.cycle(SCHEDULES),
        strict=False,
    )
]  # fmt: skip


def check_invariance(options, replicas):
    got = invariant(options._replace(replicas=replicas))
    assert_same(got, expected_on_one(options))


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("options", INVARIANT, ids=name_of)
def test_any_number_of_replicas_gives_the_same(options, replicas):
    check_invariance(options, replicas)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("options", ALL_INVARIANT, ids=name_of)
def test_any_number_of_replicas_gives_the_same_for_every_option(options, replicas):
    check_invariance(options, replicas)


def test_the_cover_covers():
    met = set().union(*map(pairs, cover()))
    for (i, first), (j, second) in itertools.combinations(enumerate(LEVELS.values()), 2):
        assert {((i, a), (j, b)) for a in first for b in second} <= met
    assert len(cover()) <= 16
