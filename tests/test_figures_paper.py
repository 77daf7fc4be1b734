"""Figures 2, 9, 10 and 11: their arithmetic, and what their pictures hold. No PyTorch, no cluster needed."""

import numpy as np
import pytest

from benchmarks.figures import (
    fig02_allreduce,
    fig09_scaling,
    fig10_no_sync,
    fig11_convergence,
    runs,
)
from benchmarks.figures.on_ranks import allreduce, converging

MACHINE = {"wire": {"rate": 4e8}}


def way(median, framework="jax", iterations=1):
    return {
        "median_s": median,
        "q1_s": 0.9 * median,
        "q3_s": 1.2 * median,
        "iterations": iterations,
        "framework": framework,
        "sent_bytes_per_step": 5,
        "steps_s": [[median]],
    }


def labels(axes):
    return axes.get_legend_handles_labels()[1]


def points(axes, label):
    """x and y of the line or error bar with a label that starts so."""
    handles, found = axes.get_legend_handles_labels()
    [handle] = [h for h, said in zip(handles, found, strict=True) if said.startswith(label)]
    line = handle[0] if isinstance(handle, tuple) else handle
    return list(line.get_xdata()), list(line.get_ydata())


# --- Figure 2 ---


def volumes():
    return {
        "params": 2_000_000,
        "ranks": 2,
        "machine": MACHINE,
        "rows": [
            {"size": 1000, "count": 2000, "torch": [3.0, 1.0, 2.0], "jax": [4.0, 5.0, 6.0]},
            {"size": 1_000_000, "count": 2, "torch": [0.5, 0.5, 0.6], "jax": [0.7, 0.8, 0.9]},
        ],
    }


def test_pieces_add_up():
    assert allreduce.pieces(10, 4) == [4, 4, 2]
    assert allreduce.pieces(8, 4) == [4, 4]
    assert allreduce.pieces(3, 8) == [3]


def test_a_volume_has_its_time_at_line_rate():
    found = fig02_allreduce.with_wire(volumes())
    assert found["wire_s"] == pytest.approx(8 * 8e6 * 1514 / 1448 / 4e8)
    assert fig02_allreduce.with_wire(volumes() | {"machine": {"wire": None}})["wire_s"] is None


def test_figure_2_shows_both_frameworks():
    gradients = {
        "model": "resnet50:pixels=64",
        "batch": 16,
        "ready": {"torch": [[0.5, 2_000_000], [0.75, 1_000_000]], "jax": [[1.0, 3_000_000]]},
        "ready_alone_s": {k: {"watched": 1.5, "unwatched": 1.25} for k in ("torch", "jax")},
    }
    result = fig02_allreduce.with_wire(volumes()) | {"gradients": gradients}
    left, right = fig02_allreduce.draw(result).axes
    assert points(left, "PyTorch all_reduce") == ([1000, 1_000_000], [2.0, 0.5])
    assert points(left, "JAX psum") == ([1000, 1_000_000], [5.0, 0.8])
    assert "line rate: 0.167 s" in labels(left)
    assert points(right, "PyTorch") == ([0, 0.5, 0.75], [0, 2.0, 3.0])
    assert points(right, "JAX: step 1.5 s, unwatched 1.25 s") == ([0, 1.0], [0, 3.0])
    assert "2 million parameters, Gloo, 2 ranks, 400 Mbit/s" in left.get_title()


def test_figure_2_without_its_second_half_is_marked():
    result = fig02_allreduce.with_wire(volumes()) | {"complete": False}
    left, right = fig02_allreduce.draw(result).axes
    assert left.get_title().endswith("(incomplete)")
    assert not right.lines


# --- Figure 9 ---


def scaling():
    ways = fig09_scaling.WAYS

    def run(ranks, torch, fdp):
        return {
            "ranks": ranks,
            "wire_s": 1.05 * (ranks > 1),
            "alone_s": {"torch": 0.9, "jax": 0.8},
            "ways": {ways[0]: way(torch, "torch"), ways[1]: way(fdp)},
        }

    rows = [fig09_scaling.row(run(1, 0.95, 0.85), ways, False)]
    rows += [fig09_scaling.row(run(n, n + 0.5, n + 0.25), ways, True) for n in (1, 2, 4)]
    about = {"model": "mlp:widths=8-8", "batch": 4, "ranks": "1 to 4", "cores": 2}
    return about | {"machine": MACHINE, "rows": rows}


def test_which_runs_sleep():
    plan = fig09_scaling.plan
    assert plan([1, 2, 4], None, 2) == [(1, False), (2, False), (1, True), (2, True), (4, True)]
    assert plan([1, 4], True, 2) == [(1, True), (4, True)]
    assert plan([1, 4], False, 2) == [(1, False)]
    with pytest.raises(
        runs.FigureError, match=r"--ranks of at most 2, the cores here, .* got \[4\]"
    ):
        plan([4], False, 2)


def test_figure_9_tells_what_slept_from_what_computed():
    [axes] = fig09_scaling.draw(scaling()).axes
    assert points(axes, "fdp, compute slept") == ([1, 2, 4], [1.25, 2.25, 4.25])
    assert points(axes, "PyTorch DDP, compute slept") == ([1, 2, 4], [1.5, 2.5, 4.5])
    assert points(axes, "fdp, computing") == ([1], [0.85])
    assert points(axes, "jax: max(compute, wire)") == ([1, 2, 4], [0.8, 1.05, 1.05])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]


