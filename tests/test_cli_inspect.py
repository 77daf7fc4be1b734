"""`fdp inspect`: its numbers are those of the compiled program, its words say them."""

import dataclasses
import json

import cli_models
import jax
import numpy as np
import optax
import pytest
from click.testing import CliRunner

import fdp
import fdp.aot
from fdp.cli.answers import Answers, in_words
from fdp.cli.app import program
from fdp.cli.estimating import estimate

KERNEL = 32 * 32 * 4
CAPS = ("--bucket-mb", str(2 * KERNEL / 2**20), "--first-bucket-mb", str(KERNEL / 2**20))


@pytest.fixture
def here(tmp_path, monkeypatch):
    return cli_models.enter(tmp_path, monkeypatch)


def fdp_(*arguments):
    return CliRunner().invoke(program, arguments, prog_name="fdp")


@pytest.fixture(scope="module")
def compiled(mesh):
    """The program of `a_model:build`, made by hand, and its plan."""
    namespace = {"__name__": "a_model"}
    exec(cli_models.SOURCE, namespace)
    loss, params, batch = namespace["build"]()
    trainer = fdp.data_parallel(
        loss, optax.sgd(0.1), mesh=mesh, bucket_bytes=2 * KERNEL, first_bucket_bytes=KERNEL
    )
    state = trainer.init(jax.eval_shape(lambda: params))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), batch)
    lowered = trainer.lower(state, batch).compile()
    return fdp.inspect.load(lowered), trainer.plan(state, batch), trainer.explain(state, batch)


def test_json_is_the_report_of_the_program(here, compiled):
    loaded, plan, explanation = compiled
    got = fdp_("inspect", "a_model:build", "--target", "cpu:8", "--json", *CAPS)
    assert got.exit_code == 0, got.stderr
    found = json.loads(got.stdout)
    report = fdp.inspect.report(loaded, plan)
    assert found["plan"]["fingerprint"] == plan.fingerprint()
    assert found["explanation"] == explanation
    assert [c["nbytes"] for c in found["collectives"]] == [c.nbytes for c in report.collectives]
    assert found["interleaving"] == dict(report.schedules)
    assert found["estimate"] is None
    assert (found["platform"], found["devices"]) == ("cpu", 8)
    # Three buckets of 1, 2 and 1 kernels and the loss; flat buffers may carry a lane.
    answers = found["answers"]
    assert (answers["all_reduces"], answers["gradient_all_reduces"]) == (4, 3)
    assert 4 * KERNEL <= answers["gradient_bytes"] <= 4 * KERNEL + 3 * 256
    assert answers["sent_bytes"] == report.wire_bytes
    hidden = [o for o in report.overlaps if o.flops and o.collective.nbytes > 4]
    assert answers["hidden_all_reduces"] == len(hidden) == 2
    assert answers["last_only"]


def test_a_step_that_carries_is_the_one_behind_the_first(here):
    arguments = ("--target", "cpu:8", "--json", *CAPS)
    both = [fdp_("inspect", f"a_model:{name}", *arguments) for name in ("build", "carrying")]
    plain, carrying = (json.loads(got.stdout) for got in both)
    assert carrying["answers"]["sent_bytes"] == plain["answers"]["sent_bytes"]
    assert carrying["answers"]["gradient_all_reduces"] == 3
    assert "1 bucket carried over" in carrying["explanation"]


def test_words_program_and_estimate(here, compiled):
    arguments = ("--target", "cpu", "--devices", "64", "--hardware", "h100", *CAPS)
    got = fdp_("inspect", "a_model:build", *arguments)
    assert got.exit_code == 0, got.stderr
    loaded, plan, explanation = compiled
    guess = estimate(loaded, 64, "h100")
    for question, answer in in_words(Answers.of(fdp.inspect.report(loaded, plan), 4), guess):
        assert f"{question}\n  {answer}\n" in got.stdout
    assert "4: 3 for gradients, 1 for the loss" in got.stdout
    assert "They can: 2 of 3" in got.stdout
    assert "the last one never does" in got.stdout
    assert "What would 64 devices do? (an estimate)" in got.stdout
    assert "Not a measurement" in got.stdout
    assert explanation in got.stdout
    assert "schedule (G matmul" in got.stdout
    assert "\x1b" not in got.stdout


def test_an_estimate_is_the_link_model_at_that_many_devices(compiled):
    loaded, _, _ = compiled
    same = estimate(loaded, 8, "h100")
    line = fdp.inspect.timeline(loaded, "h100")
    assert same.step_seconds == pytest.approx(line.seconds, rel=1e-12)
    assert same.exposed_seconds == pytest.approx(line.exposed_seconds, rel=1e-12)
    many = estimate(loaded, 64, "h100")
    # 2 (n - 1) steps of a ring, over the 8 x 50 GB/s between nodes; figures as in fdp.inspect.HARDWARE.
    by_hand = sum(
        8.4e-6 + 2 * 63 * 3.4e-6 + round(c.nbytes * 2 * 63 / 64) / 400e9
        for c in fdp.inspect.collectives(loaded)
    )
    assert many.link_seconds == pytest.approx(by_hand, rel=1e-9)
    assert many.compute_seconds == pytest.approx(same.compute_seconds, rel=1e-12)
    assert many.efficiency == pytest.approx(1 - many.exposed_seconds / many.step_seconds)
    assert many.efficiency < same.efficiency < 1


