"""Step times against what was varied: bucket caps, or ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fdp.inspect.plots.canvas import new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By name: what was varied (a number), and the seconds of each step, or one figure for all of them.
Series = Mapping[str, Mapping[Any, Sequence[float] | float]]

# Markers, lines and lightness change together; periods differ, so that twelve series are all different.
_MARKERS = "os^Dv*"
_LINES = ("-", "--", "-.", ":")
_INKS = ("black", "#1f4e79", "#7b8fa6")
_LIMIT_LINES = ((0, (1, 3)), (0, (6, 3)), (0, (6, 2, 1, 2)))


def plot_bucket_sweep(
    series: Series, *, limits: Mapping[str, float] | None = None, title: str = ""
) -> Figure:
    """Draws step time against bucket cap: the median, and bars from the fastest step to the slowest.

    Caps are laid out evenly in order of size, whatever their distance, so that 0 (each leaf alone) and infinity (one
    bucket) have a place too.

    Args:
      series: ``{name: {cap in bytes: seconds of each step}}``; a single number stands for all of them.
      limits: ``{name: seconds}`` of what no bucket cap changes, drawn as lines: compute alone, one reduction at the
        end.
      title: stands on top.

    Returns:
      A ``matplotlib.figure.Figure`` that belongs to no window; the vertical axis begins at zero.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is nothing to draw, or a time is not a positive number.
    """
    figure, axes, unit = _begin("a bucket sweep", series, limits, title)
    caps = sorted({cap for points in series.values() for cap in points})
    place = {cap: float(i) for i, cap in enumerate(caps)}
    _draw(axes, series, limits, place, unit)
    axes.set_xticks(list(place.values()), [_cap(cap) for cap in caps])
    axes.set_xlabel("bucket cap")
    return figure


def plot_scaling(
    series: Series, *, limits: Mapping[str, float] | None = None, title: str = ""
) -> Figure:
    """Draws step time against the number of ranks: the median, and bars from the fastest step to the slowest.

    With equal work on each rank (weak scaling) a horizontal line is perfect.

    Args:
      series: ``{name: {ranks: seconds of each step}}``; a single number stands for all of them.
      limits: ``{name: seconds}``, drawn as lines: the time of one rank, for instance.
      title: stands on top.

    Returns:
      A ``matplotlib.figure.Figure`` that belongs to no window; ranks on a logarithmic axis, seconds from zero.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is nothing to draw, a time is not a positive number, or a number of ranks is below 1.
    """
    figure, axes, unit = _begin("a scaling plot", series, limits, title)
    ranks = sorted({rank for points in series.values() for rank in points})
    if ranks[0] < 1:
        raise ValueError(f"expected numbers of ranks from 1, got {ranks[0]}.")
    _draw(axes, series, limits, {rank: float(rank) for rank in ranks}, unit)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("ranks")
    return figure


def _begin(
    what: str, series: Series, limits: Mapping[str, float] | None, title: str
) -> tuple[Figure, Axes, float]:
    """An empty figure, and how many of the vertical axis' units a second has."""
    figure = new_figure(what, 8, 4.5)
    times = [
        time for points in series.values() for found in points.values() for time in _all(found)
    ]
    if not times or not all(_all(found) for points in series.values() for found in points.values()):
        raise ValueError(
            "expected {name: {setting: [seconds, ...]}} with at least one time for each setting, got "
            f"{dict(series)!r}."
        )
    times += (limits or {}).values()
    wrong = [time for time in times if not (math.isfinite(time) and time > 0)]
    if wrong:
        raise ValueError(f"expected times in seconds, finite and above 0, got {wrong[0]!r}.")
    axes = figure.subplots()
    unit, name = (1.0, "seconds") if max(times) >= 1 else (1e3, "milliseconds")
    axes.set_ylabel(f"{name} a step")
    axes.set_title(title, loc="left", fontsize=10)
    tidy(axes)
    return figure, axes, unit


def _draw(
    axes: Axes,
    series: Series,
    limits: Mapping[str, float] | None,
    place: Mapping[float, float],
    unit: float,
) -> None:
    for i, (name, points) in enumerate(series.items()):
        settings = sorted(points)
        found = [[time * unit for time in _all(points[setting])] for setting in settings]
        middle = [statistics.median(times) for times in found]
        below = [m - min(times) for m, times in zip(middle, found, strict=True)]
        above = [max(times) - m for m, times in zip(middle, found, strict=True)]
        ink = _INKS[i % len(_INKS)]
        axes.errorbar(
            [place[setting] for setting in settings],
            middle,
            yerr=[below, above],
            label=name,
            color=ink,
            marker=_MARKERS[i % len(_MARKERS)],
            markerfacecolor=ink if i % 2 == 0 else "white",
            markersize=7,
            linestyle=_LINES[i % len(_LINES)],
            capsize=3,
            elinewidth=1,
        )
    for i, (name, seconds) in enumerate((limits or {}).items()):
        style = _LIMIT_LINES[i % len(_LIMIT_LINES)]
        axes.axhline(seconds * unit, color="#555555", linestyle=style, linewidth=1.2, label=name)
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    order = [labels.index(name) for name in [*series, *(limits or {})]]  # matplotlib's: lines first
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )


def _all(times: Sequence[float] | float) -> Iterable[float]:
    return [float(times)] if isinstance(times, (int, float)) else [float(t) for t in times]


def _cap(cap: float) -> str:
    if math.isinf(cap):
        return "one bucket"
    if cap == 0:
        return "each leaf"
    return f"{cap / 2**20:,.4g} MiB" if cap >= 2**20 else f"{cap / 2**10:,.4g} KiB"
