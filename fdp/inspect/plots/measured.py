"""A measured step as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fdp.inspect.plots.canvas import KINDS, bars, kinds_legend, new_figure, tidy
from fdp.inspect.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LANES = {"compute": 1.0, "collectives": 0.0}


def plot_trace(trace: Trace, *, devices: Sequence[int] | None = None) -> Figure:
    """Draws what each device computed and which collectives it had open, in milliseconds.

    Args:
      trace: what ``read_trace`` returned.
      devices: numbers of those to show, from top to bottom; all that ran something if not given.

    Returns:
      A ``matplotlib.figure.Figure`` that belongs to no window, with one panel a device.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no device is asked for, or one that is not in the trace.
    """
    wanted = trace.devices if devices is None else tuple(devices)
    figure = new_figure("a trace", 11, 1.1 + 1.3 * len(wanted))
    missing = [device for device in wanted if device not in trace.devices]
    if missing or not wanted:
        raise ValueError(
            f"expected devices out of {list(trace.devices)}, which ran something, got {list(wanted)}."
        )
    rows = figure.subplots(len(wanted), sharex=True, squeeze=False)
    for axes, device in zip(rows[:, 0], wanted, strict=True):
        _panel(axes, trace, device)
    rows[-1, 0].set_xlabel(
        f"measured milliseconds since the step began; it took {trace.seconds * 1e3:.2f}"
    )
    rows[-1, 0].set_xlim(left=0)
    kinds_legend(figure)
    return figure


def _panel(axes: Axes, trace: Trace, device: int) -> None:
    for kind in KINDS:
        bars(
            axes,
            kind,
            _LANES["collectives" if kind == "collective" else "compute"],
            (
                (span.start * 1e3, span.end * 1e3)
                for span in trace.spans
                if (span.device, span.kind) == (device, kind)
            ),
        )
    open_for = trace.collective_seconds(device) * 1e3
    axes.set_title(
        f"device {device}: collectives open for {open_for:.2f} ms, {trace.beside(device):.0%} of it beside compute",
        loc="left",
        fontsize=10,
    )
    axes.set_yticks(list(_LANES.values()), list(_LANES))
    axes.set_ylim(-0.5, 1.5)
    axes.margins(x=0.01)
    tidy(axes)
