"""Floating-point operations of the matrix products and convolutions in a program, from their shapes.

A multiply-add counts as two, as in every hardware data sheet. Only matrix products and convolutions count: they
are what a reduction can hide behind, and everything else is bound by memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from fdp.inspect.hlo import Computation, Instruction
from fdp.inspect.shapes import Array

_DOTS = ("dot", "ragged-dot", "scaled-dot")
# Library calls that multiply matrices or convolve. In lower case; matched anywhere in the target's name.
_LIBRARY = ("cublas", "cudnn$conv", "matmul", "gemm", "convolution", "fmha", "flash", "__onednn")
_NUMBERS = re.compile(r"\d+")


def is_matmul(instruction: Instruction) -> bool:
    """Whether the instruction itself (not what it calls) multiplies matrices or convolves."""
    if instruction.opcode == "custom-call":
        target = instruction.target.lower()
        return any(name in target for name in _LIBRARY)
    return instruction.opcode in (*_DOTS, "convolution")


def matmul_flops(computation: Computation, instruction: Instruction) -> int:
    """Operations of one matrix product or convolution; 0 for anything else.

    0 also where the text does not tell (an attention call of cuDNN): a lower bound, never a guess.
    """
    if not is_matmul(instruction):
        return 0
    operands = [o.shape.arrays[0] for o in computation.operands(instruction) if o.shape.arrays]
    result = instruction.shape.arrays[0] if instruction.shape.arrays else None
    if len(operands) < 2 or result is None:
        return 0
    lhs, rhs = operands[:2]
    if instruction.opcode in _DOTS:
        text = instruction.attributes.get("lhs_contracting_dims", "")
        return _dot(lhs, result, [int(n) for n in _NUMBERS.findall(text)])
    if instruction.opcode == "convolution":
        return _convolution(lhs, rhs, result, instruction.attributes)
    return _library_call(instruction, lhs, rhs, result)


def _dot(lhs: Array, result: Array, contracting: list[int]) -> int:
    return 2 * result.elements * math.prod(lhs.dims[d] for d in contracting)


def _library_call(instruction: Instruction, lhs: Array, rhs: Array, result: Array) -> int:
    target = instruction.target.lower()
    if "conv" in target:
        # The backward calls name the forward convolution: its input, kernel and output change places.
        if "backwardinput" in target:
            lhs, rhs, result = result, rhs, lhs
        elif "backwardfilter" in target:
            lhs, rhs, result = lhs, result, rhs
        return _convolution(lhs, rhs, result, instruction.attributes)
    gemm = instruction.backend_config.get("gemm_backend_config", instruction.backend_config)
    dims = gemm.get("dot_dimension_numbers")
    if dims:
        return _dot(lhs, result, [int(d) for d in dims["lhs_contracting_dimensions"]])
    if "fmha" in target or "flash" in target or not result.elements:
        return 0
    # (b m k)(b k n) -> (b m n): the sizes alone give k.
    batch = math.prod(rhs.dims[:-2]) if len(lhs.dims) == len(rhs.dims) else 1
    return 2 * result.elements * math.isqrt(lhs.elements * rhs.elements // result.elements // batch)


def _convolution(lhs: Array, rhs: Array, result: Array, attributes: Mapping[str, str]) -> int:
    """As XLA's own cost analysis: products with padding and with the holes of a dilation are left out."""
    match = re.match(r"(\w+)_(\w+)->(\w+)", attributes.get("dim_labels", "").replace("?", ""))
    if match is None:
        return 0
    lhs_labels, rhs_labels, result_labels = match.groups()
    window = dict(re.findall(r"(\w+)=(\S+)", attributes.get("window", "").strip("{}")))
    spatial = sum(label.isdigit() for label in result_labels)

    def each(name: str, default: int) -> list[int]:
        return [int(n) for n in window[name].split("x")] if name in window else [default] * spatial

    pads = (
        [int(p.split("_")[0]) for p in window["pad"].split("x")]
        if "pad" in window
        else [0] * spatial
    )
    products = 1
    for d in range(spatial):
        products *= _valid_positions(
            lhs.dims[lhs_labels.index(str(d))],
            rhs.dims[rhs_labels.index(str(d))],
            result.dims[result_labels.index(str(d))],
            each("stride", 1)[d],
            pads[d],
            each("lhs_dilate", 1)[d],
            each("rhs_dilate", 1)[d],
        )
    groups = int(attributes.get("batch_group_count", "1"))
    batch = lhs.dims[lhs_labels.index("b")] // groups
    features = rhs.dims[rhs_labels.index("i")] * result.dims[result_labels.index("f")]
    return 2 * batch * features * products


@functools.lru_cache(maxsize=4096)
def _valid_positions(
    size: int, kernel: int, out: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Pairs of output and kernel index that meet an element of the input along one dimension."""
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * rhs_dilate - pad
    return int(np.sum((at % lhs_dilate == 0) & (at >= 0) & (at // lhs_dilate < size)))
