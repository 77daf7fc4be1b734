"""Compute that is slept through instead of done, for more ranks than there are cores.

    python -m benchmarks.cluster -n 1 -- -m benchmarks.emulate --model mlp --batch 1024 --out times.json
    python -m benchmarks.cluster -n 8 --rate 400mbit -- -m benchmarks.rank --emulate-compute times.json \
        --model mlp --batch 1024 --ways torch:cap=25 fdp:cap=4 --out result.json

The first command measures, alone on one core, how long either framework's forward and backward pass of an MLP takes.
In the second every layer sleeps for its share of that instead, in PyTorch in an autograd function, in JAX in a callback
from the compiled program; neither holds a core or Python's lock meanwhile. All else is real: DDP and fdp's train step,
buckets, copies, reductions, wires and updates, of parameters and gradients of the same shapes.

Layers pass one number on, the mean square of the first inputs; the loss is half its square, so that the backward pass
cannot begin before the forward pass has ended. The gradient of every weight is the square: it differs between ranks, so
an update shows whether it was reduced. What emulation leaves out: cores and memory that compute and communication take
from each other, and ranks that differ in how fast they compute.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.pairs import Pair, make_pair
from fdp.launch import available_cores

FRAMEWORKS, PASSES = ("torch", "jax"), ("forward", "backward")


class Sleeps(NamedTuple):
    """Seconds that each layer's forward and backward pass sleeps, the first layer first."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def shares(pair: Pair, forward: float, backward: float) -> Sleeps:
    """Splits the seconds of two passes over the layers by their multiplications.

    Backward, a layer multiplies twice as much as forward, for its weights and for its inputs; the first one once.

    Raises:
      ValueError: the model is no MLP.
    """
    params, _ = pair.shapes()
    names = [f"layers_{i}" for i in range(len(params))]
    if set(names) != set(params):
        raise ValueError(f"expected an MLP to emulate, got {pair.name!r}: --model mlp")
    ahead = [float(np.prod(params[name]["kernel"].shape)) for name in names]
    back = [size * (2 if i else 1) for i, size in enumerate(ahead)]
    return Sleeps(
        tuple(forward * part / sum(ahead) for part in ahead),
        tuple(backward * part / sum(back) for part in back),
    )


def read_times(path: Path) -> dict[str, Any]:
    """What `measure` has returned, from a file.

    Raises:
      ValueError: it is not there, or is something else.
    """
    try:
        times = json.loads(path.read_text("utf-8"))
        known = {name: {key: float(times[name][key]) for key in PASSES} for name in FRAMEWORKS}
        return times | known | {"model": str(times["model"])}
    except (OSError, TypeError, KeyError, ValueError):
        raise ValueError(
            f"expected a file that python -m benchmarks.emulate has written, got {str(path)!r}"
        ) from None


def one_thread() -> None:
    """For torch: what is left to compute is little, and threads of several ranks would wait for each other's cores."""
    import torch

    torch.set_num_threads(1)


