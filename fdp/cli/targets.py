"""What ``--target`` means, and what must be set before JAX starts to compile for it."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import re

import jax
import numpy as np
from jax.sharding import Mesh

from fdp import aot
from fdp.cli.terminal import FAILED, MISSING, USAGE, Stop

# `cpu` alone: as many devices as one host of accelerators has.
_CPU_DEVICES = 8
_CPU = re.compile(r"cpu(?::([1-9]\d*))?")
_TPU = re.compile(r"v\d+\w*")


def use_cpu() -> None:
    """Shapes need no accelerator: another program may be using it."""
    jax.config.update("jax_platforms", "cpu")


def prepare(target: str) -> None:
    """Sets what JAX and the compilers read when they start; call it before anything runs.

    Raises:
      Stop: no such target.
    """
    cpu = _CPU.fullmatch(target)
    if cpu:
        use_cpu()
        # Too late if this process has started JAX: then `mesh` counts what there is.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", int(cpu[1] or _CPU_DEVICES))
        return
    name, _, size = target.partition(":")
    if not size or not (name in _gpus() or _TPU.fullmatch(name)):
        raise _unknown(target)
    for key, value in aot.ENVIRONMENT.items():
        present = os.environ.get(key, "")
        if key == "XLA_FLAGS" and value not in present:
            os.environ[key] = f"{present} {value}".strip()
        else:
            os.environ.setdefault(key, value)
    if _TPU.fullmatch(name):
        # What libtpu would ask the cloud's metadata for and, getting no answer, complain about at length. Programs are
        # compiled for the target all the same, of whatever generation.
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    use_cpu()


def platform(target: str) -> str:
    """``"cpu"``, ``"gpu"`` or ``"tpu"``, of a target that ``prepare`` let pass."""
    if _CPU.fullmatch(target):
        return "cpu"
    return "gpu" if target.partition(":")[0] in _gpus() else "tpu"


def mesh(target: str) -> Mesh:
    """A mesh of the target's devices with one axis, "data". Call ``prepare`` first.

    Raises:
      Stop: no such target, its compiler is not installed, or too few CPU devices.
    """
    cpu = _CPU.fullmatch(target)
    if cpu:
        count, devices = int(cpu[1] or _CPU_DEVICES), jax.devices("cpu")
        if len(devices) < count:
            raise Stop(
                f"expected {count} CPU devices for {target!r}, got {len(devices)}: the model's module starts "
                "JAX, or sets jax_num_cpu_devices, when it is imported.",
                FAILED,
            )
        return Mesh(np.array(devices[:count]), ("data",))
    try:
        return aot.mesh(target)
    except ImportError as error:
        raise Stop(str(error), MISSING) from error
    except ValueError as error:
        raise Stop(str(error), USAGE) from error


def _gpus() -> list[str]:
    folder = importlib.resources.files("fdp") / "targets"
    return sorted(
        entry.name.removesuffix(".txtpb")
        for entry in folder.iterdir()
        if entry.name.endswith(".txtpb")
    )


def _unknown(target: str) -> Stop:
    gpus = ", ".join(f"'{name}:8'" for name in _gpus())
    return Stop(
        f"expected a target such as 'cpu:8', {gpus} (GPU and how many) or 'v5e:2x4' (TPU and the shape of "
        f"the slice), got {target!r}.",
        USAGE,
    )
