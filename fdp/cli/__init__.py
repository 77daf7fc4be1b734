"""The command ``fdp``, also ``python -m fdp``: plan, inspect, launch, doctor, bench.

Exit codes: 0 all is well; 1 it failed; 2 the command was not understood (an option, a module:function, a target);
3 something is not installed, and the message says what to install; 130 interrupted. ``launch`` and ``bench`` end with
the code of what they ran. A failure is one line on standard error; ``fdp --traceback ...`` shows where it came from.

The libraries it is built on are the extra ``cli``. Nothing else in fdp imports them, or this package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_LIBRARIES = ("click", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; what ``fdp`` and ``python -m fdp`` start.

    Args:
      argv: arguments behind the command's name; ``sys.argv`` if not given.

    Returns:
      The exit code. Most commands end by ``SystemExit`` with it instead, as click's do.
    """
    try:
        from fdp.cli.app import program
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES:
            raise
        sys.stderr.write(
            f"fdp: the command line needs {error.name}, which is not installed: pip install 'fdp[cli]'\n"
        )
        return 3
    program.main(None if argv is None else list(argv), prog_name="fdp")
    return 0
