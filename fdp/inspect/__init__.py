"""What a compiled program really does: its collectives, their overlap with compute, estimated times.

All of these take a ``jax.stages.Compiled`` or its text, of CPU, GPU or TPU; no such hardware is needed to look.

* ``collectives``: every collective, its bytes, its place, whether it is in a loop.
* ``interleaving``, ``interleavings``: the schedule as a string, ``"GfG[GfG]f"``.
* ``overlap``: the matmul flops that can run while each collective is on the wire.
* ``report``: all of it in a table, with what became of each bucket of a plan.
* ``timeline``, ``plot``: estimated times on hardware with published figures, and a picture.
* ``read_trace``, ``plot_trace``: a measured step on CPU devices, from a trace of ``jax.profiler``, and a picture.
* ``plot_plan``, ``plot_bucket_sweep``, ``plot_scaling``: a plan, and measured step times, as pictures.
* ``load``: reads a program once, for all of the above.
"""

from fdp.inspect.collectives import Collective, collectives
from fdp.inspect.hardware import HARDWARE, Hardware
from fdp.inspect.interleave import interleaving, interleavings
from fdp.inspect.matching import Match
from fdp.inspect.overlap import Overlap, overlap
from fdp.inspect.plots import plot, plot_bucket_sweep, plot_plan, plot_scaling, plot_trace
from fdp.inspect.program import Program, load
from fdp.inspect.report import Report, report
from fdp.inspect.simulate import Event
from fdp.inspect.timeline import Timeline, timeline
from fdp.inspect.trace import Span, Trace, read_trace

__all__ = [
    "HARDWARE",
    "Collective",
    "Event",
    "Hardware",
    "Match",
    "Overlap",
    "Program",
    "Report",
    "Span",
    "Timeline",
    "Trace",
    "collectives",
    "interleaving",
    "interleavings",
    "load",
    "overlap",
    "plot",
    "plot_bucket_sweep",
    "plot_plan",
    "plot_scaling",
    "plot_trace",
    "read_trace",
    "report",
    "timeline",
]
