"""A plan as a picture: what is in which bucket."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fdp.inspect.plots.canvas import DARK, LIGHT, new_figure, tidy
from fdp.plan import Bucket, BucketPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 11.0
_FONT = 7.0
# Neighbours differ in lightness: what is written on each, and on what.
_SHADES = ((DARK, "white"), (LIGHT, "black"))
# A cap that is more than this many times the largest bucket would leave no room for the buckets.
_FAR = 2.5


def plot_plan(plan: BucketPlan) -> Figure:
    """Draws the buckets of a plan in launch order, one a row, and the leaves in each as they are packed.

    Args:
      plan: from ``fdp.plan_buckets`` or ``trainer.plan(state, batch)``.

    Returns:
      A ``matplotlib.figure.Figure`` that belongs to no window. The horizontal axis is in KiB or MiB; leaves that are
      wide enough carry their path.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the plan has no bucket.
    """
    rows = len(plan.buckets)
    figure = new_figure("a plan", _WIDTH, min(1.3 + 0.36 * rows, 14.0))
    if not rows:
        raise ValueError("expected a plan with at least one bucket to draw, got one without.")
    largest = max(bucket.nbytes for bucket in plan.buckets)
    unit, bytes_of = ("MiB", 2**20) if largest >= 2**20 else ("KiB", 2**10)
    axes = figure.subplots()
    for row, bucket in enumerate(plan.buckets):
        _row(axes, row, bucket, bytes_of, largest)
    _caps(axes, plan, bytes_of, largest)
    several = len({bucket.dtype for bucket in plan.buckets}) > 1
    axes.set_yticks(
        range(rows),
        [f"{i}" + f"  {b.dtype.name}" * several for i, b in enumerate(plan.buckets)],
        fontsize=min(10, 400 / rows),
    )
    axes.set_ylim(rows - 0.5, -0.5)  # the first one launched is on top
    axes.set_ylabel("bucket, in launch order")
    axes.set_xlabel(f"{unit} of gradients")
    axes.set_title(_title(plan, unit, bytes_of), loc="left", fontsize=10)
    tidy(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _title(plan: BucketPlan, unit: str, bytes_of: int) -> str:
    leaves = len(plan.leaves) - len(plan.excluded)
    title = f"{len(plan.buckets)} buckets, {leaves} leaves, {plan.nbytes / bytes_of:,.2f} {unit}"
    return title + (f"; {len(plan.excluded)} leaves not reduced" if plan.excluded else "")


def _row(axes: Axes, row: int, bucket: Bucket, bytes_of: int, largest: int) -> None:
    widths = [size * bucket.dtype.itemsize / bytes_of for size in bucket.sizes]
    lefts = [0.0, *itertools.accumulate(widths)][:-1]
    for which, (colour, ink) in enumerate(_SHADES):
        mine = slice(which, None, len(_SHADES))
        if widths[mine]:
            axes.barh(
                [row] * len(widths[mine]),
                widths[mine],
                left=lefts[mine],
                height=0.72,
                facecolor=colour,
                edgecolor="black",
                linewidth=0.4,
            )
        for path, width, left in zip(bucket.paths[mine], widths[mine], lefts[mine], strict=True):
            # Letters that fit: about 0.6 of the font's height each, on four fifths of the figure.
            room = width * bytes_of / largest * _WIDTH * 0.8 * 72 / (_FONT * 0.6) - 1
            label = next((text for text in (path, path.split("/")[-1]) if len(text) <= room), "")
            if label:
                axes.text(
                    left + width / 2,
                    row,
                    label,
                    ha="center",
                    va="center",
                    fontsize=_FONT,
                    color=ink,
                )


def _caps(axes: Axes, plan: BucketPlan, bytes_of: int, largest: int) -> None:
    """Lines at the caps, where they are in sight."""
    for cap, name, style, rows in (
        (plan.first_bucket_bytes, "cap of the first", ":", (-0.45, 0.45)),
        (plan.bucket_bytes, "cap", "--", (-0.5, len(plan.buckets) - 0.5)),
    ):
        same = name != "cap" and cap == plan.bucket_bytes
        if cap <= _FAR * largest and not same:
            at = [cap / bytes_of] * 2
            axes.plot(at, rows, color="white", linewidth=3.5)  # or it would be lost on a dark leaf
            label = f"{name}, {cap / bytes_of:,.4g} {'MiB' if bytes_of == 2**20 else 'KiB'}"
            axes.plot(at, rows, color="black", linestyle=style, linewidth=1.5, label=label)
