"""Pictures of benchmarks.figures from small made-up results: what is drawn, not how it looks."""

import matplotlib.figure
import pytest
from figure_results import result

from benchmarks.figures import (
    drawing,
    fig06_breakdown,
    fig07_bucket_cap,
    fig12_windows,
    t1_step_time,
)


def texts(figure: matplotlib.figure.Figure) -> str:
    axes = figure.axes[0]
    shown = [*axes.texts, axes.title, *axes.get_xticklabels(), *axes.get_yticklabels()]
    shown += [text for legend in figure.legends for text in legend.get_texts()]
    return "\n".join(text.get_text() for text in shown)


def widths(axes) -> list[float]:
    return sorted(bar.get_width() for bar in axes.patches)


TIMES = {
    "torch:cap=5,view=on": 4.4,
    "torch:cap=25,view=on": 4.6,
    "torch:ddp,cap=25,view=on": 4.623,
    "torch:none": 3.0,
    "jax:pmean": 9.0,
    "fdp:ordered,cap=5,window=1": 7.2,
    "fdp:serialized,cap=5": 8.0,
    "fdp:none": 6.0,
}


def test_step_times_have_a_bar_a_way_and_both_limits():
    made = t1_step_time.summarize(result(TIMES))
    figure = t1_step_time.draw(made)
    axes = figure.axes[0]
    assert widths(axes) == pytest.approx(sorted(TIMES.values()))
    assert [label.get_text() for label in axes.get_yticklabels()] == list(TIMES)
    across = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() != "None"]
    assert {4.0, 3.0, 7.0, 6.0} <= {x for x in across if isinstance(x, float)}
    shown = texts(figure)
    assert "JAX: best with a step boundary, 7 s" in shown
    assert "7.200 s, 40% hidden" in shown
    assert "9.000 s, nothing hidden" in shown
    assert "mlp:widths=8x4, batch 16 a rank, 2 ranks, 400 Mbit/s" in shown
    assert axes.get_xlabel() == "seconds a step (median, whiskers: quartiles)"


def test_step_times_are_compared():
    compared = t1_step_time.summarize(result(TIMES))["compared"]
    assert compared["torch"] == "torch:cap=5,view=on"
    assert compared["fdp"] == "fdp:ordered,cap=5,window=1"
    assert compared["fdp_over_torch"] == pytest.approx(7.2 / 4.4, abs=1e-4)
    assert compared["fdp_faster"] is False
    assert "carrying" not in compared
    carrying = t1_step_time.summarize(result(TIMES | {"fdp:ordered,cap=5,carry=3": 4.0}))
    assert carrying["compared"] | {"carrying": None} == compared | {"carrying": None}
    assert carrying["compared"]["carrying"] == {
        "fdp": "fdp:ordered,cap=5,carry=3",
        "fdp_over_torch": pytest.approx(4.0 / 4.4, abs=1e-4),
        "fdp_faster": True,
        "serialized_removed": 0.5,
    }
    assert compared["serialized_removed"] == pytest.approx(0.1)
    assert compared["same_twice"] == {
        "torch:cap=25,view=on and torch:ddp,cap=25,view=on": pytest.approx(0.005, abs=1e-4)
    }


def test_an_effect_as_small_as_the_noise_is_not_reported():
    near = {"fdp:ordered,cap=5,window=1": 4.38, "fdp:none": 3.0}
    compared = t1_step_time.summarize(result(TIMES | near))["compared"]
    assert compared["fdp_over_torch"] < 1
    assert compared["fdp_faster"] is None  # 0.45 % apart, as the same way twice is 0.5 %
    far = {"fdp:ordered,cap=5,window=1": 4.3, "fdp:none": 3.0}
    assert t1_step_time.summarize(result(TIMES | far))["compared"]["fdp_faster"] is True


def test_breakdown_adds_up_to_the_step():
    made = result(
        {"torch:cap=1": 4.0, "torch:cap=9": 5.0, "fdp:ordered": 7.0, "fdp:serialized": 8.0}
    )
    made["parts"] = {
        "torch": {"forward_s": 0.9, "backward_s": 1.8, "optimizer_s": 0.2},
        "jax": {"forward_s": 2.0, "gradients_s": 5.5, "optimizer_s": 0.4},
    }
    made = fig06_breakdown.summarize(
        made,
        {"torch": ["torch:cap=1"], "fdp": ["fdp:ordered"]},
        {"torch": "torch:cap=9", "fdp": "fdp:serialized"},
    )
    assert list(made["bars"]) == [
        "PyTorch DDP, not overlapped",
        "PyTorch DDP, overlapped",
        "fdp, not overlapped",
        "fdp, overlapped",
    ]
    for bar in made["bars"].values():
        assert sum(bar[part] for part in fig06_breakdown.PARTS) == pytest.approx(bar["step"])
    torch, ours = made["bars"]["PyTorch DDP, overlapped"], made["bars"]["fdp, overlapped"]
    assert torch["exposed"] == pytest.approx(1.0)
    assert torch["backward"] == pytest.approx(1.9)
    assert ours["of_serialized"] == pytest.approx(0.875)
    assert ours["separated"] is True
    axes = (figure := fig06_breakdown.draw(made)).axes[0]
    tops = [max(p.get_y() + p.get_height() for p in axes.patches[i : i + 4]) for i in (0, 4, 8, 12)]
    assert tops == pytest.approx([1.0, 0.8, 1.0, 0.875])
    assert "0.875" in texts(figure)
    assert "slept" not in texts(figure)
    assert "(compute is slept, not done)" in texts(
        fig06_breakdown.draw({**made, "emulated": {"model": "mlp"}})
    )
    times = {"torch": 4.0, "fdp:ordered": 7.0, "fdp:carry=2": 5.0, "fdp:carry=4": 6.0}
    carried = fig06_breakdown.summarize(
        result(times | {"fdp:serialized": 8.0}) | {"parts": made["parts"]},
        {"fdp": ["fdp:ordered"]},
        {"fdp": "fdp:serialized"},
        ["fdp:carry=2", "fdp:carry=4"],
    )["bars"]["fdp, carried over"]
    assert (carried["way"], carried["of_serialized"]) == ("fdp:carry=2", 0.625)
    assert "exposed communication" in texts(figure)


