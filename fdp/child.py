"""Runs one rank's script, and ends the process at once when the script fails. `fdp.launch` starts it by path.

At exit JAX waits until every process has come to `jax.distributed.shutdown`, up to five minutes, and then
aborts with a code of its own (seen in jax 0.10 and 0.12). For a script that failed nobody comes, and until
it is gone the launcher cannot see that it failed. So a failure leaves without Python's exit handlers, as
under `python -m mpi4py`; a success ends as usual.

Nothing of fdp and of JAX is imported here: the script may want to set JAX's variables before they are read.
"""

import os
import runpy
import sys
import traceback


def main(argv: list[str]) -> None:
    """Runs `argv`: "file" or "module", its path or name, and its arguments."""
    kind, target, *arguments = argv
    # What Python itself does when it is given a script, or a module by -m.
    sys.argv = [target, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(target)) if kind == "file" else os.getcwd())
    try:
        if kind == "file":
            runpy.run_path(target, run_name="__main__")
        else:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or end.code == 0:
            return
        if not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace or error.__traceback__))
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    else:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1:])
