"""`fdp bench`: benchmarks live in a clone of the repository, not in the package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fdp.cli.terminal import MISSING, USAGE, Stop


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """Runs ``python -m benchmarks.NAME`` or ``benchmarks.figures.NAME``; returns its code, 128 + number after a signal.

    Raises:
      Stop: there is no benchmarks folder, or no such benchmark in it.
    """
    root = _root()
    if root is None:
        raise Stop(
            "expected the benchmarks folder, which is not part of the installed package, here or beside fdp: clone "
            "fdp's repository and run fdp bench in the clone.",
            MISSING,
        )
    programs = _programs(root / "benchmarks")
    if name not in programs:
        raise Stop(f"expected one of {', '.join(sorted(programs))}, got {name!r}.", USAGE)
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", programs[name], *arguments]
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    return code if code >= 0 else 128 - code


def _root() -> Path | None:
    for folder in (Path.cwd(), Path(__file__).resolve().parent.parent.parent):
        if (folder / "benchmarks" / "__init__.py").is_file():
            return folder
    return None


def _programs(folder: Path) -> dict[str, str]:
    """Modules, those of the figures too, and packages that can be run: what people call them, and Python."""
    packages = {path.parent.name for path in folder.glob("*/__main__.py")}
    modules = {path.stem for path in folder.glob("*.py") if _is_program(path)}
    figures = {path.stem for path in (folder / "figures").glob("*.py") if _is_program(path)}
    found = {name: f"benchmarks.figures.{name}" for name in figures}
    return found | {name: f"benchmarks.{name}" for name in packages | modules}


def _is_program(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text("utf-8")
