"""Estimated timelines as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fdp.inspect.plots.canvas import KINDS, bars, kinds_legend, new_figure, tidy
from fdp.inspect.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LANES = {"compute": 1.0, "link": 0.0}


def plot(timelines: Timeline | Mapping[str, Timeline]) -> Figure:
    """Draws one estimated timeline, or several above each other on one time axis, in microseconds.

    Args:
      timelines: what ``timeline`` returned, or a mapping from titles to such, to compare schedules.

    Returns:
      A ``matplotlib.figure.Figure`` that belongs to no window: call ``savefig``, or let a notebook show it.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the mapping is empty.
    """
    panels = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    figure = new_figure("a timeline", 11, 1.1 + 1.6 * len(panels))
    if not panels:
        raise ValueError("expected at least one timeline to draw, got an empty mapping.")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)
    for axes, (title, timeline) in zip(rows[:, 0], panels.items(), strict=True):
        _panel(axes, title, timeline)
    rows[-1, 0].set_xlabel("estimated microseconds since the step began")
    rows[-1, 0].set_xlim(left=0)
    kinds_legend(figure)
    return figure


def _panel(axes: Axes, title: str, timeline: Timeline) -> None:
    for kind in KINDS:
        for lane, height in _LANES.items():
            bars(
                axes,
                kind,
                height,
                (
                    (event.start * 1e6, event.end * 1e6)
                    for event in timeline.events
                    if event.lane == lane
                    and (event.kind == kind or (kind, event.kind) == ("compute", "branch"))
                ),
            )
    device = timeline.hardware.device
    summary = f"{timeline.seconds * 1e6:,.0f} us, {timeline.hidden:.0%} of communication hidden"
    axes.set_title(
        f"{title + ': ' if title else ''}{summary} (estimate, {device})", loc="left", fontsize=10
    )
    axes.set_yticks(list(_LANES.values()), list(_LANES))
    axes.set_ylim(-0.5, 1.5)
    axes.margins(x=0.01)
    tidy(axes)
