"""Pictures, one function each. They return a ``matplotlib.figure.Figure``, open no window and touch no global state.

``savefig`` writes one, a notebook shows one that is a cell's value. All read in black and white. They need matplotlib,
which the extra ``plot`` installs.
"""

from fdp.inspect.plots.estimated import plot
from fdp.inspect.plots.layout import plot_plan
from fdp.inspect.plots.measured import plot_trace
from fdp.inspect.plots.series import plot_bucket_sweep, plot_scaling

__all__ = ["plot", "plot_bucket_sweep", "plot_plan", "plot_scaling", "plot_trace"]
