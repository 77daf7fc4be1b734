"""benchmarks.rank: its command line, its figures, its results; weights of benchmarks.pairs. No PyTorch needed."""

import argparse
import importlib.util
import json
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import machine, rank, timing, ways
from benchmarks.pairs import convert, make_pair
from benchmarks.timing import Timed
from benchmarks.ways import Setting

TINY = "mlp:widths=8-16-16-4"


def test_computing_alone_is_added():
    def names(*texts, alone=True):
        return [found.text for found in rank.asked_ways(texts, alone)]

    assert names("jax:pmean") == ["jax:pmean", "jax:none"]
    assert names("jax:pmean", "fdp", "jax:none") == ["jax:pmean", "fdp", "jax:none", "fdp:none"]
    assert names("fdp", alone=False) == ["fdp"]
    with pytest.raises(ValueError, match="every way once, got 'fdp' again"):
        names("fdp", "fdp")


def test_without_torch_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert rank.main(["--ways", "fdp", "torch:cap=25"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "expected PyTorch for the way 'torch:cap=25'" in line
    assert "pip install 'fdp[bench]'" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "fpd"], "expected a way out of torch, jax, fdp, got 'fpd'"),
        (["--ways", "fdp", "--rounds", "0"], "expected --rounds of at least 1, got 0"),
        (["--ways", "fdp", "--warm-up", "-1"], "expected --warm-up of at least 0, got -1"),
        (["--ways", "fdp", "--model", "mlp:widths=1"], "expected at least two widths"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message, capsys):
    assert rank.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_several_devices_a_rank_are_refused():
    with pytest.raises(ValueError, match="expected one device a rank, got 8"):
        rank.make_setting(make_pair(TINY), None)


def test_weights_get_torch_names_and_layouts():
    dense, conv = np.arange(6.0).reshape(2, 3), np.arange(24.0).reshape(1, 2, 3, 4)
    params = {
        "layers_10": {"kernel": dense, "bias": np.ones(3)},
        "layer1_0": {"conv1": {"kernel": conv}, "bn1": {"scale": np.ones(4)}},
        "word": {"embedding": dense},
    }
    found = convert.named(params, {"layer1_0": {"bn1": {"mean": np.zeros(4), "var": np.ones(4)}}})
    assert set(found) == {
        *("layers.10.weight", "layers.10.bias", "layer1.0.conv1.weight", "layer1.0.bn1.weight"),
        *("word.weight", "layer1.0.bn1.running_mean", "layer1.0.bn1.running_var"),
        "layer1.0.bn1.num_batches_tracked",
    }
    np.testing.assert_array_equal(found["layers.10.weight"], dense.T)
    np.testing.assert_array_equal(found["word.weight"], dense)
    assert found["layer1.0.conv1.weight"].shape == (4, 3, 1, 2)
    assert found["layer1.0.conv1.weight"][3, 2, 0, 1] == conv[0, 1, 2, 3]


