"""The report, and which reduction carries which bucket."""

import dataclasses

import inspect_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inspect_recorded import CPU, GPU, LAYER_BYTES, LAYER_FLOPS, TARGETS, TPU, recorded, text

from fdp import plan_buckets
from fdp.inspect import Collective, report
from fdp.inspect.matching import match_buckets

LAYERS, WIDTH = inspect_programs.LAYERS, inspect_programs.WIDTH
ALL = LAYERS * LAYER_BYTES


def shapes(*dims):
    return [jax.ShapeDtypeStruct(d, jnp.float32) for d in dims]


# One bucket a layer, for the unrolled programs; one stacked leaf, for the scanned ones.
UNROLLED = plan_buckets(shapes(*[(WIDTH, WIDTH)] * LAYERS), bucket_bytes=LAYER_BYTES)
STACKED = plan_buckets(shapes((LAYERS, WIDTH, WIDTH)))


@pytest.mark.parametrize("target", TARGETS)
def test_merged_buckets_are_named(target):
    found = report(recorded(target, "naive"), UNROLLED)
    assert found.merged == ((0, 1, 2, 3),)
    assert not found.all_alone
    assert [m.verdict for m in found.buckets] == ["merged"] * LAYERS
    assert found.buckets[1].merged_with == (0, 2, 3)
    assert "merged by the compiler: buckets 0, 1, 2, 3" in str(found)


@pytest.mark.parametrize("target", TARGETS)
def test_buckets_that_stand_alone(target):
    found = report(recorded(target, "chained"), UNROLLED)
    assert found.all_alone
    assert [m.collectives for m in found.buckets] == [(0,), (1,), (2,), (3,)]
    assert found.merged == ()


@pytest.mark.parametrize("target", TARGETS)
def test_a_bucket_in_a_loop_and_its_remainder_behind(target):
    found = report(recorded(target, "scanned_delayed"), STACKED)
    (match,) = found.buckets
    assert (match.verdict, match.collectives) == ("in loop", (0, 1))
    assert found.all_alone
    after = report(recorded(target, "scanned"), STACKED)
    assert [m.verdict for m in after.buckets] == ["alone"]


def test_totals():
    found = report(recorded(GPU, "scanned_delayed"), STACKED)
    # The first iteration of a delayed reduction sends zeros, so it is one layer more.
    assert found.payload_bytes == ALL + LAYER_BYTES
    assert found.wire_bytes == found.payload_bytes * 2 * 7 // 8
    assert found.matmul_flops == 12 * LAYER_FLOPS
    assert (found.platform, found.device_count) == ("gpu", 8)


def test_the_table():
    found = report(text(GPU, "chained"), UNROLLED)
    lines = str(found).splitlines()
    assert lines[:7] == [
        "program for    8 x gpu",
        "collectives    4, 16,777,216 bytes a step",
        "sent by ring   29,360,128 bytes a step and device",
        "matmuls        5.91 GFLOP a step and device",
        "temp memory    not known from text",
        "peak memory    not known from text",
        "bytes accessed 196,083,730 (text)",
    ]
    assert lines[8:10] == [
        "bucket      bytes  dtype    leaves  in the program  can hide it",
        "     0  4,194,304  float32       1  alone (#0)       1.07 GFLOP",
    ]
    assert lines[13] == ""
    assert lines[14:16] == [
        "#  collective      bytes  dtype    arrays  devices  runs  in            can hide it",
        "0  all-reduce  4,194,304  float32       1        8     1  entry  async   1.07 GFLOP",
    ]
    assert lines[-1] == "  main.6_spmd: GfGfGfGfG[GfG]f[GfG]f[GfG]f[f]f"


def test_the_loop_speaks_for_a_bucket_in_a_loop():
    printed = str(report(recorded(TPU, "scanned_delayed"), STACKED))
    assert "in loop (#0, #1)   1.07 GFLOP" in printed
    assert "loop   async" in printed


def test_the_basis_is_said():
    assert "(CPU text has no run-time order)" in str(report(recorded(CPU, "chained")))
    assert "between its start and its end" in str(report(recorded(TPU, "chained")))


def test_without_communication(mesh):
    found = report(inspect_programs.lower("local", mesh), UNROLLED)
    assert [m.verdict for m in found.buckets] == ["not found"] * LAYERS
    assert not found.all_alone
    assert "no collectives" in str(found)
    assert found.wire_bytes == 0


def test_a_long_schedule_is_cut_in_print_only():
    found = report(recorded(GPU, "naive"))
    long = dataclasses.replace(found, schedules=(("main", "G" * 200),))
    assert f"main: {'G' * 160}... (200 letters)" in str(long)
    assert long.schedules[0][1] == "G" * 200


def test_memory_comes_with_a_compiled_function(mesh):
    compiled = inspect_programs.lower("chained", mesh).compile()
    found = report(compiled, UNROLLED)
    assert found.temp_bytes == compiled.memory_analysis().temp_size_in_bytes
    assert found.peak_bytes > 0
    assert found.bytes_accessed == compiled.cost_analysis()["bytes accessed"]
    assert found.bytes_accessed_source == "XLA"
    assert f"{found.bytes_accessed:,} (XLA), {found.bytes_in_text:,} (text)" in str(found)
    assert found.bytes_in_text == report(compiled.as_text()).bytes_accessed
    assert "8 x cpu" in str(found)


