"""Data parallel training as JAX programs have it without fdp: one reduction of everything after the backward pass.

``pmean`` under shard_map, ``pmap``, and ``auto``, where jit is told how batch and parameters are sharded and XLA finds
the reductions; ``none`` is ``pmean`` without the reduction. ``combiner`` sets what XLA's all-reduce combiner does.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import spec
from benchmarks.pairs import convert
from benchmarks.ways.way import AXIS, Setting, Way, first_copy, globally, wait_for_jax

# XLA's names for the size up to which all-reduces are joined; its CPU backend joins all of them or none.
LIMITS = {
    "gpu": "xla_gpu_all_reduce_combine_threshold_bytes",
    "tpu": "xla_jf_crs_combiner_threshold_in_bytes",
}
OFF_ON_CPU = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


def combiner(value: str) -> str | float:
    """on: as XLA has it. off: nothing is joined. A size in MiB: joined up to there."""
    return value if value in ("on", "off") else spec.mebibytes(value)


KNOWN = spec.Known({"combiner": combiner}, words=("pmean", "pmap", "auto", "none"))


def compiler_options(combiner: str | float, platform: str) -> dict[str, str] | None:
    """For ``jax.jit``.

    Raises:
      ValueError: a size, where XLA has no limit.
    """
    if combiner == "on":
        return None
    if platform in LIMITS:
        size = 0 if combiner == "off" else int(float(combiner) * 2**20)
        return {LIMITS[platform]: str(size)}
    if combiner != "off":
        raise ValueError(
            f"expected combiner=on or combiner=off on {platform}, where XLA joins all or nothing, got {combiner}"
        )
    return OFF_ON_CPU


def build(asked: spec.Spec, setting: Setting) -> Way:
    """The way that ``asked`` names.

    Raises:
      ValueError: options that do not go together, or not with this model or platform.
    """
    kind = asked.word or "pmean"
    pair, mesh = setting.pair, setting.mesh
    if kind == "pmap" and asked.options:
        raise ValueError(f"expected no options, since pmap takes none, got {asked.text!r}")
    if kind == "auto" and pair.has_model_state:
        raise ValueError(
            f"expected a model without batch statistics for {asked.text!r}: automatic sharding takes them over the "
            f"batches of all ranks together, which is another program than DDP's; leave it out for {pair.name}"
        )
    options = compiler_options(asked.options.get("combiner", "on"), mesh.devices.flat[0].platform)
    optimizer = optax.sgd(setting.learning_rate)

    def gradients(params: Any, model_state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return pair.full_loss(params, model_state, batch)

        return jax.value_and_grad(loss, has_aux=True)(params)

    def reduced(tree: Any) -> Any:
        return tree if kind == "none" else lax.pmean(tree, AXIS)

    def update(state: Any, model_state: Any, grads: Any) -> Any:
        params, opt_state, _ = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state

    def of_one_replica(state: Any, batch: Any) -> Any:
        (loss, model_state), grads = gradients(state[0], state[2], batch)
        return update(state, *reduced((model_state, grads))), loss[None]

    def of_all(state: Any, batch: Any) -> Any:
        (loss, model_state), grads = gradients(state[0], state[2], batch)
        return update(state, model_state, grads), loss

    everywhere, here = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    if kind == "pmap":
        step = jax.pmap(
            of_one_replica,
            AXIS,
            in_axes=(None, 0),
            out_axes=(None, 0),
            devices=list(mesh.devices.flat),
            donate_argnums=0,
        )
    elif kind == "auto":
        step = jax.jit(
            of_all,
            in_shardings=(everywhere, here),
            out_shardings=everywhere,
            donate_argnums=0,
            compiler_options=options,
        )
    else:
        # Without the check gradients are local, and a reduction that does nothing is let through too.
        mapped = jax.shard_map(
            of_one_replica,
            mesh=mesh,
            in_specs=(P(), P(AXIS)),
            out_specs=(P(), P(AXIS)),
            check_vma=False,
        )
        step = jax.jit(mapped, donate_argnums=0, compiler_options=options)

    def place(batch: dict[str, np.ndarray]) -> Any:
        if kind == "pmap":
            count = len(mesh.local_devices)
            return {k: jax.device_put(x.reshape(count, -1, *x.shape[1:])) for k, x in batch.items()}
        return globally(batch, mesh, P(AXIS))

    def init(params: Any, model_state: Any) -> Any:
        params = globally(params, mesh, P())
        opt_state = globally(jax.tree.map(np.asarray, optimizer.init(params)), mesh, P())
        return params, opt_state, globally(model_state, mesh, P())

    return Way(
        name=asked.text,
        framework="jax",
        communicates=kind != "none",
        place=place,
        init=init,
        step=step,
        wait=wait_for_jax,
        params=lambda state: convert.named(first_copy(state[0])),
    )
