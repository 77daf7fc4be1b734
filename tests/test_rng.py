"""Random keys: one for each replica and microbatch by default, one for all on request, and what that promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import fdp
from tests.models import relative_difference

KEY = jax.random.key(7)
EXAMPLES = 16
BATCH = {
    "id": np.arange(100, 100 + EXAMPLES, dtype=np.int32),
    "x": np.random.default_rng(0).normal(size=(EXAMPLES, 32)).astype(np.float32),
}


def loss_fn(params, batch, *, rng):
    """Dropout whose mask depends on the step's key and the example, not on where the example is."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, batch["id"])
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (32,)))(keys)
    weights = 2 ** jnp.arange(32, dtype=jnp.uint32)
    code = jnp.sum(jnp.where(kept, weights, 0), 1, dtype=jnp.uint32) % 1009
    return jnp.mean((jnp.where(kept, batch["x"], 0) @ params) ** 2), jnp.sum(code)


def run(replicas, microbatches, via, **options):
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("data",))
    trainer = fdp.data_parallel(
        loss_fn,
        optax.sgd(0.1),
        mesh=mesh,
        via=via,
        num_microbatches=microbatches,
        has_rng=True,
        has_aux=True,
        **options,
    )
    state = trainer.init(jnp.ones(32), rng=KEY)
    codes = []
    for _ in range(2):
        state, info = trainer.train_step(state, BATCH)
        codes.append(int(info.aux))
    return state.params, codes


def one_device():
    params, codes = jnp.ones(32), []
    for step in range(2):
        key = jax.random.fold_in(jax.random.fold_in(KEY, step), 0)
        (_, code), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, BATCH, rng=key)
        params = params - 0.1 * grads
        codes.append(int(code))
    return params, codes


@pytest.mark.parametrize(
    ("replicas", "microbatches", "via"),
    [(1, 1, "shard_map"), (2, 4, "pmap"), (4, 1, "shard_map"), (8, 2, "shard_map")],
)
def test_p71_a_shared_key_by_example_is_the_same_on_any_number_of_replicas(
    replicas, microbatches, via
):
    params, codes = run(replicas, microbatches, via, rng_per_replica=False)
    expected, expected_codes = one_device()
    assert codes == expected_codes  # the same masks, bit for bit
    assert len(set(codes)) == 2  # another key each step
    assert relative_difference(params, expected) <= 1e-6


def test_j16_keys_of_replicas_differ_and_so_depend_on_their_number():
    _, codes = run(8, 1, "shard_map")
    assert codes != one_device()[1]
    again = run(8, 1, "shard_map")[1]
    assert codes == again  # the same number of replicas: the same numbers


@pytest.mark.parametrize("shared", [True, False])
def test_who_draws_the_same(shared):
    def loss(params, batch, *, rng):
        return jnp.sum(params) * 0 + jnp.mean(batch), jax.random.bits(rng) >> 8

    trainer = fdp.data_parallel(
        loss,
        optax.sgd(0.1),
        has_rng=True,
        has_aux=True,
        num_microbatches=2,
        rng_per_replica=not shared,
    )
    state = trainer.init(jnp.ones(2), rng=KEY)
    # Counts of a replica's microbatches are added up, replicas are apart while nothing is reduced.
    state, first = trainer.no_sync_step(state, np.ones(16, np.float32))
    state, second = trainer.no_sync_step(state, np.ones(16, np.float32))
    assert len(np.unique(first.aux)) == (1 if shared else 8)
    assert not np.intersect1d(first.aux, second.aux).size  # a held-back step is a step
    key = jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)
    one = int(jax.random.bits(key) >> 8)
    assert (int(first.aux[0]) == 2 * one) == shared
