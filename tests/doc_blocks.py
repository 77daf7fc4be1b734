"""Documentation as a program: its code blocks, run as a reader would run them, its links and its headings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


class Block(NamedTuple):
    """A fenced block. ``line`` is that of its opening fence, counted from 1."""

    line: int
    language: str
    code: str

    @property
    def file(self) -> str | None:
        """The name in a first line such as "# train.py": a file of its own."""
        named = re.match(r"# (\w+\.py)\n", self.code)
        return named.group(1) if named else None


class Printed(NamedTuple):
    """What a block printed, and what the page says it prints (None: it does not say)."""

    block: Block
    got: str
    shown: str | None


def read_blocks(text: str) -> list[Block]:
    """All fenced blocks, in order."""
    found: list[Block] = []
    opened = None
    for number, line in enumerate(text.splitlines(), start=1):
        if opened is None and line.startswith("```"):
            opened = (number, line[3:].strip(), [])
        elif opened is not None and line.startswith("```"):
            start, language, lines = opened
            found.append(Block(start, language, "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            opened[2].append(line)
    assert opened is None, f"the block of line {opened[0]} is not closed" if opened else ""
    return found


def run_block(block: Block, namespace: dict[str, Any], path: Path) -> None:
    """Executes a Python block; a traceback shows the page's own line numbers."""
    source = "\n" * block.line + block.code
    exec(compile(source, str(path), "exec"), namespace)


def run_page(path: Path, folder: Path) -> list[Printed]:
    """Runs the Python blocks of a page from top to bottom, in one namespace.

    A block that begins with a file's name is written to ``folder``, where the others can import it; it is not run. A
    block of language ``text`` behind a Python block is what that one prints.
    """
    blocks = read_blocks(path.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": path.stem}
    printed: list[Printed] = []
    write_files(blocks, folder)
    with _importable(folder):
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if block.language != "python" or block.file:
                continue
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                run_block(block, names, path)
            shown = following.code if following and following.language == "text" else None
            printed.append(Printed(block, out.getvalue(), shown))
    return printed


def write_files(blocks: list[Block], folder: Path) -> None:
    """Writes the blocks that are files."""
    for block in blocks:
        if block.language == "python" and block.file:
            (folder / block.file).write_text(block.code, "utf-8")


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    here = {path.stem for path in folder.glob("*.py")}
    sys.path.insert(0, str(folder))
    for name in here:  # of another page or test
        sys.modules.pop(name, None)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in here:
            sys.modules.pop(name, None)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and MyST make them."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#{1,6} (.+)$", prose, re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in titles]
    return {title.replace(" ", "-") for title in kept}


def links(text: str) -> list[str]:
    """Targets of links and pictures outside of code."""
    return _LINK.findall(_CODE.sub(lambda code: "`x`", text))


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of the page at ``path`` that lead to no file, or to no heading of it."""
    broken: list[str] = []
    for link in links(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        found = target.exists()
        if found and anchor:
            found = target.suffix == ".md" and anchor in anchors(target.read_text("utf-8"))
        if not found:
            broken.append(link)
    return broken


def unknown_names(text: str) -> list[str]:
    """Names such as ``fdp.hooks.compress`` in a text that fdp does not have."""
    found = sorted(set(re.findall(r"\bfdp((?:\.[a-zA-Z_]+)+)\b(?!\.py|/)", text)))
    return [f"fdp{dotted}" for dotted in found if not _exists(dotted.strip(".").split("."))]


def _exists(parts: list[str]) -> bool:
    value: Any = importlib.import_module("fdp")
    for part in parts:
        if not hasattr(value, part):
            # A program, such as fdp.launch, is not imported by fdp.
            name = f"{getattr(value, '__name__', '')}.{part}"
            if not hasattr(value, "__path__") or importlib.util.find_spec(name) is None:
                return False
            importlib.import_module(name)
        value = getattr(value, part)
    return True
