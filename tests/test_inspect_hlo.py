"""The reader of HLO text: shapes, instructions, attributes, loops."""

import inspect_programs
import jax
import jax.numpy as jnp
import pytest
from inspect_recorded import (
    CPU,
    GPU,
    LOOP,
    LOOP_CALL,
    TARGETS,
    TPU,
    module,
    recorded,
    text,
)

from fdp.inspect import graph, load
from fdp.inspect.hlo import parse, split_top
from fdp.inspect.shapes import numpy_name, parse_shape


@pytest.mark.parametrize(
    ("printed", "dims", "nbytes"),
    [
        ("f32[1024,512]{1,0}", [(1024, 512)], 2**21),
        ("bf16[256,1024]{1,0:T(8,128)(2,1)S(1)}", [(256, 1024)], 2**19),
        ("pred[]", [()], 1),
        ("f32[]{:T(128)}", [()], 4),
        ("f32[0,8]{1,0}", [(0, 8)], 0),
        ("s4[3]{0:E(4)}", [(3,)], 2),
        ("c64[2]{0}", [(2,)], 16),
        ("f8e4m3fn[16]{0}", [(16,)], 16),
        ("f32[<=8,4]{1,0}", [(8, 4)], 128),
        ("token[]", [()], 0),
        ("(f32[2]{0}, /*index=1*/u32[]{:S(2)})", [(2,), ()], 12),
        ("((f32[4]{0:T(128)}), f32[2]{0:T(128)S(1)}, s32[]{:S(2)})", [(4,), (2,), ()], 28),
        ("()", [], 0),
    ],
)
def test_shapes(printed, dims, nbytes):
    shape = parse_shape(printed)
    assert [array.dims for array in shape.arrays] == dims
    assert shape.nbytes == nbytes
    assert shape.is_tuple == printed.startswith("(")


def test_a_nested_tuple_keeps_its_parts():
    shape = parse_shape("((f32[4]{0}, f32[3]{0}), f32[2]{0}, s32[])")
    assert [[array.dims for array in part] for part in shape.parts] == [[(4,), (3,)], [(2,)], [()]]


def test_memory_on_the_chip_is_told_from_device_memory():
    shape = parse_shape(
        "(f32[2]{0:T(128)S(1)}, f32[2]{0:T(128)}, f32[2]{0:T(128)S(5)}, f32[2]{0:S(1)})"
    )
    assert [array.on_chip for array in shape.arrays] == [True, False, False, False]
    assert (shape.nbytes, shape.device_nbytes) == (32, 24)


def test_text_that_is_no_shape():
    with pytest.raises(
        ValueError, match=r"expected a shape such as 'f32\[8,4\]\{1,0\}', got 'what'"
    ):
        parse_shape("what")


@pytest.mark.parametrize(
    ("name", "numpy"),
    [
        ("bf16", "bfloat16"),
        ("f32", "float32"),
        ("pred", "bool"),
        ("s8", "int8"),
        ("u16", "uint16"),
        ("c64", "complex64"),
        ("f8e4m3fn", "float8_e4m3fn"),
    ],
)
def test_names_of_types_are_those_of_jax(name, numpy):
    assert numpy_name(name) == numpy
    assert jnp.dtype(getattr(jnp, numpy, numpy)).name == numpy


def test_commas_in_brackets_and_quotes_do_not_split():
    assert split_top('a=[1,2], b="x,{", c={d={1,2},e=3}') == [
        "a=[1,2]",
        'b="x,{"',
        "c={d={1,2},e=3}",
    ]


def test_instructions_and_their_attributes():
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    config = 'custom_call_target="hello$there", backend_config={"a":{"b":"1"},"c":[]}'
    text = module(
        f"""
        %dot.1 = f32[256,256]{{1,0}} dot(%p, %p), {dims}, metadata={{op_name="a,b{{" }}
        %long = f32[2]{{0}} constant({{1,
        2}})
        %typed = f32[256,256]{{1,0}} add(f32[256,256]{{1,0}} %dot.1, f32[256,256]{{1,0}} %p)
        ROOT %call.2 = f32[256,256]{{1,0}} custom-call(%typed, /*index=1*/%p), {config}
        """
    )
    entry = parse(text).entry
    assert [i.opcode for i in entry.instructions] == [
        "parameter",
        "parameter",
        "dot",
        "constant",
        "add",
        "custom-call",
    ]
    assert [i.position for i in entry.instructions] == list(range(6))
    dot, typed, call = (entry.by_name[name] for name in ("dot.1", "typed", "call.2"))
    assert dot.attributes["lhs_contracting_dims"] == "{1}"
    assert dot.attributes["metadata"] == '{op_name="a,b{" }'
    assert typed.operands == ("dot.1", "p")
    assert call.operands == ("typed", "p")
    assert call.target == "hello$there"
    assert call.backend_config == {"a": {"b": "1"}, "c": []}
    assert entry.root is call
    assert dot.backend_config == {}
    assert [user.name for user in entry.users["p"]] == ["dot.1", "typed", "call.2"]


