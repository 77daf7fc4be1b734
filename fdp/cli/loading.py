"""MODULE:FUNCTION becomes a model made of shapes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from fdp.cli.terminal import FAILED, MISSING, USAGE, Stop

_WANTED = "params, or (loss_fn, params, batch), or these and an optimizer and a dict of data_parallel's options"
_ALLOCATE = "only shapes are traced here: pass --allocate to have the function called for real"


class Model(NamedTuple):
    """What a function given as MODULE:FUNCTION returned, arrays replaced by their shapes.

    Attributes:
      params: parameters.
      loss: the loss function, or None if the function returned parameters alone.
      batch: of all devices together.
      optimizer: an optax optimizer, or None.
      options: keyword arguments for ``data_parallel``.
      init: keyword arguments for ``trainer.init``: ``model_state``, ``rng``.
    """

    params: Any
    loss: Callable[..., Any] | None = None
    batch: Any = None
    optimizer: Any = None
    options: Mapping[str, Any] = MappingProxyType({})
    init: Mapping[str, Any] = MappingProxyType({})

    def plain_loss(self) -> Callable[..., Any]:
        """The loss as a function of ``(params, batch)`` that returns the loss alone."""

        def loss(params: Any, batch: Any, **init: Any) -> Any:
            assert self.loss is not None
            out = self.loss(params, batch, **init)
            return out[0] if isinstance(out, tuple) else out

        return loss


def load_model(name: str, *, allocate: bool = False) -> Model:
    """Imports a module, calls the function in it and returns the model in shapes.

    The function is traced, not run, so nothing of the model's size is allocated. What it prints goes to standard error.

    Args:
      name: ``"package.module:function"``; found from the current directory, too.
      allocate: call it for real.

    Raises:
      Stop: there is no such function, or it does not return a model.
    """
    function = _find(name)
    found: dict[str, Any] = {}

    def arrays() -> list[Any]:
        found["model"], trees = _parts(function(), name)
        leaves, found["treedef"] = jax.tree.flatten(trees)
        found["leaves"] = leaves
        found["where"] = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        return [leaves[i] for i in found["where"]]

    try:
        with contextlib.redirect_stdout(sys.stderr):
            made = arrays() if allocate else jax.eval_shape(arrays)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise Stop(f"{name} needs the values of arrays, and {_ALLOCATE}.", FAILED) from error
    leaves = list(found["leaves"])
    for index, array in zip(found["where"], made, strict=True):
        leaves[index] = jax.ShapeDtypeStruct(array.shape, array.dtype)
    params, batch, init = jax.tree.unflatten(found["treedef"], leaves)
    model = found["model"]._replace(params=params, batch=batch, init=init)
    if model.loss is not None and _holds_tracers(model):
        raise Stop(
            f"the loss of {name} closes over an array that the function computed with jax.numpy, and {_ALLOCATE} "
            "(or make the array with numpy).",
            FAILED,
        )
    return model


def _holds_tracers(model: Model) -> bool:
    """Whether the loss closes over arrays that were made while the function was traced, and have no values.

    JAX does not always notice: such a loss can be lowered, into a program with arguments too many.
    """
    try:
        closed = jax.make_jaxpr(model.plain_loss())(model.params, model.batch, **model.init)
    except Exception:  # what is wrong with the loss is said when it is put to use
        return False
    return any(isinstance(const, Tracer) for const in closed.consts)


def _find(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise Stop(f"expected MODULE:FUNCTION, such as model:build, got {name!r}.", USAGE)
    if module_name.endswith(".py"):
        module = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise Stop(
            f"expected the name of a module, got the file {module_name!r}: write {module}:{attribute}.",
            USAGE,
        )
    # An installed script finds modules beside itself; a person means those of the current directory.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = _import(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            functions = [
                key
                for key, value in vars(found).items()
                if callable(value) and getattr(value, "__module__", None) == module_name
            ]
            has = f"it has {', '.join(functions[:8])}" if functions else "it has none"
            raise Stop(f"expected a function of {module_name}, got {attribute!r}: {has}.", USAGE)
        found = getattr(found, part)
    if not callable(found):
        raise Stop(
            f"expected {name} to be a function without arguments that returns {_WANTED}, got "
            f"{type(found).__name__}.",
            USAGE,
        )
    return found


def _import(name: str) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise Stop(
                f"expected a module that Python finds from this directory, got {name!r}: there is no "
                f"module {missing!r} here or on Python's path.",
                USAGE,
            ) from error
        raise Stop(
            f"{name} imports {missing!r}, which is not installed: install it.", MISSING
        ) from error
    except SystemExit as error:
        raise Stop(
            f"importing {name} ended the program: put what it runs under if __name__ == '__main__'.",
            FAILED,
        ) from error


def _parts(result: Any, name: str) -> tuple[Model, tuple[Any, Any, dict[str, Any]]]:
    """What is not made of arrays, and (params, batch, init)."""
    if not (isinstance(result, tuple | list) and result and callable(result[0])):
        return Model(None), (result, None, {})
    items = list(result)
    if not 3 <= len(items) <= 5:
        raise Stop(
            f"expected {name} to return {_WANTED}, got {len(items)} values of which the first is callable.",
            USAGE,
        )
    loss, params, batch, optimizer, options = items + [None] * (5 - len(items))
    if options is not None and not isinstance(options, dict):
        raise Stop(
            f"expected the fifth value of {name} to be a dict of data_parallel's options, got "
            f"{type(options).__name__}.",
            USAGE,
        )
    given: dict[str, Any] = dict(options or {})
    init = {key: given.pop(key) for key in ("model_state", "rng") if key in given}
    return Model(None, loss, None, optimizer, given), (params, batch, init)


def _is_array(leaf: Any) -> bool:
    return (
        hasattr(leaf, "shape")
        and hasattr(leaf, "dtype")
        and not isinstance(leaf, jax.ShapeDtypeStruct)
    )
