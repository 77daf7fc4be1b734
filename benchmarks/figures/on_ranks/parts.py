"""One rank of a run that times forward pass, backward pass and optimizer apart, without communication.

    python -m fdp.launch -n 2 -m benchmarks.figures.on_ranks.parts --model mlp --batch 1024 --out parts.json

PyTorch computes as it is called, so timestamps between the three calls say it. A compiled JAX step has no such places:
the loss alone, loss and gradients, and the update are compiled as programs of their own.

Result, medians over steps of the slowest rank, in seconds: ``{"torch": {"forward_s", "backward_s", "optimizer_s"},
"jax": {"forward_s", "gradients_s", "optimizer_s"}}``; torch is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

import fdp
from benchmarks import timing
from benchmarks.pairs import Pair, make_pair
from fdp.launch import available_cores, initialize

WARM_UP = 2


def jax_parts(
    pair: Pair, share: Any, weights: Any, learning_rate: float
) -> dict[str, Callable[[], None]]:
    """Functions to time; each returns when its program is done."""
    args = jax.device_put((*weights, share))
    forward = jax.jit(pair.full_loss)
    gradients = jax.jit(jax.value_and_grad(pair.full_loss, has_aux=True))
    optimizer = optax.sgd(learning_rate)
    state = optimizer.init(args[0])

    @functools.partial(jax.jit, donate_argnums=0)
    def update(params: Any, given: Any) -> Any:
        return optax.apply_updates(params, optimizer.update(given, state)[0])

    updated = [jax.device_put(weights[0])]

    def optimize() -> None:
        updated[0] = jax.block_until_ready(update(updated[0], args[0]))

    return {
        "forward_s": lambda: jax.block_until_ready(forward(*args)),
        "gradients_s": lambda: jax.block_until_ready(gradients(*args)),
        "optimizer_s": optimize,
    }


def time_jax(
    pair: Pair, share: Any, weights: Any, learning_rate: float, steps: int
) -> dict[str, list[float]]:
    """Seconds of every step, by program."""
    seconds: dict[str, list[float]] = {}
    for name, run in jax_parts(pair, share, weights, learning_rate).items():
        for _ in range(WARM_UP):
            run()
        fdp.barrier("before a part", timeout=timing.PATIENCE)
        seconds[name] = []
        for _ in range(steps):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def time_torch(
    pair: Pair, share: Any, weights: Any, learning_rate: float, steps: int
) -> dict[str, list[float]]:
    """Seconds of every step, by part."""
    import torch

    torch.set_num_threads(available_cores())
    model = pair.torch_module()
    model.load_state_dict(pair.to_torch(*weights))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    batch = pair.torch_batch(share)
    seconds: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "optimizer_s": []}
    fdp.barrier("before a part", timeout=timing.PATIENCE)
    for step in range(-WARM_UP, steps):
        times = [time.perf_counter()]
        loss = pair.torch_loss(model, batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        if step >= 0:
            for part, (start, end) in zip(seconds.values(), itertools.pairwise(times), strict=True):
                part.append(end - start)
    return seconds


def slowest(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over steps of the slowest rank, by part; the same on all ranks."""
    ranks = timing.gather(name, {k: statistics.median(v) for k, v in seconds.items()})
    return {key: max(rank[key] for rank in ranks) for key in seconds}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.figures.on_ranks.parts", description=__doc__
    )
    made.add_argument("--model", default="mlp")
    made.add_argument("--batch", type=int, default=1024, help="examples a rank (1024)")
    made.add_argument("--steps", type=int, default=9, help="timed (9)")
    made.add_argument("--out", type=Path, required=True, help="rank 0 writes the result here")
    args = made.parse_args(argv)
    try:
        pair = make_pair(args.model)
    except ValueError as error:
        print(f"{made.prog}: {error}", file=sys.stderr)
        return 2
    initialize()
    given = pair.batch(args.batch, 1 + jax.process_index()), pair.init(), pair.learning_rate
    result: dict[str, Any] = {}
    if importlib.util.find_spec("torch") is not None:
        result["torch"] = slowest("torch's parts", time_torch(pair, *given, args.steps))
    result["jax"] = slowest("JAX's parts", time_jax(pair, *given, args.steps))
    if jax.process_index() == 0:
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
