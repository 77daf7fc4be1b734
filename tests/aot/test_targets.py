"""What the TPU and GPU compilers make of psums: the facts that fdp's schedules stand on, in plain JAX."""

import itertools
import re

import inspect_programs
import jax
import jax.numpy as jnp
import pytest

import fdp
import fdp.aot
from fdp.inspect import collectives, interleaving, interleavings, overlap, report, timeline

LAYER_BYTES = inspect_programs.WIDTH**2 * 4


def pairs(schedule: str) -> list[str]:
    """What stands between the ends of each reduction: "G[Gf]f[]" -> ["Gf", ""]."""
    return re.findall(r"\[([^\[\]]*)\]", schedule)


def plan_of_layers() -> fdp.BucketPlan:
    shape = jax.ShapeDtypeStruct((inspect_programs.WIDTH,) * 2, jnp.float32)
    return fdp.plan_buckets([shape] * inspect_programs.LAYERS, bucket_bytes=LAYER_BYTES)


def test_the_target_is_what_was_asked_for(target):
    program = target.compile("chained")
    assert program.platform == target.platform
    assert program.module.device_count == target.mesh.size
    assert ("H100" if target.platform == "gpu" else "TPU v5 lite") in program.device_kind


def test_independent_psums_are_merged(target):
    (merged,) = collectives(target.compile("naive"))
    assert merged.kind == "all-reduce"
    assert merged.nbytes == inspect_programs.LAYERS * LAYER_BYTES
    assert merged.group_size == target.mesh.size
    assert pairs(interleaving(target.compile("naive"))) == [""]


def test_the_report_names_what_was_merged(target):
    found = report(target.compile("naive"), plan_of_layers())
    assert found.merged == ((0, 1, 2, 3),)
    assert not found.all_alone
    assert "merged by the compiler: buckets 0, 1, 2, 3" in str(found)


def test_psums_in_need_of_each_other_stay_apart(target):
    found = collectives(target.compile("chained"))
    assert [c.nbytes for c in found] == [LAYER_BYTES] * inspect_programs.LAYERS
    assert report(target.compile("chained"), plan_of_layers()).all_alone


@pytest.mark.parametrize("which", ["gpus", "tpus"])
def test_flat_buffers_with_a_lane_stay_apart(which, request):
    program = request.getfixturevalue(which).compile("chained_flat")
    found = collectives(program)
    assert len(found) == inspect_programs.LAYERS
    # A compiler may pad a flat buffer; it may not join it with another.
    assert all(LAYER_BYTES + 4 <= c.nbytes < 1.01 * LAYER_BYTES for c in found)
    assert report(program, plan_of_layers()).all_alone


def test_a_chain_keeps_its_order(target):
    widths = (1024, 896, 768, 640)
    shapes = list(itertools.pairwise(widths))
    lowered = inspect_programs.lower_step(
        inspect_programs.chained, shapes, (256, widths[0]), target.mesh
    )
    found = collectives(lowered.compile(compiler_options=target.options or None))
    assert [c.nbytes for c in found] == [4 * a * b for a, b in reversed(shapes)]
    assert [c.position for c in found] == sorted(c.position for c in found)


def test_all_but_the_last_of_a_chain_can_be_hidden_on_gpu(gpus):
    program = gpus.compile("chained")
    assert interleaving(program).startswith("GfGfGfGfG[GfG]")
    between = pairs(interleaving(program))
    assert all("G" in letters for letters in between[:-1])
    assert "G" not in between[-1]
    # A layer's backward is two matmuls: for the weights of one layer and the input of the next.
    layer = 2 * 2 * inspect_programs.ROWS * inspect_programs.WIDTH**2
    assert [o.flops for o in overlap(program)] == [layer, layer, layer, 0]
    assert all(c.asynchronous for c in collectives(program))


