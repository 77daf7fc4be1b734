"""Ready times, windows of iterations and emulated compute, on one rank. No PyTorch needed."""

import json
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import emulate, rank, ready, timing, ways
from benchmarks.pairs import make_pair
from benchmarks.ways import Setting

TINY = "mlp:widths=8-16-16-4"
RATE = 0.5
MADE = 4  # layers of 8 x 8
TIMES = {
    "model": "mlp:widths=" + "-".join(["8"] * (MADE + 1)),
    "torch": {"forward": 1.0, "backward": 1.0},
    "jax": {"forward": 0.08, "backward": 0.14},
}


def setting_of(pair, devices):
    return Setting(pair, Mesh(np.array(jax.devices()[:devices]), (ways.AXIS,)), RATE)


def asleep():
    return emulate.asleep(make_pair("mlp:widths=8x5"), TIMES)


def moved(way, pair, batch):
    """What one step takes away from the parameters, over the learning rate."""
    params, model_state = pair.init()
    state, loss = way.step(way.init(params, model_state), way.place(batch))
    way.wait(state, loss)
    after = way.params(state)
    return {name: (x - after[name]) / RATE for name, x in pair.named(params).items()}


# --- emulated compute ---


def test_layers_share_the_seconds_by_their_multiplications():
    found = emulate.shares(make_pair("mlp:widths=10-20-10"), 1.0, 3.0)
    np.testing.assert_allclose(found.forward, [0.5, 0.5])
    np.testing.assert_allclose(
        found.backward, [1.0, 2.0]
    )  # the first needs no gradient of its input


def test_a_step_takes_as_long_as_its_layers_sleep(monkeypatch):
    pair = asleep()
    way = ways.build(ways.parse("fdp:none"), setting_of(pair, 1))
    state, batch = way.init(*pair.init()), way.place(pair.batch(4, 1))
    state, loss = way.step(state, batch)
    way.wait(state, loss)
    slept = []
    real = time.sleep
    monkeypatch.setattr(emulate.time, "sleep", lambda s: (slept.append(s), real(s)))
    start = time.perf_counter()
    state, loss = way.step(state, batch)
    way.wait(state, loss)
    took = time.perf_counter() - start
    due = emulate.shares(make_pair("mlp:widths=8x5"), **TIMES["jax"])
    assert slept == [*due.forward, *reversed(due.backward)]  # each once, and in this order
    assert sum(slept) == pytest.approx(0.22)
    assert sum(slept) <= took < sum(slept) + 1  # what the rest takes, on a busy machine


def test_every_gradient_is_the_square_of_the_number_that_went_through():
    pair = asleep()
    batch = pair.batch(4, 1)
    number = np.mean(np.square(batch["x"][:, 0]))
    found = moved(ways.build(ways.parse("fdp:none"), setting_of(pair, 1)), pair, batch)
    assert {name: x.shape for name, x in found.items()} == {
        f"layers.{i}.{name}": shape
        for i in range(MADE)
        for name, shape in (("weight", (8, 8)), ("bias", (8,)))
    }
    for x in found.values():
        np.testing.assert_allclose(x, number**2, rtol=1e-5)


@pytest.mark.parametrize("text", ["fdp:ordered,cap=0.0003", "jax:pmean"])
def test_what_sleeps_is_reduced_all_the_same(text):
    pair = asleep()
    batch = pair.batch(8, 1)
    of_replicas = np.square(np.square(batch["x"][:, 0]).reshape(2, 4).mean(1))
    assert abs(of_replicas[0] - of_replicas[1]) > 0.1
    way = ways.build(ways.parse(text), setting_of(pair, 2))
    for x in moved(way, pair, batch).values():
        np.testing.assert_allclose(x, of_replicas.mean(), rtol=1e-5)