def asleep(pair: Pair, times: Mapping[str, Any]) -> Pair:
    """``pair`` with layers that sleep: in each framework for what it took itself.

    Args:
      pair: an MLP.
      times: what `measure` returns.

    Raises:
      ValueError: the model is no MLP, or not the one that was measured.
    """
    if times.get("model") != pair.name:
        raise ValueError(
            f"expected times of {pair.name!r}, got those of {times.get('model')!r}: measure them anew with "
            "python -m benchmarks.emulate"
        )
    found = {name: shares(pair, **times[name]) for name in FRAMEWORKS}
    sleeps = found["jax"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        number = jnp.mean(jnp.square(batch["x"][:, 0]))
        for i, seconds in enumerate(zip(*sleeps, strict=True)):
            layer = params[f"layers_{i}"]
            number = _layer(seconds, number, layer["kernel"], layer["bias"])
        return jnp.square(number) / 2

    def torch_module() -> Any:
        from benchmarks.pairs.in_torch.asleep import Asleep

        return Asleep(pair.torch_module(), *found["torch"])

    return pair._replace(
        loss_fn=loss_fn,
        torch_module=torch_module,
        torch_loss=lambda model, batch: model(batch["x"]),
    )


def _pause(seconds: float, x: jax.Array) -> jax.Array:
    """``x``, after a while. What needs the result waits, whatever else is ready goes on."""

    def sleep(x: Any) -> Any:
        time.sleep(seconds)
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    slept = jax.pure_callback(sleep, shape, x, vmap_method="sequential")
    return (
        slept + 0 * x
    )  # varies over the mesh as x does, which shard_map cannot tell of a callback


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(seconds: tuple[float, float], x: jax.Array, kernel: Any, bias: Any) -> jax.Array:
    return _pause(seconds[0], x)


def _layer_forward(seconds: tuple[float, float], x: jax.Array, kernel: Any, bias: Any) -> Any:
    return _pause(seconds[0], x), (x, kernel)


def _layer_backward(seconds: tuple[float, float], kept: Any, given: jax.Array) -> Any:
    x, kernel = kept
    given = _pause(seconds[1], given)
    # A matrix product, small as it is, so that the gradient gets memory of its own as a real one does. A broadcast XLA
    # would make where the bucket is packed; until then what comes later would wait for the memory of its number.
    halves = jnp.broadcast_to(given * x / 2, (kernel.shape[0], 2))
    weights = halves @ jnp.ones((2, kernel.shape[1]), kernel.dtype)
    return given, weights, weights[0]


_layer.defvjp(_layer_forward, _layer_backward)


def measure(pair: Pair, batch: int, rounds: int) -> dict[str, Any]:
    """Times the passes of both frameworks in turns, on this process alone.

    Returns:
      ``{"model", "batch", "cores", "torch": {"forward": seconds, "backward": seconds}, "jax": ...}``, medians. JAX's
      backward pass is what loss and gradient take beyond the loss alone.
    """
    share = pair.batch(batch, 1)
    passes = {"torch": _in_torch(pair, share), "jax": _in_jax(pair, share)}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for number in range(rounds + 2):  # the first two are to warm up
        for name, run in passes.items():
            took = run()
            if number >= 2:
                seen[name].append(took)
    medians = {
        name: [statistics.median(of) for of in zip(*took, strict=True)]
        for name, took in seen.items()
    }
    return {
        "model": pair.name,
        "batch": batch,
        "cores": available_cores(),
        **{name: dict(zip(PASSES, both, strict=True)) for name, both in medians.items()},
    }


def _in_torch(pair: Pair, share: dict[str, np.ndarray]) -> Callable[[], tuple[float, float]]:
    import torch

    torch.set_num_threads(available_cores())
    model = pair.torch_module()
    model.load_state_dict(pair.to_torch(*pair.init()))
    batch = pair.torch_batch(share)

    def run() -> tuple[float, float]:
        model.zero_grad()
        start = time.perf_counter()
        loss = pair.torch_loss(model, batch)
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - middle

    return run


def _in_jax(pair: Pair, share: dict[str, np.ndarray]) -> Callable[[], tuple[float, float]]:
    params, batch = jax.device_put(pair.init()[0]), jax.device_put(share)
    loss = jax.jit(pair.loss_fn)
    both = jax.jit(jax.value_and_grad(pair.loss_fn))

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        jax.block_until_ready(loss(params, batch))
        middle = time.perf_counter()
        jax.block_until_ready(both(params, batch))
        forward = middle - start
        return forward, max(0.0, time.perf_counter() - middle - forward)

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulate", description=__doc__)
    parser.add_argument("--model", default="mlp", help="mlp, mlp-unequal or mlp:widths=1024x13")
    parser.add_argument("--batch", type=int, default=1024, help="examples (1024)")
    parser.add_argument("--rounds", type=int, default=9, help="of which the medians are taken (9)")
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    args = parser.parse_args(argv)
    try:
        if args.rounds < 1 or args.batch < 1:
            raise ValueError("expected --batch and --rounds of at least 1")
        pair = make_pair(args.model)
        shares(pair, 1.0, 1.0)
        times = measure(pair, args.batch, args.rounds)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print(
            f"{parser.prog}: expected PyTorch, which is not installed: pip install 'fdp[bench]'",
            file=sys.stderr,
        )
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