def test_initial_values_and_batches_are_seeded():
    pair = make_pair(TINY)
    (a, _), (b, _), (c, _) = pair.init(1), pair.init(1), pair.init(2)
    kernels = [tree["layers_1"]["kernel"] for tree in (a, b, c)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.abs(kernels[0] - kernels[2]).max() > 0.1
    assert kernels[0].std() == pytest.approx(math.sqrt(2 / 16), rel=0.2)
    np.testing.assert_array_equal(pair.batch(3, 5)["x"], pair.batch(3, 5)["x"])
    assert pair.batch(3, 5)["x"].shape == (3, 8)


def test_summary():
    turns = [
        [Timed([1.0, 2.0], 10, 0.5), Timed([3.0, 1.0], 30, 0.7)],
        [Timed([4.0, 5.0], 20, 0.1), Timed([4.5, 4.0], 20, 0.3)],
    ]
    found = timing.summary(turns)
    assert found["steps_s"] == [[3.0, 2.0], [4.5, 5.0]]
    assert (found["median_s"], found["min_s"], found["max_s"]) == (3.75, 2.0, 5.0)
    assert (found["q1_s"], found["q3_s"]) == (2.75, 4.625)
    assert found["sent_bytes_per_step"] == 10
    assert found["last_loss"] == pytest.approx(0.2)
    one = timing.summary([[Timed([2.0], None, 0.5)]])
    assert (one["q1_s"], one["median_s"], one["q3_s"]) == (2.0, 2.0, 2.0)
    assert one["sent_bytes_per_step"] is None


def test_relative_difference():
    a, b = {"w": np.array([3.0, 5.0])}, {"w": np.array([3.0, 4.0])}
    assert timing.relative_difference(a, b) == pytest.approx(0.2)
    assert timing.relative_difference(b, b) == 0.0
    zero = {"w": np.zeros(2)}
    assert timing.relative_difference(a, zero) == math.inf
    assert timing.relative_difference(zero, zero) == 0.0
    assert timing.relative_difference({"w": np.array([np.nan, 1.0])}, b) == math.inf


def test_time_at_line_rate():
    # Two ranks exchange the whole once: 50 MB at 400 Mbit/s, and what headers add.
    assert rank.wire_seconds(50_000_000, 2, 4e8) == pytest.approx(1514 / 1448, rel=1e-12)
    assert rank.wire_seconds(50_000_000, 4, 4e8) == pytest.approx(1.5 * 1514 / 1448, rel=1e-12)
    assert rank.wire_seconds(50_000_000, 1, 4e8) == 0
    assert rank.wire_seconds(50_000_000, 2, None) is None


def test_computing_alone_by_framework():
    def way(framework, seconds, communicates=False):
        return {"framework": framework, "median_s": seconds, "communicates": communicates}

    found = {
        "fdp:none,cap=4": way("jax", 1.0),
        "jax:none": way("jax", 2.0),
        "torch:none": way("torch", 3.0),
        "jax": way("jax", 4.0, communicates=True),
    }
    assert rank.alone_seconds(found) == {"jax": 1.0, "torch": 3.0}


def test_the_wire_is_read_from_the_cluster(monkeypatch):
    monkeypatch.delenv("FDP_CLUSTER", raising=False)
    assert machine.wire() is None
    assert machine.sent_bytes() is None
    monkeypatch.setenv("FDP_CLUSTER", json.dumps({"rate": 4e8, "interface": "lo"}))
    assert machine.describe()["wire"]["rate"] == 4e8
    assert machine.sent_bytes() is None  # loopback is no wire of this run's own


def test_a_run_writes_after_every_round(tmp_path, monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:1]), (ways.AXIS,))
    setting = Setting(make_pair(TINY), mesh, 0.1)
    built = {"jax:none": ways.build(ways.parse("jax:none"), setting)}
    out = tmp_path / "new" / "result.json"
    args = argparse.Namespace(batch=8, rounds=2, steps=2, warm_up=0, out=out)
    seen = []
    real = timing.time_way

    def watched(*given):
        seen.append(json.loads(out.read_text())["complete"] if out.exists() else None)
        return real(*given)

    monkeypatch.setattr(timing, "time_way", watched)
    result = rank.run(args, setting, built)
    assert seen == [None, False]
    assert json.loads(out.read_text()) == result
    assert result["complete"] is True
    assert result["gradient_bytes"] == 4 * (8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4)
    assert np.shape(result["ways"]["jax:none"]["ranks_steps_s"]) == (2, 1, 2)
    assert "jax:none" in rank.table(result)
    spoiled = built["jax:none"]._replace(wait=lambda state, loss: math.nan)
    monkeypatch.setattr(timing, "check", lambda *_: {})
    with pytest.raises(FloatingPointError, match="finite loss"):
        rank.run(args, setting, {"jax:none": spoiled})
