"""benchmarks.pairs: the flax and the torch half of every model are the same function of the same weights."""

import jax
import numpy as np
import pytest
import torch

from benchmarks.pairs import PAIRS, convert, make_pair

pytestmark = pytest.mark.torch

# Full size, only counted; and small enough to run, with the examples of its batch.
COUNTS = {
    "mlp": 12 * (1024 * 1024 + 1024),
    "mlp-unequal": 9_489_162,
    "resnet50": 25_557_032,
    "bert-base": 110_106_428,
    "digits": 40_394,
}
SMALL = {
    "mlp:widths=32x5-3": 16,
    "mlp-unequal:widths=40-300-7-64": 16,
    "bert-base:length=16,layers=11,width=32,heads=4,words=50,places=20": 4,
    "digits": 16,
}
RESNET = "resnet50:pixels=64,classes=10"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(pair, examples, dtype=np.float32):
    """Loss and gradients by torch's names, of flax and of torch, from the same weights and batch."""

    def cast(tree):
        return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, tree)

    params, model_state = (cast(tree) for tree in pair.init())
    batch = cast(pair.batch(examples, 3))
    compute = jax.jit(jax.value_and_grad(pair.full_loss, has_aux=True))
    (loss, state), grads = compute(params, model_state, batch)
    model = pair.torch_module().to(torch.float64 if dtype == np.float64 else torch.float32)
    model.load_state_dict(pair.to_torch(params, model_state))
    theirs = pair.torch_loss(model, pair.torch_batch(batch))
    theirs.backward()
    their_grads = {name: x.grad.numpy() for name, x in model.named_parameters()}
    return (float(loss), convert.named(grads), state), (theirs.item(), their_grads, model)


def check_gradients(ours, theirs, tolerance):
    """Relative in each leaf, or to a thousandth of the whole: a key's bias shifts a softmax as a whole, it has none."""
    assert ours.keys() == theirs.keys()
    whole = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in ours.values()))
    for name, mine in ours.items():
        scale = max(np.linalg.norm(mine), 1e-3 * whole)
        assert np.linalg.norm(theirs[name] - mine) <= tolerance * scale, name


@pytest.mark.parametrize("text", PAIRS)
def test_parameters_and_statistics_correspond(text):
    pair = make_pair(text)
    params, model_state = pair.shapes()
    assert sum(x.size for x in jax.tree.leaves(params)) == COUNTS[text]
    with torch.device("meta"):
        model = pair.torch_module()
    assert sum(x.numel() for x in model.parameters()) == COUNTS[text]
    # One scalar of memory each, whatever the shape.
    empty = jax.tree.map(
        lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), (params, model_state)
    )
    named = convert.named(*empty)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert {name: x.shape for name, x in named.items()} == shapes
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert set(convert.named(empty[0])) == trained


@pytest.mark.parametrize("text", SMALL)
def test_loss_and_gradients_are_equal(text):
    (loss, grads, _), (their_loss, their_grads, _) = both(make_pair(text), SMALL[text])
    assert their_loss == pytest.approx(loss, rel=1e-4)
    check_gradients(grads, their_grads, 1e-4)


def test_resnet_is_equal():
    """In float64: in float32 rounding decides the sign in front of some ReLUs, and gradients differ by 0.2 %."""
    pair = make_pair(RESNET)
    with jax.enable_x64(True):
        (loss, grads, state), (their_loss, their_grads, model) = both(pair, 8, np.float64)
    assert their_loss == pytest.approx(loss, rel=1e-10)
    check_gradients(grads, their_grads, 1e-9)
    # Running means agree; of variances torch stores n / (n - 1) times what flax does, here n = 8 x 32 x 32.
    n, first = 8 * 32 * 32, state["bn1"]
    np.testing.assert_allclose(model.bn1.running_mean.numpy(), first["mean"], rtol=1e-9)
    theirs, mine = model.bn1.running_var.numpy() - 0.9, np.asarray(first["var"]) - 0.9
    np.testing.assert_allclose(theirs, mine * n / (n - 1), rtol=1e-9)


def test_resnet_loss_is_equal_in_float32():
    pair = make_pair(RESNET)
    weights, batch = pair.init(), pair.batch(8, 3)
    loss, _ = jax.jit(pair.full_loss)(*weights, batch)
    model = pair.torch_module()
    model.load_state_dict(pair.to_torch(*weights))
    with torch.no_grad():
        theirs = pair.torch_loss(model, pair.torch_batch(batch))
    assert theirs.item() == pytest.approx(float(loss), rel=1e-4)


def test_a_wrong_weight_is_noticed():
    pair = make_pair("mlp:widths=8x3")
    (loss, grads, _), (_, _, model) = both(pair, 4)
    with torch.no_grad():
        model.layers[0].weight.copy_(model.layers[0].weight.T.clone())
    model.zero_grad()
    theirs = pair.torch_loss(model, pair.torch_batch(pair.batch(4, 3)))
    theirs.backward()
    assert theirs.item() != pytest.approx(loss, rel=1e-4)
    with pytest.raises(AssertionError):
        check_gradients(grads, {n: x.grad.numpy() for n, x in model.named_parameters()}, 1e-4)


def test_a_state_dict_is_a_copy():
    pair = make_pair("mlp:widths=8x3")
    params, _ = pair.init()
    pair.to_torch(params)["layers.0.bias"].add_(1.0)
    assert not params["layers_0"]["bias"].any()


def test_images_change_their_layout():
    pair = make_pair("resnet50:pixels=32")
    batch = pair.batch(2, 0)
    converted = pair.torch_batch(batch)
    assert converted["image"].shape == (2, 3, 32, 32)
    assert converted["image"].is_contiguous()
    assert converted["image"][1, 2, 5, 7].item() == batch["image"][1, 5, 7, 2]
    assert converted["label"].dtype == torch.int64
