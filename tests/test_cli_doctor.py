"""`fdp doctor`, `fdp launch` and `fdp bench`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from click.testing import CliRunner

import fdp
from fdp.cli import benches, doctor, installed
from fdp.cli.app import program
from fdp.options import CompilerOption

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What a program may change is put back, and nothing here is a cluster's."""
    clean = {k: v for k, v in os.environ.items() if k not in (*doctor._STARTED_AS, "NPROC")}
    monkeypatch.setattr(os, "environ", clean)


def by_name(found):
    return {check["name"]: check for check in found["checks"]}


def test_all_is_well():
    got = CliRunner().invoke(program, ["doctor", "--json"])
    assert got.exit_code == 0, got.output
    found = json.loads(got.stdout)
    assert found["ok"]
    assert (found["platform"], len(found["devices"]), found["processes"]) == ("cpu", 8, 1)
    assert found["versions"]["jax"] == jax.__version__
    assert found["compiler_options"] == fdp.suggested_compiler_options("cpu")
    assert found["unknown_compiler_options"] == []
    text = CliRunner().invoke(program, ["doctor"]).stdout
    assert text.endswith("What fdp needs works.\n")
    assert "\x1b" not in text
    for name, check in by_name(found).items():
        assert name in text
        assert check["text"] in text


@pytest.mark.parametrize(
    ("nproc", "devices", "status", "says"),
    [
        ("31", 8, "warning", "Set NPROC=32"),
        ("32", 8, "ok", "32 in XLA's CPU pool (NPROC)"),
        ("1", 1, "warning", "nothing overlaps. Set NPROC=2"),
        ("2", 1, "ok", "2 in XLA's CPU pool"),
        ("7", 2, "warning", "for 2 CPU devices in one process: fewer than 4 for each"),
        ("8", 2, "ok", "8 in XLA's"),
    ],
)
def test_threads(monkeypatch, nproc, devices, status, says):
    chosen = jax.devices()[:devices]
    monkeypatch.setattr(jax, "devices", lambda: chosen)
    found = doctor.examine({"NPROC": nproc})
    check = by_name(found)["threads"]
    assert found["threads"] == int(nproc)
    assert check["status"] == status
    assert says in check["text"]
    # A collective is tried where it cannot hang.
    tried = by_name(found)["computes"]["text"]
    whole = devices > 1 and status == "ok"
    assert tried == (
        f"an all-reduce over {devices} devices is right"
        if whole
        else "a sum on one device is right"
    )
    assert found["ok"]  # a warning is no failure


def test_without_nproc_the_cores_count(monkeypatch):
    monkeypatch.setattr(doctor, "available_cores", lambda: 5)
    assert doctor.examine({})["threads"] == 5


def test_processes_that_are_not_connected():
    check = by_name(doctor.examine({"SLURM_NTASKS": "4"}))["processes"]
    assert check["status"] == "note"
    assert "SLURM_NTASKS says 4" in check["text"]
    assert "fdp.launch.initialize()" in check["text"]
    assert by_name(doctor.examine({"SLURM_NTASKS": "1"}))["processes"]["status"] == "ok"


