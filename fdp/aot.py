"""Compile for TPUs and GPUs that are not there.

    mesh = fdp.aot.mesh("v5e:16x16")                       # 256 chips, none of them real
    trainer = fdp.data_parallel(loss_fn, optimizer, mesh=mesh)
    compiled = trainer.lower(state, batch).compile()       # the real TPU compiler
    print(fdp.inspect.report(compiled, plan))

The compilers are ordinary wheels: ``libtpu`` for TPU, ``jax-cuda13-plugin`` and ``jax-cuda13-pjrt`` for GPU (no
driver and no NVIDIA libraries), all of the release of the installed jax. ``ENVIRONMENT`` says what must be in the
environment before the program starts, or libtpu looks for its hardware; a library does not set it.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import topologies

# Autotuning measures kernels, for which there is no GPU; Triton matmuls cannot be chosen without it.
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    }
)

# The modules that say a compiler is there, any of them, and the packages that bring it.
_COMPILERS = {
    "TPU": (("libtpu",), ("jax[tpu]",)),
    "GPU": (("jax_cuda13_plugin", "jax_cuda12_plugin"), ("jax-cuda13-plugin", "jax-cuda13-pjrt")),
}
# Devices of one host, which share a switch.
_GPUS_PER_HOST = 8
_FORMS = "'h100:8' (GPU and how many) or 'v5e:2x4' (TPU and the shape of the slice)"


def topology(target: str) -> topologies.TopologyDescription:
    """Describes devices to compile for.

    Args:
      target: ``"h100:8"``, GPU and number of devices, hosts of 8; or ``"v5e:2x4"``, ``"v5e:16x16"``,
        ``"v5p:4x4x4"``, TPU and shape of the slice, as libtpu names them.

    Returns:
      JAX's description, with the devices in ``.devices``.

    Raises:
      ImportError: the compiler is not installed.
      ValueError: the target has another form, or the compiler does not know it.
    """
    name, _, size = target.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", size):
        raise ValueError(f"expected a target such as {_FORMS}, got {target!r}.")
    config = importlib.resources.files("fdp") / "targets" / f"{name}.txtpb"
    try:
        if config.is_file():
            hosts = _hosts(target, size)
            _need("GPU", target)
            return topologies.get_topology_desc(
                platform="cuda", target_config=config.read_text("utf-8"), topology=hosts
            )
        _need("TPU", target)
        return topologies.get_topology_desc(platform="tpu", topology_name=target)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"expected a target that the compiler knows, such as {_FORMS}, got {target!r}: {error}"
        ) from error


def mesh(
    target: str, axis_names: str | Sequence[str] = "data", shape: Sequence[int] | None = None
) -> jax.sharding.Mesh:
    """A mesh of devices to compile for.

    Args:
      target: as for ``topology``.
      axis_names: names of its axes.
      shape: devices along each axis; None puts all on the first.

    Returns:
      A mesh whose devices can be compiled for and not run on.

    Raises:
      ImportError: the compiler is not installed.
      ValueError: the target is unknown, or ``shape`` does not multiply to its devices.
    """
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    devices = np.array(topology(target).devices)
    dims = (devices.size,) + (1,) * (len(names) - 1) if shape is None else tuple(shape)
    if len(dims) != len(names) or np.prod(dims) != devices.size:
        raise ValueError(
            f"expected a shape of {len(names)} numbers, one for each of {names}, that multiply to the "
            f"{devices.size} devices of {target!r}, got {dims}."
        )
    return jax.sharding.Mesh(devices.reshape(dims), names)


def _hosts(target: str, size: str) -> str:
    """XLA's "slices x hosts x devices of a host"."""
    count = int(size) if size.isdigit() else 0
    hosts = -(-count // _GPUS_PER_HOST)
    if count < 1 or (hosts > 1 and count % _GPUS_PER_HOST):
        raise ValueError(
            f"expected a number of GPUs up to {_GPUS_PER_HOST} or a multiple of it, such as 'h100:8', "
            f"got {target!r}."
        )
    return f"1x{hosts}x{count // hosts}"


def _need(compiler: str, target: str) -> None:
    modules, packages = _COMPILERS[compiler]
    if any(importlib.util.find_spec(module) for module in modules):
        return
    wanted = " ".join(f"'{package}=={jax.__version__}'" for package in packages)
    raise ImportError(
        f"expected the {compiler} compiler, to compile for {target!r}, but it is not installed: "
        f"pip install {wanted}."
    )
