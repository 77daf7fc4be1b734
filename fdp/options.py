"""Compiler options that let XLA overlap reductions, and keep buckets apart where nothing else does.

A schedule holds in the compiled program by data dependencies (``fdp.dependency``); options add what only the compiler
can: on TPU that all-reduces are asynchronous at all, and on every platform that all-reduces which do not depend on each
other (``unordered``, ``ordered(window=2)``) are not merged. They are given per function, to
``jax.jit(compiler_options=...)``, never through the environment, so they touch nothing else in the process.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdp import pack as packings
from fdp import schedules
from fdp.pack import Packing
from fdp.plan import DEFAULT_BUCKET_BYTES, BucketPlan, plan_buckets
from fdp.schedules import Launch, Schedule

PLATFORMS = ("cpu", "gpu", "tpu")
_CPU_BUCKET_BYTES = 8 * 2**20
# Stands for any plan where only the dependencies between launches matter.
_THREE_BUCKETS = plan_buckets([jax.ShapeDtypeStruct((1,), np.float32)] * 3, bucket_bytes=1)

# When an option applies. XLA joins all-reduces that do not depend on each other until a limit is reached: too
# many for launches that are to stay apart, too few for a launch of several buffers that is to be one.
ALWAYS = "always"
APART = "launches do not depend on each other"
TOGETHER = (
    "a launch has several buffers, and XLA's limit is too low for it or would join it with another"
)


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """One row of ``OPTIONS``.

    Attributes:
      name: XLA's name of the option.
      value: what to set it to, or what it is worked out from: ``"{bytes}"``, size of the largest launch, and
        ``"{buffers}"``, its number of buffers.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      when: ``ALWAYS``, ``APART`` or ``TOGETHER``. Later rows replace earlier ones of the same name.
      reason: what it does, and what was seen without it.
      checked: jax versions whose compilers were seen to do that.
      limit: for ``TOGETHER``, up to where XLA joins without it.
    """

    name: str
    value: str
    platform: str
    when: str
    reason: str
    checked: tuple[str, ...]
    limit: int = 0


_CHECKED = ("0.10.2", "0.12.0.1")

OPTIONS: tuple[CompilerOption, ...] = (
    CompilerOption(
        "xla_enable_async_all_reduce",
        "true",
        "tpu",
        ALWAYS,
        "All-reduces of one buffer become asynchronous; without it nothing overlaps. Needs the next one.",
        _CHECKED,
    ),
    CompilerOption(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        "true",
        "tpu",
        ALWAYS,
        "They are woven into the matmuls beside them, [GG][GG]; without it nothing overlaps. Needs the one before.",
        _CHECKED,
    ),
    CompilerOption(
        "xla_jf_crs_combiner_threshold_in_bytes",
        "0",
        "tpu",
        APART,
        "All-reduces are not joined; by default up to about 120 MiB are, and then they are synchronous.",
        _CHECKED,
    ),
    CompilerOption(
        "xla_jf_crs_combiner_threshold_in_bytes",
        "{bytes}",
        "tpu",
        TOGETHER,
        "A launch of several buffers is one all-reduce, also where it is larger than about 120 MiB.",
        _CHECKED,
        limit=112 * 2**20,
    ),
    CompilerOption(
        "xla_jf_crs_combiner_threshold_count",
        "{buffers}",
        "tpu",
        TOGETHER,
        "The same where it has more than 256 buffers.",
        _CHECKED,
        limit=256,
    ),
    CompilerOption(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "0",
        "gpu",
        APART,
        "All-reduces are not joined; by default up to 30 MiB are.",
        _CHECKED,
    ),
    CompilerOption(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "{bytes}",
        "gpu",
        TOGETHER,
        "A launch of several buffers is one all-reduce, also where it is larger than 30 MiB.",
        _CHECKED,
        limit=30 * 2**20,
    ),
    CompilerOption(
        "xla_cpu_scheduler_type",
        "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "cpu",
        ALWAYS,
        "All-reduces are written down before the matmuls they should run beside. The runtime takes shared memory for a "
        "dependency, and by default an all-reduce waited for matmuls that used its memory before.",
        _CHECKED,
    ),
    CompilerOption(
        "xla_disable_hlo_passes",
        "cpu-all-reduce-combiner",
        "cpu",
        APART,
        "All-reduces are not joined; by default all are. Replaces what XLA_FLAGS says of the same option.",
        _CHECKED,
    ),
)


def suggested_compiler_options(
    platform: str,
    plan: BucketPlan | None = None,
    *,
    schedule: Schedule | None = None,
    pack: Packing | None = None,
) -> dict[str, str]:
    """The rows of ``OPTIONS`` that serve a step, for ``jax.jit(compiler_options=...)``.

    Where launches depend on each other no option is needed to keep them apart. Where they do not, XLA's joining is
    turned off; if their packing makes several buffers of one launch, it is limited to the size of the largest launch
    instead, and the number of all-reduces is XLA's choice. The GPU compiler overlaps by default (its latency hiding
    scheduler and pipelining options changed no schedule of these programs). The CPU runtime starts whatever has its
    inputs and its memory to itself; there, an option sees to the memory (``benchmarks/NOTES.md``).

    Args:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; ``"cuda"`` and ``"rocm"`` are GPUs.
      plan: the buckets; without it, options that depend on sizes are left out.
      schedule: ``fdp.schedules.ordered()`` if not given.
      pack: ``fdp.pack.auto(platform)`` if not given.

    Returns:
      Option -> value. A newer compiler may not know them all: see ``usable_options``.

    Raises:
      ValueError: the platform is unknown.

    Example:
      >>> import fdp
      >>> fdp.suggested_compiler_options("gpu", schedule=fdp.schedules.unordered())
      {'xla_gpu_all_reduce_combine_threshold_bytes': '0'}
    """
    platform = _platform(platform)
    schedule = schedules.ordered() if schedule is None else schedule
    packing = packings.auto(platform) if pack is None else pack
    launches = schedule.launches(_THREE_BUCKETS if plan is None else plan)
    apart = not _is_chain(launches)
    largest = {"bytes": 0, "buffers": 0}
    for launch in launches if plan is not None else ():
        buffers = packings.count_buffers(packing, launch.bucket)
        if buffers > 1:
            largest["bytes"] = max(largest["bytes"], launch.bucket.nbytes)
            largest["buffers"] = max(largest["buffers"], buffers)
    chosen: dict[str, str] = {}
    for row in OPTIONS:
        needed = largest["buffers" if row.value == "{buffers}" else "bytes"]
        applies = {
            ALWAYS: True,
            APART: apart,
            TOGETHER: needed > row.limit or (apart and needed > 0 and row.value == "{bytes}"),
        }
        if row.platform == platform and applies[row.when]:
            chosen[row.name] = row.value.format(**largest)
    return chosen


def suggested_bucket_bytes(platform: str) -> int:
    """A bucket cap for ``plan_buckets`` that suits the platform, in bytes.

    On TPU 1 MiB: larger kernels each have a bucket of their own, which is reduced where it lies, and asynchronously;
    several large leaves in one bucket are not (see ``fdp.pack``). On CPU 8 MiB, the best of ten caps between two
    processes with Gloo (``benchmarks/results/fig07_bucket_cap_mlp-deep.json``). On GPU torch's 25 MiB.

    Args:
      platform: as for ``suggested_compiler_options``.

    Raises:
      ValueError: the platform is unknown.
    """
    known = {"tpu": packings.FLAT_ON_TPU_BYTES, "cpu": _CPU_BUCKET_BYTES}
    return known.get(_platform(platform), DEFAULT_BUCKET_BYTES)


def usable_options(options: Mapping[str, Any], device: Any = None) -> dict[str, Any]:
    """``options`` without those that the installed compiler does not know; they are named in a warning.

    Compiles a program that does nothing, once per process, device and set of options. A known option with a value that
    the compiler refuses is kept: the error comes from XLA when the real program is compiled, and names it.

    Args:
      options: option -> value, as for ``jax.jit(compiler_options=...)``.
      device: a device to compile for; the first of ``jax.devices()`` if not given.

    Raises:
      TypeError: ``options`` is no mapping from names to values.
    """
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            "expected compiler options as a mapping from XLA's names to values, such as "
            f'{{"xla_gpu_all_reduce_combine_threshold_bytes": "0"}}, got {options!r}.'
        )
    if not options:
        return {}
    unknown = _unknown(tuple(options.items()), jax.devices()[0] if device is None else device)
    if unknown:
        warnings.warn(
            f"the {jax.__version__} compiler does not know {', '.join(unknown)}: left out. Reductions may overlap "
            "less; the numbers do not change. Pass compiler_options={} to ask for none.",
            stacklevel=2,
        )
    return {name: value for name, value in options.items() if name not in unknown}


@functools.cache
def _unknown(options: tuple[tuple[str, Any], ...], device: Any) -> tuple[str, ...]:
    """Names of the options that the compiler for ``device`` does not know."""
    sharding = NamedSharding(Mesh(np.array([device]), ("all",)), PartitionSpec())
    nothing = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), np.float32, sharding=sharding))

    def refusal(tried: dict[str, Any]) -> str:
        try:
            nothing.compile(compiler_options=tried)
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return ""

    # The compiler stops at the first one it does not like, so after a refusal each is tried alone.
    if not refusal(dict(options)):
        return ()
    return tuple(
        name
        for name, value in options
        if f"No such compile option: '{name}'" in refusal({name: value})
    )


def _is_chain(launches: Sequence[Launch]) -> bool:
    """Whether each launch waits, directly or not, for all launches before it: then XLA can join no two of them."""
    before: list[set[int]] = []
    for k, launch in enumerate(launches):
        before.append(set(launch.after).union(*(before[j] for j in launch.after)))
        if len(before[k]) < k:
            return False
    return True


def _platform(name: str) -> str:
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(name, name)
    if platform not in PLATFORMS:
        raise ValueError(
            f"expected platform to be one of {', '.join(PLATFORMS)}, got {name!r}: pass jax.default_backend(), or "
            "the platform of the mesh's devices."
        )
    return platform
