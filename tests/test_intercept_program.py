"""Where the reductions sit in the rewritten program: in the loop, one iteration late, and how many there are."""

import re

import jax
import jax.numpy as jnp
import pytest
from intercept_cases import CASES, LAYERS, WIDTH, end, layer, over_layers, simple_loss, weights
from intercept_helpers import QUICK, integers, intercepted, reduced_afterwards, sharded
from jax import lax

from fdp import compat, intercept, jaxprs

BATCH = integers(100, 32, WIDTH)
PSUMS = ("psum", "psum_invariant")


def bodies(jaxpr, times=1):
    """Every jaxpr in a program and how often a step runs it."""
    yield jaxpr, times
    for eqn in jaxpr.eqns:
        scan = jaxprs.scan_of(eqn)
        inner = eqn.params.get("jaxpr") if scan is None else scan.body.jaxpr
        if inner is not None:
            yield from bodies(inner, times * (1 if scan is None else scan.length))


def gradient_sums(closed):
    """(the jaxpr it is in, equation, how often a step runs it) of every psum of more than a scalar."""
    return [
        (jaxpr, eqn, times)
        for jaxpr, times in bodies(closed.jaxpr)
        for eqn in jaxpr.eqns
        if eqn.primitive.name in PSUMS and eqn.invars[0].aval.shape
    ]


def traced(fun, params, check_vma=True):
    return jax.make_jaxpr(sharded(fun, check_vma=check_vma))(params, BATCH)


def needed_for(jaxpr, eqn):
    """Names of the equations of ``jaxpr`` that ``eqn`` needs the results of."""
    needed, names = {v for v in eqn.invars if not jaxprs.is_literal(v)}, []
    for other in reversed(jaxpr.eqns):
        if not needed.isdisjoint(other.outvars):
            names.append(other.primitive.name)
            needed.update(v for v in other.invars if not jaxprs.is_literal(v))
    return names


def multiplies(eqn):
    """Whether this is a matmul or a call that does one."""
    call = jaxprs.call_body(eqn)
    inside = () if call is None else call.jaxpr.eqns
    return eqn.primitive.name == "dot_general" or any(multiplies(one) for one in inside)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("peel", "extra"), [(True, 0), (False, 1)], ids=["peel", "zeros"])
def test_reductions_per_step(peel, extra, check_vma):
    """Two leaves: one reduction each per iteration, with zeros in the first or not; the last after the loop."""
    closed = traced(intercepted(simple_loss, peel=peel), weights(), check_vma)
    found = gradient_sums(closed)
    in_loop = [times for jaxpr, _, times in found if times > 1]
    assert sum(times for _, _, times in found) == 2 * (LAYERS + extra)
    assert in_loop == [LAYERS - 1 + extra] * 2
    assert {eqn.invars[0].aval.shape for _, eqn, _ in found} == {(WIDTH,), (WIDTH, WIDTH)}


@pytest.mark.parametrize("name", ["remat, body", "layers in a scan, unroll 2", "jit around, both"])
def test_a_reduction_neither_needs_nor_delays_the_iteration_it_is_in(name):
    loss, params, _ = CASES[name]()
    loops = [found for found in gradient_sums(traced(intercepted(loss), params)) if found[2] > 1]
    assert loops
    for body, eqn, _ in loops:
        assert any(multiplies(other) for other in body.eqns)
        assert "dot_general" not in needed_for(body, eqn)
        for other in body.eqns:
            if multiplies(other):
                assert not any(name in PSUMS for name in needed_for(body, other))


def test_reduced_afterwards_is_what_this_is_not():
    """The check above can fail: here the reductions are after the loop, and of everything at once."""
    found = gradient_sums(traced(reduced_afterwards(simple_loss), weights()))
    assert [times for _, _, times in found] == [1, 1]
    assert all("scan" in needed_for(jaxpr, eqn) for jaxpr, eqn, _ in found)


def test_accumulated_gradients_are_reduced_once():
    loss, params, _ = CASES["one parameter for all iterations"]()
    closed = traced(intercepted(loss), params)
    shared = [t for _, e, t in gradient_sums(closed) if e.invars[0].aval.shape == (WIDTH, WIDTH)]
    assert sorted(shared) == [1, 1, LAYERS - 1]  # shared, the last slice of w, w in the loop


