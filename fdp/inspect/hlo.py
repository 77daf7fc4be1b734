"""A reader for the text of compiled programs (HLO), as CPU, GPU and TPU compilers print it.

    HloModule jit_step, is_scheduled=true, ...
    %fused_add (param_0: f32[8]) -> f32[8] { ... }                      a computation
    ENTRY %main (p.0: f32[8]) -> f32[8] {
      %fusion = f32[8]{0} fusion(%p.0), kind=kLoop, calls=%fused_add    an instruction
    }

JAX has no public parser for it, and it differs in detail between backends and releases, so the reader is
tolerant: an unknown opcode is an instruction like any other, and attributes are kept as text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, cast

from fdp.inspect.shapes import Shape, parse_shape

_NAME = r"%?([\w.\-~<>$]+)"
_INSTRUCTION = re.compile(rf"\s*(ROOT\s+)?{_NAME}\s+=\s+")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(rf"(ENTRY\s+)?{_NAME}\s*(?:\(.*)?\{{\s*$")
# Quoted text is one token, so that brackets and commas in it do not count.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{)\]},]')
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations|async_computation)=(\{[^}]*\}|%?[\w.\-~<>$]+)"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# What stands between their brackets is a value, not operands.
_WITHOUT_OPERANDS = ("constant", "parameter", "iota")


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction.

    Attributes:
      name: unique in its module, without the ``%``.
      opcode: XLA's name of the operation, such as ``"fusion"``.
      shape: of its result.
      operands: names of its operands.
      position: its index in its computation, which is its place in the schedule.
      is_root: whether its result is the result of the computation.
      literal: what a constant or parameter has between its brackets.
      attributes_text: everything behind the operands.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    position: int
    is_root: bool
    literal: str
    attributes_text: str

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Attributes by name, as text: ``{"kind": "kLoop", "calls": "%fused_add"}``."""
        pairs = (part.partition("=") for part in split_top(self.attributes_text))
        return {key.strip(): value.strip() for key, equals, value in pairs if equals}

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """The backend's notes on the instruction; empty where there are none, or none in JSON."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text)
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            return {}
        return cast(dict[str, Any], value) if isinstance(value, dict) else {}

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations it calls, by attribute: ``{"body": ("region_0",), ...}``."""
        return {
            key: tuple(name.strip().lstrip("%") for name in value.strip("{}").split(","))
            for key, value in _CALLED.findall(self.attributes_text)
        }

    @property
    def target(self) -> str:
        """What a custom call calls, or an empty string."""
        match = _TARGET.search(self.attributes_text) if self.opcode == "custom-call" else None
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions that run one after the other, in the order of the text."""

    name: str
    is_entry: bool
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the result of the computation."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that produce the operands."""
        return tuple(self.by_name[name] for name in instruction.operands if name in self.by_name)

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that take each result, by name of the producer."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return {name: tuple(found) for name, found in users.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A program: its computations by name, the one it starts with, and its ``HloModule`` line."""

    name: str
    header: str
    computations: dict[str, Computation]
    entry: Computation

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of the text is a schedule."""
        return "is_scheduled=true" in self.header

    @property
    def device_count(self) -> int:
        """Number of devices the program was compiled for."""
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", self.header)
        return math.prod(int(count) for count in counts)

    def called_by(self, instruction: Instruction) -> tuple[Computation, ...]:
        """The computations that an instruction calls."""
        names = (name for group in instruction.called.values() for name in group)
        return tuple(self.computations[name] for name in names if name in self.computations)


def parse(text: str) -> Module:
    """Reads a program.

    Args:
      text: the whole of ``jax.stages.Compiled.as_text()``.

    Raises:
      ValueError: the text is no HLO, or only part of a module.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("HloModule")), None)
    if start is None:
        raise ValueError(_what_it_is_instead(text))
    computations = {c.name: c for c in _computations(lines[start + 1 :]) if c.instructions}
    entry = next((c for c in computations.values() if c.is_entry), None)
    if entry is None:
        raise ValueError(
            "expected HLO text with an ENTRY computation, got a module without one: "
            "pass the whole of compiled.as_text()."
        )
    header = lines[start]
    return Module(header.split(",")[0].split()[-1], header, computations, entry)


def split_top(text: str) -> list[str]:
    """Splits at the commas that are outside of brackets and quotes."""
    parts, depth, start = list[str](), 0, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _what_it_is_instead(text: str) -> str:
    if re.search(r"stablehlo|module @|func\.func", text[:4000]):
        return (
            "expected the text of a compiled program, got StableHLO, which says what was asked for "
            "and not what runs: pass lowered.compile() instead of lowered.as_text()."
        )
    head = next(iter(text.strip().splitlines()), "")[:60]
    return (
        f"expected HLO text with a line that starts with 'HloModule', got {head!r}: "
        "pass a jax.stages.Compiled or its as_text()."
    )


def _computations(lines: list[str]) -> Iterator[Computation]:
    name, is_entry, body = "", False, list[str]()
    inside = False
    for line in lines:
        if not inside:
            if (match := _COMPUTATION.match(line)) and " = " not in line:
                name, is_entry, body, inside = match[2], bool(match[1]), [], True
        elif line.startswith("}"):
            yield Computation(name, is_entry, tuple(_instructions(body)))
            inside = False
        elif _INSTRUCTION.match(line):
            body.append(line)
        elif body and line.strip():  # a literal or a string that runs over several lines
            body[-1] += " " + line.strip()


def _instructions(body: list[str]) -> Iterator[Instruction]:
    position = 0
    for line in body:
        head = _INSTRUCTION.match(line)
        shape_end = _shape_end(line, head.end()) if head else 0
        opcode = _OPCODE.match(line, shape_end)
        if head is None or opcode is None:
            continue
        close = _closing(line, opcode.end() - 1)
        inner = line[opcode.end() : close]
        takes_operands = opcode[1] not in _WITHOUT_OPERANDS
        # An operand is "%name", or "f32[2]{0} %name": the name comes last.
        parts = split_top(_COMMENT.sub("", inner)) if takes_operands else []
        yield Instruction(
            name=head[2],
            opcode=opcode[1],
            shape=parse_shape(line[head.end() : shape_end]),
            operands=tuple(part.split()[-1].lstrip("%") for part in parts),
            position=position,
            is_root=bool(head[1]),
            literal="" if takes_operands else inner,
            attributes_text=line[close + 1 :].lstrip(", "),
        )
        position += 1


def _shape_end(line: str, start: int) -> int:
    if line[start] == "(":
        return _closing(line, start) + 1
    end = line.find("]", start) + 1
    return _closing(line, end) + 1 if line[end : end + 1] == "{" else end


def _closing(line: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``."""
    depth = 0
    for match in _TOKEN.finditer(line, start):
        token = match[0]
        depth += (token in "([{") - (token in ")]}")
        if depth == 0 and token != ",":
            return match.start()
    raise ValueError(f"expected HLO text with balanced brackets, got {line.strip()[:60]!r}.")
