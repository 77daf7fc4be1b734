"""What fdp knows of the leaves of a parameter tree: path, shape, dtype, and whether each is trained.

Only shapes and dtypes are read, so ``jax.ShapeDtypeStruct`` leaves are as good as arrays.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class LeafSpec(NamedTuple):
    """What the plan knows of one leaf: its path, shape and dtype, and whether it is reduced."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    planned: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


def read_leaves(params: Any, trainable: Any = None) -> tuple[tuple[LeafSpec, ...], Any]:
    """One ``LeafSpec`` per leaf of ``params`` in tree order, and the structure of the tree.

    Args:
      params, trainable: as for ``plan_buckets``, which lists what is raised.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    if not with_paths:
        raise ValueError(
            "expected params with at least one array leaf, got an empty tree "
            f"({treedef}): pass the parameters that the loss is differentiated by."
        )
    keep = _trainable_flags(with_paths, treedef, trainable)
    leaves = tuple(
        _leaf_spec(path, leaf, planned)
        for (path, leaf), planned in zip(with_paths, keep, strict=True)
    )
    return leaves, treedef


def path_string(path: Any) -> str:
    """A key path as people write it: ``"layers/0/kernel"``; ``"<root>"`` for a tree that is one leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "<root>"


def _trainable_flags(with_paths: list[Any], treedef: Any, trainable: Any) -> list[bool]:
    if trainable is None:
        return [True] * len(with_paths)
    flags, structure = jax.tree.flatten(trainable)
    # A tree may be callable (some libraries' modules are), and a function is a tree of one leaf.
    if callable(trainable) and not (structure == treedef and flags != [trainable]):
        return [bool(trainable(path_string(path), leaf)) for path, leaf in with_paths]
    if structure != treedef:
        raise ValueError(
            "expected trainable to be a predicate on (path, leaf) or a tree of bools with the structure of "
            f"params ({treedef}), got {structure}."
        )
    for (path, _), flag in zip(with_paths, flags, strict=True):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(
                f"expected trainable to hold True or False at {path_string(path)!r}, got {flag!r} of type "
                f"{type(flag).__name__}."
            )
    return [bool(flag) for flag in flags]


def _leaf_spec(path: Any, leaf: Any, planned: bool) -> LeafSpec:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    name = path_string(path)
    if shape is None or dtype is None:
        if planned:
            raise TypeError(
                f"expected an array at {name!r}, got {leaf!r} of type {type(leaf).__name__}: wrap it in "
                "jnp.asarray(..., dtype=jnp.float32), or leave it out with trainable=."
            )
        return LeafSpec(name, (), np.dtype(object), False)
    if not planned:
        plain = not jnp.issubdtype(dtype, jax.dtypes.extended)
        return LeafSpec(name, tuple(shape), np.dtype(dtype if plain else object), False)
    if not jnp.issubdtype(dtype, np.inexact):
        kind = "a PRNG key" if jnp.issubdtype(dtype, jax.dtypes.prng_key) else "no gradient"
        shown = "float0" if dtype == jax.dtypes.float0 else dtype
        raise TypeError(
            f"expected a floating-point or complex array at {name!r}, got dtype {shown} ({kind}): keep it out "
            "of the differentiated params, or leave it out with trainable=."
        )
    # As JAX will hold it: plain ints print alike on every host, and without 64-bit mode float64 is float32.
    sizes = tuple(int(size) for size in shape)
    return LeafSpec(name, sizes, np.dtype(jax.dtypes.canonicalize_dtype(dtype)), True)
