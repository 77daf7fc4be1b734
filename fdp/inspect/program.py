"""A compiled program, ready to be inspected: what every function of ``fdp.inspect`` starts from."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, cast

import jax

from fdp.inspect import graph
from fdp.inspect.cost import Costs
from fdp.inspect.graph import Site
from fdp.inspect.hlo import Module, parse

PLATFORMS = ("cpu", "gpu", "tpu")
# Tiled layouts are the TPU's; the others are names that only the GPU compiler writes.
_TPU = re.compile(r"\{[\d,]*:T\(")
_GPU = re.compile(r"fingerprint_before_lhs|scheduling_name=|gpu_|__cublas|__cudnn|__triton")
# The CPU's text has no marks of its own. These it never has.
_NOT_CPU = re.compile(r"= [^=]*\b(?:all-reduce|all-gather|collective-permute|async|copy)-start\(")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
      module: its text, parsed.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      device_kind: JAX's name of the device, such as ``"TPU v5 lite"``; empty if only the text is known.
      memory: ``compiled.memory_analysis()``, or None.
      xla_cost: ``compiled.cost_analysis()``; empty if there is none.
    """

    module: Module
    platform: str
    device_kind: str = ""
    memory: Any = None
    xla_cost: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    @functools.cached_property
    def sites(self) -> dict[str, Site]:
        """The scheduled computations by name, in the order in which a step first reaches them."""
        return graph.sites(self.module)

    @functools.cached_property
    def costs(self) -> Costs:
        """Flops and bytes of the instructions."""
        return Costs(self.module)


# What the functions of this package accept.
Inspectable = jax.stages.Compiled | str | Program


def load(compiled: Inspectable) -> Program:
    """Makes a ``Program`` of a compiled function or of its text.

    Args:
      compiled: a ``jax.stages.Compiled``, its ``as_text()``, or a ``Program``, which is returned as it is (load
        once to look many times).

    Raises:
      TypeError: something else, a ``jax.stages.Lowered`` for instance.
      ValueError: text that is no compiled HLO, is not scheduled, or comes from an unknown backend.
    """
    if isinstance(compiled, Program):
        return compiled
    if isinstance(compiled, str):
        module = _scheduled(parse(compiled))
        return Program(module, _platform_of_text(compiled))
    if not isinstance(compiled, jax.stages.Compiled):
        edit = " Add .compile()." if isinstance(compiled, jax.stages.Lowered) else ""
        raise TypeError(
            "expected a jax.stages.Compiled or the text of one, as from "
            f"trainer.lower(state, batch).compile(), got {type(compiled).__name__}.{edit}"
        )
    text = compiled.as_text()
    if not text:
        raise ValueError(
            "expected a compiled program that has a text, but as_text() returned nothing: "
            "compile it anew instead of loading it from a serialized executable."
        )
    platform, kind = _device(compiled)
    module = _scheduled(parse(text))
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    costs = cast(dict[str, float], cost) if isinstance(cost, dict) else {}
    return Program(module, platform or _platform_of_text(text), kind, memory, costs)


def _device(compiled: jax.stages.Compiled) -> tuple[str, str]:
    """Platform and kind of the devices that the program was compiled for; empty if it does not tell."""
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        for device in getattr(sharding, "device_set", ()):
            platform = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
            if platform not in PLATFORMS:
                raise ValueError(_unknown(f"a program for {device.platform!r}"))
            return platform, device.device_kind
    return "", ""


def _platform_of_text(text: str) -> str:
    if _TPU.search(text):
        return "tpu"
    if _GPU.search(text):
        return "gpu"
    if _NOT_CPU.search(text):
        raise ValueError(_unknown("HLO text with the marks of none of them"))
    return "cpu"


def _scheduled(module: Module) -> Module:
    if not module.is_scheduled:
        raise ValueError(
            f"expected a scheduled program, but {module.name} does not say is_scheduled=true: pass what "
            "jax.jit(f).lower(...).compile() returns; text from before XLA's passes has no order."
        )
    return module


def _unknown(what: str) -> str:
    return (
        f"expected a program compiled for one of {', '.join(PLATFORMS)}, got {what}: "
        "fdp.inspect does not know how its backend writes schedules."
    )
