"""What operations of a compiled CPU program wait for through memory alone, read from XLA's buffer assignment.

XLA gives the memory of an array that is used up to another one. Its CPU runtime runs whatever is ready, and takes an
operation that writes over memory for one that must wait for all that wrote or read it before.
"""

import functools
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

_NO_MEMORY = ("bitcast", "parameter", "tuple", "get-tuple-element", "constant")


class Operation(NamedTuple):
    kind: str
    data: frozenset[str]  # operations whose results it reads
    memory: frozenset[str]  # earlier ones that used the memory it writes


def operations(lowered, options=None) -> dict[str, Operation]:
    """The entry computation of a lowered program, in the order XLA wrote it down."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({**(options or {}), "xla_dump_to": folder})
        # The dump is of all programs that are compiled meanwhile; this is the largest of them.
        dumps = Path(folder).glob("*after_optimizations-buffer-assignment.txt")
        assignment = max(dumps, key=lambda path: path.stat().st_size).read_text()
    text = compiled.as_text()
    return _read(text[text.index("\nENTRY ") :], _memory(assignment))


def _memory(assignment):
    """Name -> (allocation, first byte, one past the last)."""
    found, allocation = {}, None
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            allocation = line.split(":")[0]
        value = re.match(r"\s*value: <\d+ (\S+) @\S*> \(size=(\d+),offset=(\d+)\)", line)
        if value and allocation:
            size, offset = int(value[2]), int(value[3])
            found.setdefault(value[1], (allocation, offset, offset + size))
        if line.startswith("Total bytes"):
            break
    return found


def _read(entry, memory):
    lines = re.finditer(r"\n\s+(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(([^)]*)\)", entry)
    source: dict[str, str] = {}  # what a bitcast is a view of
    found: dict[str, Operation] = {}
    reads: dict[str, set[str]] = {}
    for name, kind, arguments in (line.groups() for line in lines):
        data = {source.get(x, x) for x in re.findall(r"%([\w.-]+)", arguments)}
        if kind in ("bitcast", "get-tuple-element") and data:
            (source[name],) = data
        if kind in _NO_MEMORY:
            continue
        waits = {
            other
            for other in found
            if other not in data
            and any(_overlap(memory.get(name), memory.get(x)) for x in {other, *reads[other]})
        }
        reads[name] = data
        found[name] = Operation(kind, frozenset(data), frozenset(waits))
    return found


def _overlap(a, b):
    return bool(a and b and a[0] == b[0] and a[1] < b[2] and b[1] < a[2])


def waits_through_memory(program: dict[str, Operation]) -> dict[str, frozenset[str]]:
    """Operation -> what it waits for, directly or not, and would not if every array had memory of its own."""

    @functools.cache
    def before(name, with_memory):
        one = program[name]
        direct = (one.data | one.memory if with_memory else one.data) & program.keys()
        return direct.union(*(before(other, with_memory) for other in direct))

    return {name: before(name, True) - before(name, False) for name in program}