def test_a_backend_config_in_quotes_is_read_too():
    line = r'ROOT %x = f32[256,256]{1,0} negate(%p), backend_config="{\"n\":\"3\"}"'
    assert parse(module(line)).entry.root.backend_config == {"n": "3"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "program", ["naive", "chained", "scanned_delayed", "kinds", "convolutional"]
)
def test_every_line_of_a_real_program_is_read(target, program):
    lines = text(target, program).splitlines()
    found = recorded(target, program).module
    instructions = [i for c in found.computations.values() for i in c.instructions]
    assert len(instructions) == sum(" = " in line and line.startswith("  ") for line in lines)
    assert len(found.computations) == sum(line.endswith("{") for line in lines)
    assert found.is_scheduled
    assert found.device_count == 8
    for computation in found.computations.values():
        for instruction in computation.instructions:
            assert set(instruction.operands) <= computation.by_name.keys(), instruction.name


def test_source_tables_are_passed_over(mesh):
    compiled = inspect_programs.lower("local", mesh).compile()
    assert "StackFrames" in compiled.as_text(), "this jax has no such tables: record what it has"
    assert parse(compiled.as_text()).name.startswith("jit_")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "expected HLO text with a line that starts with 'HloModule', got ''"),
        ("hello\nworld", "got 'hello': pass a jax.stages.Compiled or its as_text"),
        ("HloModule m, is_scheduled=true\n", "expected HLO text with an ENTRY computation"),
        (
            "HloModule m, is_scheduled=true\n\nENTRY %e () -> f32[] {\n  ROOT %x = f32[] add((\n}\n",
            "expected HLO text with balanced brackets, got 'ROOT %x",
        ),
        (module("ROOT %x = f32[64] negate(%q)", header="num_partitions=2"), "is_scheduled=true"),
        (
            module("ROOT %s = (f32[64], f32[64]) all-gather-start(%q), dimensions={0}"),
            "expected a program compiled for one of cpu, gpu, tpu, got HLO text with the marks of none",
        ),
    ],
)
def test_text_that_cannot_be_inspected(given, message):
    with pytest.raises(ValueError, match=message):
        load(given)


def test_stablehlo_is_named():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(ValueError, match=r"got StableHLO.*pass lowered.compile\(\)"):
        load(lowered.as_text())
    with pytest.raises(TypeError, match=r"got Lowered. Add .compile\(\)\."):
        load(lowered)
    with pytest.raises(
        TypeError, match=r"as from trainer.lower\(state, batch\).compile\(\), got int"
    ):
        load(3)


def test_a_compiled_function_knows_its_device():
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    program = load(compiled)
    assert (program.platform, program.device_kind) == ("cpu", "cpu")
    assert program.memory is not None
    assert load(program) is program


@pytest.mark.parametrize(("target", "platform"), [(CPU, "cpu"), (GPU, "gpu"), (TPU, "tpu")])
def test_the_platform_is_read_from_the_text(target, platform):
    assert recorded(target, "chained").platform == platform


@pytest.mark.parametrize("target", TARGETS)
def test_trip_counts(target):
    sites = recorded(target, "scanned").sites.values()
    loops = [site for site in sites if site.in_loop]
    assert {site.runs for site in loops} == {inspect_programs.LAYERS}
    assert next(iter(sites)).runs == 1


@pytest.mark.parametrize(("limit", "trips"), [("7", 3), ("8", 4), ("1", 0)])
def test_a_trip_count_is_derived_where_it_is_not_noted(limit, trips):
    program = load(module(LOOP_CALL, before=LOOP.replace("%LIMIT%", limit)))
    assert program.sites["body"].runs == trips


def test_an_unknown_trip_count_is_none():
    before = LOOP.replace("direction=LT", "direction=NE").replace("%LIMIT%", "7")
    program = load(module(LOOP_CALL, before=before))
    assert program.sites["body"].runs is None
    assert program.sites["body"].in_loop


def test_what_depends_on_what():
    entry = parse(
        module(
            """
            %a1 = f32[64]{0} negate(%q)
            %a2 = f32[64]{0} negate(%a1)
            %other = f32[64]{0} exponential(%q)
            ROOT %end = f32[64]{0} add(%a2, %other)
            """
        )
    ).entry
    assert graph.dependents(entry, "a1") == {"a1", "a2", "end"}
    assert graph.dependencies(entry, "a2") == {"a2", "a1", "q"}
