"""Estimated times: figures of hardware, and steps played through by hand."""

import dataclasses
import itertools

import pytest
from inspect_recorded import CPU, GPU, LAYER_FLOPS, LOOP, LOOP_CALL, TARGETS, TPU, module, recorded

from fdp.inspect import HARDWARE, Hardware, collectives, load, timeline
from fdp.inspect.cost import Cost

# Round numbers: a flop and a byte take one second each, a collective one second and two for every hop.
TOY = Hardware(
    name="toy",
    device="toy",
    platform="gpu",
    bf16_flops=2.0,
    f32_flops=1.0,
    memory_bandwidth=1e9,
    link_bandwidth=1.0,
    base_latency=1.0,
    hop_latency=2.0,
    torus_dims=0,
    full_link_devices=8,
    network_bandwidth=0.5,
    launch_latency=0.0,
    source="made up",
)
GPU_HEADER = 'is_scheduled=true, num_partitions=4, frontend_attributes={fingerprint_before_lhs="1"}'
SHAPE = "f32[256,256]{1,0}"
DOT = 2.0 * 256**3  # seconds on the toy
WIRE = 1 + 2 * 3 * 2 + 256 * 256 * 4 * 2 * 3 / 4  # the same, of an all-reduce over four


def near(seconds):
    return pytest.approx(seconds, abs=1.0)  # memory traffic, at 1e9 bytes a second


@pytest.mark.parametrize("name", HARDWARE)
def test_published_figures_make_sense(name):
    hardware = HARDWARE[name]
    assert hardware.name == name
    assert 1e14 < hardware.f32_flops <= hardware.bf16_flops < 1e15
    assert hardware.link_bandwidth < hardware.memory_bandwidth < hardware.bf16_flops
    assert hardware.source
    assert dataclasses.is_dataclass(hardware)
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.bf16_flops = 1


def test_published_figures():
    # NVIDIA's and Google's data sheets, see Hardware.source.
    assert HARDWARE["h100"].bf16_flops == 989.4e12
    assert HARDWARE["a100"].bf16_flops == 312e12
    assert HARDWARE["v5e"].bf16_flops == 197e12
    assert HARDWARE["v5p"].bf16_flops == 459e12
    assert [HARDWARE[n].link_bandwidth for n in ("h100", "a100", "v5e", "v5p")] == [
        450e9,
        300e9,
        200e9,
        600e9,
    ]


def test_a_kernel_is_bound_by_arithmetic_or_by_memory():
    assert TOY.compute_seconds(Cost(flops=10, element_type="f32")) == 10
    assert TOY.compute_seconds(Cost(flops=10, element_type="bf16")) == 5
    assert TOY.compute_seconds(Cost(flops=10, element_type="f32"), efficiency=0.5) == 20
    assert TOY.compute_seconds(Cost(flops=1, nbytes=10**10, element_type="f32")) == 10


@pytest.mark.parametrize(
    ("kind", "hops", "sent"),
    [
        ("all-reduce", 6, 1.5),
        ("reduce-scatter", 3, 0.75),
        ("all-gather", 3, 3),
        ("all-to-all", 1, 0.75),
    ],
)
def test_a_collective_is_latency_and_bytes(kind, hops, sent):
    line = f"ROOT %r = f32[64]{{0}} {kind}(%q), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, to_apply=%add"
    (found,) = collectives(module(line))
    assert TOY.collective_seconds(found) == 1 + 2 * hops + 256 * sent


def test_links_of_small_tori_and_of_many_nodes():
    line = "ROOT %r = f32[64]{0} all-reduce(%q), replica_groups={}, to_apply=%add"
    (found,) = collectives(module(line, header="is_scheduled=true, num_partitions=16"))
    sent = 256 * 2 * 15 / 16
    assert TOY.collective_seconds(found) == 1 + 2 * 30 + sent / 0.5  # two nodes of 8
    torus = dataclasses.replace(TOY, torus_dims=2, full_link_devices=16)
    assert torus.collective_seconds(found) == pytest.approx(1 + 2 * 2 * 2 * 3 + sent)
    part = dataclasses.replace(torus, full_link_devices=17)
    assert part.collective_seconds(found) == pytest.approx(1 + 2 * 2 * 2 * 3 + sent / 0.5)
    alone = dataclasses.replace(found, group_size=1)
    assert TOY.collective_seconds(alone) == 0


BODY = f"""
%d1 = {SHAPE} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
%s = {SHAPE} all-reduce-start(%d1), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
%d2 = {SHAPE} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
%e = {SHAPE} all-reduce-done(%s)
ROOT %d3 = {SHAPE} dot(%e, %d2), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
"""


def test_a_schedule_played_through_by_hand():
    found = timeline(module(BODY, header=GPU_HEADER), TOY)
    assert [(e.lane, e.kind, e.name) for e in found.events] == [
        ("compute", "matmul", "d1"),
        ("compute", "matmul", "d2"),
        ("link", "collective", "s"),
        ("compute", "matmul", "d3"),
    ]
    starts = [0, DOT, DOT, 2 * DOT]
    assert [e.start for e in found.events] == [near(t) for t in starts]
    assert found.seconds == near(3 * DOT)
    assert found.link_seconds == near(WIRE)
    assert WIRE < DOT
    assert found.exposed_seconds == 0
    assert found.hidden == 1


