"""The compiled texts in tests/data, and pieces of HLO text written by hand."""

import functools
import gzip
from pathlib import Path

import inspect_programs

from fdp.inspect import Program, load

DATA = Path(__file__).parent / "data"
CPU, CPU_NEWEST, GPU, TPU = "cpu-jax0.10", "cpu-jax0.12", "gpu-jax0.10", "tpu-jax0.10"
TARGETS = (CPU, CPU_NEWEST, GPU, TPU)

# One matmul of a layer, forward or backward.
LAYER_FLOPS = 2 * inspect_programs.ROWS * inspect_programs.WIDTH**2
LAYER_BYTES = 4 * inspect_programs.WIDTH**2


@functools.cache
def text(target: str, program: str) -> str:
    return gzip.decompress((DATA / f"{target}.{program}.hlo.txt.gz").read_bytes()).decode()


@functools.cache
def recorded(target: str, program: str) -> Program:
    return load(text(target, program))


def module(
    body: str, *, header: str = "is_scheduled=true, num_partitions=4", before: str = ""
) -> str:
    """The text of a module whose entry takes p (f32[256,256]) and q (f32[64]) and has these lines."""
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    return f"""HloModule test, {header}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

{before}

ENTRY %main (p: f32[256,256], q: f32[64]) -> f32[256,256] {{
  %p = f32[256,256]{{1,0}} parameter(0)
  %q = f32[64]{{0}} parameter(1)
{lines}
}}
"""


# A loop for `module(LOOP_CALL, before=LOOP)`, from 1 in steps of 2 to a limit to be put in.
LOOP = """
%cond (c: (s32[], f32[256,256])) -> pred[] {
  %c = (s32[], f32[256,256]{1,0}) parameter(0)
  %limit = s32[] constant(%LIMIT%)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (b.0: (s32[], f32[256,256])) -> (s32[], f32[256,256]) {
  %b.0 = (s32[], f32[256,256]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%b.0), index=0
  %step = s32[] constant(2)
  %next = s32[] add(%j, %step)
  %x = f32[256,256]{1,0} get-tuple-element(%b.0), index=1
  %r = f32[256,256]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %out = (s32[], f32[256,256]{1,0}) tuple(%next, %r)
}
"""
LOOP_CALL = """
%zero = s32[] constant(1)
%copy = s32[] copy(%zero)
%init = (s32[], f32[256,256]{1,0}) tuple(%copy, %p)
%w = (s32[], f32[256,256]{1,0}) while(%init), condition=%cond, body=%body
ROOT %res = f32[256,256]{1,0} get-tuple-element(%w), index=1
"""
