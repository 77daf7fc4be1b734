"""Docstrings: every public name has one, and the examples in them run."""

import doctest
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import fdp


def module_names() -> list[str]:
    walked = pkgutil.walk_packages(fdp.__path__, "fdp.")
    return ["fdp", *sorted(found.name for found in walked if not found.name.endswith("__main__"))]


def source_of(name: str) -> str:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text("utf-8")


NAMES = module_names()
WITH_EXAMPLES = [name for name in NAMES if ">>> " in source_of(name)]
PUBLIC = [name for name in NAMES if "._" not in name]


def public_members(owner: Any, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public functions, classes, methods and properties that this module itself defines."""
    for name, value in vars(owner).items():
        if name.startswith("_") or getattr(value, "__module__", module.__name__) != module.__name__:
            continue
        if inspect.isclass(value):
            yield value.__qualname__, value
            yield from public_members(value, module)
        # By another name a function is a value: the default of a dataclass's field.
        elif getattr(value, "__name__", name) == name and callable_member(value):
            yield f"{getattr(owner, '__qualname__', '')}.{name}".lstrip("."), value


def callable_member(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))


def lacks_docstring(value: Any) -> bool:
    doc = (value.__doc__ or "").strip()
    # What dataclasses and NamedTuples write by themselves says no more than the signature.
    return not doc or (inspect.isclass(value) and doc.startswith(f"{value.__name__}("))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name):
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} itself"
    without = [member for member, value in public_members(module, module) if lacks_docstring(value)]
    assert not without, f"{name}: {without}"


def examples_of(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in examples_of(name):
        # Nothing but what a reader sees is in scope: an example imports what it uses.
        test.globs = {"__name__": "example"}
        runner.run(test, out=report.append)
    assert runner.tries > 0
    assert runner.failures == 0, "".join(report)


def test_the_main_functions_have_examples():
    tested = {test.name for name in WITH_EXAMPLES for test in examples_of(name)}
    for function in (fdp.plan_buckets, fdp.reduce_gradients, fdp.accumulate, fdp.data_parallel):
        assert f"{function.__module__}.{function.__name__}" in tested


class Undocumented:
    def method(self) -> None: ...


def test_what_has_no_docstring_is_found():
    module = ModuleType(__name__)
    module.Undocumented = Undocumented
    found = dict(public_members(module, module))
    assert list(found) == ["Undocumented", "Undocumented.method"]
    assert all(lacks_docstring(value) for value in found.values())


def test_what_a_named_tuple_writes_itself_is_no_docstring():
    assert lacks_docstring(NamedTuple("Pair", [("left", int), ("right", int)]))
