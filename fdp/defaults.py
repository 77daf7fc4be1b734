"""What a trainer works out by itself: its mesh, its share of the batch, its compiler options."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from fdp import pack as packings
from fdp.compat import AxisName
from fdp.options import suggested_compiler_options, usable_options
from fdp.plan import BucketPlan, plan_buckets
from fdp.wire import Wire


def default_mesh(axis_name: AxisName) -> Mesh:
    """All devices of all processes along one axis.

    Raises:
      ValueError: there are several names.
    """
    if not isinstance(axis_name, str):
        raise ValueError(
            f"expected a mesh for axis_name={axis_name!r}: without one, all devices form one axis with one name."
        )
    return jax.make_mesh((jax.device_count(),), (axis_name,), axis_types=(AxisType.Auto,))


def platform_of(mesh: Mesh) -> str:
    """Platform of the mesh's devices, as JAX names it."""
    return mesh.devices.flat[0].platform


def compiler_options(
    mesh: Mesh, plan: BucketPlan | None, bucket_bytes: int, wire: Wire
) -> dict[str, Any]:
    """Compiler options for buckets of up to ``bucket_bytes``, where there is no plan to go by yet."""
    if plan is None:
        size = 2**40 if wire.schedule.name == "fused" else bucket_bytes
        halves = [jax.ShapeDtypeStruct((max(size // 2, 1),), jnp.float8_e4m3fn)] * 4
        plan = plan_buckets(halves, bucket_bytes=max(size, 1), first_bucket_bytes=max(size, 1))
    platform = platform_of(mesh)
    options = suggested_compiler_options(
        platform,
        plan,
        schedule=wire.schedule,
        pack=packings.auto(platform) if wire.packing.name == "auto" else wire.packing,
    )
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return usable_options(options, (local or list(mesh.devices.flat))[0])


def process_share(mesh: Mesh, replicas: int) -> int:
    """Replicas that this process's batch is split over.

    Raises:
      ValueError: this process has no device of the mesh.
    """
    if jax.process_count() == 1:
        return replicas
    mine = jax.process_index()
    processes = {device.process_index for device in mesh.devices.flat}
    if mine not in processes:
        raise ValueError(
            f"expected process {mine} to own devices of the mesh, which are all on {sorted(processes)}."
        )
    return max(1, replicas // len(processes))
