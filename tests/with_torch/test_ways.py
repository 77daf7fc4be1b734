"""benchmarks.ways: torch's ways and JAX's are steps of one program, and torch's options reach DDP."""

import functools

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from benchmarks import timing, ways
from benchmarks.pairs import make_pair
from benchmarks.timing import DifferentPrograms
from benchmarks.ways import Setting, in_torch
from fdp.launch import free_port

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def group():
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        in_torch.connect("127.0.0.1", free_port(), 0, 1)
        yield
        in_torch.disconnect()
    torch.set_num_threads(before)


def setting_of(text, **changes):
    pair = make_pair(text)
    mesh = Mesh(np.array(jax.devices()[:1]), (ways.AXIS,))
    return Setting(pair, mesh, pair.learning_rate)._replace(**changes)


def built_for(setting, *texts):
    built = {text: ways.build(ways.parse(text), setting) for text in texts}
    share = setting.pair.batch(8, 1)
    return built, {name: way.place(share) for name, way in built.items()}


def buckets(state):
    """DDP's buckets in bytes, first launched first, once it has made them anew."""
    found = state.model._get_ddp_logging_data()  # the only place that says it
    return [int(size) for size in found["rebuilt_bucket_sizes"].split(",")]


# DDP asks for the strides of a contiguous tensor also along an axis of length 1, as the first convolution has.
layout_noise = pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")


@layout_noise
@pytest.mark.parametrize("text", ["mlp:widths=16x4", "digits"])
def test_all_frameworks_take_the_same_first_step(text):
    setting = setting_of(text)
    built, batch = built_for(
        setting, "torch", "torch:cap=0,view=on", "torch:none", "jax", "jax:auto", "fdp", "fdp:none"
    )
    found = timing.check(built, setting, batch)
    first = found["loss"]["torch"]
    assert found["loss"] == {name: pytest.approx(first, rel=1e-5) for name in built}
    assert set(found["update_difference"]) == {n for n in built if not n.endswith("none")}
    assert max(found["update_difference"].values()) < setting.pair.update_tolerance


def test_a_torch_way_that_differs_is_noticed():
    setting = setting_of("mlp:widths=16x4")
    built, batch = built_for(setting, "fdp", "torch")
    other = setting._replace(learning_rate=1.5 * setting.learning_rate)
    built["torch"] = ways.build(ways.parse("torch"), other)
    with pytest.raises(DifferentPrograms, match="between 'fdp' and 'torch'"):
        timing.check(built, setting, batch)


@layout_noise
def test_ways_train_alike():
    """Losses of twenty steps, and of held-back ones."""
    # At 0.3 the loss jumps at the ninth step, and rounding grows from there to 1e-4: how far is the machine's affair.
    setting = setting_of("digits", learning_rate=0.05)
    built, batch = built_for(setting, "torch:cap=0.05", "fdp:cap=0.05")
    curves = []
    for name, way in built.items():
        state, curve = way.init(*setting.pair.init()), []
        for k in range(20):
            step = way.no_sync_step if k % 4 == 1 else way.step
            state, loss = step(state, batch[name])
            curve.append(way.wait(state, loss))
        curves.append(curve)
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    assert curves[0][-1] < 0.9 * curves[0][0]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        # Three layers of 16 x 16 and their biases, 1024 + 64 bytes each, the bias first. A bucket is full once it has
        # reached the cap.
        ("torch:cap=0", [64, 1024] * 3),
        ("torch:cap=0.0015", [2176, 1088]),
        ("torch:cap=25", [3264]),
    ],
)
def test_the_cap_reaches_ddp(text, sizes):
    setting = setting_of("mlp:widths=16x4")
    built, batch = built_for(setting, text)
    way = built[text]
    step = functools.partial(way.step, batch=batch[text])
    state = way.init(*setting.pair.init())
    for _ in range(3):
        state, _ = step(state)
    found = buckets(state)
    assert sum(found) == 3264
    assert found == sizes


def test_views_and_silence_reach_ddp():
    setting = setting_of("mlp:widths=16x4")
    built, batch = built_for(setting, "torch:view=on", "torch:none")
    seen = {}
    for name, way in built.items():
        state, _ = way.step(way.init(*setting.pair.init()), batch[name])
        seen[name] = state.model
    assert seen["torch:view=on"].gradient_as_bucket_view
    assert not seen["torch:none"].gradient_as_bucket_view
    assert seen["torch:none"]._get_ddp_logging_data()["comm_hook"] == "_hand_back"
