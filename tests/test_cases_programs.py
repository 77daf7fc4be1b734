"""Public problems of other libraries, as ``docs/cases.md`` lists them: what stands in the program."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import fdp
from tests.models import LAYERS, batches, mlp_apply, mlp_loss, mlp_params, relative_difference

ROOT = Path(__file__).parent.parent
DATA = batches(1)[0]
COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)\b")


def mesh_of(count):
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def equations(jaxpr, inside=()):
    """Every equation of a program with the names of those it stands in."""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for parameter in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            body = getattr(parameter, "jaxpr", parameter)
            if hasattr(body, "eqns"):
                yield from equations(body, (*inside, eqn.primitive.name))


def sums(program):
    return [(eqn, inside) for eqn, inside in equations(program) if "psum" in eqn.primitive.name]


def routed_loss(params, batch):
    """A collective of the model's own, and a branch that some replicas take."""
    centre = lax.pmean(jnp.mean(batch["x"]), "data")
    hidden = (batch["x"] - centre) @ params["always"]
    nothing = jnp.zeros_like(hidden)
    routed = lax.cond(batch["route"][0], lambda w: hidden @ w, lambda w: nothing, params["some"])
    return jnp.mean((hidden + routed - batch["y"]) ** 2)


def routed(route):
    return {**DATA, "route": np.repeat(np.array(route), len(DATA["x"]) // len(route))}


@pytest.fixture(scope="module")
def router():
    params = {name: jnp.eye(12) * (i + 1) for i, name in enumerate(("always", "some"))}
    trainer = fdp.data_parallel(
        routed_loss, optax.sgd(1.0), mesh=mesh_of(2), bucket_bytes=600, unused="skip"
    )
    return trainer, params


def test_p44_no_reduction_of_ours_stands_in_a_branch(router):
    """A collective in a branch that replicas take differently hangs; reductions stand outside of all of them."""
    trainer, params = router

    def step(state, batch):
        return trainer.train_step(state, batch)

    program = jax.make_jaxpr(step)(trainer.init(params), routed([True, False])).jaxpr
    found = sums(program)
    leaves = [eqn for eqn, _ in found if sum(v.aval.size for v in eqn.invars) >= 144]
    assert len(leaves) == 2
    assert all("cond" not in inside for _, inside in found)
    assert any("cond" in inside for _, inside in equations(program))


def routed_mean(params, batch, route):
    """The same loss of two replicas, as one device computes it."""
    total = 0.0
    for r, taken in enumerate(route):
        x, y = (batch[name][32 * r : 32 * r + 32] for name in "xy")
        hidden = (x - batch["x"].mean()) @ params["always"]
        out = hidden + (hidden @ params["some"] if taken else 0)
        total += jnp.mean((out - y) ** 2) / 2
    return total


def test_p8_the_launch_order_does_not_depend_on_who_used_what(router):
    """One program for every routing, beside a collective of the model; and its numbers are right."""
    trainer, params = router
    texts = set()
    for route in ([True, True], [True, False], [False, False]):
        batch = routed(route)
        texts.add(trainer.lower(trainer.init(params), batch).as_text())
        state, _ = trainer.train_step(trainer.init(params), batch)
        grads = jax.grad(routed_mean)(params, batch, route)
        want = jax.tree.map(lambda p, g: p - g, params, grads)
        assert relative_difference(state.params, want) <= 1e-5
    assert len(texts) == 1


def test_p46_p69_evaluation_has_no_collective():
    """Trained parameters are whole on every device: a process may evaluate alone, and in any order with training."""
    trainer = fdp.data_parallel(mlp_loss, optax.sgd(0.1), mesh=mesh_of(2))
    state, _ = trainer.train_step(trainer.init(mlp_params()), DATA)
    evaluate = jax.jit(mlp_apply).lower(state.params, DATA["x"]).compile()
    assert not COLLECTIVE.search(evaluate.as_text())
    step = trainer.lower(state, DATA).compile()
    assert COLLECTIVE.search(step.as_text())
    one = jax.tree.map(lambda x: x.addressable_shards[1].data, state.params)
    np.testing.assert_allclose(mlp_apply(one, DATA["x"]), mlp_apply(state.params, DATA["x"]))


def test_p53_p54_remat_changes_neither_gradients_nor_reductions():
    """One program whatever the bucket size, with as many reductions as buckets, with and without recomputation."""

    def remat_loss(params, batch):
        x = batch["x"]
        for i in range(LAYERS):
            layer = params[f"layer_{2 * i + 1}"]
            x = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["kernel"] + p["bias"]))(layer, x)
        return jnp.mean((x - batch["y"]) ** 2)

    found = {}
    for loss in (mlp_loss, remat_loss):
        trainer = fdp.data_parallel(loss, optax.sgd(1.0), mesh=mesh_of(2), bucket_bytes=1300)
        state = trainer.init(mlp_params())
        plan = trainer.plan(state, DATA)
        compiled = trainer.lower(state, DATA).compile()
        sent = [c for c in fdp.inspect.collectives(compiled) if c.nbytes > 4]
        assert len(sent) == len(plan.buckets) > 1
        state, _ = trainer.train_step(state, DATA)
        found[loss] = state.params
    assert relative_difference(found[remat_loss], found[mlp_loss]) <= 1e-6


REMOVED = re.compile(r"device_put_(replicated|sharded)|GSPMDSharding|xmap\b")


def test_j19_nothing_that_jax_has_removed():
    for folder in ("fdp", "examples", "benchmarks", "notebooks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert not REMOVED.search(path.read_text("utf-8")), path.name
    assert REMOVED.search("jax.device_put_replicated(params, devices)")
