"""Replicas that have silently become different: found by hashing their bits where they lie.

Nothing in a run looks at replicas again after they were made equal: a broken chip, a race or a missing reduction
leaves them to drift apart. Every device hashes its own copy, and 64 bits of each leaf cross to the hosts.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fdp import exchange
from fdp.leaves import path_string
from fdp.state import TrainState

_SHOWN = 5  # leaves in a message
_PER_REPLICA = (
    "hook_state",
    "unreduced",
    "local_model_state",
)  # of a TrainState: each replica has its own


class Diverged(NamedTuple):
    """A leaf whose replicas are not equal.

    Attributes:
      path: its path in the tree.
      shape: such as ``"float32[3,4]"``.
      devices: ``(device id, process)`` of those that differ from the largest group of equal replicas.
      replicas: how many replicas were compared with each other.
    """

    path: str
    shape: str
    devices: tuple[tuple[int, int], ...]
    replicas: int


def check_replicas(
    tree: Any, what: str = "state", *, timeout: float = exchange.DEFAULT_TIMEOUT
) -> None:
    """Raises unless the replicas of every leaf are equal bit for bit. All processes call it.

    Which devices hold replicas is what the leaf's sharding says: those whose shards have the same index. An array that
    lives in one process only, and a NumPy array, is compared with that of the other processes. Of a ``TrainState``,
    what belongs to one replica each (hook state, held-back gradients, local model state) is left out.

    Costs one pass over the memory on every device, and a few bytes a leaf between hosts; call it now and then::

        if int(state.step) % 1000 == 0:
            fdp.check_replicas(state)

    Args:
      tree: pytree of arrays, such as a ``TrainState``.
      what: its name, for messages.
      timeout: seconds to wait for the other processes.

    Raises:
      ValueError: in every process; names the leaves, and the devices and processes that differ from most others. Or
        the processes hold trees of other shapes.
        Or a step has consumed the state.
      TypeError: called under ``jax.jit``, or on shapes instead of arrays.
      TimeoutError: a process did not come to compare; names it.

    Source: torch verifies shapes when DDP is built, and nothing afterwards.

    Example:
      >>> import jax.numpy as jnp, optax, fdp
      >>> trainer = fdp.data_parallel(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> state = trainer.init(jnp.ones(3))
      >>> fdp.check_replicas(state)
    """
    found = diverged_replicas(tree, what, timeout=timeout)
    if not found:
        return
    shown = "; ".join(
        f"{leaf.path!r} ({leaf.shape}) on {_these_devices(leaf.devices)} of {leaf.replicas} replicas"
        for leaf in found[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} more leaves" if len(found) > _SHOWN else ""
    number = "1 leaf differs" if len(found) == 1 else f"{len(found)} leaves differ"
    raise ValueError(
        f"expected replicas of {what} that are equal bit for bit, but {number} from the others: {shown}{more}. Restore "
        "the last checkpoint that was checked, look for a reduction that is missing (gradients that were never "
        "reduced, state that is updated from local values), and test those devices."
    )


def diverged_replicas(
    tree: Any, what: str = "state", *, timeout: float = exchange.DEFAULT_TIMEOUT
) -> tuple[Diverged, ...]:
    """The leaves of ``tree`` whose replicas differ, the same in every process; see ``check_replicas``."""
    if isinstance(tree, TrainState):
        tree = tree._replace(**{name: None for name in _PER_REPLICA if name in tree._fields})
        if tree.carried is not None:
            tree = tree._replace(carried=tree.carried._replace(unreduced=()))
    with_paths = jax.tree_util.tree_leaves_with_path(tree)
    paths = [path_string(path) for path, _ in with_paths]
    leaves = [_array(leaf, path) for path, (_, leaf) in zip(paths, with_paths, strict=True)]
    shapes = [f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in leaves]
    lines = [f"{path}: {shape}" for path, shape in zip(paths, shapes, strict=True)]
    differing = exchange.compare(f"check_replicas of {what}", lines, timeout=timeout)
    if differing:
        first = exchange.first_difference(differing)
        raise ValueError(
            f"expected {what} with the same leaves in every process, but process 0 has {first.reference!r} and "
            f"process {first.process} has {first.line!r}: check the same tree everywhere."
        )
    # [processes, local devices, leaves, (which part, hash, hash)]; all processes are here, so no collective hangs.
    table = np.asarray(multihost_utils.process_allgather(_local_table(leaves)))
    processes, local, columns, _ = table.shape
    rows = table.reshape(processes * local, columns, 3)
    devices = [(int(row[-1, 0]), k // local) for k, row in enumerate(rows)]
    found: list[Diverged] = []
    for k in range(len(leaves)):
        odd, replicas = _odd_ones(rows[:, k])
        if odd:
            where = tuple(devices[row] for row in odd)
            found.append(Diverged(paths[k], shapes[k], where, replicas))
    return tuple(found)


def _array(leaf: Any, path: str) -> Any:
    if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
        raise TypeError(
            f"expected arrays, got {type(leaf).__name__} at {path!r}: call it outside jax.jit, between steps, on the "
            "state that a step returned."
        )
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if leaf.is_deleted():
        raise ValueError(
            f"expected arrays that still exist, but the one at {path!r} was consumed: train_step takes the memory of "
            "the state it is given. Check the state that it returned."
        )
    return leaf


def _odd_ones(entries: NDArray[np.uint32]) -> tuple[list[int], int]:
    """Rows that differ from the largest group of equal ones that hold the same part; how many were compared."""
    parts: dict[int, list[int]] = collections.defaultdict(list)
    for row, part in enumerate(entries[:, 0]):
        if part:
            parts[int(part)].append(row)
    odd: list[int] = []
    for rows in parts.values():
        hashes = [tuple(entries[row, 1:]) for row in rows]
        (most, _), *_ = collections.Counter(hashes).most_common(1)
        odd += [row for row, value in zip(rows, hashes, strict=True) if value != most]
    return sorted(odd), max(map(len, parts.values()), default=0)


def _local_table(leaves: list[Any]) -> NDArray[np.uint32]:
    """``[local devices, leaves + 1, 3]``: which part of a leaf the device holds (0: none), two hashes; last, its id."""
    local = jax.local_devices()
    rows = {device: row for row, device in enumerate(local)}
    table = np.zeros((len(local), len(leaves) + 1, 3), np.uint32)
    table[:, -1, 0] = [device.id for device in local]
    groups: dict[tuple[Any, ...], list[int]] = collections.defaultdict(list)
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array):
            table[0, k] = 1, *np.frombuffer(hashlib.sha256(leaf.tobytes()).digest()[:8], np.uint32)
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[k] = leaf = jax.random.key_data(leaf)
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        for shard in shards:
            table[rows[shard.device], k, 0] = _part(shard.index, leaf.shape)
        if shards:
            groups[tuple(shard.device for shard in shards)].append(k)
    for devices, members in groups.items():
        where = NamedSharding(Mesh(np.array(devices), ("replica",)), PartitionSpec())
        views: list[jax.Array] = []
        for k in members:
            # Every device's own shard, as one array that JAX takes for replicated: nothing is copied or moved.
            parts = sorted(leaves[k].addressable_shards, key=lambda shard: shard.device.id)
            data = [shard.data for shard in parts]
            views.append(jax.make_array_from_single_device_arrays(data[0].shape, where, data))
        hashes = np.asarray(_hasher(devices)(views))
        table[np.ix_([rows[device] for device in devices], members, [1, 2])] = hashes
    return table


def _part(index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """A number for a part of an array, not 0."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return zlib.crc32(repr(bounds).encode()) | 1


@functools.lru_cache(maxsize=32)
def _hasher(devices: tuple[Any, ...]) -> Any:
    """A compiled function that hashes each device's own leaves where they are: no communication."""
    return jax.jit(
        jax.shard_map(
            lambda leaves: jnp.stack([bit_hash(leaf) for leaf in leaves])[None],
            mesh=Mesh(np.array(devices), ("replica",)),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec("replica"),
            check_vma=False,  # they may well differ: that is the question
        )
    )


def bit_hash(x: jax.Array) -> jax.Array:
    """Two uint32 that depend on every bit of ``x`` and its place; NaN payloads and the sign of zero count.

    Each 32-bit word is mixed with its position, and the results are added up as integers: exact in any order, so the
    compiler may reduce as it likes. Equal arrays have equal hashes; different ones do with a chance of 2**-64.
    """
    words = _words(x)
    place = lax.iota(jnp.uint32, words.size)
    halves = [
        jnp.sum(_mix(words ^ _mix(place + jnp.uint32(salt))), dtype=jnp.uint32)
        for salt in (0x9E3779B9, 0x7F4A7C15)
    ]
    return jnp.stack(halves)


def _words(x: jax.Array) -> jax.Array:
    """The bits of ``x`` as a vector of uint32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(lax.real(x)), _words(lax.imag(x))])
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 0
    if x.dtype == jnp.bool_ or (not bits and jnp.iinfo(x.dtype).bits < 8):
        x = x.astype(jnp.uint8)
    elif bits and bits < 8:
        x = x.astype(jnp.float32)
    width = x.dtype.itemsize
    word = {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
    # 64-bit elements become two words each.
    return lax.bitcast_convert_type(x, word).astype(jnp.uint32).reshape(-1)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit of the input moves half the bits of the output (murmur3's last step)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _these_devices(devices: tuple[tuple[int, int], ...]) -> str:
    shown = ", ".join(f"{device} (process {process})" for device, process in devices[:8])
    more = f" and {len(devices) - 8} more" if len(devices) > 8 else ""
    return f"{'device' if len(devices) == 1 else 'devices'} {shown}{more}"
