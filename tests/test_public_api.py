"""The public API as a text, compared with the one in ``data/public_api.txt``: no name or argument changes unseen.

``python tests/test_public_api.py`` writes the text anew. Public are the names that ``fdp`` exports and, of each module
among them and of ``fdp.launch``, its own ``__all__`` or, without one, the functions and classes that it defines.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ForwardRef

import pytest

import fdp
from fdp import launch  # a program with functions: fdp does not import it

RECORD = Path(__file__).parent / "data" / "public_api.txt"
LINE = 88  # longer lists of arguments have one on a line
COMMAND = "python tests/test_public_api.py"


def api() -> str:
    lines = [*described("fdp", fdp), *described("fdp.launch", launch)]
    return "\n".join(lines).strip() + "\n"


def described(path: str, value: Any) -> Iterator[str]:
    """Lines for a public name; a module's and a class's members follow it."""
    if inspect.ismodule(value):
        yield f"\nmodule {path}"
        members = [(name, getattr(value, name)) for name in exported(value)]
        # A module's own names first, then the modules in it.
        for name, member in sorted(members, key=lambda item: (inspect.ismodule(item[1]), item[0])):
            yield from described(f"{path}.{name}", member)
    elif inspect.isclass(value):
        yield f"class {path}{signature(value)}"
        yield from sorted(
            f"  {line}" for name, member in own(value) for line in member_lines(name, member)
        )
    elif callable(value):
        yield f"{path}{signature(value)}"
    else:
        yield f"{path}: {type(value).__name__}"


def exported(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def own(cls: type) -> list[tuple[str, Any]]:
    """Methods and properties; fields are in the signature."""
    return [(name, member) for name, member in vars(cls).items() if not name.startswith("_")]


def member_lines(name: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        yield f"{name}: property"
    elif isinstance(member, (classmethod, staticmethod)):
        yield f"{name}{signature(member.__func__)}"
    # By another name a function is a value: the default of a dataclass's field.
    elif inspect.isfunction(member) and member.__name__ == name:
        yield f"{name}{signature(member)}"


def signature(value: Any) -> str:
    """Like ``inspect.signature`` as text, and the same in every version of Python."""
    if inspect.isclass(value) and "__init__" not in vars(value) and "__new__" not in vars(value):
        return ""  # a protocol, an exception: nobody's to construct
    parts: list[str] = []
    last = None
    parameters = list(inspect.signature(value).parameters.values())
    for parameter in parameters:
        kind = parameter.kind
        if last is parameter.POSITIONAL_ONLY and kind is not last:
            parts.append("/")
        if kind is parameter.KEYWORD_ONLY and last not in (kind, parameter.VAR_POSITIONAL):
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        annotated = f": {words(parameter.annotation)}" * (
            parameter.annotation is not parameter.empty
        )
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}{annotated}{default}")
        last = kind
    if last is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    returns = inspect.signature(value).return_annotation
    arrow = "" if inspect.isclass(value) or returns is inspect.Signature.empty else words(returns)
    end = f" -> {arrow}" if arrow else ""
    if sum(map(len, parts)) <= LINE:
        return f"({', '.join(parts)}){end}"
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def words(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def difference(recorded: str, now: str) -> str:
    lines = difflib.unified_diff(
        recorded.splitlines(), now.splitlines(), "recorded", "now", lineterm="", n=0
    )
    return "\n".join(line for line in lines if not line.startswith("@@"))


def test_it_is_the_one_on_record():
    changed = difference(RECORD.read_text("utf-8"), api())
    if changed:
        pytest.fail(
            f"the public API changed:\n{changed}\nIf that is meant, say it in CHANGELOG.md and run: {COMMAND}"
        )


def test_nothing_in_it_depends_on_the_machine():
    for line in api().splitlines():
        assert " at 0x" not in line, line  # a default without a repr of its own


def test_every_exported_name_is_there_once():
    words = [line.removeprefix("class ").removeprefix("module ") for line in api().splitlines()]
    names = [re.match(r"[\w.]+", line).group() for line in words if line.startswith("fdp.")]
    top = [name.removeprefix("fdp.") for name in names if name.count(".") == 1]
    assert sorted(top) == sorted([*fdp.__all__, "launch"])


def sample(a, b: int = 1, /, c: str = "x", *args: float, d, e: bool = False, **more) -> str: ...


def test_how_a_signature_is_written():
    assert signature(sample) == (
        "(a, b: int = 1, /, c: str = 'x', *args: float, d, e: bool = False, **more) -> str"
    )
    assert signature(lambda a, /: a) == "(a, /)"
    assert signature(lambda *, a: a) == "(*, a)"


@pytest.mark.parametrize(
    "was",
    [
        ("axis_name: AxisName", "axis: AxisName"),  # an argument by another name
        ("op: str = 'mean'", "op: str = 'sum'"),  # another default
        ("class fdp.Bucket(", "class fdp.Pail("),  # a name that is gone
    ],
)
def test_a_change_is_found(was):
    now = api()
    before, after = was
    assert before in now
    assert after in difference(now.replace(before, after), now)


if __name__ == "__main__":
    RECORD.write_text(api(), "utf-8")
    sys.stdout.write(f"wrote {RECORD}\n")
