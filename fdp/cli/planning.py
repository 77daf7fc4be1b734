"""`fdp plan`: the buckets of a model."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

from fdp.cli.loading import Model
from fdp.cli.terminal import USAGE, Stop
from fdp.order import gradient_ready_order, unhidden_leaves
from fdp.plan import BucketPlan, plan_buckets


def parse_shapes(text: str, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """``"1024x1024,1024"`` as the leaves of a model, first layer first.

    Raises:
      Stop: the text has another form, or there is no such dtype.
    """
    try:
        kind = jax.numpy.dtype(dtype)
    except TypeError as error:
        raise Stop(
            f"expected a dtype such as float32 or bfloat16, got {dtype!r}.", USAGE
        ) from error
    shapes: list[jax.ShapeDtypeStruct] = []
    for part in text.split(","):
        if not re.fullmatch(r"\d+(x\d+)*", part.strip()):
            raise Stop(
                f"expected shapes such as 1024x1024,1024 (comma between arrays, x between sizes), got {part!r}.",
                USAGE,
            )
        shapes.append(jax.ShapeDtypeStruct(tuple(map(int, part.split("x"))), kind))
    return shapes


def plan_model(model: Model, bucket_bytes: int, first_bucket_bytes: int) -> tuple[BucketPlan, str]:
    """The plan, and the order it follows: ``"ready"`` where there is a loss to read it from, else ``"reverse"``."""
    order: Any = "reverse"
    unhidden: tuple[int, ...] = ()
    if model.loss is not None:
        loss, args = model.plain_loss(), (model.params, model.batch)
        order = gradient_ready_order(loss, *args, **model.init)
        unhidden = unhidden_leaves(loss, *args, **model.init)
    plan = plan_buckets(
        model.params,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        order=order,
        unhidden=unhidden,
        trainable=model.options.get("trainable"),
    )
    return plan, "reverse" if model.loss is None else "ready"


def plan_json(plan: BucketPlan) -> dict[str, Any]:
    """A plan for a program to read."""
    return {
        "buckets": [
            {
                "bucket": index,
                "paths": list(bucket.paths),
                "shapes": [list(shape) for shape in bucket.shapes],
                "dtype": np.dtype(bucket.dtype).name,
                "nbytes": bucket.nbytes,
            }
            for index, bucket in enumerate(plan.buckets)
        ],
        "nbytes": plan.nbytes,
        "bucket_bytes": plan.bucket_bytes,
        "first_bucket_bytes": plan.first_bucket_bytes,
        "excluded": [plan.leaves[i].path for i in plan.excluded],
        "fingerprint": plan.fingerprint(),
    }
