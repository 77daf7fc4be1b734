"""Which collectives a program issues, and in which order."""

import inspect_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inspect_recorded import (
    CPU,
    CPU_NEWEST,
    GPU,
    LAYER_BYTES,
    LOOP,
    LOOP_CALL,
    TARGETS,
    TPU,
    module,
    recorded,
)
from jax import lax

from fdp.inspect import collectives, interleaving, interleavings, load, overlap

LAYERS, WIDTH = inspect_programs.LAYERS, inspect_programs.WIDTH


@pytest.mark.parametrize("target", TARGETS)
def test_independent_psums_are_merged_by_every_compiler(target):
    (merged,) = collectives(recorded(target, "naive"))
    assert (merged.kind, merged.reduction, merged.dtype) == ("all-reduce", "add", "float32")
    assert merged.nbytes == LAYERS * LAYER_BYTES
    assert merged.group_size == 8
    assert not merged.in_loop
    # The GPU compiler copies them into one buffer first, the others send four arrays in one go.
    assert len(merged.operand_shapes) == (1 if target == GPU else LAYERS)


@pytest.mark.parametrize("target", TARGETS)
def test_a_chain_of_psums_stays_apart_on_every_compiler(target):
    found = collectives(recorded(target, "chained"))
    assert [c.nbytes for c in found] == [LAYER_BYTES] * LAYERS
    assert all(c.operand_shapes == ((WIDTH, WIDTH),) for c in found)
    assert [c.position for c in found] == sorted(c.position for c in found)
    assert len({c.name for c in found}) == LAYERS


@pytest.mark.parametrize("target", TARGETS)
def test_a_psum_in_the_body_of_a_scan(target):
    inside, behind = collectives(recorded(target, "scanned_delayed"))
    assert (inside.in_loop, behind.in_loop) == (True, False)
    assert (inside.runs, behind.runs) == (LAYERS, 1)
    assert inside.nbytes == behind.nbytes == LAYER_BYTES
    assert inside.computation != behind.computation
    assert behind.computation == recorded(target, "scanned_delayed").module.entry.name


@pytest.mark.parametrize("target", TARGETS)
def test_every_kind(target):
    found = collectives(recorded(target, "kinds"))
    assert [(c.kind, c.reduction) for c in found] == [
        ("reduce-scatter", "add"),
        ("all-gather", ""),
        ("collective-permute", ""),
        ("all-to-all", ""),
        ("all-reduce", "maximum"),
        ("all-reduce", "add"),
    ]
    assert {c.group_size for c in found} == {8}
    # The CPU has no bfloat16 reductions and sends twice the bytes.
    wire = "float32" if target in (CPU, CPU_NEWEST) else "bfloat16"
    assert found[-1].dtype == wire
    assert found[-1].nbytes == WIDTH**2 * jnp.dtype(wire).itemsize


def test_bytes_sent_by_rings():
    found = {c.kind: c for c in collectives(recorded(GPU, "kinds"))}
    whole = WIDTH**2 * 4
    assert found["reduce-scatter"].wire_bytes == whole * 7 // 8
    assert found["all-gather"].wire_bytes == whole // 8 * 7
    assert found["collective-permute"].wire_bytes == whole
    assert found["all-to-all"].wire_bytes == whole * 7 // 8
    assert found["all-reduce"].wire_bytes == whole // 2 * 2 * 7 // 8  # the last one, of bfloat16


def test_gpu_starts_and_ends():
    found = collectives(recorded(GPU, "chained"))
    assert all(c.asynchronous and c.start == c.position < c.done for c in found)
    # Nothing in between: XLA notes it, and it runs like a synchronous call.
    (alone,) = collectives(recorded(GPU, "naive"))
    assert not alone.asynchronous
    assert alone.done == alone.position + 1


def test_tpu_async_collective_fusions():
    found = collectives(recorded(TPU, "chained"))
    assert [c.asynchronous for c in found] == [True, True, False, False]
    assert [len(c.carried_by) for c in found] == [1, 1, 0, 0]
    (inside, _) = collectives(recorded(TPU, "scanned_delayed"))
    assert inside.asynchronous
    assert len(inside.carried_by) == 2, "carried along by two matmuls, one after the other"


def test_a_live_program_equals_its_text(mesh):
    compiled = inspect_programs.lower("chained", mesh).compile()
    assert collectives(compiled) == collectives(compiled.as_text())
    assert len(collectives(compiled)) == LAYERS


def test_pmap_is_read_like_shard_map():
    step = jax.pmap(lambda x: lax.psum(x, "data"), axis_name="data")
    (found,) = collectives(step.lower(np.ones((8, 64), np.float32)).compile())
    assert (found.nbytes, found.group_size) == (256, 8)


