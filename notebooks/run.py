"""Makes the notebooks of their sources: every NN_name.py becomes NN_name.ipynb, run from scratch, outputs stored.

    make notebooks                             all of them; ARGS="03" those whose names begin so
    make notebooks CHECK=1                     runs them, writes nothing, fails where source and notebook differ
    python notebooks/run.py [--check] [03]     the same, with fdp[notebooks] installed

Stored is what a reader sees, and nothing that changes by itself: no times of cells, no random ids.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WANTED = 120  # seconds that a notebook should not exceed, on two cores with nothing else to do
LIMIT = 600  # seconds after which a cell is taken to hang
COLOURS = 64
FAILED, USAGE, MISSING = 1, 2, 3

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": KERNEL,
    "language_info": {"name": "python"},
}


def sources() -> list[Path]:
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def read_source(path: Path) -> Any:
    """The notebook that a source stands for, without outputs."""
    import jupytext

    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells, start=1):
        cell["id"] = f"cell-{number}"
        cell.metadata = {}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def cells_of(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def difference(path: Path) -> str:
    """In which way the stored notebook is not the source's; empty if it is."""
    import nbformat

    stored = path.with_suffix(".ipynb")
    if not stored.exists():
        return f"{stored.name} is not there"
    wanted, found = cells_of(read_source(path)), cells_of(nbformat.read(stored, as_version=4))
    for number, (ours, theirs) in enumerate(zip(wanted, found, strict=False), start=1):
        if ours != theirs:
            return f"cell {number} of {stored.name} is not the one in {path.name}"
    if len(wanted) != len(found):
        return f"{stored.name} has {len(found)} cells, {path.name} {len(wanted)}"
    return ""


def execute(notebook: Any, folder: Path) -> list[str]:
    """Runs all cells in a new kernel and keeps what they show; returns what went to standard error, which is not kept.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
      nbclient.exceptions.CellTimeoutError: it took too long.
    """
    from nbclient import NotebookClient

    NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name=KERNEL["name"],
        # A kernel on this machine need not warn that its connection is not encrypted.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    noise: list[str] = []
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code":
            errors = [out for out in cell.outputs if out.get("name") == "stderr"]
            noise += [f"cell {number}: {out.text.strip()}" for out in errors]
            cell.outputs = [out for out in cell.outputs if out not in errors]
            for out in cell.outputs:
                if "image/png" in (data := out.get("data", {})):
                    data["image/png"] = small(data["image/png"])
            cell.metadata = {}
    notebook.metadata = METADATA  # the kernel adds its version
    return noise


def small(png: str) -> str:
    """A picture of few colours, as plots are, with a palette: a third of the size, and nothing to be seen of it."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    stream = io.BytesIO()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def plain(text: str) -> str:
    """Without the colours of a traceback."""
    return re.sub(r"\x1b\[[\d;]*m", "", text).strip()


def make(path: Path, *, check: bool) -> bool:
    """Runs one notebook and, unless only checking, writes it. Returns whether all is well."""
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    print(f"{path.stem} ...", end=" ", flush=True)
    if check and (changed := difference(path)):
        print(f"FAILED: {changed}; make notebooks")
        return False
    notebook, start = read_source(path), time.monotonic()
    try:
        noise = execute(notebook, HERE)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f"FAILED\n{plain(str(error))}")
        return False
    seconds = time.monotonic() - start
    print(f"{seconds:.0f} s", flush=True)
    for line in noise:
        print(f"  not kept, from standard error of {line}", file=sys.stderr)
    if seconds > WANTED:
        print(f"  {path.stem} should take at most {WANTED} s", file=sys.stderr)
    if not check:
        target = path.with_suffix(".ipynb")
        unfinished = target.with_suffix(".ipynb.new")
        nbformat.write(notebook, unfinished)
        os.replace(unfinished, target)
    return True


def missing_packages() -> str:
    try:
        import ipykernel  # noqa: F401
        import jupytext  # noqa: F401
        import matplotlib  # noqa: F401
        import nbclient  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        return str(error.name)
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="notebooks/run.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names, such as 03; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; sources must agree")
    options = parser.parse_args(arguments)
    if missing := missing_packages():
        print(
            f"expected {missing}, to run notebooks: pip install 'fdp[notebooks]'", file=sys.stderr
        )
        return MISSING
    chosen = [p for p in sources() if not options.names or p.name.startswith(tuple(options.names))]
    unknown = [n for n in options.names if not any(p.name.startswith(n) for p in chosen)]
    if unknown:
        there = ", ".join(path.stem for path in sources())
        print(f"expected names out of {there}, got {', '.join(unknown)}", file=sys.stderr)
        return USAGE
    # Fake CPU devices are what the stored outputs show, whatever this machine has; and nobody's own settings.
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as settings:
        os.environ["IPYTHONDIR"] = settings
        results = [make(path, check=options.check) for path in chosen]
    return 0 if all(results) else FAILED


if __name__ == "__main__":
    sys.exit(main())
