"""Made-up results of benchmarks.figures, as small as they can be."""

from typing import Any

MACHINE = {"load_average": 0.1, "wire": {"rate": 400e6}}


def way(framework: str, rounds: list[list[float]], communicates: bool = True) -> dict[str, Any]:
    every = sorted(s for turn in rounds for s in turn)
    return {
        "framework": framework,
        "communicates": communicates,
        "median_s": every[len(every) // 2],
        "q1_s": every[len(every) // 4],
        "q3_s": every[-1 - len(every) // 4],
        "steps_s": rounds,
    }


def steady(framework: str, seconds: float, communicates: bool = True) -> dict[str, Any]:
    """Three rounds of three steps, a thousandth apart."""
    around = [[seconds * (1 + 0.001 * (i - 1)) for i in range(3)] for _ in range(3)]
    return way(framework, around, communicates)


def result(times: dict[str, float]) -> dict[str, Any]:
    """Of benchmarks.rank, two ranks: 1 s forward and 2 s backward in torch, twice that in JAX; 2 s on the wire."""
    ways = {
        name: steady("torch" if name.startswith("torch") else "jax", seconds, "none" not in name)
        for name, seconds in times.items()
    }
    return {
        "complete": True,
        "model": "mlp:widths=8-8-8-8",
        "batch": 16,
        "ranks": 2,
        "gradient_bytes": 400,
        "wire_s": 2.0,
        "machine": MACHINE,
        "alone_s": {"torch": 3.0, "jax": 6.0},
        "ready": {"torch": [[2.0, 200], [3.0, 200]], "jax": [[4.0, 200], [6.0, 200]]},
        "ready_alone_s": {
            "torch": {"unwatched": 3.0, "watched": 3.0},
            "jax": {"unwatched": 6.0, "watched": 6.0},
        },
        "ways": ways,
    }
