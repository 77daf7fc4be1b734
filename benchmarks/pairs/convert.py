"""Weights, batches and initial values that are the same in flax and in torch.

Flax modules here carry the names of their torch counterparts, ``layers_3`` for ``layers.3``, so one rule renames every
tree, and leaves change their layout by what they are: kernels ``[in, out]`` and ``[height, width, in, out]`` become
weights ``[out, in]`` and ``[out, in, height, width]``. The rule is linear, so it carries gradients across as well.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
_STATISTICS = {"mean": "running_mean", "var": "running_var"}
_LAYOUTS = {2: (1, 0), 4: (3, 2, 0, 1)}  # of kernels, by number of axes


def named(params: Any, model_state: Any = None) -> dict[str, np.ndarray]:
    """Flax parameters (or gradients) and batch statistics under torch's names, in torch's layout. Needs no torch."""
    found: dict[str, np.ndarray] = {}
    for tree, names in ((params, _LEAVES), (model_state, _STATISTICS)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            *modules, last = (str(key.key) for key in path)
            value = np.asarray(leaf)
            if last == "kernel":
                value = value.transpose(_LAYOUTS[value.ndim])
            modules = [re.sub(r"_(\d+)", r".\1", module) for module in modules]
            found[".".join([*modules, names.get(last, last)])] = value
            if last == "mean":
                found[".".join([*modules, "num_batches_tracked"])] = np.zeros((), np.int64)
    return found


def to_torch(params: Any, model_state: Any = None) -> dict[str, Any]:
    """The same as a ``state_dict``: copies, which torch may write to."""
    import torch

    return {
        name: torch.tensor(np.ascontiguousarray(x))
        for name, x in named(params, model_state).items()
    }


def torch_batch(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """A batch as torch takes it: images ``[n, height, width, channels]`` with the channels in front, 64-bit indices."""
    import torch

    def convert(x: np.ndarray) -> Any:
        if x.ndim == 4:
            x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        return torch.tensor(x, dtype=None if np.issubdtype(x.dtype, np.floating) else torch.int64)

    return {name: convert(x) for name, x in batch.items()}


def initial(shapes: Any, seed: int, std: float | None = None) -> Any:
    """NumPy arrays for a tree of shapes; the same for a seed wherever and with whatever versions it is called.

    Kernels are normal with ``std``, by default ``sqrt(2 / inputs)``; embeddings with 0.02; scales and variances are 1,
    everything else 0.
    """
    rng = np.random.default_rng(seed)

    def make(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        kind, shape = str(path[-1].key), leaf.shape
        if kind == "kernel":
            scale = std or float(np.sqrt(2 / np.prod(shape[:-1])))
        elif kind == "embedding":
            scale = 0.02
        else:
            return np.full(shape, float(kind in ("scale", "var")), np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    return jax.tree_util.tree_map_with_path(make, shapes)
