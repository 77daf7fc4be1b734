"""The architecture, as a test: imports point down, and only `fdp.compat` knows JAX's inside.

The sources are parsed, not imported, so that an import inside a function counts like any other.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Bottom of the house first. A module may import from earlier lines of this table, never from its own
# line or from later ones. A package such as inspect is one entry: its modules may import each other,
# without cycles. "" is fdp/__init__.py. A new module gets its place here.
LAYERS = (
    ("compat", "errors"),
    ("dependency", "jaxprs", "state", "leaves"),
    ("plan", "loss", "scalars", "readiness"),
    (
        "trees",
        "finite",
        "held",
        "probe",
        "order",
        "match",
        "pack",
        "schedules",
        "accumulate",
        "exchange",
    ),
    ("replicate", "data", "verify"),
    ("hooks", "drivers", "options"),
    ("outcome", "model_state", "wire", "intercept", "checks", "agree"),
    ("carry",),
    ("used", "birth", "reduce", "defaults"),
    ("grad", "backward", "step"),
    ("start",),
    ("train",),
    ("log",),
    ("inspect", "testing", "aot"),
    # Programs: nothing above them here starts processes or reads the environment.
    ("child",),
    ("supervise",),
    ("launch",),
    ("cli",),
    ("__main__",),
    ("",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def module_files(root: Path = ROOT / "fdp") -> dict[str, Path]:
    """Maps "plan", "inspect.text", "inspect" and "" (the packages themselves) to files."""
    names = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yields line and full dotted name of everything imported, `from a import b` as "a.b".

    `package` is what a leading dot stands for: "fdp", or "fdp.inspect" for modules in there.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def fdp_imports(source: str, name: str, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Yields line and fdp module ("plan", "inspect.text", "" for fdp itself) of each import."""
    is_package = name in modules and modules[name].name == "__init__.py"
    package = ".".join(["fdp", *name.split(".")] if name else ["fdp"])
    package = package if is_package else package.rpartition(".")[0]
    for line, full in imported_names(ast.parse(source), package):
        if full == "fdp" or full.startswith("fdp."):
            target = full.removeprefix("fdp").removeprefix(".")
            # What is not a module is an attribute of one.
            while target and target not in modules:
                target = target.rpartition(".")[0]
            yield line, target


def upward_imports(source: str, name: str, modules: dict[str, Path]) -> list[str]:
    """The imports in the module `name` that do not point down, as sentences."""
    found = []
    own = name.split(".")[0]
    for line, target in fdp_imports(source, name, modules):
        layer = target.split(".")[0]
        if layer == own and target not in ("", own):
            continue
        if RANK[layer] >= RANK[own]:
            what = f"fdp.{target}".rstrip(".")
            found.append(f"line {line}: fdp.{name} imports {what}, which is not below it")
    return found


def private_jax(source: str) -> list[str]:
    """The uses of jaxlib and of jax names with a leading underscore, as sentences."""
    tree = ast.parse(source)
    names = list(imported_names(tree, "fdp"))
    for node in ast.walk(tree):
        # A plain chain only, jax.a.b: what follows a call is a value's own attribute.
        if isinstance(node, ast.Attribute) and re.fullmatch(r"jax(\.\w+)+", ast.unparse(node)):
            names.append((node.lineno, ast.unparse(node)))
        # A module's name in a string: importlib.import_module("jax._src.core").
        elif isinstance(node, ast.Constant) and str(node.value).startswith("jax._"):
            names.append((node.lineno, node.value))
    found = []
    for line, full in names:
        parts = full.split(".")
        private = [p for p in parts[1:] if p.startswith("_") and not p.startswith("__")]
        if parts[0] == "jaxlib" or (parts[0] == "jax" and private):
            found.append(f"line {line}: {full}")
    return found


MODULES = module_files()


def test_every_module_has_a_layer():
    unknown = sorted({name.split(".")[0] for name in MODULES} - RANK.keys())
    assert not unknown, f"give {unknown} a place in LAYERS of {Path(__file__).name}"


@pytest.mark.parametrize("name", sorted(MODULES), ids=lambda name: f"fdp.{name}".rstrip("."))
def test_imports_point_down(name):
    assert upward_imports(MODULES[name].read_text("utf-8"), name, MODULES) == []


def test_no_import_cycles():
    graph = {
        name: {t for _, t in fdp_imports(path.read_text("utf-8"), name, MODULES)} - {name}
        for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", ["fdp", "examples", "benchmarks", "notebooks"])
def test_private_jax_only_in_compat(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path != ROOT / "fdp" / "compat.py":
            assert private_jax(path.read_text("utf-8")) == [], path.name


# The checks themselves: a check that finds nothing anywhere would pass the tests above.
FAKE = {
    "": Path("__init__.py"),
    "plan": Path("plan.py"),
    "pack": Path("pack.py"),
    "order": Path("order.py"),
    "reduce": Path("reduce.py"),
    "inspect": Path("inspect/__init__.py"),
    "inspect.text": Path("inspect/text.py"),
    "inspect.table": Path("inspect/table.py"),
}


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("plan", "import fdp.reduce", "reduce"),
        ("plan", "from fdp import reduce", "reduce"),
        ("plan", "from . import reduce", "reduce"),
        ("plan", "from .reduce import reduce_gradients", "reduce"),
        ("plan", "def f():\n    from fdp.reduce import x", "reduce"),
        ("pack", "from fdp.order import gradient_ready_order", "order"),
        ("pack", "from fdp import __version__", ""),
        ("reduce", "import fdp", ""),
        ("plan", "from fdp.inspect.text import parse", "inspect.text"),
        ("inspect.text", "from fdp import data_parallel", ""),
        ("inspect.text", "from . import report", "inspect"),
    ],
)
def test_an_import_that_does_not_point_down_is_found(name, source, target):
    (message,) = upward_imports(source, name, FAKE)
    assert f"fdp.{name} imports {f'fdp.{target}'.rstrip('.')}, which" in message


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("reduce", "from fdp.plan import Bucket\nfrom fdp import pack\nimport jax"),
        ("inspect.text", "from . import table\nfrom ..plan import Bucket"),
        ("inspect", "from fdp.inspect.text import parse\nfrom .table import rows"),
        ("", "from fdp.reduce import reduce_gradients\nfrom fdp import inspect"),
    ],
)
def test_an_import_that_points_down_is_not_reported(name, source):
    assert upward_imports(source, name, FAKE) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jaxlib",
        "from jaxlib import xla_client",
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "import jax\ncore = jax._src.core",
        "import importlib\nimportlib.import_module('jax._src.core')",
    ],
)
def test_private_jax_is_found(source):
    assert private_jax(source) != []


def test_public_jax_is_not_reported():
    source = (
        "import jax\nfrom jax import lax\nimport jax.extend.core\nv = jax.__version__\n"
        "jax.tree.map(lambda leaf: leaf._own, v).shape"
    )
    assert private_jax(source) == []
