"""Real models and `fdp.data_parallel` as it comes, compiled for H100s and TPUs: what is hidden, and what it costs."""

from __future__ import annotations

import functools

import pytest

import fdp
from benchmarks import models
from fdp import inspect

LIMIT = 1.05
MIB = 2**20


@functools.cache
def program(target, model, cap=None, plain=False):
    made, mesh = models.BUILDERS[model](), fdp.aot.mesh(target)
    if plain:
        return inspect.load(models.lower_plain(made, mesh).compile())
    caps = {} if cap is None else {"bucket_bytes": cap, "first_bucket_bytes": cap}
    return inspect.load(models.lower(made, mesh, **caps)[0].compile())


def buckets_of(found):
    """All-reduces but that of the loss."""
    return [one for one in inspect.overlap(found) if one.collective.nbytes > 4]


def bytes_of(many):
    return sum(one.collective.nbytes * (one.collective.runs or 1) for one in many)


def hidden(many):
    return [one for one in many if one.flops > 0]


def test_h100_resnet50_every_bucket_that_is_born_before_the_last_convolution_is_hidden():
    made, mesh = models.BUILDERS["resnet50"](), fdp.aot.mesh("h100:8")
    _, plan = models.lower(made, mesh)
    found = buckets_of(program("h100:8", "resnet50"))
    sizes = [bucket.nbytes for bucket in plan.buckets]
    assert [one.collective.nbytes for one in found if one.collective.nbytes in sizes] == sizes
    assert bytes_of(hidden(found)) >= 0.9 * bytes_of(found)
    # What a JAX program has without fdp.
    alone = buckets_of(program("h100:8", "resnet50", plain=True))
    assert bytes_of(hidden(alone)) <= 0.3 * bytes_of(alone)


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_h100_every_bucket_but_the_last_is_hidden_as_it_comes(model):
    *buckets, last = buckets_of(program("h100:8", model))
    assert len(buckets) >= 2
    assert all(one.flops > 0 and one.collective.asynchronous for one in buckets)
    assert last.flops == 0
    # What no matmul can hide waits alone: the first kernel of the MLP, that and the embeddings of the transformer.
    assert bytes_of([last]) <= 0.1 * bytes_of([*buckets, last])


def test_h100_twelve_scanned_layers_are_reduced_inside_the_loop_that_makes_them():
    found = buckets_of(program("h100:8", "gpt scanned"))
    inside = [one for one in found if one.collective.in_loop]
    assert inside
    assert all(one.flops > 0 and one.collective.asynchronous for one in inside)
    layers = 12 * 12 * 512 * 512 * 4
    assert bytes_of(inside) >= 0.9 * layers * 11 / 12  # all layers but the last one to be computed
    assert bytes_of(hidden(found)) >= 0.7 * bytes_of(found)


def test_without_fdp_nothing_of_the_scanned_layers_is_hidden():
    found = buckets_of(program("h100:8", "gpt scanned", plain=True))
    assert not any(one.collective.in_loop for one in found)
    layers = [one for one in found if one.collective.nbytes > 30 * MIB]
    assert layers
    assert not hidden(layers)


@pytest.mark.parametrize("model", ["mlp", "resnet50", "gpt", "gpt scanned", "gpt scanned remat"])
def test_h100_costs_no_more_memory_than_pmean(model):
    found = inspect.report(program("h100:8", model))
    reference = inspect.report(program("h100:8", model, plain=True))
    assert found.temp_bytes <= LIMIT * reference.temp_bytes
    assert found.bytes_accessed <= LIMIT * reference.bytes_accessed


def test_256_chips_run_the_plan():
    made, mesh = models.BUILDERS["mlp"](), fdp.aot.mesh("v5e:16x16")
    lowered, plan = models.lower(made, mesh, bucket_bytes=4 * MIB, first_bucket_bytes=4 * MIB)
    found = inspect.collectives(inspect.load(lowered.compile()))
    assert [one.nbytes for one in found] == [4, *(bucket.nbytes for bucket in plan.buckets)]
    assert {one.group_size for one in found} == {256}
    assert len(plan.buckets) >= 4