def test_two_axes_and_one_of_them(mesh):
    grid = jax.sharding.Mesh(mesh.devices.reshape(2, 4), ("hosts", "chips"))
    spec = jax.sharding.PartitionSpec(("hosts", "chips"))

    def groups(axis):
        def psum(x):
            return lax.psum(x, axis)

        mapped = jax.shard_map(psum, mesh=grid, in_specs=spec, out_specs=spec, check_vma=False)
        x = jax.ShapeDtypeStruct((8, 64), np.float32)
        return [c.group_size for c in collectives(jax.jit(mapped).lower(x).compile())]

    assert groups("chips") == [4]
    assert groups("hosts") == [2]
    assert groups(("hosts", "chips")) == [8]


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3}}", 4),
        ("{{0,2},{1,3}}", 2),
        ("[2,2]<=[4]", 2),
        ("[1,4]<=[2,2]T(1,0)", 4),
        ("mesh['a'=2,'b'=2] {'a','b'}", 4),
        ("mesh['a'=2,'b'=2] {'b'}", 2),
        ("mesh['a'=4] {'a':(2)2}", 2),
        ("{}", 4),
    ],
)
def test_forms_of_replica_groups(groups, size):
    line = f"ROOT %r = f32[256,256]{{1,0}} all-reduce(%p), replica_groups={groups}, to_apply=%add"
    (found,) = collectives(module(line))
    assert found.group_size == size


def test_several_arrays_of_two_types_in_one_collective():
    body = """
    %h = bf16[64]{0} convert(%q)
    ROOT %r = (f32[256,256]{1,0}, bf16[64]{0}) all-reduce(%p, %h), replica_groups={{0,1,2,3}}, to_apply=%add
    """
    (found,) = collectives(module(body))
    assert found.dtype == "bfloat16+float32"
    assert found.nbytes == 256 * 256 * 4 + 128
    assert found.operand_shapes == ((256, 256), (64,))


WRAPPED = """
%wrapped (w: f32[64]) -> f32[16] {
  %w = f32[64]{0} parameter(0)
  ROOT %rs = f32[16]{0} reduce-scatter(%w), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""
GPU_HEADER = 'is_scheduled=true, num_partitions=4, frontend_attributes={fingerprint_before_lhs="1"}'


def test_a_collective_in_an_async_wrapper():
    body = """
    %s = ((f32[64]{0}), f32[16]{0}) async-start(%q), calls=%wrapped
    %u = ((f32[64]{0}), f32[16]{0}) async-update(%s)
    %d = f32[256,256]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    %e = f32[16]{0} async-done(%u)
    ROOT %out = f32[256,256]{1,0} add(%d, %p)
    """
    program = load(module(body, header=GPU_HEADER, before=WRAPPED))
    (found,) = collectives(program)
    assert (found.kind, found.nbytes, found.asynchronous) == ("reduce-scatter", 256, True)
    assert interleaving(program) == "[G]f"


def test_a_call_is_part_of_its_caller():
    # The GPU runtime turns stretches of a schedule into command buffers, which print as calls.
    before = """
    %command_buffer (c: f32[256,256]) -> f32[256,256] {
      %c = f32[256,256]{1,0} parameter(0)
      %s = f32[256,256]{1,0} all-reduce-start(%c), replica_groups={{0,1,2,3}}, to_apply=%add
      %d = f32[256,256]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      %e = f32[256,256]{1,0} all-reduce-done(%s)
      ROOT %x = f32[256,256]{1,0} add(%d, %e)
    }
    """.replace("\n    ", "\n")
    body = "ROOT %r = f32[256,256]{1,0} call(%p), to_apply=%command_buffer"
    program = load(module(body, header=GPU_HEADER, before=before))
    assert interleavings(program) == {"main": "[G]f"}
    (found,) = overlap(program)
    assert found.flops == 2 * 256**3
    assert [c.name for c in collectives(program)] == ["s"]


def test_a_branch_has_a_string_of_its_own():
    before = """
    %yes (y: f32[256,256]) -> f32[256,256] {
      %y = f32[256,256]{1,0} parameter(0)
      ROOT %yr = f32[256,256]{1,0} all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add
    }

    %no (n: f32[256,256]) -> f32[256,256] {
      %n = f32[256,256]{1,0} parameter(0)
      ROOT %nd = f32[256,256]{1,0} dot(%n, %n), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    }
    """.replace("\n    ", "\n")
    body = """
    %t = pred[] constant(true)
    ROOT %r = f32[256,256]{1,0} conditional(%t, %p, %p), true_computation=%yes, false_computation=%no
    """
    program = load(module(body, before=before))
    assert interleavings(program) == {"main": "C", "yes": "[]", "no": "G"}
    assert program.sites["yes"].conditional
    assert [c.computation for c in collectives(program)] == ["yes"]


def test_a_fused_collective_with_work_of_its_own():
    before = """
    %fused (f: f32[256,256]) -> f32[256,256] {
      %f = f32[256,256]{1,0} parameter(0)
      %fd = f32[256,256]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ROOT %fr = f32[256,256]{1,0} all-reduce(%fd), replica_groups={{0,1,2,3}}, to_apply=%add
    }
    """.replace("\n    ", "\n")
    program = load(
        module("ROOT %r = f32[256,256]{1,0} fusion(%p), kind=kOutput, calls=%fused", before=before)
    )
    (found,) = collectives(program)
    assert (found.name, found.nbytes) == ("r", 256 * 256 * 4)
    assert interleaving(program) == "[G]"


def test_a_loop_of_unknown_length():
    before = LOOP.replace("direction=LT", "direction=NE").replace("%LIMIT%", "7")
    (found,) = collectives(module(LOOP_CALL, before=before))
    assert found.in_loop
    assert found.runs is None