def test_caps_are_drawn_in_order_with_the_best_marked():
    swept = fig07_bucket_cap.ways(("0.000001", "4", "100000"))
    assert swept["fdp"][1] == "fdp:ordered,cap=4"
    names = [*swept["torch"], *swept["fdp"]]
    times = (5.0, 4.5, 4.8, 8.0, 7.5, 7.4)
    made = fig07_bucket_cap.summarize(result(dict(zip(names, times, strict=True))), swept)
    assert made["optimum"]["torch"]["inside"] is True
    assert made["optimum"]["fdp"]["inside"] is False
    figure = fig07_bucket_cap.draw(made)
    axes = figure.axes[0]
    lines = [list(line.get_ydata()) for line in axes.lines]
    assert [5.0, 4.5, 4.8] in lines
    assert [8.0, 7.5, 7.4] in lines
    circled = [line.get_ydata()[0] for line in axes.lines if line.get_markersize() == 13]
    assert circled == [4.5, 7.4]
    shown = texts(figure)
    assert "PyTorch DDP: 4 MiB is best, and both ends are worse" in shown
    assert "fdp: the best is at an end: one bucket" in shown
    assert [t.get_text() for t in axes.get_xticklabels()] == [
        "a bucket\na gradient",
        "4",
        "one\nbucket",
    ]


def test_windows_have_a_group_a_cap():
    groups = fig12_windows.swept((1, 10))
    names = [name for group in groups.values() for name in group]
    assert names[:4] == [
        "fdp:ordered,cap=1,window=1",
        "fdp:ordered,cap=1,window=3",
        "fdp:ordered,cap=1,window=5",
        "torch:cap=1,view=on",
    ]
    times = (8.0, 7.0, 7.5, 4.5, 7.5, 7.501, 7.502, 4.2)
    made = fig12_windows.summarize(result(dict(zip(names, times, strict=True))), groups)
    assert made["windows"]["1"]["said"] == "window 3 takes 12.5% off"
    assert made["windows"]["10"]["said"] == "no gain seen"
    figure = fig12_windows.draw(made)
    assert [bar.get_height() for bar in figure.axes[0].patches] == list(times)
    assert "window 3 takes 12.5% off" in texts(figure)


def test_a_title_says_what_a_result_is_not():
    made = result({"fdp": 7.0}) | {"quick": True, "complete": False, "machine": {"wire": None}}
    said = drawing.about(made)
    assert "unshaped loopback" in said
    assert "quick: sizes too small to compare" in said
    assert "incomplete" in said


def test_models_are_shortened():
    assert drawing.short("mlp:widths=1024-1024-1024-10") == "mlp:widths=1024x3-10"
    assert drawing.short("mlp:widths=784-2048-1024-1024") == "mlp:widths=784-2048-1024-1024"
    assert drawing.short("resnet50:pixels=64") == "resnet50:pixels=64"


def test_a_long_name_does_not_run_out_of_the_picture():
    long = {"model": "bert:length=128,layers=12,width=768,heads=12,words=30522,places=512"}
    assert max(map(len, drawing.about(result(TIMES) | long).splitlines())) <= 90
    assert "\n" not in drawing.about(result(TIMES))


@pytest.mark.parametrize("module", [t1_step_time, fig06_breakdown, fig07_bucket_cap, fig12_windows])
def test_wrong_use_is_one_line_and_nothing_starts(module, tmp_path, capsys):
    for arguments, message in (
        (["--rounds", "0"], "expected --rounds of at least 1, got 0"),
        (["--rate", "fast"], "expected a rate such as 400mbit"),
        (["--model", "gpt"], "expected --model of mlp, mlp-unequal, mlp-deep, resnet50"),
        (["--draw-only"], "there is none: measure first"),
    ):
        assert module.main([*arguments, "--out-dir", str(tmp_path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"python -m benchmarks.figures.{module.NAME}: ")
        assert message in line
    assert list(tmp_path.iterdir()) == []
