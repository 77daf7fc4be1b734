"""Pictures: what is drawn is what was given."""

import builtins
import itertools
import math
import re
import sys

import jax
import matplotlib.image
import numpy as np
import pytest
from inspect_recorded import GPU, recorded

from fdp import plan_buckets
from fdp.inspect import (
    Span,
    Trace,
    plot,
    plot_bucket_sweep,
    plot_plan,
    plot_scaling,
    plot_trace,
    timeline,
)


def drawn(path, timelines):
    figure = plot(timelines)
    figure.savefig(path, dpi=100)
    return figure, matplotlib.image.imread(path)[..., :3]


def test_the_picture_reads_in_black_and_white(tmp_path):
    figure, pixels = drawn(tmp_path / "one.png", timeline(recorded(GPU, "chained"), "h100"))
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["compute", "link"]
    assert "estimate" in axes.get_title(loc="left")
    assert "estimated" in axes.get_xlabel()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "matmul",
        "other compute",
        "collective",
    ]
    lightness = [
        np.dot(handle.get_facecolor()[:3], (0.3, 0.59, 0.11)) for handle in legend.get_patches()
    ]
    assert min(abs(a - b) for a, b in itertools.pairwise(lightness)) > 0.1
    assert legend.get_patches()[-1].get_hatch()
    # It is drawn: dark matmuls, and more than the frame.
    assert (pixels.mean(axis=2) < 0.4).mean() > 0.01


def test_several_timelines_share_one_axis(tmp_path):
    names = ("naive", "chained", "scanned_delayed")
    found = {name: timeline(recorded(GPU, name), "h100") for name in names}
    figure, _ = drawn(tmp_path / "three.png", found)
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == list(names)
    limits = {axes.get_xlim() for axes in figure.axes}
    assert len(limits) == 1


def spans_of(axes):
    """(left, width, row) of every bar."""
    return [
        (
            round(bar.get_x(), 6),
            round(bar.get_width(), 6),
            round(bar.get_y() + bar.get_height() / 2),
        )
        for container in axes.containers
        for bar in container
    ]


