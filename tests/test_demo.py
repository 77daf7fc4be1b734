"""The demo: a short run of the whole program, and what it says when something is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from examples import digits

ROOT = Path(__file__).parent.parent


def test_a_short_run():
    command = [
        sys.executable,
        "examples/digits.py",
        *"--via pmap --microbatches 2 --devices 2 --epochs 2".split(),
    ]
    # As users run it: it computes for longer than it compiles, and make test has the compiler optimize less.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "1437 images to train on, 360 held out; batches of 32" in done.stdout
    assert "2 cpu devices by pmap, microbatches: 2" in done.stdout
    assert "3 buckets, 10 leaves, 161,576 bytes" in done.stdout
    assert "data parallel" in done.stdout
    assert done.stdout.count("88/88 steps") == 2
    rows = re.findall(r"│ (\d) +│ ([\d.]+) +│ ([\d.]+)% +│ ([\d.]+)% +│", done.stdout)
    assert [row[0] for row in rows] == ["1", "2"]
    assert float(rows[1][1]) < float(rows[0][1])  # the loss falls
    assert float(rows[1][2]) > float(rows[0][2])  # the accuracy rises
    assert float(rows[1][3]) > 60
    difference = re.search(
        r"largest difference from the one-device run: (\S+) in any of 40,394", done.stdout
    )
    assert difference
    assert 0 < float(difference.group(1)) < digits.ALLOWED_DIFFERENCE
    assert "\x1b" not in done.stdout, "colours although it is not a terminal"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--via mpi", "argument --via: invalid choice: 'mpi' (choose from 'shard_map', 'pmap')"),
        (
            "--bucket-mb 0",
            "argument --bucket-mb: expected a size in MiB such as 0.1 or 25, got '0'",
        ),
        (
            "--bucket-mb nan",
            "argument --bucket-mb: expected a size in MiB such as 0.1 or 25, got 'nan'",
        ),
        (
            "--bucket-mb inf",
            "argument --bucket-mb: expected a size in MiB such as 0.1 or 25, got 'inf'",
        ),
        ("--microbatches 0", "argument --microbatches: expected a whole number from 1, got '0'"),
        ("--epochs 1.5", "argument --epochs: expected a whole number from 1, got '1.5'"),
        ("--seed -1", "argument --seed: expected a whole number from 0, got '-1'"),
        ("--devices two", "argument --devices: expected a whole number from 1, got 'two'"),
        ("--colour", "unrecognized arguments: --colour"),
    ],
)
def test_a_bad_option_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        digits.main(arguments.split())
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    # Python 3.12 no longer quotes choices.
    assert said.replace(
        "'", ""
    ) == f"digits.py: error: {message} (--help lists the options)\n".replace("'", "")


def test_more_microbatches_than_images(capsys):
    with pytest.raises(SystemExit) as stopped:
        digits.choose_batch_size(digits.option_parser(), images=100, replicas=8, microbatches=13)
    assert stopped.value.code == 2
    assert (
        "expected at most 12 on 8 devices, one for each of 100 images, got 13"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("replicas", "microbatches", "size"),
    [(4, 1, 32), (4, 8, 32), (3, 1, 30), (8, 3, 24), (8, 10, 80)],
)
def test_batches_divide(replicas, microbatches, size):
    parser = digits.option_parser()
    assert digits.choose_batch_size(parser, 1437, replicas, microbatches) == size


def test_data_is_split_once_and_for_all():
    train, held_out = digits.load_data(seed=3)
    assert (train["image"].shape, held_out["image"].shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    again, _ = digits.load_data(seed=3)
    np.testing.assert_array_equal(train["image"], again["image"])
    other, _ = digits.load_data(seed=4)
    assert (train["label"] != other["label"]).any()
    epoch = list(digits.batches(train, 32, seed=0))
    assert [len(batch["label"]) for batch in epoch] == [32] * 44


@pytest.fixture(scope="module")
def untrained():
    train, _ = digits.load_data(seed=0)
    run = digits.prepare(train, batch_size=32, epochs=1, seed=0)
    # Shapes are enough: making random numbers takes seconds to compile.
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run.params))


ANOTHER = "FAILED: data parallel training is not the same as training on one device\n"
WORSE = "FAILED: the network is not accurate enough\n"


@pytest.mark.parametrize(
    ("change", "wanted", "status", "said"),
    [
        (0.0, 0.0, 0, ""),
        (2e-3, 0.0, 1, ANOTHER),
        (np.nan, 0.0, 1, ANOTHER),
        (0.0, 0.97, 1, WORSE),
        (2e-3, 0.97, 1, WORSE + ANOTHER),
    ],
)
def test_the_demo_can_fail(untrained, change, wanted, status, said, capsys):
    _, held_out = digits.load_data(seed=0)
    other = jax.tree.map(lambda x: x, untrained)
    other["Conv_0"]["bias"] = other["Conv_0"]["bias"] + change
    assert digits.report(untrained, other, held_out, wanted) == status
    assert capsys.readouterr().err == said
