"""Pictures of timelines."""

import builtins
import itertools

import matplotlib.image
import numpy as np
import pytest
from inspect_recorded import GPU, recorded

from fdp.inspect import plot, timeline


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


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="expected at least one timeline to draw"):
        plot({})


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    found = timeline(recorded(GPU, "naive"), "h100")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"not installed: pip install 'fdp\[plot\]'"):
        plot(found)
