"""Starts the processes of one run on this machine, and connects each script to the others.

`python -m fdp.launch -n 2 script.py args...` plays the part of mpirun or srun where there is neither;
`fdp.launch.initialize()` in the script works under it, and on a real cluster under srun, mpirun, on
Cloud TPU and on Kubernetes, where JAX itself finds out who takes part.

This is an entry point, so it may set the environment of what it starts; modules of the library never do.
"""

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fdp.supervise import Command, supervise

__all__ = ["available_cores", "environment", "free_port", "initialize", "main", "python_command"]

_VARIABLES = ("FDP_COORDINATOR_ADDRESS", "FDP_NUM_PROCESSES", "FDP_PROCESS_ID")


def environment(
    rank: int,
    num_processes: int,
    address: str,
    *,
    threads: int | None = None,
    devices: int | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of one rank, as `initialize` reads it.

    XLA sizes the thread pool of its CPU backend by the variable NPROC, and without it by the cores the
    process may use (seen in jax 0.10 and 0.12). A collective holds one thread until it is done, so with
    a pool of one, which is what a rank pinned to one core gets, nothing overlaps. Hence at least two. The
    collectives of several devices wait for each other, and may hold a small pool for ever; hence at least
    four a device with several.

    Args:
      rank: this process's number.
      num_processes: how many there are.
      address: host:port where rank 0's coordinator listens, on that interface alone.
      threads: XLA threads; None for this machine's cores divided by the processes, at least 2, or 4 for each of
        several devices.
      devices: devices per process: CPU devices where the platform is CPU, else the GPUs `rank * devices`
        and following. None leaves it to JAX.
      base: what to add to; None for this process's environment.
    """
    env = dict(os.environ if base is None else base)
    env["FDP_COORDINATOR_ADDRESS"] = address
    env["FDP_NUM_PROCESSES"] = str(num_processes)
    env["FDP_PROCESS_ID"] = str(rank)
    least = 4 * devices if devices is not None and devices > 1 else 2
    env["NPROC"] = str(threads or max(least, available_cores() // num_processes))
    env["PYTHONUNBUFFERED"] = "1"  # lines appear when they are printed, not at the end
    if devices is not None:
        env["JAX_NUM_CPU_DEVICES"] = str(devices)
        first = rank * devices
        env["FDP_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + devices)))
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in env):
        # The coordinator is spoken to by gRPC, which would ask the proxy for the way to this machine.
        host = address.rpartition(":")[0]
        env["no_proxy"] = ",".join(filter(None, (env.get("no_proxy"), host)))
    return env


def python_command(target: str, *arguments: str, module: bool = False) -> list[str]:
    """The command line of a rank that runs a script (or a module) and fails without delay.

    A plain `python script.py` that has called `jax.distributed.initialize` and then raises lingers for
    minutes in JAX's exit handler, and loses its exit code there; see `fdp/child.py`.
    """
    child = str(Path(__file__).with_name("child.py"))
    # -P: the folder of child.py is no place to import from.
    return [sys.executable, "-P", child, "module" if module else "file", target, *arguments]


def available_cores() -> int:
    """The number of cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def initialize(*, initialization_timeout: int = 300) -> None:
    """Connects this process to the others of its run; call it before anything else of JAX.

    Under `fdp.launch` the launcher's variables say who takes part. Anywhere else JAX's own detection
    does (Slurm, Open MPI, Cloud TPU, Kubernetes: `jax.distributed.initialize()`). A second call, or one
    after `jax.distributed.initialize(...)`, does nothing. On CPU, collectives between processes go
    through Gloo unless `jax_cpu_collectives_implementation` already names another implementation.

    Args:
      initialization_timeout: seconds to wait for the other processes.

    Raises:
      ValueError: the process was started by nothing that says who takes part.
      RuntimeError: JAX has already been used (from JAX), or another process did not come.
    """
    import jax  # here: the launcher itself has no need of it

    if jax.distributed.is_initialized():
        return
    chosen = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    found = [name for name in _VARIABLES if name in os.environ]
    if not found:
        try:
            jax.distributed.initialize(initialization_timeout=initialization_timeout)
        except ValueError as error:
            if "must be defined" not in str(error) and "should be defined" not in str(error):
                raise
            raise ValueError(
                "expected a process started by fdp.launch, srun, mpirun, or on Cloud TPU or Kubernetes; "
                "got one that nothing tells who else takes part: start it with "
                "`python -m fdp.launch -n 2 script.py`, or call jax.distributed.initialize("
                "coordinator_address, num_processes, process_id) instead"
            ) from error
        return
    address, count, rank = (os.environ.get(name, "") for name in _VARIABLES)
    if not (address and count.isdecimal() and rank.isdecimal() and int(rank) < int(count)):
        got = ", ".join(f"{name}={os.environ.get(name)!r}" for name in _VARIABLES)
        raise ValueError(
            f"expected host:port, a number of processes and a smaller number of this process, got {got}: "
            "let fdp.launch set these variables, or unset them all"
        )
    ids = os.environ.get("FDP_LOCAL_DEVICE_IDS")
    jax.distributed.initialize(
        address,
        int(count),
        int(rank),
        [int(part) for part in ids.split(",")] if ids else None,
        # Started inside a Slurm job, JAX would take the device from Slurm's idea of the local rank.
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
        initialization_timeout=initialization_timeout,
    )


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """A port that nobody listens on now: `port` itself, or any for 0.

    Raises:
      ValueError: `port` is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"expected a free port on {host}, got {port} ({error.strerror}): "
                "leave the port out to have a free one picked"
            ) from error
        return probe.getsockname()[1]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m fdp.launch") -> int:
    """What `python -m fdp.launch` and `fdp launch` run.

    Args:
      argv: the arguments behind the command; `sys.argv` if not given.
      prog: the command, as it was called; for the usage.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Starts a script several times on this machine, as the processes of one run. "
        "The script calls fdp.launch.initialize() first. On a cluster use srun or mpirun.",
    )
    add = parser.add_argument
    add("-n", "--num-processes", type=_positive, required=True, metavar="N")
    add("--threads", type=_positive, help="XLA CPU threads a process (cores / N, at least 2)")
    add("--devices", type=_positive, help="CPU devices, or GPUs, a process (JAX's default)")
    add("--port", type=int, default=0, help="of rank 0's coordinator (any free one)")
    add("--grace", type=float, default=5.0, help="seconds from the request to stop to the kill (5)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    add("script", metavar="SCRIPT")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed on to the script")
    args = parser.parse_args(argv)
    if not args.module and not Path(args.script).is_file():
        parser.error(
            f"expected a Python file, got {args.script!r}, which is none (a module? add -m)"
        )
    try:
        address = f"127.0.0.1:{free_port(port=args.port)}"
    except (ValueError, OverflowError) as error:
        parser.error(str(error))
    start = python_command(args.script, *args.arguments, module=args.module)
    count = args.num_processes
    envs = [
        environment(rank, count, address, threads=args.threads, devices=args.devices)
        for rank in range(count)
    ]
    outcome = supervise([Command(start, env) for env in envs], grace=args.grace)
    if outcome.reason:
        sys.stderr.write(f"fdp.launch: {outcome.reason}\n")
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
