"""What is installed: the packages that fdp needs, and the extras that bring more."""

from __future__ import annotations

import importlib.util
import platform
import re
from importlib import metadata
from typing import Literal, NamedTuple

import jax

Status = Literal["ok", "note", "warning", "fails"]


class Check(NamedTuple):
    """One line of `fdp doctor`. "fails": something will not work; "note": something optional is not there."""

    name: str
    status: Status
    text: str


class _Extra(NamedTuple):
    name: str
    modules: tuple[str, ...]
    serves: str
    install: str


# What fdp needs, by the names that packages have.
NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy")

_EXTRAS = (
    _Extra("matplotlib", ("matplotlib",), "pictures (fdp.inspect.plot)", "'fdp[plot]'"),
    _Extra(
        "libtpu",
        ("libtpu",),
        "TPUs, and programs for TPUs that are not there (fdp inspect --target v5e:2x4)",
        "'jax[tpu]=={jax}'",
    ),
    _Extra(
        "cuda plugin",
        ("jax_cuda13_plugin", "jax_cuda12_plugin"),
        "programs for GPUs that are not there (fdp inspect --target h100:8); 'jax[cuda13]' for GPUs that are",
        "'jax-cuda13-plugin=={jax}' 'jax-cuda13-pjrt=={jax}'",
    ),
    _Extra("torch", ("torch",), "benchmarks beside PyTorch DDP", "'fdp[bench]'"),
    _Extra("scikit-learn", ("sklearn",), "the demo, make demo", "'fdp[demo]'"),
)


def versions() -> dict[str, str | None]:
    """Version by package, None where it is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("fdp", *NEEDED):
        found[package] = _version(package)
    return found


def check_versions(found: dict[str, str | None]) -> list[Check]:
    """Whether what fdp needs is there, in the versions that its own package asks for."""
    wanted = _wanted()
    checks = [Check("python", "ok", found["python"] or "")]
    if found["fdp"] is None:
        checks.append(Check("fdp", "ok", "runs from its sources, not installed as a package"))
    else:
        checks.append(Check("fdp", "ok", found["fdp"]))
    for package in NEEDED:
        version, limits = found[package], wanted.get(package, "")
        if version is None:
            text = f"not installed: pip install '{package}{limits}'"
            checks.append(Check(package, "fails", text))
        elif not satisfies(version, limits):
            text = f"{version}, and fdp needs {limits}: pip install '{package}{limits}'"
            checks.append(Check(package, "fails", text))
        else:
            checks.append(Check(package, "ok", version + (f" (needs {limits})" if limits else "")))
    return checks


def check_extras() -> list[Check]:
    """What is optional and not there, and what it would be good for."""
    checks: list[Check] = []
    for extra in _EXTRAS:
        if any(importlib.util.find_spec(module) for module in extra.modules):
            checks.append(Check(extra.name, "ok", f"there: {extra.serves}"))
        else:
            install = extra.install.format(jax=jax.__version__)
            text = f"not there, needed for {extra.serves}: pip install {install}"
            checks.append(Check(extra.name, "note", text))
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        version = _version(package)
        if version not in (None, jax.__version__):
            text = (
                f"{version}, and jax is {jax.__version__}: JAX does not load another release's plugin. "
                f"pip install '{package}=={jax.__version__}'"
            )
            checks.append(Check(package, "warning", text))
    return checks


def satisfies(version: str, limits: str) -> bool:
    """Whether a version is inside limits such as ``">=0.10,<0.13"``; what it cannot read it lets pass."""
    for sign, limit in re.findall(r"(>=|<)\s*([\d.]+)", limits):
        mine, other = _numbers(version), _numbers(limit)
        if (mine >= other) is not (sign == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:4]))
    return numbers + (0,) * (4 - len(numbers))


def _wanted() -> dict[str, str]:
    """Limits by package, of fdp's own metadata; empty where fdp runs from its sources."""
    try:
        lines = metadata.requires("fdp") or []
    except metadata.PackageNotFoundError:
        return {}
    plain = [re.fullmatch(r"([\w-]+)\s*([^;]*)", line) for line in lines if ";" not in line]
    return {match[1]: match[2].strip() for match in plain if match}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
