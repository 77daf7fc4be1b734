"""One of several processes of tests/test_processes.py: trains, then writes what it ended with."""

import json
import sys
import traceback

import jax

case, process, processes, port, out = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
jax.config.update("jax_num_cpu_devices", 8 // processes // 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, initialization_timeout=60)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import fdp  # noqa: E402
from tests.models import batches, mlp_loss, mlp_params  # noqa: E402
from tests.stateful_hook import error_feedback  # noqa: E402


def share(batch):
    return jax.tree.map(lambda x: np.split(x, processes)[process], batch)


def train(**options):
    trainer = fdp.data_parallel(mlp_loss, optax.adam(1e-2), bucket_bytes=1300, **options)
    # Other values in every process: init must take process 0's.
    state = trainer.init(mlp_params(seed=process))
    losses = []
    for step, batch in enumerate(batches(6)):
        step_fn = trainer.no_sync_step if step == 3 else trainer.train_step
        state, info = step_fn(state, share(batch))
        if step != 3:
            losses.append(float(info.loss))
    return {
        "losses": losses,
        "params": [np.asarray(x).tolist() for x in jax.tree.leaves(state.params)],
        "step": int(state.step),
    }


def local_state(via):
    """State that stays with its replica starts from process 0's too, on devices of all processes."""

    def loss(params, batch, *, model_state):
        return jnp.mean(params * batch), model_state + jnp.sum(batch)

    trainer = fdp.data_parallel(
        loss, optax.sgd(0.1), via=via, has_model_state=True, model_state_policy="local"
    )
    state = trainer.init(jnp.ones(()), model_state=jnp.float32(10 * (process + 1)))
    for _ in range(2):
        state, _ = trainer.train_step(state, share(np.arange(4, dtype=np.float32)))
    return [float(fdp.consistent_model_state(state, policy)) for policy in ("max", "mean")]


def run():
    if case in ("shard_map", "pmap"):
        return train(via=case, num_microbatches=2)
    if case == "stateful":
        return {
            "shard_map": train(hook=error_feedback()),
            "pmap": train(hook=error_feedback(), via="pmap"),
            "local": {via: local_state(via) for via in ("shard_map", "pmap")},
        }
    return {kind: refusal(kind) for kind in ("shape", "dtype", "missing", "none")}


def refusal(kind):
    """What init says where process 1 has another model."""
    params = mlp_params()
    if kind == "shape" and process == 1:
        params["layer_3"]["kernel"] = jnp.zeros((12, 13))
    if kind == "missing" and process == 1:
        del params["layer_3"]
    if kind == "dtype" and process == 1:
        params["layer_5"]["bias"] = params["layer_5"]["bias"].astype(jnp.bfloat16)
    try:
        fdp.data_parallel(mlp_loss, optax.sgd(0.1)).init(params)
    except ValueError as error:
        return f"ValueError: {error}"
    return None


try:
    result = run()
except Exception as error:
    traceback.print_exc()
    result = {"error": f"{type(error).__name__}: {error}"}
with open(out, "w") as file:
    json.dump(result, file)
