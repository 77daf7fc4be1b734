"""One of several processes of tests/test_processes_misbehaving.py: one of them does something else than the others.

Every part of a case writes what came of it, in one file at the end. A process leaves by ``os._exit``: after an error
JAX's own exit waits minutes for processes that will not come.
"""

import json
import os
import sys
import time
import traceback

import jax

case, process, processes, port, out = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, initialization_timeout=60)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import fdp  # noqa: E402
from fdp import compat, exchange  # noqa: E402
from fdp.agree import once  # noqa: E402
from tests.stateful_hook import error_feedback  # noqa: E402

WAIT = 20.0  # enough for a slow machine; nothing waits so long unless the test fails
SHORT = 1.0
results = {}


def part(name, function):
    """Runs it and keeps its result, or its error, with the seconds it took."""
    started = time.monotonic()
    try:
        result = function()
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    results[name] = {"result": result, "seconds": time.monotonic() - started}


def leave():
    """Writes the results and is gone, process 0 last: without its store JAX ends the others on the spot."""
    with open(f"{out}.part", "w") as file:
        json.dump(results, file)
    os.rename(f"{out}.part", out)
    others = [out.replace(f"-{process}.json", f"-{other}.json") for other in range(processes)]
    deadline = time.monotonic() + (10 if process == 0 else 0)
    while time.monotonic() < deadline and not all(map(os.path.exists, others)):
        time.sleep(0.05)
    sys.stdout.flush()
    os._exit(0)


MESH = jax.make_mesh((jax.device_count(),), ("data",))


def examples(batches):
    """Batches of 4 examples: process 0's data is 0, 1, 2...; process 1's 1000, 1001..."""
    start = 1000 * process
    return [np.arange(start + 4 * k, start + 4 * k + 4, dtype=np.float32) for k in range(batches)]