def test_a_gradient_has_memory_of_its_own():
    # A broadcast would be made inside the packing of a bucket, see benchmarks.emulate.
    pair = asleep()
    text = jax.jit(jax.grad(pair.loss_fn)).lower(pair.init()[0], pair.batch(4, 1)).compile()
    assert text.as_text().count(" dot(") >= MADE


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TINY, "expected times of 'mlp:widths=8-16-16-4', got those of 'mlp:widths=8-8-8-8-8'"),
        ("digits", "expected times of 'digits'"),
    ],
)
def test_times_of_another_model_are_refused(model, message):
    with pytest.raises(ValueError, match="measure them anew") as raised:
        emulate.asleep(make_pair(model), TIMES)
    assert message in str(raised.value)


def test_only_an_mlp_can_sleep(capsys, tmp_path):
    assert emulate.main(["--model", "digits", "--out", str(tmp_path / "x.json")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "expected an MLP to emulate, got 'digits'" in line


def test_times_are_read_and_checked(tmp_path, capsys):
    path = tmp_path / "times.json"
    for wrong in ("", "[]", '{"model": "mlp"}', json.dumps(TIMES | {"jax": {"forward": 1}})):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"a file that python -m benchmarks\.emulate has"):
            emulate.read_times(path)
    path.write_text(json.dumps(TIMES))
    assert emulate.read_times(path) == TIMES
    missing = str(tmp_path / "none.json")
    assert rank.main(["--ways", "fdp", "--emulate-compute", missing]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "none.json" in line


# --- ready times ---


def test_gradients_are_watched_and_not_changed():
    pair = make_pair(TINY)
    params, batch = pair.init()[0], pair.batch(8, 1)
    watch = ready.Watch()
    seen = jax.jit(jax.value_and_grad(ready.watched(pair.loss_fn, watch.note)))
    start = time.perf_counter()
    found = jax.block_until_ready(seen(params, batch))
    jax.effects_barrier()
    times = watch.take(start)
    assert sorted(times) == list(range(len(jax.tree.leaves(params))))
    assert all(0 < at < time.perf_counter() - start for at in times.values())
    assert watch.take(start) == {}
    expected = jax.jit(jax.value_and_grad(pair.loss_fn))(params, batch)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_ready_times_follow_the_backward_pass():
    pair = asleep()  # each layer's gradients come 0.02 to 0.04 s after the next one's
    setting = setting_of(pair, 1)
    result = ready.measure(setting, pair.batch(4, 1), {"jax"}, 1, 3)
    times = result["ready"]["jax"]
    assert sorted(size for _, size in times) == [32] * MADE + [256] * MADE
    seconds = [at for at, _ in times]
    assert seconds == sorted(seconds)
    slept = emulate.shares(make_pair("mlp:widths=8x5"), **TIMES["jax"])
    due = [sum(slept.forward) + sum(slept.backward[-i:]) for i in range(1, MADE + 1)]
    # The two gradients of a layer together; late they may be, on a busy machine, early never.
    assert all(a >= b for a, b in zip(seconds, np.repeat(due, 2), strict=True))
    assert seconds[-1] - seconds[0] > (due[-1] - due[0]) / 4
    alone = result["ready_alone_s"]["jax"]
    assert alone["watched"] >= seconds[-1]
    assert alone["unwatched"] >= due[-1]


# --- several iterations a step ---


def test_a_window_reduces_the_sum_of_its_iterations():
    pair = make_pair(TINY)
    batch = pair.batch(8, 1)
    once = ways.build(ways.parse("fdp:cap=0.0005"), setting_of(pair, 2))
    four = timing.every(once, 4)
    one, sums = moved(once, pair, batch), moved(four, pair, batch)
    for name, x in one.items():
        np.testing.assert_allclose(sums[name], 4 * x, rtol=1e-3, atol=1e-5)
    assert four.name == "fdp:cap=0.0005 every=4"


def test_windows_are_of_the_ways_that_can():
    setting = setting_of(make_pair(TINY), 1)
    built = {t: ways.build(ways.parse(t), setting) for t in ("fdp", "fdp:none", "jax")}
    found = timing.windows(built, [1, 2, 8])
    assert {name: count for name, (_, count) in found.items()} == {
        "fdp every=2": 2,
        "fdp every=8": 8,
    }
    with pytest.raises(
        ValueError, match="can put off reducing, and a count of at least 1, got 'jax'"
    ):
        timing.every(built["jax"], 2)
