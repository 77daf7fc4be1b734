"""``docs/cases.md``: every public problem is in it once, with a test that exists or a sentence that explains."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "cases.md").read_text("utf-8")

# P: from users of PyTorch, Horovod, Megatron, DeepSpeed. J: from users of JAX.
IDS = {
    "P": "1 2 4 6 7 8 9 11 12 13 15 16 17 19 20 21 23 24 25 26 28 29 30 33 35 37 39 40 41 43 44 46 47 48 50 51 53 54 "
    "56 57 58 59 61 62 63 64 66 68 69 71 72 73 74 75 76 78",
    "J": "1 4 5 6 9 10 11 12 13 14 16 17 18 19 21 24 25 26 27 28 29 30 31 32 34 38 39 40 41 42 43 45",
}
EXPECTED = [f"{letter}{number}" for letter, numbers in IDS.items() for number in numbers.split()]
NAMED = re.compile(r"`tests/((?:aot/)?test_\w+\.py)::(test_\w+)`")


def rows():
    """(id, what went wrong, what is here) of each line of the tables."""
    cells = re.findall(r"^\| ([PJ]\d+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", TEXT, re.MULTILINE)
    assert len(cells) == len(re.findall(r"^\| (?!\||---)", TEXT, re.MULTILINE))
    return cells


ROWS = rows()


@functools.cache
def defined_in(file):
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing(text):
    """The tests that a cell names and that do not exist."""
    return [
        f"{file}::{name}"
        for file, name in NAMED.findall(text)
        if not (ROOT / "tests" / file).is_file() or name not in defined_in(file)
    ]


def explanation(text):
    """What a cell says besides the names of tests."""
    return re.sub(r"[\s,.:;]+", " ", NAMED.sub("", text)).strip()


def test_every_problem_is_here_once():
    assert len(EXPECTED) == 88
    assert sorted(name for name, _, _ in ROWS) == sorted(EXPECTED)


@pytest.mark.parametrize(("name", "problem", "here"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_tests_that_exist_or_explains(name, problem, here):
    assert len(problem.split()) >= 4, name
    assert missing(here) == []
    # Whatever looks like a test is written so that it was looked for.
    assert here.count("::") == len(NAMED.findall(here))
    words = explanation(here).split()
    assert NAMED.search(here) or len(words) >= 8
    assert not words or len(words) >= 5, "neither a sentence nor nothing"


def test_tests_that_carry_a_number_are_of_a_problem_in_the_list():
    """Nobody names a test after a report that is not in the table; most reports have one that is."""
    carried = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in defined_in(str(path.relative_to(ROOT / "tests"))):
            if found := re.match(r"test_((?:[pj]\d+_)+)", name):
                carried |= {part.upper() for part in found.group(1).strip("_").split("_")}
    assert carried <= set(EXPECTED)
    assert len(carried) >= 50


@pytest.mark.parametrize(
    "cell",
    ["`tests/test_cases.py::test_of_nothing`", "`tests/test_nothing.py::test_a_row`"],
)
def test_a_test_that_does_not_exist_is_found(cell):
    assert len(missing(cell)) == 1
    assert explanation(cell + ", and more.") == "and more"
