"""One flat list of equations out of nested jaxprs, opened only where a gradient leads to a loop.

    { jit[ ... scan -> g ... ] ; transpose g }    ->    [..., scan, ..., transpose]

Calls that lead to no loop stay closed: the compiler sees them as the user wrote them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax

from fdp import jaxprs
from fdp.intercept import _ops

Value = int  # names a value of the flat program: position in Program.avals


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of the flat program.

    Attributes:
      eqn: the equation.
      inputs: what it reads, literals included.
      outputs: what it makes; None where nobody reads it.
      run: evaluates it under the current trace.
    """

    eqn: Any
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]


@dataclasses.dataclass
class Program:
    """The flat program: steps in an order in which every value is made before it is read.

    Attributes:
      avals: abstract value of each value.
      constants: the values known beforehand.
      steps: equations.
      inputs: arguments.
      outputs: results.
    """

    avals: list[Any] = dataclasses.field(default_factory=list)
    constants: dict[Value, Any] = dataclasses.field(default_factory=dict)
    steps: list[Step] = dataclasses.field(default_factory=list)
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()

    def new(self, aval: Any) -> Value:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, aval: Any, value: Any) -> Value:
        name = self.new(aval)
        self.constants[name] = value
        return name


# Which calls to open, by position of the equation, and what to open inside of each.
_Openings = dict[int, "_Openings"]


def flatten(closed_jaxpr: Any, wanted: Iterable[int]) -> Program:
    """Flattens ``closed_jaxpr`` where outputs ``wanted`` lead to a loop."""
    body = jaxprs.body_of(closed_jaxpr)
    program = Program()
    program.inputs = tuple(program.new(var.aval) for var in body.jaxpr.invars)
    openings, _ = _find_openings(body, set(wanted))
    program.outputs = tuple(_append(program, body, openings, program.inputs, ()))
    program.steps = _without_dead(program)
    return program


def _without_dead(program: Program) -> list[Step]:
    """The steps that a result or an effect needs. Autodiff leaves others, which would look like readers."""
    alive = set(program.outputs)
    kept: list[Step] = []
    for step in reversed(program.steps):
        if not alive.isdisjoint(step.outputs) or (step.eqn is not None and step.eqn.effects):
            alive.update(step.inputs)
            kept.append(step)
    return kept[::-1]


def _find_openings(body: jaxprs.Body, wanted: set[int]) -> tuple[_Openings, tuple[set[int], bool]]:
    """Follows outputs back; also says which inputs they lead to, and whether to a loop."""
    openings: _Openings = {}
    jaxpr = body.jaxpr
    followed = {jaxpr.outvars[i] for i in wanted if not jaxprs.is_literal(jaxpr.outvars[i])}
    loop_found = False
    for position in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[position]
        outs = {i for i, var in enumerate(eqn.outvars) if var in followed}
        if not outs:
            continue
        call = jaxprs.call_body(eqn)
        if call is not None and _can_open(eqn):
            inside, (passed, found) = _find_openings(call, outs)
            if found or passed:
                openings[position] = inside
            loop_found |= found
            followed |= {eqn.invars[i] for i in passed if not jaxprs.is_literal(eqn.invars[i])}
        elif jaxprs.scan_of(eqn) is not None:
            loop_found = True
        elif _ops.is_followed(eqn):
            followed |= {atom for atom in eqn.invars if not jaxprs.is_literal(atom)}
    return openings, ({i for i, var in enumerate(jaxpr.invars) if var in followed}, loop_found)


def _can_open(eqn: Any) -> bool:
    """A call with rules, shardings or compiler options of its own would lose them."""
    if jaxprs.primitive_name(eqn).startswith("custom_"):
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    layouts = (*eqn.params.get("in_layouts", ()), *eqn.params.get("out_layouts", ()))
    return (
        not any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
        and all(layout is None for layout in layouts)
        and not eqn.params.get("compiler_options_kvs")
    )


def _append(
    program: Program,
    body: jaxprs.Body,
    openings: _Openings,
    inputs: Sequence[Value],
    scopes: tuple[str, ...],
) -> list[Value]:
    """Appends a body's equations to the program; gives the names of its outputs."""
    jaxpr = body.jaxpr
    names: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, value in zip(jaxpr.constvars, body.consts, strict=True):
        names[var] = program.constant(var.aval, value)

    def read(atom: Any) -> Value:
        return program.constant(atom.aval, atom.val) if jaxprs.is_literal(atom) else names[atom]

    for position, eqn in enumerate(jaxpr.eqns):
        given = tuple(read(atom) for atom in eqn.invars)
        if position in openings:
            call = jaxprs.call_body(eqn)
            assert call is not None  # _find_openings lists calls only
            label = eqn.params.get("name", "checkpoint")
            opened = _barrier(program, eqn, given)
            made = _append(program, call, openings[position], opened, (*scopes, label))
            names.update(zip(eqn.outvars, made, strict=True))
        else:
            outputs = tuple(
                None if jaxprs.is_dropped(var) else program.new(var.aval) for var in eqn.outvars
            )
            names.update(
                (var, value)
                for var, value in zip(eqn.outvars, outputs, strict=True)
                if value is not None
            )
            program.steps.append(Step(eqn, given, outputs, _runner(jaxpr, eqn, scopes)))
    return [read(atom) for atom in jaxpr.outvars]


def _runner(
    jaxpr: Any, eqn: Any, scopes: tuple[str, ...]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    def run(inputs: Sequence[Any]) -> Sequence[Any]:
        if not scopes:
            return jaxprs.run_eqn(jaxpr, eqn, inputs)
        with jax.named_scope("/".join(scopes)):
            return jaxprs.run_eqn(jaxpr, eqn, inputs)

    return run


def _barrier(program: Program, eqn: Any, given: tuple[Value, ...]) -> tuple[Value, ...]:
    """What JAX's own lowering of a remat puts before the recomputation, so that XLA does not undo it."""
    prevent_cse = eqn.params.get("prevent_cse", False)
    if not jaxprs.is_remat(eqn) or not eqn.params.get("differentiated", False):
        return given
    if isinstance(prevent_cse, bool):
        prevent_cse = (prevent_cse,) * len(given)
    held = [i for i, hold in enumerate(prevent_cse) if hold]
    if not held:
        return given
    after = list(given)
    for i in held:
        after[i] = program.new(program.avals[given[i]])
    program.steps.append(
        Step(
            eqn=None,
            inputs=tuple(given[i] for i in held),
            outputs=tuple(after[i] for i in held),
            run=lambda inputs: lax.optimization_barrier(tuple(inputs)),
        )
    )
    return tuple(after)
