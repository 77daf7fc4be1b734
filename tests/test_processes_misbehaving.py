"""Two real processes, one of which does something else: both are told what, none waits for ever.

tests/fake_store.py plays more cases with more processes; these show that JAX's store behaves as it does there.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from processes import start

# What a process that misbehaves may keep the other waiting for, on a slow machine: far below its time-outs of 20 s.
PROMPT = 15.0


def run(case, folder):
    """What each part of the case came to, in each process: results or messages, and seconds."""
    ended = start("tests.misbehaving_worker", case, 2, folder, timeout=110)
    for one in ended:
        assert one.code == 0, one.log
    return [one.result for one in ended]


@pytest.fixture(scope="module")
def agreement(tmp_path_factory):
    return run("agreement", tmp_path_factory.mktemp("agreement"))


@pytest.fixture(scope="module")
def joining(tmp_path_factory):
    return run("joining", tmp_path_factory.mktemp("joining"))


@pytest.fixture(scope="module")
def verification(tmp_path_factory):
    return run("verification", tmp_path_factory.mktemp("verification"))


@pytest.fixture(scope="module")
def absent(tmp_path_factory):
    return run("absent", tmp_path_factory.mktemp("absent"))


def message(process, part):
    entry = process[part]
    assert entry["seconds"] < PROMPT
    assert isinstance(entry["result"], dict), f"{part} raised nothing"
    return entry["result"]["error"]


@pytest.mark.parametrize("part", ["same", "barrier", "still there"])
def test_processes_that_agree_go_on(part, agreement):
    assert [process[part]["result"] for process in agreement] == [None, None]


@pytest.mark.parametrize(
    ("part", "here", "there"),
    [
        ("plan", "plan: bucket 0 of 2: float32, 12 bytes, b", "plan: bucket 0 of 1: float32, 36"),
        ("no client, plan", "plan: bucket 0 of 2: float32", "plan: bucket 0 of 1: float32, 36"),
        ("program", "program: sha256 of its text", "program: sha256 of its text"),
        ("shapes", "batch: batch: float32[4,2]", "batch: batch: float32[5,2]"),
        ("schedule", "schedule: 'ordered'", "schedule: 'fused'"),
    ],
)
def test_p64_j28_another_program_is_told_apart_in_both(part, here, there, agreement):
    for process in agreement:
        text = message(process, part).replace('"', "'").replace("<root>", "batch")
        assert text.startswith("ValueError: expected the same program in every process")
        assert "process 1 differs from process 0" in text
        assert f"process 0 has '{here}" in text
        assert f"process 1 has '{there}" in text


@pytest.mark.parametrize("via", ["shard_map", "pmap"])
def test_a_step_can_ask_once_before_it_runs(via, agreement):
    for process in agreement:
        assert (
            process[f"asked, {via}"]["result"] == 1
        )  # values may differ, and the rest is not asked again
        text = message(process, f"told, {via}")
        assert "at 'train_step', but process 1 differs from process 0" in text
        assert "process 0 has 'program: sha256" in text


def test_p66_init_compares_without_a_collective(agreement):
    for process in agreement:
        text = message(process, "init")
        assert text.startswith("ValueError: expected init arguments with the same structure")
        assert "process 0 has 'params/w: float32[3]', process 1 has 'params/w: float32[4]'" in text


def test_without_a_client_texts_go_through_the_devices(agreement):
    texts = [process["no client"]["result"] for process in agreement]
    assert texts == [["text", "texttext"]] * 2


def test_who_comes_late_is_told_and_so_are_the_others(agreement):
    first, second = (message(process, "late") for process in agreement)
    assert first.startswith(
        "TimeoutError: expected all 2 processes at 'late' within 1 s, but process 1 did not"
    )
    assert "process 1 was last seen past 'here' (first time)" in first
    assert "this one came after others had given up" in second


def sums(*steps):
    """(sum, number) of the values that count, step by step, in one process."""
    return [[float(np.sum(step)), float(len(step))] for step in steps]


def values(process, start, stop):
    return list(range(1000 * process + start, 1000 * process + stop))


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        (
            "fewer batches",
            [
                values(0, 0, 4) + values(1, 0, 4),
                values(0, 4, 8) + values(1, 4, 8),
                values(1, 8, 12),
                values(1, 12, 16),
            ],
        ),
        ("no batch at all", [values(1, 0, 4), values(1, 4, 8)]),
        (
            "partial batches",
            [
                values(0, 0, 4) + values(1, 0, 4),
                values(0, 4, 8) + values(1, 4, 8),
                values(0, 8, 9) + values(1, 8, 10),
            ],
        ),
        ("afterwards", [values(0, 0, 4) + values(1, 0, 4)]),
    ],
)
def test_p47_joined_processes_reduce_what_one_would(part, steps, joining):
    for process in joining:
        assert process[part]["result"] == sums(*steps)


def test_p47_p19_joined_training_equals_one_process_on_all_data(joining):
    # What counts in each step: process 0 has two whole batches and one example, process 1 four and three.
    steps = [
        values(0, 0, 4) + values(1, 0, 4),
        values(0, 4, 8) + values(1, 4, 8),
        values(0, 16, 17) + values(1, 8, 12),
        values(1, 12, 16),
        values(1, 16, 19),
    ]
    w, momentum, expected = 0.0, 0.0, []
    for step in steps:
        x = np.array(step) / 1000
        expected.append(np.mean((w * x - 1) ** 2))
        momentum = 0.9 * momentum + np.mean(2 * x * (w * x - 1))
        w -= 0.1 * momentum
    for process in joining:
        np.testing.assert_allclose(process["training"]["result"], [*expected, w], rtol=1e-5)


@pytest.mark.parametrize(
    ("part", "first", "second"),
    [
        ("wrong shapes", "at step 1 process 0 has '<root>: float32[4]'", "process 1 has '<root>"),
        ("broken iterator", "process 1 .* its iterator raised OSError: disk is gone", "OSError"),
    ],
)
def test_a_join_that_cannot_go_on_ends_in_both(part, first, second, joining):
    pattern = first if "*" in first else re.escape(first)
    assert re.search(pattern, message(joining[0], part))
    assert second in message(joining[1], part)


def test_a_process_that_leaves_the_loop_is_named(joining):
    assert "it left the loop after 1 steps" in message(joining[0], "leaves early")
    assert joining[1]["leaves early"]["result"] is None


@pytest.mark.parametrize("part", ["equal", "split", "key", "trained, shard_map", "trained, pmap"])
def test_equal_replicas_pass(part, verification):
    assert [process[part]["result"] for process in verification] == [None, None]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            "one device",
            r"params .* 1 leaf differs .*: 'v' .*device \d+ \(process 1\) of 4 replicas",
        ),
        ("one process", r"'u' .*devices \d+ \(process 1\), \d+ \(process 1\) of 4 replicas"),
        ("host", r"'host' .*device \d+ \(process 1\) of 2 replicas"),
        ("other trees", r"process 0 has 'host: float32\[4\]' and process 1 has 'w: float32\[4\]'"),
    ],
)
def test_replicas_that_differ_are_named_in_both(part, says, verification):
    first, second = (message(process, part) for process in verification)
    assert first == second
    assert re.search(says, first)


@pytest.mark.parametrize(
    ("part", "at"),
    [
        ("barrier", "'checkpoint'"),
        ("agree", "'agree'"),
        ("join", "\"fdp.data.join 'join' 0\""),
        ("verify", "'check_replicas of state'"),
    ],
)
def test_a_process_that_has_gone_is_named_within_the_time_out(part, at, absent):
    first, second = absent
    assert list(second) == ["both"]
    text = message(first, part)
    assert text.startswith(f"TimeoutError: expected all 2 processes at {at} within 1 s")
    assert "process 1 did not arrive; process 1 was last seen past 'both'" in text