# --- Figure 10 ---


def skipping():
    torch, fdp = fig10_no_sync.WAYS
    ways = {torch: way(2.0, "torch"), fdp: way(1.8), "fdp:none": way(1.0)}
    ways[f"{torch} every=4"] = way(6.0, "torch", 4)
    ways[f"{fdp} every=4"] = way(4.8, "jax", 4)
    ways[f"{fdp} every=2"] = way(3.0, "jax", 2)
    result = {"model": "mlp:widths=8-8", "batch": 4, "ranks": 2, "machine": MACHINE, "ways": ways}
    return result | {"alone_s": {"torch": 1.0, "jax": 1.0}}


def test_what_an_iteration_should_take():
    found = fig10_no_sync.summarize(skipping(), fig10_no_sync.WAYS)["no_sync"]
    assert [row["n"] for row in found["torch"]["rows"]] == [1, 4]
    rows = found["fdp"]["rows"]
    assert [row["n"] for row in rows] == [1, 2, 4]
    np.testing.assert_allclose([row["median_s"] for row in rows], [1.8, 1.5, 1.2])
    np.testing.assert_allclose([row["expected_s"] for row in rows], [1.8, 1.4, 1.2])
    np.testing.assert_allclose([row["excess"] for row in rows], [0, 1.5 / 1.4 - 1, 0], atol=1e-9)


def test_figure_10_has_measured_expected_and_alone():
    [axes] = fig10_no_sync.draw(fig10_no_sync.summarize(skipping(), fig10_no_sync.WAYS)).axes
    x, y = points(axes, "fdp: n = 4 is +0.0 % off")
    np.testing.assert_allclose((x, y), ([1, 2, 4], [1.8, 1.5, 1.2]))
    x, y = points(axes, "PyTorch DDP, expected")
    np.testing.assert_allclose((x, y), ([1, 4], [2.0, 1.25]))
    assert "PyTorch DDP, computing alone: 1 s" in labels(axes)


# --- Figure 11 ---


def panel(difference=0.0):
    losses = {n: [2.0 - 0.01 * i for i in range(60)] for n in ("1", "8")}
    other = {n: [x + difference * (i == 30) for i, x in enumerate(of)] for n, of in losses.items()}
    return {
        "batch": 8,
        "learning_rate": 0.01,
        "machine": MACHINE,
        "losses": {"torch": losses, "fdp": other},
    }


def test_batches_differ_between_iterations_and_ranks():
    assert len({converging.seed(i, r, 2) for i in range(50) for r in range(2)}) == 100


def test_how_far_the_frameworks_are_apart():
    same = fig11_convergence.compared(panel())
    assert same["largest_difference"] == {"1": 0.0, "8": 0.0}
    apart = fig11_convergence.compared(panel(0.002))
    assert apart["largest_difference"]["1"] == pytest.approx(0.002)
    assert fig11_convergence.whole([same])["agree"] is True
    found = fig11_convergence.whole([same, apart])
    assert found["agree"] is False
    assert found["largest_difference"] == pytest.approx(0.002)


def test_smoothing_shifts_nothing():
    line = [0.01 * i for i in range(100)]
    np.testing.assert_allclose(fig11_convergence.smooth(line), line, atol=1e-3)
    rough = [x + 0.1 * (-1) ** i for i, x in enumerate(line)]
    np.testing.assert_allclose(fig11_convergence.smooth(rough)[25:75], line[25:75], atol=0.015)


def test_figure_11_has_every_curve_in_every_panel():
    both = [fig11_convergence.compared(panel(d)) for d in (0.0, 0.002)]
    first, second = fig11_convergence.draw(fig11_convergence.whole(both)).axes
    assert labels(first) == [
        *("fdp, every iteration", "PyTorch DDP, every iteration"),
        *("fdp, no_sync, n = 8", "PyTorch DDP, no_sync, n = 8"),
    ]
    x, y = points(first, "fdp, no_sync")
    assert len(x) == 60
    assert y[30] == pytest.approx(1.7, abs=1e-3)
    assert "at most 2.0e-03" in second.get_title()


def test_different_learning_fails_after_it_is_written(monkeypatch, tmp_path, capsys):
    found = fig11_convergence.whole([fig11_convergence.compared(panel(0.002))] * 2)
    monkeypatch.setattr(fig11_convergence, "measure", lambda *_: found)
    assert fig11_convergence.main(["--quick", "--out-dir", str(tmp_path)]) == 1
    assert (
        "agree to 0.001 over 200 iterations, got a difference of 0.002" in capsys.readouterr().err
    )
    assert (tmp_path / "fig11_convergence.json").exists()
    assert (tmp_path / "fig11_convergence.png").exists()


# --- arguments ---


@pytest.mark.parametrize(
    ("figure", "arguments", "message"),
    [
        (fig02_allreduce, ["--rounds", "0"], "expected --rounds of at least 1, got 0"),
        (fig09_scaling, ["--model", "digits"], "expected --model of mlp,"),
        (fig10_no_sync, ["--rate", "fast"], "from --rate"),
        (fig11_convergence, ["--draw-only"], "measure first"),
    ],
)
def test_a_wrong_argument_is_one_line(figure, arguments, message, tmp_path, capsys):
    assert figure.main(["--quick", "--out-dir", str(tmp_path), *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_ranks_below_one_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        fig09_scaling.main(["--ranks", "0"])
    assert "expected --ranks of at least 1, got 0" in capsys.readouterr().err
