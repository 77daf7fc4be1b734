"""What a way is, and what it is built for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.pairs import Pair

AXIS = "data"


class Setting(NamedTuple):
    """What every way of a run shares.

    Attributes:
      pair: the model, in both frameworks.
      mesh: all devices of all ranks along ``AXIS``, one a rank.
      learning_rate: of plain SGD, without momentum.
    """

    pair: Pair
    mesh: jax.sharding.Mesh
    learning_rate: float


class Way(NamedTuple):
    """A way to train, whatever the framework. One replica a rank; all ranks call the same functions in step.

    Attributes:
      name: as written on the command line.
      framework: ``"jax"`` or ``"torch"``.
      communicates: False for computing alone: replicas drift apart from the second step on.
      place: ``batch -> batch``: this rank's share as NumPy arrays (``Pair.batch``), to where ``step`` takes it from.
      init: ``(params, model_state) -> state``, of NumPy arrays that are equal on all ranks (``Pair.init``) and are not
        changed. May communicate.
      step: ``(state, batch) -> (state, loss)``: forward, backward, reduction, update. Takes the memory of the state it
        is given. May return before it is done.
      wait: ``(state, loss) -> float``: returns once the step is done on this rank. The loss of this rank's share, or
        the mean over all ranks where the way computes that: the mean over ranks of what it returns is the same.
      params: ``state -> {torch name: array}``, NumPy, for comparing.
      no_sync_step: ``step`` that adds its gradients up on this rank and neither communicates nor updates; the next
        ``step`` reduces them with its own. None where the way has no such thing.
    """

    name: str
    framework: str
    communicates: bool
    place: Callable[[dict[str, np.ndarray]], Any]
    init: Callable[[Any, Any], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    wait: Callable[[Any, Any], float]
    params: Callable[[Any], dict[str, np.ndarray]]
    no_sync_step: Callable[[Any, Any], tuple[Any, Any]] | None = None


def globally(tree: Any, mesh: jax.sharding.Mesh, spec: P) -> Any:
    """Arrays over all processes of ``mesh``, from what each of them holds."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def wait_for_jax(state: Any, loss: Any) -> float:
    """``Way.wait`` of all JAX ways: the whole state has arrived; the mean of the losses that this process has."""
    jax.block_until_ready((state, loss))
    return float(np.mean([np.asarray(shard.data) for shard in loss.addressable_shards]))


def first_copy(tree: Any) -> Any:
    """NumPy copies of replicated arrays, as this process has them."""
    return jax.tree.map(lambda x: np.array(x.addressable_data(0)), tree)
