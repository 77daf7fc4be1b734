"""Processes that run different programs are told so before they wait for each other in vain."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_store import Processes

import fdp
from fdp import compat, exchange
from fdp.agree import fact_lines, once

PARAMS = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(3)}


@pytest.fixture
def processes(monkeypatch):
    return lambda count: Processes(monkeypatch, count)


def facts(**other):
    usual = {
        "plan": fdp.plan_buckets(PARAMS, bucket_bytes=1),
        "schedule": fdp.schedules.ordered(),
        "hook": fdp.hooks.all_reduce(),
        "pack": fdp.pack.flat(),
        "params": PARAMS,
        "microbatches": 2,
    }
    return {**usual, **other}


def test_the_same_facts_agree(processes):
    assert processes(3).everywhere(lambda p: fdp.agree(facts(), timeout=10)) == [None] * 3


def lowered(scale):
    return jax.jit(lambda x: x * scale).lower(jnp.ones(3))


@pytest.mark.parametrize(
    ("name", "other", "here", "there"),
    [
        (
            "plan",
            fdp.plan_buckets(PARAMS),
            "plan: bucket 0 of 2: float32, 12 bytes, b",
            "plan: bucket 0 of 1: float32, 36 bytes, b, a",
        ),
        ("schedule", fdp.schedules.fused(), "schedule: ordered", "schedule: fused"),
        ("pack", fdp.pack.leaves(), "pack: flat", "pack: leaves"),
        ("microbatches", 4, "microbatches: 2", "microbatches: 4"),
        (
            "params",
            {**PARAMS, "b": jnp.zeros(4)},
            "params: b: float32[3]",
            "params: b: float32[4]",
        ),
        ("extra", "x", f"jax: '{jax.__version__}'", "extra: 'x'"),
        ("program", lowered(3.0), "program: sha256", "program: sha256"),
    ],
)
def test_the_first_difference_is_named_in_every_process(processes, name, other, here, there):
    shared = {"program": lowered(2.0)} if name == "program" else {}

    def run(process):
        mine = facts(**shared) if process != 1 else facts(**{name: other})
        return fdp.agree(mine, timeout=10, name="before the first step")

    for error in processes(3).everywhere(run):
        assert isinstance(error, ValueError)
        text = str(error).replace('"', "'")
        assert "at 'before the first step', but process 1 differs from process 0" in text
        assert f"process 0 has '{here}" in text
        assert f"process 1 has '{there}" in text
        assert "Run the same script with the same arguments" in text


def test_equal_programs_agree(processes):
    programs = [lowered(2.0), lowered(2.0)]
    run = processes(2).everywhere
    assert run(lambda p: fdp.agree({"program": programs[p]}, timeout=10)) == [None] * 2


def test_versions_and_settings_are_always_compared():
    lines = fact_lines({})
    assert f"jax: {jax.__version__!r}" in lines
    assert f"numpy: {np.__version__!r}" in lines
    with jax.enable_x64(not jax.config.jax_enable_x64):
        other = fact_lines({})
    differing = [(a, b) for a, b in zip(lines, other, strict=True) if a != b]
    assert differing == [("jax_enable_x64: False", "jax_enable_x64: True")]


def test_several_that_differ_are_all_named(processes):
    for error in processes(4).everywhere(lambda p: fdp.agree({"seed": p % 3}, timeout=10)):
        assert "processes 1 and 2 differ from process 0" in str(error)


def test_a_barrier_names_who_is_missing_and_where_they_were(processes):
    def late(process):
        fdp.barrier("data", timeout=10)
        if process == 2:
            return None
        return fdp.barrier("checkpoint", timeout=0.3)

    first, second, third = processes(3).everywhere(late)
    assert third is None
    for error in (first, second):
        assert isinstance(error, TimeoutError)
        text = str(error)
        assert "expected all 3 processes at 'checkpoint' within 0.3 s" in text
        assert "process 2 did not arrive; process 2 was last seen past 'data' (first time)" in text


def test_who_comes_after_others_gave_up_is_told(processes):
    def late(process):
        time.sleep(0.6 * process)
        return fdp.barrier("checkpoint", timeout=0.2)

    first, second = processes(2).everywhere(late)
    assert "process 1 did not arrive; process 1 was last seen nowhere in fdp yet" in str(first)
    assert "but this one came after others had given up" in str(second)


def test_a_hundred_barriers_leave_nothing_behind(processes):
    group = processes(2)
    group.everywhere(lambda p: [fdp.barrier(timeout=10) for _ in range(100)])
    assert len(group.store.values) <= 2 * 3 + 2  # last round, verdict, where each was last seen


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(compat, "coordination", lambda: (None, 0, 1))
    fdp.agree(facts(), timeout=1)
    fdp.barrier(timeout=1)
    monkeypatch.setattr(compat, "coordination", lambda: None)
    fdp.agree(facts(), timeout=1)
    assert exchange.gather("x", "text", timeout=1) == ["text"]


def test_once_asks_again_only_for_other_shapes(processes):
    made = []

    def run(process):
        ask = once(timeout=10)
        for size in (2, 2, 3, 2):
            ask("train_step", {"x": np.zeros(size)}, lambda: made.append(process) or {})
        return ask

    group = processes(2)
    group.everywhere(run)
    assert sorted(made) == [0, 0, 1, 1]

    def other(process):
        once(timeout=10)("train_step", {"x": np.zeros(2 + process)}, dict)

    for error in processes(2).everywhere(other):
        assert "process 0 has 'arguments: x: float64[2]'" in str(error)


def test_the_list_of_processes_in_a_message_stays_short():
    assert exchange.these_processes([3]) == "process 3"
    assert exchange.these_processes([0, 2]) == "processes 0 and 2"
    assert exchange.these_processes(range(9)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"


def test_a_client_that_jax_no_longer_has_is_no_error(monkeypatch):
    from jax._src import distributed

    monkeypatch.delattr(distributed, "global_state")
    assert compat.coordination() is None
