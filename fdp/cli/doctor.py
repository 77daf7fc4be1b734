"""`fdp doctor`: what there is to train with, what will apply, what will not work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fdp import defaults
from fdp.cli.installed import Check, check_extras, check_versions, versions
from fdp.launch import available_cores
from fdp.options import OPTIONS, suggested_bucket_bytes, usable_options
from fdp.wire import make_wire

# A collective on the CPU holds a thread of the pool until all devices have come to it. With fewer than this for each of
# several devices in one process, all threads can be held by collectives that wait for each other.
_THREADS_PER_DEVICE = 4
_STARTED_AS = ("FDP_NUM_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
# Files that are there where the driver is.
_ACCELERATORS = (
    ("an NVIDIA GPU", "gpu", "/proc/driver/nvidia/version", "'jax[cuda13]=={jax}'"),
    ("a TPU", "tpu", "/dev/accel0", "'jax[tpu]=={jax}'"),
)


def examine(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Looks at this process and machine.

    Args:
      environment: variables; those of this process if not given.

    Returns:
      ``ok``, ``checks`` (name, status, text), and the facts they are made from; ready for JSON.
    """
    env = os.environ if environment is None else environment
    facts: dict[str, Any] = {"versions": versions()}
    checks = check_versions(facts["versions"])
    try:
        devices = jax.devices()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        checks.append(Check("devices", "fails", f"JAX does not start: {first}"))
    else:
        checks += _devices(devices, facts)
        checks += _processes(env, facts)
        checks += (threads := _threads(devices, env, facts))
        checks += _options(devices, env, facts)
        # Where the pool may be too small, trying it could hang.
        safe = all(check.status == "ok" for check in threads)
        checks.append(_computes(devices if safe else devices[:1]))
    checks += check_extras()
    ok = all(check.status != "fails" for check in checks)
    return {"ok": ok, "checks": [check._asdict() for check in checks], **facts}


def _devices(devices: list[Any], facts: dict[str, Any]) -> list[Check]:
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(devices[0].platform, devices[0].platform)
    facts["platform"] = platform
    facts["devices"] = [str(device) for device in devices]
    facts["device_kind"] = devices[0].device_kind
    kind = devices[0].device_kind
    text = f"{len(devices)} x {kind}" + (f" ({platform})" if kind != platform else "")
    if len(devices) == 1:
        text += ", so nothing is reduced: data parallel training needs several"
        text += " (JAX_NUM_CPU_DEVICES=8 to try it)" if platform == "cpu" else ""
    checks = [Check("devices", "ok", text)]
    for what, kind, path, package in _ACCELERATORS:
        if platform == "cpu" and kind != platform and Path(path).exists():
            install = package.format(jax=jax.__version__)
            text = f"this machine has {what}, which JAX does not use: pip install {install}"
            checks.append(Check(kind, "warning", text))
    return checks


def _processes(env: Mapping[str, str], facts: dict[str, Any]) -> list[Check]:
    count, mine = jax.process_count(), jax.process_index()
    facts["processes"], facts["process"] = count, mine
    meant = [(name, int(env[name])) for name in _STARTED_AS if env.get(name, "").isdecimal()]
    if count == 1 and any(number > 1 for _, number in meant):
        name, number = max(meant, key=lambda pair: pair[1])
        text = (
            f"1 here, though {name} says {number} were started: a script must call "
            "fdp.launch.initialize() before it uses JAX, or each trains alone"
        )
        return [Check("processes", "note", text)]
    text = "1" if count == 1 else f"{count}, this is number {mine}"
    return [Check("processes", "ok", text)]


def _threads(devices: list[Any], env: Mapping[str, str], facts: dict[str, Any]) -> list[Check]:
    """XLA's pool on the CPU has NPROC threads, or as many as the process has cores (see ``fdp.launch``)."""
    given = env.get("NPROC", "")
    pool = int(given) if given.isdecimal() and int(given) else available_cores()
    local = [device for device in devices if device.process_index == jax.process_index()]
    facts["threads"] = pool
    text = f"{pool} in XLA's CPU pool ({'NPROC' if given else 'the cores of this process'})"
    if devices[0].platform != "cpu":
        return [Check("threads", "ok", text)]
    wanted = _THREADS_PER_DEVICE * len(local)
    if len(local) > 1 and pool < wanted:
        text += (
            f" for {len(local)} CPU devices in one process: fewer than {_THREADS_PER_DEVICE} for each, and "
            f"collectives can wait for each other forever. Set NPROC={wanted}, or use one process a device (fdp launch)"
        )
        return [Check("threads", "warning", text)]
    if pool < 2:
        text += ": a collective holds it, so nothing overlaps. Set NPROC=2 or more"
        return [Check("threads", "warning", text)]
    return [Check("threads", "ok", text)]


def _options(devices: list[Any], env: Mapping[str, str], facts: dict[str, Any]) -> list[Check]:
    platform = facts["platform"]
    wire = make_wire("data", hook=None, schedule=None, pack=None, op="mean")
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    possible = {row.name: "0" if "{" in row.value else row.value for row in OPTIONS}
    possible = {r.name: possible[r.name] for r in OPTIONS if r.platform == platform}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is unknown is said below
        applied = defaults.compiler_options(mesh, None, suggested_bucket_bytes(platform), wire)
        known = [name for name in possible if usable_options({name: possible[name]}, devices[0])]
    unknown = [name for name in possible if name not in known]
    facts["compiler_options"], facts["unknown_compiler_options"] = applied, unknown
    facts["environment"] = {name: env[name] for name in _FLAGS if name in env}
    shown = ", ".join(f"{name}={value}" for name, value in applied.items())
    none = f"none: the default schedule needs none on {platform}"
    checks = [Check("options", "ok", f"data_parallel gives the compiler {shown or none}")]
    if unknown:
        text = f"this compiler does not know {', '.join(unknown)}: left out, reductions may overlap less"
        checks.append(Check("options", "warning", text))
    for name, value in facts["environment"].items():
        checks.append(Check(name, "ok", f"set, and applies as well: {value}"))
    return checks


def _computes(devices: list[Any]) -> Check:
    """An all-reduce over the devices of this process (over one if there is one, or where more could hang)."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    mesh = jax.sharding.Mesh(np.array(local), ("data",))
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x.sum(), "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
    )
    what = f"an all-reduce over {len(local)} devices" if len(local) > 1 else "a sum on one device"
    try:
        got = float(total(np.ones(len(local) * 4, np.float32)))
    except jax.errors.JaxRuntimeError as error:
        first = str(error).partition("\n")[0]
        return Check("computes", "fails", f"{what} fails: {first}")
    if got != len(local) * 4:
        return Check("computes", "fails", f"{what} of ones is {got}, not {len(local) * 4}")
    return Check("computes", "ok", f"{what} is right")
