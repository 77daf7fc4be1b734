"""benchmarks.figures.runs and files: failing runs, results as files. No cluster is made here."""

import importlib.util
import json
from pathlib import Path
from typing import ClassVar

import pytest
from figure_results import result

from benchmarks.cluster import UnreachableRate
from benchmarks.figures import files, runs, settings, t1_step_time
from benchmarks.figures.runs import FigureError
from fdp.supervise import Outcome


class FakeCluster:
    """Says what `outcomes` holds, one after the other."""

    outcomes: ClassVar[list] = []
    made: ClassVar[list] = []

    def __init__(self, ranks, **options):
        FakeCluster.made.append((ranks, options))
        self.report = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, commands, timeout):
        FakeCluster.commands = commands
        found = FakeCluster.outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        if callable(found):
            found = found(commands[0])
        return Outcome(found, 1, "process 1 failed" if found else "", None, (), ())


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(runs, "Cluster", FakeCluster)
    monkeypatch.setattr(runs, "unavailable_reason", lambda: None)
    monkeypatch.setattr(runs.os, "geteuid", lambda: 0)
    monkeypatch.setattr(runs, "BUSY", 0.0)
    FakeCluster.outcomes, FakeCluster.made = [], []
    return FakeCluster


def test_a_busy_wire_is_tried_again(cluster, capsys):
    cluster.outcomes = [UnreachableRate("too slow"), 0]
    runs.on_cluster(["-m", "x", "1"], ranks=2, rate="400mbit", timeout_s=1)
    assert cluster.made == [(2, {"nice": -20, "rate": "400mbit"})] * 2
    assert cluster.commands[0][-3:] == ["module", "x", "1"]
    assert "too slow; again in 0 s" in capsys.readouterr().err


def test_a_wire_that_stays_too_slow_is_an_error(cluster):
    cluster.outcomes = [UnreachableRate("too slow")] * 3
    with pytest.raises(FigureError, match="too slow") as caught:
        runs.on_cluster(["-m", "x"], ranks=2, rate="400mbit", timeout_s=1, tries=2)
    assert caught.value.code == 1
    assert len(cluster.made) == 2


def test_a_rank_that_dies_is_an_error(cluster):
    cluster.outcomes = [124]
    with pytest.raises(
        FigureError, match=r"-m x to succeed on 2 ranks, got exit code 124: process 1"
    ):
        runs.on_cluster(["-m", "x"], ranks=2, rate="400mbit", timeout_s=1)


def test_without_root_ranks_share_the_loopback_interface(cluster, monkeypatch, capsys):
    monkeypatch.setattr(runs, "unavailable_reason", lambda: "network namespaces need root")
    monkeypatch.setattr(runs.os, "geteuid", lambda: 1000)
    cluster.outcomes = [0]
    runs.on_cluster(["x.py"], ranks=2, rate="400mbit", timeout_s=1)
    assert cluster.made == [(2, {"nice": 0, "loopback": True})]
    assert (
        "network namespaces need root; all ranks on loopback, unshaped" in capsys.readouterr().err
    )


def test_without_torch_the_extra_is_named(cluster, monkeypatch, tmp_path, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    assert t1_step_time.main(["--quick", "--out-dir", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "expected PyTorch to compare with" in line
    assert "pip install 'fdp[bench]'" in line
    assert cluster.made == []


def fake_rank(code, complete):
    """A run of benchmarks.rank that writes its result and ends with this code."""

    def run(command):
        made = result({"torch:cap=25,view=on": 4.0, "fdp:cap=4,window=1": 7.0}) | {
            "complete": complete
        }
        Path(command[command.index("--out") + 1]).write_text(json.dumps(made))
        return code

    return run


@pytest.fixture
def torch_is_there(monkeypatch):
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: object())


def test_rounds_of_a_run_that_failed_are_kept(cluster, torch_is_there, tmp_path, capsys):
    cluster.outcomes = [fake_rank(1, complete=False)]
    assert t1_step_time.main(["--quick", "--out-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "expected -m benchmarks.rank to succeed on 2 ranks, got exit code 1" in error
    assert "t1_step_time_mlp.json, marked incomplete" in error
    kept = json.loads((tmp_path / "t1_step_time_mlp.json").read_text())
    assert kept["complete"] is False
    assert kept["compared"]["fdp_over_torch"] == 1.75
    assert not (tmp_path / "t1_step_time_mlp.png").exists()


@pytest.mark.parametrize(("stopped", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_rounds_of_a_run_that_was_stopped_are_kept(
    stopped, code, cluster, torch_is_there, tmp_path
):
    write = fake_rank(0, complete=False)

    def run(command):
        write(command)
        raise stopped

    cluster.outcomes = [run]
    try:
        got = t1_step_time.main(["--quick", "--out-dir", str(tmp_path)])
    except SystemExit as exit_:
        got = exit_.code
    assert got == code
    assert json.loads((tmp_path / "t1_step_time_mlp.json").read_text())["complete"] is False


def test_a_run_is_saved_and_can_be_drawn_again(cluster, torch_is_there, tmp_path):
    cluster.outcomes = [fake_rank(0, complete=True)]
    assert t1_step_time.main(["--quick", "--out-dir", str(tmp_path)]) == 0
    saved, picture = (tmp_path / f"t1_step_time_mlp.{end}" for end in ("json", "png"))
    made = json.loads(saved.read_text())
    assert made["complete"] is made["quick"] is True
    assert str(tmp_path) not in saved.read_text()
    before, shown = saved.read_bytes(), picture.read_bytes()
    picture.unlink()
    again = ["--draw-only", "--quick", "--model", "mlp", "--out-dir", str(tmp_path)]
    assert t1_step_time.main(again) == 0
    assert picture.read_bytes() == shown
    assert saved.read_bytes() == before


def test_lesser_results_do_not_replace_better_ones(tmp_path):
    def save(**what):
        return files.save("x", {"machine": None, **what}, None, tmp_path).name

    assert save(quick=True) == "x.json"
    assert save(complete=False) == "x.json"
    assert save() == "x.json"
    assert save(complete=False) == "x_partial.json"
    assert save(quick=True) == "x_quick.json"
    assert save() == "x.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x_quick.json"]


def test_options_replace_what_a_setting_says():
    made = runs.parser("x", "doc")
    args = made.parse_args(["--model", "mlp:widths=8x3", "--rate", "1gbit", "--rounds", "9"])
    found = settings.chosen(args.model, args)
    assert found[:4] == ("mlp:widths=8x3", 1024, "1gbit", 9)
    assert settings.chosen("mlp", made.parse_args(["--quick"])) == settings.QUICK["mlp"]
    assert settings.names(made.parse_args(["--quick"]), ("mlp", "resnet50")) == ("mlp",)


def test_a_rate_that_was_asked_for_does_not_replace_the_figure_at_the_usual_one():
    assert settings.file_of("fig06", "mlp:widths=8x3", None) == "fig06_mlp"
    assert settings.file_of("fig06", "mlp:widths=8x3", "700mbit") == "fig06_mlp_700mbit"
    assert settings.file_of("fig06", "mlp", "700mbit", True) == "fig06_mlp_700mbit_emulated"
    assert settings.file_of("fig06", "mlp", None, True) == "fig06_mlp_emulated"
