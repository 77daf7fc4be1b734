"""Which examples a process reads: every example once, whatever the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp.data import epoch_indices

sizes = st.integers(1, 200)
counts = st.integers(1, 9)
batch_sizes = st.none() | st.integers(1, 7)


def shares(size, count, **options):
    return [epoch_indices(size, process=p, process_count=count, **options) for p in range(count)]


@given(sizes, counts, batch_sizes, st.integers(0, 5), st.booleans())
def test_every_example_exactly_once_an_epoch(size, count, batch_size, epoch, shuffle):
    parts = shares(size, count, epoch=epoch, batch_size=batch_size, shuffle=shuffle)
    read = np.concatenate([part.indices[part.mask] for part in parts])
    assert sorted(read) == list(range(size))  # so processes are disjoint too
    assert len({part.indices.shape for part in parts}) == 1  # equally many steps everywhere
    assert all(part.indices.min() >= 0 and part.indices.max() < size for part in parts)
    unit = count * (batch_size or 1)
    assert sum((~part.mask).sum() for part in parts) == -size % unit


@given(sizes, counts, batch_sizes, st.integers(0, 5))
def test_drop_last_reads_no_example_twice_and_pads_nothing(size, count, batch_size, epoch):
    unit = count * (batch_size or 1)
    if size < unit:
        with pytest.raises(ValueError, match=f"= {unit} examples .* got {size}: pass drop_last"):
            shares(size, count, epoch=epoch, batch_size=batch_size, drop_last=True)
        return
    parts = shares(size, count, epoch=epoch, batch_size=batch_size, drop_last=True)
    read = np.concatenate([part.indices.reshape(-1) for part in parts])
    assert all(part.mask.all() for part in parts)
    assert len(read) == len(set(read)) == size // unit * unit
    # The same order, cut off.
    kept = [part.indices[: size // unit] for part in shares(size, count, epoch=epoch)]
    if batch_size is None:
        assert all((part.indices == k).all() for part, k in zip(parts, kept, strict=True))


@given(st.integers(20, 200), counts, st.integers(0, 1000), st.integers(0, 1000))
def test_epochs_and_seeds_differ_and_the_same_repeats(size, count, epoch, seed):
    def order(epoch, seed):
        parts = shares(size, count, epoch=epoch, seed=seed)
        return [part.indices.tolist() for part in parts]

    assert order(epoch, seed) == order(epoch, seed)
    assert order(epoch, seed) != order(epoch + 1, seed)
    assert order(epoch, seed) != order(epoch, seed + 1)


@given(sizes, st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_step_reads_the_same_examples_on_any_number_of_processes(size, count):
    alone = epoch_indices(size, epoch=3, process=0, process_count=1, batch_size=12)
    parts = shares(size, count, epoch=3, batch_size=12 // count)
    joined = np.concatenate([part.indices for part in parts], axis=1)
    np.testing.assert_array_equal(joined, alone.indices)
    masks = np.concatenate([part.mask for part in parts], axis=1)
    np.testing.assert_array_equal(masks, alone.mask)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**63, 7)])
def test_the_order_is_recorded(seed, epoch):
    # Written down once: another NumPy, another machine or another fdp must read the same data.
    part = epoch_indices(12, epoch=epoch, seed=seed, process=0, process_count=1)
    assert part.indices.tolist() == RECORDED[seed, epoch]


def test_no_two_seeds_and_epochs_have_one_order():
    numbers = [0, 1, 2, 2**32 - 1]
    seeds = [*numbers, *(low + 2**32 * high for low in numbers for high in numbers[1:])]
    orders = [
        tuple(epoch_indices(30, epoch=e, seed=s, process=0, process_count=1).indices)
        for s in seeds
        for e in numbers
    ]
    assert len(set(orders)) == len(orders) == 64


RECORDED = {
    (0, 0): [11, 3, 2, 1, 8, 6, 0, 7, 4, 10, 5, 9],
    (2**63, 7): [6, 5, 3, 0, 9, 10, 4, 11, 7, 2, 8, 1],
}


def test_the_order_is_as_good_as_random():
    # Every example comes first equally often: chi-squared of 2000 epochs over 10 places.
    first = [epoch_indices(10, epoch=e, process=0, process_count=1).indices[0] for e in range(2000)]
    counts = np.bincount(first, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # 9 degrees of freedom, p = 0.001


def test_without_shuffle_it_is_strided_as_torch_does():
    parts = shares(6, 2, epoch=5, shuffle=False)
    assert [part.indices.tolist() for part in parts] == [[0, 2, 4], [1, 3, 5]]


def test_p48_the_epoch_cannot_be_forgotten():
    with pytest.raises(TypeError, match="epoch"):
        epoch_indices(10, process=0, process_count=1)
