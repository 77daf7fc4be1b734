"""Writes the results into pages: what stands between the markers comes from committed JSON, never from a keyboard.

    python -m benchmarks.figures.table                        # docs/benchmarks.md
    python -m benchmarks.figures.table README.md --check      # fails if what is there is not what the results say

A page has ``<!-- results: full -->`` or ``<!-- results: short -->``, and ``<!-- results: end -->`` after it. Quick
and incomplete results are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import report
from benchmarks.figures.files import RESULTS

ROOT = RESULTS.parent.parent
BLOCK = re.compile(r"(<!-- results: (full|short) -->\n).*?(<!-- results: end -->)", re.DOTALL)
KINDS = {"full": report.full, "short": report.short}


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Complete results of figures in full size, by name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted([*folder.glob("t1_*.json"), *folder.glob("fig*.json")]):
        result = json.loads(path.read_text("utf-8"))
        if result.get("complete") and not result.get("quick"):
            found[path.stem] = result
    return found


def rewritten(text: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with its blocks made anew.

    Raises:
      ValueError: it has none.
    """
    new, count = BLOCK.subn(lambda m: f"{m[1]}\n{KINDS[m[2]](results)}\n{m[3]}", text)
    if not count:
        raise ValueError(
            "expected '<!-- results: full -->' or '<!-- results: short -->', and '<!-- results: end -->' after it"
        )
    return new


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a page is stale, 2 for a page that cannot be one."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.figures.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("pages", nargs="*", type=Path, default=[ROOT / "docs" / "benchmarks.md"])
    made.add_argument(
        "--check", action="store_true", help="change nothing, fail if a page is stale"
    )
    made.add_argument("--results", type=Path, default=RESULTS, help="folder (benchmarks/results)")
    args = made.parse_args(argv)
    results, code = load(args.results), 0
    for page in args.pages:
        try:
            before = page.read_text("utf-8")
            after = rewritten(before, results)
        except (OSError, ValueError) as error:
            print(f"{made.prog}: {page}: {error}", file=sys.stderr)
            return 2
        if before == after:
            continue
        if args.check:
            print(
                f"{made.prog}: {page} is not what the results say: run it without --check",
                file=sys.stderr,
            )
            code = 1
        else:
            page.write_text(after, "utf-8")
            print(page)
    return code


if __name__ == "__main__":
    sys.exit(main())
