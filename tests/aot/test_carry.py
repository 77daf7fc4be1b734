"""Buckets that are carried over, in programs compiled for H100s and TPUs."""

from __future__ import annotations

import jax
import pytest

import fdp
from benchmarks import models
from fdp import carry

LAYERS, WIDTH = 20, 512
CAP = WIDTH * WIDTH * 4
CARRIED = 2  # of 20: a forward pass of layers as small as these hides no more on H100s


@pytest.fixture(scope="module", params=["h100:8", "v5e:2x4"])
def steady(request):
    """(name of the target, program of a step that follows another, plan)."""
    made, mesh = models.mlp(LAYERS, WIDTH), fdp.aot.mesh(request.param)
    trainer = fdp.data_parallel(
        made.loss,
        made.optimizer,
        mesh=mesh,
        bucket_bytes=CAP,
        first_bucket_bytes=CAP,
        carry_over=CARRIED,
    )
    state = trainer.init(made.params)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] * mesh.size, *x.shape[1:]), x.dtype), made.batch
    )
    plan = trainer.plan(state, batch)
    state, _ = jax.eval_shape(trainer.train_step, state, batch)
    return request.param, fdp.inspect.load(trainer.lower(state, batch).compile()), plan


def test_they_cross_first_then_the_others_in_plan_order(steady):
    _, program, plan = steady
    carried = carry.choose(plan, CARRIED)
    others = [bucket for bucket in plan.buckets if bucket not in carried]
    found = fdp.inspect.collectives(program)
    assert [one.kind for one in found] == ["all-reduce"] * (len(plan.buckets) + 1)
    assert [one.nbytes for one in found] == [
        *(bucket.nbytes for bucket in carried),
        4,
        *(bucket.nbytes for bucket in others),
    ]


def test_matmuls_run_beside_them(steady):
    target, program, _ = steady
    overlaps = fdp.inspect.overlap(program)
    assert all(one.flops > 0 for one in overlaps[:CARRIED])
    if target == "h100:8":
        assert all(one.flops > 0 for one in overlaps[CARRIED + 1 : -1])
