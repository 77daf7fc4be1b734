"""Models and ways as people write them on a command line: ``name:word,option=value,...``.

mlp:widths=1024x13        torch:cap=25,view=on        fdp:serialized,cap=4        jax:pmean,combiner=off
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Converter = Callable[[str], Any]


class Spec(NamedTuple):
    """One such text.

    Attributes:
      text: as it was written; what results are labelled with.
      name: what stands before the colon.
      word: the first item without "=", None where there is none.
      options: the items with "=", converted.
    """

    text: str
    name: str
    word: str | None
    options: dict[str, Any]


class Known(NamedTuple):
    """What may follow a name.

    Attributes:
      options: option -> converter of its value, which raises ValueError("expected ...") for a wrong one.
      words: what may stand there without "=".
    """

    options: Mapping[str, Converter]
    words: tuple[str, ...] = ()


def parse(text: str, known: Mapping[str, Known], what: str) -> Spec:
    """Reads ``text``.

    Args:
      text: ``name``, ``name:word``, ``name:option=value,...`` or ``name:word,option=value,...``.
      known: name -> what may follow it.
      what: what is named, for messages: "way", "model".

    Raises:
      ValueError: an unknown name, word or option, one given twice, or a wrong value; lists the known ones.
    """
    name, colon, rest = text.partition(":")
    if name not in known:
        raise ValueError(f"expected a {what} out of {', '.join(known)}, got {name!r} in {text!r}")
    allowed = known[name]
    word: str | None = None
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.partition("=")
        if not equals:
            if item not in allowed.words:
                listed = [*allowed.words, *(f"{key}=" for key in allowed.options)]
                raise ValueError(
                    f"expected after {name!r} one of {', '.join(listed) or 'nothing'}, got {item!r} in {text!r}"
                )
            if word is not None:
                raise ValueError(f"expected one of {word!r} and {item!r}, got both in {text!r}")
            word = item
        elif key not in allowed.options:
            raise ValueError(
                f"expected an option of {name!r} out of {', '.join(allowed.options) or 'none'}, "
                f"got {key!r} in {text!r}"
            )
        elif key in options:
            raise ValueError(f"expected {key!r} once, got it twice in {text!r}")
        else:
            try:
                options[key] = allowed.options[key](value)
            except ValueError as error:
                raise ValueError(f"{error} for {key!r} in {text!r}") from None
    return Spec(text, name, word, options)


def whole(value: str) -> int:
    """A whole number of at least 1."""
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"expected a whole number of at least 1, got {value!r}")
    return int(value)


def mebibytes(value: str) -> float:
    """A size in MiB, 0 or more; fractions are fine."""
    if not value.replace(".", "", 1).isdecimal():
        raise ValueError(f"expected a size in MiB such as 25 or 0.5, got {value!r}")
    return float(value)


def choice(*names: str) -> Converter:
    """One of these."""

    def convert(value: str) -> str:
        if value not in names:
            raise ValueError(f"expected {' or '.join(names)}, got {value!r}")
        return value

    return convert


def switch(value: str) -> bool:
    """On or off, as a bool."""
    return choice("on", "off")(value) == "on"


def widths(value: str) -> tuple[int, ...]:
    """(1024, 1024, 1024, 10) of "1024x3-10": widths of layers, input first."""
    found: list[int] = []
    for part in value.split("-"):
        width, times, count = part.partition("x")
        if not width.isdecimal() or int(width) < 1 or (times and not count.isdecimal()):
            raise ValueError(f"expected widths such as 1024x12-10, got {value!r}")
        found += [int(width)] * (int(count) if times else 1)
    if len(found) < 2:
        raise ValueError(f"expected at least two widths such as 1024x12-10, got {value!r}")
    return tuple(found)
