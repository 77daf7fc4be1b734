"""Compilers for hardware that is not here. Everything in this folder is marked `aot` (run it with `make test-aot`)."""

import dataclasses
import functools
import importlib.util
import os
from pathlib import Path

import inspect_programs
import jax
import pytest

import fdp.aot
import fdp.inspect

HERE = Path(__file__).parent
TARGETS = ("v5e:2x4", "v5e:16x16", "h100:8")

# Read when a compiler starts, which is when a test first asks for it. XLA's flags are added to what is there.
# Not set where the compilers are missing: this file is also loaded by a run of the other tests.
if importlib.util.find_spec("libtpu") or importlib.util.find_spec("jax_cuda13_plugin"):
    flags = fdp.aot.ENVIRONMENT["XLA_FLAGS"]
    for name, value in fdp.aot.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if flags not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += " " + flags


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("aot")


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    `mesh` has one axis, "data". `options` are what makes the platform overlap; GPUs need none.
    """

    name: str

    @property
    def platform(self) -> str:
        return "gpu" if self.name.startswith("h100") else "tpu"

    @property
    def options(self) -> dict[str, str]:
        return inspect_programs.TPU_OPTIONS if self.platform == "tpu" else {}

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return _mesh(self.name)

    def compile(self, program: str, *, options: bool = True) -> fdp.inspect.Program:
        """A program of `inspect_programs`, compiled (once a session) with `self.options` or with none."""
        return _compile(program, self, options)


@functools.cache
def _mesh(name: str) -> jax.sharding.Mesh:
    return fdp.aot.mesh(name)


@functools.cache
def _compile(program: str, target: Target, options: bool) -> fdp.inspect.Program:
    lowered = inspect_programs.lower(program, target.mesh)
    compiled = lowered.compile(compiler_options=target.options if options else None)
    return fdp.inspect.load(compiled)


@pytest.fixture(params=TARGETS)
def target(request) -> Target:
    """Each of 8 TPU chips, 256 TPU chips and 8 GPUs."""
    return Target(request.param)


@pytest.fixture
def gpus() -> Target:
    """8 GPUs alone."""
    return Target("h100:8")


@pytest.fixture
def tpus() -> Target:
    """8 TPU chips alone."""
    return Target("v5e:2x4")
