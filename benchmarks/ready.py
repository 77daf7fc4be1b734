"""When each gradient is there, counted from the start of a step that computes alone.

PyTorch says so by a hook on each parameter (``register_post_accumulate_grad_hook``). A compiled JAX program has no
hooks: each parameter goes through a function that changes nothing, whose backward rule hands one element of the
gradient to a callback. Its time is when XLA got round to the callback, as it would have got round to a reduction. That
costs something, so steps with and without watching are timed in turns, and results give both.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental import io_callback

import fdp
from benchmarks import timing, ways
from benchmarks.ways import Setting, Way

Ready = list[tuple[float, int]]  # (seconds, bytes), in order of time


class Watch:
    """Collects when gradients are reported, by number, from whichever thread."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def note(self, number: int, *_: Any) -> None:
        """A gradient that is made piece by piece is there when the last piece is."""
        self.seen[number] = time.perf_counter()

    def take(self, start: float) -> dict[int, float]:
        """Seconds since ``start`` by number, and forgets them."""
        found, self.seen = self.seen, {}
        return {number: at - start for number, at in found.items()}


def watched(loss_fn: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """``loss_fn(params, ...)`` that reports each of its gradients: ``note(number of the leaf, one element)``."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def same(number: int, x: Any) -> Any:
        return x

    def forward(number: int, x: Any) -> Any:
        return x, None

    def backward(number: int, _: None, given: Any) -> Any:
        first = lax.slice(given, (0,) * given.ndim, (1,) * given.ndim)
        io_callback(functools.partial(note, number), None, first)
        return (given,)

    same.defvjp(forward, backward)

    def loss(params: Any, *args: Any, **more: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        params = jax.tree.unflatten(structure, [same(i, x) for i, x in enumerate(leaves)])
        return loss_fn(params, *args, **more)

    return loss


def _in_jax(setting: Setting, watch: Watch) -> tuple[Way, Way, list[int]]:
    """Computing alone unwatched and watched, and the gradients' bytes."""
    pair = setting.pair
    seen = pair._replace(loss_fn=watched(pair.loss_fn, watch.note))
    alone = ways.parse("fdp:none")
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pair.shapes()[0])]
    other = ways.build(alone, setting._replace(pair=seen))

    def wait(state: Any, loss: Any) -> float:
        value = other.wait(state, loss)
        jax.effects_barrier()
        return value

    return ways.build(alone, setting), other._replace(wait=wait), sizes


def _in_torch(setting: Setting, watch: Watch) -> tuple[Way, Way, list[int]]:
    way = ways.build(ways.parse("torch:none"), setting)
    sizes = [x.numel() * x.element_size() for x in setting.pair.torch_module().parameters()]

    def init(params: Any, model_state: Any) -> Any:
        state = way.init(params, model_state)
        for number, parameter in enumerate(state.model.module.parameters()):
            parameter.register_post_accumulate_grad_hook(functools.partial(watch.note, number))
        return state

    return way, way._replace(init=init), sizes


def measure(
    setting: Setting, share: Mapping[str, Any], frameworks: set[str], warm_up: int, steps: int
) -> dict[str, Any]:
    """Times the gradients of all frameworks in turns, on all ranks at once.

    Args:
      setting: the model, and this rank's device.
      share: this rank's batch.
      frameworks: out of "torch" and "jax".
      warm_up: steps of a turn that are not counted.
      steps: of every framework that are, in turns of up to 5.

    Returns:
      ``{"ready": {framework: [[seconds, bytes], ...]}, "ready_alone_s": {framework: {"unwatched": seconds, "watched":
      seconds}}}``. Medians over steps, of the rank that is slowest for that gradient. The same on all ranks.
    """
    weights = setting.pair.init()
    watches = {name: Watch() for name in sorted(frameworks)}
    makers = {"torch": _in_torch, "jax": _in_jax}
    built = {name: makers[name](setting, watch) for name, watch in watches.items()}
    batches = {name: found[0].place(dict(share)) for name, found in built.items()}
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in built}
    seen: dict[str, list[dict[int, float]]] = {name: [] for name in built}
    left = steps
    while left > 0:
        count = min(left, 5)
        for name, (plain, observed, _) in built.items():
            turn = timing.time_way(plain, weights, batches[name], warm_up, count)
            seconds[name][0].extend(turn.seconds)
            took, times = _turn(observed, weights, batches[name], watches[name], warm_up, count)
            seconds[name][1].extend(took)
            seen[name].extend(times)
        left -= count
    result: dict[str, Any] = {"ready": {}, "ready_alone_s": {}}
    for name, (_, _, sizes) in built.items():
        mine = {i: statistics.median(step[i] for step in seen[name]) for i in seen[name][0]}
        ranks = timing.gather("when gradients are ready", [mine.get(i) for i in range(len(sizes))])
        latest = [max(of) for of in zip(*ranks, strict=True) if None not in of]
        known = [
            size for size, of in zip(sizes, zip(*ranks, strict=True), strict=True) if None not in of
        ]
        result["ready"][name] = sorted(map(list, zip(latest, known, strict=True)))
        alone = timing.gather("alone", [statistics.median(took) for took in seconds[name]])
        unwatched, observed_s = (max(of) for of in zip(*alone, strict=True))
        result["ready_alone_s"][name] = {"unwatched": unwatched, "watched": observed_s}
    return result


def _turn(
    way: Way, weights: Any, batch: Any, watch: Watch, warm_up: int, steps: int
) -> tuple[list[float], list[dict[int, float]]]:
    """Seconds of each counted step, and when its gradients were there."""
    state = way.init(*weights)
    fdp.barrier("before gradients are watched", timeout=timing.PATIENCE)
    seconds: list[float] = []
    times: list[dict[int, float]] = []
    for number in range(warm_up + steps):
        watch.take(0.0)
        start = time.perf_counter()
        state, loss = way.step(state, batch)
        way.wait(state, loss)
        if number >= warm_up:
            seconds.append(time.perf_counter() - start)
            times.append(watch.take(start))
    return seconds, times
