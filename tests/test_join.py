"""Iterators of different length: nobody waits for ever, nobody's data is lost, nobody's is counted twice."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fake_store import Processes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdp.data import join


def batches(process, count, examples=2, width=3):
    return [np.full((examples, width), 100.0 * process + k, np.float32) for k in range(count)]


@pytest.fixture
def processes(monkeypatch):
    return lambda count: Processes(monkeypatch, count)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 4))
def test_all_go_on_until_all_are_out_and_no_batch_is_lost(processes, lengths, lookahead):
    like = jax.ShapeDtypeStruct((2, 3), np.float32)

    def run(process):
        given = iter(batches(process, lengths[process]))
        return list(join(given, like=like, lookahead=lookahead, timeout=10))

    taken = processes(len(lengths)).everywhere(run)
    for process, pairs in enumerate(taken):
        assert len(pairs) == max(lengths)  # the same number of steps everywhere
        real = [batch for batch, mask in pairs if mask.all()]
        given = batches(process, lengths[process])
        assert [x.tolist() for x in real] == [x.tolist() for x in given]
        # Those that count come first, and what follows counts nothing and has their shape.
        assert [mask.sum() for _, mask in pairs[len(real) :]] == [0] * (len(pairs) - len(real))
        assert all(batch.shape == (2, 3) and np.isfinite(batch).all() for batch, _ in pairs)


def test_one_process_passes_through():
    given = batches(0, 3)
    pairs = list(join(iter(given), timeout=1))
    assert [batch is x for (batch, _), x in zip(pairs, given, strict=True)] == [True] * 3
    assert [mask.tolist() for _, mask in pairs] == [[1.0, 1.0]] * 3


def test_the_last_batch_is_padded(processes):
    def run(process):
        given = [*batches(process, 2 - process), *batches(process, 1, examples=1)]
        return [mask.tolist() for _, mask in join(given, size=2, timeout=10)]

    assert processes(2).everywhere(run) == [[[1, 1], [1, 1], [1, 0]], [[1, 1], [1, 0], [0, 0]]]


def test_epochs_and_breaks_do_not_disturb_each_other(processes):
    def run(process):
        seen = []
        kept = []  # a generator that is not closed when the next starts
        for epoch in range(3):
            joined = join(batches(process, 3 + process), timeout=10)
            kept.append(joined if (process, epoch) == (0, 1) else None)
            for batch, _ in joined:
                seen.append(batch[0, 0])
                if epoch < 2 and len(seen) % 2 == 0:
                    break
        return len(seen)

    assert processes(2).everywhere(run) == [2 + 2 + 4] * 2


def test_batches_of_other_shapes_are_refused_everywhere(processes):
    def run(process):
        given = [*batches(process, 1), *batches(process, 1, examples=2 + process)]
        return list(join(given, timeout=10))

    for error in processes(3).everywhere(run):
        assert isinstance(error, ValueError)
        text = str(error)
        assert "at step 1 process 0 has '<root>: float32[2,3]'" in text
        assert "process 1 has '<root>: float32[3,3]': pad the batches" in text


def test_a_process_without_any_batch_needs_an_example(processes):
    for error in processes(2).everywhere(lambda p: list(join(batches(p, p), timeout=10))):
        assert isinstance(error, ValueError)
        assert "process 0 had no batch at all: pass fdp.data.join(batches, like=" in str(error)


def test_an_example_of_another_shape_is_refused(processes):
    like = np.ones((2, 4), np.float32)
    for error in processes(2).everywhere(
        lambda p: list(join(batches(p, p), like=like, timeout=10))
    ):
        assert "process 0 has '<root>: float32[2,4]'" in str(error)


def test_an_iterator_that_raises_stops_the_others(processes):
    def broken():
        yield from batches(1, 2)
        raise OSError("disk is gone")

    first, second = processes(2).run(
        lambda: list(join(batches(0, 5), timeout=10)), lambda: list(join(broken(), timeout=10))
    )
    assert isinstance(second, OSError)  # its own error, where it happened
    assert isinstance(first, RuntimeError)
    assert "process 1 to go on" in str(first)
    assert "its iterator raised OSError: disk is gone" in str(first)


@pytest.mark.parametrize(
    ("error", "says"),
    [(SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_process_that_is_told_to_exit_stops_the_others(processes, error, says):
    def ending():
        yield from batches(1, 2)
        raise error

    def exits():
        with pytest.raises(type(error)):
            list(join(ending(), timeout=10))

    first, second = processes(2).run(lambda: list(join(batches(0, 5), timeout=10)), exits)
    assert second is None
    assert isinstance(first, RuntimeError)
    assert f"but its iterator raised {says}. Let every" in str(first)


def test_a_process_that_leaves_the_loop_stops_the_others(processes):
    def leave():
        for step, _ in enumerate(join(batches(1, 5), timeout=10)):
            if step == 1:
                break

    first, second = processes(2).run(lambda: list(join(batches(0, 5), timeout=10)), leave)
    assert second is None
    assert isinstance(first, RuntimeError)
    assert "it left the loop after 2 steps" in str(first)


def test_a_process_that_does_not_come_is_named(processes):
    first, _ = processes(2).run(lambda: list(join(batches(0, 1), timeout=0.2)), lambda: None)
    assert isinstance(first, TimeoutError)
    assert "expected all 2 processes at \"fdp.data.join 'join' 0\" within 0.2 s" in str(first)
    assert "process 1 did not arrive" in str(first)
