"""What all pictures share: a figure without a window, and styles that read in black and white."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK, LIGHT = "#1f4e79", "#a8c8e8"

# Told apart by lightness and hatching, so that a print in black and white still reads.
KINDS: dict[str, dict[str, Any]] = {
    "matmul": {"facecolor": DARK, "label": "matmul"},
    "compute": {"facecolor": LIGHT, "label": "other compute"},
    "collective": {"facecolor": "#f5e6c8", "hatch": "////", "label": "collective"},
    "loop": {"facecolor": "#6f8fae", "hatch": "....", "label": "rest of a loop"},
}


def new_figure(what: str, width: float, height: float) -> Figure:
    """An empty figure.

    Args:
      what: is to be drawn, for the message.
      width, height: in inches.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"expected matplotlib to draw {what}, but it is not installed: pip install 'fdp[plot]'."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def bars(axes: Axes, kind: str, lane: float, spans: Iterable[tuple[float, float]]) -> None:
    """Draws what ran in one lane: (start, end) in the unit of the axis."""
    found = list(spans)
    if found:
        axes.barh(
            [lane] * len(found),
            [end - start for start, end in found],
            left=[start for start, _ in found],
            height=0.72,
            edgecolor="black",
            linewidth=0.4,
            **KINDS[kind],
        )


def kinds_legend(figure: Figure) -> None:
    """Says on top what the bars are, each kind once and in the order of ``KINDS``."""
    drawn: dict[str, Any] = {}
    for axes in figure.axes:
        for container in axes.containers:
            drawn.setdefault(str(container.get_label()), container)
    labels = [label for style in KINDS.values() if (label := style["label"]) in drawn]
    handles = [drawn[label] for label in labels]
    figure.legend(handles, labels, loc="outside upper right", ncols=4, frameon=False)


def tidy(axes: Axes) -> None:
    """Takes away the lines that say nothing."""
    axes.spines[["top", "right"]].set_visible(False)
