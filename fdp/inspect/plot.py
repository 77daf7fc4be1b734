"""Timelines as a picture. Needs matplotlib, which the ``plot`` extra installs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fdp.inspect.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by lightness and hatching, so that a print in black and white still reads.
_STYLES: dict[str, dict[str, Any]] = {
    "matmul": {"facecolor": "#1f4e79", "label": "matmul"},
    "compute": {"facecolor": "#a8c8e8", "label": "other compute"},
    "collective": {"facecolor": "#f5e6c8", "hatch": "////", "label": "collective"},
    "loop": {"facecolor": "#6f8fae", "hatch": "....", "label": "rest of a loop"},
}
_LANES = {"compute": 1.0, "link": 0.0}


def plot(timelines: Timeline | Mapping[str, Timeline]) -> Figure:
    """Draws one timeline, or several above each other on one time axis.

    Args:
      timelines: what ``timeline`` returned, or a mapping from titles to such, to compare schedules.

    Returns:
      A ``matplotlib.figure.Figure`` that belongs to no window: call ``savefig``, or let a notebook show it.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the mapping is empty.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "expected matplotlib to draw a timeline, but it is not installed: pip install 'fdp[plot]'."
        ) from error
    panels = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    if not panels:
        raise ValueError("expected at least one timeline to draw, got an empty mapping.")
    figure = Figure(figsize=(11, 1.1 + 1.6 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)
    for axes, (title, timeline) in zip(rows[:, 0], panels.items(), strict=True):
        _panel(axes, title, timeline)
    rows[-1, 0].set_xlabel("estimated microseconds since the step began")
    handles = {h.get_label(): h for axes in rows[:, 0] for h in axes.containers}
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper right", ncols=4, frameon=False
    )
    return figure


def _panel(axes: Any, title: str, timeline: Timeline) -> None:
    for kind, style in _STYLES.items():
        events = [
            e for e in timeline.events if e.kind == kind or (kind, e.kind) == ("compute", "branch")
        ]
        if events:
            axes.barh(
                [_LANES[e.lane] for e in events],
                [(e.end - e.start) * 1e6 for e in events],
                left=[e.start * 1e6 for e in events],
                height=0.72,
                edgecolor="black",
                linewidth=0.4,
                **style,
            )
    device = timeline.hardware.device
    summary = f"{timeline.seconds * 1e6:,.0f} us, {timeline.hidden:.0%} of communication hidden"
    axes.set_title(
        f"{title + ': ' if title else ''}{summary} (estimate, {device})", loc="left", fontsize=10
    )
    axes.set_yticks(list(_LANES.values()), list(_LANES))
    axes.set_ylim(-0.5, 1.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
