"""How the command line talks: one line for an error, progress for what takes long, colours for a person."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from typing import IO, Any, TextIO

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

FAILED, USAGE, MISSING, INTERRUPTED = 1, 2, 3, 130

# Seconds after which somebody wonders whether anything is happening.
_PATIENCE = 2.0
# A message longer than this is no line any more.
_LONGEST = 700


class Stop(click.ClickException):
    """Ends the program with one line on standard error and an exit code.

    Args:
      message: what was expected, what came, the edit to make.
      code: ``FAILED``, ``USAGE`` or ``MISSING``.
    """

    def __init__(self, message: str, code: int) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")
        # click declares it for the class.
        self.exit_code = code  # pyright: ignore[reportAttributeAccessIssue]

    def show(self, file: IO[Any] | None = None) -> None:
        """Writes the line."""
        stream = sys.stderr if file is None else file
        name = styled("fdp:", sys.stderr, fg="red", bold=True)
        click.echo(f"{name} {self.format_message()}", file=stream)


def styled(text: str, stream: TextIO, **style: Any) -> str:
    """``text`` in colour where ``stream`` is a terminal and NO_COLOR (no-color.org) is not set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else click.style(text, **style)


def heading(text: str) -> str:
    """A title in what goes to standard output."""
    return styled(text, sys.stdout, bold=True)


@contextlib.contextmanager
def progress(what: str) -> Generator[None]:
    """Says on standard error what is being done: with a clock on a terminal, else with a line after two seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # What the model prints stays where it was sent.
        with Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as bar:
            bar.add_task(what, total=None)
            yield
        return
    timer = threading.Timer(_PATIENCE, lambda: click.echo(f"fdp: {what} ...", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
