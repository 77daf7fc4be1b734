"""The group of commands: what goes wrong in any of them is one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from fdp.cli.terminal import FAILED, INTERRUPTED, MISSING, USAGE, Stop


class Program(click.Group):
    """A group whose failures are one line on standard error and an exit code, see ``fdp.cli``."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """As click's."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise _usage(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        """As click's."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _usage(error) from error
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `fdp plan ... | head`: click's own way out
            raise
        except Exception as error:
            if ctx.params.get("traceback"):
                traceback.print_exc()
            raise _failure(error, ctx) from error


def _usage(error: click.UsageError) -> click.ClickException:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error
    path = error.ctx.command_path if error.ctx else "fdp"
    message = error.format_message()
    return Stop(f"{message}{'' if message.endswith('.') else '.'} See {path} --help.", USAGE)


def _failure(error: Exception, ctx: click.Context) -> Stop:
    where = _place(error.__traceback__)
    # Texts of fdp's own errors are sentences. Of others the first line says what, and the type belongs to it.
    text = str(error)
    if not text.startswith("expected"):
        text = f"{type(error).__name__}: {text.partition(chr(10))[0]}"
    hint = "" if ctx.params.get("traceback") else " (fdp --traceback shows more)"
    return Stop(f"{text}{where}{hint}", MISSING if isinstance(error, ImportError) else FAILED)


def _place(trace: TracebackType | None) -> str:
    """The last line of the user's own code that was running."""
    here = str(Path(__file__).resolve().parent.parent)
    own = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((here, sys.prefix, sys.base_prefix, "<"))
        and "-packages" not in frame.filename
    ]
    return f" [{os.path.relpath(own[-1].filename)}:{own[-1].lineno}]" if own else ""
