"""Schedules as strings, and what overlaps with a collective."""

import pytest
from inspect_recorded import CPU, CPU_NEWEST, GPU, LAYER_FLOPS, TARGETS, TPU, module, recorded, text

from fdp.inspect import collectives, interleaving, interleavings, load, overlap

# Exact, so that a change of the reader shows. Recorded: a change of a compiler does not.
STRINGS = {
    (CPU, "naive"): {"main.0_spmd": "GfGfGfGfGGfGGfGGfG[]f"},
    (GPU, "naive"): {"main.0_spmd": "GfGfGfGfGfGfGGGGfGf[]f"},
    (TPU, "naive"): {"main.0_spmd": "GGGGGGGGGG[]f"},
    (CPU, "chained"): {"main.6_spmd": "GfGfGfGfGG[]fGGf[]GGf[]Gf[]f"},
    (GPU, "chained"): {"main.6_spmd": "GfGfGfGfG[GfG]f[GfG]f[GfG]f[f]f"},
    (TPU, "chained"): {"main.6_spmd": "GGGGG[G]G[G]G[]Gf[]f"},
    (GPU, "scanned"): {"main.7_spmd": "WfW[]f", "region_0.1_spmd": "Gf", "region_2.3_spmd": "fGfG"},
    (GPU, "scanned_delayed"): {
        "main.8_spmd": "WfW[]f",
        "region_0.1_spmd": "fGf",
        "region_2.4_spmd": "[fGG]f",
    },
    (TPU, "scanned_delayed"): {
        "main.8_spmd": "fWfW[]f",
        "wide.region_0.1_spmd.sunk": "fG",
        "wide.region_2.4_spmd.sunk": "[GG]f",
    },
    (GPU, "kinds"): {"main.0_spmd": "[]f{}G{}{}[]f[]"},
    (TPU, "kinds"): {"main.0_spmd": "[]f{}G{}{}[][]"},
}


@pytest.mark.parametrize(("target", "program"), STRINGS)
def test_interleavings(target, program):
    expected = STRINGS[target, program]
    assert interleavings(recorded(target, program)) == expected
    assert interleaving(text(target, program)) == next(iter(expected.values()))


def test_what_is_small_can_be_left_out():
    body = """
    %m = f32[64]{0} multiply(%q, %q)
    %r = f32[64]{0} all-reduce(%m), replica_groups={{0,1,2,3}}, to_apply=%add
    ROOT %d = f32[256,256]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    """
    program = load(module(body))
    assert interleaving(program) == "[]G"
    assert interleaving(program, min_elements=64) == "f[]G"
    assert interleaving(program, min_bytes=257) == "G"


def test_overlap_on_gpu_and_tpu_is_what_stands_in_between():
    assert [o.flops for o in overlap(recorded(GPU, "chained"))] == [2 * LAYER_FLOPS] * 3 + [0]
    assert [o.flops for o in overlap(recorded(TPU, "chained"))] == [LAYER_FLOPS] * 2 + [0, 0]
    assert [o.flops for o in overlap(recorded(TPU, "scanned_delayed"))] == [2 * LAYER_FLOPS, 0]
    assert {o.basis for o in overlap(recorded(GPU, "chained"))} == {"schedule"}
    (first, *_) = overlap(recorded(GPU, "chained"))
    assert len(first.matmuls) == 2


@pytest.mark.parametrize("target", [CPU, CPU_NEWEST])
def test_overlap_on_cpu_is_what_does_not_depend(target):
    found = overlap(recorded(target, "chained"))
    # Behind the first reduction: the weight gradients of three layers, and three inputs' gradients.
    assert [o.flops for o in found] == [n * LAYER_FLOPS for n in (6, 4, 2, 0)]
    assert {o.basis for o in found} == {"dependencies"}
    # Loop bodies run one operation after the other there.
    assert [o.flops for o in overlap(recorded(target, "scanned_delayed"))] == [0, 0]


@pytest.mark.parametrize("target", TARGETS)
def test_overlap_has_the_order_of_collectives(target):
    for program in ("naive", "chained", "scanned_delayed", "kinds"):
        loaded = recorded(target, program)
        assert tuple(o.collective for o in overlap(loaded)) == collectives(loaded)
