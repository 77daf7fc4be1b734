"""Results as files: a full one is not replaced by a quick or partial one."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine

RESULTS = Path(__file__).resolve().parent.parent / "results"


def results_file(name: str, result: dict[str, Any], out_dir: Path) -> Path:
    """Where a result goes: NAME.json, or beside it where that would replace a better one."""
    best = out_dir / f"{name}.json"
    if not best.exists():
        return best
    there = json.loads(best.read_text("utf-8"))
    if _worth(result) >= _worth(there):
        return best
    return out_dir / f"{name}_{'quick' if result.get('quick') else 'partial'}.json"


def _worth(result: dict[str, Any]) -> tuple[bool, bool]:
    return not result.get("quick"), bool(result.get("complete"))


def save(name: str, result: dict[str, Any], figure: Any, out_dir: Path) -> Path:
    """Writes the result, and its picture unless ``figure`` is None; returns the JSON's path.

    ``result`` has "quick" and "complete"; "machine" and "command" are added where they are missing. A quick or partial
    result does not replace a full one: see `results_file`.
    """
    result.setdefault("complete", True)
    result.setdefault("quick", False)
    result.setdefault("machine", machine.describe())
    result.setdefault("command", command_line())
    out_dir.mkdir(parents=True, exist_ok=True)
    path = results_file(name, result, out_dir)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if figure is not None:
        save_picture(figure, path.with_suffix(".png"))
    if result["complete"] and not result["quick"]:
        (out_dir / f"{name}_partial.json").unlink(missing_ok=True)
    return path


def save_picture(figure: Any, path: Path) -> None:
    """Without the date and version of the library, so that the same picture is the same file."""
    figure.savefig(path, dpi=110, metadata={"Software": None})


def command_line() -> str:
    """The command of this process, for results: without --out-dir, whose path says nothing."""
    module = Path(sys.argv[0]).stem
    words = list(sys.argv[1:])
    if "--out-dir" in words:
        at = words.index("--out-dir")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--out-dir=")]
    return shlex.join(["python", "-m", f"benchmarks.figures.{module}", *words])
