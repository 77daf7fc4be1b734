"""Replicas that differ are found, whatever differs and wherever they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fdp
from fdp.verify import bit_hash, diverged_replicas


def said_to_be_replicated(values, mesh):
    """An array that JAX takes for replicated, with values of their own on each device."""
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_single_device_arrays(values[0].shape, everywhere, parts)


def one_differs(value, other, mesh, where=3):
    values = [other if k == where else value for k in range(mesh.devices.size)]
    return said_to_be_replicated(values, mesh)


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
SWAPPED = VALUES[:, [0, 2, 1]]
NAN, OTHER_NAN = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00001, 0x7FC00002))
CASES = {
    "last bit": (VALUES, np.nextafter(VALUES, np.float32(9))),
    "swapped elements": (VALUES, SWAPPED),
    "sign of zero": (np.zeros(2, np.float32), -np.zeros(2, np.float32)),
    "NaN payload": (NAN, OTHER_NAN),
    "scalar": (np.float32(1), np.float32(2)),
    "int8": (np.zeros(5, np.int8), np.array([0, 0, 0, 0, 1], np.int8)),
    "bool": (np.zeros(5, np.bool_), np.array([0, 0, 0, 0, 1], np.bool_)),
    "bfloat16": (np.ones(3, jnp.bfloat16), np.ones(3, jnp.bfloat16) * 2),
    "float8": (np.ones(3, jnp.float8_e4m3fn), np.zeros(3, jnp.float8_e4m3fn)),
    "complex": (np.ones(3, np.complex64), np.ones(3, np.complex64) + 1e-6j),
}


def test_every_difference_is_found_and_named(mesh):
    tree = {name: one_differs(a, b, mesh) for name, (a, b) in CASES.items()}
    equal = {f"{name}, equal": one_differs(a, a, mesh) for name, (a, _) in CASES.items()}
    empty = {"empty": jnp.zeros((0, 3)), "key": jax.random.key(0), "host": VALUES, "number": 3}
    found = diverged_replicas({**tree, **equal, **empty})
    assert sorted(leaf.path for leaf in found) == sorted(CASES)
    third = mesh.devices.flat[3].id
    assert {leaf.devices for leaf in found} == {((third, 0),)}
    assert {leaf.replicas for leaf in found} == {8}


def test_the_message_names_leaf_device_and_process(mesh):
    layer = {"kernel": one_differs(VALUES, SWAPPED, mesh, where=5), "bias": jnp.ones(3)}
    with pytest.raises(ValueError, match="equal bit for bit") as caught:
        fdp.check_replicas({"layer": layer}, "params")
    device = mesh.devices.flat[5].id
    text = str(caught.value)
    assert "expected replicas of params" in text
    assert "1 leaf differs from the others: 'layer/kernel' (float32[2,3])" in text
    assert f"on device {device} (process 0) of 8 replicas" in text
    assert "Restore the last checkpoint" in text


def test_only_a_few_leaves_are_named(mesh):
    leaf = one_differs(VALUES, SWAPPED, mesh)
    with pytest.raises(ValueError, match=r"7 leaves differ .* and 2 more leaves"):
        fdp.check_replicas([leaf] * 7)


def test_shards_are_compared_with_their_own_replicas_only():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharded = NamedSharding(mesh, PartitionSpec(None, "model"))
    halves = [VALUES[:, :2], VALUES[:, 1:]]  # what devices hold differs along "model", as it must

    def array(changed):
        parts = [
            jax.device_put(halves[k % 2] + (k in changed), d)
            for k, d in enumerate(mesh.devices.flat)
        ]
        return jax.make_array_from_single_device_arrays((2, 4), sharded, parts)

    assert diverged_replicas([array(())]) == ()
    (found,) = diverged_replicas([array((2, 5))])
    assert [device for device, _ in found.devices] == [mesh.devices.flat[k].id for k in (2, 5)]
    assert found.replicas == 4
    # What is split over all devices has no replicas.
    split = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec(("data", "model"))))
    assert diverged_replicas({"split": split}) == ()


def test_p68_a_trained_state_passes_and_a_missing_reduction_is_found(mesh):
    trainer = fdp.data_parallel(lambda w, x: jnp.mean((x @ w - 1) ** 2), optax.adam(0.1), mesh=mesh)
    state = trainer.init(np.ones(3, np.float32))
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    state, _ = trainer.train_step(state, x)
    fdp.check_replicas(state)

    def forgets_to_reduce(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)

    mapped = jax.shard_map(
        forgets_to_reduce,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    drifted = jax.jit(mapped)(state.params, x)
    (found,) = diverged_replicas(state._replace(params=drifted))
    assert found.path == "params"
    # All eight are different: the largest group is one of them.
    assert len(found.devices) == 7


words = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30)


@given(words, st.data())
def test_a_change_of_any_bit_changes_the_hash(values, data):
    place = data.draw(st.integers(0, 31))
    bit = data.draw(st.integers(0, 31))
    x = np.zeros(32, np.uint32)
    x[: len(values)] = values
    y = x.copy()
    y[place] ^= np.uint32(1 << bit)
    hashed = jitted(x), jitted(y)
    assert hashed[0].dtype == np.uint32
    assert (hashed[0] != hashed[1]).any()
    np.testing.assert_array_equal(jitted(x), hashed[0])


jitted = jax.jit(bit_hash)


def test_hashes_of_many_similar_arrays_do_not_collide():
    x = np.zeros((2000, 8), np.uint32)
    x[np.arange(2000), np.arange(2000) % 8] = np.arange(2000) // 8 + 1
    hashes = np.asarray(jax.jit(jax.vmap(bit_hash))(x))
    for half in (hashes[:, 0], hashes[:, 1]):
        assert len(np.unique(half)) == 2000


def test_the_hash_is_what_plain_python_computes():
    def mix(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    x = np.array([1.0, -2.5, np.inf], np.float32)
    expected = [
        sum(mix(int(word) ^ mix((i + salt) % 2**32)) for i, word in enumerate(x.view(np.uint32)))
        % 2**32
        for salt in (0x9E3779B9, 0x7F4A7C15)
    ]
    assert jitted(x).tolist() == expected
