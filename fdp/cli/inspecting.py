"""`fdp inspect`: compiles a model's step for a target and reads the program."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fdp import inspect
from fdp.cli import targets
from fdp.cli.answers import Answers
from fdp.cli.estimating import Estimate
from fdp.cli.loading import Model
from fdp.cli.planning import plan_json
from fdp.cli.terminal import USAGE, Stop, progress
from fdp.plan import BucketPlan
from fdp.train import data_parallel


class Inspection(NamedTuple):
    """A compiled step and what was read from it. ``seconds`` are those of tracing and of compiling."""

    target: str
    plan: BucketPlan
    explanation: str
    program: inspect.Program
    report: inspect.Report
    answers: Answers
    seconds: dict[str, float]


def inspect_model(
    model: Model, target: str, *, per_device: bool, caps: dict[str, int]
) -> Inspection:
    """Builds the trainer, lowers it from shapes, compiles, and reads the program.

    Args:
      model: with a loss.
      target: for which ``targets.prepare`` was called.
      per_device: the model's batch is that of one device.
      caps: ``bucket_bytes`` and ``first_bucket_bytes`` for ``data_parallel``, those that were given.

    Raises:
      Stop: there is no loss, or the target is none.
    """
    if model.loss is None:
        raise Stop(
            "expected a function that returns (loss_fn, params, batch), got one that returns params alone, which "
            "have a plan (fdp plan) and no step to compile.",
            USAGE,
        )
    mesh = targets.mesh(target)
    optimizer = optax.sgd(0.1) if model.optimizer is None else model.optimizer
    options: dict[str, Any] = {**model.options, **caps, "mesh": mesh}
    trainer = data_parallel(model.loss, optimizer, **options)
    state = trainer.init(model.params, **model.init)
    batch = _for_all(model.batch, mesh.size) if per_device else model.batch
    if trainer.config.carry_over:  # the step that every step but the first is
        state, _ = jax.eval_shape(trainer.train_step, state, batch)
    started = time.perf_counter()
    with progress("tracing the step"):
        lowered = trainer.lower(state, batch)
        plan, explanation = trainer.plan(state, batch), trainer.explain(state, batch)
    traced = time.perf_counter()
    with progress(f"compiling for {target}"):
        compiled = lowered.compile()
    seconds = {"trace": traced - started, "compile": time.perf_counter() - traced}
    with progress("reading the program"):
        program = inspect.load(compiled)
        report = inspect.report(program, plan)
    return Inspection(
        target,
        plan,
        explanation,
        program,
        report,
        Answers.of(report, _other_bytes(model)),
        _rounded(seconds),
    )


def inspection_json(found: Inspection, guess: Estimate | None, assumptions: str) -> dict[str, Any]:
    """All of it for a program to read."""
    report = found.report
    return {
        "target": found.target,
        "platform": report.platform,
        "device_kind": report.device_kind,
        "devices": report.device_count,
        "answers": dataclasses.asdict(found.answers),
        "plan": plan_json(found.plan),
        "buckets": [dataclasses.asdict(match) for match in report.buckets],
        "collectives": [
            {**dataclasses.asdict(one.collective), "hidden_by_flops": one.flops, "basis": one.basis}
            for one in report.overlaps
        ],
        "interleaving": dict(report.schedules),
        "payload_bytes": report.payload_bytes,
        "wire_bytes": report.wire_bytes,
        "matmul_flops": report.matmul_flops,
        "temp_bytes": report.temp_bytes,
        "peak_bytes": report.peak_bytes,
        "explanation": found.explanation,
        "seconds": found.seconds,
        "estimate": None if guess is None else {**guess._asdict(), "assumptions": assumptions},
    }


def _other_bytes(model: Model) -> int:
    """Bytes of what the loss returns: the loss, auxiliary output, model state."""
    assert model.loss is not None
    try:
        out: Any = jax.eval_shape(model.loss, model.params, model.batch, **model.init)
    except NameError:  # a loss with collectives of its own is traced inside a mesh only
        return np.dtype(np.float32).itemsize
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(out))


def _for_all(batch: Any, devices: int) -> Any:
    def joined(leaf: Any) -> Any:
        if not getattr(leaf, "shape", ()):
            return leaf
        return jax.ShapeDtypeStruct((leaf.shape[0] * devices, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(joined, batch)


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}