def test_jax_that_does_not_start_is_a_failure(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda': no GPU\nand more")

    monkeypatch.setattr(jax, "devices", fail)
    got = CliRunner().invoke(program, ["doctor", "--json"])
    assert got.exit_code == 1
    found = json.loads(got.stdout)
    assert not found["ok"]
    assert by_name(found)["devices"]["text"].endswith("backend 'cuda': no GPU")
    assert CliRunner().invoke(program, ["doctor"]).stdout.endswith("Will not work: devices.\n")


def test_options_that_the_compiler_does_not_know_are_named(monkeypatch):
    rows = [
        CompilerOption(f"xla_{n}", "1", p, "always", "", ())
        for n, p in (("nobody", "cpu"), ("other", "tpu"))
    ]
    monkeypatch.setattr(doctor, "OPTIONS", (*doctor.OPTIONS, *rows))
    found = doctor.examine({"XLA_FLAGS": "--xla_something=1"})
    assert found["unknown_compiler_options"] == ["xla_nobody"]
    texts = [check["text"] for check in found["checks"] if check["status"] == "warning"]
    assert any("does not know xla_nobody" in text for text in texts)
    assert by_name(found)["XLA_FLAGS"]["text"].endswith("--xla_something=1")


def test_an_accelerator_that_jax_does_not_use(monkeypatch, tmp_path):
    found_at = tmp_path / "driver"
    rows = (("an NVIDIA GPU", "gpu", str(found_at), "'jax[cuda13]=={jax}'"),)
    monkeypatch.setattr(doctor, "_ACCELERATORS", rows)
    assert "gpu" not in by_name(doctor.examine({}))
    found_at.touch()
    check = by_name(doctor.examine({}))["gpu"]
    assert check["status"] == "warning"
    assert check["text"].endswith(f"pip install 'jax[cuda13]=={jax.__version__}'")


def test_missing_extras_are_notes_that_name_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checks = {check.name: check for check in installed.check_extras()}
    assert {"matplotlib", "libtpu", "cuda plugin", "torch"} <= checks.keys()
    assert all(check.status == "note" for check in checks.values())
    assert "pip install 'fdp[plot]'" in checks["matplotlib"].text
    assert f"'jax[tpu]=={jax.__version__}'" in checks["libtpu"].text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert all(check.status == "ok" for check in installed.check_extras())


@pytest.mark.parametrize(
    ("version", "limits", "fits"),
    [
        ("0.10.2", ">=0.10,<0.13", True),
        ("0.9.9", ">=0.10,<0.13", False),
        ("0.13", ">=0.10,<0.13", False),
        ("0.12.0.1", "<0.13,>=0.10", True),
        ("2.4.0.dev1+cpu", ">=2.0", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, limits, fits):
    assert installed.satisfies(version, limits) is fits


def test_versions_that_fdp_does_not_work_with(monkeypatch):
    limits = ["jax>=0.10,<0.13", "optax >=0.2.6", 'click>=8.2; extra == "cli"']
    monkeypatch.setattr(installed.metadata, "requires", lambda name: limits)
    found = {
        "python": "3.11",
        "fdp": "0.1.0",
        "jax": "0.13.1",
        "jaxlib": "1",
        "flax": "1",
        "numpy": "1",
    }
    checks = {c.name: c for c in installed.check_versions({**found, "optax": None})}
    failing = {name for name, check in checks.items() if check.status == "fails"}
    assert failing == {"jax", "optax"}
    assert checks["jax"].text == "0.13.1, and fdp needs >=0.10,<0.13: pip install 'jax>=0.10,<0.13'"
    assert checks["optax"].text == "not installed: pip install 'optax>=0.2.6'"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    (folder / "many").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "helper.py").write_text("x = 1\n")
    (folder / "many" / "__main__.py").touch()
    source = 'import sys\nif __name__ == "__main__":\n    sys.exit(len(sys.argv))\n'
    (folder / "count.py").write_text(source)
    monkeypatch.chdir(tmp_path)


def test_bench_ends_with_the_code_of_the_benchmark(clone):
    got = CliRunner().invoke(program, ["bench", "count", "--quick", "-n", "3"])
    assert got.exit_code == 4


def test_bench_of_another_name(clone):
    got = CliRunner().invoke(program, ["bench", "nobody"])
    assert got.exit_code == 2
    assert got.stderr == "fdp: expected one of count, many, got 'nobody'.\n"


def test_bench_without_a_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benches, "__file__", str(tmp_path / "lib" / "fdp" / "cli" / "benches.py"))
    got = CliRunner().invoke(program, ["bench", "tracing"])
    assert got.exit_code == 3
    assert got.stderr.count("\n") == 1
    assert "clone fdp's repository and run fdp bench in the clone" in got.stderr


def test_launch_keeps_prefixes_arguments_and_exit_codes(tmp_path):
    script = tmp_path / "script.py"
    # Rank 1 fails when rank 0 has said its line: a failure stops the others.
    script.write_text(
        "import os, pathlib, sys, time\n"
        "rank = int(os.environ['FDP_PROCESS_ID'])\n"
        "said = pathlib.Path(__file__).with_name('said')\n"
        "while rank and not said.exists():\n"
        "    time.sleep(0.01)\n"
        "print(rank, sys.argv[1:], flush=True)\n"
        "said.touch()\n"
        "sys.exit(7 * rank)\n"
    )
    command = [sys.executable, "-m", "fdp", "launch", "-n", "2", str(script), "--help", "-n", "3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    got = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert got.returncode == 7
    assert "[0] 0 ['--help', '-n', '3']" in got.stdout
    assert "[1] 1 ['--help', '-n', '3']" in got.stdout
    assert "fdp.launch: " in got.stderr
