"""fdp's own step, by schedule, bucket cap, window and packing.

``none`` is the same trainer with this rank alone on its mesh: everything but communication.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import fdp
from benchmarks import spec
from benchmarks.pairs import convert
from benchmarks.ways.way import AXIS, Setting, Way, first_copy, globally, wait_for_jax

KNOWN = spec.Known(
    {
        "cap": spec.mebibytes,
        "first": spec.mebibytes,
        "window": spec.whole,
        "pack": spec.choice("flat", "leaves"),
        "carry": spec.whole,
        "via": spec.choice("shard_map", "pmap"),
    },
    words=("ordered", "serialized", "fused", "unordered", "none"),
)


def build(asked: spec.Spec, setting: Setting) -> Way:
    """The way that ``asked`` names; what it leaves open is fdp's default.

    A given ``cap`` is the first bucket's too unless ``first`` is given, as in torch.

    Raises:
      ValueError: options that do not go together.
    """
    options = dict(asked.options)
    kind = asked.word or "ordered"
    window = options.pop("window", None)
    if window is not None and kind != "ordered":
        raise ValueError(f"expected window= with the ordered schedule only, got {asked.text!r}")
    if kind == "none" and "via" in options:
        raise ValueError(f"expected no via= where nothing is reduced, got {asked.text!r}")
    cap, first = options.pop("cap", None), options.pop("first", None)
    sizes: dict[str, Any] = {}
    if cap is not None:
        sizes["bucket_bytes"] = int(cap * 2**20)
        first = cap if first is None else first
    if first is not None:
        sizes["first_bucket_bytes"] = int(first * 2**20)
    if kind == "none":
        schedule, mesh = None, _of_this_rank(setting.mesh)
    else:
        made = getattr(fdp.schedules, kind)
        schedule = made() if window is None else made(window=window)
        mesh = setting.mesh
    pack, carry = options.pop("pack", None), options.pop("carry", 0)
    pair = setting.pair
    trainer = fdp.data_parallel(
        pair.loss_fn,
        optax.sgd(setting.learning_rate),
        mesh=mesh,
        axis_name=AXIS,
        schedule=schedule,
        pack=None if pack is None else getattr(fdp.pack, pack)(),
        has_model_state=pair.has_model_state,
        carry_over=carry,
        **sizes,
        **options,
    )

    def init(params: Any, model_state: Any) -> Any:
        # Placed already: fdp would send process 0's values to all, which takes a while on a slow wire.
        placed = globally((params, model_state), mesh, P())
        return trainer.init(placed[0], model_state=placed[1])

    def place(batch: dict[str, np.ndarray]) -> Any:
        if options.get("via") == "pmap":
            return jax.device_put(batch)
        return globally(batch, mesh, P(AXIS))

    def step(state: Any, batch: Any) -> Any:
        state, info = trainer.train_step(state, batch)
        return state, info.loss

    def no_sync_step(state: Any, batch: Any) -> Any:
        state, info = trainer.no_sync_step(state, batch)
        return state, info.loss

    return Way(
        name=asked.text,
        framework="jax",
        communicates=kind != "none",
        place=place,
        init=init,
        step=step,
        wait=wait_for_jax,
        params=lambda state: convert.named(first_copy(trainer.finish(state).params)),
        no_sync_step=no_sync_step,
    )


def _of_this_rank(mesh: Mesh) -> Mesh:
    return Mesh(np.array(mesh.local_devices), (AXIS,), axis_types=(AxisType.Auto,))
