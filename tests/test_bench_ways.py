"""benchmarks.ways and benchmarks.pairs: names, refusals, what JAX's ways compute. No PyTorch needed."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import spec, timing, ways
from benchmarks.pairs import OPTIONS, PAIRS, make_pair
from benchmarks.timing import DifferentPrograms
from benchmarks.ways import Setting, in_jax

TINY = "mlp:widths=8-16-16-4"
RATE = 0.1


def setting_of(size, text=TINY, rate=RATE):
    mesh = Mesh(np.array(jax.devices()[:size]), (ways.AXIS,))
    return Setting(make_pair(text), mesh, rate)


# --- names ---


def test_a_way_is_read():
    found = ways.parse("fdp:serialized,cap=0.5,pack=leaves")
    assert (found.name, found.word) == ("fdp", "serialized")
    assert found.options == {"cap": 0.5, "pack": "leaves"}
    assert ways.parse("torch:cap=25,view=on").options == {"cap": 25.0, "view": True}
    assert ways.parse("jax").word is None
    assert ways.parse("jax:pmean,combiner=off").options == {"combiner": "off"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("horovod", "expected a way out of torch, jax, fdp, got 'horovod' in 'horovod'"),
        ("jax:psum", "one of pmean, pmap, auto, none, combiner=, got 'psum' in 'jax:psum'"),
        ("torch:", "one of ddp, none, cap=, view=, got '' in 'torch:'"),
        (
            "torch:window=2",
            "an option of 'torch' out of cap, view, got 'window' in 'torch:window=2'",
        ),
        ("fdp:cap=big", "a size in MiB such as 25 or 0.5, got 'big' for 'cap' in 'fdp:cap=big'"),
        ("fdp:window=0", "a whole number of at least 1, got '0' for 'window' in 'fdp:window=0'"),
        ("fdp:pack=zip", "expected flat or leaves, got 'zip' for 'pack' in 'fdp:pack=zip'"),
        ("torch:view=1", "expected on or off, got '1' for 'view' in 'torch:view=1'"),
        ("fdp:cap=1,cap=2", "expected 'cap' once, got it twice in 'fdp:cap=1,cap=2'"),
        ("fdp:fused,none", "expected one of 'fused' and 'none', got both in 'fdp:fused,none'"),
    ],
)
def test_a_wrong_way_is_refused(text, message):
    with pytest.raises(ValueError, match="expected") as raised:
        ways.parse(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vgg", "expected a model out of mlp, mlp-unequal, resnet50, bert-base, digits, got 'vgg'"),
        ("mlp:width=3", "expected an option of 'mlp' out of widths, got 'width'"),
        ("mlp:widths=8", "expected at least two widths such as 1024x12-10, got '8'"),
        ("mlp:widths=8x-3", "expected widths such as 1024x12-10, got '8x-3'"),
        ("digits:pixels=3", "expected an option of 'digits' out of none, got 'pixels'"),
        ("digits:big", "expected after 'digits' one of nothing, got 'big'"),
        ("bert-base:length=600", "expected at most 512 tokens an example, got length=600"),
        ("bert-base:heads=7", "expected a width that divides by the heads, got width=768, heads=7"),
    ],
)
def test_a_wrong_model_is_refused(text, message):
    with pytest.raises(ValueError, match="expected") as raised:
        make_pair(text)
    assert message in str(raised.value)


def test_every_model_has_its_options():
    assert OPTIONS.keys() == PAIRS.keys()
    assert spec.widths("1024x3-10") == (1024, 1024, 1024, 10)


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("fdp:serialized,window=2", 1, "expected window= with the ordered schedule only"),
        ("fdp:none,via=pmap", 1, "expected no via= where nothing is reduced"),
        ("jax:pmap,combiner=off", 1, "expected no options, since pmap takes none"),
        ("jax:pmean,combiner=4", 1, "expected combiner=on or combiner=off on cpu"),
    ],
)
def test_options_that_do_not_go_together_are_refused(text, size, message):
    with pytest.raises(ValueError, match="expected") as raised:
        ways.build(ways.parse(text), setting_of(size))
    assert message in str(raised.value)


def test_automatic_sharding_is_refused_with_batch_statistics():
    with pytest.raises(ValueError, match="another program than DDP's"):
        ways.build(ways.parse("jax:auto"), setting_of(1, "resnet50:pixels=32"))


def test_combiner_options():
    assert in_jax.compiler_options("on", "gpu") is None
    assert in_jax.compiler_options("off", "cpu") == {
        "xla_disable_hlo_passes": "cpu-all-reduce-combiner"
    }
    assert in_jax.compiler_options(0.5, "gpu") == {
        "xla_gpu_all_reduce_combine_threshold_bytes": str(2**19)
    }
    assert in_jax.compiler_options("off", "tpu") == {"xla_jf_crs_combiner_threshold_in_bytes": "0"}


# --- what ways compute ---

COMMUNICATING = [
    "jax",
    "jax:pmean,combiner=off",
    "jax:pmap",
    "jax:auto",
    "fdp:cap=0.0005,window=2",
    "fdp:serialized,pack=leaves",
    "fdp:via=pmap",
]


def placed(built, share):
    return {name: way.place(share) for name, way in built.items()}


def test_ways_take_the_step_of_one_device_on_the_joined_batch():
    setting = setting_of(2)
    pair = setting.pair
    built = {text: ways.build(ways.parse(text), setting) for text in COMMUNICATING}
    share = pair.batch(8, 1)
    params, _ = pair.init()
    loss, grads = jax.value_and_grad(pair.loss_fn)(params, share)
    for name, batch in placed(built, share).items():
        way = built[name]
        state, found = way.step(way.init(params, None), batch)
        assert way.wait(state, found) == pytest.approx(float(loss), rel=1e-6), name
        expected = pair.named(jax.tree.map(lambda p, g: p - RATE * np.asarray(g), params, grads))
        after = way.params(state)
        assert after.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(after[key], value, atol=1e-6, err_msg=f"{name} {key}")
        assert way.communicates
        assert way.framework == "jax"


def test_computing_alone_and_holding_back():
    setting = setting_of(1)
    pair = setting.pair
    built = {
        text: ways.build(ways.parse(text), setting) for text in ("jax:none", "fdp:none", "fdp")
    }
    share = pair.batch(8, 1)
    batch = placed(built, share)
    checked = timing.check(built, setting, batch)
    assert checked["update_difference"] == {"fdp": 0.0}
    assert [way.communicates for way in built.values()] == [False, False, True]
    # Two held-back steps and one more on the same data: three times the gradient of one.
    way, (params, _) = built["fdp"], pair.init()
    state = way.init(params, None)
    for step in (way.no_sync_step, way.no_sync_step, way.step):
        state, _ = step(state, batch["fdp"])
    grads = pair.named(jax.grad(pair.loss_fn)(params, share))
    before, after = pair.named(params), way.params(state)
    for key, grad in grads.items():
        np.testing.assert_allclose(before[key] - after[key], 3 * RATE * grad, atol=1e-6)
    timed = timing.time_way(built["fdp:none"], pair.init(), batch["fdp:none"], 1, 3)
    assert len(timed.seconds) == 3
    assert min(timed.seconds) > 0
    assert timed.loss < checked["loss"]["fdp:none"]


@pytest.mark.parametrize("kind", ["loss", "update"])
def test_ways_that_differ_are_not_timed(kind):
    setting = setting_of(1)
    way = ways.build(ways.parse("jax"), setting)
    other = ways.build(ways.parse("jax"), setting._replace(learning_rate=2 * RATE))
    if kind == "loss":
        other = way._replace(wait=lambda state, loss: 1.001 * way.wait(state, loss))
    built = {"good": way, "bad": other}
    with pytest.raises(DifferentPrograms, match=f"{kind}.* to be the same") as raised:
        timing.check(built, setting, placed(built, setting.pair.batch(8, 1)))
    assert "'good'" in str(raised.value)
    assert "'bad'" in str(raised.value)
