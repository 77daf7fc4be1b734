"""What the pictures share: one look for each framework, told apart without colour too, and lines for the limits."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

# Darker the nearer to home, and hatched: readable in grayscale.
BARS: dict[str, dict[str, Any]] = {
    "torch": {"color": "#f2b27a", "hatch": "//", "edgecolor": "black", "label": "PyTorch DDP"},
    "jax": {"color": "#c9c9c9", "hatch": "..", "edgecolor": "black", "label": "plain JAX"},
    "fdp": {"color": "#2b5d8a", "hatch": "", "edgecolor": "black", "label": "fdp"},
}
LINES: dict[str, dict[str, Any]] = {
    "torch": {"color": "#c55a11", "linestyle": "--", "marker": "s"},
    "fdp": {"color": "#1f4e79", "linestyle": "-", "marker": "o"},
}


def who(name: str) -> str:
    """ "torch", "jax" or "fdp": whose way this is."""
    return name.partition(":")[0]


def new(
    width: float = 8.0, height: float = 4.5, columns: int = 1, rows: int = 1
) -> tuple[Any, Any]:
    """A figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns)


def whiskers(ways: Mapping[str, Any], names: list[str]) -> list[list[float]]:
    """Distances from the medians to the quartiles, as matplotlib wants them."""
    below = [ways[n]["median_s"] - ways[n]["q1_s"] for n in names]
    above = [ways[n]["q3_s"] - ways[n]["median_s"] for n in names]
    return [below, above]


def limit_lines(axes: Any, limits: Mapping[str, Any], vertical: bool) -> None:
    """Both limits of each framework, across the axes."""
    draw = axes.axvline if vertical else axes.axhline
    for framework, limit in limits.items():
        color, linestyle = ("#c55a11", "--") if framework == "torch" else ("black", "-")
        said = "torch" if framework == "torch" else "JAX"
        for key, width, what in (
            ("step_boundary_s", 1.8, "best with a step boundary"),
            ("overall_s", 0.9, "max(compute, wire)"),
        ):
            if limit[key] is not None:
                draw(
                    limit[key],
                    color=color,
                    linestyle=linestyle,
                    zorder=3 if framework == "torch" else 2.5,
                    linewidth=width,
                    label=f"{said}: {what}, {limit[key]:.3g} s",
                )


def legend(figure: Any, axes: Any, columns: int = 3) -> None:
    """Below everything, every label once."""
    every = [axes] if not isinstance(axes, (list, tuple)) else list(axes)
    found = [pair for one in every for pair in zip(*one.get_legend_handles_labels(), strict=True)]
    kept = {label: handle for handle, label in reversed(found)}
    ordered = list(dict.fromkeys(label for _, label in found))
    figure.legend(
        [kept[label] for label in ordered],
        ordered,
        fontsize=7,
        loc="outside lower center",
        ncols=columns,
    )


def short(model: str) -> str:
    """The model's name with equal widths counted: "mlp:widths=1024x13"."""

    def count(run: re.Match[str]) -> str:
        times = run[0].count("-") + 1
        return f"{run[1]}x{times}"

    return re.sub(r"\b(\d+)(?:-\1\b){2,}", count, model)


def about(result: Mapping[str, Any]) -> str:
    """A title's further lines: model, ranks, wire; where so, that it was emulated, quick, or is not complete."""
    wire = (result["machine"] or {}).get("wire") or {}
    rate = f"{wire['rate'] / 1e6:g} Mbit/s" if wire.get("rate") else "unshaped loopback"
    said = (
        f"{short(result['model'])}, batch {result['batch']} a rank, {result['ranks']} ranks, {rate}"
    )
    said = textwrap.fill(said, 90, break_long_words=False, break_on_hyphens=False)
    if result.get("emulated"):
        said += "\n(compute is slept, not done)"
    if result.get("quick"):
        said += "\n(quick: sizes too small to compare)"
    return said if result.get("complete", True) else said + "\n(incomplete)"
