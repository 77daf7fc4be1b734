"""docs/frameworks.md: its blocks run in order, as a reader would run them, and what they train is trained."""

import re
import warnings

import doc_blocks
import jax
import numpy as np
import pytest
from doc_blocks import ROOT, read_blocks, run_block

from fdp.leaves import path_string
from tests.models import assert_replicas_bit_equal, relative_difference

PAGE = ROOT / "docs" / "frameworks.md"
TEXT = PAGE.read_text("utf-8")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What all blocks leave behind."""
    left: dict = {"__name__": "frameworks"}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")  # a reader should see none
        patch.chdir(tmp_path_factory.mktemp("page"))  # it writes a checkpoint
        for block in read_blocks(TEXT):
            assert block.language == "python"
            run_block(block, left, PAGE)
    return left


def test_every_section_has_one_block():
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert titles == [
        "flax linen",
        "flax nnx",
        "equinox",
        "haiku",
        "An optax chain",
        "Checkpoints with orbax",
    ]
    assert [len(read_blocks(f"## {section}")) for section in sections] == [1] * 6


@pytest.mark.parametrize("framework", ["linen", "nnx", "eqx", "hk"])
def test_every_framework_learns(names, framework):
    untrained = np.mean(names["batch"]["y"] ** 2)
    assert names[f"{framework}_error"] < 0.5 * untrained


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_the_trained_model_predicts_by_its_statistics(names, framework):
    predicted = np.asarray(names[f"{framework}_predictions"])
    assert predicted.shape == (64, 1)
    np.testing.assert_array_less(
        np.mean((predicted - names["batch"]["y"]) ** 2), np.mean(names["batch"]["y"] ** 2)
    )


def test_the_chain_goes_on_from_the_trained_model(names):
    np.testing.assert_allclose(
        float(names["chain_error"]), names["eqx_loss"](names["params"], names["batch"]), rtol=1e-5
    )
    assert relative_difference(names["chain_params"], names["params"]) > 0
    assert_replicas_bit_equal(names["chain_params"])


def test_what_was_restored_goes_on_like_the_run_itself(names):
    (went_on, error) = names["train"](names["trainer"], names["state"])
    assert int(went_on.step) == int(names["restored"].step) == 40
    np.testing.assert_allclose(names["restored_error"], error, rtol=1e-4)
    assert relative_difference(names["restored"].params, went_on.params) <= 1e-4
    for path, leaf in jax.tree_util.tree_leaves_with_path(names["restored"]):
        assert len(leaf.sharding.device_set) == 1, path_string(path)


def test_links_and_names_exist():
    assert doc_blocks.broken_links(PAGE, TEXT) == []
    assert doc_blocks.unknown_names(TEXT) == []
