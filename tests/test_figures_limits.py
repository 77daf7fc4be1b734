"""benchmarks.figures.limits against simulated wires, and benchmarks.figures.compare."""

import itertools
import math

import figure_results
import numpy as np
import pytest

from benchmarks.figures import compare, limits, runs
from benchmarks.figures.runs import FigureError


def simulated(ready, seconds_per_byte, order):
    """When the last byte arrives if whole gradients are sent in this order, each once it is ready."""
    free = 0.0
    for i in order:
        free = max(free, ready[i][0]) + ready[i][1] * seconds_per_byte
    return free


def simulated_fluid(ready, seconds_per_byte, tick):
    """A wire that sends something whenever something is ready, tick by tick."""
    waiting, now, left = sorted(ready), 0.0, 0.0
    while waiting or left > 1e-12:
        while waiting and waiting[0][0] <= now + 1e-12:
            left += waiting.pop(0)[1] * seconds_per_byte
        left = max(0.0, left - tick)
        now += tick
    return now


@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_sending_beats_the_limit_and_the_best_one_reaches_it(seed):
    rng = np.random.default_rng(seed)
    ready = [
        (float(s), int(b)) for s, b in zip(rng.uniform(0, 4, 6), rng.integers(1, 9, 6), strict=True)
    ]
    bound = limits.last_arrival(ready, 0.25)
    found = [simulated(ready, 0.25, order) for order in itertools.permutations(range(6))]
    assert min(found) == pytest.approx(bound)
    assert max(found) > bound


@pytest.mark.parametrize("seed", range(4))
def test_the_limit_is_that_of_a_wire_that_never_rests(seed):
    rng = np.random.default_rng(seed)
    tick = 1 / 1024
    ready = [
        (float(s) * tick, int(b))
        for s, b in zip(rng.integers(0, 4096, 20), rng.integers(1, 9, 20), strict=True)
    ]
    # 64 ticks a byte: every time is a whole number of ticks, so the simulation is exact.
    assert simulated_fluid(ready, 64 * tick, tick) == limits.last_arrival(ready, 64 * tick)


def test_what_follows_the_last_gradient_follows_the_last_byte():
    # 10 s on the wire after 1 s, or 5 s after 3 s: 11 s, and the 0.5 s of the optimizer.
    assert limits.step_boundary([(1.0, 5), (3.0, 5)], compute=3.5, seconds_per_byte=1.0) == 11.5
    assert limits.step_boundary([(1.0, 5), (9.0, 5)], compute=9.5, seconds_per_byte=1.0) == 14.5
    # A free wire leaves computing alone; a gradient that was seen after its step adds nothing.
    assert limits.step_boundary([(1.0, 5), (3.0, 5)], compute=3.5, seconds_per_byte=0.0) == 3.5
    assert limits.step_boundary([(4.0, 5)], compute=3.5, seconds_per_byte=1.0) == 9.0


def test_no_gradients_are_refused():
    with pytest.raises(FigureError, match="expected at least one gradient"):
        limits.last_arrival([], 1.0)


def test_hidden_is_one_at_the_longer_of_the_two_and_zero_one_after_the_other():
    assert limits.hidden(step=3.0, compute=3.0, wire=2.0) == 1.0
    assert limits.hidden(step=3.0, compute=2.0, wire=3.0) == 1.0
    assert limits.hidden(step=5.0, compute=3.0, wire=2.0) == 0.0
    assert limits.hidden(step=4.0, compute=3.0, wire=2.0) == 0.5
    assert limits.hidden(step=6.0, compute=3.0, wire=2.0) < 0


def test_limits_of_a_result():
    made = limits.add_to(figure_results.result({"torch:cap=1": 4.4, "fdp": 7.0, "fdp:none": 6.0}))
    assert made["limits"]["torch"] == {
        "compute_s": 3.0,
        "wire_s": 2.0,
        "step_boundary_s": 4.0,
        "overall_s": 3.0,
    }
    assert made["limits"]["jax"]["step_boundary_s"] == 7.0
    assert made["ways"]["torch:cap=1"]["over_limit"] == pytest.approx(1.1)
    assert made["ways"]["torch:cap=1"]["hidden"] == pytest.approx(0.3)
    assert made["ways"]["fdp"]["over_limit"] == 1.0
    assert made["ways"]["fdp:none"]["hidden"] is made["ways"]["fdp:none"]["over_limit"] is None