def test_a_long_reduction_is_waited_for():
    slow = dataclasses.replace(TOY, link_bandwidth=1e-2)
    found = timeline(module(BODY, header=GPU_HEADER), slow)
    wire = 13 + (WIRE - 13) * 100
    assert found.exposed_seconds == near(wire - DOT)
    assert found.seconds == near(2 * DOT + wire)
    assert found.hidden == pytest.approx(DOT / wire, rel=1e-3)


def test_one_collective_after_the_other_on_the_links():
    body = f"""
    %s1 = {SHAPE} all-reduce-start(%p), replica_groups={{}}, to_apply=%add
    %s2 = {SHAPE} all-reduce-start(%p), replica_groups={{}}, to_apply=%add
    %e1 = {SHAPE} all-reduce-done(%s1)
    ROOT %e2 = {SHAPE} all-reduce-done(%s2)
    """
    first, second = timeline(module(body, header=GPU_HEADER), TOY).events
    assert first.end == second.start == near(WIRE)
    assert second.end == near(2 * WIRE)


def test_a_cpu_program_runs_what_has_its_inputs():
    # In the text, d3 comes before d2; it needs the reduction, and d2 does not.
    body = f"""
    %r = {SHAPE} all-reduce(%p), replica_groups={{}}, to_apply=%add
    %b = {SHAPE} bitcast(%r)
    %d3 = {SHAPE} dot(%b, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
    %d2 = {SHAPE} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
    ROOT %d4 = {SHAPE} dot(%d2, %d3), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
    """
    found = timeline(module(body), TOY)
    assert [e.name for e in found.events] == ["d2", "r", "d3", "d4"]
    assert found.seconds == near(3 * DOT)
    assert found.exposed_seconds == 0


@pytest.mark.parametrize(("limit", "trips"), [("7", 3), ("201", 100)])
def test_loops_run_all_their_iterations(limit, trips):
    program = load(module(LOOP_CALL, header=GPU_HEADER, before=LOOP.replace("%LIMIT%", limit)))
    found = timeline(program, TOY)
    assert found.seconds == near(trips * WIRE)
    names = [e.name for e in found.events]
    assert names.count("r") == min(trips, 64)
    # The rest of a long loop is one event.
    assert names.count("w") == (1 if trips > 64 else 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "program", ["naive", "chained", "scanned", "scanned_delayed", "convolutional"]
)
def test_the_parts_of_a_real_step_add_up(target, program):
    found = timeline(recorded(target, program), "v5e" if target == TPU else "h100")
    assert found.seconds == pytest.approx(found.compute_seconds + found.exposed_seconds)
    assert 0 <= found.hidden <= 1
    for lane in ("compute", "link"):
        events = [e for e in found.events if e.lane == lane]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(events))


def test_matmuls_of_a_real_step():
    found = timeline(recorded(GPU, "chained"), "h100")
    matmuls = [e for e in found.events if e.kind == "matmul"]
    assert sum(e.flops for e in matmuls) == 11 * LAYER_FLOPS
    # Half a GFLOP at TF32's peak, and two microseconds to launch it.
    h100 = HARDWARE["h100"]
    assert matmuls[0].end - matmuls[0].start >= 2e-6 + LAYER_FLOPS / h100.f32_flops


@pytest.mark.parametrize("program", ["naive", "scanned"])
@pytest.mark.parametrize("target", [CPU, GPU, TPU])
def test_a_program_without_overlap_hides_nothing(target, program):
    found = timeline(recorded(target, program), "v5e" if target == TPU else "h100")
    assert found.hidden == pytest.approx(0)
    assert found.exposed_seconds == pytest.approx(found.link_seconds)


@pytest.mark.parametrize("target", [CPU, GPU, TPU])
def test_a_chain_hides_something(target):
    assert 0 < timeline(recorded(target, "chained"), "v5e" if target == TPU else "h100").hidden < 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
    ],
)
def test_the_hardware_is_that_of_the_program(kind, name):
    program = recorded(GPU if kind.startswith("NVIDIA") else TPU, "chained")
    assert timeline(dataclasses.replace(program, device_kind=kind)).hardware is HARDWARE[name]


def test_the_table_says_that_it_is_an_estimate():
    lines = str(timeline(recorded(GPU, "naive"), "h100")).splitlines()
    assert lines[0] == "estimate for NVIDIA H100 SXM5 80 GB (published peaks, no measurement)"
    assert "0% of it hidden" in lines[3]
    assert lines[-1].endswith("all-reduce-start (16,777,216 bytes)")


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        (
            GPU,
            {},
            r"got one with its text alone: pass hardware=, one of 'h100', 'a100', 'v5e', 'v5p'",
        ),
        (GPU, {"hardware": "h200"}, "expected hardware to be one of 'h100'.*got 'h200'"),
        (
            TPU,
            {"hardware": "h100"},
            "expected a program compiled for gpu, as 'h100' is one, got one for tpu",
        ),
        (GPU, {"hardware": "h100", "efficiency": 0}, r"expected efficiency in \(0, 1\].*got 0"),
    ],
)
def test_wrong_arguments(target, arguments, message):
    with pytest.raises(ValueError, match=message):
        timeline(recorded(target, "naive"), **arguments)


def test_an_unknown_device_is_named():
    program = dataclasses.replace(recorded(GPU, "naive"), device_kind="NVIDIA GeForce")
    with pytest.raises(ValueError, match="got one for 'NVIDIA GeForce': pass hardware="):
        timeline(program)
