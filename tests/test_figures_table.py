"""benchmarks.figures.table and report: pages from results, and docs/benchmarks.md as it is committed."""

import json
from pathlib import Path

import pytest
from figure_results import result

from benchmarks.figures import fig07_bucket_cap, report, t1_step_time, table

ROOT = Path(__file__).parent.parent
PAGE = "before\n<!-- results: {} -->\nold\n<!-- results: end -->\nafter\n"
TIMES = {
    "torch:cap=5,view=on": 4.4,
    "torch:none": 3.0,
    "jax:pmean": 9.0,
    "fdp:ordered,cap=4,window=1": 4.2,
    "fdp:ordered,cap=4,carry=2": 3.3,
    "fdp:none": 6.0,
}


@pytest.fixture
def folder(tmp_path):
    made = t1_step_time.summarize(result(TIMES)) | {"command": "python -m x", "quick": False}
    for name, changes in {
        "t1_step_time_mlp": {},
        "t1_step_time_other": {"quick": True},
        "t1_step_time_third": {"complete": False},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(made | changes))
    return tmp_path


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "README.md"])
def test_the_committed_page_is_what_the_results_say(page, capsys):
    assert table.main([str(ROOT / page), "--check"]) == 0, capsys.readouterr().err


def test_a_stale_page_is_found_and_rewritten(folder, capsys):
    page = folder / "page.md"
    page.write_text(PAGE.format("short"))
    arguments = [str(page), "--results", str(folder)]
    assert table.main([*arguments, "--check"]) == 1
    assert "is not what the results say" in capsys.readouterr().err
    assert page.read_text() == PAGE.format("short")
    assert table.main(arguments) == 0
    assert table.main([*arguments, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- results: short -->\n")
    assert text.endswith("<!-- results: end -->\nafter\n")
    [row] = [line for line in text.splitlines() if line.startswith("| mlp")]
    assert row == (
        "| mlp:widths=8x4, batch 16, 400 Mbit/s | 3.000 | 6.000 | 2.000 | 9.000 | 4.400 | 4.200 | -4.5 % | 3.300 | "
        "-25.0 % | 4.000 | 7.000 |"
    )


def test_the_full_report_has_every_way_and_the_picture(folder):
    text = report.full(table.load(folder))
    assert "| `fdp:ordered,cap=4,window=1` | 4.200 |" in text
    assert (
        "![Step time by way to train, t1_step_time_mlp](../benchmarks/results/t1_step_time_mlp.png)"
        in text
    )
    assert "no step boundary limits them" in text
    assert "`python -m x`, load average before it 0.1." in text
    assert "other" not in text
    assert "third" not in text


def test_what_was_not_separated_is_said():
    made = result({"torch:cap=5,view=on": 4.4, "fdp": 4.401})
    assert report.verdict(made) == "+0.0 %, not separated"
    swept = {"fdp": ["fdp:cap=1", "fdp:cap=2", "fdp:cap=3"]}
    made = result({"fdp:cap=1": 4.0, "fdp:cap=2": 4.001, "fdp:cap=3": 5.0})
    said = report.caps(fig07_bucket_cap.summarize(made, swept))
    assert said == "- fdp: 1 MiB is best, not separated from 2 MiB.\n"


def test_runs_that_disagree_about_who_is_ahead_are_said_to():
    ahead, behind = result({"torch": 4.0, "fdp": 3.6}), result({"torch": 4.0, "fdp": 4.2})
    [said] = report.across({"t1_step_time_a": ahead, "fig12_windows_a": behind}).split("\n")[1:-1]
    assert said.startswith("2 runs of ")
    assert said.endswith(", -10.0 to +5.0 %, so they do not say who is ahead.")
    assert report.across({"t1_step_time_a": ahead, "fig06_a": ahead}).endswith(
        "-10.0 to -10.0 %.\n"
    )
    assert report.across({"t1_step_time_a": ahead, "fig10_no_sync": behind}) == ""
    # Where compute is slept, steps are of something else.
    slept = {**behind, "emulated": {"model": "mlp"}}
    assert report.across({"t1_step_time_a": ahead, "fig06_a_emulated": slept}) == ""


def test_without_results_a_page_says_so(tmp_path):
    assert report.short({}) == report.NOTHING
    assert report.full(table.load(tmp_path)) == report.NOTHING


@pytest.mark.parametrize(
    ("text", "message"),
    [("no markers", "expected '<!-- results: full -->'"), (None, "No such file")],
)
def test_a_page_that_cannot_be_one(text, message, tmp_path, capsys):
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    assert table.main([str(page)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