def test_types_say_which_values_are_replicated():
    """Reduced gradients are replicated by type, as shard_map's out_specs demand; slices still differ."""
    closed = traced(intercepted(simple_loss), weights())
    (body, _, _), *_ = (found for found in gradient_sums(closed) if found[2] > 1)
    kinds = {(v.aval.shape, bool(compat.aval_varying_axes(v.aval))) for v in body.outvars}
    assert kinds >= {
        ((LAYERS, WIDTH, WIDTH), False),  # the reduced gradients, a buffer the loop carries
        ((WIDTH, WIDTH), True),  # the slice that the next iteration will reduce
    }


def test_the_compiled_loop_holds_the_all_reduce():
    compiled = (
        jax.jit(sharded(intercepted(simple_loss)), compiler_options=QUICK)
        .lower(weights(), BATCH)
        .compile()
    )
    text = compiled.as_text()
    computations = dict(
        re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    )
    loop_bodies = re.findall(r"body=%?([\w.\-]+)", text)
    assert any(" all-reduce(" in computations[body] for body in loop_bodies)


def test_remat_is_still_protected_from_common_subexpression_elimination():
    """Opening a remat must not lose the barrier in front of the recomputation."""
    loss, params, _ = CASES["remat, all of it"]()
    lowered = jax.jit(sharded(intercepted(loss))).lower(params, BATCH).as_text()
    plain = jax.jit(sharded(reduced_afterwards(loss))).lower(params, BATCH).as_text()
    count = plain.count("optimization_barrier")
    assert lowered.count("optimization_barrier") == count > 0


def test_calls_that_lead_to_no_loop_stay_closed():
    def loss(p, x):
        h = jax.jit(jnp.tanh)(x @ p["first"])
        return end(over_layers(h, p["layers"]))

    params = {"layers": weights(), "first": integers(5, WIDTH, WIDTH)}
    names = [
        eqn.params["name"]
        for jaxpr, _ in bodies(traced(intercepted(loss), params).jaxpr)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "jit"
    ]
    assert "tanh" in names


def test_names_and_source_lines_survive():
    def loss(p, x):
        with jax.named_scope("my_model"):
            return end(over_layers(x, p, lambda h, one: layer(h, one)))

    lowered = jax.jit(sharded(intercepted(loss))).lower(weights(), BATCH)
    text = lowered.as_text(debug_info=True)
    assert "my_model" in text
    assert "test_intercept_program.py" in text


def test_the_loop_waits_for_what_was_ready_before_it():
    """With the first iteration peeled, its compute hides the reduction in front of the loop."""
    loss, params, _ = CASES["layers in a scan, forward"]()

    def chained(loop, slices, index, token, state):
        return {leaf: lax.psum(one, "data") for leaf, one in slices.items()}, token, state

    def ready(gradients, token):
        reduced = {leaf: lax.psum(g, "data") for leaf, g in gradients.items()}
        return reduced, token + sum(jnp.sum(g) for g in reduced.values())

    def scan_inputs(peel):
        fun = intercepted(
            loss, peel=peel, token=jnp.zeros(()), reduce_slices=chained, reduce_ready=ready
        )
        closed = traced(fun, params)
        (outer,) = (e.params["jaxpr"] for e in closed.eqns if e.primitive.name == "shard_map")
        scan = [e for e in outer.eqns if e.primitive.name == "scan"][-1]
        return needed_for(outer, scan)

    assert any(name in PSUMS for name in scan_inputs(True))
    assert not any(name in PSUMS for name in scan_inputs(False))


def test_an_interception_can_be_evaluated_twice():
    """Nothing is kept in it between evaluations."""
    closed = jax.make_jaxpr(jax.grad(simple_loss))(weights(), BATCH)
    found = intercept.analyze(closed, {0: 0, 1: 1})

    def evaluate(b, w, x):
        def same(loop, slices, index, token, state):
            return slices, token, state

        return intercept.evaluate(found, [b, w, x], reduce_slices=same).outputs

    args = (weights()["b"], weights()["w"], BATCH)
    first, second = (str(jax.make_jaxpr(evaluate)(*args)) for _ in range(2))
    assert first == second