def test_model_state_aux_and_an_optimizer(here):
    got = fdp_("inspect", "a_model:full", "--target", "cpu:2", "--json", "--per-device")
    assert got.exit_code == 0, got.stderr
    answers = json.loads(got.stdout)["answers"]
    # Loss, auxiliary output and model state travel together.
    assert (answers["all_reduces"], answers["gradient_all_reduces"]) == (2, 1)
    assert answers["devices"] == 2


def test_a_bucket_that_a_loop_takes_apart_still_counts_as_gradients(here):
    got = fdp_("inspect", "a_model:scanned", "--target", "cpu:2", "--json")
    assert got.exit_code == 0, got.stderr
    found = json.loads(got.stdout)
    answers = found["answers"]
    # One bucket of three stacked layers and the head: the head, two slices in the loop, the last slice behind it.
    assert answers["not_found"] == []
    assert (answers["all_reduces"], answers["gradient_all_reduces"]) == (5, 4)
    assert answers["in_loops"] == 2
    assert answers["gradient_bytes"] == 4 * 256 * 256 * 4


def test_one_device_reduces_nothing(here):
    got = fdp_("inspect", "a_model:build", "--target", "cpu:1")
    assert got.exit_code == 0, got.stderr
    assert "None: with one device there is nobody to reduce with." in got.stdout
    assert "There is nothing to overlap." in got.stdout
    assert "Add --devices 64 --hardware h100 for an estimate" in got.stdout
    refused = fdp_(
        "inspect", "a_model:build", *("--target", "cpu:1", "--devices", "4", "--hardware", "v5e")
    )
    assert refused.exit_code == 2
    assert "compile for at least 2" in refused.stderr


WRONG = {
    "a_model:params": (2, "got one that returns params alone"),
    "a_model:build --target cpu:7": (1, "divides by 7 replicas"),
    "a_model:build --target cpu:64": (1, "expected 64 CPU devices for 'cpu:64', got 8"),
    "a_model:build --target cpu:0": (2, "got 'cpu:0'"),
    "a_model:build --target b200:8": (2, "'h100:8' (GPU and how many) or 'v5e:2x4'"),
    "a_model:build --target h100": (2, "got 'h100'"),
    "a_model:build --devices 64": (2, "add --hardware, one of h100, a100, v5e, v5p"),
    "a_model:build --devices 1": (2, "--devices"),
    "a_model:build --hardware b200": (2, "--hardware"),
    "a_model:build --target h100:8 --hardware v5e": (2, "hardware of the target 'h100:8', a GPU"),
    "a_model:build --target v5e:2x4 --hardware h100": (
        2,
        "hardware of the target 'v5e:2x4', a TPU",
    ),
    "a_model:build --target h100:8": (3, "pip install 'jax-cuda13-plugin=="),
    "a_model:build --target v5e:2x4": (3, "pip install 'jax[tpu]=="),
    "a_model:broken": (1, "TypeError: dot_general"),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line_and_a_code(here, monkeypatch, line):
    # As where no compiler is installed.
    absent = {
        name: (("no_such_module",), packages) for name, (_, packages) in fdp.aot._COMPILERS.items()
    }
    monkeypatch.setattr(fdp.aot, "_COMPILERS", absent)
    got = fdp_("inspect", *line.split())
    code, text = WRONG[line]
    said = [line for line in got.stderr.splitlines() if line not in ("imported", "called")]
    assert len(said) == 1, got.stderr
    assert said[0].startswith("fdp: ")
    assert text in said[0]
    assert got.exit_code == code
    assert got.stdout == ""


PLAIN = Answers(
    devices=8,
    all_reduces=13,
    gradient_all_reduces=12,
    in_loops=0,
    smallest_bytes=2**20,
    largest_bytes=25 * 2**20,
    gradient_bytes=100 * 2**20,
    sent_bytes=175 * 2**20,
    hidden_all_reduces=11,
    hidden_bytes=75 * 2**20,
    other_collectives=0,
    basis="schedule",
    last_only=True,
    merged=(),
    not_found=(),
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "13: 12 for gradients, 1 for the loss"),
        (
            {},
            "1.0 MiB to 25.0 MiB each, 100.0 MiB a step; on a ring of 8 devices each sends 175.0 MiB",
        ),
        ({}, "Yes: 11 of 12 (75% of their bytes) have matmuls between"),
        ({}, "the last one never does"),
        ({"in_loops": 10}, "12 for gradients (10 of them inside loops over layers)"),
        ({"merged": ((0, 1), (3, 4))}, "The compiler merged buckets 0, 1; 3, 4."),
        ({"not_found": (2,)}, "Buckets 2 of the plan do not cross as one"),
        ({"other_collectives": 3}, "3 other collectives"),
        ({"hidden_all_reduces": 0}, "No: nothing is computed beside any of them"),
        ({"all_reduces": 0, "gradient_all_reduces": 0}, "None: the program sends nothing."),
    ],
)
def test_words(change, says):
    rows = in_words(dataclasses.replace(PLAIN, **change), None)
    assert [answer for _, answer in rows if says in answer], rows