def test_ready_times_are_scaled_to_the_step_that_nobody_watches():
    made = figure_results.result({"torch:cap=1": 4.4})
    made["ready_alone_s"]["torch"] = {"unwatched": 3.0, "watched": 6.0}
    made["ready"] = {"torch": [[4.0, 200], [6.0, 200]]}
    assert limits.from_rank(made)["torch"]["step_boundary_s"] == 4.0


def test_a_trainer_that_computes_slowly_gets_no_easier_limit():
    made = figure_results.result({"fdp": 8.0, "fdp:none": 6.0, "jax:none": 5.0})
    found = limits.from_rank(made)["jax"]
    assert found["compute_s"] == 5.0
    # Ready after 4/6 and 6/6 of the step: 3.33 and 5 s, and a second on the wire after the last.
    assert found["step_boundary_s"] == pytest.approx(6.0)


def test_a_framework_that_has_its_gradients_late_gets_no_easier_limit():
    made = figure_results.result({"torch:cap=1": 4.4, "fdp": 7.5})
    made["ready"]["jax"] = [[5.9, 200], [6.0, 200]]  # both at the end, as XLA may have them
    found = limits.from_rank(made)
    # As in torch, the first half after 4 of 6 s; its own times would have allowed 7.9 s.
    assert found["jax"]["step_boundary_s"] == pytest.approx(7.0)
    assert found["torch"]["step_boundary_s"] == pytest.approx(4.0)


@pytest.mark.parametrize("missing", ["ready", "wire_s"])
def test_without_ready_times_or_rate_there_is_no_limit(missing):
    made = figure_results.result({"torch:cap=1": 4.4})
    made[missing] = None
    limits.add_to(made)
    assert made["limits"]["torch"]["step_boundary_s"] is None
    assert made["ways"]["torch:cap=1"]["over_limit"] is None
    assert (made["limits"]["torch"]["overall_s"] is None) == (missing == "wire_s")


def test_wire_seconds():
    # A rank of two sends all its bytes once, one of many nearly twice; 1514 bytes carry 1448.
    assert runs.wire_seconds(1448, 8 * 1514, 2) == pytest.approx(1.0)
    assert runs.wire_seconds(1448, 8 * 1514, 8) == pytest.approx(1.75)
    assert runs.wire_seconds(1448, 8 * 1514, 1) == 0.0


def test_ways_are_separated_by_more_than_their_own_halves():
    a = figure_results.way("jax", [[1.0, 1.0], [1.1, 1.1], [1.0, 1.0], [1.1, 1.1]])
    assert math.isclose(compare.repeatability(a), 0.1)
    near, far = figure_results.steady("jax", 1.15), figure_results.steady("jax", 1.4)
    assert compare.faster(a, near) is None
    assert compare.faster(a, far) is True
    assert compare.faster(far, a) is False
    once = figure_results.way("jax", [[1.0, 1.0]])
    assert compare.repeatability(once) is None
    assert compare.faster(once, far) is None


@pytest.mark.parametrize(
    ("seconds", "inside", "said"),
    [
        ((3.0, 2.0, 2.5, 3.0), True, "b is best, and both ends are worse"),
        ((3.0, 2.5, 2.2, 2.0), False, "the best is at an end: d"),
        ((2.0005, 2.0, 2.5, 3.0), None, "b is best, not separated from a"),
        ((2.0, 2.0005, 2.5, 3.0), None, "a is best, not separated from b"),
    ],
)
def test_where_the_optimum_is(seconds, inside, said):
    ways = {n: figure_results.steady("jax", s) for n, s in zip("abcd", seconds, strict=True)}
    found = compare.optimum(ways, list("abcd"))
    assert found["inside"] is inside
    assert found["said"] == said
