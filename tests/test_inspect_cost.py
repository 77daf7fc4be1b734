"""Flops and bytes of instructions, against XLA's own figures and by hand."""

import inspect_programs
import jax
import numpy as np
import pytest
from inspect_recorded import GPU, LAYER_FLOPS, TARGETS, module, recorded

from fdp.inspect import load


def total(program):
    return program.costs.total(program.module.entry)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("program", "matmuls"), [("naive", 11), ("chained", 11), ("scanned", 12)])
def test_flops_of_a_real_program(target, program, matmuls):
    # Forward 4, backward 4 for the weights and 3 for the inputs; a scan does not leave the first input's out.
    assert total(recorded(target, program)).flops == matmuls * LAYER_FLOPS


@pytest.mark.parametrize("program", ["chained", "convolutional", "kinds"])
def test_flops_and_bytes_agree_with_xla(mesh, program):
    compiled = inspect_programs.lower(program, mesh).compile()
    xla, own = compiled.cost_analysis(), total(load(compiled))
    # XLA counts elementwise work too, which is small here.
    assert 0.95 * xla["flops"] <= own.flops <= xla["flops"]
    assert own.nbytes == pytest.approx(xla["bytes accessed"], rel=0.01)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_flops_of_a_convolution_leave_padding_out(stride, padding):
    def conv(x, k):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (stride, stride), padding, dimension_numbers=dims)

    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((2, 9, 9, 8), (3, 3, 8, 16))]
    compiled = jax.jit(conv).lower(*shapes).compile()
    assert total(load(compiled)).flops == compiled.cost_analysis()["flops"]


def test_the_backward_of_a_convolution_costs_what_its_forward_does():
    program = recorded(GPU, "convolutional")
    entry = program.module.entry
    calls = [i for i in entry.instructions if "cudnn" in i.target]
    flops = {i.name: program.costs.of(entry, i).flops for i in calls}
    # 3x3 over 16x16 with a border of zeros, 64 to 64 channels; 1x1 with stride 2, 64 to 128.
    same, down = 2 * 4 * (3 * 16 - 2) ** 2 * 64 * 64, 2 * 4 * 8**2 * 64 * 128
    assert [
        flops[f"cudnn-conv{name}"] for name in ("-bias-activation.3", "-bw-input.3", "-bw-filter.5")
    ] == [same] * 3
    assert [flops[f"cudnn-conv{name}"] for name in (".6", "-bw-input.2", "-bw-filter.4")] == [
        down
    ] * 3


def test_flops_of_library_calls():
    gemm = (
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}'
    )
    body = f"""
    %g = (f32[256,256]{{1,0}}, s8[4096]{{0}}) custom-call(%p, %p), custom_call_target="__cublas$gemm", {gemm}
    %o = f32[256,256]{{1,0}} custom-call(%p, %p), custom_call_target="__onednn$matmul"
    %a = f32[256,256]{{1,0}} custom-call(%p, %p), custom_call_target="__cudnn$fmhaSoftmax"
    ROOT %n = f32[256,256]{{1,0}} custom-call(%p), custom_call_target="my_kernel"
    """
    program = load(module(body))
    costs = [
        program.costs.of(program.module.entry, i) for i in program.module.entry.instructions[2:]
    ]
    assert [cost.is_matmul for cost in costs] == [True, True, True, False]
    assert [cost.flops for cost in costs] == [2 * 256**3, 2 * 256**3, 0, 0]
    # Scratch space of a library is not traffic: two operands and the result.
    assert costs[0].nbytes == 3 * 256 * 256 * 4