@jax.jit
@jax.shard_map(mesh=MESH, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
def total(batch, mask):
    """(sum of what counts, how much counts), over all replicas of all processes."""
    return jax.lax.psum((jnp.sum(batch * mask), jnp.sum(mask)), "data")


def joined_sums(batches, **options):
    sums = []
    for batch, mask in fdp.data.join(batches, timeout=WAIT, **options):
        sums.append([float(x) for x in total(*fdp.data.global_batch((batch, mask), MESH))])
    return sums


def joined_training(batches):
    """A weighted step consumes the mask as weights; the loss of each step, and w in the end."""

    def loss(w, batch):
        x, weight = batch
        return jnp.sum((w * x / 1000 - 1) ** 2 * weight), jnp.sum(weight)

    trainer = fdp.data_parallel(loss, optax.sgd(0.1, momentum=0.9), mesh=MESH, weighted=True)
    state = trainer.init(np.float32(0))
    losses = []
    for batch in fdp.data.join(batches, size=4, timeout=WAIT):
        state, info = trainer.train_step(state, batch)
        losses.append(float(info.loss))
    return [*losses, float(state.params)]


# --- agreement ---------------------------------------------------------------------------------------------------


def trainer_facts(bucket_bytes=24):
    params = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}

    def loss(params, x):
        return jnp.mean((x @ params["a"] + params["b"]) ** 2)

    trainer = fdp.data_parallel(
        loss,
        optax.sgd(0.1),
        mesh=MESH,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=bucket_bytes,
        order="reverse",
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = trainer.init(shapes)
    batch = jax.ShapeDtypeStruct((jax.device_count(), 2), jnp.float32)
    plan = fdp.plan_buckets(params, bucket_bytes=bucket_bytes)
    return {"plan": plan, "batch": batch}, {"program": trainer.lower(state, batch)}


def asked_before_the_first_step(via, factor):
    """What a step can ask: whether its whole program, with ``factor`` in it, is the same in every process."""
    loss = lambda w, x: factor * jnp.mean((x @ w) ** 2)  # noqa: E731
    trainer = fdp.data_parallel(loss, optax.sgd(0.1), via=via)
    state = trainer.init(np.full(2, 1.0 + process, np.float32))
    batch = np.full((4, 2), process, np.float32)
    made = []

    def facts():
        made.append(None)
        return {"plan": trainer.plan(state, batch), "program": trainer.lower(state, batch)}

    ask = once(timeout=WAIT)
    for _ in range(3):
        ask("train_step", (state, batch), facts)
    return len(made)


def agreement():
    odd = process == 1
    same, program = trainer_facts()
    other_plan, other_program = trainer_facts(bucket_bytes=64)
    part("same", lambda: fdp.agree({**same, **program}, timeout=WAIT))
    part("plan", lambda: fdp.agree(other_plan if odd else same, timeout=WAIT))
    part("program", lambda: fdp.agree(other_program if odd else program, timeout=WAIT))
    shapes = {"batch": np.zeros((4 + process, 2), np.float32)}
    part("shapes", lambda: fdp.agree(shapes, timeout=WAIT))
    part("schedule", lambda: fdp.agree({"schedule": ("ordered", "fused")[process]}, timeout=WAIT))
    trees = [{"w": np.zeros(3, np.float32)}, {"w": np.zeros(4, np.float32)}]
    trainer = fdp.data_parallel(lambda w, x: jnp.mean(w["w"]) * jnp.mean(x), optax.sgd(0.1))
    part("init", lambda: trainer.init(trees[process]) and None)
    for via in ("shard_map", "pmap"):
        part(f"asked, {via}", lambda via=via: asked_before_the_first_step(via, 1.0))
        part(f"told, {via}", lambda via=via: asked_before_the_first_step(via, 1.0 + process))
    part("barrier", lambda: fdp.barrier("here", timeout=WAIT))
    # Through the devices, as for a JAX whose client is gone: texts of different length.
    found, compat.coordination = compat.coordination, lambda: None
    part("no client", lambda: exchange.gather("x", "text" * (process + 1), timeout=WAIT))
    part("no client, plan", lambda: fdp.agree(other_plan if odd else same, timeout=WAIT))
    compat.coordination = found
    # Last, because nobody waits for it any more.
    if odd:
        part("late", lambda: time.sleep(2 * SHORT) or fdp.barrier("late", timeout=SHORT))
    else:
        part("late", lambda: fdp.barrier("late", timeout=SHORT))
    part("still there", lambda: fdp.barrier("still there", timeout=WAIT))


# --- join --------------------------------------------------------------------------------------------------------


def joining():
    part("fewer batches", lambda: joined_sums(examples((2, 4)[process])))
    like = np.ones(4, np.float32)
    part("no batch at all", lambda: joined_sums(examples((0, 2)[process]), like=like, lookahead=3))
    partial = [*examples(2), examples(3)[-1][: 1 + process]]
    part("partial batches", lambda: joined_sums(partial, size=4))
    uneven = [*examples((2, 4)[process]), examples(5)[-1][: 1 + 2 * process]]
    part("training", lambda: joined_training(uneven))
    wrong = [*examples(1), np.zeros(4 + 2 * process, np.float32)]
    part("wrong shapes", lambda: joined_sums(wrong))

    def broken():
        yield from examples(1)
        raise OSError("disk is gone")

    part("broken iterator", lambda: joined_sums(broken() if process else examples(3)))

    def leaves_early():
        for _ in fdp.data.join(examples(3), timeout=WAIT):
            break

    if process:
        part("leaves early", leaves_early)
    else:
        # Nothing to compute together: the other one is not there to take part in it.
        part("leaves early", lambda: [0 for _ in fdp.data.join(examples(3), timeout=WAIT)])
    # Still connected, and in step.
    part("afterwards", lambda: joined_sums(examples(1)))


# --- verification ------------------------------------------------------------------------------------------------


def trained(via):
    """A state with parts of each replica's own, which must not be compared."""
    trainer = fdp.data_parallel(
        lambda w, x: jnp.mean((x @ w - 1) ** 2), optax.adam(0.1), via=via, hook=error_feedback()
    )
    x = np.random.default_rng(process).normal(size=(4, 3)).astype(np.float32)
    state, _ = trainer.train_step(trainer.init(np.ones(3, np.float32)), x)
    state, _ = trainer.no_sync_step(state, x)
    return state


def verification():
    everywhere = NamedSharding(MESH, PartitionSpec())

    def replicated(values):
        parts = [jax.device_put(v, d) for v, d in zip(values, jax.local_devices(), strict=True)]
        shape = values[0].shape
        return jax.make_array_from_single_device_arrays(shape, everywhere, parts)

    same = np.arange(4, dtype=np.float32)
    swapped = same[[0, 2, 1, 3]]
    tree = {"w": replicated([same, same]), "host": same, "local": jnp.asarray(same)}
    part("equal", lambda: fdp.check_replicas(tree, timeout=WAIT))
    one = replicated([same, swapped if process == 1 else same])
    part("one device", lambda: fdp.check_replicas({**tree, "v": one}, "params", timeout=WAIT))
    all_of_one = replicated([same + process] * 2)
    part("one process", lambda: fdp.check_replicas({"u": all_of_one}, timeout=WAIT))
    part("host", lambda: fdp.check_replicas({"host": same + process}, timeout=WAIT))
    split = fdp.global_batch(same + process, MESH)
    part("split", lambda: fdp.check_replicas({"batch": split}, timeout=WAIT))
    trees = [tree, {"w": tree["w"]}]
    part("other trees", lambda: fdp.check_replicas(trees[process], timeout=WAIT))
    for via in ("shard_map", "pmap"):
        part(f"trained, {via}", lambda via=via: fdp.check_replicas(trained(via), timeout=WAIT))
    key = jax.jit(lambda: jax.random.key(0), out_shardings=everywhere)()
    part("key", lambda: fdp.check_replicas({"key": key}, timeout=WAIT))


# --- processes that are not there --------------------------------------------------------------------------------


def absent():
    """Process 1 arrives once, then leaves."""
    part("both", lambda: fdp.barrier("both", timeout=WAIT))
    if process == 1:
        return
    part("barrier", lambda: fdp.barrier("checkpoint", timeout=SHORT))
    part("agree", lambda: fdp.agree({"seed": 0}, timeout=SHORT))
    part("join", lambda: list(fdp.data.join(examples(2), timeout=SHORT)))
    part("verify", lambda: fdp.check_replicas({"w": np.zeros(3)}, timeout=SHORT))


{"agreement": agreement, "joining": joining, "verification": verification, "absent": absent}[case]()
leave()