def labels_of(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_every_event_of_a_timeline_is_a_bar():
    found = timeline(recorded(GPU, "chained"), "h100")
    (axes,) = plot(found).axes
    wanted = [
        (round(e.start * 1e6, 6), round((e.end - e.start) * 1e6, 6), int(e.lane == "compute"))
        for e in found.events
    ]
    assert sorted(spans_of(axes)) == sorted(wanted)


TREE = {
    "embed": jax.ShapeDtypeStruct((64, 64), np.float32),
    "layer": {
        "kernel": jax.ShapeDtypeStruct((64, 32), np.float32),
        "bias": jax.ShapeDtypeStruct((32,), np.float32),
    },
}


def test_a_plan_has_a_bar_for_each_leaf_in_its_bucket_and_lines_at_the_caps():
    plan = plan_buckets(TREE, bucket_bytes=12 * 1024, first_bucket_bytes=8 * 1024 + 128)
    assert [bucket.paths for bucket in plan.buckets] == [("layer/kernel", "layer/bias"), ("embed",)]
    figure = plot_plan(plan)
    (axes,) = figure.axes
    assert sorted(spans_of(axes)) == [(0.0, 8.0, 0), (0.0, 16.0, 1), (8.0, 0.125, 0)]
    texts = {text.get_text(): text.get_position() for text in axes.texts}
    assert texts == {
        "layer/kernel": (4.0, 0),
        "embed": (8.0, 1),
    }  # the bias has no room for its own
    assert axes.get_xlabel() == "KiB of gradients"
    assert axes.get_title(loc="left") == "2 buckets, 3 leaves, 24.12 KiB"
    assert labels_of(figure.legends[0]) == ["cap of the first, 8.125 KiB", "cap, 12 KiB"]
    dashed = [line for line in axes.lines if line.get_color() == "black"]
    assert [line.get_xdata()[0] for line in dashed] == [8.125, 12.0]
    top, bottom = sorted(axes.get_ylim(), reverse=True)
    assert axes.get_ylim() == (top, bottom)  # the first bucket on top


def test_a_cap_far_away_does_not_squeeze_the_buckets_and_frozen_leaves_are_counted():
    figure = plot_plan(plan_buckets(TREE, trainable=lambda path, leaf: path != "embed"))
    (axes,) = figure.axes
    assert axes.get_xlim()[1] < 10  # KiB, where the cap is at 25 MiB
    assert figure.legends == []
    assert axes.get_title(loc="left").endswith("; 1 leaves not reduced")


def test_equal_caps_are_one_line():
    figure = plot_plan(plan_buckets(TREE, bucket_bytes=12 * 1024, first_bucket_bytes=12 * 1024))
    assert labels_of(figure.legends[0]) == ["cap, 12 KiB"]


def test_a_plan_of_two_dtypes_names_them():
    tree = {"a": np.zeros(8, np.float32), "b": np.zeros(8, np.float16)}
    (axes,) = plot_plan(plan_buckets(tree)).axes
    names = {label.get_text().split()[-1] for label in axes.get_yticklabels()}
    assert names == {"float16", "float32"}


SPANS = (
    Span(0, "matmul", "dot", 0.0, 0.002),
    Span(0, "collective", "psum", 0.001, 0.005),
    Span(3, "compute", "tanh", 0.0, 0.001),
)


def test_a_trace_has_a_panel_for_each_device_and_a_bar_for_each_span():
    figure = plot_trace(Trace(SPANS, 0.005))
    first, second = figure.axes
    assert sorted(spans_of(first)) == [(0.0, 2.0, 1), (1.0, 4.0, 0)]
    assert spans_of(second) == [(0.0, 1.0, 1)]
    assert "device 0: collectives open for 4.00 ms, 25% of it" in first.get_title(loc="left")
    assert "measured milliseconds" in second.get_xlabel()
    assert "5.00" in second.get_xlabel()
    assert labels_of(figure.legends[0]) == ["matmul", "other compute", "collective"]
    (only,) = plot_trace(Trace(SPANS, 0.005), devices=[3]).axes
    assert only.get_title(loc="left").startswith("device 3")


SWEEP = {
    "fdp": {4 * 2**20: [0.2, 0.1, 0.4], 0: [0.5], math.inf: 0.3},
    "torch": {4 * 2**20: [0.3, 0.3], 2**10: [0.6, 0.7]},
}


def drawn_series(axes):
    """name: [(x, median, low, high)] of each series with error bars."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container.lines
        ends = [sorted(segment[:, 1]) for segment in bars.get_segments()]
        found[container.get_label()] = [
            tuple(round(float(value), 6) for value in (x, y, *end))
            for x, y, end in zip(line.get_xdata(), line.get_ydata(), ends, strict=True)
        ]
    return found


def test_a_bucket_sweep_shows_median_and_spread_in_order_of_the_caps():
    figure = plot_bucket_sweep(SWEEP, limits={"compute alone": 0.05}, title="two machines")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "each leaf",
        "1 KiB",
        "4 MiB",
        "one bucket",
    ]
    assert drawn_series(axes) == {
        "fdp": [(0, 500, 500, 500), (2, 200, 100, 400), (3, 300, 300, 300)],
        "torch": [(1, 650, 600, 700), (2, 300, 300, 300)],
    }
    assert labels_of(axes.get_legend()) == ["fdp", "torch", "compute alone"]
    assert axes.lines[-1].get_ydata() == [50, 50]
    assert axes.get_ylabel() == "milliseconds a step"
    assert axes.get_ylim()[0] == 0
    assert axes.get_title(loc="left") == "two machines"


def test_scaling_shows_ranks_on_a_logarithmic_axis():
    figure = plot_scaling({"fdp": {8: [1.5, 2.5], 1: 1.0, 2: [1.2]}}, limits={"one rank": 1.0})
    (axes,) = figure.axes
    assert drawn_series(axes) == {"fdp": [(1, 1, 1, 1), (2, 1.2, 1.2, 1.2), (8, 2, 1.5, 2.5)]}
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "8"]
    assert axes.get_ylabel() == "seconds a step"
    assert labels_of(axes.get_legend()) == ["fdp", "one rank"]


def test_twelve_series_all_look_different():
    figure = plot_scaling({str(i): {1: 1.0 + i, 2: 1.0 + i} for i in range(12)})
    lines = [container.lines[0] for container in figure.axes[0].containers]
    looks = {(line.get_marker(), str(line.get_linestyle()), line.get_color()) for line in lines}
    assert len(looks) == 12
    assert len({(line.get_marker(), str(line.get_linestyle())) for line in lines}) == 12


NOTHING = "expected {name: {setting: [seconds, ...]}} with at least one time for each setting, got "


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot({}), "expected at least one timeline to draw, got an empty mapping."),
        (
            lambda: plot_plan(plan_buckets(TREE, trainable=lambda path, leaf: False)),
            "expected a plan with at least one bucket to draw, got one without.",
        ),
        (
            lambda: plot_trace(Trace(SPANS, 0.005), devices=[0, 7]),
            "expected devices out of [0, 3], which ran something, got [0, 7].",
        ),
        (
            lambda: plot_trace(Trace(SPANS, 0.005), devices=[]),
            "expected devices out of [0, 3], which ran something, got [].",
        ),
        (lambda: plot_bucket_sweep({}), f"{NOTHING}{{}}."),
        (lambda: plot_bucket_sweep({"fdp": {1: []}}), f"{NOTHING}{{'fdp': {{1: []}}}}."),
        (
            lambda: plot_scaling({"fdp": {1: [0.1, math.nan]}}),
            "expected times in seconds, finite and above 0, got nan.",
        ),
        (
            lambda: plot_scaling({"fdp": {1: 0.1}}, limits={"none": 0.0}),
            "expected times in seconds, finite and above 0, got 0.0.",
        ),
        (lambda: plot_scaling({"fdp": {0: 0.1}}), "expected numbers of ranks from 1, got 0."),
    ],
)
def test_what_cannot_be_drawn(draw, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        draw()


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda: plot({}), "a timeline"),
        (lambda: plot_plan(plan_buckets(TREE)), "a plan"),
        (lambda: plot_trace(Trace(SPANS, 0.005)), "a trace"),
        (lambda: plot_bucket_sweep(SWEEP), "a bucket sweep"),
        (lambda: plot_scaling(SWEEP), "a scaling plot"),
    ],
)
def test_without_matplotlib_the_extra_is_named(monkeypatch, draw, what):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    message = (
        f"expected matplotlib to draw {what}, but it is not installed: pip install 'fdp[plot]'."
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot_plan(plan_buckets(TREE)),
        lambda: plot_trace(Trace(SPANS, 0.005)),
        lambda: plot_bucket_sweep(SWEEP),
    ],
)
def test_nothing_is_left_in_pyplot(draw, tmp_path):
    draw().savefig(tmp_path / "picture.png", dpi=50)
    assert (
        "matplotlib.pyplot" not in sys.modules
        or sys.modules["matplotlib.pyplot"].get_fignums() == []
    )
