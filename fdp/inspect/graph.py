"""Which computations hold a schedule, how often each runs, and what depends on what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from fdp.inspect.hlo import Computation, Instruction, Module

# These pass a value on without changing it, so a loop's counter can be followed through them.
_PASS_ON = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start")
# They run a computation that has a schedule of its own. What fusions and reductions call is one kernel.
_CONTROL_FLOW = ("while", "conditional", "call", "async-start")


@dataclasses.dataclass(frozen=True)
class Site:
    """A scheduled computation, and how it is reached.

    Attributes:
      computation: its instructions.
      runs: times it runs in one step, or None where a loop's trip count is not in the program.
      in_loop: whether a loop's body leads to it.
      conditional: whether a branch leads to it, so that it may not run at all.
    """

    computation: Computation
    runs: int | None
    in_loop: bool = False
    conditional: bool = False


def sites(module: Module) -> dict[str, Site]:
    """The scheduled computations by name, in the order in which a step first reaches them."""
    found: dict[str, Site] = {}

    def visit(site: Site) -> None:
        if site.computation.name in found:
            return
        found[site.computation.name] = site
        for instruction in site.computation.instructions:
            if instruction.opcode not in _CONTROL_FLOW:
                continue
            runs, in_loop, conditional = site.runs, site.in_loop, site.conditional
            if instruction.opcode == "while":
                trips = trip_count(module, site.computation, instruction)
                runs = None if runs is None or trips is None else runs * trips
                in_loop = True
            elif instruction.opcode == "conditional":
                conditional = True
            for called in module.called_by(instruction):
                visit(Site(called, runs, in_loop, conditional))

    visit(Site(module.entry, 1))
    return found


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a ``while``, where the program tells; else None.

    CPU and GPU note it on the loop. TPU does not, so there it is read from the loop itself: the condition
    compares one element of the carried tuple with a constant, the body adds a constant to it.
    """
    known = loop.backend_config.get("known_trip_count")
    if known and "n" in known:
        return int(known["n"])
    try:
        condition = module.computations[loop.called["condition"][0]]
        body = module.computations[loop.called["body"][0]]
        test = condition.root
        counter, limit = condition.operands(test)
        if test.opcode != "compare" or test.attributes.get("direction") != "LT":
            return None
        index = int(_source(condition, counter).attributes["index"])
        start = _integer(computation, computation.operands(loop)[0], index)
        step = _step(body, index)
        span = _constant(condition, limit) - start
        return max(0, -(-span // step))
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        return None


def _source(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _PASS_ON:
        instruction = computation.operands(instruction)[0]
    return instruction


def _constant(computation: Computation, instruction: Instruction) -> int:
    source = _source(computation, instruction)
    if source.opcode != "constant":
        raise ValueError(source.opcode)
    return int(source.literal)


def _integer(computation: Computation, carried: Instruction, index: int) -> int:
    """The constant that element ``index`` of the carried tuple starts with."""
    return _constant(computation, computation.operands(_source(computation, carried))[index])


def _step(body: Computation, index: int) -> int:
    """The constant that the body adds to element ``index``."""
    add = _source(body, body.operands(body.root)[index])
    if add.opcode != "add":
        raise ValueError(add.opcode)
    terms = [_source(body, operand) for operand in body.operands(add)]
    (constant,) = (term for term in terms if term.opcode == "constant")
    return int(constant.literal)


def contains(module: Module, instruction: Instruction, test: Callable[[Instruction], bool]) -> bool:
    """Whether the instruction, or anything in a computation it calls, passes the test."""
    return test(instruction) or any(
        contains(module, inner, test)
        for called in module.called_by(instruction)
        for inner in called.instructions
    )


def dependents(computation: Computation, name: str) -> set[str]:
    """Names of everything that needs the result of ``name``, itself included."""
    return _closure([name], lambda n: (user.name for user in computation.users.get(n, ())))


def dependencies(computation: Computation, name: str) -> set[str]:
    """Names of everything that ``name`` needs, itself included."""
    by_name = computation.by_name
    return _closure([name], lambda n: (o for o in by_name[n].operands if o in by_name))


def _closure(start: list[str], neighbours: Callable[[str], Iterable[str]]) -> set[str]:
    seen, todo = set(start), list(start)
    while todo:
        for name in neighbours(todo.pop()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen
