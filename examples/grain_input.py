"""Feeds data parallel training from grain: every process reads its own examples, each example counts once an epoch.

    python examples/grain_input.py                            or, with fdp[test] installed, in two processes,
    python -m fdp.launch -n 2 examples/grain_input.py together

grain loads, maps, batches and prefetches. Which examples are this process's, in which order, is `epoch_indices`: its
mask travels with the examples as their weight, so the padding of the last batch trains nothing. Where the data is on
disk, `load` is what reads it.
"""

import sys
from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fdp
import fdp.launch

EXAMPLES, FEATURES = 210, 8  # not a multiple of the batch size
BATCH_SIZE = 64  # of all processes together
EPOCHS = 5

Batch = dict[str, Any]  # of NumPy arrays


def make_data() -> Batch:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": x @ np.arange(FEATURES, dtype=np.float32)}


def epoch_batches(data: Batch, epoch: int, process: int, processes: int) -> Iterator[Batch]:
    """One epoch of one process, as grain delivers it; equally many batches in every process."""
    indices, mask = fdp.data.epoch_indices(
        EXAMPLES,
        epoch=epoch,
        process=process,
        process_count=processes,
        batch_size=BATCH_SIZE // processes,
    )
    places = list(zip(indices.reshape(-1).tolist(), mask.reshape(-1).tolist(), strict=True))

    def load(place: tuple[int, bool]) -> Batch:
        index, counts = place
        return {"x": data["x"][index], "y": data["y"][index], "weight": np.float32(counts)}

    dataset = grain.MapDataset.source(places).map(load).batch(BATCH_SIZE // processes)
    yield from dataset.to_iter_dataset(grain.ReadOptions(num_threads=2))


def loss_fn(w: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The sum over the examples that count, and how many they are."""
    errors = (batch["x"] @ w - batch["y"]) ** 2
    return jnp.sum(errors * batch["weight"]), jnp.sum(batch["weight"])


def train(data: Batch, mesh: jax.sharding.Mesh | None = None) -> tuple[jax.Array, list[float]]:
    trainer = fdp.data_parallel(loss_fn, optax.sgd(0.1), mesh=mesh, weighted=True)
    state = trainer.init(jnp.zeros(FEATURES))
    losses: list[float] = []
    for epoch in range(EPOCHS):
        for batch in epoch_batches(data, epoch, jax.process_index(), jax.process_count()):
            state, info = trainer.train_step(state, batch)
            losses.append(float(info.loss))
    return state.params, losses


def main() -> None:
    if sys.argv[1:] == ["together"]:
        fdp.launch.initialize()
    _, losses = train(make_data())
    if jax.process_index() == 0:
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.6f} after {len(losses)} steps")


if __name__ == "__main__":
    main()
