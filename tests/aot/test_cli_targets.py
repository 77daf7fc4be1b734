"""`fdp inspect` for hardware that is not here: one compile a target."""

import json
import os

import cli_models
import pytest
from click.testing import CliRunner

from fdp.cli.app import program

KERNEL = 32 * 32 * 4
CAPS = ("--bucket-mb", str(KERNEL / 2**20), "--first-bucket-mb", str(KERNEL / 2**20))


@pytest.fixture
def here(tmp_path, monkeypatch):
    # The environment stays the real one: a compiler reads it when it starts.
    cli_models.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("target", "platform", "device"), [("h100:8", "gpu", "H100"), ("v5e:2x4", "tpu", "v5e")]
)
def test_a_step_for_hardware_that_is_not_here(here, target, platform, device):
    arguments = ("a_model:build", "--target", target, "--devices", "64", "--json", *CAPS)
    got = CliRunner().invoke(program, ["inspect", *arguments])
    assert got.exit_code == 0, got.stderr
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
    found = json.loads(got.stdout)
    assert (found["platform"], found["devices"], found["target"]) == (platform, 8, target)
    # Four kernels, a bucket each; the loss in one more.
    answers = found["answers"]
    assert (answers["all_reduces"], answers["gradient_all_reduces"]) == (5, 4)
    assert answers["merged"] == []
    assert answers["basis"] == "schedule"
    assert [m["verdict"] for m in found["buckets"]] == ["alone"] * 4
    assert 4 * KERNEL <= answers["gradient_bytes"] < 1.2 * 4 * KERNEL
    guess = found["estimate"]
    assert (guess["devices"], device in guess["device"]) == (64, True)
    assert 0 < guess["compute_seconds"] < guess["step_seconds"]
    assert guess["assumptions"].startswith("not a measurement")


def test_a_target_that_the_compiler_does_not_know(here):
    got = CliRunner().invoke(program, ["inspect", "a_model:build", "--target", "v5e:3x5"])
    assert got.exit_code == 2
    assert got.stderr.splitlines()[-1].startswith("fdp: expected a target that the compiler knows")
