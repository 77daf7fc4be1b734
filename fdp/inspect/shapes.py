"""Shapes as XLA prints them: ``bf16[4,256]{1,0:T(8,128)(2,1)S(1)}``, tuples, tokens."""

from __future__ import annotations

import dataclasses
import math
import re

_TYPES_BY_BITS = {
    0: "token opaque",
    1: "s1 u1",
    2: "s2 u2",
    4: "s4 u4 f4e2m1fn",
    8: "pred s8 u8 f8e3m4 f8e4m3 f8e4m3b11fnuz f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu",
    16: "s16 u16 f16 bf16",
    32: "s32 u32 f32",
    64: "s64 u64 f64 c64",
    128: "c128",
}
_BITS = {name: bits for bits, names in _TYPES_BY_BITS.items() for name in names.split()}
_NUMPY = {
    "pred": "bool",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}

# One array: type, dimensions (a bounded dynamic one is "<=8"), layout.
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=? ]*)\](\{[^{}]*\})?")
_COMMENT = re.compile(r"/\*.*?\*/")


def numpy_name(element_type: str) -> str:
    """The numpy name of an XLA element type: ``numpy_name("bf16") == "bfloat16"``."""
    if element_type in _NUMPY:
        return _NUMPY[element_type]
    if element_type[:1] in ("s", "u") and element_type[1:].isdigit():
        return ("int" if element_type[0] == "s" else "uint") + element_type[1:]
    if element_type[:2] in ("f4", "f8"):  # f8e4m3fn -> float8_e4m3fn
        return f"float{element_type[1]}_{element_type[2:]}"
    return element_type


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
      element_type: XLA's name of it, such as ``"bf16"``.
      dims: its dimensions.
      layout: the layout as text, such as ``"{1,0:T(8,128)}"``, or an empty string.
    """

    element_type: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Size in bytes, without the padding that a tiled layout may add."""
        return (self.elements * _BITS.get(self.element_type, 0) + 7) // 8

    @property
    def on_chip(self) -> bool:
        """Whether it lives in a TPU's vector memory and so costs no traffic to device memory.

        Memory space 5 is the host's. GPU layouts have no tiles, and there a space is still device memory.
        """
        return "T(" in self.layout and "S(" in self.layout and "S(5)" not in self.layout

    def __str__(self) -> str:
        return f"{self.element_type}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape, flattened.

    Attributes:
      arrays: the arrays in it, in order.
      parts: the arrays under each element of the outer tuple; one entry where it is no tuple.
      is_tuple: whether it is a tuple.
    """

    arrays: tuple[Array, ...]
    parts: tuple[tuple[Array, ...], ...]
    is_tuple: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def device_nbytes(self) -> int:
        """Bytes of the arrays in device memory."""
        return sum(array.nbytes for array in self.arrays if not array.on_chip)

    @property
    def elements(self) -> int:
        """Elements of all arrays."""
        return sum(array.elements for array in self.arrays)


def parse_shape(text: str) -> Shape:
    """Reads one shape.

    Args:
      text: as XLA prints it: ``"f32[8,4]{1,0}"`` or ``"(s32[], (f32[2]{0}, u8[0]{0}))"``.

    Raises:
      ValueError: the text is no shape.
    """
    text = _COMMENT.sub("", text).strip()
    arrays = _arrays(text)
    if text.startswith("("):
        return Shape(arrays, tuple(_arrays(part) for part in _tuple_elements(text)), True)
    if len(arrays) != 1:
        raise ValueError(f"expected a shape such as 'f32[8,4]{{1,0}}', got {text!r}.")
    return Shape(arrays, (arrays,))


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(
            match[1],
            tuple(int(dim.strip(" <=?") or 0) for dim in match[2].split(",")) if match[2] else (),
            match[3] or "",
        )
        for match in _ARRAY.finditer(text)
    )


def _tuple_elements(text: str) -> list[str]:
    depth, start, elements = 0, 1, list[str]()
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 or (char == "," and depth == 1):
            elements.append(text[start:i])
            start = i + 1
        if depth == 0:
            break
    return [element for element in elements if element.strip()]
