"""The plan of `fdp.data_parallel` in programs compiled for H100s and TPUs: counts, order, overlap, cost."""

from __future__ import annotations

import functools

import jax
import pytest

import fdp
from benchmarks import models

TARGETS = ("h100:8", "v5e:2x4")
LAYERS, WIDTH = 20, 512
KERNEL = WIDTH * WIDTH * 4


@functools.cache
def lowered(target, model, cap):
    """(lowered step, plan) of a model by name, for a target, with a bucket cap."""
    made = {
        "mlp": lambda: models.mlp(LAYERS, WIDTH),
        "scanned": lambda: models.gpt(scan=True, layers=6, width=512, words=256),
    }[model]()
    mesh = fdp.aot.mesh(target)
    trainer = fdp.data_parallel(
        made.loss, made.optimizer, mesh=mesh, bucket_bytes=cap, first_bucket_bytes=cap
    )
    state = trainer.init(made.params)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] * mesh.size, *x.shape[1:]), x.dtype), made.batch
    )
    return trainer.lower(state, batch), trainer.plan(state, batch)


@functools.cache
def compiled(target, model, cap):
    return fdp.inspect.load(lowered(target, model, cap)[0].compile())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("buckets", [1, 2, 4, 20])
def test_as_many_all_reduces_as_buckets_in_plan_order(target, buckets):
    cap = KERNEL * LAYERS // buckets
    _, plan = lowered(target, "mlp", cap)
    assert len(plan.buckets) == buckets
    found = fdp.inspect.collectives(compiled(target, "mlp", cap))
    assert [one.kind for one in found] == ["all-reduce"] * (buckets + 1)
    # The scalars first, which exist before the backward, then the buckets.
    assert [one.nbytes for one in found] == [4, *(bucket.nbytes for bucket in plan.buckets)]


def test_h100_every_bucket_but_the_last_has_matmuls_beside_it():
    overlaps = fdp.inspect.overlap(compiled("h100:8", "mlp", KERNEL * LAYERS // 4))
    _, *buckets, last = overlaps
    assert all(one.flops > 0 for one in buckets)
    assert last.flops == 0


def test_h100_scanned_layers_are_reduced_beside_the_loop_body():
    program = compiled("h100:8", "scanned", 25 * 2**20)
    inside = [one for one in fdp.inspect.overlap(program) if one.collective.in_loop]
    assert inside
    assert all(one.collective.asynchronous and one.flops > 0 for one in inside)