def test_tpu_reductions_are_synchronous_unless_told_otherwise(tpus):
    plain = tpus.compile("chained", options=False)
    assert pairs(interleaving(plain)) == [""] * inspect_programs.LAYERS
    assert not any(c.asynchronous for c in collectives(plain))
    assert all(o.flops == 0 for o in overlap(plain))


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:16x16"])
def test_async_collective_fusions_hide_reductions_on_tpu(tpus, name):
    program = type(tpus)(name).compile("chained")
    hidden = [o for o in overlap(program) if o.flops]
    # At least half: how many fusions the compiler makes depends on the sizes of the layers.
    assert len(hidden) >= inspect_programs.LAYERS // 2
    assert all(o.collective.carried_by for o in hidden)
    assert pairs(interleaving(program))[0] == "G"


def test_a_reduction_after_a_scan_overlaps_with_nothing(target):
    program = target.compile("scanned")
    (reduction,) = collectives(program)
    assert not reduction.in_loop
    assert "W[]" in interleaving(program)
    assert [o.flops for o in overlap(program)] == [0]


def test_a_reduction_one_iteration_late_overlaps_with_the_whole_body(target):
    program = target.compile("scanned_delayed")
    inside, behind = collectives(program)
    assert inside.in_loop
    assert not behind.in_loop
    assert (inside.runs, behind.runs) == (inspect_programs.LAYERS, 1)
    assert inside.asynchronous
    (between,) = pairs(interleavings(program)[inside.computation])
    assert between.count("G") == 2
    layer = 2 * 2 * inspect_programs.ROWS * inspect_programs.WIDTH**2
    assert [o.flops for o in overlap(program)] == [layer, 0]


@pytest.mark.parametrize("which", ["gpus", "tpus"])
def test_every_kind_is_found_and_bfloat16_stays_bfloat16_on_the_wire(which, request):
    found = collectives(request.getfixturevalue(which).compile("kinds"))
    assert [c.kind for c in found] == [
        "reduce-scatter",
        "all-gather",
        "collective-permute",
        "all-to-all",
        "all-reduce",
        "all-reduce",
    ]
    assert [c.reduction for c in found if c.reduction] == ["add", "maximum", "add"]
    assert found[-1].dtype == "bfloat16"
    assert {c.group_size for c in found} == {8}


def test_a_step_without_communication_has_none(target):
    program = target.compile("local")
    assert collectives(program) == ()
    assert "[" not in interleaving(program)


def test_the_report_knows_the_memory(gpus, tpus):
    found = report(gpus.compile("chained"))
    assert found.temp_bytes > LAYER_BYTES
    # XLA gives no costs for a GPU that is not there.
    assert found.bytes_accessed_source == "text"
    assert found.bytes_accessed > 10 * LAYER_BYTES
    assert report(tpus.compile("chained")).bytes_accessed_source == "XLA"


def test_a_timeline_takes_the_figures_of_the_target(target):
    found = timeline(target.compile("chained"))
    assert found.hardware.name == ("h100" if target.platform == "gpu" else "v5e")
    assert found.seconds == pytest.approx(found.compute_seconds + found.exposed_seconds)
    assert timeline(target.compile("naive")).hidden == 0
    assert 0 < found.hidden < 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:3x3x3", "expected a target that the compiler knows, such as 'h100:8'"),
        ("b200:8", "Invalid TPU external name"),
        ("h100:12", "up to 8 or a multiple of it, such as 'h100:8', got 'h100:12'"),
        ("h100", r"expected a target such as 'h100:8' \(GPU and how many\)"),
    ],
)
def test_an_unknown_target_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        fdp.aot.mesh(name)


def test_a_mesh_of_two_axes():
    mesh = fdp.aot.mesh("v5e:2x4", ("data", "model"), (4, 2))
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert fdp.aot.mesh("h100:16").size == 16
    with pytest.raises(ValueError, match="multiply to the 8 devices of 'v5e:2x4', got"):
        fdp.aot.mesh("v5e:2x4", ("data", "model"), (4, 4))