def test_what_can_be_lowered_is_compiled():
    step = jax.jit(lambda x, *, scale: (x @ x) * scale)
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    assert report(step, None, x, scale=2.0).matmul_flops == 2 * 64**3
    assert report(step.lower(x, scale=2.0)).matmul_flops == 2 * 64**3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (jax.jit(lambda x: x),),
            r"arguments to lower \w+ with, got none: call report\(trainer, plan",
        ),
        ((jax.jit(lambda x: x), np.ones(3)), "plan to be a fdp.BucketPlan or None, got ndarray"),
        ((text(GPU, "naive"), None, 1, 2), "no further arguments with a str, got 2"),
        ((3,), "expected a jax.stages.Compiled or the text of one"),
    ],
)
def test_wrong_arguments(args, message):
    with pytest.raises(TypeError, match=message):
        report(*args)


def sent(*operands, in_loop=False, runs=1, kind="all-reduce"):
    nbytes = sum(4 * int(np.prod(o)) for o in operands)
    return Collective(
        "r", kind, "add", "float32", nbytes, tuple(operands), 8, "main", in_loop, runs, 0, 0, False
    )


def verdicts(plan, *collectives):
    return [(m.verdict, m.collectives, m.merged_with) for m in match_buckets(plan, collectives)]


TWO = plan_buckets(shapes((100, 30), (7,), (50, 10)), bucket_bytes=4 * 510, order=(2, 1, 0))


def test_leaves_flat_and_padded_buffers_are_found():
    assert [b.nbytes for b in TWO.buckets] == [4 * 507, 4 * 3000]
    alone = [("alone", (0,), ()), ("alone", (1,), ())]
    assert verdicts(TWO, sent((50, 10), (7,)), sent((100, 30))) == alone
    assert verdicts(TWO, sent((7,), (500,)), sent((3000,))) == alone
    assert verdicts(TWO, sent((508,)), sent((3072,))) == alone
    # The mean of the loss rides along, or goes alone.
    assert verdicts(TWO, sent((), (500,), (7,)), sent((3000,))) == alone
    moved = verdicts(TWO, sent(()), sent((507,)), sent((3000,)))
    assert moved == [("alone", (1,), ()), ("alone", (2,), ())]


def test_reductions_in_another_order_are_found():
    assert verdicts(TWO, sent((3000,)), sent((507,))) == [("alone", (1,), ()), ("alone", (0,), ())]


def test_merged_flat_buffers_and_leaves_are_found():
    merged = [("merged", (0,), (1,)), ("merged", (0,), (0,))]
    assert verdicts(TWO, sent((508,), (3001,))) == merged
    assert verdicts(TWO, sent((500,), (7,), (3000,))) == merged
    assert verdicts(TWO, sent((3507,))) == merged
    # A bucket that is smaller than what padding may be is not taken for padding.
    small = plan_buckets(shapes((2000,), (100,), (2000,)), bucket_bytes=1)
    group = [("merged", (0,), (1, 2)), ("merged", (0,), (0, 2)), ("merged", (0,), (0, 1))]
    assert verdicts(small, sent((4100,))) == group


def test_a_bucket_in_several_reductions_is_split():
    assert verdicts(TWO, sent((500,)), sent((7,)), sent((3000,))) == [
        ("split", (0, 1), ()),
        ("alone", (2,), ()),
    ]


def test_other_sizes_and_other_kinds_are_not_taken_for_a_bucket():
    assert verdicts(TWO, sent((400,)), sent((9000,))) == [("not found", (), ())] * 2
    assert verdicts(TWO, sent((507,), kind="all-gather"))[0][0] == "not found"


def test_stacked_leaves_of_a_loop():
    plan = plan_buckets(shapes((12, 8, 8), (12, 8)))
    assert verdicts(plan, sent((8, 8), (8,), in_loop=True, runs=12)) == [("in loop", (0,), ())]
    assert verdicts(plan, sent((72,), in_loop=True, runs=11), sent((72,))) == [
        ("in loop", (0, 1), ())
    ]
    assert verdicts(plan, sent((72,), in_loop=True, runs=5))[0][0] == "not found"
    assert verdicts(plan, sent((72,), in_loop=True, runs=None))[0][0] == "in loop"


def test_a_bucket_of_a_loops_leaves_and_others():
    plan = plan_buckets(shapes((12, 8, 8), (12, 8), (40,), (9, 5)))
    assert len(plan.buckets) == 1
    slices, rest = sent((72,), in_loop=True, runs=11), sent((85,))
    assert verdicts(plan, slices, sent((72,)), rest) == [("in parts", (0, 1, 2), ())]
    assert verdicts(plan, sent((72,), in_loop=True, runs=12), rest) == [("in parts", (0, 1), ())]
    assert verdicts(plan, rest, slices, sent((72,)))[0][0] == "in parts"
    # The rest is missing, or the loop runs another number of times.
    assert verdicts(plan, slices, sent((72,)))[0][0] == "not found"
    assert verdicts(plan, sent((72,), in_loop=True, runs=7), rest)[0][0] == "not found"
